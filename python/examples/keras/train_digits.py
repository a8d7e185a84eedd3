"""Trains a small network on real handwritten digits with Keras 3, on any number of ranks.

    bpslaunch --local 2 python python/examples/keras/train_digits.py

It runs on TensorFlow, or on JAX or torch with KERAS_BACKEND=jax or torch. The digits are the 1,797
images that scikit-learn ships, so nothing is downloaded. At the end all ranks must have the same
weights, and recognise most of the digits that were held out.
"""

from __future__ import annotations

import argparse
import hashlib
import sys

import byteps.keras as bps
import keras
import numpy as np
from sklearn.datasets import load_digits

ACCURACY_MIN = 0.9
HELD_OUT = 357  # Leaves 1,440 images, which 2, 3, 4, 5, 6 and 8 ranks share evenly.


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64, help="images of a global batch")
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate of all ranks")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    bps.init()
    rank, size = bps.rank(), bps.size()
    digits = load_digits()
    order = np.random.default_rng(arguments.seed).permutation(len(digits.target))
    images, labels = (digits.data / 16 - 0.5).astype("float32"), digits.target
    test, mine = order[:HELD_OUT], order[HELD_OUT + rank :: size]

    # Each rank draws other weights, and takes those of rank 0.
    keras.utils.set_random_seed(arguments.seed + rank)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(128, "relu"),
            keras.layers.Dense(64, "relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        bps.DistributedOptimizer(keras.optimizers.Adam(arguments.rate)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(
        images[mine],
        labels[mine],
        batch_size=max(1, arguments.batch // size),
        epochs=arguments.epochs,
        verbose=2 if rank == 0 else 0,
        callbacks=[
            bps.callbacks.BroadcastGlobalVariablesCallback(0),
            bps.callbacks.MetricAverageCallback(),
            bps.callbacks.LearningRateWarmupCallback(warmup_epochs=2),
        ],
    )
    bits = b"".join(np.ascontiguousarray(weight).tobytes() for weight in model.get_weights())
    digest = hashlib.sha256(bits).hexdigest()
    if bps.broadcast_object(digest, root_rank=0) != digest:
        sys.exit(f"rank {rank} has other weights than rank 0")
    _, accuracy = model.evaluate(images[test], labels[test], verbose=0)
    if rank == 0:
        print(f"{size} ranks: accuracy {accuracy:.4f} of digits that were held out")
    if accuracy < ACCURACY_MIN:
        sys.exit(f"the accuracy is {accuracy:.4f}, below {ACCURACY_MIN}")
    bps.barrier()
    bps.shutdown()


if __name__ == "__main__":
    main()
