"""Trains a network on handwritten digits asynchronously, with one rank slower than the others.

    BYTEPS_ENABLE_ASYNC=1 bpslaunch --local 3 --servers 1 python python/examples/asynchronous.py

Each rank trains on images of its own for --seconds, as fast as it can; the last one sleeps two
thirds of the time. The parameters are on the server: a rank adds what its step has changed and
goes on with what is there then, without waiting for the others. At the end rank 0 prints how many
steps each rank took and the accuracy of the common parameters on digits that were held out, and
fails if that is below --accuracy or if the slow rank has held the others back.
"""

from __future__ import annotations

import argparse
import sys
import time

import byteps.torch as bps
import torch
from sklearn.datasets import load_digits
from torch import nn

HELD_OUT = 360
SLOWED = 3


def load() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's images and labels to train on, then images and labels held out."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16 - 0.5
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    train, test = order[HELD_OUT:][bps.rank() :: bps.size()], order[:HELD_OUT]
    return images[train], labels[train], images[test], labels[test]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seconds: float, batch: int) -> int:
    """Steps that this rank has taken in that time."""
    images, labels, *_ = load()
    generator = torch.Generator().manual_seed(bps.rank())
    is_slow = bps.size() > 1 and bps.rank() == bps.size() - 1
    steps, end = 0, time.monotonic() + seconds
    while (begun := time.monotonic()) < end:
        some = torch.randint(len(labels), (batch,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[some]), labels[some]).backward()
        optimizer.step()
        steps += 1
        if is_slow:
            time.sleep((SLOWED - 1) * (time.monotonic() - begun))
    return steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--batch", type=int, default=32, help="images of a step of one rank")
    parser.add_argument("--accuracy", type=float, default=0.93, help="the least that is right")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bps.init()
    torch.manual_seed(bps.rank())
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    # Deltas of all ranks are added, so each takes steps of its share.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / bps.size())
    optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters(), async_=True)
    steps = bps.allgather_object(train(model, optimizer, arguments.seconds, arguments.batch))
    # All have stopped: a step without gradients fetches what they have made together.
    optimizer.zero_grad(set_to_none=True)
    optimizer.step()
    *_, images, labels = load()
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
    is_right = accuracy >= arguments.accuracy and (bps.size() == 1 or max(steps) > 1.5 * steps[-1])
    if bps.rank() == 0:
        print(f"steps of each rank: {steps}, accuracy {accuracy:.3f}", flush=True)
    bps.shutdown()
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
