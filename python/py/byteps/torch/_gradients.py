"""The gradients of one optimizer or module on their way: sent in batches, averaged in rounds."""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from byteps import _native, _process_sets, _registry, common
from byteps._backups import WAITS, Backups
from byteps.errors import ConfigError, UsageError
from byteps.torch import _backward, _gpu, _sending, _tensors, ops
from byteps.torch._batch import Batch
from byteps.torch._rates import Rates
from byteps.torch._rounds import Rounds
from byteps.torch._sparse_gradients import SparseGradients
from byteps.torch._velocities import Velocities
from byteps.torch.compression import Codec, Compression, without_momentum

# Where one host is the whole job, its GPUs have no line to keep busy: each collective is a kernel
# of NCCL's, and keeps processors of the GPU from the backward pass. One rank alone waits for none.
_BATCH_BYTES_MIN_ON_ONE_HOST = 1 << 23
# Between hosts: 512 KiB take a line of 20 Gbit/s 0.2 ms. Smaller batches, of which each takes this
# thread 50 to 80 microseconds, keep it from launching kernels.
_BATCH_BYTES_MIN_ON_GPUS = 1 << 19

# Counts up in the order of creation, which all ranks share.
_numbers = itertools.count()
_live: weakref.WeakSet[Gradients] = weakref.WeakSet()


