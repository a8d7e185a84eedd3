"""This process's place in a job that torchrun, srun, mpirun or mpiexec started.

A function of the environment and nothing else; :mod:`byteps._forming` acts on what it finds.

Launchers nest: ``srun torchrun`` and ``sbatch`` scripts with ``mpirun`` are common. The innermost
one that announces processes counts. Variables that cannot be explained by nesting, and disagree,
are an error: the alternative is to train several models where one was wanted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from byteps.errors import ConfigError

__all__ = ["Place", "find", "hint"]

#: Slurm numbers its own steps (batch script, interactive shell, external) from here on.
_SLURM_SPECIAL_STEPS = 0xFFFF_FF00


@dataclass(frozen=True)
class Place:
    """What a launcher says of this process and its job."""

    #: The launcher, as messages name it.
    launcher: str
    rank: int
    size: int
    #: Number of this process on its node, and of the processes there.
    local_rank: int | None = None
    local_size: int | None = None
    #: Number of the node.
    node: int | None = None
    #: Host name or address of the node of rank 0.
    host: str | None = None
    #: The port of torch's store on that node.
    port: int | None = None
    #: Tells this job, and this attempt to run it, from others of the same user.
    job: str = ""
    #: The variables of rank and size, as ``RANK=1 WORLD_SIZE=2``.
    said: str = ""


def find(environment: Mapping[str, str]) -> Place | None:
    """The place of this process, or ``None`` where no launcher announces any.

    Raises :class:`ConfigError` where variables announce several processes and do not say which of
    them this is, or contradict each other.
    """
    torch = _torch(environment)
    if torch is not None and torch.launcher == "torchrun":
        return torch  # It sets all of its variables; what is around it started the agents.
    found = [
        place
        for place in (torch, _open_mpi(environment), _pmi(environment), _slurm(environment))
        if place is not None
    ]
    if not found:
        return None
    place = found[0]
    for other in found[1:]:
        if (place.rank, place.size) == (other.rank, other.size):
            place = _completed(place, other)
        elif not _nested(place, other):
            raise ConfigError(
                f"{place.said} ({place.launcher}) and {other.said} ({other.launcher}) place this "
                f"process differently; unset the variables of the launcher that did not start it"
            )
    return _checked(place)


def hint(environment: Mapping[str, str]) -> str | None:
    """What to tell the user of a job of one in a Slurm allocation for several tasks."""
    tasks = environment.get("SLURM_NTASKS", "")
    if not tasks.isdecimal() or int(tasks) < 2 or _is_slurm_step(environment):
        return None
    return (
        f"SLURM_NTASKS={tasks}, but srun did not start this process: it trains alone. "
        f"'srun python train.py' starts all {tasks}"
    )


def _completed(place: Place, other: Place) -> Place:
    missing = {
        name: getattr(other, name)
        for name in ("local_rank", "local_size", "node", "host", "port")
        if getattr(place, name) is None
    }
    return replace(place, job=f"{place.job} {other.job}", **missing)


def _nested(inner: Place, outer: Place) -> bool:
    """Whether the outer launcher may have started what started this process."""
    if outer.launcher == "srun" and inner.launcher in ("mpirun", "mpiexec"):
        return True  # Both start one daemon on each node through srun.
    return outer.size == 1


def _checked(place: Place) -> Place:
    if not 0 <= place.rank < place.size:
        raise ConfigError(f"{place.said}: ranks count from 0 to {place.size - 1}")
    local_rank, local_size = place.local_rank, place.local_size
    if local_size is not None and not 0 <= (local_rank or 0) < local_size:
        raise ConfigError(
            f"local rank {local_rank} of {local_size} ({place.launcher}): local ranks count from "
            f"0 to {local_size - 1}"
        )
    if local_size is not None and place.size % local_size:
        raise ConfigError(
            f"{place.said} with {local_size} processes on this node ({place.launcher}): start as "
            f"many processes on every node"
        )
    return place


def _torch(environment: Mapping[str, str]) -> Place | None:
    if not (environment.get("RANK") and environment.get("WORLD_SIZE")):
        _refuse_half(environment)
        return None
    rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    assert rank is not None and size is not None, "both are set"
    is_elastic = "TORCHELASTIC_RUN_ID" in environment
    port = _number(environment, "MASTER_PORT")
    names = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    return _checked(
        Place(
            launcher="torchrun" if is_elastic else "RANK and WORLD_SIZE",
            rank=rank,
            size=size,
            local_rank=_number(environment, "LOCAL_RANK"),
            local_size=_number(environment, "LOCAL_WORLD_SIZE"),
            node=_number(environment, "GROUP_RANK"),
            host=environment.get("MASTER_ADDR") or None,
            port=port,
            job="/".join(["torch", *(environment.get(name, "") for name in names)]),
            said=f"RANK={rank} WORLD_SIZE={size}",
        )
    )


def _refuse_half(environment: Mapping[str, str]) -> None:
    """Refuses a RANK or a WORLD_SIZE of several processes that stands alone."""
    for lone, other, first in (("RANK", "WORLD_SIZE", 1), ("WORLD_SIZE", "RANK", 2)):
        text = environment.get(lone, "").strip()
        several = text.isdecimal() and int(text) >= first
        if several and not _others_announce(environment):
            raise ConfigError(
                f"{lone}={text} announces several processes, but {other} is not set: start them "
                f"with torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, "
                f"MASTER_ADDR and MASTER_PORT for each; to train alone, unset {lone}"
            )


def _open_mpi(environment: Mapping[str, str]) -> Place | None:
    place = _mpi(environment, "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    if place is not None:
        return replace(
            place,
            local_rank=_number(environment, "OMPI_COMM_WORLD_LOCAL_RANK"),
            local_size=_number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        )
    if environment.get("PMIX_RANK") and not _others_announce(environment):
        raise ConfigError(
            f"PMIX_RANK={environment['PMIX_RANK']} says which process this is, but no variable "
            f"says of how many: set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE for each, or "
            f"start them with Open MPI's mpirun, srun or torchrun"
        )
    return None


def _pmi(environment: Mapping[str, str]) -> Place | None:
    place = _mpi(environment, "mpiexec", "PMI_RANK", "PMI_SIZE")
    return place and replace(
        place,
        local_rank=_number(environment, "MPI_LOCALRANKID"),
        local_size=_number(environment, "MPI_LOCALNRANKS"),
    )


def _mpi(environment: Mapping[str, str], launcher: str, rank: str, size: str) -> Place | None:
    number, count = _number(environment, rank), _number(environment, size)
    if number is None or count is None:
        return None
    names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "MASTER_PORT")
    identity = "/".join(environment.get(name, "") for name in names)
    return Place(
        launcher=launcher,
        rank=number,
        size=count,
        host=environment.get("MASTER_ADDR") or None,
        port=_number(environment, "MASTER_PORT"),
        job=f"{launcher}/{identity}",
        said=f"{rank}={number} {size}={count}",
    )


def _slurm(environment: Mapping[str, str]) -> Place | None:
    if not _is_slurm_step(environment):
        return None
    rank = _number(environment, "SLURM_PROCID")
    count = "SLURM_STEP_NUM_TASKS" if environment.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    size = _number(environment, count)
    if rank is None or size is None:
        return None
    node = _number(environment, "SLURM_NODEID")
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or ""
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE")
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return Place(
        launcher="srun",
        rank=rank,
        size=size,
        local_rank=_number(environment, "SLURM_LOCALID"),
        local_size=_tasks_of_node(tasks or "", node or 0) or (size if size == 1 else None),
        node=node,
        host=environment.get("MASTER_ADDR") or _first_host(nodes),
        port=_number(environment, "MASTER_PORT"),
        job="/".join(["srun", *(environment.get(name, "") for name in names)]),
        said=f"SLURM_PROCID={rank} {count}={size}",
    )


def _is_slurm_step(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process.

    In the script of ``sbatch`` and the shell of ``salloc`` the count of tasks is set too, and
    sometimes a rank of 0, but those run once.
    """
    step = environment.get("SLURM_STEP_ID") or environment.get("SLURM_STEPID") or ""
    return step.isdecimal() and int(step) < _SLURM_SPECIAL_STEPS


def _tasks_of_node(text: str, node: int) -> int | None:
    """The count of tasks of a node in Slurm's notation: ``2(x3),1`` is 2, 2, 2 and 1."""
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            return None
        repeated = int(match[2] or 1)
        if node < repeated:
            return int(match[1])
        node -= repeated
    return None


def _first_host(text: str) -> str | None:
    """The first name of a list in Slurm's notation: ``gpu[07-09,12],login`` begins with gpu07."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^\[,]*))?", text.strip())
    return match and match[1] + (match[2] or "") + (match[3] or "")


def _others_announce(environment: Mapping[str, str]) -> bool:
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
    return _is_slurm_step(environment) or any(environment.get(name) for name in names)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal():
        raise ConfigError(f"{name} has the value '{text}', which is not a count; unset or mend it")
    return int(text)
