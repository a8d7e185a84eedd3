"""What the variables of launchers say of a process: read as a function of the environment."""

from __future__ import annotations

import pytest

from byteps import _launchers
from byteps.errors import ConfigError


def torch(rank=1, size=4, local=None, **more):
    local = {"LOCAL_RANK": str(rank % local), "LOCAL_WORLD_SIZE": str(local)} if local else {}
    return {"RANK": str(rank), "WORLD_SIZE": str(size)} | local | more


def elastic(rank=1, size=4, local=2):
    store = {"MASTER_ADDR": "gpu7", "MASTER_PORT": "29500"}
    run = {"TORCHELASTIC_RUN_ID": "r1", "TORCHELASTIC_RESTART_COUNT": "0"}
    return torch(rank, size, local, GROUP_RANK=str(rank // local)) | store | run


def slurm(rank=1, size=4, tasks="2(x2)", step="0", **more):
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": step,
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(size),
        "SLURM_LOCALID": str(rank % 2),
        "SLURM_NODEID": str(rank // 2),
        "SLURM_STEP_NODELIST": "gpu[07-08]",
        "SLURM_STEP_TASKS_PER_NODE": tasks,
    } | more


def open_mpi(rank=1, size=4, local=2):
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % local),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local),
        "PMIX_NAMESPACE": "prterun-host-9@1",
        "PMIX_RANK": str(rank),
    }


def mpich(rank=1, size=4, local=2):
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
        "MPI_LOCALRANKID": str(rank % local),
        "MPI_LOCALNRANKS": str(local),
    }


# (variables, launcher, rank, size, local rank, local size, node, host of rank 0)
PLACES = {
    "torchrun": (elastic(3), "torchrun", 3, 4, 1, 2, 1, "gpu7"),
    "torchrun, started on each node by srun": (
        elastic(3) | slurm(1, 2, "1(x2)"), "torchrun", 3, 4, 1, 2, 1, "gpu7",
    ),
    "torchrun in an sbatch script": (
        elastic(3) | slurm(0, 8, step="4294967291"), "torchrun", 3, 4, 1, 2, 1, "gpu7",
    ),
    "by hand": (torch(3, 4, 2), "RANK and WORLD_SIZE", 3, 4, 1, 2, None, None),
    "by hand, from srun's": (
        torch(3, 4, MASTER_ADDR="a", MASTER_PORT="29500") | slurm(3),
        "RANK and WORLD_SIZE", 3, 4, 1, 2, 1, "a",
    ),
    "srun": (slurm(3), "srun", 3, 4, 1, 2, 1, "gpu07"),
    "srun, unequal nodes are seen by the scheduler": (
        slurm(2, 4, "1(x2),2"), "srun", 2, 4, 0, 1, 1, "gpu07",
    ),
    "srun, with the size of its step": (
        slurm(1, 8, SLURM_STEP_NUM_TASKS="4"), "srun", 1, 4, 1, 2, 0, "gpu07",
    ),
    "srun --mpi=pmi2": (
        slurm(3) | {"PMI_RANK": "3", "PMI_SIZE": "4"}, "mpiexec", 3, 4, 1, 2, 1, "gpu07",
    ),
    "mpirun": (open_mpi(3), "mpirun", 3, 4, 1, 2, None, None),
    "mpirun, whose daemons srun started": (
        open_mpi(3) | slurm(1, 2, "1(x2)"), "mpirun", 3, 4, 1, 2, None, None,
    ),
    "mpiexec": (mpich(3), "mpiexec", 3, 4, 1, 2, None, None),
    "processes by hand, below one of srun's": (
        torch(1, 2, 2) | slurm(0, 1, "1"), "RANK and WORLD_SIZE", 1, 2, 1, 2, None, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PLACES)
def test_places(case):
    variables, *expected = PLACES[case]
    place = _launchers.find(variables)
    assert place is not None
    found = [place.launcher, place.rank, place.size, place.local_rank, place.local_size]
    assert [*found, place.node, place.host] == expected


# Nobody announces several processes.
ALONE = {
    "nothing": {},
    "a stray RANK": {"RANK": "0"},
    "a RANK of another kind": {"RANK": "general"},
    "the shell of salloc": {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"},
    "the script of sbatch": slurm(0, 4, step="") | {"SLURM_STEP_ID": ""},
    "the script of sbatch, as newer Slurm has it": slurm(0, 4, step="4294967291"),
    "the interactive step of salloc": slurm(0, 4, step="4294967290"),
}


@pytest.mark.parametrize("case", ALONE)
def test_alone(case):
    assert _launchers.find(ALONE[case]) is None
    hint = _launchers.hint(ALONE[case])
    assert (hint is not None and "srun python" in hint) == ("SLURM_NTASKS" in ALONE[case])


def test_a_job_of_one_is_a_place_too():
    place = _launchers.find(torch(0, 1, 1))
    assert place is not None and place.size == 1
    assert _launchers.hint(slurm()) is None, "srun started this one"


# What is refused, and the names that the message has.
REFUSED = {
    "a size without a rank": ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "RANK is not set"]),
    "a rank without a size": ({"RANK": "1"}, ["RANK=1", "WORLD_SIZE is not set"]),
    "two launchers": (
        torch(1, 4) | open_mpi(2, 4),
        ["RANK=1 WORLD_SIZE=4", "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4"],
    ),
    "a job of one within mpirun's of two": (
        torch(0, 1) | open_mpi(1, 2),
        ["RANK=0 WORLD_SIZE=1", "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2"],
    ),
    "a job of one within srun's of four": (
        torch(0, 1) | slurm(3),
        ["WORLD_SIZE=1", "SLURM_PROCID=3 SLURM_NTASKS=4"],
    ),
    "PMIx without a size": ({"PMIX_RANK": "0"}, ["PMIX_RANK=0", "WORLD_SIZE"]),
    "a word": (torch(1, 4) | {"WORLD_SIZE": "four"}, ["WORLD_SIZE has the value 'four'"]),
    "a rank beyond the size": (torch(4, 4), ["RANK=4 WORLD_SIZE=4", "0 to 3"]),
    "a local rank beyond the size": (
        torch(1, 4) | {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
        ["local rank 2 of 2"],
    ),
    "unequal nodes": (torch(1, 4, 3), ["RANK=1 WORLD_SIZE=4", "3 processes on this node"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    variables, names = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        _launchers.find(variables)
    for name in names:
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("text", "counts"),
    [("2(x2),1", [2, 2, 1, None]), ("4", [4, None]), ("", [None]), ("x", [None])],
)
def test_slurms_tasks_of_nodes(text, counts):
    assert [_launchers._tasks_of_node(text, node) for node in range(len(counts))] == counts


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("gpu07", "gpu07"),
        ("gpu[07-09,12],login", "gpu07"),
        ("a-1,b[2]", "a-1"),
        ("rack[2,4]-node.cluster", "rack2-node.cluster"),
        ("", None),
    ],
)
def test_slurms_lists_of_hosts(text, host):
    assert _launchers._first_host(text) == host


def test_jobs_and_attempts_have_names_of_their_own():
    first = _launchers.find(elastic())
    again = _launchers.find(elastic() | {"TORCHELASTIC_RESTART_COUNT": "1"})
    other = _launchers.find(elastic() | {"MASTER_PORT": "29501"})
    steps = [_launchers.find(slurm(step=step)) for step in ("0", "1")]
    names = [place.job for place in (first, again, other, *steps)]
    assert len(set(names)) == len(names)
    assert all(_launchers.find(elastic(rank)).job == first.job for rank in range(4))
