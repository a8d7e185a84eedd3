"""Gradients that are averaged over all ranks: those of tapes, and of optimizers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from byteps import _backups, _process_sets, _registry
from byteps._operations import Average, ReduceOp, Sum
from byteps.errors import ConfigError
from byteps.tensorflow import ops, sparse
from byteps.tensorflow._passes import Passes
from byteps.tensorflow.compression import Compression

__all__ = [
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
]

# Where a variable keeps its gradient's name, which then lasts as long as it does.
_NAME = "_byteps_gradient_name"


def check_op(op: Any) -> None:
    """Raises for what gradients are not reduced by."""
    if op not in (Average, Sum):
        raise ConfigError(f"op={op!r}: gradients are averaged or summed (Average, Sum)")


def check_passes(passes: int) -> None:
    """Raises for what is no number of backward passes."""
    if not isinstance(passes, int) or passes < 1:
        raise ConfigError(
            f"backward_passes_per_step={passes!r}: how many passes make a step, 1 or more"
        )


def check_factor(factor: float, op: Any) -> None:
    """Raises for what gradients cannot be divided by on their way."""
    if factor != 1.0 and (op != Average or not factor > 0):
        raise ConfigError(
            f"gradient_predivide_factor={factor} with op={op!r}: it is a positive number, and for "
            "averages"
        )


def check_backups(workers: int | None) -> None:
    """Raises for what is no number of backup workers."""
    if workers is not None:
        _backups.number_of(workers)


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


class How(NamedTuple):
    """How gradients are exchanged."""

    compression: Any = Compression.none
    op: ReduceOp = Average
    process_set: Any = None
    sparse_as_dense: bool = False
    predivide_factor: float = 1.0
    backup_workers: int | None = None


def exchanged(gradients: Sequence[Any], sources: Sequence[Any], how: How) -> list[Any]:
    """These gradients reduced over all ranks, None where there is none."""
    # All have names, also those that have no gradient now: ranks may differ in which come first.
    names = [_name_of(source, index) for index, source in enumerate(sources)]
    return reduced(gradients, names, how)


def reduced(gradients: Sequence[Any], names: Sequence[str], how: How) -> list[Any]:
    """The same of gradients with names: dense ones, and slices, all under way together.

    On a rank that is not in the process set they stay as they are.
    """
    results = list(gradients)
    # Asked anew each time: the set may have been added to a job that is over.
    members = _process_sets.added(how.process_set)
    if members is not None and not members.included():
        return results
    there = [index for index, one in enumerate(results) if one is not None]
    slices = (
        []
        if how.sparse_as_dense
        else [index for index in there if isinstance(results[index], tf.IndexedSlices)]
    )
    dense = [index for index in there if index not in slices]
    if slices:
        _backups.wait_for_all(
            how.backup_workers,
            "ranks gather each other's rows of sparse gradients: pass sparse_as_dense=True",
        )
    sent = [ops.scaled(results[index], 1.0 / how.predivide_factor) for index in dense]
    means = ops.push_pull_group(
        sent,
        [names[index] for index in dense],
        None,
        how.compression,
        how.op,
        process_set=members,
        backup_workers=how.backup_workers,
    )
    for index, mean in zip(dense, means, strict=True):
        results[index] = ops.scaled(mean, how.predivide_factor)
    gathered = sparse.sparse_push_pull_group(
        [results[index] for index in slices],
        [names[index] for index in slices],
        op=how.op,
        process_set=members,
    )
    for index, one in zip(slices, gathered, strict=True):
        results[index] = one
    return results


def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = None,
    scale_local_gradients: bool = True,
    backup_workers: int | None = None,
) -> Any:
    """A ``tf.GradientTape`` whose ``gradient`` averages over all ranks.

    Inside ``tf.function`` each gradient is sent as soon as it is computed.

    Args:
        gradtape: The tape; both record what is watched, and the new one averages.
        device_dense, device_sparse: Not used: tensors are sent from host memory.
        compression: One of :class:`Compression`, for dense gradients.
        sparse_as_dense: Exchange ``tf.IndexedSlices`` as dense tensors. Without it they stay
            slices: ranks gather each other's, uncompressed (:func:`sparse_push_pull`).
        op: ``Average`` or ``Sum``.
        gradient_predivide_factor: Dense gradients are divided by it before they are sent, and
            averages multiplied by it: for sums that would leave the range of what is sent.
        num_groups, groups: Not used: tensors are sent as they come.
        process_set: A :class:`~byteps.common.ProcessSet` of the ranks that average among
            themselves. On a rank that is none of them gradients stay as they are.
        scale_local_gradients: Whether gradients of sources that are a rank's own are divided by the
            number of ranks: ``tape.register_local_source(variable)`` says so of one, whose gradient
            then is not exchanged.
        backup_workers: For how many of the slowest ranks no average of dense gradients waits
            (docs/stragglers.md): it is then of the others, and the ranks that are late get the
            same. As ``BPS_BACKUP_WORKERS`` says where it is None, for what may be so; 0 waits for
            all.
    """
    del device_dense, device_sparse, num_groups, groups
    check_op(op)
    check_factor(gradient_predivide_factor, op)
    check_backups(backup_workers)
    how = How(
        *(compression, op, process_set, sparse_as_dense, gradient_predivide_factor),
        backup_workers=backup_workers,
    )
    base = type(gradtape)
    local: set[Any] = set()

    def gradient(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        own = base.gradient(self, target, sources, *args, **kwargs)
        # Slices are one gradient each, not two tensors.
        results = tf.nest.flatten(own, expand_composites=False)
        of = tf.nest.flatten(sources)
        shared = [index for index, source in enumerate(of) if _reference(source) not in local]
        means = exchanged(
            [results[index] for index in shared], [of[index] for index in shared], how
        )
        if scale_local_gradients and len(shared) < len(of):
            factor = _process_sets.share(process_set)
            results = [one if one is None else ops.scaled(one, factor) for one in results]
        for index, mean in zip(shared, means, strict=True):
            results[index] = mean
        return tf.nest.pack_sequence_as(own, results)

    def register_local_source(self: Any, source: Any) -> None:
        """The gradient of this variable is the rank's own."""
        del self
        local.add(_reference(source))

    tape = copy.copy(gradtape)  # Both record what is watched; only the new one averages.
    methods = {"gradient": gradient, "register_local_source": register_local_source}
    tape.__class__ = type(base.__name__, (base,), methods)
    return tape


