"""Names for operations that have none: which tensors of the engine carry a sum or a broadcast.

The servers keep an accumulator for each tensor that is declared, for as long as the job runs. The
calls of a program have no names and may have any number of sizes. So operations of one kind and
size take turns at a few tensors, and when a group has used many sizes, further ones are put
together from pieces whose sizes are powers of two. What the servers hold is bounded then, whatever
the program does.

All ranks of a group make the same calls in the same order, as ``torch.distributed`` demands; which
tensor an operation gets follows from that order alone.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from byteps import _native, _registry
from byteps._registry import Tensor
from byteps.torch._tensors import SIZES

#: Sizes that get tensors of their own, as a count and in bytes of each group.
EXACT_COUNT, EXACT_BYTES = 512, 512 << 20
#: A size of at least so many bytes has few tensors to take turns at, a smaller one more: the more
#: there are, the more operations of the size are under way at once, and the more the servers hold.
_LARGE_BYTES, _LARGE_TURNS, _SMALL_TURNS = 256 << 10, 2, 8
#: The smallest and the largest piece. What is below the smallest keeps its size.
_PIECE_BYTES_MIN, _PIECE_BYTES_MAX = 256, 64 << 20


class Kind(NamedTuple):
    """What the ranks must agree on besides the size: ``root`` counts for broadcasts, and a
    ``receiver`` is the rank of the job that alone gets the result. Calls that callbacks of futures
    make are of another kind than the program's own: only each for itself has an order that is the
    same on all ranks."""

    operation: str
    dtype: str
    device: bool = False
    root: int = 0
    is_in_callback: bool = False
    receiver: int | None = None


#: Number of a tensor, and where its bytes begin within the operation's.
Piece = tuple[int, int]


class _Turns:
    """The tensors that operations of one size take turns at: as many as there have to be."""

    __slots__ = ("lists", "next", "turns")

    def __init__(self, turns: int) -> None:
        self.turns = turns
        self.lists: list[Sequence[Piece]] = []
        self.next = 0


class Keys:
    """The tensors of one group. ``ranks`` are those of the job that it has, in its order; all where
    it is None."""

    def __init__(self, group: str, ranks: tuple[int, ...] | None = None) -> None:
        self._prefix = f"torch.distributed.{group}"
        self._ranks = ranks
        self._members = None if ranks is None else tuple(sorted(ranks))
        self._job = _registry.job_number()
        self._lock = threading.Lock()
        self._sizes: dict[tuple[Kind, int], _Turns] = {}
        self._exact_count, self._exact_bytes = 0.0, 0
        # A job that goes on without ranks that die gives results to all of them.
        self.has_receivers = not _native.shrinks()
        self._size = _native.size() if ranks is None else len(ranks)
        self._piece_turns: dict[tuple[Kind, int], int] = {}

    def is_of_this_job(self) -> bool:
        """Whether the job in which the group was made still runs."""
        return self._job == _registry.job_number()

    @property
    def are_all(self) -> bool:
        """Whether the group has all ranks of the job."""
        return self._ranks is None

    def rank_of(self, rank: int) -> int:
        """The number in the job of a rank of the group."""
        return rank if self._ranks is None else self._ranks[rank]

    def of(self, kind: Kind, count: int) -> Sequence[Piece]:
        """The tensors for the next operation of this kind on so many elements.

        The first calls of a kind and size declare them, which takes a round trip to the scheduler.
        """
        with self._lock:
            turns = self._sizes.get((kind, count))
            if turns is None:
                turns = self._admit(kind, count)
                if turns is None:
                    return self._pieces(kind, count)
            if turns.next >= len(turns.lists):
                turns.lists.append(self._declare(kind, [(count, turns.next)]))
            pieces = turns.lists[turns.next]
            turns.next = (turns.next + 1) % turns.turns
            return pieces

    def _admit(self, kind: Kind, count: int) -> _Turns | None:
        size = count * SIZES[kind.dtype]
        turns = _LARGE_TURNS if size >= _LARGE_BYTES else _SMALL_TURNS
        if self._exact_count >= EXACT_COUNT or self._exact_bytes + turns * size > EXACT_BYTES:
            return None
        # A reduce-scatter has a kind for each rank.
        self._exact_count += 1 if kind.receiver is None else 1 / self._size
        self._exact_bytes += turns * size
        self._sizes[kind, count] = _Turns(turns)
        return self._sizes[kind, count]

    def _pieces(self, kind: Kind, count: int) -> Sequence[Piece]:
        wanted = []
        for part in split(count, SIZES[kind.dtype]):
            number = self._piece_turns.get((kind, part), 0)
            self._piece_turns[kind, part] = (number + 1) % _LARGE_TURNS
            wanted.append((part, number))
        return self._declare(kind, wanted)

    def _declare(self, kind: Kind, wanted: Sequence[tuple[int, int]]) -> Sequence[Piece]:
        tensors = [
            Tensor(self._name(kind, count, number), kind.dtype, (count,), *kind[:1], kind.root,
                   kind.device, self._members, receiver=kind.receiver)
            for count, number in wanted
        ]  # fmt: skip
        numbers = _registry.declare(tensors)
        pieces, offset = [], 0
        for number, (count, _) in zip(numbers, wanted, strict=True):
            pieces.append((number, offset))
            offset += count * SIZES[kind.dtype]
        return pieces

    def _name(self, kind: Kind, count: int, number: int) -> str:
        root = f" from {kind.root}" if kind.operation == "broadcast" else ""
        to = f" to {kind.receiver}" if kind.receiver is not None else ""
        caller = " in callbacks" if kind.is_in_callback else ""
        return (
            f"{self._prefix}: {kind.operation}{root}{to} of {count} {kind.dtype}{caller}, {number}"
        )


def split(count: int, itemsize: int) -> list[int]:
    """The counts of elements of the pieces: powers of two, and the small rest."""
    largest, smallest = _PIECE_BYTES_MAX // itemsize, max(_PIECE_BYTES_MIN // itemsize, 1)
    parts = [largest] * (count // largest)
    rest = count % largest
    while rest >= smallest:
        part = 1 << (rest.bit_length() - 1)
        parts.append(part)
        rest -= part
    if rest:
        parts.append(rest)
    return parts
