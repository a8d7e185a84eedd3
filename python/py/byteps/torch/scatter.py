"""Scattering: every rank gets a part of what is reduced, or a part of what every other rank has.

A reducescatter is a push_pull of which each rank keeps its rows. In an alltoall two ranks at a time
send each other what is for them: a broadcast in a set of these two.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from byteps import _operations, _process_sets, _registry, _splits, common
from byteps._operations import Average, ReduceOp
from byteps.errors import BytePSError, ConfigError, TensorError, UsageError, _mismatch
from byteps.torch import _gpu, _sending, _tensors, gather, ops
from byteps.torch.compression import Compression

__all__ = [
    "alltoall",
    "alltoall_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
]


# Reducescatter


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """:func:`reducescatter` that does not wait."""
    how = op, prescale_factor, postscale_factor
    return _reduce_start([tensor], [name], how, _process_sets.ranks_of(process_set), single=True)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: Any = None,
    op: ReduceOp = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """:func:`grouped_reducescatter` that does not wait: one handle for all."""
    names, how = ops.names_of(name, len(tensors)), (op, prescale_factor, postscale_factor)
    return _reduce_start(tensors, names, how, _process_sets.ranks_of(process_set), single=False)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """This rank's rows, along dimension 0, of the tensors of all ranks reduced by ``op``.

    The rows are dealt out evenly, in the order of the ranks; where they do not divide, the first
    ranks have one more. ``process_set`` is a :class:`~byteps.torch.ProcessSet` of the ranks that
    take part, here and below. Autograd passes through averages and sums: the gradient of a sum is
    what the ranks have of theirs, one behind the other, and of an average that over their number.
    """
    factors = prescale_factor, postscale_factor
    return grouped_reducescatter([tensor], [name], compression, op, process_set, *factors)[0]


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: Any = None,
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """:func:`reducescatter` of several tensors at once.

    ``name`` is a list of names, or one that the tensors' indices are added to.
    """
    names, how = ops.names_of(name, len(tensors)), (op, prescale_factor, postscale_factor)
    ranks = _process_sets.ranks_of(process_set)
    operation = _operations.operation_of(True, op)
    if operation not in ("average", "sum") and compression is not Compression.none:
        raise ConfigError(f"compression={compression!r} is for averages and sums, not {operation}")
    for tensor, one in zip(tensors, names, strict=True):
        _check_rows(tensor, one)
    smaller = [compression.compress(tensor) for tensor in tensors]
    sent = [tensor for tensor, _ in smaller]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in sent):
        outputs = _Reducescatter.apply(names, how, process_set, *sent)
    else:
        outputs = ops.synchronize(_reduce_start(sent, names, how, ranks, single=False))
    return [
        compression.decompress(output, context)
        for output, (_, context) in zip(outputs, smaller, strict=True)
    ]


def _check_rows(tensor: torch.Tensor, name: str | None) -> None:
    _tensors.check(tensor, "reducescatter of", name)
    if tensor.dim() == 0:
        raise TensorError(
            f"reducescatter of '{name or 'a tensor'}': a tensor of at least one dimension is "
            "wanted; view(1) gives a number one"
        )


def _rows_of(rows: int, count: int, place: int) -> tuple[int, int]:
    """The first row of the one at this place, of so many, and how many it has."""
    least, more = divmod(rows, count)
    return least * place + min(place, more), least + (place < more)


def _reduce_start(
    tensors: Sequence[torch.Tensor],
    names: Sequence[str | None],
    how: tuple[ReduceOp, float, float],
    ranks: _sending.Ranks,
    *,
    single: bool,
) -> int:
    op, prescale, postscale = how
    for tensor, name in zip(tensors, names, strict=True):
        _check_rows(tensor, name)
    members = _process_sets.members(ranks)
    place = members.index(common.rank())

    def own_rows(reduced: list[torch.Tensor]) -> Any:
        parts = [
            whole.narrow(0, *_rows_of(whole.shape[0], len(members), place)).clone()
            for whole in reduced
        ]
        return parts[0] if single else parts

    return ops.push_pull_start(
        tensors,
        _operations.operation_of(True, op),
        names,
        0,
        False,
        False,
        prescale,
        postscale,
        ranks,
        own_rows,
    )


class _Reducescatter(torch.autograd.Function):
    """reducescatter as autograd sees it."""

    @staticmethod
    def forward(
        ctx: Any,
        names: list[str | None],
        how: tuple[ReduceOp, float, float],
        process_set: Any,
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.names, ctx.how, ctx.process_set = names, how, process_set
        ranks = _process_sets.ranks_of(process_set)
        return tuple(ops.synchronize(_reduce_start(tensors, names, how, ranks, single=False)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        op, prescale, postscale = ctx.how
        operation = _operations.operation_of(True, op)
        if operation not in ("average", "sum"):
            raise ConfigError(f"a reducescatter with the operation {operation} has no gradient")
        count = len(_process_sets.members(_process_sets.ranks_of(ctx.process_set)))
        factor = prescale * postscale / (count if operation == "average" else 1)
        names = [name and f"{name}.backward" for name in ctx.names]
        wholes = gather.grouped_allgather(gradients, names, ctx.process_set)
        return None, None, None, *(whole * factor for whole in wholes)


# Alltoall


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: Any = None,
) -> int:
    """:func:`alltoall` that waits for what ranks say of their parts, and not for the parts.

    :func:`~byteps.torch.synchronize` returns the tensor and the received splits.
    """
    return _exchange_start(tensor, splits, name, _process_sets.ranks_of(process_set))


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: Any = None,
) -> Any:
    """Parts of the tensors of all ranks, along dimension 0, in the order of the ranks.

    ``splits[i]`` rows go to rank ``i`` (or the rank at place ``i`` of the ``process_set``), the
    first ones to the first; without it all get as many. Where it is given, the result is a pair:
    the tensor, and how many rows came from each rank, an int32 tensor in host memory. Ranks pass
    the same type and, but for dimension 0, shape; else it is a
    :class:`byteps.errors.MismatchError` on all of them. Autograd passes through: gradients go back
    the same way.
    """
    if torch.is_grad_enabled() and isinstance(tensor, torch.Tensor) and tensor.requires_grad:
        output, received = _Alltoall.apply(tensor, splits, name, process_set)
    else:
        output, received = ops.synchronize(alltoall_async(tensor, splits, name, process_set))
    return output if splits is None else (output, received)


class _Alltoall(torch.autograd.Function):
    """alltoall as autograd sees it."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: Any
    ) -> Any:
        output, received = ops.synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.received, ctx.name, ctx.process_set = received, name, process_set
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
        name = ctx.name and f"{ctx.name}.backward"
        handle = alltoall_async(gradient, ctx.received, name, ctx.process_set)
        return ops.synchronize(handle)[0], None, None, None


