"""Trains a convolutional network of flax on handwritten digits, on any number of ranks.

    bpslaunch --local 2 python python/examples/jax/train_flax.py

The digits are the 1,797 images that scikit-learn ships, so nothing is downloaded. Batch
normalization keeps statistics, which each rank has of its own images: they are averaged with the
gradients, so all ranks end with the same model.
"""

from __future__ import annotations

import sys
from typing import Any

import byteps.jax as bps
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state
from sklearn.datasets import load_digits

ACCURACY_MIN = 0.9
BATCH, EPOCHS, RATE, HELD_OUT = 64, 5, 2e-3, 357


class Network(nn.Module):
    """Two convolutions and a layer of scores."""

    @nn.compact
    def __call__(self, images: jax.Array, training: bool) -> jax.Array:
        for filters in (8, 16):
            images = nn.Conv(filters, (3, 3))(images)
            images = nn.BatchNorm(use_running_average=not training, momentum=0.8)(images)
            images = nn.avg_pool(nn.relu(images), (2, 2), (2, 2))
        return nn.Dense(10)(images.reshape(len(images), -1))


class State(train_state.TrainState):
    """What a step changes: with the statistics of batch normalization."""

    statistics: Any


def make_state(seed: int) -> State:
    network = Network()
    variables = network.init(jax.random.key(seed), jnp.zeros((1, 8, 8, 1)), training=False)
    return State.create(
        apply_fn=network.apply,
        params=variables["params"],
        statistics=variables["batch_stats"],
        tx=bps.DistributedOptimizer(optax.adam(RATE)),
    )


@jax.jit
def step(state: State, images: jax.Array, labels: jax.Array) -> tuple[State, jax.Array]:
    def loss_of(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.statistics}
        scores, changed = state.apply_fn(variables, images, True, mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
        return losses.mean(), changed["batch_stats"]

    (loss, statistics), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    statistics = bps.push_pull(statistics, name="statistics")
    return state.apply_gradients(grads=gradients, statistics=statistics), loss


def main() -> None:
    bps.init()
    rank, size = bps.rank(), bps.size()
    digits = load_digits()
    order = np.random.default_rng(1).permutation(len(digits.target))
    images, labels = (digits.images[..., None] / 16 - 0.5).astype("float32"), digits.target
    test, train = order[:HELD_OUT], order[HELD_OUT:]
    # Each rank draws other parameters, and takes those of rank 0.
    state = bps.broadcast_parameters(make_state(1 + rank), root_rank=0)
    batch = BATCH - BATCH % size
    for epoch in range(EPOCHS):
        shuffled = np.random.default_rng(epoch).permutation(train)
        for start in range(0, len(train) - batch + 1, batch):
            mine = shuffled[start + rank : start + batch : size]
            state, loss = step(state, images[mine], labels[mine])
        if rank == 0:
            print(f"{size} ranks, epoch {epoch + 1}: loss {loss:.4f}")
    model = {"params": state.params, "batch_stats": state.statistics}
    flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree_util.tree_leaves(model)])
    if any(not np.array_equal(flat, other) for other in bps.allgather_object(flat)):
        sys.exit("the ranks ended with different models")
    found = jnp.argmax(state.apply_fn(model, images[test], False), axis=1)
    accuracy = float((found == labels[test]).mean())
    if rank == 0:
        print(f"{size} ranks: accuracy {accuracy:.4f} of digits that were held out")
    if accuracy < ACCURACY_MIN:
        sys.exit(f"the accuracy is {accuracy:.4f}, below {ACCURACY_MIN}")
    bps.barrier()
    bps.shutdown()


if __name__ == "__main__":
    main()
