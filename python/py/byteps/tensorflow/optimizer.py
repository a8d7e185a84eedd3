"""Gradients that are averaged over all ranks: those of tapes, and of optimizers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from byteps import _registry
from byteps._operations import Average, ReduceOp, Sum
from byteps.errors import ConfigError
from byteps.tensorflow import ops
from byteps.tensorflow.compression import Compression

__all__ = ["DistributedGradientTape", "DistributedOptimizer"]

# Where a variable keeps its gradient's name, which then lasts as long as it does.
_NAME = "_byteps_gradient_name"


def check_op(op: Any) -> None:
    """Raises for what gradients are not reduced by."""
    if op not in (Average, Sum):
        raise ConfigError(f"op={op!r}: gradients are averaged or summed (Average, Sum)")


def _name_of(source: Any, index: int) -> str:
    """A name for the gradient of a variable, by the order in which gradients were first exchanged.

    Names of variables need not differ, nor do those of different models in a process.
    """
    known: str | None = getattr(source, _NAME, None)
    if known is None:
        if not hasattr(source, "assign"):
            return f"Gradient.of_tensor.{index}"
        number = _registry.count_up("tensorflow.gradient")
        known = f"Gradient.{number}.{source.name}"
        setattr(source, _NAME, known)
    return known


def exchanged(
    gradients: Sequence[Any], sources: Sequence[Any], compression: Any, op: Any, process_set: Any
) -> list[Any]:
    """These gradients reduced over all ranks, None where there is none."""
    gradients = list(gradients)
    there = [index for index, one in enumerate(gradients) if one is not None]
    # All have names, also those that have no gradient now: ranks may differ in which come first.
    names = [_name_of(source, index) for index, source in enumerate(sources)]
    results = ops.push_pull_group(
        [gradients[index] for index in there],
        [names[index] for index in there],
        None,
        compression,
        op,
        process_set=process_set,
    )
    for index, result in zip(there, results, strict=True):
        gradients[index] = result
    return gradients


def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = Average,
    process_set: Any = None,
) -> Any:
    """A ``tf.GradientTape`` whose ``gradient`` averages over all ranks.

    Inside ``tf.function`` each gradient is sent as soon as it is computed. ``tf.IndexedSlices`` are
    exchanged as dense tensors, whatever ``sparse_as_dense`` says; ``device_dense`` and
    ``device_sparse`` are not used. ``op`` is ``Average`` or ``Sum``.
    """
    del device_dense, device_sparse, sparse_as_dense
    check_op(op)
    base = type(gradtape)

    def gradient(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        own = base.gradient(self, target, sources, *args, **kwargs)
        # Slices are one gradient each, not two tensors.
        flat = tf.nest.flatten(own, expand_composites=False)
        averaged = exchanged(flat, tf.nest.flatten(sources), compression, op, process_set)
        return tf.nest.pack_sequence_as(own, averaged)

    tape = copy.copy(gradtape)  # Both record what is watched; only the new one averages.
    tape.__class__ = type(base.__name__, (base,), {"gradient": gradient})
    return tape


class _DistributedOptimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """An optimizer of ``tf.compat.v1.train`` whose ``compute_gradients`` averages."""

    def __init__(
        self, optimizer: Any, name: str, use_locking: bool, compression: Any, op: Any, members: Any
    ) -> None:
        super().__init__(use_locking=use_locking, name=name)
        self._optimizer = optimizer
        self._compression, self._reduction, self._members = compression, op, members

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Those of the optimizer, averaged over all ranks."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        gradients = [gradient for gradient, _ in pairs]
        variables = [variable for _, variable in pairs]
        averaged = exchanged(
            gradients, variables, self._compression, self._reduction, self._members
        )
        return list(zip(averaged, variables, strict=True))

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """As the optimizer does."""
        return self._optimizer.apply_gradients(*args, **kwargs)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """As the optimizer does."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """As the optimizer does."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """As the optimizer does."""
        return self._optimizer.variables(*args, **kwargs)


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    process_set: Any = None,
) -> Any:
    """An optimizer that averages gradients over all ranks before it applies them.

    Args:
        optimizer: One of ``tf.compat.v1.train``, or a Keras optimizer, for which this is
            :func:`byteps.tensorflow.keras.DistributedOptimizer`.
        name: That of the new optimizer.
        use_locking: As ``tf.compat.v1.train.Optimizer`` has it.
        device_dense, device_sparse, sparse_as_dense: Not used: gradients are exchanged as dense
            tensors, from host memory.
        compression: One of :class:`Compression`.
        backward_passes_per_step: 1. Keras optimizers accumulate by ``gradient_accumulation_steps``.
        op: ``Average`` or ``Sum``.
        process_set: A :class:`~byteps.common.ProcessSet` of the ranks that take part.
    """
    check_op(op)
    if backward_passes_per_step != 1:
        raise ConfigError(
            f"backward_passes_per_step={backward_passes_per_step}: gradients are exchanged at each "
            "step; give a Keras optimizer gradient_accumulation_steps in its place"
        )
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        chosen = name or f"Distributed{type(optimizer).__name__}"
        return _DistributedOptimizer(optimizer, chosen, use_locking, compression, op, process_set)
    if isinstance(optimizer, tf.keras.optimizers.Optimizer):
        # Nothing else here needs Keras.
        from byteps.tensorflow import keras

        return keras.DistributedOptimizer(
            optimizer, name, compression=compression, op=op, process_set=process_set
        )
    raise ConfigError(
        f"DistributedOptimizer({type(optimizer).__name__}): an optimizer of tf.compat.v1.train or "
        "of Keras is wanted"
    )
