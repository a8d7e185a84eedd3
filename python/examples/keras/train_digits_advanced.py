"""Trains a convolutional network on handwritten digits with Keras 3 and images that are varied.

    bpslaunch --local 2 python python/examples/keras/train_digits_advanced.py

The learning rate rises over the first epochs, and falls where the loss of what was held out stays
as it is. The digits are the 1,797 images that scikit-learn ships, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sys

import byteps.keras as bps
import keras
import numpy as np
from sklearn.datasets import load_digits

ACCURACY_MIN = 0.9
HELD_OUT = 357  # Leaves 1,440 images, which 2, 3, 4, 5, 6 and 8 ranks share evenly.


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=64, help="images of a global batch")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate of one rank")
    return parser.parse_args()


def make_network() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.RandomTranslation(0.08, 0.08, fill_mode="constant"),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Dropout(0.1),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10),
        ]
    )


def main() -> None:
    arguments = parse_arguments()
    bps.init()
    rank, size = bps.rank(), bps.size()
    digits = load_digits()
    order = np.random.default_rng(1).permutation(len(digits.target))
    images, labels = (digits.images[..., None] / 16 - 0.5).astype("float32"), digits.target
    test, mine = order[:HELD_OUT], order[HELD_OUT + rank :: size]

    # Each rank draws other weights, and takes those of rank 0; it varies its images its own way.
    keras.utils.set_random_seed(1 + rank)
    model = make_network()
    model.compile(
        bps.DistributedOptimizer(keras.optimizers.Adam(arguments.rate * size)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = model.fit(
        images[mine],
        labels[mine],
        batch_size=max(1, arguments.batch // size),
        epochs=arguments.epochs,
        verbose=2 if rank == 0 else 0,
        validation_data=(images[test][rank::size], labels[test][rank::size]),
        callbacks=[
            bps.callbacks.BroadcastGlobalVariablesCallback(0),
            # Before what reads the metrics, so that all ranks lower the rate in the same epoch.
            bps.callbacks.MetricAverageCallback(),
            bps.callbacks.LearningRateWarmupCallback(warmup_epochs=3, verbose=1),
            keras.callbacks.ReduceLROnPlateau("val_loss", patience=2, verbose=int(rank == 0)),
        ],
    ).history
    told = [history["val_loss"], float(model.optimizer.learning_rate)]
    if bps.broadcast_object(told, root_rank=0) != told:
        sys.exit(f"rank {rank} has other metrics, or another learning rate, than rank 0")
    _, accuracy = model.evaluate(images[test], labels[test], verbose=0)
    if rank == 0:
        print(f"{size} ranks: accuracy {accuracy:.4f} of digits that were held out")
    if accuracy < ACCURACY_MIN:
        sys.exit(f"the accuracy is {accuracy:.4f}, below {ACCURACY_MIN}")
    bps.barrier()
    bps.shutdown()


if __name__ == "__main__":
    main()
