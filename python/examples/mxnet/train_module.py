"""Trains a network of symbols with MXNet's Module: a DistributedOptimizer, and no key-value store.

    bpslaunch --local 2 python python/examples/mxnet/train_module.py --network lenet

The images are made here: which quarter of an image is the brightest is what is learned.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import byteps.mxnet as bps
import numpy as np

import mxnet as mx
from mxnet import nd

ACCURACY_MIN = 0.9
CLASSES, PIXELS, IMAGES = 4, 12, 1024


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--network", choices=["mlp", "lenet"], default="mlp")
    add("--num-epochs", type=int, default=12)
    add("--batch-size", type=int, default=32, help="images a step and rank")
    add("--lr", type=float, default=0.05, help="learning rate of one rank")
    return parser.parse_args()


def load() -> tuple[np.ndarray, np.ndarray]:
    """Images, and the number of the quarter that is brightest."""
    images = np.random.RandomState(7).rand(IMAGES, 1, PIXELS, PIXELS).astype("float32")
    quarters = images.reshape(IMAGES, 2, 6, 2, 6).sum((2, 4)).reshape(IMAGES, CLASSES)
    return images - 0.5, quarters.argmax(1).astype("float32")


def make_network(name: str) -> Any:
    data = mx.sym.Variable("data")
    if name == "lenet":
        for index, filters in enumerate((8, 16)):
            data = mx.sym.Convolution(data, kernel=(3, 3), num_filter=filters, name=f"c{index}")
            data = mx.sym.Activation(data, act_type="tanh")
        data = mx.sym.Pooling(data, pool_type="avg", kernel=(2, 2), stride=(2, 2))
    data = mx.sym.FullyConnected(mx.sym.Flatten(data), num_hidden=64, name="hidden")
    data = mx.sym.Activation(data, act_type="relu")
    data = mx.sym.FullyConnected(data, num_hidden=CLASSES, name="scores")
    return mx.sym.SoftmaxOutput(data, name="softmax")


def main() -> None:
    arguments = parse_arguments()
    bps.init()
    rank, size = bps.rank(), bps.size()
    images, labels = load()
    mine = slice(rank, IMAGES // size * size, size)
    data = mx.io.NDArrayIter(
        images[mine], labels[mine], arguments.batch_size, last_batch_handle="discard"
    )
    mx.random.seed(1 + rank)
    module = mx.mod.Module(make_network(arguments.network))
    module.bind(data.provide_data, data.provide_label)
    module.init_params(mx.init.Xavier())
    # Each rank has drawn other parameters, and takes those of rank 0.
    weights, others = module.get_params()
    bps.broadcast_parameters(weights, root_rank=0)
    module.set_params(weights, others)

    optimizer = mx.optimizer.SGD(
        learning_rate=arguments.lr * size, momentum=0.9, rescale_grad=1 / arguments.batch_size
    )
    module.init_optimizer(kvstore=None, optimizer=bps.DistributedOptimizer(optimizer))
    for epoch in range(arguments.num_epochs):
        data.reset()
        metric = mx.metric.Accuracy()
        for batch in data:
            module.forward_backward(batch)
            module.update()
            module.update_metric(metric, batch.label)
        accuracy = nd.array([metric.get()[1]])
        bps.push_pull(accuracy, name="accuracy")
        if rank == 0:
            print(f"{size} ranks, epoch {epoch + 1}: accuracy {accuracy.asscalar():.3f}")
    for name, weight in module.get_params()[0].items():
        # Equal bits: a difference to rank 0's would show in the greatest of all ranks.
        first = weight.copy()
        bps.broadcast_parameters({f"check.{name}": first}, root_rank=0)
        if not np.array_equal(first.asnumpy(), weight.asnumpy()):
            sys.exit(f"rank {rank} has another {name} than rank 0")
    if rank == 0:
        print(f"accuracy {accuracy.asscalar():.3f} on {size} ranks, with Module")
    if accuracy.asscalar() < ACCURACY_MIN:
        sys.exit(f"the accuracy is {accuracy.asscalar():.3f}, below {ACCURACY_MIN}")
    bps.shutdown()


if __name__ == "__main__":
    main()
