"""Whether a group of ``torch.distributed`` is a job of the engine, and forming the job if so.

A process has one engine, whose job has the ranks of the first group of the backend. The engine
serves groups of these ranks, or of some of them; all others have the fallback alone. Ranks may know
different things (a rank can be in two groups of which each would be the first of another rank), so
they agree through the group's store.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from byteps import _forming, _native, common
from byteps._launchers import Place
from byteps._meeting import ByGroup
from byteps.errors import BytePSError, ConfigError, StartError

__all__ = [
    "Served",
    "agree",
    "form",
    "has_joined",
    "joins",
    "leave",
    "own_store",
    "renumber",
    "timeout_of",
]

#: The ranks, as the world numbers them, of the job that this module has joined.
_members: tuple[int, ...] | None = None
#: Groups of it that have not been shut down, where this module has started the engine.
_groups = 0

_FREE, _MEMBER, _PART, _OTHER = b"free", b"member", b"part", b"other"


class Served(NamedTuple):
    """A group that the engine serves; ``ranks`` are the numbers that its ranks have in the job, in
    the order of the group, if they are not all of it."""

    ranks: tuple[int, ...] | None = None


def timeout_of(options: Any) -> timedelta:
    """That of a group; releases of torch differ in how they hand it over."""
    timeout = options.timeout
    return timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)


def own_store(options: Any) -> Any:
    """A part of the group's store that no other group, and no former one of its name, has used."""
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"byteps/{restart}", options.store)
    # Every rank counts once for each group, and none makes the next one before all have.
    number = (store.add("groups", 1) - 1) // options.group_size
    return PrefixStore(str(number), store)


def joins(options: Any, store: Any, timeout: timedelta) -> Served | None:
    """How the engine serves this group, if it does; joins its job if this is the first group.

    Raises :class:`ConfigError` where the engine was started for another job than that of the
    default group, and what :func:`byteps.common.init` raises.
    """
    global _groups, _members
    rank, size = options.group_rank, options.group_size
    ranks = tuple(options.global_ranks_in_group) or tuple(range(size))
    is_default = not options.global_ranks_in_group
    own = _state(ranks, is_default, rank, size)
    states = agree(store, rank, size, own, timeout)
    if states == {_FREE}:
        form(store, rank, size, _forming.start_seconds(os.environ), ranks)
        return Served()
    if states == {_MEMBER}:
        _members = ranks
        _groups += _groups > 0
        return Served()
    if states == {_PART}:
        _groups += _groups > 0
        return Served(ranks if _members is None else tuple(map(_members.index, ranks)))
    if is_default:
        raise ConfigError(
            "byteps is initialised in some processes of the default group and not in others: call "
            "byteps.torch.init() in all of them before init_process_group, or in none"
        )
    return None


def _state(ranks: tuple[int, ...], is_default: bool, rank: int, size: int) -> bytes:
    if not _native.is_initialized():
        return _FREE
    if _members is not None:
        if _members == ranks:
            return _MEMBER
        return _PART if set(ranks) < set(_members) else _OTHER
    if is_default or (common.size() == size == _world_size()):
        _check_place(rank, size)
        return _MEMBER
    is_world = common.size() == _world_size() and common.rank() == dist.get_rank()
    return _PART if is_world else _OTHER


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 0


def _check_place(rank: int, size: int) -> None:
    if (common.rank(), common.size()) != (rank, size):
        raise ConfigError(
            f"rank {rank} of {size} in torch.distributed is rank {common.rank()} of "
            f"{common.size()} in byteps: give init_process_group the rank and the world size of "
            "the launcher, or do not start byteps before it"
        )


def agree(
    store: Any, rank: int, size: int, own: bytes, timeout: timedelta, about: str = "state"
) -> set[bytes]:
    """What all ranks of the group say of themselves, once for each thing to be said."""
    store.set(f"{about}/{rank}", own)
    keys = [f"{about}/{other}" for other in range(size)]
    try:
        store.wait(keys, timeout)
        return {bytes(store.get(key)) for key in keys}
    except RuntimeError as error:
        raise StartError(
            f"rank {rank} has not heard from all {size} ranks of its group within "
            f"{timeout.total_seconds():.0f} s, through torch's store: {error}"
        ) from error


def form(
    store: Any, rank: int, size: int, seconds: float, ranks: tuple[int, ...] | None = None
) -> None:
    """Forms the job of a group, and joins it. ``ranks`` are the numbers of its ranks in the world,
    if they are others there; ``seconds`` is how long they wait for one another."""
    global _groups, _members
    common.begin(lambda: _forming.settings_of(*_meeting(store, rank, size, seconds), os.environ))
    _check_place(rank, size)
    _members, _groups = ranks or tuple(range(size)), 1


def has_joined() -> bool:
    """Whether the job of this process is one that a group has joined."""
    return _groups > 0


def renumber(size: int) -> None:
    """The job has so many ranks now, which are those of the world."""
    global _members
    _members = tuple(range(size))


def _meeting(store: Any, rank: int, size: int, seconds: float) -> tuple[Place, ByGroup]:
    host = os.environ.get("MASTER_ADDR") if _is_master(rank) else None
    place = Place(
        launcher="torch.distributed",
        rank=rank,
        size=size,
        host=host or None,
        said=f"rank {rank} of {size} in torch.distributed",
    )
    return place, ByGroup(place, seconds, store, "job")


def _is_master(rank: int) -> bool:
    """Whether this is rank 0, on whose host MASTER_ADDR is."""
    return rank == 0 and os.environ.get("RANK", "0") == "0"


def leave() -> None:
    """To be called when a group that the engine serves is shut down: after the last of them the
    process leaves the job, if this module has joined it."""
    global _groups, _members
    if _groups == 0:
        return
    _groups -= 1
    if _groups == 0:
        _members = None
        # What ended the job was raised by an operation, and is in the engine's own line.
        with contextlib.suppress(BytePSError):
            common.shutdown()
