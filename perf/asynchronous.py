"""What one slow rank costs the others: in asynchronous training, and in synchronous.

    .venv/bin/python perf/asynchronous.py [--ranks 4] [--slowed 3] [--compute 0.1] [--megabytes 4] [--seconds 6]

Starts one job on this machine, every rank as a host of its own as far as sums are concerned (BPS_LOCAL_REDUCE=0). A rank
computes by sleeping for --compute seconds, so that a machine with fewer cores than ranks slows nobody; what the engine
and the optimizer do in a step is real. In each run every rank trains asynchronously for --seconds, with all ranks of one
speed and then with steps of the last one that take --slowed times as long, and then synchronously, in the same way. Each
line is a run: `kept` is by how much of its speed each rank but the slow one went on, and `slow` the same of that one.
The last line has the medians, and what is due.

It fails if a rank kept less than 0.95 of its speed in asynchronous training, in the median, or more than 0.45 of it in
synchronous training, where all are as fast as the slowest: then the slow rank was not slow.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

KEPT_MIN = 0.95
KEPT_SYNCHRONOUS_MAX = 0.45
WARM_UP_STEPS = 3
LAUNCH_SECONDS = 180


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--slowed", type=float, default=3.0, help="how slow the last rank is")
    parser.add_argument("--compute", type=float, default=0.1, help="seconds of a step")
    parser.add_argument("--megabytes", type=float, default=4.0, help="parameters")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def launch(options: argparse.Namespace) -> int:
    """Runs this file on the ranks of a job."""
    launcher = [sys.executable, "-m", "byteps.launch", "--no-prefix"]
    launcher += ["--local", str(options.ranks), "--servers", str(options.servers)]
    settings = {"BPS_LOCAL_REDUCE": "0", "BPS_LOG_LEVEL": "warning", "OMP_NUM_THREADS": "1"}
    jobs = ("DMLC_", "BYTEPS_", "BPS_")
    rest = {name: value for name, value in os.environ.items() if not name.startswith(jobs)}
    measured = 4 * options.seconds * options.runs * options.slowed
    return subprocess.run(
        [*launcher, sys.executable, __file__, *sys.argv[1:], "--rank"],
        env=rest | settings,
        stdin=subprocess.DEVNULL,
        timeout=LAUNCH_SECONDS + 2 * measured,
        check=False,
    ).returncode


class Training:
    """One model, and how its steps are taken."""

    def __init__(self, megabytes: float, is_asynchronous: bool) -> None:
        import torch

        import byteps.torch as bps

        self.bps = bps
        self.is_asynchronous = is_asynchronous
        width = int((megabytes * 2**20 / 4 / 4) ** 0.5)
        self.model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)])
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.optimizer = bps.DistributedOptimizer(
            optimizer, self.model.named_parameters(), async_=is_asynchronous
        )
        self.inputs = torch.ones(1, width)

    def step(self, compute: float) -> None:
        """One that computes for so many seconds."""
        time.sleep(compute)
        self.optimizer.zero_grad()
        self.model(self.inputs).sum().backward()
        self.optimizer.step()

    def steps_a_second(self, compute: float, seconds: float, slowest: float) -> float:
        """The speed of this rank, over as many seconds, or as many steps where all wait for the slowest."""
        for _ in range(WARM_UP_STEPS):
            self.step(compute)
        self.bps.barrier()
        steps, begun = 0, time.monotonic()
        if self.is_asynchronous:
            while time.monotonic() < begun + seconds:
                self.step(compute)
                steps += 1
        else:
            for _ in range(max(1, round(seconds / slowest))):
                self.step(compute)
                steps += 1
        speed = steps / (time.monotonic() - begun)
        self.bps.barrier()
        return speed


def measure(options: argparse.Namespace) -> int:
    """What a rank does; the first one prints, and knows whether all is right."""
    import torch

    import byteps.torch as bps

    torch.set_num_threads(1)
    bps.init()
    is_last = bps.rank() == bps.size() - 1
    modes = {
        name: Training(options.megabytes, name == "asynchronous")
        for name in ("asynchronous", "synchronous")
    }
    found: dict[str, list[list[float]]] = {name: [] for name in modes}
    for run in range(options.runs):
        for name, training in modes.items():
            speeds = []
            extra = 0.0
            for slowed in (1.0, options.slowed):
                compute = options.compute + (extra if is_last else 0.0)
                slowest = options.compute * slowed
                own = training.steps_a_second(compute, options.seconds, slowest)
                speeds.append(bps.allgather_object(own))
                extra = (options.slowed - 1) / own
            kept = [after / before for before, after in zip(*speeds, strict=True)]
            found[name].append(kept)
            if bps.rank() == 0:
                rounded = [round(one, 3) for one in kept]
                line = {"run": run, "mode": name, "kept": rounded[:-1], "slow": rounded[-1]}
                line["steps_a_second"] = [round(one, 2) for one in speeds[0]]
                print(json.dumps(line), flush=True)
    medians = {
        name: [statistics.median(of_rank) for of_rank in zip(*runs, strict=True)]
        for name, runs in found.items()
    }
    least = round(min(medians["asynchronous"][:-1]), 3)
    most = round(max(medians["synchronous"][:-1]), 3)
    if bps.rank() == 0:
        last = {
            "runs": options.runs,
            "asynchronous_kept_least": least,
            "due": KEPT_MIN,
            "synchronous_kept_most": most,
            "slowed_by": options.slowed,
        }
        print(json.dumps(last), flush=True)
    bps.shutdown()
    return 0 if least >= KEPT_MIN and most <= KEPT_SYNCHRONOUS_MAX else 1


def main() -> int:
    options = parse()
    if options.ranks < 2 or options.slowed <= 1 or options.runs < 1:
        print("asynchronous.py: --ranks of 2 or more, --slowed above 1, --runs of 1 or more")
        return 2
    return measure(options) if options.rank else launch(options)


if __name__ == "__main__":
    sys.exit(main())
