"""Trains a residual network with MXNet's Gluon, and gradients in fewer bytes.

    bpslaunch --local 2 python python/examples/mxnet/train_compressed.py --compressor onebit

The images are made here: which of four patterns is in one is what is learned. The learning rate
rises at first, and falls at the end. All ranks must end with the same bits.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from typing import Any

import byteps.mxnet as bps
import numpy as np
from mxnet.gluon.model_zoo import vision

import mxnet as mx
from mxnet import autograd, gluon, nd

ACCURACY_MIN = 0.9
CLASSES, PIXELS = 4, 12


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--images", type=int, default=768)
    add("--batch-size", type=int, default=32, help="images a step and rank")
    add("--num-epochs", type=int, default=4)
    add("--lr", type=float, default=0.02, help="learning rate of one rank")
    add("--warmup-epochs", type=int, default=1)
    add("--momentum", type=float, default=0.9)
    add("--wd", type=float, default=1e-4, help="weight decay")
    codec = parser.add_argument_group("what gradients are encoded by")
    codec.add_argument("--compressor", choices=["onebit", "topk", "randomk", "dithering"])
    codec.add_argument("--onebit-scaling", action="store_true")
    codec.add_argument(
        "--k", type=float, default=0.1, help="of topk and randomk; dithering's levels"
    )
    codec.add_argument("--ef", choices=["vanilla"], help="error feedback")
    codec.add_argument("--fp16-pushpull", action="store_true", help="send gradients as float16")
    return parser.parse_args()


def compression_params(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """As ``DistributedTrainer`` takes them."""
    params: dict[str, Any] = {"fp16": True} if arguments.fp16_pushpull else {}
    if arguments.compressor:
        params["compressor"] = arguments.compressor
        if arguments.compressor == "onebit":
            params["scaling"] = arguments.onebit_scaling
        else:
            params["k"] = int(arguments.k) if arguments.k >= 1 else arguments.k
    if arguments.ef:
        params["ef"] = arguments.ef
    return params or None


def load(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images, and which of the patterns is in each."""
    patterns = np.random.RandomState(0).normal(size=(CLASSES, 3, PIXELS, PIXELS))
    random = np.random.RandomState(seed)
    labels = random.randint(0, CLASSES, count)
    images = patterns[labels] + random.normal(size=(count, 3, PIXELS, PIXELS))
    return images.astype("float32"), labels.astype("float32")


def accuracy_of(net: Any) -> float:
    images, labels = load(256, seed=2)
    return float((net(nd.array(images)).argmax(axis=1).asnumpy() == labels).mean())


def main() -> None:
    arguments = parse_arguments()
    bps.init()
    rank, size = bps.rank(), bps.size()
    mx.random.seed(1 + rank)  # Rank 0's parameters are broadcast.
    layers, channels = [1, 1], [8, 8, 16]
    net = vision.ResNetV2(vision.BasicBlockV2, layers, channels, CLASSES, thumbnail=True)
    net.initialize(mx.init.Xavier())
    net.hybridize()

    images, labels = load(arguments.images, seed=1)
    images, labels = images[rank::size], labels[rank::size]
    steps = len(labels) // arguments.batch_size
    rate = arguments.lr * size
    schedule = mx.lr_scheduler.CosineScheduler(
        max_update=steps * arguments.num_epochs,
        base_lr=rate,
        final_lr=rate / 10,
        warmup_steps=steps * arguments.warmup_epochs,
    )
    options = {"lr_scheduler": schedule, "momentum": arguments.momentum, "wd": arguments.wd}
    trainer = bps.DistributedTrainer(
        net.collect_params(), "sgd", options, compression_params=compression_params(arguments)
    )
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    for epoch in range(arguments.num_epochs):
        order = np.random.RandomState(epoch).permutation(len(labels))
        total = 0.0
        for step in range(steps):
            batch = order[step * arguments.batch_size :][: arguments.batch_size]
            with autograd.record():
                loss = loss_of(net(nd.array(images[batch])), nd.array(labels[batch]))
            loss.backward()
            trainer.step(len(batch))
            total += float(loss.mean().asscalar()) / steps
        if rank == 0:
            print(f"{size} ranks, epoch {epoch + 1}: loss {total:.4f}")
    learned = [p.data().asnumpy() for p in net.collect_params().values() if p.grad_req != "null"]
    digest = hashlib.sha256(b"".join(one.tobytes() for one in learned)).digest()[:4]
    mine = nd.array(np.frombuffer(digest, np.uint8), dtype="int32")
    sums = mine.copy()
    bps.push_pull(sums, name="digest", is_average=False)
    if not (sums == mine * size).asnumpy().all():
        sys.exit(f"rank {rank} has other parameters")
    accuracy = accuracy_of(net)
    if rank == 0:
        print(f"accuracy {accuracy:.3f} on {size} ranks, with {arguments.compressor or 'no codec'}")
    if accuracy < ACCURACY_MIN:
        sys.exit(f"the accuracy is {accuracy:.3f}, below {ACCURACY_MIN}")
    bps.shutdown()


if __name__ == "__main__":
    main()
