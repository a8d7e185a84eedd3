"""Keras optimizers that average gradients, and models that are loaded with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from byteps import _process_sets, _registry
from byteps._backups import Backups
from byteps._operations import Average, ReduceOp, Sum
from byteps.errors import ConfigError
from byteps.keras import _exchange, _which
from byteps.keras._which import keras

__all__ = ["DistributedOptimizer", "PartialDistributedOptimizer", "load_model"]

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
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    scale_local_gradients: bool = True,
    backup_workers: int | None = None,
) -> Any:
    """The optimizer, which from now on averages gradients over all ranks before it applies them.

    It keeps its state and settings. Its class is a subclass of its former one, of the same name, so
    models are saved as before and load without byteps. With ``gradient_accumulation_steps``
    gradients are exchanged once they have been added up. Around a ``LossScaleOptimizer`` they are
    exchanged in each step, and the ranks agree about which of them overflow.

    Args:
        optimizer: One of Keras's. Where one wraps another, pass the outermost.
        name: What the gradients' names begin with. Without it optimizers are numbered in the order
            in which they are distributed, which must then be the same on all ranks.
        device_dense, device_sparse: Not used: gradients are sent from host memory.
        compression: One of :class:`byteps.keras.Compression`, for dense gradients.
        sparse_as_dense: Exchange sparse gradients as dense ones. Without it TensorFlow's stay
            sparse (:func:`byteps.tensorflow.sparse_push_pull`), unless several are added up; other
            back ends have none.
        op: ``Average`` or ``Sum``.
        gradient_predivide_factor: Dense gradients are divided by it before they are sent, and
            averages multiplied by it.
        num_groups, groups: Not used: tensors are sent as they come.
        process_set: A :class:`~byteps.common.ProcessSet` of the ranks that average among
            themselves. On a rank that is none of them gradients stay as they are.
        backward_passes_per_step: How many batches make a step. Keras 3 is told so as
            ``gradient_accumulation_steps``, which is saved with the model. Not for optimizers that
            are built already.
        average_aggregated_gradients: Whether the gradients of these batches are averaged; else they
            are added up.
        scale_local_gradients: Whether gradients of variables that are a rank's own are divided by
            the number of ranks: ``optimizer.register_local_var(variable)`` says so of one, whose
            gradient then is not exchanged.
        backup_workers: For how many of the slowest ranks no average of dense gradients waits
            (docs/stragglers.md): it is then of the others, and the ranks that are late get the
            same. As ``BPS_BACKUP_WORKERS`` says where it is None, for what may be so; 0 waits for
            all.
    """
    if backup_workers is not None:
        Backups.asked(backup_workers)
    del device_dense, device_sparse, num_groups, groups
    _check(optimizer)
    if op not in (Average, Sum):
        raise ConfigError(f"op={op!r}: gradients are averaged or summed (Average, Sum)")
    factor = gradient_predivide_factor
    if factor != 1.0 and (op != Average or not factor > 0):
        raise ConfigError(
            f"gradient_predivide_factor={factor} with op={op!r}: it is a positive number, and for "
            "averages"
        )
    passes = backward_passes_per_step
    if not isinstance(passes, int) or passes < 1:
        raise ConfigError(
            f"backward_passes_per_step={passes!r}: how many passes make a step, 1 or more"
        )
    if passes > 1 and not _exchange.IS_KERAS_2:
        _accumulate(optimizer, passes)
    if name is None:
        number = _registry.count_up("keras.DistributedOptimizer")
        name = f"Gradient.{number}" if number else "Gradient"
    # Of what Keras 3 has added up it makes an average.
    whole = 1 if average_aggregated_gradients or _exchange.IS_KERAS_2 else passes

    def reduced(gradients: Sequence[Any], names: Sequence[str]) -> list[Any]:
        means = _exchange.reduced_gradients(
            *(gradients, names, compression, op, process_set, sparse_as_dense, factor),
            backup_workers,
        )
        return [_exchange.scaled(one, whole) for one in means]

    gradients = _Gradients(name, reduced, scale_local_gradients, process_set)
    if _exchange.IS_KERAS_2:
        made = _distributed_2(type(optimizer), gradients, passes, average_aggregated_gradients)
    else:
        made = _distributed(type(optimizer), gradients)
    # Around another, some pass on what is set.
    object.__setattr__(optimizer, "__class__", made)
    return optimizer


def PartialDistributedOptimizer(
    optimizer: Any, *arguments: Any, local_layers: Any = None, **options: Any
) -> Any:
    """:func:`DistributedOptimizer` for models of which some layers are a rank's own.

    Args:
        optimizer, arguments, options: As of :func:`DistributedOptimizer`.
        local_layers: A layer, or several, whose gradients are not exchanged; they are built.
    """
    distributed = DistributedOptimizer(optimizer, *arguments, **options)
    several = local_layers if isinstance(local_layers, (list, tuple, set)) else [local_layers]
    for layer in several:
        if layer is None:
            continue
        if not getattr(layer, "built", False):
            raise ConfigError(
                f"local_layers has {layer!r}: layers of Keras are wanted, which are built: call "
                "model.build(input_shape) before"
            )
        for variable in layer.trainable_weights:
            distributed.register_local_var(variable)
    return distributed


def _check(optimizer: Any) -> None:
    """Raises for what is no optimizer, or one that exchanges already."""
    legacy = keras.optimizers.legacy.Optimizer if _exchange.IS_KERAS_2 else ()
    if not isinstance(optimizer, (keras.optimizers.Optimizer, legacy)):
        raise ConfigError(
            f"DistributedOptimizer({type(optimizer).__name__}): an optimizer of Keras "
            f"{keras.__version__} is wanted, as keras.optimizers.Adam(1e-3){_which.hint(optimizer)}"
        )
    if getattr(optimizer, "is_distributed_by_byteps", False):
        raise ConfigError(
            "DistributedOptimizer: this optimizer is distributed already, and would exchange twice"
        )


def _accumulate(optimizer: Any, passes: int) -> None:
    """Lets an optimizer of Keras 3 add up so many gradients."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    if not hasattr(optimizer, "gradient_accumulation_steps"):
        raise ConfigError(
            f"backward_passes_per_step={passes}: Keras {keras.__version__} adds up no gradients: "
            "install Keras 3.3 or later"
        )
    if optimizer.built or optimizer.gradient_accumulation_steps:
        state = "is built" if optimizer.built else "has gradient_accumulation_steps"
        raise ConfigError(
            f"backward_passes_per_step={passes}: this optimizer {state} already: distribute a new "
            "one, without"
        )
    optimizer.gradient_accumulation_steps = passes


