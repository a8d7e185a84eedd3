"""A module whose gradients are averaged over all ranks by the end of ``backward()``."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from byteps import _registry, common
from byteps.errors import ConfigError
from byteps.torch import _tensors, functions, ops
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
        self._compression = compression
        number = _registry.count_up("DistributedDataParallel")
        self._prefix = f"DistributedDataParallel.{number}."
        functions.broadcast_parameters(module.state_dict(), 0, prefix=self._prefix)
        self._parameters_watched = {
            param: (index, f"{self._prefix}Gradient.{name}")
            for index, (name, param) in enumerate(module.named_parameters())
            if param.requires_grad
        }
        self._used: set[torch.Tensor] = set()
        self._under_way: dict[torch.Tensor, tuple[int, torch.Tensor, Any]] = {}
        self._callback_queued = False
        _registry.declare(
            [
                self._declaration(param, name)
                for param, (_, name) in self._parameters_watched.items()
            ]
        )
        self._watch()

    def _declaration(self, param: torch.Tensor, name: str) -> _registry.Tensor:
        _tensors.check(param, "parameter", name)
        sent, _ = self._compression.compress(torch.empty(1, dtype=param.dtype))
        dtype = _tensors.summed_dtype(sent, "parameter", name)
        return _registry.Tensor(name, dtype, param.numel(), "average")

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
        self._callback_queued = False  # It is still set after a backward pass that failed.
        if self.broadcast_buffers and self.require_backward_grad_sync:
            buffers = list(self.module.named_buffers())
            if buffers:
                functions.broadcast_parameters(buffers, 0, prefix=f"{self._prefix}Buffer.")
        return self.module(*args, **kwargs)

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
        index, name = self._parameters_watched[param]
        if param in self._under_way:
            # A second pass through one parameter within one backward: once more, after the first.
            self._finish(param)
        sent, context = self._compression.compress(param.grad)
        handle = ops.push_pull_async_inplace(sent, True, name, priority=-index)
        self._under_way[param] = handle, sent, context

    def _finish(self, param: torch.Tensor) -> None:
        handle, sent, context = self._under_way.pop(param)
        ops.synchronize(handle)
        if sent is not param.grad:
            with torch.no_grad():
                param.grad.copy_(self._compression.decompress(sent, context))

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
        for param in list(self._under_way):
            self._finish(param)
        self._used.clear()

    def _used_elsewhere(self, missing: list[torch.Tensor]) -> list[torch.Tensor]:
        used = torch.zeros(len(self._parameters_watched), dtype=torch.int32)
        for position, param in enumerate(self._parameters_watched):
            used[position] = int(param in self._used)
        ops.push_pull_inplace(used, average=False, name=f"{self._prefix}used", priority=1 << 30)
        unused = set(missing)
        return [
            param
            for position, param in enumerate(self._parameters_watched)
            if param in unused and used[position] > 0
        ]
