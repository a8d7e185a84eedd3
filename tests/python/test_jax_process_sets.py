"""byteps.jax among some ranks of a job, outside of programs and in them."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is not installed")

import jax
import jax.numpy as jnp
import optax

import byteps.jax as bps
from byteps.errors import ConfigError
from jax_ranks import FAILED, equal, on_ranks


def in_a_set():
    rank = bps.rank()
    few, last = bps.add_process_set([0, 2]), bps.add_process_set([1])
    mine = few if few.included() else last
    x = {"a": jnp.arange(3.0) + rank, "b": jnp.full(2, 7 * rank)}
    # Ranks 0 and 2 have an average; rank 1 is alone, under the same names, and waits for nobody.
    mean = {"a": np.arange(3.0) + 1, "b": np.full(2, 7)}

    def exchanged(tree):
        return bps.push_pull(tree, name="few", process_set=mine)

    def loss(a):
        return (rank + 1) * exchanged({"a": a})["a"].sum()

    root = mine.ranks[-1]
    for wrap in (lambda f: f, jax.jit):
        assert equal(wrap(exchanged)(x), mean)
        # The mean of what ranks 0 and 2, or rank 1, multiply by: of 1 and 3, or of 2.
        assert np.allclose(wrap(jax.grad(loss))(x["a"]), 2)
        many = wrap(jax.vmap(lambda a: bps.push_pull(a, name="rows", process_set=mine)))
        assert np.allclose(many(jnp.arange(4.0) + rank), np.arange(4.0) + 1)
        sent = wrap(lambda a: bps.broadcast(a, root, "root", process_set=mine))(x["a"] > 1)
        assert equal(sent, np.arange(3.0) + root > 1)
        rows = wrap(lambda a: bps.allgather(a, name="rows of all", process_set=mine))(x["a"])
        assert equal(rows, np.concatenate([np.arange(3.0) + one for one in mine.ranks]))
        # All ranks, under the name of the sets.
        assert equal(wrap(lambda b: bps.push_pull(b, name="few['b']"))(x["b"]), np.full(2, 7))
        # In one program, of one name.
        both = wrap(lambda a: (exchanged({"a": a}), bps.push_pull({"a": a}, name="few")))
        assert equal(both(x["a"]), ({"a": mean["a"]},) * 2)
    # As many rows as each has, without a name, and handles.
    uneven = bps.allgather(jnp.full((rank + 1, 2), rank), process_set=mine)
    assert equal(uneven, np.repeat(mine.ranks, [one + 1 for one in mine.ranks])[:, None] * [1, 1])
    handle = bps.push_pull_async(x, average=False, process_set=mine)
    assert equal(bps.synchronize(handle), {key: mean[key] * mine.size() for key in mean})
    assert bps.allgather_object({"rank": rank}, process_set=mine) == [
        {"rank": one} for one in mine.ranks
    ]
    assert bps.broadcast_object(rank, mine.ranks[0], process_set=mine) == mine.ranks[0]
    same = bps.broadcast_parameters(x, mine.ranks[0], process_set=mine)
    assert equal(same["b"], np.full(2, 7 * mine.ranks[0]))
    bps.barrier(process_set=mine)
    assert bps.remove_process_set(few) and bps.remove_process_set(last)


def test_exchanges_in_a_process_set(trio):
    trio.run(on_ranks(in_a_set))


def trains_in_a_set(passes):
    rank = bps.rank()
    few = bps.add_process_set([0, 2])
    optimizer = bps.DistributedOptimizer(
        optax.sgd(1.0), backward_passes_per_step=passes, process_set=few
    )
    params = jnp.zeros(3)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        gradients = jnp.full(3, rank + 1.0)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(2 * passes):
        params, state = step(params, state)
    # Of gradients 1 and 3; rank 1, which is none of the set, steps with its own.
    assert np.allclose(params, -2 * 2), params

    def loss(x):
        return (rank + 1) * x.sum(), "more"

    for wrap in (lambda f: f, jax.jit):
        value, gradient = wrap(bps.value_and_grad(lambda x: loss(x)[0], process_set=few))(params)
        assert value == (rank + 1) * -12 and np.allclose(gradient, 2)
    gradient, more = bps.grad(loss, has_aux=True, name="aux", process_set=few)(params)
    assert more == "more" and np.allclose(gradient, 2)
    assert bps.remove_process_set(few)


@pytest.mark.parametrize("passes", [1, 2])
def test_training_in_a_process_set(trio, passes):
    trio.run(on_ranks(trains_in_a_set), passes)


def refusals():
    rank = bps.rank()
    few, x = bps.add_process_set([0]), jnp.ones(2)
    calls = [
        lambda: bps.push_pull(x, process_set=few),
        lambda: bps.push_pull_async(x, process_set=few),
        lambda: bps.broadcast(x, 0, process_set=few),
        lambda: bps.allgather(x, process_set=few),
        lambda: jax.jit(lambda x: bps.push_pull(x, process_set=few))(x),
    ]
    if rank == 1:
        for call in calls:
            with pytest.raises(ConfigError, match="rank 1 is not in"):
                call()
    else:
        with pytest.raises(ConfigError, match="the root is one of them"):
            bps.broadcast(x, 1, process_set=few)
    with pytest.raises(ConfigError, match="a ProcessSet is wanted"):
        bps.push_pull(x, process_set=[0])
    with pytest.raises(ConfigError, match="is not added to this job"):
        bps.DistributedOptimizer(optax.sgd(1.0), process_set=bps.ProcessSet([1]))
    assert bps.remove_process_set(few)
    # A program of a set does not outlive the job's.
    both = bps.add_process_set([0, 1])
    program = jax.jit(lambda x: bps.push_pull(x, name="of a set", process_set=both))
    assert equal(program(x), x)
    bps.shutdown()
    bps.init()
    with pytest.raises(FAILED, match="call add_process_set on all ranks"):
        jax.block_until_ready(program(x))
    bps.add_process_set([0, 1])
    assert equal(program(x), x)


def test_what_no_process_set_takes(pair):
    pair.run(on_ranks(refusals))


def joins():
    """A rank without data has never heard of what the others exchange."""
    rank, size = bps.rank(), bps.size()
    x = jnp.full(4, 6.0)
    if rank == 1:
        last = bps.join()
    else:
        for wrap in (lambda f: f, jax.jit):
            mean = wrap(lambda a: bps.push_pull(a, name="joined.mean"))(x)
            assert equal(mean, np.full(4, 6 * (size - 1) / size))
            least = wrap(lambda a: bps.push_pull(a, name="joined.min", op=bps.Min))(x)
            root = wrap(lambda a: bps.broadcast(a + rank, 2, name="joined.root"))(x)
            assert equal(least, x) and equal(root, x + 2)
        rows = bps.allgather(jnp.full(rank + 1, rank), name="joined.rows")
        assert equal(rows, [0, 2, 2, 2])
        with pytest.raises(FAILED) as caught:
            jax.jit(lambda a: bps.broadcast(a, 1, name="joined.lost"))(x).block_until_ready()
        assert "rank 1, which has called join" in str(caught.value)
        last = bps.join()
    assert last != 1
    assert equal(bps.push_pull(jnp.ones(2), average=False), np.full(2, size))


def test_a_rank_without_data_joins(trio):
    trio.run(on_ranks(joins))
