"""How long an elastic job takes to go on when a rank or a server is killed, and whether it goes on right.

    .venv/bin/python perf/elastic.py [--ranks 4] [--servers 2] [--cores 1] [--threads 1] [--megabytes 100]
        [--runs 20] [--kinds rank,rank0,server] [--elastic shrink]

Starts one job on this machine, whose ranks are forks of this process that have torch already, with every rank as a host
of its own as far as sums are concerned (BPS_LOCAL_REDUCE=0).
In each run it kills one member by SIGKILL at a random moment within a step, waits until every survivor has finished
another step, starts a new member in its place, and waits until that trains too. Each line is a run; the last one has,
for each kind of victim, in seconds:

    rejoined  from the kill until the last survivor has the state of the next epoch
    step      from the kill until the last survivor has finished a step of it
    let_in    from the start of the new member until the last rank has finished a step with it
    pause     the longest time between two steps of a survivor while that happened
    pace      the median step of the ranks before the kill

With --elastic shrink the job goes on without forming again, and the first of these is another one; `step` is then that
of the first step which has surely begun behind the kill:

    next      from the kill until the last survivor has finished the step under way

Of kind "scheduler", it kills the scheduler, starts another one on the same port --absent seconds later, and prints

    led       from the start of the other one until it leads the job
    longest   the longest time between two steps of a rank, from the kill until each has finished three steps behind that
    pace      the median step of the ranks before the kill

It fails if two ranks differ in a parameter, the learning rate or the number of a step, if a survivor goes back by more
than the step that failed, if the scheduler counts other deaths, or if anything takes longer than --limit seconds.
"""

import argparse
import ctypes
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import elastic_rank

# An optimizer imports much of torch, which takes seconds: forks have that, too.
torch.optim.SGD([torch.zeros(1)])

LOOK_SECONDS = 0.005
START_SECONDS = 120


class Failure(Exception):
    """The job did not do what it should."""


def with_parent() -> None:
    """Lets a process end with this one."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Rank:
    """A fork of this process that trains."""

    def __init__(self, log: Path, environment: dict[str, str], train: Callable[[], None]) -> None:
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            with_parent()
            with log.open("ab") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
            os.environ.clear()
            os.environ.update(environment)
            train()
            code = 0
        except SystemExit as end:  # It has left.
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:  # The parent reads why in the log.
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def kill(self) -> None:
        """Ends it at once."""
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)

    def has_ended(self) -> bool:
        """Whether it has, by itself or not."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def wait(self, seconds: float = 60.0) -> int:
        """The exit code, or the negative number of the signal that ended it."""
        deadline = time.time() + seconds
        while not self.has_ended():
            if time.time() > deadline:
                raise Failure(f"process {self.pid} has not ended after {seconds} s")
            time.sleep(LOOK_SECONDS)
        assert self.code is not None
        return self.code


