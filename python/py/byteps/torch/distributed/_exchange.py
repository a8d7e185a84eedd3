"""What one call of ``torch.distributed`` hands to the engine: sums and broadcasts of tensors."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from byteps.torch import _gpu, _tensors
from byteps.torch.distributed._keys import Keys, Kind

__all__ = ["Exchange", "Tensors", "operation_of", "scratch"]

Tensors = list[torch.Tensor]

_SUM, _AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
_MIN, _MAX, _PRODUCT = dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT


class Exchange:
    """One call, put together: what is sent from where and received where."""

    __slots__ = ("copies", "device", "is_in_callback", "items", "keys", "memory", "stream")

    def __init__(self, keys: Keys, one: torch.Tensor, is_in_callback: bool) -> None:
        self.keys = keys
        self.is_in_callback = is_in_callback
        self.device = self.stream = None
        if one.is_cuda:  # All of a call's tensors are in one place.
            self.device, self.stream = one.device, _gpu.open_for([one])
        self.items: list[tuple[int, int, int, int]] = []
        self.memory: Tensors = []
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def reduce(
        self,
        operation: str,
        source: torch.Tensor,
        target: torch.Tensor,
        receiver: int | None = None,
    ) -> None:
        """Reduces ``source`` over the ranks, into ``target`` of its type and size: of all ranks, or
        of the ``receiver`` alone; then that of any other may hold anything."""
        to = None if receiver is None else self.keys.rank_of(receiver)
        kind = _kind_of_reduction(operation, source.dtype, source.is_cuda, self.is_in_callback, to)
        self._add(kind, source.numel(), source, target)

    def broadcast(self, root: int, source: torch.Tensor, target: torch.Tensor) -> None:
        """Sends ``source`` of rank ``root`` into every rank's ``target``, of any type."""
        count = target.numel() * target.element_size()
        origin = self.keys.rank_of(root)
        kind = Kind("broadcast", "u8", target.is_cuda, origin, self.is_in_callback)
        self._add(kind, count, source, target)

    def _add(self, kind: Kind, count: int, source: torch.Tensor, target: torch.Tensor) -> None:
        if count == 0:
            return
        if source is target:
            if not _tensors.is_plain(target):
                source = _tensors.packed(target)
                self.copies.append((target, source))
            begin = end = source.data_ptr()
            self.memory.append(source)
        else:
            if not _tensors.is_plain(source):
                source = _tensors.packed(source)
            if not _tensors.is_plain(target):
                received = scratch(target)
                self.copies.append((target, received))
                target = received
            begin, end = source.data_ptr(), target.data_ptr()
            self.memory += (source, target)
        for tensor, offset in self.keys.of(kind, count):
            self.items.append((tensor, begin + offset, end + offset, 0))


def operation_of(reduce_op: Any) -> str | None:
    """What the engine calls a reduction of torch's; None if it has it not."""
    # Comparing is cheaper than a look-up: these objects of C++ are slow to hash.
    if reduce_op == _SUM:
        return "sum"
    if reduce_op == _AVG:
        return "average"
    if reduce_op == _MAX:
        return "max"
    if reduce_op == _MIN:
        return "min"
    return "product" if reduce_op == _PRODUCT else None


@functools.cache
def _kind_of_reduction(
    operation: str, dtype: torch.dtype, device: bool, is_in_callback: bool, receiver: int | None
) -> Kind:
    return Kind(operation, _tensors.DTYPES[dtype], device, 0, is_in_callback, receiver)


def scratch(tensor: torch.Tensor) -> torch.Tensor:
    """Memory of its shape and type, with anything in it."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