class _Gradients:
    """How an optimizer exchanges its gradients, and which are a rank's own."""

    def __init__(
        self,
        name: str,
        reduced: Callable[[Sequence[Any], Sequence[str]], list[Any]],
        scale_local: bool,
        process_set: Any,
    ) -> None:
        self._name, self._reduced = name, reduced
        self._scale_local, self._process_set = scale_local, process_set
        self._local: set[int] = set()
        self._kept: list[Any] = []  # What is known by its address has to live.

    def register_local(self, variable: Any) -> None:
        """The gradient of this variable is the rank's own."""
        self._local.add(id(variable))
        self._kept.append(variable)

    def exchanged(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """These gradients reduced over all ranks, None where there is none."""
        results = list(gradients)
        of = list(variables) if self._local else [None] * len(results)
        shared = [index for index, one in enumerate(of) if id(one) not in self._local]
        names = [f"{self._name}.{number}" for number in range(len(shared))]
        means = self._reduced([results[index] for index in shared], names)
        if self._scale_local and len(shared) < len(results):
            share = _process_sets.share(self._process_set)
            results = [_exchange.scaled(one, share) for one in results]
        for index, mean in zip(shared, means, strict=True):
            results[index] = mean
        return results


def _distributed(base: Any, gradients: _Gradients) -> Any:
    """A subclass that exchanges gradients once, whichever method it is called by."""
    is_exchanged = False
    #: Of the gradients that are added up: their variables, and those among them that have one.
    added: tuple[list[Any], list[int]] = [], []

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        nonlocal added
        grads = list(grads)
        of = self._trainable_variables if trainable_variables is None else trainable_variables
        of = list(of)
        if _accumulates(self):
            # Keras overwrites some variables in each step, and adds up the rest.
            now = [index for index, one in enumerate(of) if _is_overwritten(one)]
            found = [index for index, one in enumerate(grads) if one is not None]
            added = of, [index for index in found if index not in now]
            wanted = [one if index in now else None for index, one in enumerate(grads)]
            if any(one is not None for one in wanted):
                grads = _either(gradients.exchanged(wanted, of), grads)
        elif not is_exchanged:
            grads = gradients.exchanged(grads, of)
        return base.apply(self, grads, trainable_variables)

    def _clip_gradients(self: Any, grads: Any) -> Any:
        """What Keras calls before it applies gradients: those that were added up, too."""
        if _accumulates(self):
            grads = _exchange.where_due(self, list(grads), lambda: exchanged_sums(grads))
        return base._clip_gradients(self, grads)

    def exchanged_sums(sums: Sequence[Any]) -> list[Any]:
        of, there = added
        sent: list[Any] = [None] * len(of)
        for index, one in zip(there, sums, strict=True):
            sent[index] = one
        means = gradients.exchanged(sent, of)
        return [means[index] for index in there]

    def stateless_apply(
        self: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> Any:
        nonlocal is_exchanged
        if _accumulates(self):
            return base.stateless_apply(self, optimizer_variables, grads, trainable_variables)
        averaged = gradients.exchanged(grads, self._trainable_variables)
        is_exchanged = True  # It may call `apply`.
        try:
            return base.stateless_apply(self, optimizer_variables, averaged, trainable_variables)
        finally:
            is_exchanged = False

    return _subclass(
        base,
        gradients,
        apply=apply,
        stateless_apply=stateless_apply,
        _clip_gradients=_clip_gradients,
    )


def _accumulates(optimizer: Any) -> bool:
    return bool(getattr(optimizer, "gradient_accumulation_steps", None))


def _is_overwritten(variable: Any) -> bool:
    return bool(getattr(variable, "overwrite_with_gradient", False))


def _either(some: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    return [other if one is None else one for one, other in zip(some, others, strict=True)]


def _distributed_2(base: Any, gradients: _Gradients, count: int, average: bool) -> Any:
    """The same of Keras 2, where one method is below all others."""
    passes = None
    if count > 1:
        from byteps.tensorflow import _passes

        passes = _passes.Passes(count, average)

    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        own, of = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
        if passes is None:
            again = zip(gradients.exchanged(own, of), of, strict=True)
            return base.apply_gradients(self, list(again), *args, **kwargs)
        there = [variable for gradient, variable in pairs if gradient is not None]
        sums = passes.added(own, of, lambda sums: gradients.exchanged(sums, there))
        again = zip(sums, of, strict=True)
        return passes.step(
            lambda: base.apply_gradients(self, list(again), *args, **kwargs), sums, lambda: None
        )

    return _subclass(base, gradients, apply_gradients=apply_gradients)


def _subclass(base: Any, gradients: _Gradients, **methods: Any) -> Any:
    def register_local_var(self: Any, variable: Any) -> None:
        """The gradient of this variable is the rank's own, and is not exchanged."""
        del self
        gradients.register_local(variable)

    # Saved models name class and module.
    own = {"is_distributed_by_byteps": True, "__module__": base.__module__, "__doc__": base.__doc__}
    own["register_local_var"] = register_local_var
    return type(base.__name__, (base,), methods | own)


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[Any] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    backup_workers: int | None = None,
) -> Any:
    """``keras.saving.load_model`` of a model whose optimizer then is a DistributedOptimizer.

    Args:
        filepath: Of a model that was saved with a DistributedOptimizer, or without.
        custom_optimizers: Classes of optimizers that are not Keras's own.
        custom_objects: What else Keras has to know to load it.
        compression, backup_workers: As of :func:`DistributedOptimizer`.
    """
    known = {one.__name__: one for one in custom_optimizers or ()} | (custom_objects or {})
    model = keras.saving.load_model(filepath, custom_objects=known)
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(
            model.optimizer, compression=compression, backup_workers=backup_workers
        )
    return model
