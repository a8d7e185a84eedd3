"""Jobs whose scheduler is killed, stopped, and replaced while they train."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import byteps.torch as bps
from cluster import Cluster, clean_environment

RANKS = 2
SECONDS = 60

TRAIN = """
import hashlib, json, os, sys, time
import torch
import byteps.torch as bps
from byteps.errors import MismatchError

log, absent, suspend, stop = sys.argv[1:]
bps.init()
torch.manual_seed(bps.rank())
parameter = torch.zeros(50_000)
bps.push_pull(torch.zeros(1), name="flag")
step, asked, suspended = 0, False, False

def write(**values):
    with open(log, "a") as out:
        out.write(json.dumps({"at": time.time(), "rank": bps.rank(), **values}) + "\\n")

while True:
    parameter += bps.push_pull(torch.randn(50_000), name="gradient")
    step += 1
    write(step=step, digest=hashlib.sha256(parameter.numpy().tobytes()).hexdigest())
    flags = torch.tensor([float(os.path.exists(file)) for file in (absent, suspend, stop)])
    wants, leaves, ends = bps.push_pull(flags, average=False, name="flags").tolist()
    if wants and not asked:
        asked = True
        write(asks=True)
        late = bps.push_pull(torch.ones(3), average=False, name="declared while it was away")
        bps.barrier()
        write(late=late.tolist())
    if leaves and not suspended:
        suspended = True
        bps.suspend()
        bps.resume(bps.size(), 1)
        write(resumed=True)
    if ends and asked:
        try:
            bps.push_pull(torch.ones(3 + bps.rank()), name="declared differently")
        except MismatchError as error:
            write(frameworks=sorted(error.frameworks.items()))
    if ends:
        break
    time.sleep(0.005)
