"""A module whose gradients are averaged over all ranks by the end of ``backward()``."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from byteps import _registry, common, elastic
from byteps._backups import Backups
from byteps.errors import ConfigError
from byteps.torch import _tensors, functions, ops
from byteps.torch._compiled import untraced
from byteps.torch._gradients import Gradients
from byteps.torch._sparse_gradients import sparse_parameters
from byteps.torch.compression import Compression

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(torch.nn.Module):
    """Wraps a module: same start on all ranks, averaged gradients after each ``backward()``.

    The state of rank 0 is given to all ranks at construction. During ``backward()`` each gradient
    is sent as soon as it is there, and the pass ends when all have come back. Several modules may
    be wrapped, in the same order on all ranks.

    A copy (``copy.deepcopy``, ``torch.load``) averages its gradients too, from its first forward
    pass with gradients in training mode, which all ranks must run; a copy that never runs one, as
    an average of weights does, sends nothing.

    The gradients of an ``Embedding`` or ``EmbeddingBag`` with ``sparse=True`` stay sparse: they are
    gathered at the end of the pass, uncompressed, and are coalesced averages then.

    Args:
        module: What is trained; ``wrapped.module`` leads back to it.
        device_ids: For callers of BytePS and torch: None, or the one device of the module.
        broadcast_buffers: Give all ranks the buffers of rank 0 before each forward pass.
        compression: :class:`~byteps.torch.Compression` for the gradients.
        find_unused_parameters: Ask all ranks which parameters took part, at the price of a round
            trip. What took part nowhere keeps its gradient, or None; without it (the default)
            such a parameter gets a gradient of zeros.
        bucket_cap_mb, static_graph, gradient_as_bucket_view: For callers of torch's class; not
            used: nothing here is planned ahead, and gradients are averaged in their own memory.
        output_device: For callers of torch's class: None, or the device of the module.
        process_group: For callers of torch's class: None, which is all ranks of the job.
        backup_workers: For how many of the slowest ranks no average waits, as with
            :func:`~byteps.torch.DistributedOptimizer` (docs/stragglers.md). A module with buffers
            needs ``broadcast_buffers=False`` then.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: list[Any] | None = None,
        broadcast_buffers: bool = True,
        compression: Any = Compression.none,
        find_unused_parameters: bool = False,
        bucket_cap_mb: float | None = None,
        *,
        output_device: Any = None,
        process_group: Any = None,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        backup_workers: int | None = None,
    ) -> None:
        super().__init__()
        if device_ids is not None and len(device_ids) != 1:
            raise ConfigError(f"device_ids={device_ids}: one device for each process, or None")
        if process_group is not None:
            raise ConfigError(
                "process_group: gradients are averaged over all ranks of the job, so pass None"
            )
        _check_output_device(output_device, module)
        del bucket_cap_mb, static_graph, gradient_as_bucket_view
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self.compression = compression
        self.find_unused_parameters = find_unused_parameters
        self.backup_workers = backup_workers
        self.require_backward_grad_sync = True
        self._gradients: _ModuleGradients | None = None
        self._begin()

    def _begin(self) -> _ModuleGradients:
        """Takes part in the job."""
        number = _registry.count_up("DistributedDataParallel")
        self._prefix = f"DistributedDataParallel.{number}."
        # The others of an elastic job train already, and send their state to who comes later.
        if not elastic.awaits_state():
            functions.broadcast_parameters(self.module.state_dict(), 0, prefix=self._prefix)
        self._gradients = gradients = _ModuleGradients(
            self.module,
            self.compression,
            f"{self._prefix}Gradient.",
            self.find_unused_parameters,
            Backups.asked(self.backup_workers).unless(self._needs_all()),
        )
        gradients.hooks.is_paused = not self.require_backward_grad_sync
        return gradients

    def _needs_all(self) -> str | None:
        """Why a pass waits for all ranks, if it does."""
        if self.find_unused_parameters:
            return "find_unused_parameters=True asks all ranks in each pass"
        if self.broadcast_buffers and next(self.module.buffers(), None) is not None:
            return (
                "each forward pass waits until all ranks have the buffers of rank 0, so pass "
                "broadcast_buffers=False"
            )
        if sparse_parameters(self.module):
            return "ranks gather each other's sparse gradients"
        return None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_gradients": None}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass."""
        self._before_forward()
        return self.module(*args, **kwargs)

    @untraced
    def _before_forward(self) -> None:
        gradients = self._gradients
        if gradients is None:
            if not (self.training and torch.is_grad_enabled()):
                return
            gradients = self._begin()
        # Left by a backward pass that failed.
        gradients.clear()
        if self.broadcast_buffers and self.require_backward_grad_sync and common.size() > 1:
            self._broadcast_buffers()

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
        self._set_sync(False)
        try:
            yield
        finally:
            self._set_sync(before)

    def _set_sync(self, on: bool) -> None:
        self.require_backward_grad_sync = on
        if self._gradients is not None:
            self._gradients.hooks.is_paused = not on

    def synchronize(self) -> None:
        """Sends what no hook has sent and waits for all; ``backward()`` ends with it by itself.

        A rank whose loss used none of the parameters calls it in place of ``backward()``.
        """
        gradients = self._begin() if self._gradients is None else self._gradients
        gradients.synchronized = False
        gradients.synchronize()