class Gradients:
    """The gradients of one optimizer or module, by their index in the order of their adoption.

    A *round* averages every gradient once. It begins with the first gradient that a backward pass
    completes and is over when the pass is; :meth:`synchronize` makes up for a missing pass. While a
    pass runs, `_native.GradientHooks` counts; only a batch of complete gradients comes to Python.
    """

    # Whether ranks compare how many rounds there were since the last step.
    counts_rounds = True
    # What to do about a sparse gradient that cannot be sent, where rounds are not compared.
    sparse_remedy = ""

    def __init__(
        self,
        named: Iterable[tuple[str, torch.Tensor]],
        compression: Any,
        passes: int,
        op: ops.ReduceOp,
        sparse_as_dense: bool,
        prefix: str,
        process_set: _process_sets.ProcessSet | None = None,
        sparse: Mapping[torch.Tensor, int] | None = None,
        backups: Backups = WAITS,
    ) -> None:
        self.number = next(_numbers)
        self.process_set = process_set
        if process_set is not None and not process_set.included():
            # Nothing of this rank is averaged.
            named = ()
        self.prefix = prefix
        self.velocities = Velocities(self)
        self.compress_by(compression)
        self._rates = Rates()
        if op not in (ops.Average, ops.Sum):
            raise ConfigError(f"op={op!r}: gradients are averaged or summed")
        self.average = op == ops.Average
        self.sparse = SparseGradients(sparse_as_dense, sparse)
        self.should_synchronize = True
        # Every gradient is averaged, unless a backward pass has added to one since.
        self.is_averaged = False
        self.closed = False
        self.backups = backups
        if backups.workers:
            # All would have to wait for the slowest to compare their rounds.
            self.counts_rounds = False
            self.sparse_remedy = self.sparse_remedy or (
                "gradients that do not wait for slow ranks are dense ones alone, so pass "
                "sparse_as_dense=True, or backup_workers=0"
            )
        self._rounds = Rounds(prefix, process_set) if self.counts_rounds else None
        self._all_sent = False
        self.batches: list[Batch] = []
        # All parameters by name; those that are watched, and what their gradients are declared as.
        self.names: dict[torch.Tensor, str] = {}
        self.index: dict[torch.Tensor, int] = {}
        self.params: list[torch.Tensor] = []
        self.declared: list[_registry.Tensor] = []
        self._plain: list[_native.Plain] = []
        self._job = _registry.job_number()
        self._stream: Callable[[], int] = lambda: 0
        self._are_on_gpus = False
        self._hook_handles: list[Any] = []
        self.passes = passes
        stream = functools.partial(_stream_of, weakref.ref(self))
        self.hooks = _native.GradientHooks(weakref.ref(self), stream, passes)
        self.adopt(named)

    @property
    def ranks(self) -> _sending.Ranks:
        """Those that average these gradients; all where it is None."""
        return None if self.process_set is None else _process_sets.ranks_of(self.process_set)

    @property
    def size(self) -> int:
        """How many they are."""
        if self.process_set is None:
            return common.size()
        return len(self.process_set.ranks) if self.process_set.included() else 1

    def compress_by(self, compression: Any) -> None:
        """What is declared from now on is sent so."""
        self.compression, self.velocities.factor = without_momentum(compression)
        self._sends_as_is = compression is Compression.none or isinstance(compression, Codec)

    def step_with(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer that takes these gradients: error feedback needs its learning rates."""
        self._rates.optimizer = weakref.ref(optimizer)

    def adopt(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Declares these parameters in one go and watches their gradients."""
        new = []
        for name, param in named:
            if param in self.names:
                continue
            self.names[param] = self.prefix + name
            if param.requires_grad:
                new.append(param)
        self.arrange()
        self._watch(new)

    def arrange(self) -> None:
        """All names are known, and priorities are about to be asked for."""

    def _watch(self, params: list[torch.Tensor]) -> None:
        ranks = self.ranks if params else None
        tensors = [
            _tensors.gradient(
                self.names[param], param, self.compression, self.average, ranks, self.backups
            )
            for param in params
        ]
        numbers = _registry.declare(tensors)
        for other in list(_live):
            if other is not self and any(param in other.index for param in params):
                other.close()
        _live.add(self)
        self._size_batches()
        for param, tensor, number in zip(params, tensors, numbers, strict=True):
            self.index[param] = len(self.params)
            self.params.append(param)
            self.declared.append(tensor)
            on_gpu = _gpu.holds(param)
            self._plain.append(_plain(param, on_gpu))
            if on_gpu:
                self._use_gpu(param.device)
            hook = self.hooks.add(number, self.priority_of(param), _bytes_of(tensor), on_gpu)
            self._hook_handles.append(param.register_post_accumulate_grad_hook(hook))

    def _is_on_gpu(self, index: int) -> bool:
        return self._plain[index].is_on_gpu

    def _use_gpu(self, device: torch.device) -> None:
        self._stream = _gpu.stream_getter(device)
        self._are_on_gpus = True
        self._size_batches()

    def _size_batches(self) -> None:
        """Each batch costs the thread of the backward pass; the first ones keep nobody waiting."""
        # With backup workers each rank sends its own to a server.
        is_one_host = common.size() == common.local_size() and not self.backups.workers
        if self._are_on_gpus:
            least = _BATCH_BYTES_MIN_ON_ONE_HOST if is_one_host else _BATCH_BYTES_MIN_ON_GPUS
            self.hooks.sends_halves = not is_one_host
        else:
            least = _BATCH_BYTES_MIN_ON_ONE_HOST if common.size() == 1 else 0
            # The memory of a host is done with the first half long before the second is there; a
            # line between hosts may not be.
            self.hooks.sends_halves = is_one_host
        self.hooks.batch_bytes_min = least

    def check_open(self) -> None:
        """Raises if the gradients are another's."""
        if self.closed:
            raise UsageError(
                "a later DistributedOptimizer or DistributedDataParallel has taken over the "
                "parameters of this one: use that"
            )

    def close(self) -> None:
        """Stops watching: another optimizer or module has taken over the parameters."""
        for handle in self._hook_handles:
            handle.remove()
        self._hook_handles.clear()
        self.velocities.forget()
        self.closed = True

    @property
    def synchronized(self) -> bool:
        """Every gradient is averaged, and no backward pass has added to one since."""
        return self.is_averaged and not self.hooks.has_new

    @synchronized.setter
    def synchronized(self, averaged: bool) -> None:
        self.is_averaged = averaged
        self.hooks.has_new = False

    def set_passes(self, passes: int) -> None:
        """How often a pass adds to each gradient before it is sent, from the next round on."""
        self.passes = self.hooks.passes = passes
        self.hooks.expect_all()

    # What the hooks ask for

    def join(self) -> None:
        """A backward pass has completed its first gradient."""
        _backward.join(self)

    def added_again(self, index: int) -> None:
        """A backward pass has added to a gradient that is on its way, or to a sum."""
        param = self.params[index]
        if index in self.sparse.held:
            return  # It goes at the end of the pass, with all that was added.
        under_way = self._under_way(index)
        if under_way is not None and under_way is param.grad:
            raise UsageError(
                f"backward() has added to the gradient of '{self.names[param]}' while it was being "
                "averaged: call step() or synchronize() before the next backward(), or raise "
                f"backward_passes_per_step={self.passes}; a layer that activation checkpointing "
                "runs twice needs use_reentrant=False"
            )
        if under_way is not None:
            # The gradient was dropped, as by model.zero_grad(), and this is a new one.
            self.discard()
            self.hooks.has_new = True
        elif not self.average:
            raise UsageError(
                f"backward() has added to the gradient of '{self.names[param]}', which is a sum "
                "over all ranks already (op=Sum): call step() or optimizer.zero_grad() before, or "
                f"raise backward_passes_per_step={self.passes}"
            )

    def _under_way(self, index: int) -> torch.Tensor | None:
        self.flush()
        for batch in self.batches:
            if index in batch.indices:
                return batch.gradients[batch.indices.index(index)]
        return None

    def flush(self) -> None:
        """Hands over what backward passes have completed."""
        self._hand_over_queued()

    def _hand_over_queued(self) -> None:
        indices, stream = self.hooks.take()
        if indices:
            params = self.params
            # Some may have been dropped after a backward pass that failed.
            gradients = [
                torch.zeros_like(params[index])
                if (gradient := params[index].grad) is None
                else gradient
                for index in indices
            ]
            try:
                self._hand_over(indices, gradients, stream)
            except BaseException:
                self.hooks.expect(indices)
                raise

    def _hand_over(
        self, indices: list[int], gradients: list[torch.Tensor], stream: int | None
    ) -> None:
        if self._job != _registry.job_number():
            self._declare_in_new_job()
        if not self.batches:
            self._rates.follow(self)
        sent, contexts = gradients, None
        is_plain = _native.are_plain(indices, gradients, self._plain)
        if self.sparse.known or not is_plain:
            indices, gradients = self.sparse.take(self, indices, gradients)
            if not indices:
                return
            sent = gradients
            is_plain = _native.are_plain(indices, gradients, self._plain)
        self.velocities.follow(indices, gradients, stream)
        if not self._sends_as_is or not is_plain:
            with _gpu.on_stream(stream, gradients[0].device):
                sent, contexts = self._prepared(indices, gradients)
            if self._redeclare(indices, sent):
                self._hand_over_by_place(indices, gradients, sent, contexts)
                return
        self._push(Batch(indices, gradients, sent, contexts), stream)

    def _push(self, batch: Batch, stream: int | None) -> None:
        batch.native = _native.push_batch(self.hooks, batch.indices, batch.sent, stream)
        batch.stream = stream
        _registry.held.add(batch)
        self.batches.append(batch)
        # Autograd can't see the change; when told, it notices uses of the old values.
        torch.autograd.graph.increment_version(batch.sent)
        batch.native.watch(batch.gradients)

    def _prepared(
        self, indices: list[int], gradients: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[Any]]:
        sent, contexts = [], []
        for index, gradient in zip(indices, gradients, strict=True):
            smaller, context = self.compression.compress(gradient)
            _tensors.check(smaller, "the gradient", self.names[self.params[index]])
            sent.append(_tensors.in_place(smaller).source)
            contexts.append(context)
        return sent, contexts

    def _redeclare(self, indices: list[int], sent: list[torch.Tensor]) -> bool:
        """Declares anew what a cast or a move of the model has changed; whether there was such."""
        changed = []
        for index, tensor in zip(indices, sent, strict=True):
            old, was_on_gpu = self.declared[index], self._is_on_gpu(index)
            dtype = _tensors.summed_dtype(tensor, "the gradient", old.name)
            if (dtype, tensor.shape, _gpu.holds(tensor)) != (old.dtype, old.shape, was_on_gpu):
                changed.append((index, tensor, dtype))
        for index, tensor, dtype in changed:
            param = self.params[index]
            old = self.declared[index]
            device = old.store is None and not _tensors.is_of_host(tensor, self.average, self.ranks)
            new = _registry.settled(
                old._replace(name=self.names[param], dtype=dtype, shape=tensor.shape, device=device)
            )
            on_gpu = _gpu.open_for([tensor], [device]) is not None
            [number] = _registry.declare([new])
            self._plain[index] = _plain(param, on_gpu)
            if on_gpu:
                self._use_gpu(tensor.device)
            self.declare_as(index, new, number)
        return bool(changed)

    def declare_as(self, index: int, tensor: _registry.Tensor, number: int) -> None:
        """This is what a gradient is declared as from now on."""
        self.declared[index] = tensor
        self.hooks.declare(index, number, _bytes_of(tensor), self._is_on_gpu(index))

    def _hand_over_by_place(
        self,
        indices: list[int],
        gradients: list[torch.Tensor],
        sent: list[torch.Tensor],
        contexts: list[Any],
    ) -> None:
        """What was queued together may be in different memories after a move of the model."""
        rows = list(zip(indices, gradients, sent, contexts, strict=True))
        for on_gpu in (False, True):
            some = [row for row in rows if _gpu.holds(row[2]) == on_gpu]
            if some:
                columns = [list(column) for column in zip(*some, strict=True)]
                self._push(Batch(*columns), self._stream() if on_gpu else None)

    def _declare_in_new_job(self) -> None:
        """After `resume`, tensors have other numbers."""
        _ = self.ranks  # Of a set that was not added to this job: an error.
        _gpu.open_for(self.params, [tensor.device for tensor in self.declared])
        for index, number in enumerate(_registry.declare(self.declared)):
            self.declare_as(index, self.declared[index], number)
        self._size_batches()
        self._job = _registry.job_number()

    # Rounds

    def send_at_end(self) -> None:
        """Sends what this backward pass has not completed, too."""
        self.send_rest()

    def wait_at_end(self) -> None:
        """Lets ``backward()`` return with averaged gradients."""
        self.finish_round()

    def pause(self) -> bool:
        """An inner backward pass is over; the outer one may complete other gradients."""
        self.hooks.has_joined = False
        self.flush()
        if self.missing():
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

    def missing(self) -> list[int]:
        """The gradients of this round that are not on their way."""
        return [index for index in self.hooks.rest() if self.params[index].requires_grad]

    def send_rest(self) -> None:
        """Sends the gradients that no backward pass has completed, too."""
        self.check_open()
        self._leave_pass()
        if self._all_sent:
            return
        self._watch_thawed()
        self.send(self.missing())
        if self._rounds is not None:
            self._rounds.send(self.size, self.sparse.is_news(self))
        self._all_sent = True

    def send(self, indices: list[int]) -> None:
        """Sends these gradients, or zeros where there are none, and what is complete."""
        self.flush()
        alone = self.size == 1
        for index in indices:
            param = self.params[index]
            if self.sparse.hold_none(self, index, param.grad):
                continue
            if param.grad is None:
                if alone:
                    continue
                param.grad = torch.zeros_like(param)
            stream = self._stream() if self._is_on_gpu(index) else None
            if not self.hooks.queue(index, stream):
                self._hand_over_queued()
                self.hooks.queue(index, stream)
        self._hand_over_queued()

    def _send_nothing(self, indices: list[int]) -> None:
        """Sends zeros for these gradients, which are not touched."""
        self.flush()
        self.send_zeros([i for i in indices if not self.sparse.hold_none(self, i, None)])

    def send_zeros(self, indices: list[int]) -> None:
        """Sends zeros for these dense gradients, which are not touched."""
        for on_gpu in (False, True):
            some = [index for index in indices if self._is_on_gpu(index) == on_gpu]
            stream = self._stream() if on_gpu else None
            for index in some:
                self.hooks.queue(index, stream)
            self.hooks.take()
            if some:
                zeros = [torch.zeros_like(self.params[index]) for index in some]
                self._hand_over(some, zeros, stream)

    def finish_round(self) -> None:
        """Waits until every gradient is averaged, and is ready for the next round."""
        changed = self.changed()
        self._take_in()
        self.synchronized = True
        self.hooks.is_guarded = not self.average
        if changed is not None:
            raise changed

    def _take_in(self, wanted: bool = True) -> None:
        on_gpu = [(batch.native, None) for batch in self.batches if _gpu.holds(batch.sent[0])]
        if on_gpu:
            _native.enqueue_results_of_batches(on_gpu)
        if self._rounds is not None and self._rounds.wait():
            self.sparse.settle(self)
        sparse = self.sparse.start(self)
        for batch in self.batches:
            batch.native.wait()
        for batch in self.batches:
            self.finish(batch)
        self.sparse.finish(self, sparse, wanted)
        if self._rounds is not None:
            self._rounds.check()
        self.end_round()

    def finish(self, batch: Batch, positions: list[int] | None = None) -> None:
        """Puts results that were waited for into the gradients: all, or those at `positions`."""
        places = range(len(batch.indices)) if positions is None else positions
        if _gpu.holds(batch.sent[0]):
            stream = self._stream()
            _native.stream_wait_batch(batch.native, stream, positions)
            # Whoever reads or frees them on the stream that they come from is behind the results.
            if stream != batch.stream:
                tensors = {id(t): t for p in places for t in (batch.gradients[p], batch.sent[p])}
                _gpu.keep_for_current_stream(tensors.values())
        if batch.contexts is not None:
            with torch.no_grad():
                for place in places:
                    gradient, sent = batch.gradients[place], batch.sent[place]
                    if sent is not gradient:
                        result = self.compression.decompress(sent, batch.contexts[place])
                        gradient.copy_(result)
        batch.left -= len(places)
        if not batch.left:
            _registry.held.discard(batch)

    def synchronize(self) -> None:
        """Averages all gradients, unless they are and no backward pass has added to one since."""
        if not self.synchronized:
            self.send_rest()
            self.finish_round()

    def stepped(self) -> None:
        """A step takes the gradients."""
        self.synchronized = self.hooks.is_guarded = False
        if self._rounds is not None:
            self._rounds.number = 0

    def forget_round(self) -> None:
        """The job of a round is over, and nothing of it is under way any more."""
        self._leave_pass()
        self.hooks.take()
        self.sparse.forget()
        if self._rounds is not None:
            self._rounds.forget()
        self.end_round()
        self.stepped()

    @property
    def is_under_way(self) -> bool:
        """Whether a round has begun and is not over."""
        return bool(self.batches) or self._all_sent or self.hooks.has_joined

    def clear(self) -> None:
        """Somebody is about to clear the gradients."""
        if self.is_under_way:
            self.discard()
        self.synchronized = self.hooks.is_guarded = False

    def discard(self) -> None:
        """Ends a round whose averages nobody wants: other ranks may wait for this one's part."""
        self._leave_pass()
        self.flush()
        if not self._all_sent and self.size > 1:
            self._send_nothing(self.missing())
            if self._rounds is not None:
                self._rounds.send(self.size, self.sparse.is_news(self))
        self._take_in(wanted=False)
        self.synchronized = False

    def changed(self) -> UsageError | None:
        """The error to raise if a gradient was changed while it was being averaged."""
        changed = [
            self.names[self.params[index]]
            for batch in self.batches
            for index in batch.native.changed(batch.gradients, batch.indices, self.params)
        ]
        changed += [self.names[param] for param in self.sparse.changed(self)]
        if not changed:
            return None
        others = f" (and those of {len(changed) - 1} more)" if len(changed) > 1 else ""
        return UsageError(
            f"the gradient of '{changed[0]}'{others} was changed or replaced while it was being "
            "averaged: call optimizer.synchronize() after backward() and before whatever changes "
            "gradients; a hook that changes them must be registered before the optimizer is made "
            "distributed"
        )

    def end_round(self) -> None:
        """Is ready for the next backward passes."""
        self.batches.clear()
        self.sparse.end_round()
        self._all_sent = False
        self.hooks.expect_all()

    def _leave_pass(self) -> None:
        if self.hooks.has_joined:
            self.hooks.has_joined = False
            _backward.leave(self)

    def _watch_thawed(self) -> None:
        if len(self.names) > len(self.params):
            self._watch([p for p in self.names if p.requires_grad and p not in self.index])


def forget_rounds() -> None:
    """To be called when the engine has ended: whoever averages gradients starts anew."""
    for gradients in list(_live):
        gradients.forget_round()


def _stream_of(gradients: weakref.ref[Gradients]) -> int:
    """The GPU's stream that is current in a hook."""
    found = gradients()
    return 0 if found is None else found._stream()


def _plain(param: torch.Tensor, is_on_gpu: bool) -> _native.Plain:
    """What a gradient of this parameter is that can be sent from its own memory, as declared."""
    return _native.Plain(param.detach(), torch.strided, param.nbytes, is_on_gpu)


def _bytes_of(tensor: _registry.Tensor) -> int:
    return math.prod(tensor.shape) * _tensors.SIZES[tensor.dtype]
