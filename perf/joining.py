"""How long the ranks of an elastic job pause when another rank joins, on lines of a given rate.

    .venv/bin/python perf/joining.py [--ranks 4] [--servers 2] [--megabytes 100] [--runs 5] [--rate 1gbit]
        [--elastic shrink]

Starts one job, as silence.py does, in which the scheduler, each server and each rank are on a host of their own, and what
each host sends is limited to the rate (tc's token bucket; needs root). In each run one more rank starts at a random
moment of a step. When all train with it, it gets SIGTERM and leaves. Each line is a run; the last one has the number of
runs, the median and the 99th percentile (of fewer than 100 runs it is the worst) of, in seconds:

    let_in    from the start of the new rank until the last rank has finished a step with it
    pause     the longest time between two steps of one of the others while that happened
    pace      the median step of the others before
    beyond    pause less pace: what the new rank costs them
    line      what the line takes: each server sends its part of the state to all ranks
    limit     line and half a second

It fails if two ranks differ in a parameter, the learning rate or the number of a step, or if a job takes longer than
--limit seconds to go on. The parameters are the whole state: the optimizer has none.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import elastic
from elastic import START_SECONDS, Failure
from silence import HostsJob, Network, NoNetwork

#: As bps-test-network names it.
INTERFACE = "eth0"
UNITS = {"mbit": 10**6, "gbit": 10**9}


def bits_of(rate: str) -> float:
    """Bits a second of a rate as tc has them."""
    for unit, factor in UNITS.items():
        if rate.endswith(unit):
            return float(rate[: -len(unit)]) * factor
    raise ValueError(rate)


def rate_of(text: str) -> str:
    """It, if it is a rate.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    try:
        bits_of(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: a number and {' or '.join(UNITS)}") from None
    return text


def limit_lines(network: Network, rate: str) -> None:
    """Lets no host send faster."""
    burst = max(65536, round(bits_of(rate) / 8 / 1000))
    for host in range(len(network.hosts)):
        command = ["tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", rate]
        subprocess.run(
            [*command, "burst", str(burst), "latency", "50ms"],
            check=True,
            preexec_fn=lambda host=host: network.enter(host),
        )


def run(job: HostsJob, options: argparse.Namespace, rng: random.Random) -> dict[str, float]:
    """Lets one more rank join, and leave again."""
    pace = elastic.pace_of(job, options.limit)
    time.sleep(rng.random() * pace)
    others, size = list(job.ranks), len(job.ranks)
    pids = {rank.pid for rank in others}
    born = time.time()
    # It is none of the first ones, and has a place behind theirs.
    job.environment |= {"BPS_JOINS": "1", "DMLC_NUM_WORKER": str(size + 1)}
    newcomer = job.start_rank(size)
    job.ranks.append(newcomer)

    def with_size(size: int, since: float) -> list[float] | None:
        """When each of the ranks has finished its first step in a job of that size."""
        found = job.first_of_each(
            job.ranks, "step", lambda line: line["size"] == size and line["at"] > since
        )
        return None if found is None else [line["at"] for line in found]

    ends = job.wait_for("a step with a new rank", lambda: with_size(size + 1, born), START_SECONDS)
    pause = elastic.longest_pause(job, pids, since=born)
    elastic.check(job)
    os.kill(newcomer.pid, signal.SIGTERM)
    asked = time.time()
    job.ranks.pop()
    job.wait_for("a step after it has left", lambda: with_size(size, asked), options.limit)
    if newcomer.wait(options.limit):
        raise Failure(f"the rank that left ended with code {newcomer.code}")
    # Every server has its part of the state, and sends it to the new rank and to all others.
    sent = options.megabytes * 2**20 * (size + 1) / options.servers
    line = sent * 8 / bits_of(options.rate)
    figures = {"let_in": max(ends) - born, "pause": pause, "pace": pace, "beyond": pause - pace}
    return {**figures, "line": line, "limit": line + 0.5}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--rate", type=rate_of, default="1gbit", help="of what each host sends, as for tc"
    )
    parser.add_argument("--elastic", default="redo", choices=["redo", "shrink"])
    parser.add_argument("--mode", default="optimizer", choices=["optimizer", "cross", "ddp"])
    parser.add_argument("--limit", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.interval = options.timeout = None
    if shutil.which("tc") is None:
        sys.exit("lines can't be limited here: tc is missing; install iproute2")
    rng = random.Random(options.seed)
    try:
        network = Network(1 + options.servers + options.ranks + 1)
    except NoNetwork as why:
        sys.exit(f"there can be no hosts that are network namespaces here: {why}")
    limit_lines(network, options.rate)
    results: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="bps-joining") as folder:
        job = HostsJob(options, Path(folder), network)
        try:
            started = "a step of every rank"
            job.wait_for(
                started, lambda: job.first_of_each(job.ranks, "step", lambda _: True), START_SECONDS
            )
            for _ in range(options.runs):
                results.append(run(job, options, rng))
                print(json.dumps({k: round(v, 4) for k, v in results[-1].items()}), flush=True)
        except (Failure, subprocess.TimeoutExpired) as failure:
            sys.exit(f"{failure}\n{job.tails()}")
        finally:
            job.close()
            network.close()
    print(json.dumps(elastic.summary(results)), flush=True)


if __name__ == "__main__":
    main()
