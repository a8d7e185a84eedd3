"""From a launcher's start to the end of the first step of training, beside torchrun with gloo, in turn.

    .venv/bin/python perf/start_up.py [--json] [--ranks N] [--rounds N] [--ways WAY...]

Each way starts a job of its own, of as many ranks on this machine, and trains one step of a linear layer. A figure is
the median over the rounds of the time from the start of the launcher to the moment when the last rank says that its
step is done; most of it is Python's import of torch, which `alone`, one process without a job, has as well. `above_s`
is what a way takes longer than torchrun with gloo. `cpu_s` is the processor time of all processes of the job, to its
end, which other work on the machine disturbs less.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

PEER = "torchrun-gloo"
DONE = "first step done"
PATIENCE_SECONDS = 120


def ways(ranks: int) -> dict[str, list[str]]:
    """The commands, by name."""
    rank = [os.path.abspath(__file__), "--rank"]
    bpslaunch = [sys.executable, "-m", "byteps.launch", "--local", str(ranks), sys.executable]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun.append(f"--nproc-per-node={ranks}")
    return {
        "alone": [sys.executable, *rank, "alone"],
        "bpslaunch-optimizer": [*bpslaunch, *rank, "optimizer"],
        "bpslaunch-byteps": [*bpslaunch, *rank, "byteps"],
        "torchrun-byteps": [*torchrun, *rank, "byteps"],
        PEER: [*torchrun, *rank, "gloo"],
    }


def step(way: str) -> None:
    """What each rank does."""
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if way == "optimizer":
        import byteps.torch as bps

        bps.init()
        bps.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters())
    elif way != "alone":
        torch.distributed.init_process_group(way)
        model = torch.nn.parallel.DistributedDataParallel(model)
    model(torch.ones(8, 64)).square().mean().backward()
    optimizer.step()
    sys.stdout.write(f"{DONE}\n")
    sys.stdout.flush()
    if way not in ("alone", "optimizer"):
        torch.distributed.destroy_process_group()


def processor_seconds() -> float:
    """Those of all children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def timed(command: list[str], ranks: int) -> tuple[float, float]:
    """Seconds until all ranks have said that they are done, and processor seconds of the job."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    begin, used = time.perf_counter(), processor_seconds()
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said, left, took = [], ranks, 0.0
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        left -= DONE in line
        if not left and not took:
            took = time.perf_counter() - begin
    status = process.wait(PATIENCE_SECONDS)
    if status or left:
        sys.exit(f"{' '.join(command)} ended with status {status}:\n{''.join(said)}")
    return took, processor_seconds() - used


def main() -> None:
    parser = argparse.ArgumentParser(description="the start of a job beside torchrun with gloo")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of each job")
    parser.add_argument("--rounds", type=int, default=5, help="timed jobs of each way")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--ways", nargs="+", help="of the ways to start; all, if not given")
    parser.add_argument("--rank", metavar="WAY", help="be a rank of a job (for this program)")
    arguments = parser.parse_args()
    if arguments.rank:
        step(arguments.rank)
        return
    commands = ways(arguments.ranks)
    chosen = [way for way in commands if way in (arguments.ways or commands) or way == PEER]
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in chosen}
    # The first round fills the caches of the file system.
    for _ in range(1 + arguments.rounds):
        for way in chosen:
            times[way].append(timed(commands[way], 1 if way == "alone" else arguments.ranks))
    medians = {way: statistics.median(took for took, _ in times[way][1:]) for way in chosen}
    for way, start in medians.items():
        fields = {
            "way": way,
            "start_s": start,
            "above_s": start - medians[PEER],
            "cpu_s": statistics.median(used for _, used in times[way][1:]),
        }
        if arguments.json:
            print(json.dumps({**fields, "ranks": arguments.ranks, "rounds": arguments.rounds}))
        else:
            print("  ".join(f"{k} {v:.2f}" if k != "way" else f"{v:19}" for k, v in fields.items()))


if __name__ == "__main__":
    main()
