"""Horovod's ``join()``: ranks that run out of data before others. Of no framework.

A rank that has joined *follows* the others. The scheduler tells it what they push, which they
report while some rank has joined, and it pushes as often: elements that change no result. So every
round has all its ranks, however the bytes travel, and a job in which nobody joins pays nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from byteps import _native, _objects, _registry, common
from byteps.errors import MismatchError, UsageError

#: Starts to push elements that change no result, and returns the handle.
Push = Callable[[Sequence[_registry.Tensor]], int]

# How often a rank that follows looks which of its pushes are over, to free their memory.
_LOOK_S = 0.2

_FORMATS = {"f16": "<e", "f32": "<f", "f64": "<d", "u8": "<B", "i8": "<b", "i32": "<i", "i64": "<q"}


def in_host(tensors: Sequence[_registry.Tensor]) -> int:
    """Pushes from memory of the host, which needs no framework."""
    sends, memory = [], []
    for tensor in tensors:
        if tensor.device:
            raise UsageError(
                f"join: the other ranks reduce '{tensor.name}' on GPUs, where rank "
                f"{common.rank()}, which has joined, has nothing to send: join() is for arrays in "
                "host memory, and in byteps.torch for tensors of GPUs"
            )
        # Without elements it has an address all the same.
        content = bytearray(_element(tensor) * max(1, math.prod(tensor.shape)))
        address = ctypes.addressof(ctypes.c_char.from_buffer(content))
        sends.append(_registry.Send(tensor, address, address))
        memory.append(content)
    return _registry.start(sends, memory, len)


def neutral(tensor: _registry.Tensor) -> float:
    """What changes no result of the tensor's operation."""
    if tensor.operation == "product":
        return 1
    if tensor.operation not in ("min", "max"):
        return 0
    is_min = tensor.operation == "min"
    if "f" in tensor.dtype:
        return math.inf if is_min else -math.inf
    bits = int(tensor.dtype[1:])
    if tensor.dtype.startswith("u"):
        return (1 << bits) - 1 if is_min else 0
    return (1 << bits - 1) - 1 if is_min else -(1 << bits - 1)


def _element(tensor: _registry.Tensor) -> bytes:
    if tensor.dtype == "bf16":
        return struct.pack("<f", neutral(tensor))[2:]
    return struct.pack(_FORMATS[tensor.dtype], neutral(tensor))


def join(push: Push = in_host) -> int:
    """Waits until all ranks have called it, and takes part in what they do until then.

    Returns the rank that called it last, the same on all ranks.
    """
    if common.size() == 1:
        return common.rank()
    _native.join()
    under_way: list[int] = []
    while not isinstance(told := _native.follow(_LOOK_S), int):
        if told is not None:
            under_way += _follow(told, push)
        under_way = [handle for handle in under_way if not _is_over(handle)]
    for handle in under_way:
        _settle(handle)
    return told


def _follow(told: Sequence[tuple[Any, ...]], push: Push) -> list[int]:
    """Pushes what is told until it was pushed as often; the handles of that."""
    totals = {_registry.followed(*what): pushes for *what, pushes in told}
    # A name that is given another meaning has its last rounds in the old one first.
    known = [tensor for tensor in totals if _registry.is_declared(tensor)]
    new = [tensor for tensor in totals if tensor not in known]
    return [handle for some in (known, new) for handle in _pushed(some, totals, push)]


def _pushed(
    tensors: Sequence[_registry.Tensor], totals: dict[_registry.Tensor, int], push: Push
) -> Iterable[int]:
    # The ranks that disagree about a tensor are told so by their own calls; the others wait.
    found, _ = _registry.declare_each(tensors)
    pairs = zip(tensors, found, strict=True)
    numbers = {one: number for one, number in pairs if number is not None}
    with contextlib.suppress(MismatchError):
        while behind := [one for one in numbers if _native.pushes(numbers[one]) < totals[one]]:
            for tensor in behind:
                _registry.take_turn(tensor)
                _objects.follow(tensor)
            yield push(behind)


def _is_over(handle: int) -> bool:
    if not _registry.poll(handle):
        return False
    _settle(handle)
    return True


def _settle(handle: int) -> None:
    with contextlib.suppress(MismatchError):
        _registry.synchronize(handle)
