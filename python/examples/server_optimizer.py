"""Trains a network on handwritten digits with AdamW on the servers.

    BYTEPS_FORCE_DISTRIBUTED=1 \\
        bpslaunch --local 2 --servers 1 python python/examples/server_optimizer.py

Ranks push gradients, in bfloat16, and get parameters; moments and parameters in float32 are on the
servers. Half-way each rank saves the state, builds model and optimizer anew, and goes on from what
was saved. At the end rank 0 prints the accuracy on digits that were held out, and what each rank
and the servers have kept; it fails if the accuracy is below --accuracy, or if the ranks' parameters
differ by a bit.
"""

from __future__ import annotations

import argparse
import io
import sys

import byteps.torch as bps
import torch
from sklearn.datasets import load_digits
from torch import nn

HELD_OUT = 360


def load() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's images and labels to train on, then images and labels held out."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16 - 0.5
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    train, test = order[HELD_OUT:][bps.rank() :: bps.size()], order[:HELD_OUT]
    return images[train], labels[train], images[test], labels[test]


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model, with other parameters on each rank, and its optimizer."""
    torch.manual_seed(bps.rank())
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    adamw = torch.optim.AdamW(model.parameters(), lr=0.004, weight_decay=0.01)
    return model, bps.ServerOptimizer(adamw, model.named_parameters(), wire="bf16")


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, total: int, batch: int
) -> None:
    """These steps of so many, with a learning rate that falls to nothing."""
    images, labels, *_ = load()
    generator = torch.Generator().manual_seed(1000 * bps.rank() + steps.start)
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 0.004 * (1 - step / total)
        some = torch.randint(len(labels), (batch,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[some]), labels[some]).backward()
        optimizer.step()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=32, help="images of a step of one rank")
    parser.add_argument("--accuracy", type=float, default=0.95, help="the least that is right")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bps.init()
    half = arguments.steps // 2
    model, optimizer = build()
    train(model, optimizer, range(half), arguments.steps, arguments.batch)
    file = io.BytesIO()
    # All ranks ask for it, and each has all of it.
    torch.save(bps.server_state_dict(optimizer), file)
    file.seek(0)
    model, optimizer = build()
    bps.load_server_state_dict(optimizer, torch.load(file, weights_only=True))
    train(model, optimizer, range(half, arguments.steps), arguments.steps, arguments.batch)
    kept = bps.server_state_dict(optimizer)
    *_, images, labels = load()
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
        flat = torch.cat([param.flatten() for param in model.parameters()])
    is_same = all(torch.equal(flat, other) for other in bps.allgather(flat[None]))
    if bps.rank() == 0:
        on_servers = sum(
            value.nbytes for state in kept.values() for name, value in state.items()
            if name != "step"
        )  # fmt: skip
        print(
            f"accuracy {accuracy:.3f}; state in a rank's optimizer: {len(optimizer.state)} "
            f"parameters, on the servers: {on_servers} bytes for {flat.numel()} parameters",
            flush=True,
        )
    bps.shutdown()
    return 0 if is_same and accuracy >= arguments.accuracy else 1


if __name__ == "__main__":
    sys.exit(main())
