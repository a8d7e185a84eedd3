"""byteps.tensorflow with rounds that do not wait for slow ranks, in programs and outside."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

import tensorflow as tf

import byteps.tensorflow as bps
from byteps.errors import BytePSError, ConfigError, MismatchError
from cluster import Cluster
from straggling import RANKS, STEPS, WHOLE, contribution, digits, linger
from tensorflow_ranks import on_ranks


def training(jit_compile):
    """Trains while one rank is slow; by step, what all have to have alike, and who was late."""
    rank, kind = bps.rank(), f"compiled {jit_compile}"
    weight, bias = tf.Variable(tf.ones((64, 8))), tf.Variable(tf.zeros(8))

    @tf.function(jit_compile=jit_compile)
    def step_of(x, own):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weight + bias))
        tape = bps.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, [weight, bias])
        total = bps.push_pull(own, average=False, name=kind, backup_workers=1)
        return gradients, total

    random = np.random.default_rng(rank)
    steps = []
    for step in range(STEPS):
        linger(rank, step)
        own = tf.constant(contribution(rank, step))
        probe = bps.push_pull(own, average=False, name=f"{kind}: probe", backup_workers=1)
        x = tf.constant(random.normal(size=(16, 64)), tf.float32)
        gradients, total = step_of(x, own)
        for variable, gradient in zip((weight, bias), gradients, strict=True):
            variable.assign_sub(0.01 * gradient)
        flat = weight.numpy().tobytes() + bias.numpy().tobytes()
        steps.append((hashlib.sha256(flat).hexdigest(), digits(probe), digits(total)))
        assert {*steps[-1][1], *steps[-1][2]} <= {0, step + 1}
    # What says nothing is whole, whatever is set.
    assert float(bps.push_pull(tf.constant(float(rank)), name="metric")) == (RANKS - 1) / 2
    start = tf.Variable(tf.fill((4,), float(rank)))
    bps.broadcast_variables([start], root_rank=1)
    assert start.numpy().tolist() == [1.0] * 4
    return steps


def refused_either_way(kind, wrap):
    """At once, or in a program."""
    rank = bps.rank()
    ones = tf.ones(4)
    with pytest.raises(BytePSError, match=f"{RANKS} of {RANKS} ranks"), bps.typed_errors():
        wrap(lambda x: bps.push_pull(x, name=f"all {kind}", backup_workers=RANKS))(ones)
    with pytest.raises(ConfigError, match="without a name"):
        wrap(lambda x: bps.push_pull(x, backup_workers=1))(ones)
    # Ranks that disagree are told so, by type.
    other = wrap(lambda x: bps.push_pull(x, name=kind, backup_workers=min(rank, 1)))
    with pytest.raises(MismatchError, match="slowest"), bps.typed_errors():
        other(ones)
        bps.barrier()


def refused():
    rank = bps.rank()
    ones = tf.ones(4)
    refused_either_way("at once", lambda call: call)
    refused_either_way("in a program", tf.function)
    with pytest.raises(BytePSError, match="only floats"):
        bps.push_pull(tf.ones(4, tf.int32), name="count", backup_workers=1)
    with pytest.raises(BytePSError, match="only sums and averages"):
        bps.push_pull(ones, name="largest", op=bps.Max, backup_workers=1)
    with pytest.raises(ConfigError, match="0 or more"):
        bps.push_pull(ones, name="few", backup_workers=-1)
    with pytest.raises(ConfigError, match="0 or more"):
        bps.DistributedGradientTape(tf.GradientTape(), backup_workers=-1)
    table = tf.Variable(tf.ones((8, 4)))

    def gradient(**arguments):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [rank])) * (rank + 1.0)
        return bps.DistributedGradientTape(tape, **arguments).gradient(loss, table)

    with pytest.raises(ConfigError, match="sparse_as_dense=True"):
        gradient(backup_workers=1)
    # By the environment, they wait for all.
    with pytest.warns(UserWarning, match="sparse_as_dense=True"):
        rows = tf.convert_to_tensor(gradient())
    assert rows.numpy()[:RANKS, 0].tolist() == pytest.approx([1 / 3, 2 / 3, 1])
    dense = gradient(backup_workers=1, sparse_as_dense=True)
    assert dense.numpy()[:RANKS, 0].tolist() == pytest.approx([1 / 3, 2 / 3, 1])


def check(steps):
    """All ranks saw the same, and the slow rank was late."""
    assert steps[0] == steps[1] == steps[2]
    assert len({digest for digest, _, _ in steps[0]}) == STEPS, "nothing was trained"
    for found in ([probe for _, probe, _ in steps[0]], [inside for _, _, inside in steps[0]]):
        late = [one.count(0) for one in found]
        print(f"late ranks, by step: {late}")
        assert max(late) == 1 and not any(late[:WHOLE]), late
        assert any(one[1] == 0 for one in found), "the slow rank was not late"


def test_rounds_without_the_slowest_rank():
    environment = {"BPS_BACKUP_WORKERS": "1", "BPS_BACKUP_BEHIND": "4"}
    with Cluster(RANKS, servers=1, environment=environment) as job:
        for jit_compile in (False, True):
            check(job.run(on_ranks(training), jit_compile))
        job.run(on_ranks(refused))
