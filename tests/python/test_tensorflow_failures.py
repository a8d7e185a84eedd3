"""byteps.tensorflow where programs go wrong, are traced again, are saved, or use nothing of what
they sent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip(
    "tensorflow", reason="TensorFlow is not installed; python/environment installs it"
)

import tensorflow as tf

import byteps.tensorflow as bps
from tensorflow_ranks import equal, on_ranks

START_SECONDS = 180


@pytest.fixture
def ranks(pair):
    """Two ranks that have imported TensorFlow."""
    pair.run(on_ranks(bps.size), timeout=START_SECONDS)
    return pair


def raises_in_a_step():
    """An error of a program, on all ranks, beside its exchanges and behind them."""

    @tf.function
    def step(x, limit):
        mean = bps.push_pull(x, name="raising.before")
        tf.debugging.assert_less(tf.reduce_max(mean), limit)
        return bps.push_pull(mean * 2, name="raising.after")

    for _ in range(3):
        with pytest.raises(tf.errors.InvalidArgumentError):
            step(tf.ones(4), 0.5)
        assert equal(step(tf.fill([4], bps.rank() + 1.0), 5.0), np.full(4, 3.0))

    def eager(x):
        mean = bps.push_pull(x, name="raising.before")
        if mean[0] < 5:
            raise ZeroDivisionError("in a step")
        return mean

    with pytest.raises(ZeroDivisionError):
        eager(tf.ones(4))
    assert equal(eager(tf.fill([4], 7.0)), np.full(4, 7.0))


def test_an_error_in_a_step_leaves_the_next_one_whole(ranks):
    ranks.run(on_ranks(raises_in_a_step))


def uses_nothing():
    """What nobody uses is not sent, on all ranks; what is sent and dropped disturbs nobody."""

    @tf.function
    def forgets(x):
        bps.push_pull(x, name="forgotten")
        kept = [bps.push_pull(x + number, name=f"half.{number}") for number in range(2)]
        return kept[0]

    for _ in range(3):
        assert equal(forgets(tf.ones(4)), np.ones(4))
        bps.push_pull(tf.ones(4), name="dropped")
    # One that waits for nobody may end before what it sends is there.
    assert equal(bps.push_pull(tf.ones(3), name="after"), np.ones(3))


def test_results_that_nobody_uses(ranks):
    ranks.run(on_ranks(uses_nothing))


def traced_again():
    """One rank traces a function more often than the other: its names stay."""

    @tf.function
    def mean(x):
        return bps.push_pull(x) + bps.push_pull(x * 2)

    if bps.rank() == 1:
        for size in (7, 8, 9):
            mean.get_concrete_function(tf.TensorSpec([size]))
    for size in (3, 7, 3):
        assert equal(mean(tf.fill([size], bps.rank() * 1.0)), np.full(size, 1.5))
    if bps.rank() == 0:
        mean.get_concrete_function(tf.TensorSpec([10]))
    assert equal(mean(tf.ones([4, 4])), np.full((4, 4), 3.0))


def test_a_function_that_is_traced_again(ranks):
    ranks.run(on_ranks(traced_again))


def saved(folder):
    """A program exchanges when it is loaded; a model has nothing of how it was trained."""
    rank = bps.rank()
    weight = tf.Variable(tf.ones(3))

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * (rank + 1))
        tape = bps.DistributedGradientTape(tape)
        weight.assign_sub(tape.gradient(loss, weight))

    tf.function(step)()
    signature = [tf.TensorSpec([None])]
    exchanges, trained = tf.Module(), tf.Module()
    exchanges.run = tf.function(lambda x: bps.push_pull(x, name="saved"), signature)
    trained.weight, trained.run = weight, tf.function(lambda x: x * weight, signature)
    x = tf.fill([3], float(rank))
    for name, module, wanted in (("ours", exchanges, 0.5), ("plain", trained, -0.5 * rank)):
        path = f"{folder}/{rank}.{name}"
        tf.saved_model.save(module, path)
        loaded = tf.saved_model.load(path)
        assert equal(loaded.run(x), np.full(3, wanted))
        is_ours = b"BytepsPushPull" in Path(path, "saved_model.pb").read_bytes()
        assert is_ours == (name == "ours")


def test_saved_models(ranks, tmp_path):
    ranks.run(on_ranks(saved), str(tmp_path))
