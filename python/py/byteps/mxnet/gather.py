"""Gathering and dealing out, by Horovod's names: results have shapes that ranks tell each other.

These wait for their arrays and for their results, as Horovod's do, and none has a gradient. A rank
broadcasts what it has: it sends its own bytes once and receives those of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import mxnet as mx
from byteps import _native, _objects, _process_sets, _registry, _splits
from byteps._operations import Average, ReduceOp
from byteps.errors import BytePSError, TensorError, UsageError, _mismatch
from byteps.mxnet import reductions
from byteps.mxnet.ops import Ranks

__all__ = [
    "allgather",
    "allgather_object",
    "alltoall",
    "broadcast_object",
    "grouped_allgather",
    "grouped_reducescatter",
    "reducescatter",
]

_DIMENSIONS_MAX = 8
# What ranks tell of their types.
_DTYPES = ("float32", "float64", "float16", "bool", "uint8", "int8", "int32", "int64")
# A name stands for one size, so bytes travel in one of a few sizes: four for each power of two.
_ROOM_BYTES_MIN = 256
_ROOM_STEPS = 4


class _Block(NamedTuple):
    """What one rank sends: of the bytes in ``memory`` it needs the first ``used``."""

    memory: np.ndarray[Any, Any]
    used: int
    shape: list[int]

    def array(self, dtype: str) -> np.ndarray[Any, Any]:
        return self.memory[: self.used].view(dtype).reshape(self.shape)


def allgather(
    tensor: Any, name: str | None = None, priority: int = 0, process_set: Any = None
) -> Any:
    """The arrays of all ranks, one behind the other along dimension 0, in the order of the ranks.

    They have the same type and, but for dimension 0, the same shape; else it is a
    :class:`byteps.errors.MismatchError` on all ranks.

    Args:
        tensor: An array of one dimension at least, of a type that MXNet has for dense arrays.
        name: The same on all ranks; calls without one follow each other.
        priority: There for Horovod's callers: what others wait for goes before gradients.
        process_set: A :class:`~byteps.common.ProcessSet` of the ranks that take part.
    """
    return grouped_allgather([tensor], [name], priority, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Any], name: Any = None, priority: int = 0, process_set: Any = None
) -> list[Any]:
    """:func:`allgather` of several arrays at once.

    ``name`` is a list of names, or one that the arrays' indices are added to.
    """
    del priority
    ranks = _process_sets.ranks_of(process_set)
    given = reductions.names_of(name, len(tensors))
    names = [one or f"mxnet.allgather.{index}" for index, one in enumerate(given)]
    told = _tell(tensors, names, [[]] * len(tensors), ranks, "allgather")
    blocks: list[list[_Block]] = []
    sends = []
    for index, (tensor, one) in enumerate(zip(tensors, names, strict=True)):
        blocks.append([])
        for root, rows in zip(_process_sets.members(ranks), told, strict=True):
            shape = _shape(rows[index])
            own = tensor.asnumpy() if root == _native.rank() else None
            block = _block(own, tensor, shape)
            blocks[-1].append(block)
            if block.used:
                sends.append(_send(block, f"{one}.{root}", root, ranks))
    _registry.synchronize(_registry.start(sends, blocks, lambda memory: memory))
    return [_joined(of_tensor, one) for of_tensor, one in zip(blocks, tensors, strict=True)]


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    priority: int = 0,
    process_set: Any = None,
) -> Any:
    """Parts of the arrays of all ranks, along dimension 0, in the order of the ranks.

    ``splits[i]`` rows go to rank ``i`` (or the rank at place ``i`` of the ``process_set``), the
    first ones to the first; without it all get as many. Where it is given, the result is a pair:
    the array, and how many rows came from each rank, an array of int32. The other arguments are
    those of :func:`allgather`, and so is what has to be the same on all ranks.

    Raises:
        byteps.errors.ConfigError: for splits that are not whole numbers, one for each rank, none
            below 0 and all rows together.
    """
    del priority
    ranks = _process_sets.ranks_of(process_set)
    members = _process_sets.members(ranks)
    name = name or "mxnet.alltoall"
    told = [rows[0] for rows in _tell([tensor], [name], [splits], ranks, "alltoall")]
    own = members.index(_native.rank())
    begin_of_parts = 2 + _DIMENSIONS_MAX
    mine = told[own][begin_of_parts:]
    received = [row[begin_of_parts + own] for row in told]
    parts = np.split(tensor.asnumpy(), np.cumsum(mine)[:-1])
    came, sends, kept = [], [], []
    for place, other in enumerate(members):
        shape = [received[place], *tensor.shape[1:]]
        came.append(_block(parts[own] if place == own else None, tensor, shape))
        if place == own:
            continue
        self, pair = members[own], tuple(sorted((members[own], other)))
        goes = _block(parts[place], tensor, list(parts[place].shape))
        kept.append(goes)
        for root, to, one in ((self, other, goes), (other, self, came[place])):
            if one.used:
                sends.append(_send(one, f"{name}.{root} to {to}", root, pair))
    _registry.synchronize(_registry.start(sends, (came, kept), lambda memory: memory))
    output = _joined(came, tensor)
    return output if splits is None else (output, mx.nd.array(received, dtype="int32"))


def reducescatter(
    tensor: Any,
    op: ReduceOp = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """This rank's rows, along dimension 0, of the arrays of all ranks reduced by ``op``.

    The rows are dealt out evenly, in the order of the ranks; where they do not divide, the first
    ranks have one more. All receive the result and keep their rows. The arguments are those of
    :func:`allreduce`.
    """
    factors = prescale_factor, postscale_factor
    return grouped_reducescatter([tensor], op, [name], priority, process_set, *factors)[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    op: ReduceOp = Average,
    name: Any = None,
    priority: int = 0,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """:func:`reducescatter` of several arrays at once, all under way together.

    ``name`` is a list of names, or one that the arrays' indices are added to.
    """
    members = _process_sets.members(_process_sets.ranks_of(process_set))
    place, count = members.index(_native.rank()), len(members)
    for tensor in tensors:
        if tensor.shape[0] < count:
            raise TensorError(
                f"reducescatter of {tensor.shape[0]} rows among {count} ranks: MXNet has no arrays "
                "of no rows, so each rank needs one"
            )
    factors = prescale_factor, postscale_factor
    wholes = reductions.grouped_allreduce(tensors, None, name, priority, *factors, process_set, op)
    results = []
    for whole in wholes:
        least, more = divmod(whole.shape[0], count)
        begin = least * place + min(place, more)
        results.append(whole[begin : begin + least + (place < more)])
    return results


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: Any = None
) -> Any:
    """The object of ``root_rank``, as :func:`byteps.torch.broadcast_object` documents it."""
    ranks = _process_sets.ranks_of(process_set)
    return _objects.broadcast_object(obj, root_rank, name or "broadcast_object", ranks)


def allgather_object(obj: Any, name: str | None = None, process_set: Any = None) -> list[Any]:
    """The objects of all ranks, by rank."""
    name = name or "allgather_object"
    return [
        broadcast_object(obj, rank, f"{name}.{rank}", process_set)
        for rank in _process_sets.members(_process_sets.ranks_of(process_set))
    ]


# What they share


def _block(own: np.ndarray[Any, Any] | None, like: Any, shape: list[int]) -> _Block:
    """Room for an array of this shape, with what is this rank's own in it."""
    count = int(np.prod(shape, dtype=np.int64)) * np.dtype(like.dtype).itemsize
    memory = np.zeros(_room(count), np.uint8)
    if own is not None:
        memory[:count] = np.ascontiguousarray(own).reshape(-1).view(np.uint8)
    return _Block(memory, count, shape)


