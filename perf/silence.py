"""How long an elastic job takes to go on when a machine falls silent, and whether it goes on right.

    .venv/bin/python perf/silence.py [--ranks 4] [--servers 2] [--megabytes 1] [--runs 20] [--kinds rank,server]
        [--elastic shrink] [--interval 0.2 --timeout 0.8]

Starts one job, as elastic.py does, in which the scheduler, each server and each rank are on a host of their own: network
namespaces, with a switch between them that drops packets on demand (target/debug/bps-test-network; needs root). In each
run it cuts one host off, both ways, at a random moment within a step and between two heartbeats. No connection is closed
by that, and the processes of the host live on, as far as anybody can tell. When every survivor has finished a step that
began behind the cut, the processes of the host are killed, the network is whole again, and a new member begins in their
place; the next run begins when that trains too.

Each line is a run; the last one has, for each kind of host, the number of runs, the median and the 99th percentile (of
fewer than 100 runs it is the worst) of, in seconds from the cut:

    noticed   until the scheduler has said that the member is given up
    step      until the last survivor has finished its first step that began behind the cut, and that nothing which had
              left the host before could end
    behind    step less noticed: what it takes to go on
    pace      the median step of the ranks before the cut

--interval and --timeout are BPS_HEARTBEAT_INTERVAL and BPS_HEARTBEAT_TIMEOUT of all processes; without, the defaults hold.

It fails if two ranks differ in a parameter, the learning rate or the number of a step, if the survivors did not wait for
the silent host, if anybody else was given up, or if a job takes longer than --limit seconds to go on.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import elastic
from elastic import START_SECONDS, Failure, Job

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "python"))

from kill_job import PORT, Network, NoNetwork  # noqa: E402 -- It is where the tests are.

#: What the scheduler says of a member from which nothing has come.
SILENT = "no heartbeat for"
#: If nobody says otherwise.
INTERVAL, TIMEOUT = 1.0, 4.0


class HostsJob(Job):
    """Every process is on a host of its own: the scheduler, then servers, then ranks."""

    def __init__(self, options: argparse.Namespace, folder: Path, network: Network) -> None:
        self.network = network
        self.ELASTIC = options.elastic
        super().__init__(options, folder)

    def settings(self) -> dict[str, str]:
        given = {"INTERVAL": self.options.interval, "TIMEOUT": self.options.timeout}
        heartbeats = {name: value for name, value in given.items() if value is not None}
        return {
            "DMLC_PS_ROOT_URI": self.address("scheduler", 0),
            "DMLC_PS_ROOT_PORT": str(PORT),
            # As between machines, which share no memory.
            "BPS_TRANSPORT": "tcp",
            **{f"BPS_HEARTBEAT_{name}": str(value) for name, value in heartbeats.items()},
        }

    def host(self, role: str, place: int) -> int:
        """The number of the host of a process."""
        before = {"scheduler": 0, "server": 1, "rank": 1 + self.options.servers}
        return before[role] + place

    def address(self, role: str, place: int) -> str:
        return self.network.address(self.host(role, place))

    def enter(self, role: str, place: int) -> None:
        self.network.enter(self.host(role, place))

    def set(self, host: int, rule: str) -> None:
        """What becomes of all packets from and to a host."""
        for other in range(len(self.network.hosts)):
            if other != host:
                self.network.set(host, other, rule)
                self.network.set(other, host, rule)

    def metrics(self) -> dict[str, float]:
        """As seen from the host of the scheduler, to which a thread moves by itself."""
        found: dict[str, float] = {}

        def look() -> None:
            self.enter("scheduler", 0)
            found.update(super(HostsJob, self).metrics())

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        if not found:
            raise Failure("the scheduler does not show its metrics")
        return found


def run(job: HostsJob, kind: str, options: argparse.Namespace, rng: random.Random) -> Any:
    """Cuts the host of a member off, lets the others go on, and puts another in its place."""
    interval, timeout = options.interval or INTERVAL, options.timeout or TIMEOUT
    pace = elastic.pace_of(job, options.limit)
    time.sleep(rng.random() * max(2 * pace, interval))
    members = job.servers if kind == "server" else job.ranks
    place = rng.randrange(len(members))
    victim = members[place]
    host, log = job.host(kind, place), job.folder / "scheduler.log"
    said = log.stat().st_size
    job.read()
    epoch = max(line["epoch"] for line in job.lines)
    job.deaths += 1
    cut = time.time()
    job.set(host, "block")
    is_cut = time.time()
    left = [rank for rank in job.ranks if rank is not victim]
    noticed, known = 0.0, len(job.lines)
    own = [line["step"] for line in job.lines if line["pid"] == victim.pid]

    def steps() -> Any:
        """The survivors' first steps behind the cut, in which nothing of the victim can be."""
        nonlocal noticed
        if not noticed and SILENT.encode() in log.read_bytes()[said:]:
            noticed = time.time()
        # Only what is new: to look takes time from those that are measured.
        new = [line for line in job.lines[known:] if line["event"] == "step"]
        # Of the step behind its last one it may have sent everything already.
        last = max([-2, *own, *(line["step"] for line in new if line["pid"] == victim.pid)]) + 1
        first: dict[int, dict[str, Any]] = {}
        for line in new:
            if line["began"] > is_cut and (line["epoch"] > epoch or line["step"] > last):
                first.setdefault(line["pid"], line)
        found = [first.get(rank.pid) for rank in left]
        return None if None in found else found

    lines = job.wait_for(f"step without {kind} {place}", steps, options.limit, victim)
    step = max(line["at"] for line in lines) - cut
    if not noticed or step < timeout / 2:
        raise Failure(f"they went on after {step:.3f} s without having given {kind} {place} up")
    figures = {"noticed": noticed - cut, "step": step, "behind": step - (noticed - cut)}
    elastic.check(job)
    victim.kill()
    victim.wait()
    job.set(host, "pass")
    elastic.replace(job, kind, place)
    return {**figures, "pace": pace}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=1.0)
    parser.add_argument("--runs", type=int, default=20, help="of each kind")
    parser.add_argument("--kinds", default="rank,server")
    parser.add_argument("--elastic", default="redo", choices=["redo", "shrink"])
    parser.add_argument("--interval", type=float, help="BPS_HEARTBEAT_INTERVAL, seconds")
    parser.add_argument("--timeout", type=float, help="BPS_HEARTBEAT_TIMEOUT, seconds")
    parser.add_argument("--mode", default="optimizer", choices=["optimizer", "cross", "ddp"])
    parser.add_argument("--limit", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    kinds = options.kinds.split(",")
    results: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    try:
        network = Network(1 + options.servers + options.ranks)
    except NoNetwork as why:
        sys.exit(f"there can be no hosts that are network namespaces here: {why}")
    with tempfile.TemporaryDirectory(prefix="bps-silence") as folder:
        job = HostsJob(options, Path(folder), network)
        try:
            started = "a step of every rank"
            job.wait_for(
                started, lambda: job.first_of_each(job.ranks, "step", lambda _: True), START_SECONDS
            )
            for _ in range(options.runs):
                for kind in kinds:
                    figures = run(job, kind, options, rng)
                    results[kind].append(figures)
                    rounded = {name: round(value, 4) for name, value in figures.items()}
                    print(json.dumps({"kind": kind, **rounded}), flush=True)
            elastic.finish(job, options.limit)
        except (Failure, subprocess.TimeoutExpired) as failure:
            sys.exit(f"{failure}\n{job.tails()}")
        finally:
            job.close()
            network.close()
    last = {kind: elastic.summary(runs) for kind, runs in results.items()}
    print(json.dumps(last), flush=True)


if __name__ == "__main__":
    main()
