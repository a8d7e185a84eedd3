"""allreduce and broadcast by Horovod's names, as operations of MXNet's engine.

They return at once, and what uses a result comes behind its exchange. None of them has a gradient:
what ``autograd.record()`` sees are arrays without a past.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import mxnet as mx
from byteps import _objects, _operations, _process_sets
from byteps._operations import Adasum, ReduceOp
from byteps.errors import ConfigError, TensorError
from byteps.mxnet import _engine, ops

__all__ = [
    "allreduce",
    "allreduce_",
    "broadcast",
    "broadcast_",
    "grouped_allreduce",
    "grouped_allreduce_",
]


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
    op: ReduceOp | None = None,
) -> Any:
    """A new array: the average, or another reduction, of the arrays of all ranks.

    Args:
        tensor: As for :func:`byteps_push_pull`, in any layout.
        average: Whether to average, which is what it does unless told otherwise, or to sum.
        name: The same on all ranks. Arrays without a name are matched by the order of the calls.
        priority: Of two arrays that are ready, the one with the larger number goes first.
        prescale_factor, postscale_factor: What it is multiplied by before, and after it.
        process_set: A :class:`~byteps.common.ProcessSet` of the ranks that take part.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``, in place of ``average``.

    Raises:
        byteps.errors.ConfigError: for an operation that is not one of these, or a set that this
            rank is not in.
        byteps.errors.TensorError: for an array that cannot be exchanged, or whole numbers times a
            fraction.
    """
    factors = prescale_factor, postscale_factor
    return grouped_allreduce([tensor], average, [name], priority, *factors, process_set, op)[0]


def allreduce_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
    op: ReduceOp | None = None,
) -> Any:
    """:func:`allreduce` in place. Returns the array itself.

    One in a layout of MXNet's own is an ``MXNetError``, as for :func:`byteps_push_pull`.
    """
    factors = prescale_factor, postscale_factor
    return grouped_allreduce_([tensor], average, [name], priority, *factors, process_set, op)[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: Any = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
    op: ReduceOp | None = None,
) -> list[Any]:
    """:func:`allreduce` of several arrays, all under way together.

    ``name`` is a list of names, or one that the arrays' indices are added to.
    """
    _check(tensors, "allreduce", name)
    copies = [_copy(tensor) for tensor in tensors]
    factors = prescale_factor, postscale_factor
    return grouped_allreduce_(copies, average, name, priority, *factors, process_set, op)


def grouped_allreduce_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: Any = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
    op: ReduceOp | None = None,
) -> list[Any]:
    """:func:`grouped_allreduce` in place. Returns the arrays themselves."""
    operation = operation_of(average, op)
    ranks = _process_sets.ranks_of(process_set)
    _check(tensors, "allreduce", name)
    for factor in (prescale_factor, postscale_factor):
        _check_factor(tensors, factor)
    # Names follow each other in the order of the calls, so all are taken before one is refused.
    names = [ops.name_of(one, ranks) for one in names_of(name, len(tensors))]
    for tensor, one in zip(tensors, names, strict=True):
        scale(tensor, prescale_factor)
        _engine.exchange(*(tensor, one, operation, 0, priority, ops.encoding_of(one)), ranks=ranks)
        scale(tensor, postscale_factor)
    return list(tensors)


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: Any = None,
) -> Any:
    """A new array: that of the root, whose number is the one that it has in the job.

    The other arguments are those of :func:`allreduce`.
    """
    ranks = _process_sets.ranks_of(process_set)
    _objects.check_root(root_rank, ranks)
    _check([tensor], "broadcast", name)
    copy = _copy(tensor)
    _engine.exchange(
        *(copy, ops.name_of(name, ranks), "broadcast", root_rank),
        # What is broadcast goes before gradients, unless the caller wants more.
        priority=max(priority, _objects.BROADCAST_PRIORITY),
        ranks=ranks,
    )
    return copy


def broadcast_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: Any = None,
) -> Any:
    """:func:`broadcast` in place, also of an array in a layout of MXNet's own. Returns the array
    itself."""
    copy = broadcast(tensor, root_rank, name, priority, process_set)
    with mx.autograd.pause():
        copy.copyto(tensor)
    return tensor


def operation_of(average: bool | None, op: Any) -> str:
    """What the engine calls it."""
    if op == Adasum:
        raise ConfigError("op=Adasum: ranks of byteps.torch compute it, and MXNet's do not")
    return _operations.either(average, op)


def names_of(name: Any, count: int) -> list[Any]:
    """A name for each, or None, of a list or of one that indices are added to."""
    if name is None:
        return [None] * count
    if isinstance(name, (str, bytes)):
        text = name.decode() if isinstance(name, bytes) else name
        return [f"{text}.{index}" for index in range(count)]
    names = list(name)
    if len(names) != count:
        raise ConfigError(f"{len(names)} names for {count} arrays: give each its own, or one name")
    return names


def scale(tensor: Any, factor: float) -> None:
    """Multiplies an array in place, behind what MXNet's engine does with it before."""
    if factor != 1:
        with mx.autograd.pause():
            tensor *= factor


def _check(tensors: Sequence[Any], what: str, name: Any) -> None:
    for tensor, one in zip(tensors, names_of(name, len(tensors)), strict=True):
        _engine.dtype_of(tensor, one or f"{what} without a name")


def _check_factor(tensors: Sequence[Any], factor: float) -> None:
    for tensor in tensors:
        dtype = np.dtype(tensor.dtype)
        if dtype.kind != "f" and factor != int(factor):
            raise TensorError(
                f"allreduce of an array of {dtype.name} times {factor}: whole numbers have no "
                "fractions; convert it with astype('float32')"
            )


def _copy(tensor: Any) -> Any:
    """A new array in the plain layout, behind what MXNet's engine does with the other."""
    with mx.autograd.pause():
        copy = mx.nd.empty(tensor.shape, ctx=mx.cpu(), dtype=tensor.dtype)
        tensor.copyto(copy)
    return copy
