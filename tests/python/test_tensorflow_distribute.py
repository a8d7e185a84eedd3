"""byteps.tensorflow.distribute: strategies over devices of each rank, and over all ranks."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip(
    "tensorflow", reason="TensorFlow is not installed; python/environment installs it"
)

import tensorflow as tf

import byteps.tensorflow as bps
from byteps.errors import ConfigError
from byteps.tensorflow.distribute import CrossDeviceOps, MirroredStrategy
from cluster import Cluster
from tensorflow_ranks import array, few_threads

START_SECONDS = 180
DEVICES = 2
STEPS = 4
BATCH = 8  # Of a rank.


@pytest.fixture(scope="module")
def ranks():
    """Two ranks, each with two devices that are none."""
    cluster = Cluster(2)
    try:
        cluster.run(initialise, timeout=START_SECONDS)
        yield cluster
    finally:
        cluster.kill() if cluster.broken else cluster.close()


def initialise():
    few_threads()
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, parts)
    bps.init()


def data():
    """All steps' global batches, in float64, in which sums of other orders hardly differ."""
    random = np.random.default_rng(3)
    inputs = random.normal(size=(STEPS, bps.size(), BATCH, 5))
    return inputs, inputs @ random.normal(size=(5, 1))


def strategy_over(count, **arguments):
    return MirroredStrategy([f"CPU:{index}" for index in range(count)], **arguments)


def descend(weights, inputs, targets):
    """Steps by the gradient over all rows, in one process."""
    for step in range(STEPS):
        rows, wanted = inputs[step].reshape(-1, 5), targets[step].reshape(-1, 1)
        weights = weights - 0.1 * 2 * rows.T @ (rows @ weights - wanted) / len(rows)
    return weights


def a_loop_of_ones_own(count, compiled):
    inputs, targets = data()
    strategy = strategy_over(count)
    assert strategy.num_replicas_in_sync == count
    with strategy.scope():
        weights = tf.Variable(np.zeros((5, 1)), name=f"weights.{count}.{compiled}")
        optimizer = tf.keras.optimizers.SGD(0.1)
        optimizer.build([weights])

    def replica(rows, wanted):
        with tf.GradientTape() as tape:
            errors = tf.reduce_sum((rows @ weights - wanted) ** 2)
            loss = errors / BATCH
        optimizer.apply_gradients([(tape.gradient(loss, weights), weights)])
        return loss

    def step(rows, wanted):
        losses = strategy.run(replica, args=(rows, wanted))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    step = tf.function(step) if compiled else step

    def spread(rows):
        parts = np.split(rows, count)
        return strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(parts[context.replica_id_in_sync_group])
        )

    for number in range(STEPS):
        own = [spread(one[number, bps.rank()]) for one in (inputs, targets)]
        loss = float(step(*own))
        if number == 0:
            mine = np.mean(targets[0, bps.rank()] ** 2)
            assert np.isclose(loss, mine), "strategy.reduce is of this rank alone"
    wanted = descend(np.zeros((5, 1)), inputs, targets)
    assert np.allclose(array(weights), wanted, rtol=1e-9)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("count", [1, DEVICES])
def test_a_loop_of_ones_own(ranks, count, compiled):
    ranks.run(a_loop_of_ones_own, count, compiled)


def keras_fits():
    inputs, targets = data()
    before = tf.keras.backend.floatx()
    tf.keras.backend.set_floatx("float64")
    with strategy_over(DEVICES).scope():
        dense = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = tf.keras.Sequential([tf.keras.Input((5,)), dense])
        model.compile(tf.keras.optimizers.SGD(0.1), "mse")
    own = [one[:, bps.rank()].reshape(STEPS * BATCH, -1) for one in (inputs, targets)]
    model.fit(*own, batch_size=BATCH, shuffle=False, verbose=0)
    tf.keras.backend.set_floatx(before)
    wanted = descend(np.zeros((5, 1)), inputs, targets)
    assert np.allclose(array(dense.kernel), wanted, rtol=1e-9)


def test_keras_fits(ranks):
    ranks.run(keras_fits, timeout=START_SECONDS)


def options():
    even = bps.add_process_set([0])
    for arguments, mean in [
        ({"process_set": even}, float(bps.rank() + 1)),
        ({"compression": bps.Compression.fp16}, 1.5),
    ]:
        strategy = strategy_over(1, cross_device_ops=CrossDeviceOps(**arguments))

        def reduce(value, strategy=strategy):
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, value)

        reduced = strategy.run(reduce, args=(tf.fill([3], float(bps.rank() + 1)),))
        assert np.array_equal(array(reduced), np.full(3, mean))
    sparse = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([bps.rank()]), tf.constant([3, 2]))
    strategy = strategy_over(1)
    dense = strategy.run(
        lambda: tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, sparse)
    )
    assert np.array_equal(array(tf.convert_to_tensor(dense)), [[0.5] * 2, [0.5] * 2, [0, 0]])
    with pytest.raises(ConfigError, match="ReductionToOneDevice: it reduces within a process"):
        strategy_over(1, cross_device_ops=tf.distribute.ReductionToOneDevice())


def test_options(ranks):
    ranks.run(options)
