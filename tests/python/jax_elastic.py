"""Trains with JAX and optax in a job whose last rank dies on the way.

``test_jax_elastic.py`` has ``bpslaunch --elastic`` run it. The rank that is left must end with the
parameters that one process finds by itself.
"""

from __future__ import annotations

import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import byteps.jax as bps

STEPS, DEATH = 9, 4


def start(rank):
    return {"w": jnp.full((7, 3), 1.0 + rank), "b": jnp.full(3, 0.5 - rank)}


def loss(params, rows, key):
    # The same noise on all ranks, and in one process.
    noise = 0.01 * jax.random.normal(key, (3,))
    return jnp.mean((rows @ params["w"] + params["b"] + noise) ** 2)


def make_step(optimizer):
    # Donated: what the state keeps must not be what a step deletes.
    @jax.jit
    def plain(params, opt_state, key, rows):
        key, now = jax.random.split(key)
        gradients = jax.grad(loss)(params, rows, now)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, key

    return jax.jit(plain, donate_argnums=(0, 1, 2))


def main():
    bps.init()
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(5, 7)), jnp.float32)
    optimizer = bps.DistributedOptimizer(optax.adam(0.05))
    step, params = make_step(optimizer), start(bps.rank())
    state = bps.elastic.JaxState(
        params=params,
        opt_state=optimizer.init(params),
        key=jax.random.key(3 + bps.rank()),
        step=0,
        notes={"rank": bps.rank(), "flag": True},
    )
    sizes, seen = [bps.size()], []
    state.on_change(lambda old, new: sizes.append(new))

    @bps.elastic.run
    def train(state):
        seen.append((state.step, state.notes["rank"]))
        while state.step < STEPS:
            if state.step == DEATH and bps.size() > 1 and bps.rank() == bps.size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            found = step(state.params, state.opt_state, state.key, rows)
            state.params, state.opt_state, state.key = jax.block_until_ready(found)
            state.step += 1
            if state.step % 3 == 0:
                state.commit()

    train(state)
    forms_again = sys.argv[1] == "redo"
    assert seen == ([(0, 0), (3, 0)] if forms_again else [(0, 0)]), seen
    assert sizes == ([2, 1] if forms_again else [2]), sizes
    alone, plain = start(0), optax.adam(0.05)
    step, opt_state, key = make_step(plain), plain.init(alone), jax.random.key(3)
    for _ in range(STEPS):
        alone, opt_state, key = step(alone, opt_state, key, rows)
    for found, wanted in zip(jax.tree.leaves(state.params), jax.tree.leaves(alone), strict=True):
        assert np.allclose(found, wanted, rtol=1e-5, atol=1e-6), (found, wanted)
    print("went on alone", flush=True)
    bps.shutdown()


main()
