"""The gradients of one optimizer on their way: sent when they are complete, awaited in a step."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from byteps import _registry, common
from byteps.errors import TensorError, UsageError
from byteps.torch import _backward, _gpu, _tensors, ops
from byteps.torch.allreduce import averages

# Gradients of fewer bytes in all wait for the next one, and go with it: so many take 5 µs on a line
# of 100 Gbit/s, and a call of the engine from Python takes longer.
_TOGETHER_BYTES = 1 << 16
# The same on a host that is the whole job, whose GPUs have no line to keep busy: each collective is
# a kernel of NCCL's, and keeps processors of the GPU from the backward pass.
_TOGETHER_BYTES_ON_ONE_HOST = 1 << 23

# Counts up in the order of creation, which all ranks share.
_numbers = itertools.count()
_live: weakref.WeakSet[Gradients] = weakref.WeakSet()


class Sent:
    """A gradient under way: the tensor that the result is for, and what was sent in its place.

    ``handle`` is None while it waits for others to go with. ``version`` is the gradient's as long as
    nobody but us changes it.
    """

    __slots__ = ("context", "gradient", "handle", "name", "priority", "sent", "version")

    def __init__(
        self, name: str, priority: int, gradient: torch.Tensor, sent: torch.Tensor, context: Any
    ) -> None:
        self.handle: int | None = None
        self.name = name
        self.priority = priority
        self.gradient = gradient
        self.version = gradient._version
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

    def send(
        self, param: torch.Tensor, gradient: torch.Tensor, name: str, priority: int = 0
    ) -> None:
        """Starts the push_pull of its gradient, in its own memory where nothing compresses it, at
        once or with those that follow."""
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
            # Autograd was told that the engine changes what is sent.
            sent.version += sent.sent is sent.gradient

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
    """The gradients of one optimizer or module: which are under way, and which are still to come.

    A *round* averages every gradient once. It begins with the first gradient that a backward pass
    completes and is over when the pass is; :meth:`synchronize` makes up for a missing pass.
    """

    # Whether ranks compare how many rounds there were since the last step.
    counts_rounds = True

    def __init__(
        self,
        named: Iterable[tuple[str, torch.Tensor]],
        compression: Any,
        passes: int,
        op: ops.ReduceOp,
        sparse_as_dense: bool,
        prefix: str,
    ) -> None:
        self.number = next(_numbers)
        self.prefix = prefix
        self.compression = compression
        self.passes = passes
        self.average = averages(None, op)
        self.under_way = UnderWay(self.average, compression)
        self.sparse_as_dense = sparse_as_dense
        self.should_synchronize = True
        # Every gradient is averaged, and no backward pass has added to one since.
        self.synchronized = False
        self.closed = False
        # With op=Sum, a second round would add the ranks' sums up.
        self.holds_sums = False
        # Rounds since the last step: see `_send_count`.
        self.rounds = 0
        self._count: torch.Tensor | None = None
        self._count_handle: int | None = None
        # The backward pass that is running calls this object when it ends.
        self._joined = False
        self._all_sent = False
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
        self._watch(new)

    def _watch(self, params: list[torch.Tensor]) -> None:
        _registry.declare(
            [
                _tensors.gradient(self.names[param], param, self.compression, self.average)
                for param in params
            ]
        )
        for other in list(_live):
            if any(param in other.passes_left for param in params) and other is not self:
                other.close()
        _live.add(self)
        myself = weakref.ref(self)

        def hook(param: torch.Tensor) -> None:
            gradients = myself()
            if gradients is not None:
                gradients.ready(param)

        for param in params:
            self.passes_left[param] = self.passes
            self.hooks.append(param.register_post_accumulate_grad_hook(hook))

    def check_open(self) -> None:
        """Raises if the gradients are another's."""
        if self.closed:
            raise UsageError(
                "a later DistributedOptimizer or DistributedDataParallel has taken over the "
                "parameters of this one: use that"
            )

    def close(self) -> None:
        """Stops watching: another optimizer or module has taken over the parameters."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        self.closed = True

    def ready(self, param: torch.Tensor) -> None:
        """A backward pass has added to this gradient."""
        self.synchronized = False
        sent = self.under_way.get(param)
        if sent is not None:
            if sent.gradient is param.grad:
                raise UsageError(
                    f"backward() has added to the gradient of '{self.names[param]}' while it was "
                    "being averaged: call step() or synchronize() before the next backward(), or "
                    f"raise backward_passes_per_step={self.passes}; a layer that activation "
                    "checkpointing runs twice needs use_reentrant=False"
                )
            # The gradient was dropped, as by model.zero_grad(), and this is a new one.
            self.discard()
        elif self.holds_sums:
            raise UsageError(
                f"backward() has added to the gradient of '{self.names[param]}', which is a sum "
                "over all ranks already (op=Sum): call step() or optimizer.zero_grad() before, or "
                f"raise backward_passes_per_step={self.passes}"
            )
        self.passes_left[param] -= 1
        if self.passes_left[param] <= 0:
            self.send(param)
            if not self._joined:
                self._joined = True
                _backward.join(self)

    def send_at_end(self) -> None:
        """Sends what this backward pass has not completed, too."""
        self.send_rest()

    def wait_at_end(self) -> None:
        """Lets ``backward()`` return with averaged gradients."""
        self.finish_round()

    def pause(self) -> bool:
        """An inner backward pass is over; the outer one may complete other gradients."""
        self._joined = False
        self.under_way.flush()
        if len(self.under_way) < len(self.watched()):
            return False
        self.send_rest()
        return True

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
        self.under_way.send(param, param.grad, name, self.priority_of(param))

    def watched(self) -> list[torch.Tensor]:
        """The parameters whose gradients a round averages."""
        return [param for param in self.passes_left if param.requires_grad]

    def send_rest(self) -> None:
        """Sends the gradients that no backward pass has completed, too."""
        self.check_open()
        self._leave_pass()
        if self._all_sent:
            return
        self._watch_thawed()
        alone = common.size() == 1
        for param in self.watched():
            if param in self.under_way:
                continue
            if param.grad is None:
                if alone:
                    continue
                param.grad = torch.zeros_like(param)
            self.send(param)
        self.under_way.flush()
        self._send_count()
        self._all_sent = True

    def finish_round(self) -> None:
        """Waits until every gradient is averaged, and is ready for the next round."""
        changed = self.changed()
        self.under_way.drain()
        self._check_count()
        self._end_round()
        self.synchronized = True
        self.holds_sums = not self.average
        if changed is not None:
            raise changed

    def synchronize(self) -> None:
        """Averages all gradients, unless they are and no backward pass has added to one since."""
        if not self.synchronized:
            self.send_rest()
            self.finish_round()

    def stepped(self) -> None:
        """A step takes the gradients."""
        self.synchronized = self.holds_sums = False
        self.rounds = 0

    def clear(self) -> None:
        """Somebody is about to clear the gradients."""
        if self.under_way or self._all_sent:
            self.discard()
        self.synchronized = self.holds_sums = False

    def discard(self) -> None:
        """Ends a round whose averages nobody wants: other ranks may wait for this one's part."""
        self._leave_pass()
        if not self._all_sent and common.size() > 1:
            for param in self.watched():
                if param not in self.under_way:
                    nothing = torch.zeros_like(param)
                    name, priority = self.names[param], self.priority_of(param)
                    self.under_way.send(param, nothing, name, priority)
            self.under_way.flush()
            self._send_count()
        self.under_way.drain()
        self._check_count()
        self._end_round()
        self.synchronized = False

    def changed(self) -> UsageError | None:
        """The error to raise if a gradient was changed while it was being averaged."""
        changed = [
            self.names[param]
            for param, sent in self.under_way.items()
            if sent.gradient._version != sent.version or sent.gradient is not param.grad
        ]
        if not changed:
            return None
        others = f" (and those of {len(changed) - 1} more)" if len(changed) > 1 else ""
        return UsageError(
            f"the gradient of '{changed[0]}'{others} was changed or replaced while it was being "
            "averaged: call optimizer.synchronize() after backward() and before whatever changes "
            "gradients; a hook that changes them must be registered before the optimizer is made "
            "distributed"
        )

    def _end_round(self) -> None:
        self._all_sent = False
        self.expect_all()

    def expect_all(self) -> None:
        """Is ready for the next backward passes."""
        for param in self.passes_left:
            self.passes_left[param] = self.passes

    def _send_count(self) -> None:
        """Sends the number of this round along.

        If one rank runs a backward pass more than the others, its round would meet their next one.
        The numbers then add up to something else.
        """
        self.rounds += 1
        if not self.counts_rounds or common.size() == 1:
            return
        self._count = torch.tensor([self.rounds], dtype=torch.int64, device="cpu")
        self._count_handle = ops.push_pull_async_inplace(self._count, False, f"{self.prefix}round")

    def _check_count(self) -> None:
        if self._count_handle is None:
            return
        ops.synchronize(self._count_handle)
        self._count_handle = None
        if int(self._count) != self.rounds * common.size():
            raise UsageError(
                f"the ranks have called backward() unequally often since their last step(): this "
                f"one {self.rounds} times, all {common.size()} together {int(self._count)} times; "
                "every rank must run the same backward passes before it calls step()"
            )

    def _leave_pass(self) -> None:
        if self._joined:
            self._joined = False
            _backward.leave(self)

    def _watch_thawed(self) -> None:
        thawed = [p for p in self.names if p.requires_grad and p not in self.passes_left]
        if thawed:
            self._watch(thawed)
