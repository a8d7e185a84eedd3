"""Images a second of a network that trains on random images with TensorFlow's tapes.

bpslaunch --local 2 python python/examples/tensorflow/synthetic_benchmark.py --model ResNet50
bpslaunch --local 2 python python/examples/tensorflow/synthetic_benchmark.py --model small
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import byteps.tensorflow as bps
import tensorflow as tf

CLASSES = 1000


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="ResNet50", help="a network of tf.keras.applications, or small")
    add("--batch-size", type=int, default=32, help="images a step and rank")
    add("--num-warmup-batches", type=int, default=10, help="steps before anything is measured")
    add("--num-batches-per-iter", type=int, default=10, help="steps of one measurement")
    add("--num-iters", type=int, default=10, help="measurements")
    add("--fp16-pushpull", action="store_true", help="send gradients as float16")
    add("--jit", action="store_true", help="have XLA compile the step")
    add("--eager", action="store_true", help="run steps without compiling them")
    return parser.parse_args()


def make_network(name: str) -> Any:
    if name != "small":
        return getattr(tf.keras.applications, name)(weights=None)
    return tf.keras.Sequential(
        [
            tf.keras.layers.Input((32, 32, 3)),
            tf.keras.layers.Conv2D(16, 3, 2, activation="relu"),
            tf.keras.layers.Conv2D(32, 3, 2, activation="relu"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(CLASSES, "softmax"),
        ]
    )


def log(text: str) -> None:
    if bps.rank() == 0:
        print(text, flush=True)


def main() -> None:
    arguments = parse_arguments()
    bps.init()
    tf.random.set_seed(1 + bps.rank())
    network = make_network(arguments.model)
    optimizer = tf.keras.optimizers.SGD(0.01)
    compression = bps.Compression.fp16 if arguments.fp16_pushpull else bps.Compression.none
    images = tf.random.uniform([arguments.batch_size, *network.input_shape[1:]])
    labels = tf.random.uniform([arguments.batch_size], maxval=CLASSES, dtype=tf.int32)

    def step() -> None:
        with tf.GradientTape() as tape:
            probabilities = network(images, training=True)
            losses = tf.keras.losses.sparse_categorical_crossentropy(labels, probabilities)
            loss = tf.reduce_mean(losses)
        tape = bps.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, network.trainable_variables)
        optimizer.apply_gradients(zip(gradients, network.trainable_variables, strict=True))

    if not arguments.eager:
        step = tf.function(step, jit_compile=arguments.jit)
    bps.broadcast_variables(network.variables, root_rank=0)

    def steps(count: int) -> float:
        """Seconds for so many steps."""
        begun = time.perf_counter()
        for _ in range(count):
            step()
        network.trainable_variables[-1].numpy()  # The last of it is done.
        return time.perf_counter() - begun

    log(f"Model: {arguments.model}, {network.count_params() / 1e6:.1f} million parameters")
    log(f"Batch size: {arguments.batch_size}")
    log(f"Number of ranks: {bps.size()}")
    log("Running warmup...")
    steps(arguments.num_warmup_batches)
    log("Running benchmark...")
    rates = []
    for number in range(arguments.num_iters):
        seconds = steps(arguments.num_batches_per_iter)
        rates.append(arguments.batch_size * arguments.num_batches_per_iter / seconds)
        log(f"Iter #{number}: {rates[-1]:.1f} img/sec per rank")
    mean, spread = statistics.fmean(rates), 1.96 * statistics.pstdev(rates)
    size = bps.size()
    log(f"Img/sec per rank: {mean:.1f} +-{spread:.1f}")
    log(f"Total img/sec on {size} rank(s): {size * mean:.1f} +-{size * spread:.1f}")
    bps.shutdown()


if __name__ == "__main__":
    main()
