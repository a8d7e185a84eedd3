"""Trains a small network on real handwritten digits with TensorFlow, on any number of ranks.

    bpslaunch --local 2 python python/examples/tensorflow/train_digits.py

The digits are the 1,797 images that scikit-learn ships, so nothing is downloaded. At the end rank 0
trains the same network again by itself on the same global batches: the parameters must be equal
within 1e-5. All arithmetic is in float64, in which sums of other orders differ by far less than
that, so what the check finds would be a defect and not rounding.
"""

from __future__ import annotations

import argparse
import sys

import byteps.tensorflow as bps
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

ACCURACY_MIN = 0.9
DIFFERENCE_MAX = 1e-5
HELD_OUT = 360


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64, help="images of a global batch")
    parser.add_argument("--rate", type=float, default=0.2, help="learning rate")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def load(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images and labels to train on, then images and labels held out."""
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    images, labels = digits.data / 16 - 0.5, digits.target
    train, test = order[HELD_OUT:], order[:HELD_OUT]
    return images[train], labels[train], images[test], labels[test]


def make_weights(seed: int) -> list[tf.Variable]:
    """Weights and biases of three layers."""
    random = np.random.default_rng(seed)
    sizes = [(64, 128), (128, 64), (64, 10)]
    weights = []
    for size in sizes:
        weights += [random.normal(size=size) / np.sqrt(size[0]), np.zeros(size[1])]
    return [tf.Variable(one) for one in weights]


def network(weights: list[tf.Variable], images: tf.Tensor) -> tf.Tensor:
    """The scores of each image's ten classes."""
    for index in range(0, len(weights) - 2, 2):
        images = tf.nn.relu(images @ weights[index] + weights[index + 1])
    return images @ weights[-2] + weights[-1]


def train(
    arguments: argparse.Namespace, weights: list[tf.Variable], rank: int, size: int
) -> np.ndarray:
    """The weights after training on every size-th image of each global batch."""
    images, labels, test_images, test_labels = load(arguments.seed)

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels, network(weights, images)
            )
            loss = tf.reduce_mean(losses)
        if size > 1:
            tape = bps.DistributedGradientTape(tape)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(arguments.rate * gradient)
        return loss

    batch = arguments.batch
    for epoch in range(arguments.epochs):
        order = np.random.default_rng((arguments.seed, epoch)).permutation(len(labels))
        for start in range(0, len(order) - batch + 1, batch):
            mine = order[start + rank : start + batch : size]
            loss = step(tf.constant(images[mine]), tf.constant(labels[mine]))
        if rank == 0:
            found = tf.argmax(network(weights, tf.constant(test_images)), axis=1)
            accuracy = float(np.mean(found.numpy() == test_labels))
            print(f"{size} ranks, epoch {epoch + 1}: loss {loss:.4f}, accuracy {accuracy:.4f}")
    if rank == 0 and accuracy < ACCURACY_MIN:
        sys.exit(f"the accuracy is {accuracy:.4f}, below {ACCURACY_MIN}")
    return np.concatenate([weight.numpy().ravel() for weight in weights])


def main() -> None:
    arguments = parse_arguments()
    bps.init()
    rank, size = bps.rank(), bps.size()
    # Shares of one size, so that the average over the ranks is that over the images.
    arguments.batch -= arguments.batch % size
    # Each rank draws other weights, and takes those of rank 0.
    weights = make_weights(arguments.seed + rank)
    bps.broadcast_variables(weights, root_rank=0)
    everywhere = bps.allgather_object(train(arguments, weights, rank, size))
    if rank == 0:
        if any(not np.array_equal(everywhere[0], other) for other in everywhere[1:]):
            sys.exit("the ranks ended with different weights")
        print("and the same in one process, to compare:")
        alone = train(arguments, make_weights(arguments.seed), 0, 1)
        apart = float(np.abs(everywhere[0] - alone).max())
        print(f"largest difference to training in one process: {apart:.1e}")
        if not apart <= DIFFERENCE_MAX:
            sys.exit(f"the weights differ by {apart}, more than {DIFFERENCE_MAX}")
    bps.barrier()
    bps.shutdown()


if __name__ == "__main__":
    main()
