"""Horovod's process sets: some ranks of the job, which reduce and gather among themselves.

A set is a list of ranks, and every tensor that travels in it is declared for these. What a job
keeps of it beside is the number that all ranks give it when they add it together.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import Any

from byteps import _native, _registry
from byteps.errors import ConfigError, WaitTimeoutError, _mismatch

__all__ = [
    "GlobalProcessSet",
    "ProcessSet",
    "add_process_set",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "ranks_of",
    "remove_process_set",
]


class ProcessSet:
    """Ranks of the job, in rising order; of use once all ranks of the job have added it.

    It holds as long as the job does as it is: after :func:`~byteps.torch.shutdown` or ``suspend``,
    or when an elastic job goes on without a rank, the numbers may stand for other processes, so it
    has to be added again.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        if not isinstance(ranks, Sequence) or isinstance(ranks, str):
            raise ConfigError(f"ProcessSet({ranks!r}): a list of ranks is wanted")
        if not all(isinstance(rank, int) and rank >= 0 for rank in ranks):
            raise ConfigError(f"ProcessSet({ranks!r}): ranks are whole numbers from 0")
        if not ranks or len(set(ranks)) != len(ranks):
            raise ConfigError(f"ProcessSet({ranks!r}): one rank at least, and each of them once")
        self.ranks: list[int] = sorted(ranks)

    @property
    def process_set_id(self) -> int | None:
        """Its number, the same on all ranks; None where it is not added to this job."""
        return next((number for number, known in _sets().items() if known is self), None)

    def size(self) -> int | None:
        """How many ranks it has; None where it is not added."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """The number of this process among its ranks, -1 if it is none; None where not added."""
        if self.process_set_id is None:
            return None
        own = _native.rank()
        return self.ranks.index(own) if own in self.ranks else -1

    def included(self) -> bool | None:
        """Whether this process is one of its ranks; None where it is not added."""
        return None if self.process_set_id is None else _native.rank() in self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet({self.ranks})"


class GlobalProcessSet(ProcessSet):
    """All ranks of the job."""

    def __init__(self) -> None:
        pass

    @property
    def process_set_id(self) -> int:
        """Its number."""
        return 0

    @property
    def ranks(self) -> list[int]:  # type: ignore[override]
        """Its members."""
        return list(range(self.size()))

    def size(self) -> int:
        """How many there are."""
        return _native.size()

    def rank(self) -> int:
        """The number of this process among them."""
        return _native.rank()

    def included(self) -> bool:
        """Whether this process is one of them."""
        return True

    def __repr__(self) -> str:
        return "global_process_set"

    def __reduce__(self) -> str:
        return "global_process_set"


#: All ranks of the job: what every function takes that has a ``process_set``, as it takes None.
global_process_set = GlobalProcessSet()

# Those of the job with this number, by the numbers that they have; the next number is beside.
_known: dict[int, ProcessSet] = {}
_job = _next = 0


def _sets() -> dict[int, ProcessSet]:
    global _job, _next
    if _job != _registry.job_number() or not _native.is_initialized():
        _known.clear()
        _job, _next = _registry.job_number(), 1
    return _known


def _agree(ranks: Sequence[int], adds: bool) -> None:
    """Returns once all ranks of the job add, or remove, these ranks; raises where they differ."""
    size = _native.size()
    votes = [0] * (size + 2)
    for place in (*ranks, size + adds):
        votes[place] = 1
    # Without those that have died, in a job that goes on without them.
    told, voters = _summed("process_set", votes)
    if any(count not in (0, len(voters)) for count in told):
        verb = "adds" if adds else "removes"
        # The sum of the votes does not say which the other ranks are.
        raise _mismatch(
            f"rank {_native.rank()} {verb} the process set {list(ranks)}, and other ranks do not: "
            "make the same calls of add_process_set and remove_process_set, in the same order, on "
            "all ranks of the job",
            (_native.rank(),),
        )


def _summed(name: str, values: Sequence[int]) -> tuple[list[int], list[int]]:
    """The sums of small numbers over all ranks, and the ranks that are in them."""
    memory = array.array("i", values)
    address = memory.buffer_info()[0]
    tensor = _registry.Tensor(name, "i32", (len(memory),), "sum")
    handle = _registry.start([_registry.Send(tensor, address, address)], memory, list)
    ranks = _registry.contributors(handle) or []
    return _registry.synchronize(handle), ranks


def live_ranks() -> list[int]:
    """The ranks that take part in a small sum that all of them make here, rising: the same ones on
    every rank.

    All ranks of the job call it together, as a barrier. They are all, :func:`size` of them, unless
    some have died in a job that goes on without them (``BPS_ELASTIC=shrink``). It tells nothing of
    other results: a rank that has died may be in some from before, and one that lives now need not
    be in the next.

    Raises:
        BytePSError: What has ended the job.
    """
    return _summed("live_ranks", [1])[1]


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Makes a set of ranks known to the job, and returns it.

    All ranks of the job call it alike, also those that are not in the set, and it returns when all
    have. Ranks that are a set already are a ConfigError.
    """
    global _next
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    known, size = _sets(), _native.size()
    if process_set is global_process_set or process_set.process_set_id is not None:
        raise ConfigError(f"{process_set!r} is added already")
    if process_set.ranks[-1] >= size:
        raise ConfigError(f"{process_set!r}: the ranks of this job are 0 to {size - 1}")
    if any(other.ranks == process_set.ranks for other in known.values()):
        raise ConfigError(f"{process_set!r}: another set has these ranks, use that or remove it")
    _agree(process_set.ranks, adds=True)
    known[_next] = process_set
    _next += 1
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forgets a set; False for one that is not there, and for that of all ranks.

    All ranks of the job call it alike, and it returns when all have.
    """
    number = process_set.process_set_id
    if number is None or process_set is global_process_set:
        return False
    _agree(process_set.ranks, adds=False)
    del _sets()[number]
    return True


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """The ranks of each set, by its number; 0 is that of all ranks."""
    sets: dict[int, ProcessSet] = {0: global_process_set, **_sets()}
    return {number: list(known.ranks) for number, known in sets.items()}


def added(process_set: Any) -> ProcessSet | None:
    """The set if it is of use in this job; None for all ranks. Raises for anything else."""
    if process_set is None or process_set is global_process_set:
        return None
    if not isinstance(process_set, ProcessSet):
        raise ConfigError(
            f"process_set={process_set!r}: a ProcessSet is wanted, or global_process_set or None "
            "for all ranks"
        )
    if process_set.process_set_id is None:
        raise ConfigError(
            f"{process_set!r} is not added to this job, or was added before its ranks changed: "
            "call add_process_set on all ranks"
        )
    return process_set


def share(process_set: Any) -> float:
    """What a rank's own gradient is multiplied by, to be as large as averages over these ranks."""
    found = added(process_set)
    if found is not None and not found.included():
        return 1.0
    return 1.0 / (_native.size() if found is None else len(found.ranks))


