"""Gathering: every rank gets the tensors of all ranks.

Each rank broadcasts what it has: it sends its own bytes once and receives those of the others.
Sizes may differ between ranks and calls, so ranks tell each other their shapes first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from byteps import _process_sets, _registry, common
from byteps.errors import BytePSError, TensorError, _mismatch
from byteps.torch import _gpu, _sending, _tensors, functions, ops

__all__ = [
    "allgather",
    "allgather_async",
    "allgather_object",
    "grouped_allgather",
    "grouped_allgather_async",
]

DIMENSIONS_MAX = 8
# What ranks tell of their types: all have the same release, but perhaps not the same torch.
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.complex64, torch.complex128),
)
# A name stands for one size, so bytes travel in one of a few sizes: four for each power of two.
_ROOM_BYTES_MIN = 256
_ROOM_STEPS = 4


class Block(NamedTuple):
    """What one rank gathers: in ``memory``, of which it needs the first ``used`` bytes."""

    memory: torch.Tensor
    used: int
    shape: list[int]

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        return self.memory[: self.used].view(dtype).view(self.shape)


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: Any = None) -> int:
    """:func:`allgather` that does not wait for the tensors, only for their shapes."""
    return _start([tensor], [name], _process_sets.ranks_of(process_set), single=True)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: Any = None, process_set: Any = None
) -> int:
    """:func:`grouped_allgather` that does not wait for the tensors, only for their shapes."""
    ranks = _process_sets.ranks_of(process_set)
    return _start(tensors, ops.names_of(name, len(tensors)), ranks, single=False)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: Any = None
) -> torch.Tensor:
    """The tensors of all ranks, one behind the other along dimension 0, in the order of the ranks.

    They have the same type and, but for dimension 0, the same shape; else it is a
    :class:`byteps.errors.MismatchError` on all ranks. Any type that torch has is copied bit for
    bit. Autograd passes through: the gradient is this rank's part of the average of the ranks'
    gradients, as in Horovod. ``process_set``, here and below, is a
    :class:`~byteps.torch.ProcessSet` of the ranks that take part.
    """
    return grouped_allgather([tensor], [name], process_set)[0]


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: Any = None, process_set: Any = None
) -> list[torch.Tensor]:
    """:func:`allgather` of several tensors at once.

    ``name`` is a list of names, or one that the tensors' indices are added to.
    """
    ranks = _process_sets.ranks_of(process_set)
    names = ops.names_of(name, len(tensors))
    if torch.is_grad_enabled() and any(
        isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors
    ):
        return list(_Allgather.apply(names, process_set, *tensors))
    result: list[torch.Tensor] = ops.synchronize(_start(tensors, names, ranks, single=False))
    return result


def allgather_object(obj: Any, name: str | None = None, process_set: Any = None) -> list[Any]:
    """The objects of all ranks, by rank; pickled as by :func:`byteps.torch.broadcast_object`."""
    name = name or "allgather_object"
    return [
        functions.broadcast_object(obj, rank, f"{name}.{rank}", process_set)
        for rank in _process_sets.members(_process_sets.ranks_of(process_set))
    ]


class _Allgather(torch.autograd.Function):
    """allgather as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, names: list[str | None], process_set: Any, *tensors: torch.Tensor) -> Any:
        ctx.names, ctx.process_set = names, process_set
        ranks = _process_sets.ranks_of(process_set)
        handle, shapes = begin(tensors, names, ranks, _concatenated)
        before = shapes[: _process_sets.members(ranks).index(common.rank())]
        ctx.own = [
            (sum(int(of_rank[index][0]) for of_rank in before), tensor.shape[0])
            for index, tensor in enumerate(tensors)
        ]
        return tuple(ops.synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        names = [name and f"{name}.backward" for name in ctx.names]
        means = ops.push_pull_group(gradients, name=names, process_set=ctx.process_set)
        parts = zip(means, ctx.own, strict=True)
        return None, None, *(mean.narrow(0, begin, rows).clone() for mean, (begin, rows) in parts)


def _start(
    tensors: Sequence[torch.Tensor],
    names: Sequence[str | None],
    ranks: _sending.Ranks,
    *,
    single: bool,
) -> int:
    return begin(tensors, names, ranks, _only if single else _concatenated)[0]


def _concatenated(gathered: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.cat(of_tensor) for of_tensor in gathered]


def _only(gathered: list[list[torch.Tensor]]) -> torch.Tensor:
    return _concatenated(gathered)[0]


def begin(
    tensors: Sequence[torch.Tensor],
    names: Sequence[str | None],
    ranks: _sending.Ranks,
    then: Callable[[list[list[torch.Tensor]]], Any],
    what: str = "allgather",
) -> tuple[int, list[list[list[int]]]]:
    """The handle, and the shapes of all ranks' tensors, by rank and tensor.

    What :func:`ops.synchronize` returns is what ``then`` makes of the gathered tensors, which it
    gets by tensor and rank. ``what`` is the call, for messages.
    """
    known = [name or f"{what}.{index}" for index, name in enumerate(names)]
    shapes = _shapes(tensors, known, ranks, what)
    blocks: list[list[Block]] = []
    sends = []
    for index, (tensor, name) in enumerate(zip(tensors, known, strict=True)):
        blocks.append([])
        for root, of_rank in zip(_process_sets.members(ranks), shapes, strict=True):
            block = block_of(tensor, of_rank[index], ranks, is_own=root == common.rank())
            blocks[-1].append(block)
            if block.used:
                room = block.memory.numel()
                sends.append(
                    _sending.send(
                        f"{what} of",
                        _tensors.in_place(block.memory),
                        "broadcast",
                        f"{name}.{root}.{room}",
                        ops.BROADCAST_PRIORITY,
                        root,
                        ranks=ranks,
                    )
                )

    def finish(blocks: list[list[Block]]) -> Any:
        memories = [block.memory for of_tensor in blocks for block in of_tensor]
        _gpu.keep_for_current_stream(memories)
        return then(
            [
                [block.tensor(tensor.dtype).to(tensor.device) for block in of_tensor]
                for tensor, of_tensor in zip(tensors, blocks, strict=True)
            ]
        )

    stream = _gpu.open_for(
        (block.memory for of_tensor in blocks for block in of_tensor),
        itertools.repeat(ranks is None),
    )
    return _registry.start(sends, blocks, finish, stream), shapes


def block_of(
    tensor: torch.Tensor, shape: list[int], ranks: _sending.Ranks, *, is_own: bool
) -> Block:
    count = tensor.element_size()
    for length in shape:
        count *= length
    memory = torch.empty(_room(count), dtype=torch.uint8, device=tensor.device)
    if is_own and count:
        memory[:count].view(tensor.dtype).view(shape).copy_(tensor.detach())
        memory[count:] = 0
    return Block(memory, count, shape)


def _room(count: int) -> int:
    """The least size in which so many bytes travel: less than a quarter more."""
    if count <= _ROOM_BYTES_MIN:
        return _ROOM_BYTES_MIN
    step = (1 << ((count - 1).bit_length() - 1)) // _ROOM_STEPS
    return -(-count // step) * step


def _shapes(
    tensors: Sequence[torch.Tensor], names: Sequence[str], ranks: _sending.Ranks, what: str
) -> list[list[list[int]]]:
    """By rank and tensor; raises on all ranks if they do not fit."""
    members = _process_sets.members(ranks)
    rows = torch.zeros(
        len(members), len(tensors), 2 + DIMENSIONS_MAX, dtype=torch.int64, device="cpu"
    )
    own = rows[members.index(common.rank())]
    error: BytePSError | None = None
    for row, tensor, name in zip(own, tensors, names, strict=True):
        try:
            row[: 2 + tensor.dim()] = torch.tensor(row_of(tensor, name, what))
        except BytePSError as wrong:
            # The other ranks hear of it.
            error, row[0] = wrong, -1
    # Ranks that pass other numbers of tensors disagree about the shape of this one.
    exchange = f"{names[0] if names else 'nothing'}.shapes"
    handle = ops.push_pull_start(
        [rows], "sum", [exchange], ops.BROADCAST_PRIORITY, True, True, ranks=ranks
    )
    told = ops.synchronize(handle).tolist()
    if error is not None:
        raise error
    _give_no_rows(told)
    for index, name in enumerate(names):
        first = told[0][index]
        for rank, of_rank in zip(members, told, strict=True):
            row = of_rank[index]
            if row[0] < 0:
                raise _mismatch(
                    f"{what} of '{name}': rank {rank} has none that can be gathered", (rank,), name
                )
            if row[:2] != first[:2] or row[3:] != first[3:]:
                raise _mismatch(
                    f"{what} of '{name}': rank {members[0]} has {text_of(first)}, rank {rank} "
                    f"{text_of(row)}: only dimension 0 may differ",
                    (members[0], rank),
                    name,
                )
    return [[row[2 : 2 + row[0]] for row in of_rank] for of_rank in told]


def _give_no_rows(told: list[list[list[int]]]) -> None:
    """Lets ranks that have joined, whose shapes are zeros, gather no rows of the others' shapes."""
    is_there = [any(row[0] for row in of_rank) for of_rank in told]
    if all(is_there) or not any(is_there):
        return
    present = told[is_there.index(True)]
    for of_rank, there in zip(told, is_there, strict=True):
        if not there:
            of_rank[:] = [[*row[:2], 0, *row[3:]] for row in present]


def row_of(tensor: torch.Tensor, name: str, what: str = "allgather") -> list[int]:
    """Dimensions, type, and shape."""
    _tensors.check(tensor, f"{what} of", name)
    if not 0 < tensor.dim() <= DIMENSIONS_MAX or tensor.dtype not in _DTYPES:
        raise TensorError(
            f"{what} of '{name}': a tensor of 1 to {DIMENSIONS_MAX} dimensions is wanted, not "
            f"{tensor.dim()} of {tensor.dtype}; view(1) gives a number a dimension"
        )
    return [tensor.dim(), _DTYPES.index(tensor.dtype), *tensor.shape]


def text_of(row: list[int]) -> str:
    shape = ", ".join(map(str, row[2 : 2 + row[0]]))
    return f"{_DTYPES[row[1]]} of ({shape})"
