"""Trains one network on handwritten digits with each codec in turn, and compares what it learns.

    BPS_LOCAL_REDUCE=0 bpslaunch --local 2 --servers 1 --server-cores 1 \
        python python/examples/compression.py

Codecs are for what goes to servers. On one machine the ranks would add their gradients among
themselves, so BPS_LOCAL_REDUCE=0 lets each be a machine of its own. The digits are the 1,797 images
that scikit-learn ships. Every codec begins with the same parameters and sees the same batches; at
the end all ranks must have the same bits, and the accuracy on digits that were held out must be
within --tolerance of what gradients that are sent whole give.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time

import byteps.torch as bps
import torch
from byteps.torch import Compression
from sklearn.datasets import load_digits
from torch import nn

HELD_OUT = 360

CODECS = {
    "none": Compression.none,
    "fp16": Compression.wire_fp16(),
    "bf16": Compression.wire_bf16(),
    "fp8_e4m3": Compression.fp8_e4m3(),
    "fp8_e5m2": Compression.fp8_e5m2(),
    "int8": Compression.int8(),
    "onebit": Compression.onebit(),
    "topk": Compression.topk(0.01),
    "randomk": Compression.randomk(0.1, seed=1),
    "dithering": Compression.dithering(levels=15),
    "natural": Compression.dithering(levels=7, partition="natural"),
}


def load() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images and labels to train on, then images and labels held out."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16 - 0.5
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    train, test = order[HELD_OUT:], order[:HELD_OUT]
    return images[train], labels[train], images[test], labels[test]


def train(codec: object, epochs: int, batch: int) -> tuple[float, float, torch.Tensor]:
    """The accuracy on what was held out, seconds, and all parameters."""
    images, labels, test_images, test_labels = load()
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters(), compression=codec)
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    share, begun = batch // bps.size(), time.perf_counter()
    for epoch in range(epochs):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        for start in range(0, len(order) - batch + 1, batch):
            mine = order[start + bps.rank() * share :][:share]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
            optimizer.step()
    seconds = time.perf_counter() - begun
    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
        parameters = torch.cat([param.flatten() for param in model.parameters()])
    return accuracy, seconds, parameters


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch", type=int, default=64, help="images of a global batch")
    parser.add_argument("--only", nargs="+", choices=CODECS, help="these codecs, beside none")
    parser.add_argument("--tolerance", type=float, default=0.01, help="accuracy that may be lost")
    arguments = parser.parse_args()
    # The layers are small, and would be sent whole.
    os.environ.setdefault("BYTEPS_MIN_COMPRESS_BYTES", "1024")
    bps.init()
    whole, failed = 0.0, 0
    for name, codec in CODECS.items():
        if arguments.only and name != "none" and name not in arguments.only:
            continue
        accuracy, seconds, parameters = train(codec, arguments.epochs, arguments.batch)
        digest = hashlib.sha256(parameters.numpy().tobytes()).hexdigest()
        is_same = len(set(bps.allgather_object(digest))) == 1
        whole = accuracy if name == "none" else whole
        is_right = is_same and accuracy >= whole - arguments.tolerance
        failed += not is_right
        if bps.rank() == 0:
            same = "the same bits on all ranks" if is_same else "RANKS DIFFER"
            print(f"{name:12} accuracy {accuracy:.3f}, {seconds:5.1f} s, {same}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
