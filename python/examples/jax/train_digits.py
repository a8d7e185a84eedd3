"""Trains a small network on real handwritten digits with JAX and optax, on any number of ranks.

    bpslaunch --local 2 python python/examples/jax/train_digits.py

The digits are the 1,797 images that scikit-learn ships, so nothing is downloaded. At the end rank 0
trains the same network again by itself on the same global batches: the parameters must be equal
within 1e-5. All arithmetic is in float64, in which sums of other orders differ by far less than
that, so what the check finds would be a defect and not rounding.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import byteps.jax as bps
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

ACCURACY_MIN = 0.94
DIFFERENCE_MAX = 1e-5
HELD_OUT = 360


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=64, help="images of a global batch")
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def load(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images and labels to train on, then images and labels held out."""
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    images, labels = digits.data / 16 - 0.5, digits.target
    train, test = order[HELD_OUT:], order[:HELD_OUT]
    return images[train], labels[train], images[test], labels[test]


def make_params(seed: int) -> list[dict[str, jax.Array]]:
    """Weights and biases of three layers."""
    keys = jax.random.split(jax.random.key(seed), 3)
    sizes = [(64, 128), (128, 64), (64, 10)]
    return [
        {"w": jax.random.normal(key, size) / np.sqrt(size[0]), "b": jnp.zeros(size[1])}
        for key, size in zip(keys, sizes, strict=True)
    ]


def network(params: list[dict[str, jax.Array]], images: jax.Array) -> jax.Array:
    """The scores of each image's ten classes."""
    for layer in params[:-1]:
        images = jax.nn.relu(images @ layer["w"] + layer["b"])
    return images @ params[-1]["w"] + params[-1]["b"]


def loss_of(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    scores = network(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


def train(
    arguments: argparse.Namespace, optimizer: Any, params: Any, rank: int, size: int
) -> list[dict[str, jax.Array]]:
    """The parameters after training on every size-th image of each global batch."""
    images, labels, test_images, test_labels = load(arguments.seed)
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any, images: jax.Array, labels: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, images, labels)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    batch = arguments.batch
    loss = jnp.zeros(())
    for epoch in range(arguments.epochs):
        order = np.random.default_rng((arguments.seed, epoch)).permutation(len(labels))
        for start in range(0, len(order) - batch + 1, batch):
            mine = order[start + rank : start + batch : size]
            params, state, loss = step(params, state, images[mine], labels[mine])
        if rank == 0:
            right = jnp.argmax(network(params, test_images), axis=1) == test_labels
            print(f"{size} ranks, epoch {epoch + 1}: loss {loss:.4f}, accuracy {right.mean():.4f}")
    if rank == 0 and right.mean() < ACCURACY_MIN:
        sys.exit(f"the accuracy is {right.mean():.4f}, below {ACCURACY_MIN}")
    return params


def main() -> None:
    arguments = parse_arguments()
    bps.init()
    jax.config.update("jax_enable_x64", True)
    rank, size = bps.rank(), bps.size()
    # Shares of one size, so that the average over the ranks is that over the images.
    arguments.batch -= arguments.batch % size
    # Each rank draws other parameters, and takes those of rank 0.
    params = bps.broadcast_parameters(make_params(arguments.seed + rank), root_rank=0)
    plain = optax.adam(arguments.rate)
    params = train(arguments, bps.DistributedOptimizer(plain), params, rank, size)
    everywhere = bps.allgather_object(jax.tree_util.tree_map(np.asarray, params))
    if rank == 0:
        print("and the same in one process, to compare:")
        alone = train(arguments, plain, make_params(arguments.seed), 0, 1)
        flat = [
            np.concatenate([x.ravel() for x in jax.tree_util.tree_leaves(one)])
            for one in (*everywhere, jax.tree_util.tree_map(np.asarray, alone))
        ]
        if any(not np.array_equal(flat[0], other) for other in flat[1:-1]):
            sys.exit("the ranks ended with different parameters")
        apart = float(np.abs(flat[0] - flat[-1]).max())
        print(f"largest difference to training in one process: {apart:.1e}")
        if not apart <= DIFFERENCE_MAX:
            sys.exit(f"the parameters differ by {apart}, more than {DIFFERENCE_MAX}")
    bps.barrier()
    bps.shutdown()


if __name__ == "__main__":
    main()
