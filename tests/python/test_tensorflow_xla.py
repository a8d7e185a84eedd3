"""byteps.tensorflow in programs that XLA compiles (``jit_compile=True``)."""

from __future__ import annotations

import time

import numpy as np
import pytest

pytest.importorskip(
    "tensorflow", reason="TensorFlow is not installed; python/environment installs it"
)

import tensorflow as tf

import byteps.tensorflow as bps
from byteps import _native
from byteps.errors import ConfigError, MismatchError, UsageError
from cluster import Cluster
from tensorflow_ranks import array, equal, few_threads, on_ranks

START_SECONDS = 180
DELAY_SECONDS = 0.4
DTYPES = ["float32", "float64", "float16", "bfloat16", "uint8", "int8", "int32", "int64"]


@pytest.fixture(scope="module")
def ranks():
    """Two ranks, which import no other framework."""
    cluster = Cluster(2)
    try:
        cluster.run(initialise, timeout=START_SECONDS)
        yield cluster
    finally:
        cluster.kill() if cluster.broken else cluster.close()


def initialise():
    few_threads()
    bps.init()
    assert _native.xla_register_in_tensorflow() is None, "this TensorFlow is known"


def compiled(function):
    return tf.function(function, jit_compile=True)


def exchanges():
    rank = bps.rank()

    def every_type(*tensors):
        names = [f"xla.{dtype}" for dtype in DTYPES]
        return bps.push_pull_group(tensors, names, average=False)

    tensors = [tf.cast(tf.fill([3, 5], rank + 1), dtype) for dtype in DTYPES]
    for _ in range(3):
        for one, dtype in zip(compiled(every_type)(*tensors), DTYPES, strict=True):
            assert one.dtype == dtype and equal(tf.cast(one, tf.int32), np.full((3, 5), 3)), dtype

    @compiled
    def other(x):
        mean = bps.push_pull(x * 2)
        for _ in range(2):
            mean = bps.push_pull(mean + rank)
        gathered = bps.allgather(x, name="xla.gathered")
        part = bps.reducescatter(x, op=bps.Sum, name="xla.part")
        root = bps.broadcast(x > 0, 1, name="xla.flag")
        return mean, gathered, part, root, bps.push_pull(3.0), bps.push_pull(tf.zeros([0, 2]))

    for _ in range(2):
        mean, gathered, part, root, constant, none = other(tf.fill([4], float(rank)))
        assert equal(mean, np.full(4, 2.0)) and equal(gathered, [0] * 4 + [1] * 4)
        assert equal(part, [1, 1]) and equal(root, [True] * 4)
        assert constant == 3 and none.shape == (0, 2)

    @compiled
    def in_a_loop(x):
        return tf.while_loop(
            lambda i, _: i < 3, lambda i, y: (i + 1, bps.push_pull(y + rank, name="loop")), [0, x]
        )[1]

    assert equal(in_a_loop(tf.zeros(4)), np.full(4, 1.5))
    assert equal(
        tf.function(lambda x: compiled(bps.push_pull)(x) + bps.push_pull(x))(tf.ones(2)), [2, 2]
    )


def all_at_once():
    """The ranks begin with other tensors, and one of them late: one delay passes, not eight."""
    rank, order = bps.rank(), list(range(8))
    if rank == 1:
        order.reverse()

    @compiled
    def program(tensors):
        results = bps.push_pull_group(
            [tensors[index] for index in order], [f"at once.{index}" for index in order]
        )
        return [results[order.index(index)] for index in range(8)]

    tensors = [tf.fill([1000 + index], float(index + rank)) for index in range(8)]
    program(tensors)
    bps.barrier()
    begun = time.monotonic()
    if rank == 1:
        time.sleep(DELAY_SECONDS)
    for index, result in enumerate(program(tensors)):
        assert equal(result, np.full(1000 + index, index + 0.5))
    return time.monotonic() - begun


def loss_of(weights, inputs):
    hidden = inputs
    for weight in weights:
        hidden = tf.tanh(hidden @ weight)
    return tf.reduce_mean(hidden**2)


