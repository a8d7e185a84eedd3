"""Horovod's ``join()``, whose ranks may have tensors on GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from byteps import _joining, _registry, common
from byteps.errors import UsageError
from byteps.torch import _gpu, _tensors

__all__ = ["join"]

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
    return _joining.join(_push)


def _push(tensors: Sequence[_registry.Tensor]) -> int:
    values = [_neutral(tensor) for tensor in tensors]
    sends = [
        _registry.Send(tensor, value.data_ptr(), value.data_ptr())
        for tensor, value in zip(tensors, values, strict=True)
    ]
    stream = _gpu.open_for(values)
    return _registry.start(sends, values, _gpu.keep_for_current_stream, stream)


def _neutral(tensor: _registry.Tensor) -> torch.Tensor:
    """Elements that change no result."""
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
    value = _joining.neutral(tensor)
    return torch.full(tensor.shape, value, dtype=_DTYPES[tensor.dtype], device=device)
