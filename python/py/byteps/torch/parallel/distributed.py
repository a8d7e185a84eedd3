"""A module whose gradients are averaged over all ranks by the end of ``backward()``."""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from byteps import _registry, common
from byteps.errors import ConfigError, UsageError
from byteps.torch import _tensors, functions, ops
from byteps.torch._gradients import UnderWay
from byteps.torch.compression import Compression

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(torch.nn.Module):
    """Wraps a module: same start on all ranks, averaged gradients after each ``backward()``.

    The state of rank 0 is given to all ranks at construction. During ``backward()`` each gradient
    is sent as soon as it is there, and the pass ends when all have come back. Several modules may
    be wrapped, in the same order on all ranks.

    Args:
        module: What is trained; ``wrapped.module`` leads back to it.
        device_ids: For BytePS's callers: None, or the one device of the module.
        broadcast_buffers: Give all ranks the buffers of rank 0 before each forward pass.
        compression: :class:`~byteps.torch.Compression` for the gradients.
        find_unused_parameters: Ask all ranks which parameters took part, at the price of a round
            trip. What took part nowhere keeps its gradient, or None; without it (the default)
            such a parameter gets a gradient of zeros.
        bucket_cap_mb: For callers of torch's class; not used.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: list[Any] | None = None,
        broadcast_buffers: bool = True,
        compression: Any = Compression.none,
        find_unused_parameters: bool = False,
        bucket_cap_mb: float = 25,
    ) -> None:
        super().__init__()
        if device_ids is not None and len(device_ids) != 1:
            raise ConfigError(f"device_ids={device_ids}: one device for each process, or None")
        del bucket_cap_mb
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self.require_backward_grad_sync = True
        number = _registry.count_up("DistributedDataParallel")
        self._prefix = f"DistributedDataParallel.{number}."
        functions.broadcast_parameters(module.state_dict(), 0, prefix=self._prefix)
        self._parameters_watched = {
            param: f"{self._prefix}Gradient.{name}"
            for name, param in module.named_parameters()
            if param.requires_grad
        }
        self._used: set[torch.Tensor] = set()
        self._under_way = UnderWay(average=True, compression=compression)
        self._callback_queued = False
        _registry.declare(
            [
                _tensors.gradient(name, param, compression, average=True)
                for param, name in self._parameters_watched.items()
            ]
        )
        self._watch()

    def _watch(self) -> None:
        myself = weakref.ref(self)

        def hook(param: torch.Tensor) -> None:
            wrapped = myself()
            if wrapped is not None and wrapped.require_backward_grad_sync:
                wrapped._ready(param)

        for param in self._parameters_watched:
            param.register_post_accumulate_grad_hook(hook)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass."""
        if self._callback_queued:
            self._after_a_failure()
        if self.broadcast_buffers and self.require_backward_grad_sync and common.size() > 1:
            self._broadcast_buffers()
        return self.module(*args, **kwargs)

    def _after_a_failure(self) -> None:
        """Forgets a backward pass that did not come to its end."""
        self._callback_queued = False
        self._under_way.drain()
        self._used.clear()

    def _broadcast_buffers(self) -> None:
        """Gives all ranks those of rank 0, in one tensor for each type and place.

        A network has hundreds of small ones, and every forward pass waits for them.
        """
        alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
        for name, buffer in self.module.named_buffers():
            _tensors.check(buffer, "buffer", name)
            alike[buffer.dtype, buffer.device].append(buffer)
        packed = {
            key: torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
            for key, buffers in alike.items()
        }
        ops.broadcast_all_(
            [
                (f"{self._prefix}Buffers.{dtype}.{device.type}", tensor)
                for (dtype, device), tensor in packed.items()
            ],
            0,
        )
        if common.rank() == 0:
            return
        with torch.no_grad():
            for key, buffers in alike.items():
                parts = packed[key].split([buffer.numel() for buffer in buffers])
                for buffer, part in zip(buffers, parts, strict=True):
                    buffer.copy_(part.view(buffer.shape), non_blocking=True)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward passes only add to this rank's gradients; the next one sends them."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def _ready(self, param: torch.Tensor) -> None:
        if not self._callback_queued:
            self._callback_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
        self._used.add(param)
        self._send(param)

    def _send(self, param: torch.Tensor) -> None:
        name = self._parameters_watched[param]
        if param in self._under_way:
            raise UsageError(
                f"one backward() has added twice to the gradient of '{name}', which was already "
                "being averaged: a layer that is used twice under activation checkpointing wants "
                "use_reentrant=False"
            )
        self._under_way.send(param, name)

    def _end_of_backward(self) -> None:
        self._callback_queued = False
        self.synchronize()

    def synchronize(self) -> None:
        """Sends what no hook has sent and waits for all; ``backward()`` ends with it by itself.

        A rank whose loss used none of the parameters calls it in place of ``backward()``.
        """
        missing = [
            param
            for param in self._parameters_watched
            if param not in self._used and param.requires_grad
        ]
        if self.find_unused_parameters:
            missing = self._used_elsewhere(missing)
        for param in missing:
            if param.grad is None:
                if common.size() == 1:
                    continue
                param.grad = torch.zeros_like(param)
            self._send(param)
        self._under_way.drain()
        self._used.clear()

    def _used_elsewhere(self, missing: list[torch.Tensor]) -> list[torch.Tensor]:
        used = torch.zeros(len(self._parameters_watched), dtype=torch.int32, device="cpu")
        for position, param in enumerate(self._parameters_watched):
            used[position] = int(param in self._used)
        ops.push_pull_inplace(used, average=False, name=f"{self._prefix}used", priority=1 << 30)
        unused = set(missing)
        return [
            param
            for position, param in enumerate(self._parameters_watched)
            if param in unused and used[position] > 0
        ]
