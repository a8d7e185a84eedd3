"""The gradients of one optimizer on their way: sent when they are complete, awaited in a step."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from byteps import _registry, common
from byteps.errors import TensorError, UsageError
from byteps.torch import _gpu, _tensors, ops
from byteps.torch.allreduce import averages

# Gradients of fewer bytes in all wait for the next one, and go with it: so many take 5 µs on a line
# of 100 Gbit/s, and a call of the engine from Python takes longer.
_TOGETHER_BYTES = 1 << 16
# The same on a host that is the whole job, whose GPUs have no line to keep busy: each collective is
# a kernel of NCCL's, and keeps processors of the GPU from the backward pass.
_TOGETHER_BYTES_ON_ONE_HOST = 1 << 23


class Sent:
    """A gradient under way: the tensor that the result is for, and what was sent in its place.

    ``handle`` is None while it waits for others to go with.
    """

    __slots__ = ("context", "gradient", "handle", "name", "priority", "sent")

    def __init__(
        self, name: str, priority: int, gradient: torch.Tensor, sent: torch.Tensor, context: Any
    ) -> None:
        self.handle: int | None = None
        self.name = name
        self.priority = priority
        self.gradient = gradient
        self.sent = sent
        self.context = context


class UnderWay(dict[torch.Tensor, Sent]):
    """Gradients by their parameters, from the moment when they are complete until the result is
    in them."""

    def __init__(self, average: bool, compression: Any) -> None:
        super().__init__()
        self.average = average
        self.compression = compression
        self._waiting: dict[torch.Tensor, Sent] = {}
        self._waiting_bytes = 0
        self._place: int | None = None

    def send(self, param: torch.Tensor, name: str, priority: int = 0) -> None:
        """Starts the push_pull of its gradient, in its own memory where nothing compresses it, at
        once or with those that follow."""
        gradient = param.grad
        sent, context = self.compression.compress(gradient)
        _tensors.check(sent, "the gradient", name)
        in_host = _tensors.through_host(sent, self.average)
        place = None if in_host else _gpu.place_of(sent)
        if place != self._place:
            # What goes together is complete in one stream.
            self.flush()
            self._place = place
        self[param] = self._waiting[param] = Sent(name, priority, gradient, sent, context)
        self._waiting_bytes += sent.nbytes
        if self._waiting_bytes >= _TOGETHER_BYTES:
            is_local = place is not None and common.size() == common.local_size()
            if not is_local or self._waiting_bytes >= _TOGETHER_BYTES_ON_ONE_HOST:
                self.flush()

    def flush(self) -> None:
        """Sends what waits for others."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, {}, 0
        if not waiting:
            return
        try:
            handles = ops.push_pull_each_inplace(
                [sent.sent for sent in waiting.values()],
                self.average,
                [sent.name for sent in waiting.values()],
                [sent.priority for sent in waiting.values()],
                self._place,
            )
        except BaseException:
            for param in waiting:
                del self[param]
            raise
        for sent, handle in zip(waiting.values(), handles, strict=True):
            sent.handle = handle

    def drain(self) -> None:
        """Waits for all of them, and takes them in as they come."""
        self.flush()
        while self:
            # Removed only when done: an interrupted wait can be taken up again.
            done = []
            for param, sent in self.items():
                if not ops.wait(sent.handle, timeout=0 if done else None):
                    break
                done.append(param)
            self.finish([self[param] for param in done])
            for param in done:
                del self[param]

    def finish(self, done: list[Sent]) -> None:
        """Waits for these, and puts the results into the gradients."""
        ops.synchronize_each([sent.handle for sent in done])
        with torch.no_grad():
            for sent in done:
                if sent.sent is not sent.gradient:
                    sent.gradient.copy_(self.compression.decompress(sent.sent, sent.context))


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
        self.under_way = UnderWay(self.average, compression)
        self.sparse_as_dense = sparse_as_dense
        self.should_synchronize = True
        self.synchronized = False
        self.closed = False
        # The backward pass that is under way ends with a call of `_end_of_backward`, unless it
        # fails; then the next step does it.
        self._ends_backward = False
        self.names: dict[torch.Tensor, str] = {}
        self.passes_left: dict[torch.Tensor, int] = {}
        self.hooks: list[Any] = []
        self.adopt(named)

    def adopt(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Declares these parameters in one go and watches their gradients."""
        new = []
        for name, param in named:
            if param in self.names:
                continue
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
            if not self._ends_backward:
                self._ends_backward = True
                torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:
        # Other ranks may need the last ones while this one does something else before its step.
        self._ends_backward = False
        self.under_way.flush()

    def priority_of(self, param: torch.Tensor) -> int:
        """None is before another, where a step waits for all of them.

        Gradients then go in the order in which they come, which is the same on all ranks. If those
        of the front layers went first, a rank that is a little ahead of the others would send what
        they do not send yet, and come back later to what they have sent: nothing would be summed
        for as long.
        """
        return 0

    def send(self, param: torch.Tensor) -> None:
        """Starts the push_pull of a gradient."""
        name = self.names[param]
        if param.grad.layout != torch.strided:
            if not self.sparse_as_dense:
                raise TensorError(
                    f"the gradient of '{name}' is sparse: pass sparse_as_dense=True, or make the "
                    "embedding with sparse=False"
                )
            param.grad = param.grad.to_dense()
        self.under_way.send(param, name, self.priority_of(param))

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
        self._end_of_backward()

    def synchronize(self) -> None:
        """Waits until every gradient is the average of all ranks' gradients."""
        self.send_all()
        self.drain()
        self.synchronized = True

    def drain(self) -> None:
        """Waits for what is under way, and is ready for the next pass."""
        self.under_way.drain()
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
