"""Trains on handwritten digits in a session of TensorFlow 1, with a hook and checkpoints.

    bpslaunch --local 2 python python/examples/tensorflow/train_in_a_session.py

The digits are the 1,797 images that scikit-learn ships, so nothing is downloaded. Rank 0 alone
writes a checkpoint, and reads it: all others begin with what it has.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import Any

import byteps.tensorflow as bps
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

v1 = tf.compat.v1
ACCURACY_MIN = 0.9
HELD_OUT = 360


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="of one rank; more ranks need fewer")
    parser.add_argument("--batch", type=int, default=64, help="images a step and rank")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate of one rank")
    parser.add_argument("--checkpoints", help="a folder for them")
    return parser.parse_args()


def network(images: Any) -> Any:
    """The scores of each image's ten classes."""
    sizes = [64, 128, 64, 10]
    for index, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        weights = v1.get_variable(f"w{index}", (inputs, outputs))
        images = images @ weights + v1.get_variable(
            f"b{index}", outputs, initializer=v1.zeros_initializer()
        )
        if index < len(sizes) - 2:
            images = tf.nn.relu(images)
    return images


def main() -> None:
    arguments = parse_arguments()
    bps.init()
    rank, size = bps.rank(), bps.size()
    digits = load_digits()
    order = np.random.default_rng(1).permutation(len(digits.target))
    images, labels = (digits.data / 16 - 0.5).astype("float32"), digits.target
    test, mine = order[:HELD_OUT], order[HELD_OUT + rank :: size]

    with tf.Graph().as_default():
        v1.set_random_seed(1 + rank)
        some_images = v1.placeholder(tf.float32, (None, 64))
        some_labels = v1.placeholder(tf.int64, (None,))
        scores = network(some_images)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(some_labels, scores))
        right = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(scores, 1), some_labels), tf.float32))
        optimizer = bps.DistributedOptimizer(v1.train.AdamOptimizer(arguments.rate * size))
        step_number = v1.train.get_or_create_global_step()
        train = optimizer.minimize(loss, global_step=step_number)
        hooks = [
            bps.BroadcastGlobalVariablesHook(0),
            v1.train.StopAtStepHook(last_step=arguments.steps // size),
        ]

        def evaluate(step_context: Any) -> float:
            feed = {some_images: images[test], some_labels: labels[test]}
            return float(step_context.session.run(right, feed))

        accuracy, draw = 0.0, np.random.default_rng(rank)
        with v1.train.MonitoredTrainingSession(
            checkpoint_dir=arguments.checkpoints if rank == 0 else None, hooks=hooks
        ) as session:
            while not session.should_stop():
                batch = draw.choice(mine, arguments.batch)
                feed = {some_images: images[batch], some_labels: labels[batch]}
                session.run(train, feed)
                if not session.should_stop():
                    # Not by `run`, which would call the hooks.
                    accuracy = session.run_step_fn(evaluate)
    if len(set(bps.allgather_object(accuracy))) > 1:
        sys.exit("the ranks ended with different weights")
    if rank == 0:
        print(f"{size} ranks: accuracy {accuracy:.4f} of digits that were held out")
    if accuracy < ACCURACY_MIN:
        sys.exit(f"the accuracy is {accuracy:.4f}, below {ACCURACY_MIN}")
    bps.barrier()
    bps.shutdown()


if __name__ == "__main__":
    main()
