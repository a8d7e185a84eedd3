"""Trains a small convolutional network on real handwritten digits, on as many ranks as there are.

    bpslaunch --local 2 --servers 1 --server-cores 2 python python/examples/train_digits.py

The digits are the 1,797 images that scikit-learn ships, so nothing is downloaded. At the end rank 0
trains the same network again by itself on the same global batches: the parameters must be equal
within 1e-5. All arithmetic is in float64, in which sums of other orders differ by far less than
that, so what the check finds would be a defect and not rounding.
"""

from __future__ import annotations

import argparse
import sys
import time

import byteps.torch as bps
import torch
from sklearn.datasets import load_digits
from torch import nn

ACCURACY_MIN = 0.96
DIFFERENCE_MAX = 1e-5
HELD_OUT = 360
SPEED_BYTES = 16 << 20
SPEED_ROUNDS = 20


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=64, help="images of a global batch")
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", help="file for the line that python/quickstart shows")
    return parser.parse_args()


def load(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images and labels to train on, then images and labels held out."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float64).unsqueeze(1) / 16 - 0.5
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    train, test = order[HELD_OUT:], order[:HELD_OUT]
    return images[train], labels[train], images[test], labels[test]


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    ).double()


def global_batches(count: int, batch: int, epoch: int, seed: int) -> list[torch.Tensor]:
    """The same batches on every rank; what does not fill one is left out."""
    generator = torch.Generator().manual_seed(1000 * seed + epoch)
    order = torch.randperm(count, generator=generator)
    return [order[i : i + batch] for i in range(0, count - batch + 1, batch)]


def train_step(model, optimizer, images, labels) -> float:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.no_grad():
        return (model(images).argmax(1) == labels).double().mean().item()


class Progress:
    """A bar on rank 0: it grows in place on a terminal, and is a line an epoch elsewhere."""

    WIDTH = 30

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self.shown = bps.rank() == 0
        self.terminal = sys.stdout.isatty()

    def _bar(self) -> str:
        filled = self.WIDTH * self.done // self.total
        return f"[{'#' * filled}{'.' * (self.WIDTH - filled)}] {100 * self.done // self.total:3d}%"

    def step(self) -> None:
        self.done += 1
        if self.shown and self.terminal:
            print(f"\r{self._bar()}", end="", flush=True)

    def line(self, text: str) -> None:
        if self.shown:
            start = "\r" if self.terminal else ""
            print(f"{start}{self._bar()} {text}", flush=True)


def train(model, optimizer, data, arguments) -> None:
    """The distributed run: each rank takes its share of every global batch."""
    images, labels, test_images, test_labels = data
    rank, size = bps.rank(), bps.size()
    steps = len(global_batches(len(labels), arguments.batch, 0, arguments.seed))
    progress = Progress(steps * arguments.epochs)
    for epoch in range(arguments.epochs):
        total = 0.0
        for batch in global_batches(len(labels), arguments.batch, epoch, arguments.seed):
            share = batch[rank::size]
            total += train_step(model, optimizer, images[share], labels[share])
            progress.step()
        loss = bps.push_pull(torch.tensor(total / steps, dtype=torch.float64), name="loss").item()
        held_out = accuracy(model, test_images, test_labels)
        progress.line(
            f"epoch {epoch + 1} of {arguments.epochs}  loss {loss:.4f}  accuracy {held_out:.3f}"
        )


def difference_from_one_process(start, model, data, arguments) -> float:
    """Trains alone on the same global batches; the largest difference of any parameter."""
    images, labels, _, _ = data
    alone = make_model()
    alone.load_state_dict(start)
    optimizer = make_optimizer(alone, arguments)
    for epoch in range(arguments.epochs):
        for batch in global_batches(len(labels), arguments.batch, epoch, arguments.seed):
            train_step(alone, optimizer, images[batch], labels[batch])
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max((one - other).abs().max().item() for one, other in pairs)


def make_optimizer(model: nn.Module, arguments: argparse.Namespace) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=arguments.rate, momentum=0.9)


def push_pull_speed() -> float:
    """GB/s of one rank's tensor bytes, there and back, in rounds of 16 MiB."""
    tensor = torch.ones(SPEED_BYTES // 4)
    for _ in range(3):
        bps.push_pull_inplace(tensor, name="speed")
    bps.barrier()
    begun = time.perf_counter()
    for _ in range(SPEED_ROUNDS):
        bps.push_pull_inplace(tensor, name="speed")
    return SPEED_BYTES * SPEED_ROUNDS / (time.perf_counter() - begun) / 1e9


def main() -> int:
    arguments = parse_arguments()
    bps.init()
    if arguments.batch % bps.size() != 0:
        print(f"--batch {arguments.batch} does not divide by the {bps.size()} ranks")
        return 2
    # One thread each, so that the ranks and the server share a small machine well.
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed + bps.rank())
    data = load(arguments.seed)
    model = make_model()
    optimizer = make_optimizer(model, arguments)
    optimizer = bps.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    # Every rank drew other parameters; all start from those of rank 0.
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    bps.broadcast_optimizer_state(optimizer, root_rank=0)
    start = {name: value.clone() for name, value in model.state_dict().items()}

    begun = time.perf_counter()
    train(model, optimizer, data, arguments)
    seconds = time.perf_counter() - begun
    speed = push_pull_speed()

    status = 0
    if bps.rank() == 0:
        held_out = accuracy(model, data[2], data[3])
        difference = difference_from_one_process(start, model, data, arguments)
        print(f"training took {seconds:.1f} s, with {bps.size()} worker processes")
        if bps.size() > 1:
            print(f"push_pull of {SPEED_BYTES >> 20} MiB: {speed:.2f} GB/s on each rank")
        print(
            f"difference from single-process training: {difference:.1e} (at most {DIFFERENCE_MAX})"
        )
        print(f"accuracy on {HELD_OUT} held-out images: {held_out:.3f} (at least {ACCURACY_MIN})")
        if difference > DIFFERENCE_MAX or held_out < ACCURACY_MIN:
            print("train_digits: FAILED: see the two lines above")
            status = 1
        elif arguments.report:
            with open(arguments.report, "w", encoding="utf-8") as report:
                report.write(f"accuracy={held_out:.3f}\n")
    bps.shutdown()
    return status


if __name__ == "__main__":
    sys.exit(main())
