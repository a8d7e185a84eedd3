"""All that is asked of ``torch.cuda``, in one place.

No function here makes the host wait for a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from byteps import _registry


def holds(tensor: torch.Tensor) -> bool:
    """Whether the tensor is in the memory of a GPU."""
    return tensor.is_cuda


def open_for(
    tensors: Iterable[torch.Tensor], are_of_gpus: Iterable[bool] = itertools.repeat(True)
) -> Callable[[], int] | None:
    """Opens the GPU that holds some of these tensors, where it is not open yet: with all ranks if
    one of them is a tensor of GPUs to the job, as ``are_of_gpus`` says of each.

    Returns what tells the stream that is current there, as CUDA's number, or None where all of
    them are in host memory. A second GPU of one process is a ConfigError.
    """
    device = None
    for tensor, is_of_gpus in zip(tensors, are_of_gpus, strict=False):
        if holds(tensor):
            device = tensor.device
            _registry.use_gpu(device.index, is_of_gpus)
    return None if device is None else lambda: current_stream(device)


def current_stream(device: torch.device) -> int:
    """The stream on which this thread puts work for the device: that of autograd within a hook."""
    return _raw_stream(device.index)


def stream_getter(device: torch.device) -> Callable[[], int]:
    """:func:`current_stream` of this device, for hooks: without an object for each call."""
    return functools.partial(_raw_stream, device.index)


def _current_stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


# A number costs a fraction of torch's object; compiled code uses the same function.
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _current_stream)


def on_stream(stream: int | None, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Lets torch put work on this stream, where it does not already."""
    if stream is None or current_stream(device) == stream:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device))


def place_of(tensor: torch.Tensor) -> int | None:
    """The stream that is current for a tensor on a GPU; None for one in host memory."""
    return current_stream(tensor.device) if holds(tensor) else None


def keep_for_current_stream(tensors: Iterable[torch.Tensor]) -> None:
    """Lets torch hand out the memory of these tensors again only after the current stream's work.

    The engine reads and writes them on streams that torch's allocator knows nothing of. Until the
    engine has enqueued the last of that work, the pending operation holds references; from then on
    the stream that is current in ``synchronize`` waits for it. But the allocator reuses memory in
    the order of the stream that it was allocated on, which may be another one: it has to be told
    of this one. Where it is the same, nothing is recorded.
    """
    stream = None
    for tensor in tensors:
        if holds(tensor):
            # A process has one GPU.
            stream = stream or torch.cuda.current_stream(tensor.device)
            tensor.record_stream(stream)


class Moment:
    """When the current stream of this device has come here, once it has."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(torch.cuda.current_stream(device))

    def since(self, earlier: Any) -> float | None:
        """Milliseconds from an earlier one; None if the stream has not come here yet."""
        return earlier._event.elapsed_time(self._event) if self._event.query() else None
