"""Trains a small network with MXNet's Gluon on any number of ranks.

    bpslaunch --local 2 python python/examples/mxnet/train.py

The images are made here: which quarter of an image is the brightest is what is learned. At the end
rank 0 trains the same network again by itself on the same global batches: the parameters must be
equal within 1e-4, which is rounding.
"""

from __future__ import annotations

import sys
from typing import Any

import byteps.mxnet as bps
import numpy as np

import mxnet as mx
from mxnet import autograd, gluon, nd

IMAGES, BATCH, EPOCHS = 1024, 64, 8
ACCURACY_MIN, DIFFERENCE_MAX = 0.9, 1e-4
OPTIMIZER = {"learning_rate": 0.1, "momentum": 0.9}


def load() -> tuple[np.ndarray, np.ndarray]:
    """Images of 12 × 12, and the number of the quarter that is brightest."""
    images = np.random.RandomState(7).rand(IMAGES, 1, 12, 12).astype("float32")
    quarters = images.reshape(IMAGES, 2, 6, 2, 6).sum((2, 4)).reshape(IMAGES, 4)
    return images - 0.5, quarters.argmax(1).astype("float32")


def make_network(seed: int) -> Any:
    mx.random.seed(seed)
    net = gluon.nn.HybridSequential(prefix="quarters_")
    with net.name_scope():
        net.add(gluon.nn.Conv2D(8, 3, activation="relu"), gluon.nn.Dense(64, activation="relu"))
        net.add(gluon.nn.Dense(4))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def train(net: Any, trainer: Any, rank: int, size: int) -> float:
    """Trains on every size-th image of each global batch; the accuracy on all images."""
    images, labels = load()
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    for epoch in range(EPOCHS):
        order = np.random.RandomState(epoch).permutation(IMAGES)
        for first in range(0, IMAGES, BATCH):
            batch = order[first : first + BATCH][rank::size]
            with autograd.record():
                loss = loss_of(net(nd.array(images[batch])), nd.array(labels[batch]))
            loss.backward()
            trainer.step(BATCH / size)
    return float((net(nd.array(images)).argmax(axis=1).asnumpy() == labels).mean())


def main() -> None:
    bps.init()
    rank, size = bps.rank(), bps.size()
    net = make_network(seed=1 + rank)  # Rank 0's parameters are broadcast.
    trainer = bps.DistributedTrainer(net.collect_params(), "sgd", OPTIMIZER)
    accuracy = train(net, trainer, rank, size)
    bps.shutdown()
    if rank != 0:
        return
    alone = make_network(seed=1)
    train(alone, gluon.Trainer(alone.collect_params(), "sgd", OPTIMIZER, kvstore=None), 0, 1)
    both = zip(net.collect_params().values(), alone.collect_params().values(), strict=True)
    difference = max(float((one.data() - two.data()).abs().max().asscalar()) for one, two in both)
    print(f"accuracy {accuracy:.3f} on {size} ranks")
    print(f"difference from single-process training: {difference:.1e}")
    if accuracy < ACCURACY_MIN or difference > DIFFERENCE_MAX:
        sys.exit("the training is not what it should be")


if __name__ == "__main__":
    main()
