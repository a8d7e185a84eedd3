"""The gradients of one optimizer on their way: sent when they are complete, awaited in a step."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from byteps import _registry, common
from byteps.errors import TensorError, UsageError
from byteps.torch import _tensors, ops
from byteps.torch.allreduce import averages


class Sent(NamedTuple):
    """A gradient under way: the tensor that the result is for, and what was sent in its place."""

    handle: int
    gradient: torch.Tensor
    sent: torch.Tensor
    context: Any

    def finish(self, compression: Any) -> None:
        """Waits for the result and puts it into the gradient."""
        ops.synchronize(self.handle)
        if self.sent is not self.gradient:
            with torch.no_grad():
                self.gradient.copy_(compression.decompress(self.sent, self.context))


class Gradients:
    """The gradients of one optimizer: which are under way, and which are still to come."""

    def __init__(
        self,
        named: list[tuple[str, torch.Tensor]],
        compression: Any,
        passes: int,
        op: ops.ReduceOp,
        sparse_as_dense: bool,
    ) -> None:
        number = _registry.count_up("DistributedOptimizer")
        self.prefix = f"Gradient.{number}." if number else "Gradient."
        self.compression = compression
        self.passes = passes
        self.average = averages(None, op)
        self.sparse_as_dense = sparse_as_dense
        self.should_synchronize = True
        self.synchronized = False
        self.closed = False
        self.names: dict[torch.Tensor, str] = {}
        self.priorities: dict[torch.Tensor, int] = {}
        self.passes_left: dict[torch.Tensor, int] = {}
        self.under_way: dict[torch.Tensor, Sent] = {}
        self.hooks: list[Any] = []
        self.adopt(named)

    def adopt(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Declares these parameters in one go and watches their gradients."""
        new = []
        for name, param in named:
            if param in self.names:
                continue
            # The front layers are needed first in the next pass: larger is sooner.
            self.priorities[param] = -len(self.names)
            self.names[param] = self.prefix + name
            if param.requires_grad:
                new.append(param)
        self._declare(new)
        for param in new:
            self._watch(param)

    def _declare(self, params: list[torch.Tensor]) -> None:
        _registry.declare(
            [
                _tensors.gradient(self.names[param], param, self.compression, self.average)
                for param in params
            ]
        )

    def _watch(self, param: torch.Tensor) -> None:
        earlier = getattr(param, "_byteps_gradients", lambda: None)()
        if earlier is not None and earlier is not self:
            earlier.close()
        param._byteps_gradients = weakref.ref(self)
        self.passes_left[param] = self.passes
        myself = weakref.ref(self)

        def hook(param: torch.Tensor) -> None:
            gradients = myself()
            if gradients is not None:
                gradients.ready(param)

        self.hooks.append(param.register_post_accumulate_grad_hook(hook))

    def close(self) -> None:
        """Stops watching: another optimizer has taken over the parameters."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        self.closed = True

    def ready(self, param: torch.Tensor) -> None:
        """A backward pass has added to this gradient."""
        self.synchronized = False
        left = self.passes_left[param] - 1
        if left < 0 or param in self.under_way:
            raise UsageError(
                f"backward() has added to the gradient of '{self.names[param]}' more often than "
                f"backward_passes_per_step={self.passes} since the last step() or synchronize(): "
                "call step(), or raise backward_passes_per_step"
            )
        self.passes_left[param] = left
        if left == 0:
            self.send(param)

    def send(self, param: torch.Tensor) -> None:
        """Starts the push_pull of a gradient, in its own memory where nothing compresses it."""
        name = self.names[param]
        gradient = param.grad
        if gradient.layout != torch.strided:
            if not self.sparse_as_dense:
                raise TensorError(
                    f"the gradient of '{name}' is sparse: pass sparse_as_dense=True, or make the "
                    "embedding with sparse=False"
                )
            gradient = param.grad = gradient.to_dense()
        sent, context = self.compression.compress(gradient)
        handle = ops.push_pull_async_inplace(
            sent, self.average, name, priority=self.priorities[param]
        )
        self.under_way[param] = Sent(handle, gradient, sent, context)

    def send_all(self) -> None:
        """Starts to send the gradients that no backward pass has completed, too."""
        if self.closed:
            raise UsageError(
                "a later DistributedOptimizer has taken over the parameters of this one: use that"
            )
        self._watch_thawed()
        alone = common.size() == 1
        for param in self.passes_left:
            if param in self.under_way or not param.requires_grad:
                continue
            if param.grad is None:
                if alone:
                    continue
                param.grad = torch.zeros_like(param)
            self.send(param)

    def synchronize(self) -> None:
        """Waits until every gradient is the average of all ranks' gradients."""
        self.send_all()
        self.drain()
        self.synchronized = True

    def drain(self) -> None:
        """Waits for what is under way, and is ready for the next pass."""
        # What was sent last belongs to the front layers, whose results come first: while those of
        # the others are still on their way, there is time to take in these.
        for param in reversed(list(self.under_way)):
            # Removed only when done: an interrupted wait can be taken up again.
            self.under_way[param].finish(self.compression)
            del self.under_way[param]
        self.expect_all()

    def expect_all(self) -> None:
        """Is ready for the next backward passes."""
        for param in self.passes_left:
            self.passes_left[param] = self.passes

    def _watch_thawed(self) -> None:
        thawed = [p for p in self.names if p.requires_grad and p not in self.passes_left]
        if thawed:
            self._declare(thawed)
            for param in thawed:
                self._watch(param)
