"""Keras optimizers that average gradients, and models that are loaded with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from byteps import _registry
from byteps._operations import Average, ReduceOp, Sum
from byteps.errors import ConfigError
from byteps.keras import _exchange

__all__ = ["DistributedOptimizer", "load_model"]

Compression = _exchange.framework.Compression


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = None,
) -> Any:
    """The optimizer, which from now on averages gradients over all ranks before it applies them.

    It keeps its state and settings. Its class is a subclass of its former one, of the same name, so
    models are saved as before and load without byteps. Gradients are exchanged in each call of
    ``apply``, also where ``gradient_accumulation_steps`` applies several at once. Around a
    ``LossScaleOptimizer`` the ranks agree about which steps overflow.

    Args:
        optimizer: One of Keras's. Where one wraps another, pass the outermost.
        name: What the gradients' names begin with. Without it optimizers are numbered in the order
            in which they are distributed, which must then be the same on all ranks.
        device_dense, device_sparse: Not used: gradients are sent from host memory.
        compression: One of :class:`byteps.keras.Compression`, for dense gradients.
        sparse_as_dense: Exchange sparse gradients as dense ones. Without it TensorFlow's stay
            sparse (:func:`byteps.tensorflow.sparse_push_pull`); other back ends have none.
        op: ``Average`` or ``Sum``.
        gradient_predivide_factor: Dense gradients are divided by it before they are sent, and
            averages multiplied by it.
        num_groups, groups: Not used: tensors are sent as they come.
        process_set: A :class:`~byteps.common.ProcessSet` of the ranks that average among
            themselves. On a rank that is none of them gradients stay as they are.
    """
    del device_dense, device_sparse, num_groups, groups
    legacy = keras.optimizers.legacy.Optimizer if _exchange.IS_KERAS_2 else ()
    if not isinstance(optimizer, (keras.optimizers.Optimizer, legacy)):
        raise ConfigError(
            f"DistributedOptimizer({type(optimizer).__name__}): an optimizer of Keras "
            f"{keras.__version__} is wanted, as keras.optimizers.Adam(1e-3)"
        )
    if getattr(optimizer, "is_distributed_by_byteps", False):
        raise ConfigError(
            "DistributedOptimizer: this optimizer is distributed already, and would exchange twice"
        )
    if op not in (Average, Sum):
        raise ConfigError(f"op={op!r}: gradients are averaged or summed (Average, Sum)")
    factor = gradient_predivide_factor
    if factor != 1.0 and (op != Average or not factor > 0):
        raise ConfigError(
            f"gradient_predivide_factor={factor} with op={op!r}: it is a positive number, and for "
            "averages"
        )
    if name is None:
        number = _registry.count_up("keras.DistributedOptimizer")
        name = f"Gradient.{number}" if number else "Gradient"

    def exchanged(gradients: Sequence[Any]) -> list[Any]:
        names = [f"{name}.{index}" for index in range(len(gradients))]
        return _exchange.reduced_gradients(
            gradients, names, compression, op, process_set, sparse_as_dense, factor
        )

    make = _distributed_2 if _exchange.IS_KERAS_2 else _distributed
    # Around another, some pass on what is set.
    object.__setattr__(optimizer, "__class__", make(type(optimizer), exchanged))
    return optimizer


def _distributed(base: Any, exchanged: Callable[[Sequence[Any]], list[Any]]) -> Any:
    """A subclass that exchanges gradients once, whichever method it is called by."""
    is_exchanged = False

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if not is_exchanged:
            grads = exchanged(grads)
        return base.apply(self, grads, trainable_variables)

    def stateless_apply(
        self: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> Any:
        nonlocal is_exchanged
        averaged = exchanged(grads)
        is_exchanged = True  # It may call `apply`.
        try:
            return base.stateless_apply(self, optimizer_variables, averaged, trainable_variables)
        finally:
            is_exchanged = False

    return _subclass(base, apply=apply, stateless_apply=stateless_apply)


def _distributed_2(base: Any, exchanged: Callable[[Sequence[Any]], list[Any]]) -> Any:
    """The same of Keras 2, where one method is below all others."""

    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        averaged = exchanged([gradient for gradient, _ in pairs])
        again = [(mean, variable) for mean, (_, variable) in zip(averaged, pairs, strict=True)]
        return base.apply_gradients(self, again, *args, **kwargs)

    return _subclass(base, apply_gradients=apply_gradients)


def _subclass(base: Any, **methods: Any) -> Any:
    # Saved models name class and module.
    own = {"is_distributed_by_byteps": True, "__module__": base.__module__, "__doc__": base.__doc__}
    return type(base.__name__, (base,), methods | own)


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[Any] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
) -> Any:
    """``keras.saving.load_model`` of a model whose optimizer then is a DistributedOptimizer.

    Args:
        filepath: Of a model that was saved with a DistributedOptimizer, or without.
        custom_optimizers: Classes of optimizers that are not Keras's own.
        custom_objects: What else Keras has to know to load it.
        compression: One of :class:`byteps.keras.Compression`.
    """
    known = {one.__name__: one for one in custom_optimizers or ()} | (custom_objects or {})
    model = keras.saving.load_model(filepath, custom_objects=known)
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model
