"""Handles, and how tensors of torch get to the engine: what all that is exchanged passes.

:mod:`byteps.torch.ops` and the modules beside it say what is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from byteps import _registry
from byteps._backups import WAITS, Backups
from byteps._codecs import encoding_for
from byteps._registry import Send
from byteps.torch import _gpu, _tensors
from byteps.torch._tensors import Memory
from byteps.torch.compression import Compression

__all__ = ["Ranks", "contributors", "poll", "scaled", "send", "start", "synchronize", "wait"]

#: The ranks that a call is for; all where it is None.
Ranks = tuple[int, ...] | None


# Handles


def poll(handle: int) -> bool:
    """Whether :func:`synchronize` would return at once."""
    return _registry.poll(handle)


def wait(handle: int, timeout: float | None = None) -> bool:
    """Waits until it is done, at most ``timeout`` seconds; returns whether it is.

    The handle stays valid: :func:`synchronize` fetches the result. What went wrong is raised.
    """
    return _registry.wait(handle, timeout)


def synchronize(handle: int, timeout: float | None = None) -> Any:
    """Waits until it is done and returns its tensor, or list of tensors; then the handle is spent.

    Other Python threads run meanwhile and Ctrl-C interrupts. After ``timeout`` seconds it raises
    :class:`byteps.errors.WaitTimeoutError`, and the handle may be waited for again. A handle that
    was synchronised before gives None.
    """
    return _registry.synchronize(handle, timeout)


def contributors(handle: int) -> list[int] | None:
    """Waits until it is done, and returns the ranks whose tensors are in its result, rising.

    On a GPU it waits until the result has come to the host, also where a stream waits for it.

    They are all for whom it is, unless some have died in a job that goes on without them
    (``BPS_ELASTIC=shrink``), or were too late (``backup_workers``); every rank is told the same. An
    average is divided by as many as they are. A rank that is in a part of the result alone is not
    among them. To be called before :func:`synchronize`, after which the handle is spent: then it
    gives None.
    """
    return _registry.contributors(handle)


# The one way in


def send(
    what: str,
    memory: Memory,
    operation: str,
    name: str,
    priority: int,
    root: int = 0,
    settle: bool = False,
    ranks: Ranks = None,
    compression: Any = Compression.none,
    backups: Backups = WAITS,
) -> Send:
    """What the registry starts; ``settle`` lets a name come again for another type or size."""
    source = memory.source
    device = not _tensors.is_of_host(source, operation == "average", ranks)
    if operation == "broadcast" and source.dtype not in _tensors.DTYPES:
        # As bytes, of which each element has some: a dimension of its own.
        dtype, shape = "u8", (*source.shape, source.element_size())
    else:
        dtype, shape = _tensors.summed_dtype(source, what, name), source.shape
    encoding = encoding_for(compression, source.dtype.is_floating_point, operation)
    known = _registry.Tensor(name, dtype, shape, operation, root, device, ranks, encoding)
    known = backups.over(known)
    if settle:
        known = _registry.settled(known)
    on_gpu = _gpu.holds(source)
    return Send(known, source.data_ptr(), memory.target.data_ptr(), priority, on_gpu)


def start(
    what: str,
    memories: Sequence[Memory],
    operation: str,
    names: Sequence[str | None],
    priority: int,
    root: int = 0,
    *,
    in_place: bool,
    single: bool,
    postscale: float = 1.0,
    settle: bool = False,
    ranks: Ranks = None,
    then: Callable[[list[torch.Tensor]], Any] | None = None,
    compression: Any = Compression.none,
    backups: Backups = WAITS,
) -> int:
    chosen = iter(_registry.unnamed(sum(not name for name in names), ranks))
    sends = [
        send(
            what,
            memory,
            operation,
            name or next(chosen),
            priority,
            root,
            settle,
            ranks,
            compression,
            backups,
        )
        for memory, name in zip(memories, names, strict=True)
    ]
    stream = _gpu.open_for(
        (memory.source for memory in memories), [one.tensor.device for one in sends]
    )
    if in_place:
        # Autograd cannot see the change; when told, it notices uses of the old values.
        torch.autograd.graph.increment_version([memory.output for memory in memories])

    def finish(memories: Sequence[Memory]) -> Any:
        for memory in memories:
            _gpu.keep_for_current_stream(memory.tensors)
        outputs = [memory.finish() for memory in memories]
        if postscale != 1.0:
            with torch.no_grad():
                for output in outputs:
                    output.copy_(scaled(output, postscale))
        if then is not None:
            return then(outputs)
        return outputs[0] if single else outputs

    return _registry.start(sends, memories, finish, stream)


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """The tensor times a factor, of its type."""
    if tensor.dtype.is_floating_point:
        return tensor * factor
    return (tensor.to(torch.float64) * factor).to(tensor.dtype)