bps.shutdown()
"""


class Job:
    """Each process by itself, so that the scheduler can be ended and started again."""

    def __init__(self, folder, **variables):
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.environment = clean_environment() | {
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": str(port),
            "DMLC_NODE_HOST": "127.0.0.1",
            "DMLC_NUM_WORKER": str(RANKS),
            "DMLC_NUM_SERVER": "1",
            "BPS_LOCAL_REDUCE": "0",
            "BPS_JOB_KEY": os.urandom(16).hex(),
            "BPS_ELASTIC": "redo",
            "OMP_NUM_THREADS": "1",
        }
        self.environment |= variables
        (folder / "train.py").write_text(TRAIN)
        self.scheduler = self.program("scheduler")
        self.server = self.program("server")
        files = [str(folder / name) for name in ("steps", "absent", "suspend", "stop")]
        command = [sys.executable, str(folder / "train.py"), *files]
        self.ranks = [
            self.start(f"rank-{rank}", command, DMLC_ROLE="worker", DMLC_WORKER_ID=str(rank))
            for rank in range(RANKS)
        ]

    def program(self, role):
        command = [sys.executable, "-m", "byteps._programs", role]
        return self.start(role, command, DMLC_ROLE=role)

    def start(self, name, command, **variables):
        with (self.folder / f"{name}.log").open("ab") as log:
            environment = self.environment | variables
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def lines(self):
        path = self.folder / "steps"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def steps(self):
        """How many steps the slowest rank has made."""
        return min(
            max(
                (one["step"] for one in self.lines() if "step" in one and one["rank"] == rank),
                default=0,
            )
            for rank in range(RANKS)
        )

    def wait_for(self, what, found, seconds=SECONDS):
        deadline = time.monotonic() + seconds
        while not found():
            assert time.monotonic() < deadline, f"no {what}\n{self.log()}"
            time.sleep(0.01)

    def train_on(self, steps):
        target = self.steps() + steps
        self.wait_for(f"step {target}", lambda: self.steps() >= target)

    def says(self, name, words):
        self.wait_for(words, lambda: words in self.log(name))

    def log(self, name="*"):
        paths = sorted(self.folder.glob(f"{name}.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in paths)

    def end(self):
        """Lets the job finish, and checks that all ranks had the same parameters at every step."""
        (self.folder / "stop").touch()
        for process in [*self.ranks, self.server, self.scheduler]:
            assert process.wait(SECONDS) == 0, self.log()
        digests = {}
        for line in self.lines():
            if "step" in line:
                known = digests.setdefault(line["step"], line["digest"])
                assert known == line["digest"], f"ranks differ after step {line['step']}"
        log = self.log()
        assert "epoch 2" not in log, log

    def close(self):
        for process in [*self.ranks, self.server, self.scheduler]:
            process.kill()
            process.wait()


@pytest.fixture
def start(tmp_path):
    jobs = []

    def start(**variables):
        jobs.append(Job(tmp_path, **variables))
        jobs[0].wait_for("steps", lambda: jobs[0].steps() >= 5, 120)
        return jobs[0]

    yield start
    for job in jobs:
        job.close()


def test_training_goes_on_without_a_scheduler_and_the_next_one_serves_what_was_asked(start):
    job = start()
    job.scheduler.kill()
    job.scheduler.wait()
    job.train_on(20)
    for name in ("rank-0", "server"):
        job.says(name, "training goes on without")
    # A tensor is declared, and a barrier awaited, while there is none.
    (job.folder / "absent").touch()
    job.wait_for("question", lambda: sum("asks" in line for line in job.lines()) == RANKS)
    time.sleep(0.5)
    assert not any("late" in line for line in job.lines())
    assert all(process.poll() is None for process in [*job.ranks, job.server])
    job.scheduler = job.program("scheduler")
    job.says("scheduler", "term 2: 2 ranks and 1 server of epoch 1 are led by this scheduler")
    job.train_on(20)
    late = [line["late"] for line in job.lines() if "late" in line]
    assert late == [[RANKS] * 3] * RANKS
    # And once more, while nobody asks for anything.
    job.scheduler.kill()
    job.scheduler.wait()
    job.scheduler = job.program("scheduler")
    job.says("scheduler", "term 3: ")
    job.train_on(20)
    job.end()
    # It knows what ranks speak, which they had told the first one when the job formed.
    told = [line["frameworks"] for line in job.lines() if "frameworks" in line]
    assert told == [[[0, "PyTorch"], [1, "PyTorch"]]] * RANKS


def test_without_another_scheduler_the_job_ends_by_a_typed_error_that_names_it(start):
    job = start(BPS_SCHEDULER_WAIT="2")
    began = time.monotonic()
    job.scheduler.kill()
    for process in [*job.ranks, job.server]:
        assert process.wait(SECONDS) != 0
    assert time.monotonic() - began >= 1.9
    port = job.environment["DMLC_PS_ROOT_PORT"]
    for name in ("rank-0", "rank-1", "server"):
        log = job.log(name)
        assert f"the scheduler at 127.0.0.1:{port} is lost" in log, log
        assert "none has taken over within 2 s (BPS_SCHEDULER_WAIT)" in log, log
    assert "PeerDiedError" in job.log("rank-0")


def test_ranks_that_suspend_while_there_is_no_scheduler_come_back_to_the_next(start):
    job = start()
    job.scheduler.kill()
    job.scheduler.wait()
    job.says("server", "training goes on without")
    (job.folder / "suspend").touch()
    for name in ("rank-0", "rank-1"):
        job.says(name, "suspend waits for a scheduler")
    job.scheduler = job.program("scheduler")
    # Servers must not take their good-byes for the end of their work.
    job.says("scheduler", "term 2: ")
    job.wait_for("return", lambda: sum("resumed" in line for line in job.lines()) == RANKS)
    job.train_on(5)
    assert "finished" not in job.log("scheduler"), job.log()
    (job.folder / "stop").touch()
    for process in [*job.ranks, job.server, job.scheduler]:
        assert process.wait(SECONDS) == 0, job.log()


def test_with_no_wait_the_scheduler_s_death_is_the_job_s(start):
    job = start(BPS_SCHEDULER_WAIT="0")
    job.scheduler.kill()
    for process in [*job.ranks, job.server]:
        assert process.wait(SECONDS) != 0
    assert "the scheduler died" in job.log("rank-0")


def test_a_rank_that_is_done_ends_well_without_a_scheduler(start):
    job = start(BPS_SCHEDULER_WAIT="3")
    job.scheduler.kill()
    job.scheduler.wait()
    job.train_on(3)
    (job.folder / "stop").touch()
    for rank in job.ranks:
        assert rank.wait(SECONDS) == 0, job.log()
    log = job.log("rank-0")
    assert "the good-bye of this rank waits for a scheduler" in log, log
    assert "this rank has done its work, and ends" in log, log
    job.server.wait(SECONDS)


def test_a_rank_that_dies_meanwhile_is_named_by_the_next_scheduler(start):
    job = start(BPS_HEARTBEAT_TIMEOUT="1", BPS_HEARTBEAT_INTERVAL="0.2", BPS_MIN_WORKERS="2")
    job.scheduler.kill()
    job.scheduler.wait()
    job.train_on(3)
    job.ranks[1].kill()
    job.says("rank-0", "training goes on without")
    job.scheduler = job.program("scheduler")
    assert job.ranks[0].wait(SECONDS) != 0
    log = job.log("rank-0")
    assert "rank 1 (host" in log and "died" in log, log


@pytest.mark.parametrize("then", ["continued", "replaced"])
def test_a_scheduler_that_is_stopped_is_waited_for_or_replaced(start, then):
    job = start(BPS_HEARTBEAT_TIMEOUT="1", BPS_HEARTBEAT_INTERVAL="0.2")
    job.scheduler.send_signal(signal.SIGSTOP)
    nodes = ("rank-0", "rank-1", "server")
    for name in nodes:
        job.says(name, "training goes on without")
    job.train_on(5)
    if then == "continued":
        job.scheduler.send_signal(signal.SIGCONT)
        for name in nodes:
            job.says(name, "answers again after")
    else:
        job.scheduler.kill()
        job.scheduler.wait()
        job.scheduler = job.program("scheduler")
        job.says("scheduler", "term 2: ")
    job.train_on(5)
    job.end()


def sums(name):
    """Pushes a tensor that is new to the job, and then again and again."""
    bps.init()
    for _ in range(20):
        total = bps.push_pull(torch.ones(1000), average=False, name=name)
    return total[0].item()


def scheduler_of(launcher):
    """The process of this launcher that is the scheduler."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            roles = (path / "environ").read_bytes().split(b"\0")
            state = (path / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue  # It has ended, or is not ours.
        if parent == launcher and b"DMLC_ROLE=scheduler" in roles and state != "Z":
            return int(path.name)
    return None


def test_bpslaunch_starts_the_scheduler_of_an_elastic_job_again():
    with Cluster(RANKS, environment={"BPS_ELASTIC": "redo"}) as job:
        assert job.run(sums, "first") == [RANKS] * RANKS
        for turn in range(2):
            os.kill(scheduler_of(job.process.pid), signal.SIGKILL)
            assert job.run(sums, f"after {turn}") == [RANKS] * RANKS
        log = job.log()
        assert log.count("scheduler was killed by SIGKILL (9); starting it again") == 2, log
        assert "term 3: 2 ranks and 1 server of epoch 1 are led by this scheduler" in log, log
