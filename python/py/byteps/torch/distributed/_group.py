"""One group of ``torch.distributed``: each of its operations goes to the engine or to the fallback.

The engine reduces and broadcasts among the ranks of its job, or some of them. All-gathers,
reductions to one rank and reduce-scatters are made of these. What is left goes to gloo (tensors in
host memory) or NCCL (on a GPU), which the group owns.

torch 2.15 has backends in Python; before, a backend in Python has to be the process group itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from byteps import _native
from byteps.errors import ConfigError, UsageError
from byteps.torch import _tensors
from byteps.torch._compiled import untraced
from byteps.torch.distributed import _joining
from byteps.torch.distributed._exchange import Exchange, Tensors, operation_of, scratch
from byteps.torch.distributed._futures import Line, is_in_callback
from byteps.torch.distributed._keys import Keys
from byteps.torch.distributed._works import Flight, Operation, all_of, done, give

__all__ = ["Named", "Operations", "create"]


def _is_python_backend_possible() -> bool:
    try:
        type("_Probe", (c10d.Backend,), {})(0, 1)
    except TypeError:
        return False
    return True


_HAS_BACKENDS = _is_python_backend_possible()
_BASE: Any = c10d.Backend if _HAS_BACKENDS else dist.ProcessGroup

#: A reduce-scatter of an input of at least so many bytes is a sum for each rank, which it alone
#: receives; a smaller one is a sum of all of it, of which each rank keeps its part: that has fewer
#: frames, and sends more bytes.
SCATTER_BYTES_MIN = 64 << 10


class Operations:
    """What a group does, in this process. Its keys are None where the engine does not serve it."""

    def _open(self, name: str, timeout: timedelta) -> None:
        self._name = name
        self._timeout, self._seconds = timeout, timeout.total_seconds()
        self._sequence = 0
        self._keys: Keys | None = None
        self._host_fallback: Any = None
        self._device_fallback: Any = None
        if _HAS_BACKENDS:
            self._options = c10d.Backend.Options("byteps", timeout=timeout)

    def _join(self, store: Any, rank: int, size: int, keys: Keys | None) -> None:
        """All ranks are here, and meet in this store."""
        self._store, self._rank, self._size = store, rank, size
        self._keys = keys
        self._flight = Flight()
        self._line = Line()
        self._sequence = 0
        # Later they may not be here: gloo's ranks connect when the first of them makes a group, and
        # sending is not a call that all ranks make.
        self._host_fallback = c10d.ProcessGroupGloo(
            c10d.PrefixStore("gloo", store), rank, size, timeout=self._timeout
        )
        # Gloo's ranks are not connected all at once, and one that leaves the group before the
        # others are would close connections that they still make: an error there.
        self._host_fallback.barrier().wait()

    # What c10d asks about

    def name(self) -> str:
        return "byteps"

    def getBackendName(self) -> str:
        return "byteps"

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    @property
    def options(self) -> Any:
        return self._options

    @property
    def supports_splitting(self) -> bool:
        return False

    @property
    def supports_coalescing(self) -> bool:
        return False

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    setSequenceNumberForGroup = _set_sequence_number_for_group
    getSequenceNumberForGroup = _get_sequence_number_for_group

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout, self._seconds = timeout, timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        keys, self._keys = self._keys, None
        nccl, self._device_fallback = self._device_fallback, None
        self._host_fallback = None
        if nccl is not None:
            nccl.shutdown()
        if keys is not None and keys.is_of_this_job():
            _joining.leave()

    abort = shutdown

    # The engine

    def _exchange(self, one: torch.Tensor) -> Exchange:
        self._sequence += 1
        keys = self._keys
        if keys is None or not keys.is_of_this_job():
            raise UsageError(
                f"group {self._name} of torch.distributed was made in another job of byteps than "
                "the one that runs: destroy the groups before shutdown, and make new ones after"
            )
        return Exchange(keys, one, self._line.has_futures and is_in_callback())

    def _start(
        self,
        what: str,
        exchange: Exchange,
        outputs: Any,
        options: Any,
        after: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> Any:
        if not exchange.items:
            return done(outputs, self._line)
        stream = exchange.stream
        batch = _native.start_batch(exchange.items, stream and stream())
        timeout = options.timeout.total_seconds()
        copies = exchange.copies
        copies += after
        limit = timeout if timeout > 0 else self._seconds
        operation = Operation(
            what, batch, outputs, exchange.memory, copies, exchange.device, limit, self._line
        )
        self._flight.add(operation)
        return give(operation)

    def _reduced(self, tensors: Sequence[torch.Tensor], reduce_op: Any) -> str | None:
        """What the engine calls this operation; None if it has it not for all of these tensors."""
        operation = operation_of(reduce_op)
        if self._keys is None or operation is None:
            return None
        for tensor in tensors:
            if tensor.dtype not in _tensors.DTYPES or tensor.layout is not torch.strided:
                return None
            if tensor.is_cuda and (
                not self._keys.are_all or _tensors.is_of_host(tensor, operation == "average")
            ):
                return None
        return operation

    def _moves(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the engine can send the bytes of these: of a GPU's, to all ranks of the job."""
        keys = self._keys
        return keys is not None and all(
            tensor.layout is torch.strided and (keys.are_all or not tensor.is_cuda)
            for tensor in tensors
        )

    def _has_receivers(self, tensor: torch.Tensor) -> bool:
        """Whether the engine can give a sum of such tensors to one rank alone."""
        keys = self._keys
        return keys is not None and keys.has_receivers and not tensor.is_cuda

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Any:
        opts = opts or c10d.AllreduceOptions()
        operation = self._reduced(tensors, opts.reduceOp)
        if operation is None:
            return self._else("allreduce", tensors[0], tensors, opts)
        exchange = self._exchange(tensors[0])
        for tensor in tensors:
            exchange.reduce(operation, tensor, tensor)
        return self._start("all_reduce", exchange, tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        opts = opts or c10d.AllreduceCoalescedOptions()
        if self._reduced(tensors, opts.reduceOp) is None:
            return self._else("allreduce_coalesced", tensors[0], tensors, opts)
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Any:
        opts = opts or c10d.BroadcastOptions()
        if not self._moves(tensors):
            return self._else("broadcast", tensors[0], tensors, opts)
        exchange = self._exchange(tensors[0])
        for tensor in tensors:
            exchange.broadcast(opts.rootRank, tensor, tensor)
        return self._start("broadcast", exchange, tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any = None) -> Any:
        opts = opts or c10d.ReduceOptions()
        operation = self._reduced(tensors, opts.reduceOp)
        if operation is None:
            return self._else("reduce", tensors[0], tensors, opts)
        exchange = self._exchange(tensors[0])
        receiver = opts.rootRank if self._has_receivers(tensors[0]) else None
        for tensor in tensors:
            # The other ranks may add up there for their hosts, and must keep what they had.
            kept = tensor if opts.rootRank == self._rank else scratch(tensor)
            exchange.reduce(operation, tensor, kept, receiver)
        return self._start("reduce", exchange, tensors, opts)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        opts = opts or c10d.AllgatherOptions()
        if not self._moves([*inputs, *(slot for slots in outputs for slot in slots)]):
            return self._else("allgather", inputs[0], outputs, inputs, opts)
        exchange = self._exchange(inputs[0])
        for slots, source in zip(outputs, inputs, strict=True):
            self._gather(exchange, slots, source)
        return self._start("all_gather", exchange, outputs, opts)

    def _gather(
        self, exchange: Exchange, slots: Sequence[torch.Tensor], source: torch.Tensor
    ) -> None:
        """Each rank broadcasts its own: it sends what it has once, and receives the others'."""
        for root, slot in enumerate(slots):
            is_own = root == self._rank
            if is_own and (slot.numel(), slot.dtype) != (source.numel(), source.dtype):
                raise ConfigError(
                    f"all_gather: rank {root} has {source.numel()} elements of {source.dtype}, and "
                    f"its place in the output has {slot.numel()} of {slot.dtype}"
                )
            exchange.broadcast(root, source if is_own else slot, slot)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        opts = opts or c10d.AllgatherOptions()
        if not (self._moves([output, input]) and _tensors.is_plain(output)):
            return self._else_single("all_gather_single", "_allgather_base", output, input, opts)
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        opts = opts or c10d.AllgatherOptions()
        if not (self._moves([*outputs, *inputs]) and all(map(_tensors.is_plain, outputs))):
            works = [
                self.all_gather_single(output, input, opts)
                for output, input in zip(outputs, inputs, strict=True)
            ]
            return all_of(works, outputs)
        exchange = self._exchange(inputs[0])
        for output, source in zip(outputs, inputs, strict=True):
            if output.numel() != source.numel() * self._size:
                raise ConfigError(
                    f"all_gather_into_tensor: an output of {output.numel()} elements for "
                    f"{self._size} times {source.numel()}"
                )
            self._gather(exchange, output.view(-1).chunk(self._size), source)
        return self._start("all_gather_into_tensor", exchange, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        # For each rank the tensors of that rank.
        return self.allgather([list(slots) for slots in zip(*outputs, strict=True)], inputs, opts)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        parts = [part for slots in inputs for part in slots]
        operation = self._reduced([*outputs, *parts], opts.reduceOp)
        if operation is None:
            return self._else("reduce_scatter", outputs[0], outputs, inputs, opts)
        exchange = self._exchange(outputs[0])
        has_receivers = self._has_receivers(outputs[0])
        for output, slots in zip(outputs, inputs, strict=True):
            for root, part in enumerate(slots):
                kept = output if root == self._rank else scratch(part)
                exchange.reduce(operation, part, kept, root if has_receivers else None)
        return self._start("reduce_scatter", exchange, outputs, opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        if self._reduced([output, input], opts.reduceOp) is None:
            return self._else_single(
                "reduce_scatter_single", "_reduce_scatter_base", output, input, opts
            )
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        operation = self._reduced([*outputs, *inputs], opts.reduceOp)
        if operation is None:
            works = [
                self.reduce_scatter_single(output, input, opts)
                for output, input in zip(outputs, inputs, strict=True)
            ]
            return all_of(works, outputs)
        exchange, after = self._exchange(inputs[0]), []
        for output, source in zip(outputs, inputs, strict=True):
            if source.numel() != output.numel() * self._size:
                raise ConfigError(
                    f"reduce_scatter_tensor: an input of {source.numel()} elements for "
                    f"{self._size} times {output.numel()}"
                )
            whole = scratch(source)
            own = whole.view(-1).chunk(self._size)[self._rank].view(output.shape)
            if not self._is_scattered(source):
                exchange.reduce(operation, source, whole)
                after.append((output, own))
                continue
            is_apart = source.untyped_storage().data_ptr() != output.untyped_storage().data_ptr()
            self._scatter(exchange, operation, source, output if is_apart else own, whole)
            if not is_apart:
                after.append((output, own))
        return self._start("reduce_scatter_tensor", exchange, outputs, opts, after)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _is_scattered(self, source: torch.Tensor) -> bool:
        bytes_ = source.numel() * source.element_size()
        return self._has_receivers(source) and bytes_ >= SCATTER_BYTES_MIN

    def _scatter(
        self,
        exchange: Exchange,
        operation: str,
        source: torch.Tensor,
        output: torch.Tensor,
        scratch: torch.Tensor,
    ) -> None:
        """This rank receives its part of the sum; ``scratch`` may be written for the others'."""
        if not _tensors.is_plain(source):
            source = _tensors.packed(source)
        parts, others = source.view(-1).chunk(self._size), scratch.view(-1).chunk(self._size)
        for rank, (part, other) in enumerate(zip(parts, others, strict=True)):
            kept = output if rank == self._rank else other
            exchange.reduce(operation, part, kept, rank)

    def barrier(self, opts: Any = None) -> Any:
        opts = opts or c10d.BarrierOptions()
        device = getattr(opts, "device", None)
        if device is not None and device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        token = torch.zeros(1, dtype=torch.int32, device="cpu")
        if self._keys is None:
            return self._fallback(token).barrier(opts)
        exchange = self._exchange(token)
        exchange.reduce("sum", token, token)
        return self._start("barrier", exchange, [token], opts)

    # The fallback

    def _fallback(self, tensor: torch.Tensor) -> Any:
        if self._host_fallback is None:
            raise UsageError(f"group {self._name} of torch.distributed was destroyed")
        if not tensor.is_cuda:
            return self._host_fallback
        if self._device_fallback is None:
            # Its ranks connect at the first operation that all of them make.
            store = c10d.PrefixStore("nccl", self._store)
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            self._device_fallback = c10d.ProcessGroupNCCL(store, self._rank, self._size, options)
        return self._device_fallback

    def _else(self, what: str, tensor: torch.Tensor, *arguments: Any) -> Any:
        self._sequence += 1
        return getattr(self._fallback(tensor), what)(*arguments)

    def _else_single(self, what: str, former: str, tensor: torch.Tensor, *arguments: Any) -> Any:
        """torch 2.15 has other names for what takes and gives one tensor."""
        fallback = self._fallback(tensor)
        name = what if hasattr(fallback, what) else former
        return self._else(name, tensor, tensor, *arguments)

    def send(self, tensors: Tensors, rank: int, tag: int = 0) -> Any:
        return self._else("send", tensors[0], tensors, rank, tag)

    def recv(self, tensors: Tensors, rank: int, tag: int = 0) -> Any:
        return self._else("recv", tensors[0], tensors, rank, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        return self._else("recv_anysource", tensors[0], tensors, tag)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        return self._else("gather", inputs[0], outputs, inputs, opts or c10d.GatherOptions())

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Any:
        return self._else("scatter", outputs[0], outputs, inputs, opts or c10d.ScatterOptions())

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        opts = opts or c10d.AllToAllOptions()
        return self._else("alltoall", outputs[0], outputs, inputs, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> Any:
        opts = opts or c10d.AllToAllOptions()
        sizes = output_sizes, input_sizes
        return self._else_single("all_to_all_single", "alltoall_base", output, input, *sizes, opts)

    alltoall_base = all_to_all_single

    def allreduce_sparse(self, tensors: Tensors, opts: Any = None) -> Any:
        return self._else("allreduce", tensors[0], tensors, opts or c10d.AllreduceOptions())

    def monitored_barrier(self, limit: Any = None, wait_all_ranks: bool = False) -> None:
        # C++ passes its options, programs a timedelta.
        timeout = getattr(limit, "timeout", limit)
        if timeout is None or timeout.total_seconds() <= 0:
            timeout = self._timeout
        self._fallback(torch.empty(0, device="cpu")).monitored_barrier(timeout, wait_all_ranks)


class Named:
    """For groups that are the process group itself: C++ keeps a group's name with its backends, of
    which these have none."""

    _name = _description = ""

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)


class _Group(Operations, _BASE):  # type: ignore[misc]
    def __init__(self, rank: int, size: int, name: str, timeout: timedelta) -> None:
        _BASE.__init__(self, rank, size)
        self._open(name, timeout)


class _NamedGroup(Named, _Group):
    pass


# torch.compile runs them as they are, wherever a compiled module comes by.
for _name in (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "all_gather_single",
    "_allgather_base", "all_gather_single_coalesced", "allgather_into_tensor_coalesced",
    "allgather_coalesced", "reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "barrier",
):  # fmt: skip
    setattr(Operations, _name, untraced(getattr(Operations, _name)))


def create(options: Any) -> Any:
    """The end of a new group in this process. All ranks of the group call it."""
    timeout = _joining.timeout_of(options)
    store = _joining.own_store(options)
    served = _joining.joins(options, store, timeout)
    keys = Keys(options.group_id, served.ranks) if served is not None else None
    rank, size = options.group_rank, options.group_size
    group = (_Group if _HAS_BACKENDS else _NamedGroup)(rank, size, options.group_id, timeout)
    group._join(store, rank, size, keys)
    return group