def _exchange_start(
    tensor: torch.Tensor, splits: Any, name: str | None, ranks: _sending.Ranks
) -> int:
    name = name or "alltoall"
    members = _process_sets.members(ranks)
    own = members.index(common.rank())
    told = _tell(tensor, splits, name, ranks)
    mine, received = told[own], [of_rank[own] for of_rank in told]
    begin, parts = 0, []
    for rows in mine:
        parts.append(tensor.narrow(0, begin, rows))
        begin += rows
    blocks: list[gather.Block] = []
    sends, sent = [], []
    for place, other in enumerate(members):
        shape = [received[place], *tensor.shape[1:]]
        pair = tuple(sorted({common.rank(), other}))
        block = gather.block_of(parts[own], shape, pair, is_own=place == own)
        blocks.append(block)
        if place == own:
            continue
        ours = gather.block_of(parts[place], list(parts[place].shape), pair, is_own=True)
        sent.append(ours)
        for root, one in ((common.rank(), ours), (other, block)):
            if one.used:
                to = other if root == common.rank() else common.rank()
                sends.append(
                    _sending.send(
                        "alltoall of",
                        _tensors.in_place(one.memory),
                        "broadcast",
                        f"{name}.{root} to {to}.{one.memory.numel()}",
                        ops.BROADCAST_PRIORITY,
                        root,
                        ranks=pair,
                    )
                )

    def finish(memory: Any) -> Any:
        _gpu.keep_for_current_stream([block.memory for some in memory for block in some])
        output = torch.cat([block.tensor(tensor.dtype) for block in memory[0]])
        return output.to(tensor.device), torch.tensor(received, dtype=torch.int32, device="cpu")

    # What goes to one rank is for a pair, so it is a tensor of the host to the job.
    stream = _gpu.open_for((block.memory for block in (*blocks, *sent)), itertools.repeat(False))
    return _registry.start(sends, (blocks, sent), finish, stream)


def _tell(tensor: torch.Tensor, splits: Any, name: str, ranks: _sending.Ranks) -> list[list[int]]:
    """The splits of all ranks; raises on all of them if their tensors do not fit."""
    members = _process_sets.members(ranks)
    count, width = len(members), 2 + gather.DIMENSIONS_MAX
    rows = torch.zeros(count, width + count, dtype=torch.int64, device="cpu")
    own = rows[members.index(common.rank())]
    error: BytePSError | None = None
    try:
        row = gather.row_of(tensor, name, "alltoall")
        parts = _splits.rows_for_each(tensor.shape[0], splits, name, count)
        own[: len(row)] = torch.tensor(row)
        own[width:] = torch.tensor(parts)
    except BytePSError as wrong:
        # The other ranks hear of it.
        error, own[0] = wrong, -1
    handle = ops.push_pull_start(
        [rows], "sum", [f"{name}.splits"], ops.BROADCAST_PRIORITY, True, True, ranks=ranks
    )
    told = ops.synchronize(handle).tolist()
    if error is not None:
        raise error
    first = told[0]
    for rank, one in zip(members, told, strict=True):
        if one[0] == 0:
            raise UsageError(
                f"alltoall of '{name}': rank {rank} has called join() or died, and takes no part: "
                "exchange among a process set without it, or after all ranks have joined"
            )
        if one[0] < 0:
            raise _mismatch(
                f"alltoall of '{name}': rank {rank} has nothing that can be sent", (rank,), name
            )
        if one[:2] != first[:2] or one[3:width] != first[3:width]:
            raise _mismatch(
                f"alltoall of '{name}': rank {members[0]} has {gather.text_of(first)}, rank {rank} "
                f"{gather.text_of(one)}: only dimension 0 may differ",
                (members[0], rank),
                name,
            )
    return [one[width:] for one in told]