def _room(count: int) -> int:
    """The least size in which so many bytes travel: less than a quarter more."""
    if count <= _ROOM_BYTES_MIN:
        return _ROOM_BYTES_MIN
    step = (1 << ((count - 1).bit_length() - 1)) // _ROOM_STEPS
    return -(-count // step) * step


def _send(block: _Block, name: str, root: int, ranks: Ranks) -> _registry.Send:
    memory, room = block.memory, len(block.memory)
    tensor = _registry.Tensor(f"{name}.{room}", "u8", (room,), "broadcast", root, ranks=ranks)
    address = memory.ctypes.data
    return _registry.Send(tensor, address, address, _objects.BROADCAST_PRIORITY)


def _joined(blocks: Sequence[_Block], like: Any) -> Any:
    dtype = np.dtype(like.dtype)
    rows = np.concatenate([block.array(dtype.name) for block in blocks])
    if not rows.size:
        # Without NumPy's meaning of shapes, MXNet takes 0 for a length that is not known yet.
        with mx.util.np_shape(True):
            return mx.nd.array(rows, ctx=mx.cpu(), dtype=dtype)
    return mx.nd.array(rows, ctx=mx.cpu(), dtype=dtype)


def _tell(
    tensors: Sequence[Any], names: Sequence[str], splits: Sequence[Any], ranks: Ranks, what: str
) -> list[list[list[int]]]:
    """What all ranks have, by rank and array: dimensions, type, shape, and the rows for each rank.
    Raises on all ranks if they do not fit."""
    members = _process_sets.members(ranks)
    width = 2 + _DIMENSIONS_MAX + (len(members) if what == "alltoall" else 0)
    rows = np.zeros((len(members), len(tensors), width), np.int64)
    error: BytePSError | None = None
    for index, (tensor, name) in enumerate(zip(tensors, names, strict=True)):
        row = rows[members.index(_native.rank()), index]
        try:
            form = _form(tensor, name, what)
            row[: len(form)] = form
            if what == "alltoall":
                parts = splits[index]
                listed = parts.asnumpy() if isinstance(parts, mx.nd.NDArray) else parts
                wanted = _splits.rows_for_each(tensor.shape[0], listed, name, len(members))
                row[2 + _DIMENSIONS_MAX :] = wanted
        except BytePSError as wrong:
            # The other ranks hear of it.
            error, row[0] = wrong, -1
    # Ranks that pass other numbers of arrays disagree about the shape of this one.
    exchange = f"{names[0] if names else 'nothing'}.{what}"
    tensor = _registry.Tensor(exchange, "i64", rows.shape, "sum", ranks=ranks)
    address = rows.ctypes.data
    send = _registry.Send(tensor, address, address, _objects.BROADCAST_PRIORITY)
    _registry.synchronize(_registry.start([send], rows, lambda memory: memory))
    if error is not None:
        raise error
    told: list[list[list[int]]] = rows.tolist()
    _check_told(told, members, names, what)
    return told


def _check_told(
    told: list[list[list[int]]], members: Sequence[int], names: Sequence[str], what: str
) -> None:
    present = next((of_rank for of_rank in told if any(row[0] for row in of_rank)), None)
    for rank, of_rank in zip(members, told, strict=True):
        if present is None or any(row[0] for row in of_rank):
            continue
        # A rank that has joined has nothing of anything.
        if what == "alltoall":
            raise UsageError(
                f"alltoall of '{names[0]}': rank {rank} has called join() or died, and takes no "
                "part: exchange among a process set without it, or after all ranks have joined"
            )
        of_rank[:] = [[*row[:2], 0, *row[3:]] for row in present]
    end = 2 + _DIMENSIONS_MAX
    for index, name in enumerate(names):
        first = told[0][index]
        for rank, of_rank in zip(members, told, strict=True):
            row = of_rank[index]
            if row[0] < 0:
                raise _mismatch(
                    f"{what} of '{name}': rank {rank} has nothing that can be sent", (rank,), name
                )
            if row[:2] != first[:2] or row[3:end] != first[3:end]:
                raise _mismatch(
                    f"{what} of '{name}': rank {members[0]} has {_text(first)}, rank {rank} "
                    f"{_text(row)}: only dimension 0 may differ",
                    (members[0], rank),
                    name,
                )


def _form(tensor: Any, name: str, what: str) -> list[int]:
    """Dimensions, type, and shape."""
    if not isinstance(tensor, mx.nd.NDArray) or tensor.stype != "default":
        raise TensorError(f"{what} of '{name}': a dense array of MXNet is wanted, not {tensor!r}")
    dtype, shape = np.dtype(tensor.dtype).name, tensor.shape
    if not 0 < len(shape) <= _DIMENSIONS_MAX or dtype not in _DTYPES:
        raise TensorError(
            f"{what} of '{name}': an array of 1 to {_DIMENSIONS_MAX} dimensions is wanted, not "
            f"{len(shape)} of {dtype}"
        )
    return [len(shape), _DTYPES.index(dtype), *shape]


def _shape(row: list[int]) -> list[int]:
    return row[2 : 2 + row[0]]


def _text(row: list[int]) -> str:
    return f"{_DTYPES[row[1]]} of ({', '.join(map(str, _shape(row)))})"
