"""torch.distributed's reduce and reduce-scatter over this package, of which one rank receives each part, beside the same
where all ranks receive all, and beside gloo, in turn.

    torchrun --standalone --nproc-per-node 2 perf/beside_reduce.py [--json] [BYTES...]
    .venv/bin/python perf/beside_reduce.py --hosts 4 --rate 500mbit [--json] [BYTES...]

The second makes network namespaces whose links to a bridge token buckets shape, with a rank and a server of one core in
each; it needs root, `ip` and `tc`. BYTES are those of each rank's input. The three ways have the same processes and take
turns, round by round. A figure is the median over the rounds of the slowest rank's time; small inputs are timed over
some hundred calls in a row. `received` has a sum for each rank at any size, where the backend itself has it from
SCATTER_BYTES_MIN on.
"""

import argparse
import contextlib
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from compression_beside_ddp import GLOO_PORT, PORT, Stage, address, with_parent

WARM_UP = 2
SMALL_BYTES = 256 << 10
WAYS = ("received", "former", "gloo")
SIZES = (1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20)
#: What the ranks of a stage may take in all, and the servers to end behind them.
PATIENCE_SECONDS, ENDING_SECONDS = 560, 5


def slowest(seconds: float, group: dist.ProcessGroup) -> float:
    """The largest of all ranks' values."""
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
    return value.item()


def chosen(way: str) -> None:
    """Lets the backend's next calls go this way."""
    from byteps.torch.distributed import _group

    own = getattr(chosen, "own", _group.Operations._has_receivers)
    chosen.own = own
    _group.SCATTER_BYTES_MIN = 0
    _group.Operations._has_receivers = own if way == "received" else lambda *_: False


def measured(what: str, size_bytes: int, rounds: int, gloo: dist.ProcessGroup) -> dict:
    rank, size = dist.get_rank(), dist.get_world_size()
    count = max(size_bytes // 4 // size, 1) * size
    source, output = torch.empty(count), torch.empty(count // size)

    def call(group: dist.ProcessGroup | None) -> None:
        if what == "reduce":
            dist.reduce(source, 0, group=group)
        else:
            dist.reduce_scatter_tensor(output, source, group=group)

    small = size_bytes <= SMALL_BYTES
    repeats = (200 if size_bytes <= SMALL_BYTES // 4 else 50) if small else 1
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds + WARM_UP):
        for way in WAYS:
            chosen(way)
            source.fill_(1.0)
            dist.barrier(group=gloo)
            begin = time.perf_counter()
            for _ in range(repeats):
                call(gloo if way == "gloo" else None)
            times[way].append(slowest((time.perf_counter() - begin) / repeats, gloo))
            if repeats == 1 and (what != "reduce" or rank == 0):
                result = source if what == "reduce" else output
                assert (result == size).all(), f"a wrong {what} {way}"
    medians = {way: statistics.median(times[way][WARM_UP:]) for way in WAYS}
    return {
        "what": what,
        "ranks": size,
        "input_bytes": 4 * count,
        **{f"{way}_us": medians[way] * 1e6 for way in WAYS},
        "former_over_received": medians["former"] / medians["received"],
        "gloo_over_received": medians["gloo"] / medians["received"],
    }


def ranks_work(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("byteps")
    gloo = dist.new_group(backend="gloo")
    for what in ("reduce", "reduce_scatter"):
        for size_bytes in arguments.bytes or SIZES:
            row = measured(what, size_bytes, arguments.rounds, gloo)
            if dist.get_rank() == 0:
                shown = (f"{name} {_text(value)}" for name, value in row.items())
                print(json.dumps(row) if arguments.json else "  ".join(shown), flush=True)
    dist.destroy_process_group()


def _text(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def stage_work(arguments: argparse.Namespace) -> int:
    """Runs the ranks, each on a host of its own with a server; returns the first one's status."""
    hosts = arguments.hosts
    stage = Stage(hosts, arguments.rate)
    common = os.environ | {
        "DMLC_PS_ROOT_URI": address(0), "DMLC_PS_ROOT_PORT": str(PORT), "BPS_PIN": "0",
        "DMLC_NUM_WORKER": str(hosts), "DMLC_NUM_SERVER": str(hosts), "BYTEPS_LOCAL_SIZE": "1",
        "BPS_SERVER_CORES": "1", "BPS_LOG_LEVEL": "warning", "BPS_JOB_KEY": secrets.token_hex(32),
        "MASTER_ADDR": address(0), "MASTER_PORT": str(GLOO_PORT), "GLOO_SOCKET_IFNAME": "eth0",
        "WORLD_SIZE": str(hosts), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    everything: list[subprocess.Popen] = []

    def start(host: int, *words: str, **variables: str) -> subprocess.Popen:
        words = stage.words(stage.hosts[host], sys.executable, *words)
        child = subprocess.Popen(words, env=common | variables, preexec_fn=with_parent)  # noqa: PLW1509
        everything.append(child)
        return child

    try:
        start(0, "-m", "byteps._programs", "scheduler", DMLC_ROLE="scheduler")
        for host in range(hosts):
            start(host, "-m", "byteps._programs", "server", DMLC_ROLE="server")
        said = ["--as-rank", "--rounds", str(arguments.rounds), *map(str, arguments.bytes)]
        said += ["--json"] if arguments.json else []
        ranks = [
            start(host, str(Path(__file__).resolve()), *said, DMLC_WORKER_ID=str(host),
                  RANK=str(host), LOCAL_RANK="0", DMLC_ROLE="worker")
            for host in range(hosts)
        ]  # fmt: skip
        status = ranks[0].wait(timeout=PATIENCE_SECONDS)
        for child in everything:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=ENDING_SECONDS)
        return status
    finally:
        for child in everything:
            child.kill()
            child.wait()
        stage.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bytes", type=int, nargs="*", help="bytes of each rank's input")
    parser.add_argument("--rounds", type=int, default=11, help="timed rounds of each")
    parser.add_argument("--hosts", type=int, help="stage so many, with a rank on each")
    parser.add_argument("--rate", default="500mbit", help="of each link, as tc says it")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.hosts and not arguments.as_rank:
        if os.geteuid() != 0:
            raise SystemExit("only root can make network namespaces")
        return stage_work(arguments)
    ranks_work(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