def _check_output_device(output_device: Any, module: torch.nn.Module) -> None:
    if output_device is None:
        return
    if isinstance(output_device, int):
        output_device = torch.device("cuda", output_device)
    first = next(module.parameters(), None)
    if first is not None and torch.device(output_device) != first.device:
        raise ConfigError(
            f"output_device={output_device}, and the module is on {first.device}: outputs stay "
            "where the module is, so pass None"
        )


class _ModuleGradients(Gradients):
    """The gradients of a wrapped module: every pass that is not in ``no_sync()`` averages them."""

    # Nobody tells it of steps.
    counts_rounds = False
    sparse_remedy = (
        "DistributedDataParallel has to know that before, from an Embedding or EmbeddingBag with "
        "sparse=True in the module; else use DistributedOptimizer"
    )

    def __init__(
        self,
        module: torch.nn.Module,
        compression: Any,
        prefix: str,
        find_unused: bool,
        backups: Backups,
    ) -> None:
        self.find_unused = find_unused
        self._mask: torch.Tensor | None = None
        self._mask_handle: int | None = None
        named = [item for item in module.named_parameters() if item[1].requires_grad]
        sparse = sparse_parameters(module)
        super().__init__(
            named, compression, 1, ops.Average, False, prefix, sparse=sparse, backups=backups
        )

    def send_rest(self) -> None:
        if not self.find_unused:
            super().send_rest()
        elif self._mask_handle is None:
            self.check_open()
            self._leave_pass()
            self.flush()
            self._mask = torch.tensor(self.hooks.take_used(), dtype=torch.int32, device="cpu")
            self._mask_handle = ops.push_pull_async_inplace(
                self._mask, average=False, name=f"{self.prefix}used", priority=1 << 30
            )

    def finish_round(self) -> None:
        if self.find_unused:
            self.send(self._used_elsewhere())
        super().finish_round()

    def discard(self) -> None:
        if not self.find_unused:
            super().discard()
            return
        self.send_rest()
        self._send_nothing(self._used_elsewhere())
        self._take_in()
        self.synchronized = False

    def forget_round(self) -> None:
        self._mask_handle = None
        super().forget_round()

    def _used_elsewhere(self) -> list[int]:
        """What this rank has not sent, and others have."""
        assert self._mask is not None and self._mask_handle is not None, "send_rest() comes before"
        ops.synchronize(self._mask_handle)
        self._mask_handle = None
        used = self._mask.tolist()
        return [index for index in self.missing() if used[index]]
