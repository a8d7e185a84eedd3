"""Sums four tensors again and again, through a server, while the job finds its own settings.

    bpslaunch --local 2 --force-distributed --servers 1 --partition-bytes 4K \\
        --scheduling-credit 1 --tune-credit --tune-partition --tune-file tuned.env \\
        python python/examples/tuning.py

The job begins with parts of 4 KiB, one of them in flight. The scheduler prints a line for each
trial, and writes what it has found to tuned.env. Every sum is compared with its value: rank 0
prints how fast the first steps were and the last ones, and fails if the last ones are not faster,
unless there were few.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import byteps.torch as bps
import torch


def step(tensors: list[torch.Tensor], number: int) -> float:
    """Sums all tensors over the ranks; the seconds that this took."""
    for tensor in tensors:
        tensor.fill_(number + bps.rank())
    began = time.monotonic()
    handles = [
        bps.push_pull_async_inplace(tensor, average=False, name=f"tensor.{index}")
        for index, tensor in enumerate(tensors)
    ]
    for handle in handles:
        bps.synchronize(handle)
    seconds = time.monotonic() - began
    want = sum(number + rank for rank in range(bps.size()))
    if not all(bool((tensor == want).all()) for tensor in tensors):
        sys.exit(f"a sum of step {number} is not {want}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--elements", type=int, default=1 << 20, help="of each tensor")
    args = parser.parse_args()
    bps.init()
    tensors = [torch.empty(args.elements) for _ in range(4)]
    seconds = [step(tensors, number) for number in range(args.steps)]
    if bps.rank() == 0:
        first, last = (statistics.median(part) for part in (seconds[:3], seconds[-20:]))
        print(f"every sum was right; a step took {first * 1e3:.1f} ms, then {last * 1e3:.1f} ms")
        if args.steps >= 100 and last > first:
            sys.exit("the job has found nothing that is faster")
    bps.shutdown()


if __name__ == "__main__":
    main()