class Job:
    """A scheduler, servers and ranks of this machine."""

    #: How the job goes on without a member.
    ELASTIC = "redo"

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.log = folder / "steps.jsonl"
        self.stop = folder / "stop"
        self.lines: list[dict[str, Any]] = []
        self._read = 0
        # Keeps the port for the scheduler, which asks to share it.
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("127.0.0.1", 0))
        jobs = ("DMLC_", "BYTEPS_", "BPS_")
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(jobs)
        } | {
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": str(self._port.getsockname()[1]),
            "DMLC_NUM_WORKER": str(options.ranks),
            "DMLC_NUM_SERVER": str(options.servers),
            "BYTEPS_LOCAL_SIZE": "1",
            "BYTEPS_LOCAL_RANK": "0",
            "BPS_LOCAL_REDUCE": "0",
            # Of the commands that start such jobs, this one alone asks for more.
            "BPS_SERVER_CORES": str(getattr(options, "cores", 1)),
            "BPS_JOB_KEY": os.urandom(16).hex(),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        self.environment |= self.settings()
        self.deaths = 0
        self.scheduler = self.start_scheduler()
        self.servers = [self.start_server(place) for place in range(options.servers)]
        self.ranks = [self.start_rank(rank) for rank in range(options.ranks)]

    def settings(self) -> dict[str, str]:
        """Variables of all processes that a kind of job has beside the others."""
        return {}

    def address(self, role: str, place: int) -> str:
        """Of the host of a process."""
        return "127.0.0.1"

    def enter(self, role: str, place: int) -> None:
        """Called by each process before it is what it is to be: moves it to its host."""

    def _start(
        self, role: str, place: int, command: list[str], **variables: str
    ) -> subprocess.Popen[bytes]:
        def prepare() -> None:
            with_parent()
            self.enter(role, place)

        own = {"DMLC_NODE_HOST": self.address(role, place), **variables}
        with (self.folder / f"{role}.log").open("ab") as log:
            return subprocess.Popen(
                command,
                env=self.environment | own,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=prepare,  # noqa: PLW1509 -- there are no threads here.
            )

    def _program(self, role: str, place: int = 0, **variables: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "byteps._programs", role]
        return self._start(role, place, command, DMLC_ROLE=role, **variables)

    def start_scheduler(self) -> subprocess.Popen[bytes]:
        """One that has seen nobody die yet."""
        self.deaths = 0
        variables = {"BPS_MIN_WORKERS": "1", "BPS_METRICS_PORT": "0"}
        return self._program("scheduler", BPS_ELASTIC=self.ELASTIC, **variables)

    def start_server(self, place: int) -> subprocess.Popen[bytes]:
        return self._program("server", place)

    def start_rank(self, place: int) -> Rank:
        options = self.options
        variables = {"DMLC_ROLE": "worker", "DMLC_WORKER_ID": str(place)}
        variables["DMLC_NODE_HOST"] = self.address("rank", place)

        def train() -> None:
            self.enter("rank", place)
            threads = getattr(options, "threads", 1)
            elastic_rank.train(self.log, options.megabytes, self.stop, options.mode, threads)

        return Rank(self.folder / f"rank-{place}.log", self.environment | variables, train)

    def read(self) -> None:
        """Takes in what ranks have written since the last time."""
        if not self.log.exists():
            return
        with self.log.open("rb") as log:
            log.seek(self._read)
            data = log.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        self.lines += [json.loads(line) for line in whole.splitlines()]

    def wait_for(
        self, what: str, found: Callable[[], Any], seconds: float, victim: Any = None
    ) -> Any:
        """What `found` returns, once that is not None or empty. No rank but the victim may end."""
        deadline = time.time() + seconds
        while True:
            self.read()
            result = found()
            if result:
                return result
            if self.scheduler.poll() is not None:
                raise Failure(f"the job has ended while waiting for {what}")
            for rank in self.ranks:
                if rank.has_ended() and rank is not victim:
                    raise Failure(f"process {rank.pid} has ended while waiting for {what}")
            if time.time() > deadline:
                raise Failure(f"after {seconds} s: still no {what}")
            time.sleep(LOOK_SECONDS)

    def first_of_each(self, ranks: list[Rank], event: str, fits: Callable[[Any], bool]) -> Any:
        """The first such line of each of these processes, once all have one."""
        first: dict[int, Any] = {}
        for line in self.lines:
            if line["event"] == event and fits(line):
                first.setdefault(line["pid"], line)
        found = [first.get(rank.pid) for rank in ranks]
        return None if None in found else found

    def close(self) -> None:
        for process in [*self.ranks, *self.servers, self.scheduler]:
            process.kill()
            process.wait()

    def metrics(self) -> dict[str, float]:
        """What the scheduler shows to Prometheus, by name and labels."""
        found = re.findall(r"http://\S+", (self.folder / "scheduler.log").read_text())
        if not found:
            raise Failure("the scheduler has not said where its metrics are")
        with urllib.request.urlopen(found[-1], timeout=10) as page:
            lines = page.read().decode().splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    def tails(self) -> str:
        """The end of every log."""
        texts = []
        for path in sorted(self.folder.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()
            texts.append("\n".join([f"--- {path.name}", *lines[-25:]]))
        return "\n".join(texts)


class ShrinkingJob(Job):
    """Its ranks go on without the dead as they are, so `size` stays until others are let in."""

    ELASTIC = "shrink"


def check(job: Job) -> None:
    """Raises if ranks differ after the same step of the same epoch, or one went back too far."""
    known: dict[tuple[int, int, str], tuple[Any, ...]] = {}
    for line in job.lines:
        key = line["epoch"], line["step"], line["event"]
        value = line["digest"], line.get("lr"), line["size"]
        if known.setdefault(key, value) != value:
            raise Failure(
                f"ranks differ after step {line['step']} of epoch {line['epoch']}: {value}, {known[key]}"
            )
    last: dict[int, int] = {}
    for line in job.lines:
        if line["step"] < last.get(line["pid"], 0) - 1:
            raise Failure(
                f"process {line['pid']} went from step {last[line['pid']]} back to {line['step']}"
            )
        last[line["pid"]] = line["step"]


def pace_of(job: Job, limit: float) -> float:
    """The median of the newest steps, once each rank has made one more."""
    began = time.time()
    job.wait_for(
        "steps",
        lambda: job.first_of_each(job.ranks, "step", lambda line: line["at"] > began),
        limit,
    )
    pids = {rank.pid for rank in job.ranks}
    times = {
        pid: [line["at"] for line in job.lines if line["pid"] == pid and line["event"] == "step"]
        for pid in pids
    }
    steps = [after - before for one in times.values() for before, after in pairwise(one[-4:])]
    return statistics.median(steps) if steps else 0.1


def replace_scheduler(
    job: Job, absent: float, limit: float, rng: random.Random
) -> dict[str, float]:
    """Kills the scheduler and starts another one on the same port."""
    pace = pace_of(job, limit)
    time.sleep(rng.random() * 2 * pace)
    log = job.folder / "scheduler.log"
    terms = log.read_text().count("are led by this scheduler")
    killed = time.time()
    job.scheduler.kill()
    job.scheduler.wait()
    time.sleep(absent)
    born = time.time()
    job.scheduler = job.start_scheduler()
    job.wait_for("term", lambda: log.read_text().count("are led by this scheduler") > terms, limit)
    led = time.time()
    pids = {rank.pid for rank in job.ranks}

    def have_gone_on() -> bool:
        ends = [line["pid"] for line in job.lines if line["event"] == "step" and line["at"] > led]
        return all(ends.count(pid) >= 3 for pid in pids)

    job.wait_for("steps under the next scheduler", have_gone_on, limit)
    check(job)
    return {"led": led - born, "longest": longest_pause(job, pids, since=killed), "pace": pace}


def run(job: Job, kind: str, limit: float, rng: random.Random) -> dict[str, float]:
    """Kills one member, lets the others go on, and puts another in its place."""
    job.read()
    epoch = max(line["epoch"] for line in job.lines)
    pace = pace_of(job, limit)
    time.sleep(rng.random() * 2 * pace)
    job.deaths += 1
    members = job.servers if kind == "server" else job.ranks
    if kind == "rank0":
        job.read()
        zero = next(line["pid"] for line in reversed(job.lines) if line["rank"] == 0)
        victim = next(rank for rank in job.ranks if rank.pid == zero)
    else:
        victim = rng.choice(members)
    place = members.index(victim)
    killed = time.time()
    victim.kill()
    victim.wait()
    left = [rank for rank in job.ranks if rank is not victim]

    def again(event: str) -> list[Any]:
        return job.wait_for(
            f"{event} after the death of {kind} {place}",
            lambda: job.first_of_each(left, event, lambda line: line["epoch"] > epoch),
            limit,
            victim,
        )

    def ends(count: int) -> list[float] | None:
        """When each survivor has finished so many steps behind the kill."""
        times: dict[int, list[float]] = {rank.pid: [] for rank in left}
        for line in job.lines:
            if line["event"] == "step" and line["pid"] in times and line["at"] > killed:
                times[line["pid"]].append(line["at"])
        enough = all(len(one) >= count for one in times.values())
        return [one[count - 1] for one in times.values()] if enough else None

    figures = {}
    if job.ELASTIC == "shrink":
        # One may be over that had begun before; the next one has begun behind it.
        for name, count in (("next", 1), ("step", 2)):
            found = job.wait_for(
                f"step after {kind} {place}", lambda n=count: ends(n), limit, victim
            )
            figures[name] = max(found) - killed
    else:
        figures["rejoined"] = max(line["at"] for line in again("synchronized")) - killed
        figures["step"] = max(line["at"] for line in again("step")) - killed
    born = time.time()
    let_in = replace(job, kind, place) - born
    pause = longest_pause(job, {rank.pid for rank in left}, since=born)
    return {**figures, "let_in": let_in, "pause": pause, "pace": pace}


def replace(job: Job, kind: str, place: int) -> float:
    """Starts a new member in the place of one that has died.

    Returns when the last rank has finished a step with it.
    """
    epoch = max(line["epoch"] for line in job.lines)
    if kind == "server":
        job.servers[place] = job.start_server(place)
    else:
        job.ranks[place] = job.start_rank(place)
    lines = job.wait_for(
        f"a step with the new {kind}",
        lambda: job.first_of_each(job.ranks, "step", lambda line: line["epoch"] > epoch),
        START_SECONDS,
    )
    if {line["size"] for line in lines} != {len(job.ranks)}:
        raise Failure(f"the job has not its old size: {lines}")
    check(job)
    return max(line["at"] for line in lines)


def longest_pause(job: Job, pids: set[int], since: float) -> float:
    """The longest time between two steps of one of these processes, the last before `since` on."""
    longest = 0.0
    for pid in pids:
        ends = [line["at"] for line in job.lines if line["pid"] == pid and line["event"] == "step"]
        gaps = [after - before for before, after in pairwise(ends) if after > since]
        longest = max(longest, *gaps)
    return longest


def summary(runs: list[dict[str, float]]) -> dict[str, Any]:
    """Median and worst of each figure: of few runs the 99th percentile is the worst."""
    names = runs[0]
    return {"runs": len(runs)} | {
        name: {
            "median": round(statistics.median(one[name] for one in runs), 4),
            "p99": round(
                sorted(one[name] for one in runs)[min(len(runs) - 1, int(0.99 * len(runs)))], 4
            ),
        }
        for name in names
    }


def finish(job: Job, limit: float) -> None:
    """Ends a job in good order; raises if others died than were meant to, or it learnt nothing."""
    metrics = job.metrics()
    deaths = metrics["bps_job_deaths_total"], bool(metrics["bps_job_reforming_seconds"])
    if deaths != (job.deaths, job.deaths > 0):
        raise Failure(f"{job.deaths} members were killed, and the metrics have {metrics}")
    job.stop.touch()
    for process in [*job.ranks, *job.servers, job.scheduler]:
        code = process.wait(limit)
        if code:
            raise Failure(f"a process ended with code {code}")
    of_rank_0 = (line for line in job.lines if line["event"] == "step" and not line["rank"])
    losses = [line["loss"] for line in of_rank_0]
    if not losses[-1] < losses[0]:
        raise Failure(f"the loss went from {losses[0]} to {losses[-1]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--cores", type=int, default=1, help="of each server")
    parser.add_argument("--threads", type=int, default=1, help="of torch in each rank")
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--runs", type=int, default=20, help="of each kind")
    parser.add_argument("--kinds", default="rank,rank0,server")
    parser.add_argument("--elastic", default="redo", choices=["redo", "shrink"])
    parser.add_argument("--absent", type=float, default=0.5, help="seconds without a scheduler")
    parser.add_argument("--mode", default="optimizer", choices=["optimizer", "cross", "ddp"])
    parser.add_argument("--limit", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    kinds = options.kinds.split(",")
    results: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory(prefix="bps-elastic") as folder:
        job = (ShrinkingJob if options.elastic == "shrink" else Job)(options, Path(folder))
        try:
            started = "a step of every rank"
            job.wait_for(
                started, lambda: job.first_of_each(job.ranks, "step", lambda _: True), START_SECONDS
            )
            for _ in range(options.runs):
                for kind in kinds:
                    if kind == "scheduler":
                        figures = replace_scheduler(job, options.absent, options.limit, rng)
                    else:
                        figures = run(job, kind, options.limit, rng)
                    results[kind].append(figures)
                    rounded = {name: round(value, 4) for name, value in figures.items()}
                    print(json.dumps({"kind": kind, **rounded}), flush=True)
            finish(job, options.limit)
        except (Failure, subprocess.TimeoutExpired) as failure:
            sys.exit(f"{failure}\n{job.tails()}")
        finally:
            job.close()
    print(json.dumps({kind: summary(runs) for kind, runs in results.items()}), flush=True)


if __name__ == "__main__":
    main()
