"""How long the survivors of a killed rank take to go on, beside torchft with gloo, in turn on one machine.

    .venv/bin/python perf/beside_torchft.py [--ranks 4] [--megabytes 100] [--rounds 3] [--kills 4]
        [--heartbeats 5000,500]

Needs torchft beside this package: `pip install torchft`. In each round every kind gets a job of its own, all of whose
ranks average the gradients of the same model through DistributedDataParallel: ours with two servers, each rank a
host of its own as far as sums are concerned; torchft's with a lighthouse, each rank a replica group of its own, once for
each time in milliseconds after which the lighthouse takes a replica without heartbeats for dead (5000 is its default,
100 its replicas' pace). In each job ranks are killed by SIGKILL at random moments, one after the other, and replaced.
The last line has, for each kind, medians and worst values in seconds:

    step      from the kill until the last survivor has finished a step without the dead
    let_in    from the start of a new rank until the last rank has finished a step with it
    pause     the longest time between two steps of a survivor while that happened
    pace      the median step of the ranks before the kill

    unequal   steps after which two ranks had different parameters; any of ours is a failure

It fails if anything takes longer than --limit seconds.
"""

import argparse
import importlib.util
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import elastic
from elastic import START_SECONDS, Failure, Job, Rank


class TorchftJob(Job):
    """A lighthouse, in the place of a scheduler, and ranks of this machine."""

    def __init__(self, options: argparse.Namespace, folder: Path, heartbeat_ms: int) -> None:
        self.heartbeat_ms = heartbeat_ms
        super().__init__(argparse.Namespace(**vars(options) | {"servers": 0}), folder)

    def start_scheduler(self) -> subprocess.Popen[bytes]:
        port = self.environment["DMLC_PS_ROOT_PORT"]
        self._port.close()
        program = shutil.which("torchft_lighthouse", path=str(Path(sys.executable).parent))
        options = {
            "bind": f"127.0.0.1:{port}",
            "min_replicas": 1,
            "heartbeat_timeout_ms": self.heartbeat_ms,
            "quorum_tick_ms": 10,
        }
        given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return self._start("lighthouse", [program or "torchft_lighthouse", *given])

    def start_rank(self, place: int) -> Rank:
        lighthouse = f"http://127.0.0.1:{self.environment['DMLC_PS_ROOT_PORT']}"

        def train() -> None:
            import torchft_rank  # In the process of the rank: torchft starts threads.

            torchft_rank.train(self.log, self.options.megabytes, self.stop, lighthouse, place)

        return Rank(self.folder / f"rank-{place}.log", self.environment, train)


def unequal(job: Job) -> int:
    """Steps after which two ranks of a job of one size had different parameters."""
    known: dict[tuple[int, int], set[str]] = {}
    for line in job.lines:
        if line["event"] == "step":
            known.setdefault((line["step"], line["size"]), set()).add(line["digest"])
    return sum(len(digests) > 1 for digests in known.values())


def kill(job: Job, limit: float, rng: random.Random) -> dict[str, float]:
    """Kills a rank, lets the others go on, and puts another in its place."""
    whole = len(job.ranks)
    pace = elastic.pace_of(job, limit)
    time.sleep(rng.random() * 2 * pace)
    place = rng.randrange(whole)
    victim = job.ranks[place]
    killed = time.time()
    victim.kill()
    victim.wait()
    left = [rank for rank in job.ranks if rank is not victim]

    def steps(ranks: list[Rank], size: int, since: float, seconds: float) -> float:
        def fits(line: Any) -> bool:
            return line["at"] > since and line["size"] == size

        lines = job.wait_for(
            f"steps of {size} ranks after the death of rank {place}",
            lambda: job.first_of_each(ranks, "step", fits),
            seconds,
            victim,
        )
        return max(line["at"] for line in lines)

    stepped = steps(left, whole - 1, killed, limit) - killed
    born = time.time()
    job.ranks[place] = job.start_rank(place)
    let_in = steps(job.ranks, whole, born, START_SECONDS) - born
    pause = elastic.longest_pause(job, {rank.pid for rank in left}, since=born)
    return {"step": stepped, "let_in": let_in, "pause": pause, "pace": pace}


def play(
    kind: str, options: argparse.Namespace, rng: random.Random
) -> tuple[list[dict[str, float]], int]:
    """Some kills in a job of this kind, and after how many steps ranks differed."""
    with tempfile.TemporaryDirectory(prefix="bps-beside-torchft") as folder:
        if kind == "ours":
            job = Job(options, Path(folder))
        else:
            job = TorchftJob(options, Path(folder), int(kind.split()[1]))
        try:
            size = len(job.ranks)
            job.wait_for(
                "a step of every rank",
                lambda: job.first_of_each(job.ranks, "step", lambda line: line["size"] == size),
                START_SECONDS,
            )
            figures = [kill(job, options.limit, rng) for _ in range(options.kills)]
            if kind == "ours":
                elastic.check(job)
            return figures, unequal(job)
        except Failure as failure:
            sys.exit(f"{kind}: {failure}\n{job.tails()}")
        finally:
            job.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=4, help="in each job")
    parser.add_argument("--heartbeats", default="5000,500", help="milliseconds, of torchft's jobs")
    parser.add_argument("--limit", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.mode = "ddp"
    if importlib.util.find_spec("torchft") is None:
        sys.exit("there is no torchft in this environment: pip install torchft")
    kinds = ["ours", *(f"torchft {ms} ms" for ms in options.heartbeats.split(","))]
    results: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    differed = dict.fromkeys(kinds, 0)
    for number in range(options.rounds):
        for kind in kinds:
            # The same moments for all of them.
            runs, wrong = play(kind, options, random.Random(options.seed + number))
            results[kind] += runs
            differed[kind] += wrong
            rounded = [{name: round(value, 4) for name, value in run.items()} for run in runs]
            print(json.dumps({"round": number, "kind": kind, "kills": rounded}), flush=True)
    last = {kind: elastic.summary(results[kind]) | {"unequal": differed[kind]} for kind in kinds}
    print(json.dumps(last), flush=True)
    ours = statistics.median(run["step"] for run in results["ours"])
    for kind in kinds[1:]:
        theirs = statistics.median(run["step"] for run in results[kind])
        print(f"{kind}: {theirs:.3f} s from a kill to the next step, ours {ours:.3f} s")


if __name__ == "__main__":
    main()
