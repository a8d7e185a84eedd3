"""What one slow rank costs the others: where rounds do not wait for it, and where they do.

    .venv/bin/python perf/stragglers.py [--ranks 4] [--slowed 3] [--compute 0.1] [--megabytes 4] [--steps 24]

Starts one job on this machine, every rank as a host of its own (BPS_LOCAL_REDUCE=0). A rank computes by sleeping for
--compute seconds, so that a machine with fewer cores than ranks slows nobody; what the engine and the optimizer do in a
step is real. In each run every rank trains for --steps steps with DistributedOptimizer(backup_workers=1), with all ranks
of one speed and then with steps of the last one that take --slowed times as long, and then without backup workers, in the
same way. The last rank falls behind by as many rounds as BPS_BACKUP_BEHIND lets it, here all that it loses in --steps.
Each line is a run: `kept` is by how much of its speed each rank but the slow one went on, and `slow` the same of that
one. `late` are contributions of the slow rank that came too late, of a tensor of one part. The last line has the
medians, and what is due.

It fails if a rank kept less than 0.9 of its speed with a backup worker, in the median, or more than 0.45 of it without,
where all are as fast as the slowest: then the slow rank was not slow. It fails too if two ranks do not have the same
parameters in the end.
"""

import argparse
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import time

KEPT_MIN = 0.9
KEPT_WHOLE_MAX = 0.45
# The first rounds wait for all.
WARM_UP_STEPS = 8
LAUNCH_SECONDS = 300
BEHIND_MAX = 64


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--slowed", type=float, default=3.0, help="how slow the last rank is")
    parser.add_argument("--compute", type=float, default=0.1, help="seconds of a step")
    parser.add_argument("--megabytes", type=float, default=4.0, help="parameters")
    parser.add_argument("--steps", type=int, default=24, help="of each measurement")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def launch(options: argparse.Namespace, behind: int) -> int:
    """Runs this file on the ranks of a job."""
    launcher = [sys.executable, "-m", "byteps.launch", "--no-prefix"]
    launcher += ["--local", str(options.ranks), "--servers", str(options.servers)]
    settings = {"BPS_LOCAL_REDUCE": "0", "BPS_LOG_LEVEL": "warning", "OMP_NUM_THREADS": "1"}
    settings["BPS_BACKUP_BEHIND"] = str(behind)
    jobs = ("DMLC_", "BYTEPS_", "BPS_")
    rest = {name: value for name, value in os.environ.items() if not name.startswith(jobs)}
    measured = 4 * options.steps * options.compute * options.runs * options.slowed
    return subprocess.run(
        [*launcher, sys.executable, __file__, *sys.argv[1:], "--rank"],
        env=rest | settings,
        stdin=subprocess.DEVNULL,
        timeout=LAUNCH_SECONDS + 2 * measured,
        check=False,
    ).returncode


class Training:
    """One model, and how its steps are taken."""

    def __init__(self, megabytes: float, workers: int) -> None:
        import torch

        import byteps.torch as bps

        self.bps = bps
        self.workers = workers
        self.late = 0
        torch.manual_seed(0)
        width = int((megabytes * 2**20 / 4 / 4) ** 0.5)
        self.model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)])
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.optimizer = bps.DistributedOptimizer(
            optimizer, self.model.named_parameters(), backup_workers=workers
        )
        self.inputs = torch.full((1, width), 1.0 + bps.rank())
        self.probe = torch.ones(1)

    def step(self, compute: float) -> None:
        """One that computes for so many seconds."""
        time.sleep(compute)
        self.optimizer.zero_grad()
        probe = self.bps.push_pull_async_inplace(
            self.probe, name=f"probe.{self.workers}", backup_workers=self.workers
        )
        self.model(self.inputs).sum().backward()
        self.optimizer.step()
        self.late += self.bps.rank() not in self.bps.contributors(probe)
        self.bps.synchronize(probe)

    def steps_a_second(self, usual: float, compute: float, steps: int) -> float:
        """The speed of this rank."""
        for _ in range(WARM_UP_STEPS):
            self.step(usual)
        self.bps.barrier()
        begun = time.monotonic()
        for _ in range(steps):
            self.step(compute)
        speed = steps / (time.monotonic() - begun)
        self.bps.barrier()
        return speed

    def digest(self) -> str:
        """Of the parameters."""
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        return digest.hexdigest()


def measure(options: argparse.Namespace) -> int:
    """What a rank does; the first one prints, and knows whether all is right."""
    import torch

    import byteps.torch as bps

    torch.set_num_threads(1)
    bps.init()
    is_last = bps.rank() == bps.size() - 1
    modes = {name: Training(options.megabytes, one) for name, one in (("backup", 1), ("whole", 0))}
    found: dict[str, list[list[float]]] = {name: [] for name in modes}
    equal = True
    for run in range(options.runs):
        for name, training in modes.items():
            speeds = []
            extra, training.late = 0.0, 0
            for _ in (1.0, options.slowed):
                compute = options.compute + (extra if is_last else 0.0)
                own = training.steps_a_second(options.compute, compute, options.steps)
                speeds.append(bps.allgather_object(own))
                extra = (options.slowed - 1) / own
            kept = [after / before for before, after in zip(*speeds, strict=True)]
            found[name].append(kept)
            equal &= len(set(bps.allgather_object(training.digest()))) == 1
            late = bps.allgather_object(training.late)
            if bps.rank() == 0:
                rounded = [round(one, 3) for one in kept]
                line = {"run": run, "mode": name, "kept": rounded[:-1], "slow": rounded[-1]}
                line["steps_a_second"] = [round(one, 2) for one in speeds[0]]
                print(json.dumps(line | {"late": late}), flush=True)
    medians = {
        name: [statistics.median(of_rank) for of_rank in zip(*runs, strict=True)]
        for name, runs in found.items()
    }
    least = round(min(medians["backup"][:-1]), 3)
    most = round(max(medians["whole"][:-1]), 3)
    if bps.rank() == 0:
        last = {
            "runs": options.runs,
            "backup_kept_least": least,
            "due": KEPT_MIN,
            "whole_kept_most": most,
            "slowed_by": options.slowed,
            "equal": equal,
        }
        print(json.dumps(last), flush=True)
    bps.shutdown()
    return 0 if equal and least >= KEPT_MIN and most <= KEPT_WHOLE_MAX else 1


def main() -> int:
    options = parse()
    # What a rank loses that is so much slower, and one for the round under way.
    behind = math.ceil(options.steps * (1 - 1 / max(options.slowed, 1))) + 1
    if options.ranks < 2 or options.slowed <= 1 or options.runs < 1 or behind > BEHIND_MAX:
        print(
            "stragglers.py: --ranks of 2 or more, --slowed above 1, --runs of 1 or more, and at "
            f"most {BEHIND_MAX} rounds behind in --steps"
        )
        return 2
    return measure(options) if options.rank else launch(options, behind)


if __name__ == "__main__":
    sys.exit(main())