def trains():
    rank, size = bps.rank(), bps.size()
    random = np.random.default_rng(4)
    inputs = random.normal(size=(8, 6))
    start = [random.normal(size=(6, 6)) for _ in range(3)]

    def train(own, jit, distributed):
        weights = [tf.Variable(one) for one in start]

        @tf.function(jit_compile=jit)
        def step(inputs):
            with tf.GradientTape() as tape:
                loss = loss_of(weights, inputs)
            tape = bps.DistributedGradientTape(tape) if distributed else tape
            for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
                weight.assign_sub(0.5 * gradient)

        for _ in range(4):
            step(tf.constant(inputs[own]))
        return [array(weight) for weight in weights]

    together = train(slice(rank, None, size), True, True)
    alone = train(slice(None), False, False)
    for one, other in zip(together, alone, strict=True):
        assert np.allclose(one, other, rtol=1e-12, atol=1e-13)

    x = tf.Variable([1.0 + rank, 2.0])

    def gradient(exchange):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(exchange(x * x) * (rank + 1.0))
        return tape.gradient(loss, x)

    summed = compiled(lambda: gradient(lambda y: bps.push_pull(y, name="d", average=False)))()
    sent = compiled(lambda: gradient(lambda y: bps.broadcast(y, 1, name="e")))()
    assert np.allclose(summed, 6 * array(x))
    assert np.allclose(sent, 3 * array(x) if rank == 1 else np.zeros(2))
    return [one.tobytes() for one in together]


def keras_fits():
    random = np.random.default_rng(5)
    inputs = random.normal(size=(16, 5)).astype("float32")
    targets = (inputs @ random.normal(size=(5, 1))).astype("float32")
    tf.keras.utils.set_random_seed(1)
    layers = [tf.keras.Input((5,)), tf.keras.layers.Dense(8, "tanh"), tf.keras.layers.Dense(1)]
    model = tf.keras.Sequential(layers)
    from byteps.tensorflow import keras as bps_keras

    optimizer = bps_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.05))
    model.compile(optimizer, "mse", jit_compile=True)
    own = slice(bps.rank(), None, bps.size())
    history = model.fit(
        inputs[own], targets[own], batch_size=4, epochs=3, verbose=0, shuffle=False
    ).history["loss"]
    assert history[-1] < history[0], "it learns"
    return [one.tobytes() for one in model.get_weights()]


def wrong():
    rank = bps.rank()

    @compiled
    def mismatch(x):
        return bps.push_pull_group([x, x[:2]], ["xla.wrong, and its name is long", "xla.right"])

    for _ in range(2):
        with (
            pytest.raises(MismatchError, match=r"rank 0 declared f32 of shape \[5\]") as caught,
            bps.typed_errors(),
        ):
            mismatch(tf.ones(5 + rank))
    assert "xla.wrong, and its name is long" in str(caught.value)
    assert equal(compiled(lambda x: bps.push_pull(x, name="xla.after"))(tf.ones(3)), np.ones(3))
    unknown = tf.function(
        lambda x: bps.push_pull(tf.boolean_mask(x, x > 0), name="unknown"), jit_compile=True
    )
    with pytest.raises(ConfigError, match=r"no fixed shape there, .*pass jit_compile=False"):
        unknown(tf.ones(3))
    with pytest.raises(UsageError, match="'same' stands twice"):
        compiled(lambda x: bps.push_pull_group([x, x], ["same", "same"]))(tf.ones(3))
    return True


def without_xla():
    """Where TensorFlow's XLA is not known, programs are told to do without."""
    refuse = lambda: "libtensorflow_cc.so.2 has no such function"  # noqa: E731
    known, _native.xla_register_in_tensorflow = _native.xla_register_in_tensorflow, refuse
    try:
        with pytest.raises(ConfigError, match="no such function; pass jit_compile=False"):
            compiled(bps.push_pull)(tf.ones(3))
    finally:
        _native.xla_register_in_tensorflow = known


def test_exchanges(ranks):
    ranks.run(on_ranks(exchanges))


def test_eight_tensors_take_as_long_as_one(ranks):
    waited = ranks.run(on_ranks(all_at_once))[0]
    assert DELAY_SECONDS * 0.9 < waited < 2 * DELAY_SECONDS, waited


def test_programs_train(ranks):
    results = ranks.run(on_ranks(trains))
    assert results[0] == results[1]


def test_keras_fits(ranks):
    results = ranks.run(on_ranks(keras_fits), timeout=START_SECONDS)
    assert results[0] == results[1]


def test_errors_have_our_text(ranks):
    assert ranks.run(on_ranks(wrong)) == [True, True]


def test_an_unknown_xla_is_refused(ranks):
    ranks.run(on_ranks(without_xla))
