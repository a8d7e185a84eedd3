"""Gradients that are averaged over all ranks: for optax, and for JAX's own transformations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from byteps import _backups, _process_sets, _registry
from byteps._codecs import Codec
from byteps._operations import Average, ReduceOp, Sum
from byteps.errors import ConfigError
from byteps.jax import ops

__all__ = ["DistributedOptimizer", "grad", "value_and_grad"]


class Accumulated(NamedTuple):
    """The state of an optimizer that exchanges every few passes."""

    passes: jax.Array
    sums: Any
    inner: Any


def _check(op: Any, backup_workers: int | None) -> None:
    if op not in (Average, Sum):
        raise ConfigError(f"op={op!r}: gradients are averaged or summed (Average, Sum)")
    if backup_workers is not None:
        _backups.number_of(backup_workers)


def _of_members(
    known: _process_sets.ProcessSet | None,
    gradients: Any,
    name: str | None,
    op: ReduceOp,
    compression: Codec | None,
    backup_workers: int | None,
) -> Any:
    """The gradients that all ranks have together, or those of the set; of no other rank."""
    # Asked anew each time: the set may have been added to a job that is over.
    if known is not None and _process_sets.added(known) and not known.included():
        return gradients
    return ops.push_pull(
        gradients,
        name=name,
        op=op,
        compression=compression,
        process_set=known,
        backup_workers=backup_workers,
    )


def DistributedOptimizer(
    optimizer: Any,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    name: str | None = None,
    compression: Codec | None = None,
    process_set: Any = None,
    backup_workers: int | None = None,
) -> Any:
    """An optax optimizer whose ``update`` first averages the gradients over all ranks.

    Inside a jitted step each gradient is sent as soon as the backward pass has computed it. The
    state is that of ``optimizer``, so checkpoints fit with and without byteps.

    Args:
        optimizer: An ``optax.GradientTransformation``, or what has its ``init`` and ``update``.
        backward_passes_per_step: How many calls of ``update`` make one step: gradients of that many
            are averaged here, and exchanged and applied at the last of them; the others return
            zeros. (``optax.MultiSteps`` around this optimizer would exchange in every call.)
        op: :data:`~byteps.jax.Average` or :data:`~byteps.jax.Sum`.
        name: What the gradients' names begin with. Without it optimizers are numbered in the order
            in which they are made, which must then be the same on all ranks.
        compression: One of :class:`byteps.jax.Compression`. The learning rate is in the optimizer,
            where byteps does not see it change: what error feedback keeps is not rescaled.
        process_set: A :class:`~byteps.jax.ProcessSet` of the ranks that average among themselves.
            On a rank that is none of them gradients stay as they are.
        backup_workers: For how many of the slowest ranks no average waits (docs/stragglers.md): it
            is then of the others, and the ranks that are late get the same. As
            ``BPS_BACKUP_WORKERS`` says where it is None, for what may be so; 0 waits for all.
    """
    import optax  # Nothing else here needs it.

    _check(op, backup_workers)
    if backward_passes_per_step < 1:
        raise ConfigError(f"backward_passes_per_step={backward_passes_per_step}: 1 or more")
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise ConfigError(
            f"DistributedOptimizer({type(optimizer).__name__}): an optax optimizer is wanted, such "
            "as optax.adam(1e-3)"
        )
    inner = optax.with_extra_args_support(optimizer)
    known = _process_sets.added(process_set)
    if name is None:
        number_of = None if known is None else known.process_set_id
        number = _registry.count_up(("DistributedOptimizer", number_of))
        name = f"Gradient.{number}." if number else "Gradient."
    prefix = name

    def exchanged(gradients: Any) -> Any:
        return _of_members(known, gradients, prefix, op, compression, backup_workers)

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return inner.update(exchanged(gradients), state, params, **extra)

    if backward_passes_per_step == 1:
        return optax.GradientTransformationExtraArgs(inner.init, update)
    return _accumulating(optax, inner, backward_passes_per_step, update)


def _accumulating(optax: Any, inner: Any, passes: int, step: Callable[..., Any]) -> Any:
    """An optimizer that calls ``step`` with the average of so many gradients."""

    def init(params: Any) -> Accumulated:
        zeros = jax.tree_util.tree_map(jnp.zeros_like, params)
        return Accumulated(jnp.zeros([], jnp.int32), zeros, inner.init(params))

    def update(gradients: Any, state: Accumulated, params: Any = None, **extra: Any) -> Any:
        sums = jax.tree_util.tree_map(jnp.add, state.sums, gradients)

        def last(operands: Any) -> Any:
            sums, before, params, extra = operands
            means = jax.tree_util.tree_map(lambda one: one / passes, sums)
            updates, after = step(means, before, params, **extra)
            zeros = jax.tree_util.tree_map(jnp.zeros_like, sums)
            return updates, Accumulated(jnp.zeros([], jnp.int32), zeros, after)

        def earlier(operands: Any) -> Any:
            sums, before, _, _ = operands
            zeros = jax.tree_util.tree_map(jnp.zeros_like, sums)
            return zeros, Accumulated(state.passes + 1, sums, before)

        operands = sums, state.inner, params, extra
        return jax.lax.cond(state.passes == passes - 1, last, earlier, operands)

    return optax.GradientTransformationExtraArgs(init, update)


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    op: ReduceOp = Average,
    name: str | None = None,
    compression: Codec | None = None,
    process_set: Any = None,
    backup_workers: int | None = None,
) -> Callable[..., Any]:
    """``jax.value_and_grad`` whose gradients are averaged over all ranks.

    The value, and what else ``fun`` returns with ``has_aux``, is that of this rank. ``name`` is
    what the gradients' names begin with; without it they have none (see
    :func:`~byteps.jax.push_pull`). ``compression`` is that of ``push_pull``. With a ``process_set``
    they are averaged among its ranks, and stay as they are on others. ``backup_workers`` is as of
    :func:`DistributedOptimizer`, for gradients with a ``name``.
    """
    _check(op, backup_workers)
    known = _process_sets.added(process_set)
    own = jax.value_and_grad(fun, argnums=argnums, has_aux=has_aux)

    def averaged(*args: Any, **kwargs: Any) -> Any:
        value, gradients = own(*args, **kwargs)
        return value, _of_members(known, gradients, name, op, compression, backup_workers)

    return averaged


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    op: ReduceOp = Average,
    name: str | None = None,
    compression: Codec | None = None,
    process_set: Any = None,
    backup_workers: int | None = None,
) -> Callable[..., Any]:
    """``jax.grad`` whose gradients are averaged over all ranks; see :func:`value_and_grad`."""
    _check(op, backup_workers)
    known = _process_sets.added(process_set)
    own = jax.grad(fun, argnums=argnums, has_aux=has_aux)

    def averaged(*args: Any, **kwargs: Any) -> Any:
        if not has_aux:
            gradients = own(*args, **kwargs)
            return _of_members(known, gradients, name, op, compression, backup_workers)
        gradients, aux = own(*args, **kwargs)
        return _of_members(known, gradients, name, op, compression, backup_workers), aux

    return averaged