def _reference(source: Any) -> Any:
    """What a source is known by: tensors and variables are not hashed. Keras 3's hold one."""
    held = getattr(source, "value", None)
    variable = held if isinstance(held, tf.Variable) else source
    return variable.ref() if hasattr(variable, "ref") else id(variable)


def PartialDistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = None,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    backup_workers: int | None = None,
) -> Any:
    """:func:`DistributedGradientTape` for models of which some layers are a rank's own.

    Args:
        gradtape, device_dense, device_sparse, compression, sparse_as_dense, op: As of
            :func:`DistributedGradientTape`, and so are the others that are not told here.
        local_layers: A layer of Keras, or several, whose gradients are not exchanged.
    """
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
        backup_workers,
    )
    for variable in local_variables(local_layers):
        tape.register_local_source(variable)
    return tape


def local_variables(layers: Any) -> list[Any]:
    """The variables of a layer, or of several, that have gradients."""
    if layers is None:
        return []
    several = layers if isinstance(layers, (list, tuple, set)) else [layers]
    for layer in several:
        if not hasattr(layer, "trainable_weights"):
            raise ConfigError(
                f"local_layers has a {type(layer).__name__}: layers of Keras are wanted"
            )
    return [variable for layer in several for variable in layer.trainable_weights]


class _DistributedOptimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """An optimizer of ``tf.compat.v1.train`` whose ``compute_gradients`` averages."""

    def __init__(
        self, optimizer: Any, name: str, use_locking: bool, how: How, passes: Passes | None
    ) -> None:
        super().__init__(use_locking=use_locking, name=name)
        self._optimizer, self._how, self._passes = optimizer, how, passes

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Those of the optimizer, averaged over all ranks."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        gradients = [gradient for gradient, _ in pairs]
        variables = [variable for _, variable in pairs]
        if self._passes is None:
            averaged = exchanged(gradients, variables, self._how)
        else:
            there = [one for one, own in zip(variables, gradients, strict=True) if own is not None]
            averaged = self._passes.added(
                gradients, variables, lambda sums: exchanged(sums, there, self._how)
            )
        return list(zip(averaged, variables, strict=True))

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> Any:
        """As the optimizer does, in the last pass of a step. Each pass counts as a global step."""
        pairs = list(grads_and_vars)

        def apply() -> Any:
            return self._optimizer.apply_gradients(pairs, global_step, name)

        if self._passes is None:
            return apply()

        def count() -> Any:
            return None if global_step is None else tf.compat.v1.assign_add(global_step, 1)

        return self._passes.step(apply, [gradient for gradient, _ in pairs], count)

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
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = None,
    backup_workers: int | None = None,
) -> Any:
    """An optimizer that averages gradients over all ranks before it applies them.

    Args:
        optimizer: One of ``tf.compat.v1.train``, or a Keras optimizer, for which this is
            :func:`byteps.tensorflow.keras.DistributedOptimizer`.
        name: That of the new optimizer.
        use_locking: As ``tf.compat.v1.train.Optimizer`` has it.
        device_dense, device_sparse, compression, sparse_as_dense: As of
            :func:`DistributedGradientTape`.
        backward_passes_per_step: How many passes make a step: their gradients are added up, as
            dense tensors, and exchanged and applied in the last one.
        op: ``Average`` or ``Sum``.
        average_aggregated_gradients: Whether what is added up is divided by the number of passes.
        gradient_predivide_factor, num_groups, groups, process_set, backup_workers: As of
            :func:`DistributedGradientTape`.
    """
    del device_dense, device_sparse, num_groups, groups
    check_op(op)
    check_backups(backup_workers)
    check_factor(gradient_predivide_factor, op)
    check_passes(backward_passes_per_step)
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        chosen = name or f"Distributed{type(optimizer).__name__}"
        how = How(
            *(compression, op, process_set, sparse_as_dense, gradient_predivide_factor),
            backup_workers=backup_workers,
        )
        passes = None
        if backward_passes_per_step > 1:
            passes = Passes(backward_passes_per_step, average_aggregated_gradients)
        return _DistributedOptimizer(optimizer, chosen, use_locking, how, passes)
    roots = {base.__module__.split(".")[0] for base in type(optimizer).__mro__}
    if roots & {"keras", "tf_keras"}:
        # Nothing else here needs Keras, and it knows which of them is in use.
        from byteps.tensorflow import keras

        return keras.DistributedOptimizer(
            optimizer,
            name,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            process_set=process_set,
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients,
            backup_workers=backup_workers,
        )
    raise ConfigError(
        f"DistributedOptimizer({type(optimizer).__name__}): an optimizer of tf.compat.v1.train or "
        "of Keras is wanted"
    )