def ranks_of(process_set: Any) -> tuple[int, ...] | None:
    """The ranks that a call is for; None for all. Raises where this process is none of them."""
    known = added(process_set)
    if known is None:
        return None
    if _native.rank() not in known.ranks:
        raise ConfigError(
            f"rank {_native.rank()} is not in {process_set!r}: only its ranks make calls in it; "
            "ask process_set.included()"
        )
    return tuple(known.ranks)


def check_of_program(ranks: tuple[int, ...]) -> None:
    """Raises unless these are a set of this job: a program may be older than the job."""
    if all(known.ranks != list(ranks) for known in _sets().values()):
        raise ConfigError(
            f"a program that was compiled for the process set {list(ranks)} runs in a job that has "
            "no such set: call add_process_set on all ranks before it"
        )


def members(ranks: tuple[int, ...] | None) -> Sequence[int]:
    """The same, all of them spelt out."""
    return range(_native.size()) if ranks is None else ranks


def barrier(ranks: tuple[int, ...], timeout: float | None) -> None:
    """Returns when all of these ranks have called it."""
    votes = array.array("i", [1])
    address = votes.buffer_info()[0]
    tensor = _registry.Tensor("barrier", "i32", (1,), "sum", ranks=ranks)
    handle = _registry.start([_registry.Send(tensor, address, address)], votes, list)
    try:
        _registry.synchronize(handle, timeout)
    except WaitTimeoutError as error:
        late = WaitTimeoutError(f"barrier of ranks {list(ranks)}: not all came within {timeout} s")
        late.waited_s = timeout
        raise late from error
