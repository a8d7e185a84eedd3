"""Trains on handwritten digits with a strategy of ``tf.distribute``: over all ranks, and over the
devices of each, here two parts of its CPU.

    bpslaunch --local 2 python python/examples/tensorflow/mirrored_strategy.py

The digits are the 1,797 images that scikit-learn ships, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sys

import byteps.tensorflow as bps
import numpy as np
import tensorflow as tf
from byteps.tensorflow.distribute import MirroredStrategy
from sklearn.datasets import load_digits

ACCURACY_MIN = 0.9
HELD_OUT = 357


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32, help="images a step and rank")
    parser.add_argument("--devices", type=int, default=2, help="parts of a rank's CPU")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    bps.init()
    rank, size = bps.rank(), bps.size()
    processor = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * arguments.devices
    tf.config.set_logical_device_configuration(processor, parts)
    strategy = MirroredStrategy([f"/cpu:{index}" for index in range(arguments.devices)])

    digits = load_digits()
    order = np.random.default_rng(1).permutation(len(digits.target))
    images, labels = (digits.data / 16 - 0.5).astype("float32"), digits.target
    test, mine = order[:HELD_OUT], order[HELD_OUT + rank :: size]
    data = tf.data.Dataset.from_tensor_slices((images[mine], labels[mine]))
    data = data.shuffle(len(mine), seed=rank).repeat().batch(arguments.batch)
    data = strategy.experimental_distribute_dataset(data)

    with strategy.scope():
        tf.random.set_seed(1 + rank)
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Input((64,)),
                tf.keras.layers.Dense(128, "relu"),
                tf.keras.layers.Dense(10),
            ]
        )
        # A plain optimizer: the strategy averages over the ranks.
        optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)

    def of_replica(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels, model(images, training=True)
            )
            loss = tf.nn.compute_average_loss(losses, global_batch_size=arguments.batch)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        losses = strategy.run(of_replica, (images, labels))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    bps.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)
    batches = iter(data)
    for epoch in range(arguments.epochs):
        for _ in range(len(order) // size // arguments.batch):
            loss = step(*next(batches))
        if rank == 0:
            print(f"{size} ranks, epoch {epoch + 1}: loss {float(loss):.4f}")
    found = np.argmax(model(images[test]).numpy(), axis=1)
    accuracy = float(np.mean(found == labels[test]))
    if len({tuple(one) for one in bps.allgather_object(found.tolist())}) > 1:
        sys.exit("the ranks ended with different weights")
    if rank == 0:
        print(f"{size} ranks: accuracy {accuracy:.4f} of digits that were held out")
    if accuracy < ACCURACY_MIN:
        sys.exit(f"the accuracy is {accuracy:.4f}, below {ACCURACY_MIN}")
    bps.barrier()
    bps.shutdown()


if __name__ == "__main__":
    main()
