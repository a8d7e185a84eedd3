"""Trains a residual network on images with Keras 3: batch normalization, a schedule, checkpoints.

    bpslaunch --local 2 python python/examples/keras/train_images.py --checkpoints checkpoints

The images are made here, of three colours and 16 by 16 pixels: which of ten patterns is in one is
what is learned. Run again with more ``--epochs``, it goes on from the last checkpoint, which rank 0
writes and loads, optimizer and all, and the other ranks get from there.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path
from typing import Any

import byteps.keras as bps
import keras
import numpy as np

ACCURACY_MIN = 0.8
CLASSES, PIXELS = 10, 16


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--images", type=int, default=1152, help="to train on; a sixth as many are held out")
    add("--batch-size", type=int, default=32, help="images a step and rank")
    add("--epochs", type=int, default=5)
    add("--base-lr", type=float, default=0.02, help="learning rate of one rank")
    add("--warmup-epochs", type=int, default=1)
    add("--wd", type=float, default=5e-5, help="weight decay")
    add("--fp16-pushpull", action="store_true", help="send gradients as float16")
    add("--checkpoints", type=Path, help="a folder for them")
    return parser.parse_args()


def load(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images, and which of the patterns is in each."""
    patterns = np.random.default_rng(0).normal(size=(CLASSES, PIXELS, PIXELS, 3))
    random = np.random.default_rng(seed)
    labels = random.integers(0, CLASSES, count)
    noise = random.normal(size=(count, PIXELS, PIXELS, 3))
    return (patterns[labels] + 2 * noise).astype("float32"), labels


def make_network(decay: float) -> Any:
    """A residual network of three blocks."""

    def convolution(inputs: Any, filters: int, stride: int) -> Any:
        regularizer = keras.regularizers.L2(decay)
        made = keras.layers.Conv2D(
            filters, 3, stride, "same", use_bias=False, kernel_regularizer=regularizer
        )
        return keras.layers.BatchNormalization(momentum=0.8, epsilon=1e-5)(made(inputs))

    inputs = keras.Input((PIXELS, PIXELS, 3))
    outputs = keras.layers.ReLU()(convolution(inputs, 8, 1))
    for filters in (8, 16, 32):
        inner = keras.layers.ReLU()(convolution(outputs, filters, 2))
        inner = convolution(inner, filters, 1)
        shortcut = convolution(outputs, filters, 2)
        outputs = keras.layers.ReLU()(keras.layers.Add()([inner, shortcut]))
    outputs = keras.layers.GlobalAveragePooling2D()(outputs)
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(outputs))


def make_model(arguments: argparse.Namespace, begun: int) -> Any:
    """The model to go on with: rank 0's comes from a checkpoint, if there is one."""
    compression = bps.Compression.fp16 if arguments.fp16_pushpull else bps.Compression.none
    if begun and bps.rank() == 0:
        return bps.load_model(path_of(arguments, begun), compression=compression)
    model = make_network(arguments.wd)
    optimizer = keras.optimizers.SGD(arguments.base_lr * bps.size(), momentum=0.9)
    model.compile(
        bps.DistributedOptimizer(optimizer, compression=compression),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def path_of(arguments: argparse.Namespace, epoch: int) -> Path:
    return arguments.checkpoints / f"epoch-{epoch:02d}.keras"


def epochs_done(arguments: argparse.Namespace) -> int:
    """Of the last checkpoint of rank 0, which alone writes them."""
    done = 0
    if arguments.checkpoints and bps.rank() == 0:
        arguments.checkpoints.mkdir(parents=True, exist_ok=True)
        there = [n for n in range(1, arguments.epochs + 1) if path_of(arguments, n).exists()]
        done = max(there, default=0)
    return int(bps.broadcast(done, 0, name="epochs done"))


def make_callbacks(arguments: argparse.Namespace) -> list[Any]:
    rate = arguments.base_lr * bps.size()
    warm, later = arguments.warmup_epochs, max(arguments.warmup_epochs, arguments.epochs - 1)
    callbacks: list[Any] = [
        bps.callbacks.BroadcastGlobalVariablesCallback(0),
        # Before callbacks that read the metrics.
        bps.callbacks.MetricAverageCallback(),
        bps.callbacks.LearningRateWarmupCallback(warm, initial_lr=rate),
        bps.callbacks.LearningRateScheduleCallback(1.0, warm, later, initial_lr=rate),
        bps.callbacks.LearningRateScheduleCallback(0.1, later, initial_lr=rate),
    ]
    if arguments.checkpoints and bps.rank() == 0:
        form = str(arguments.checkpoints / "epoch-{epoch:02d}.keras")
        callbacks.append(keras.callbacks.ModelCheckpoint(form))
    return callbacks


def main() -> None:
    arguments = parse_arguments()
    bps.init()
    rank, size = bps.rank(), bps.size()
    keras.utils.set_random_seed(1 + rank)
    begun = epochs_done(arguments)
    model = make_model(arguments, begun)
    images, labels = load(arguments.images, seed=1)
    mine = slice(rank, len(images) // size * size, size)
    test_images, test_labels = load(arguments.images // 6, seed=2)
    model.fit(
        images[mine],
        labels[mine],
        batch_size=arguments.batch_size,
        epochs=arguments.epochs,
        initial_epoch=begun,
        verbose=2 if rank == 0 else 0,
        callbacks=make_callbacks(arguments),
    )
    weights = [np.asarray(one.value) for one in model.trainable_variables]
    digest = hashlib.sha256(b"".join(one.tobytes() for one in weights)).hexdigest()
    if bps.broadcast_object(digest, root_rank=0) != digest:
        sys.exit(f"rank {rank} has other weights than rank 0")
    # The statistics of batch normalization are each rank's own, so what they say is averaged.
    scores = model.evaluate(test_images, test_labels, verbose=0)
    loss, accuracy = (float(bps.push_pull(one, f"score.{n}")) for n, one in enumerate(scores))
    if rank == 0:
        print(f"{size} ranks, epochs {begun + 1} to {arguments.epochs}: loss {loss:.4f}, ", end="")
        print(f"accuracy {accuracy:.4f} of images that were held out")
    if accuracy < ACCURACY_MIN:
        sys.exit(f"the accuracy is {accuracy:.4f}, below {ACCURACY_MIN}")
    bps.barrier()
    bps.shutdown()


if __name__ == "__main__":
    main()
