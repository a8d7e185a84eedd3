"""Trains in mixed precision on handwritten digits: float16 with a gradient scaler, or bfloat16.

    bpslaunch --local 4 python python/examples/mixed_precision.py
    bpslaunch --local 2 python python/examples/mixed_precision.py --precision float16 --no-cuda

The loop is that of torch, unchanged. Gradients are averaged before the scaler looks for infinite
ones, so all ranks skip the same steps and keep the same scale; the last line of the program says
whether they did. The digits are the 1,797 images that scikit-learn ships: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sys

import byteps.torch as bps
import torch
from sklearn.datasets import load_digits
from torch import nn

ACCURACY_MIN = 0.9
HELD_OUT = 360


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", choices=["float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="images a step and rank")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradients")
    parser.add_argument("--no-cuda", action="store_true", help="train on the CPU")
    return parser.parse_args()


def load(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Images and labels to train on, then images and labels held out: the same on every rank."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32, device=device).unsqueeze(1) / 16 - 0.5
    labels = torch.tensor(digits.target, device=device)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1)).to(device)
    train, test = order[HELD_OUT:], order[:HELD_OUT]
    return images[train], labels[train], images[test], labels[test]


def main() -> int:
    arguments = parse_arguments()
    bps.init()
    cuda = not arguments.no_cuda and torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(bps.local_rank())
    else:
        torch.set_num_threads(1)
    device = torch.device("cuda", bps.local_rank()) if cuda else torch.device("cpu")
    precision = getattr(torch, arguments.precision)
    images, labels, test_images, test_labels = load(device)

    torch.manual_seed(bps.rank())
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, 10)),
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    # Parameters and gradients are float32; bfloat16 on the wire halves what is sent.
    optimizer = bps.DistributedOptimizer(
        optimizer, model.named_parameters(), compression=bps.Compression.bf16
    )
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    bps.broadcast_optimizer_state(optimizer, root_rank=0)
    # bfloat16 has the range of float32 and needs no scale. The first scale is one that overflows.
    scaler = torch.amp.GradScaler(
        device.type, init_scale=2.0**30, enabled=precision is torch.float16
    )

    step = bps.size() * arguments.batch_size
    for epoch in range(arguments.epochs):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        for begin in range(0, len(order) - step + 1, step):
            mine = order[begin + bps.rank() : begin + step : bps.size()].to(device)
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=precision):
                loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), arguments.clip)
            scaler.step(optimizer)
            scaler.update()
        mean = bps.push_pull(loss.detach().float(), name="loss").item()
        if bps.rank() == 0:
            print(f"epoch {epoch + 1}  loss {mean:.4f}  scale {scaler.get_scale():g}", flush=True)

    with torch.no_grad(), torch.autocast(device.type, dtype=precision):
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
    spread = 0.0
    for name, value in model.state_dict().items():
        root = bps.broadcast(value, root_rank=0, name=f"check.{name}")
        spread = max(spread, (root - value).abs().max().item())
    # A rank that differs from rank 0 says so to all.
    spread = bps.push_pull(torch.tensor(spread), average=False, name="spread").item()
    status = 0 if accuracy >= ACCURACY_MIN and spread == 0.0 else 1
    if bps.rank() == 0:
        print(f"accuracy on {HELD_OUT} held-out images: {accuracy:.3f} (at least {ACCURACY_MIN})")
        print(f"difference between the ranks' parameters: {spread} (must be 0)")
    bps.shutdown()
    return status


if __name__ == "__main__":
    sys.exit(main())
