"""push_pull under the names that Horovod gave it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from byteps import _process_sets
from byteps._operations import ReduceOp, either
from byteps.torch import ops
from byteps.torch.compression import Compression

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
]


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> torch.Tensor:
    """:func:`push_pull` as Horovod calls it.

    ``op`` is :data:`Average` (the default), :data:`Sum`, :data:`Min`, :data:`Max` or
    :data:`Product`; the last three take no ``compression``. The tensor is multiplied by
    ``prescale_factor`` before, and by ``postscale_factor`` after it. ``process_set``, here and
    below, is a :class:`~byteps.torch.ProcessSet` of the ranks that take part.
    """
    tensors = grouped_allreduce(
        [tensor], average, [name], compression, op, prescale_factor, postscale_factor, process_set
    )
    return tensors[0]


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> int:
    """:func:`allreduce` that does not wait."""
    scales = prescale_factor, postscale_factor, _process_sets.ranks_of(process_set)
    return ops.push_pull_start([tensor], either(average, op), [name], 0, False, True, *scales)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> torch.Tensor:
    """:func:`allreduce` into the tensor itself."""
    scales = prescale_factor, postscale_factor
    ops.synchronize(allreduce_async_(tensor, average, name, op, *scales, process_set))
    return tensor


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> int:
    """:func:`allreduce` into the tensor itself, without waiting."""
    scales = prescale_factor, postscale_factor, _process_sets.ranks_of(process_set)
    return ops.push_pull_start([tensor], either(average, op), [name], 0, True, True, *scales)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: Any = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> list[torch.Tensor]:
    """:func:`allreduce` of several tensors at once."""
    names = ops.names_of(name, len(tensors))
    scales = prescale_factor, postscale_factor, _process_sets.ranks_of(process_set)
    return ops.differentiable(tensors, either(average, op), names, 0, compression, *scales)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: Any = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> int:
    """:func:`grouped_allreduce` that does not wait: one handle for all."""
    names = ops.names_of(name, len(tensors))
    scales = prescale_factor, postscale_factor, _process_sets.ranks_of(process_set)
    return ops.push_pull_start(tensors, either(average, op), names, 0, False, False, *scales)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: Any = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> list[torch.Tensor]:
    """:func:`grouped_allreduce` into the tensors themselves."""
    scales = prescale_factor, postscale_factor
    ops.synchronize(grouped_allreduce_async_(tensors, average, name, op, *scales, process_set))
    return list(tensors)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: Any = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> int:
    """:func:`grouped_allreduce` into the tensors themselves, without waiting."""
    names = ops.names_of(name, len(tensors))
    scales = prescale_factor, postscale_factor, _process_sets.ranks_of(process_set)
    return ops.push_pull_start(tensors, either(average, op), names, 0, True, False, *scales)
