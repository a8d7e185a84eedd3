"""Trains a small network of equinox on handwritten digits, on any number of ranks.

    bpslaunch --local 2 python python/examples/jax/train_equinox.py

The digits are the 1,797 images that scikit-learn ships, so nothing is downloaded. A model of
equinox is a tree in which functions stand beside arrays: the arrays are what is exchanged.
"""

from __future__ import annotations

import sys
from typing import Any

import byteps.jax as bps
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

ACCURACY_MIN = 0.9
BATCH, EPOCHS, RATE, HELD_OUT = 64, 8, 2e-3, 357


def loss_of(model: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    scores = jax.vmap(model)(images)
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


def main() -> None:
    bps.init()
    rank, size = bps.rank(), bps.size()
    digits = load_digits()
    order = np.random.default_rng(1).permutation(len(digits.target))
    images, labels = (digits.data / 16 - 0.5).astype("float32"), digits.target
    test, train = order[:HELD_OUT], order[HELD_OUT:]
    # Each rank draws other parameters, and takes those of rank 0.
    model = eqx.nn.MLP(64, 10, 96, 2, key=jax.random.key(1 + rank))
    arrays, rest = eqx.partition(model, eqx.is_array)
    model = eqx.combine(bps.broadcast_parameters(arrays, root_rank=0), rest)
    optimizer = bps.DistributedOptimizer(optax.adam(RATE))
    state = optimizer.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def step(model: Any, state: Any, images: jax.Array, labels: jax.Array) -> Any:
        loss, gradients = eqx.filter_value_and_grad(loss_of)(model, images, labels)
        updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, loss

    batch = BATCH - BATCH % size
    for epoch in range(EPOCHS):
        shuffled = np.random.default_rng(epoch).permutation(train)
        for start in range(0, len(train) - batch + 1, batch):
            mine = shuffled[start + rank : start + batch : size]
            model, state, loss = step(model, state, images[mine], labels[mine])
        if rank == 0:
            print(f"{size} ranks, epoch {epoch + 1}: loss {loss:.4f}")
    leaves = jax.tree_util.tree_leaves(eqx.filter(model, eqx.is_array))
    flat = np.concatenate([np.ravel(leaf) for leaf in leaves])
    if any(not np.array_equal(flat, other) for other in bps.allgather_object(flat)):
        sys.exit("the ranks ended with different models")
    found = jnp.argmax(jax.vmap(model)(images[test]), axis=1)
    accuracy = float((found == labels[test]).mean())
    if rank == 0:
        print(f"{size} ranks: accuracy {accuracy:.4f} of digits that were held out")
    if accuracy < ACCURACY_MIN:
        sys.exit(f"the accuracy is {accuracy:.4f}, below {ACCURACY_MIN}")
    bps.barrier()
    bps.shutdown()


if __name__ == "__main__":
    main()
