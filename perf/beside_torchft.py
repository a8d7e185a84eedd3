"""How long the survivors of a killed rank take to go on, beside torchft with gloo, in turn on one machine.

    .venv/bin/python perf/beside_torchft.py [--ranks 4] [--megabytes 100] [--rounds 3] [--kills 4]
        [--heartbeats 5000,500]

Needs torchft beside this package: `pip install torchft`. In each round every kind gets a job of its own, all of whose
ranks average the gradients of the same model through DistributedDataParallel: ours with two servers, each rank a
host of its own as far as sums are concerned, in a job that forms again (BPS_ELASTIC=redo) and in one that does not
(shrink); torchft's with a lighthouse, each rank a replica group of its own, once for each time in milliseconds after
which the lighthouse takes a replica without heartbeats for dead (5000 is its default; replicas send one each 100 ms). In
each job ranks are killed by SIGKILL at random moments, one after the other, and replaced. The last line but those that
compare has, for each kind, medians and worst values in seconds:

    step      from the kill until the last survivor has finished a step without the dead
    let_in    from the start of a new rank until the last rank has finished a step with it
    pause     the longest time between two steps of a survivor while that happened
    pace      the median step of the ranks before the kill
    unequal   steps after which two ranks had different parameters; any of ours is a failure

It fails if anything of ours takes longer than --limit seconds or goes wrong; of torchft's jobs that is told, and what they
did until then counts.
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

import elastic
from elastic import START_SECONDS, Failure, Job, Rank, ShrinkingJob


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
        return self._start("lighthouse", 0, [program or "torchft_lighthouse", *given])

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
    """Kills a rank, lets the others go on, and puts another in its place.

    The first step that ends after the death may have had the dead rank's gradients. Where jobs form again, it is told
    from the next ones by the size of the job; where they do not, the second one counts.
    """
    whole = len(job.ranks)
    pace = elastic.pace_of(job, limit)
    time.sleep(rng.random() * 2 * pace)
    place = rng.randrange(whole)
    victim = job.ranks[place]
    killed = time.time()
    victim.kill()
    victim.wait()
    left = [rank for rank in job.ranks if rank is not victim]

    def steps(ranks: list[Rank], since: float, seconds: float, size: int, number: int = 1) -> float:
        """When the last of these ranks has finished so many steps in a job of that size."""

        def found() -> list[float] | None:
            ends: dict[int, list[float]] = {rank.pid: [] for rank in ranks}
            for line in job.lines:
                if line["event"] == "step" and line["at"] > since and line["size"] == size:
                    ends.get(line["pid"], []).append(line["at"])
            enough = all(len(one) >= number for one in ends.values())
            return [one[number - 1] for one in ends.values()] if enough else None

        what = f"steps of {size} ranks after the death of rank {place}"
        return max(job.wait_for(what, found, seconds, victim))

    shrinks = job.ELASTIC == "shrink"
    size, number = (whole, 2) if shrinks else (whole - 1, 1)
    stepped = steps(left, killed, limit, size, number) - killed
    born = time.time()
    job.ranks[place] = job.start_rank(place)
    let_in = steps(job.ranks, born, START_SECONDS, whole) - born
    pause = elastic.longest_pause(job, {rank.pid for rank in left}, since=born)
    return {"step": stepped, "let_in": let_in, "pause": pause, "pace": pace}


def play(
    kind: str, options: argparse.Namespace, rng: random.Random
) -> tuple[list[dict[str, float]], int]:
    """Some kills in a job of this kind, and after how many steps ranks differed."""
    with tempfile.TemporaryDirectory(prefix="bps-beside-torchft") as folder:
        if kind == "ours":
            job = Job(options, Path(folder))
        elif kind == "ours, shrink":
            job = ShrinkingJob(options, Path(folder))
        else:
            job = TorchftJob(options, Path(folder), int(kind.split()[1]))
        try:
            size = len(job.ranks)
            figures: list[dict[str, float]] = []
            job.wait_for(
                "a step of every rank",
                lambda: job.first_of_each(job.ranks, "step", lambda line: line["size"] == size),
                START_SECONDS,
            )
            for _ in range(options.kills):
                figures.append(kill(job, options.limit, rng))
            if kind.startswith("ours"):
                elastic.check(job)
        except Failure as failure:
            if kind.startswith("ours"):
                sys.exit(f"{kind}: {failure}\n{job.tails()}")
            print(json.dumps({"kind": kind, "failed": str(failure)}), flush=True)
        finally:
            job.close()
        return figures, unequal(job)


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
    kinds = ["ours", "ours, shrink", *(f"torchft {ms} ms" for ms in options.heartbeats.split(","))]
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
    kinds = [kind for kind in kinds if results[kind]]
    last = {kind: elastic.summary(results[kind]) | {"unequal": differed[kind]} for kind in kinds}
    print(json.dumps(last), flush=True)
    ours = statistics.median(run["step"] for run in results["ours"])
    for kind in kinds[2:]:
        theirs = statistics.median(run["step"] for run in results[kind])
        print(f"{kind}: {theirs:.3f} s from a kill to the next step, ours {ours:.3f} s")


if __name__ == "__main__":
    main()
