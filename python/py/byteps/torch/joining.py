"""Horovod's ``join()``: ranks that run out of data before others.

A rank that has joined *follows* the others. The scheduler tells it what they push, which they
report while some rank has joined, and it pushes as often: elements that change no result. So every
round has all its ranks, however the bytes travel, and a job in which nobody joins pays nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from byteps import _native, _objects, _registry, common
from byteps.errors import MismatchError, UsageError
from byteps.torch import _gpu, _tensors

__all__ = ["join"]

# How often a rank that follows looks which of its pushes are over, to free their memory.
_LOOK_S = 0.2

_DTYPES = {name: dtype for dtype, name in _tensors.DTYPES.items()}


def join(device: int = -1) -> int:
    """Waits until all ranks have called it; until then, this rank changes no result of the others.

    To be called by a rank that has no more data. What the others reduce meanwhile, it takes part
    in: with zeros in sums and averages, which are still over the number of all ranks, as in
    Horovod; with what changes nothing in minima, maxima and products; without rows in an
    allgather. It passes their barriers. A broadcast from it, an alltoall and an Adasum are a
    :class:`byteps.errors.UsageError` on the ranks that call them.

    Rounds wait for this rank as for any other, and it hears of each by way of the scheduler: while
    some have joined, a step takes two messages longer.

    Args:
        device: As Horovod has it, and not needed: zeros are made where the others' tensors are.

    Returns:
        The rank that called it last, the same on all ranks.
    """
    del device
    if common.size() == 1:
        return common.rank()
    _native.join()
    under_way: list[int] = []
    while not isinstance(told := _native.follow(_LOOK_S), int):
        if told is not None:
            under_way += _follow(told)
        under_way = [handle for handle in under_way if not _is_over(handle)]
    for handle in under_way:
        _settle(handle)
    return told


def _follow(told: Sequence[tuple[Any, ...]]) -> list[int]:
    """Pushes what is told until it was pushed as often; the handles of that."""
    totals = {_registry.followed(*what): pushes for *what, pushes in told}
    # A name that is given another meaning has its last rounds in the old one first.
    known = [tensor for tensor in totals if _registry.is_declared(tensor)]
    new = [tensor for tensor in totals if tensor not in known]
    return [handle for some in (known, new) for handle in _push(some, totals)]


def _push(
    tensors: Sequence[_registry.Tensor], totals: dict[_registry.Tensor, int]
) -> Iterable[int]:
    # The ranks that disagree about a tensor are told so by their own calls; the others wait.
    found, _ = _registry.declare_each(tensors)
    pairs = zip(tensors, found, strict=True)
    numbers = {one: number for one, number in pairs if number is not None}
    with contextlib.suppress(MismatchError):
        while behind := [one for one in numbers if _native.pushes(numbers[one]) < totals[one]]:
            values = [_neutral(tensor) for tensor in behind]
            sends = [
                _registry.Send(tensor, value.data_ptr(), value.data_ptr())
                for tensor, value in zip(behind, values, strict=True)
            ]
            for tensor in behind:
                _registry.take_turn(tensor)
                _objects.follow(tensor)
            stream = _gpu.open_for(values)
            yield _registry.start(sends, values, _gpu.keep_for_current_stream, stream)


def _neutral(tensor: _registry.Tensor) -> torch.Tensor:
    """Elements that change no result."""
    dtype = _DTYPES[tensor.dtype]
    if dtype.is_floating_point:
        least, most = -math.inf, math.inf
    else:
        least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    value = {"min": most, "max": least, "product": 1}.get(tensor.operation, 0)
    device = torch.device("cpu")
    if tensor.device:
        ordinal = _registry.open_gpu()
        if ordinal is None:
            raise UsageError(
                f"join: the other ranks reduce '{tensor.name}' on GPUs, and rank {common.rank()} "
                "has joined without having sent a tensor of its own GPU: send one on all ranks "
                "first, as broadcast_parameters does"
            )
        device = torch.device("cuda", ordinal)
    return torch.full(tensor.shape, value, dtype=dtype, device=device)


def _is_over(handle: int) -> bool:
    if not _registry.poll(handle):
        return False
    _settle(handle)
    return True


def _settle(handle: int) -> None:
    with contextlib.suppress(MismatchError):
        _registry.synchronize(handle)
