"""Images a second of a Keras model that trains on random images, by ``fit``.

bpslaunch --local 2 python python/examples/keras/synthetic_benchmark.py --model ResNet50
bpslaunch --local 2 python python/examples/keras/synthetic_benchmark.py --model small
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import byteps.keras as bps
import keras
import numpy as np

CLASSES = 1000


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="ResNet50", help="a network of keras.applications, or small")
    add("--batch-size", type=int, default=32, help="images a step and rank")
    add("--num-warmup-batches", type=int, default=10, help="steps before anything is measured")
    add("--num-batches-per-iter", type=int, default=10, help="steps of one measurement")
    add("--num-iters", type=int, default=10, help="measurements")
    add("--fp16-pushpull", action="store_true", help="send gradients as float16")
    return parser.parse_args()


def make_network(name: str) -> Any:
    if name != "small":
        return getattr(keras.applications, name)(weights=None)
    return keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            keras.layers.Conv2D(16, 3, 2, activation="relu"),
            keras.layers.Conv2D(32, 3, 2, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(CLASSES, "softmax"),
        ]
    )


class Rates(keras.callbacks.Callback):
    """Measures epochs, of which the first warms up."""

    def __init__(self, images: int) -> None:
        super().__init__()
        self.images, self.rates, self._begun = images, [], 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._begun = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch > 0:
            self.rates.append(self.images / (time.perf_counter() - self._begun))
            log(f"Iter #{epoch - 1}: {self.rates[-1]:.1f} img/sec per rank")


def log(text: str) -> None:
    if bps.rank() == 0:
        print(text, flush=True)


def main() -> None:
    arguments = parse_arguments()
    bps.init()
    keras.utils.set_random_seed(1)
    network = make_network(arguments.model)
    compression = bps.Compression.fp16 if arguments.fp16_pushpull else bps.Compression.none
    optimizer = bps.DistributedOptimizer(keras.optimizers.SGD(0.01), compression=compression)
    network.compile(optimizer, "sparse_categorical_crossentropy")
    log(f"Model: {arguments.model}, {network.count_params() / 1e6:.1f} million parameters")
    log(f"Batch size: {arguments.batch_size}")
    log(f"Number of ranks: {bps.size()}")

    def fit(steps: int, epochs: int, callbacks: list[Any]) -> None:
        shape = (steps * arguments.batch_size, *network.input_shape[1:])
        images = np.random.default_rng(bps.rank()).random(shape, np.float32)
        labels = np.random.default_rng(bps.rank()).integers(0, CLASSES, len(images))
        network.fit(images, labels, arguments.batch_size, epochs, verbose=0, callbacks=callbacks)

    fit(arguments.num_warmup_batches, 1, [bps.callbacks.BroadcastGlobalVariablesCallback(0)])
    measured = Rates(arguments.num_batches_per_iter * arguments.batch_size)
    fit(arguments.num_batches_per_iter, 1 + arguments.num_iters, [measured])
    mean, spread = statistics.fmean(measured.rates), 1.96 * statistics.pstdev(measured.rates)
    size = bps.size()
    log(f"Img/sec per rank: {mean:.1f} +-{spread:.1f}")
    log(f"Total img/sec on {size} rank(s): {size * mean:.1f} +-{size * spread:.1f}")
    bps.shutdown()


if __name__ == "__main__":
    main()
