"""byteps.tensorflow: push_pull in and out of programs, and training built on it."""

from __future__ import annotations

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip(
    "tensorflow", reason="TensorFlow is not installed; python/environment installs it"
)

import tensorflow as tf

import byteps.tensorflow as bps
from byteps._operations import Adasum
from byteps.errors import (
    ConfigError,
    MismatchError,
    NotInitializedError,
    PeerDiedError,
    StallError,
    TensorError,
    UsageError,
)
from cluster import Cluster
from tensorflow_ranks import array, equal, on_ranks
from test_failures import launch

NOTICED_SECONDS = 5
START_SECONDS = 180  # Importing TensorFlow takes long where tests run side by side.
DTYPES = ["float32", "float64", "float16", "bfloat16", "uint8", "int8", "int32", "int64"]
SHAPES = [(), (5, 7, 3)]
FAILED = tf.errors.FailedPreconditionError


@pytest.fixture
def tensorflow_pair(pair):
    """Two ranks that have imported TensorFlow."""
    pair.run(on_ranks(bps.size), timeout=START_SECONDS)
    return pair


@pytest.fixture
def tensorflow_trio(trio):
    """Three of them."""
    trio.run(on_ranks(bps.size), timeout=START_SECONDS)
    return trio


def value(rank, shape, dtype):
    """Small whole numbers, so that every type holds their sums exactly."""
    numbers = np.random.default_rng(1000 + rank).integers(0, 20, shape)
    return tf.cast(tf.constant(numbers), dtype)


def wanted(shape, dtype, operation):
    stacked = np.stack(
        [array(value(rank, shape, dtype)).astype(np.float64) for rank in range(bps.size())]
    )
    if operation is bps.Average:
        mean = stacked.sum(0) / bps.size()
        return mean if tf.as_dtype(dtype).is_floating else np.floor(mean)
    reduce = {bps.Sum: np.sum, bps.Min: np.min, bps.Max: np.max, bps.Product: np.prod}
    return reduce[operation](stacked, 0)


# Values


def every_type_and_shape(compiled):
    for dtype in DTYPES:
        for shape in [*SHAPES, (0, 3)] if dtype == "float32" else SHAPES:
            for op in (bps.Average, bps.Max if shape else bps.Sum):
                name = f"tf.{compiled}.{dtype}.{shape}.{op.name}"

                def exchange(tensor, name=name, op=op):
                    return bps.push_pull(tensor, name=name, op=op)

                mine = value(bps.rank(), shape, dtype)
                result = (tf.function(exchange) if compiled else exchange)(mine)
                assert (result.shape, result.dtype) == (mine.shape, mine.dtype)
                exact = wanted(shape, dtype, op)
                if op is bps.Average and mine.dtype.is_floating:
                    # The server divides in float32, and rounds once.
                    close = np.allclose(array(result).astype(np.float64), exact, rtol=1e-2)
                else:
                    close = equal(array(result).astype(np.float64), exact)
                assert close, (name, mine, result, exact)
                assert equal(mine, value(bps.rank(), shape, dtype)), "the argument has changed"


@pytest.mark.parametrize("compiled", [False, True])
def test_every_type_and_shape(tensorflow_pair, compiled):
    tensorflow_pair.run(on_ranks(every_type_and_shape), compiled)


def without_names():
    rank, mean = bps.rank(), (bps.size() - 1) / 2
    first, second = bps.push_pull(tf.constant(float(rank))), bps.push_pull(tf.ones(5))
    assert first == mean and equal(second, np.ones(5))
    assert equal(bps.push_pull([1.0, 2.0 + rank], average=False), [bps.size(), 5.0])

    @tf.function
    def two(x):
        return bps.push_pull(x) + 10 * bps.push_pull(2 * x)

    # On rank 0 traced a time more, for another shape: places tell the calls apart.
    if rank == 0:
        two.get_concrete_function(tf.TensorSpec([9]))
    assert two(tf.constant(float(rank))) == 21 * mean
    assert equal(two(tf.fill([3], float(rank))), np.full(3, 21 * mean, np.float32))
    assert two(tf.constant(rank + 1.0)) == 21 * (mean + 1)


def test_without_names(tensorflow_pair):
    tensorflow_pair.run(on_ranks(without_names))


def in_programs():
    rank, size = bps.rank(), bps.size()
    calls = []

    @tf.function
    def of_a_constant():
        calls.append("traced")
        return bps.push_pull(tf.ones(3) * 2, name="constant", average=False)

    for _ in range(3):
        # A result that was computed once for all would be that of a rank alone in its 2nd run.
        assert equal(of_a_constant(), np.full(3, 2.0 * size))
    assert calls == ["traced"]

    @tf.function
    def in_a_loop(x):
        for _ in tf.range(3):
            x = bps.push_pull(x + rank, name="in a loop")
        return x

    mean = (size - 1) / 2
    assert equal(in_a_loop(tf.zeros(4)), np.full(4, 3 * mean, np.float32))

    variable = tf.Variable(tf.fill([1000], float(rank)))
    results = tf.function(lambda: [bps.push_pull(variable, name="variable"), variable + 0])()
    assert equal(results[0], np.full(1000, mean)) and equal(results[1], np.full(1000, rank))
    assert equal(variable, np.full(1000, rank)), "a variable's memory is not sent into"

    unknown = tf.function(
        lambda x: bps.push_pull(x, name="unknown"), input_signature=[tf.TensorSpec(None)]
    )
    assert unknown.get_concrete_function().structured_outputs.shape.rank is None
    assert equal(unknown(tf.fill([2, 2], float(rank))), np.full((2, 2), mean))


def test_in_programs(tensorflow_pair):
    tensorflow_pair.run(on_ranks(in_programs))


def all_at_once(order, eager):
    """Each rank begins with another tensor; all come only if all are under way at once."""
    rank, size = bps.rank(), bps.size()
    count = 8

    def exchange(tensors):
        tensors = [tensors[index] for index in order]
        names = [f"at once.{eager}.{index}" for index in order]
        results = bps.push_pull_group(tensors, names, average=False)
        return [results[order.index(index)] for index in range(count)]

    tensors = [tf.fill([1000 + index], float(index + rank)) for index in range(count)]
    results = (exchange if eager else tf.function(exchange))(tensors)
    for index, result in enumerate(results):
        exact = size * index + size * (size - 1) / 2
        assert equal(result, np.full(1000 + index, exact, np.float32))


@pytest.mark.parametrize("eager", [False, True])
def test_eight_tensors_are_under_way_together(tensorflow_pair, eager):
    def in_its_own_order():
        order = list(range(8)) if bps.rank() == 0 else list(range(8))[::-1]
        all_at_once(order, eager)

    tensorflow_pair.run(on_ranks(in_its_own_order))


def under_compression():
    numbers = np.random.default_rng(bps.rank()).normal(size=50_000).astype(np.float32)
    ranks = [np.random.default_rng(rank).normal(size=50_000) for rank in range(bps.size())]
    exact = np.mean(ranks, 0)
    for compression, error in (
        (bps.Compression.fp16, 4e-3),
        (bps.Compression.bf16, 4e-2),
        (bps.Compression.wire_bf16(), 4e-2),
        (bps.Compression.int8(), 8e-2),
    ):
        name = f"compressed.{compression}"
        result = bps.push_pull(tf.constant(numbers), name=name, compression=compression)
        assert result.dtype == tf.float32
        assert 0 < np.abs(result - exact).max() < error, compression
    topk = bps.Compression.topk(0.1)
    bps.push_pull(tf.constant(numbers), name="kept", compression=topk)
    [name] = [name for name in bps.compression_state_dict() if name.endswith("kept")]
    kept = bps.compression_state_dict()[name]
    assert kept["residue"].any()
    bps.load_compression_state_dict({name: {one: 0 * kept[one] for one in kept}})
    assert not bps.compression_state_dict()[name]["residue"].any()
    slices = tf.IndexedSlices(tf.ones([1, 2]), [bps.rank()], [3, 2])
    dense = bps.push_pull(slices, name="slices", average=False)
    rows = [[float(row < bps.size())] * 2 for row in range(3)]
    assert equal(dense, rows)


def test_compression_and_slices(tensorflow_pair):
    tensorflow_pair.run(on_ranks(under_compression))


# Gradients of push_pull itself


def gradients():
    rank, size = bps.rank(), bps.size()
    x = tf.Variable([1.0 + rank, 2.0])

    def gradient(exchange):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(exchange(x * x) * (rank + 1.0))
        return tape.gradient(loss, x)

    def summed(y):
        return bps.push_pull(y, name="differentiated", average=False)

    def sent(y):
        return bps.broadcast(y, 1, name="sent")

    weights = sum(range(1, size + 1))
    for run in (lambda f: gradient(f), lambda f: tf.function(lambda: gradient(f))()):
        assert np.allclose(run(summed), 2 * x.numpy() * weights)
        mine = 2 * x.numpy() * weights / size if rank == 1 else np.zeros(2)
        assert np.allclose(run(sent), mine)
    with pytest.raises(ConfigError, match="operation max has no gradient"):
        gradient(lambda y: bps.push_pull(y, name="largest", op=bps.Max))


def test_gradients(tensorflow_pair):
    tensorflow_pair.run(on_ranks(gradients))


# Broadcast and objects


def broadcasts():
    rank = bps.rank()
    tensors = {
        "f": tf.fill([2, 3], float(rank)),
        "flags": tf.range(5) > rank,
        "complex": tf.complex(tf.range(3.0), float(rank)),
        "short": tf.fill([4], tf.cast(rank, tf.int16)),
        "word": tf.fill([], tf.cast(rank, tf.uint32)),
    }
    for root in range(bps.size()):
        for form in (lambda f: f, tf.function):

            def exchange(values, root=root):
                return bps.broadcast_group(values, root, [f"b.{name}" for name in tensors])

            results = dict(zip(tensors, form(exchange)(list(tensors.values())), strict=True))
            assert equal(results["f"], np.full((2, 3), root, np.float32))
            assert equal(results["flags"], np.arange(5) > root)
            assert equal(results["complex"], np.arange(3) + 1j * root)
            for name in ("short", "word"):
                assert equal(results[name], np.full(tensors[name].shape, root))
                assert results[name].dtype == tensors[name].dtype
    with pytest.raises(TensorError, match="type string has no memory"):
        bps.broadcast(tf.constant("text"), 0, name="text")
    with pytest.raises(ConfigError, match="from rank 9"):
        bps.broadcast(tf.ones(3), 9, name="nobody")
    variables = [tf.Variable([float(rank)]), tf.Variable(rank, dtype=tf.int64)]
    assert bps.broadcast_variables(variables, 1) is None
    assert [float(variables[0][0]), int(variables[1])] == [1.0, 1]
    assert bps.broadcast_object({"from": rank}, 1) == {"from": 1}
    assert bps.allgather_object(rank) == list(range(bps.size()))


def test_broadcasts(tensorflow_pair):
    tensorflow_pair.run(on_ranks(broadcasts))


# Training


def features():
    """The same on all ranks: 12 samples, which 1, 2 and 3 ranks share evenly."""
    random = np.random.default_rng(7)
    return random.normal(size=(12, 6)), random.normal(size=(12, 2))


def network(seed):
    random = np.random.default_rng(seed)
    return [tf.Variable(random.normal(size=size)) for size in ((6, 8), (8,), (8, 2), (2,))]


def loss_of(weights, samples, labels):
    hidden = tf.tanh(samples @ weights[0] + weights[1])
    return tf.reduce_mean((hidden @ weights[2] + weights[3] - labels) ** 2)


def train(distributed, compiled=True, steps=6):
    samples, labels = features()
    weights = network(100 + bps.rank() if distributed else 100)
    own = slice(bps.rank(), None, bps.size()) if distributed else slice(None)

    def step(samples, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(weights, samples, labels)
        if distributed:
            tape = bps.DistributedGradientTape(tape)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)

    if distributed:
        bps.broadcast_variables(weights, 0)
    step = tf.function(step) if compiled else step
    for _ in range(steps):
        step(tf.constant(samples[own]), tf.constant(labels[own]))
    return [weight.numpy() for weight in weights]


def same_as_alone():
    for compiled in (True, False):
        together, alone = train(True, compiled), train(False, compiled)
        for one, other in zip(together, alone, strict=True):
            assert np.allclose(one, other, rtol=1e-12, atol=1e-13)
        assert not np.allclose(alone[0], network(100)[0]), "it learns"
    return [weight.tobytes() for weight in together]


def check_training(cluster):
    results = cluster.run(on_ranks(same_as_alone))
    assert all(one == results[0] for one in results), "all ranks have the same bits"


def test_two_ranks_train_as_one(tensorflow_pair):
    check_training(tensorflow_pair)


def test_three_ranks_train_as_one(tensorflow_trio):
    check_training(tensorflow_trio)


def train_in_a_session(distributed):
    v1 = tf.compat.v1
    samples, labels = features()
    own = slice(bps.rank(), None, bps.size()) if distributed else slice(None)
    start = [weight.numpy() for weight in network(100 + bps.rank() if distributed else 100)]
    with tf.Graph().as_default():
        weights = [
            v1.get_variable(f"w{index}", initializer=one, use_resource=index % 2 == 0)
            for index, one in enumerate(start)
        ]
        loss = loss_of(weights, tf.constant(samples[own]), tf.constant(labels[own]))
        optimizer = v1.train.MomentumOptimizer(0.1, 0.9)
        hooks = [v1.train.StopAtStepHook(last_step=5)]
        if distributed:
            optimizer = bps.DistributedOptimizer(optimizer)
            hooks.append(bps.BroadcastGlobalVariablesHook(0))
        steps = v1.train.get_or_create_global_step()
        train = optimizer.minimize(loss, global_step=steps)
        assert optimizer.get_slot_names() == ["momentum"]
        with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            while not session.should_stop():
                found = session.run([train, *weights])[1:]
    return found


def sessions():
    together, alone = train_in_a_session(True), train_in_a_session(False)
    for one, other in zip(together, alone, strict=True):
        assert np.allclose(one, other, rtol=1e-12, atol=1e-13)
    return [one.tobytes() for one in together]


def test_sessions_of_version_1(tensorflow_pair):
    results = tensorflow_pair.run(on_ranks(sessions))
    assert results[0] == results[1]


# Errors


def refused():
    with pytest.raises(TensorError, match=r"do not sum complex64"):
        bps.push_pull(tf.complex(1.0, 1.0), name="complex")
    with pytest.raises(ConfigError, match="give op or average, not both"):
        bps.push_pull(tf.ones(1), average=True, op=bps.Sum)
    with pytest.raises(ConfigError, match="op=Adasum"):
        bps.push_pull(tf.ones(1), op=Adasum)
    with pytest.raises(ConfigError, match="no asynchronous training"):
        bps.push_pull(tf.ones(1), enable_async=True)
    with pytest.raises(UsageError, match="'same' stands twice"):
        bps.push_pull_group([tf.ones(1)] * 2, ["same"] * 2)
    with pytest.raises(ConfigError, match="no global variables with eager"):
        bps.broadcast_global_variables(0)
    with pytest.raises(ConfigError, match=r"DistributedOptimizer\(object\)"):
        bps.DistributedOptimizer(object())
    with pytest.raises(ConfigError, match="averaged or summed"):
        bps.DistributedGradientTape(tf.GradientTape(), op=bps.Max)
    return True


def test_what_cannot_be_is_refused(tensorflow_pair):
    def on_one():
        return bps.rank() == 1 or refused()

    assert tensorflow_pair.run(on_ranks(on_one)) == [True, True]


def twice_at_once():
    """Of two exchanges of one name, one is refused, and the other waits for its ranks."""
    if bps.rank() == 0:
        with ThreadPoolExecutor(2) as threads:
            exchanges = [
                threads.submit(bps.push_pull, tf.fill([9], number), name="twice")
                for number in (1.0, 1.0)
            ]
            first = next(as_completed(exchanges, timeout=NOTICED_SECONDS))
            with pytest.raises(UsageError, match="'twice' is under way already"):
                first.result()
            bps.barrier()
            exchanges.remove(first)
            assert equal(exchanges[0].result(), np.full(9, 2.0))
    else:
        bps.barrier()
        assert equal(bps.push_pull(tf.fill([9], 3.0), name="twice"), np.full(9, 2.0))


def test_a_name_is_under_way_once(tensorflow_pair):
    tensorflow_pair.run(on_ranks(twice_at_once))


def mismatch(compiled):
    name = f"tf.mismatch.{compiled}"

    def exchange(x):
        return bps.push_pull(x, name=name)

    x = tf.ones(10 + bps.rank())
    bps.barrier()
    begun = time.monotonic()
    with pytest.raises(MismatchError) as caught, bps.typed_errors():
        (tf.function(exchange) if compiled else exchange)(x)
    assert time.monotonic() - begun < NOTICED_SECONDS
    assert name in str(caught.value) and "rank 0" in str(caught.value)
    assert "[Op:" not in str(caught.value), "nothing of TensorFlow's"
    # Others of a group are exchanged all the same.
    names = [f"{name}.good", f"{name}.bad"]
    with pytest.raises(MismatchError):
        bps.push_pull_group([tf.ones(3), tf.ones(4 + bps.rank())], names)
    # Calls without a name go on alike.
    with pytest.raises(MismatchError):
        bps.push_pull(x)
    assert equal(bps.push_pull(tf.ones(2)), np.ones(2))
    again = tf.function(lambda x: bps.push_pull(x, name=f"{name}.after"))(tf.ones(3))
    assert equal(again, np.ones(3))


@pytest.mark.parametrize("compiled", [False, True])
def test_mismatch(tensorflow_pair, compiled):
    tensorflow_pair.run(on_ranks(mismatch), compiled)


@tf.function
def step(x):
    return bps.push_pull(x, name="step")


def one_step():
    assert equal(step(tf.ones(1000)), np.ones(1000))


def step_without_others(kind, seconds):
    begun = time.monotonic()
    with pytest.raises(FAILED) as caught:
        step(tf.ones(1000))
    assert time.monotonic() - begun < seconds
    assert f"byteps.errors.{kind.__name__}: " in str(caught.value), caught.value
    with pytest.raises(kind) as typed, bps.typed_errors():
        raise caught.value
    assert typed.value.ranks == (1,)


def step_or_wait_to_be_killed():
    if bps.rank() == 1:
        signal.pause()
    step_without_others(PeerDiedError, NOTICED_SECONDS)


def test_a_killed_rank_is_an_error_in_a_program():
    with Cluster(2) as cluster:
        cluster.run(on_ranks(one_step), timeout=START_SECONDS)
        cluster.start(on_ranks(step_or_wait_to_be_killed))
        os.kill(cluster.pids[1], signal.SIGKILL)
        cluster.results(ranks=[0])
        cluster.kill()


def in_another_order():
    """Outside of programs one exchange ends before the next begins: ranks wait for each other."""
    names = ["first", "second"] if bps.rank() == 0 else ["second", "first"]
    with pytest.raises(StallError, match=r"first|second") as caught:
        for name in names:
            bps.push_pull(tf.ones(5), name=name)
    assert str(1 - bps.rank()) in str(caught.value)


def test_another_order_outside_of_programs_is_an_error_with_names():
    settings = {"BPS_STALL_REPORT": "1", "BPS_STALL_TIMEOUT": "2"}
    with Cluster(2, environment=settings) as cluster:
        cluster.run(on_ranks(bps.size), timeout=START_SECONDS)
        cluster.run(on_ranks(in_another_order))
        cluster.kill()


def names_that_change():
    for _ in range(2):
        assert equal(step(tf.ones(3)), np.ones(3))
        assert equal(bps.push_pull(tf.fill([5], 2.0), name="step"), np.full(5, 2.0))


def test_a_name_may_stand_for_another_shape(tensorflow_pair):
    tensorflow_pair.run(on_ranks(names_that_change))


def a_job_of_one_again():
    assert equal(step(tf.ones(3)), np.ones(3))
    bps.shutdown()
    with pytest.raises(FAILED, match="NotInitializedError: byteps is not initialised"):
        step(tf.ones(3))
    with pytest.raises(NotInitializedError):
        bps.push_pull(tf.ones(3), name="x")
    bps.init()
    assert equal(step(tf.ones(3)), np.ones(3))


def test_a_program_outlives_its_job():
    with Cluster(1) as cluster:
        cluster.run(on_ranks(a_job_of_one_again), timeout=START_SECONDS)


# Beside torch


def beside_torch():
    import torch

    import byteps.torch

    if bps.rank() == 0:
        mine = tf.reshape(tf.range(6.0), [2, 3])
        result = tf.function(lambda x: bps.push_pull(x, name="mixed"))(mine)
        assert equal(bps.broadcast(tf.fill([3], 7.0), 0, name="root"), np.full(3, 7.0))
    else:
        result = byteps.torch.push_pull(torch.ones(2, 3), name="mixed")
        own = byteps.torch.broadcast(torch.zeros(3), 0, "root")
        assert own.tolist() == [7.0] * 3
    return np.asarray(result).tolist()


def test_tensorflow_and_torch_sum_the_same_tensor(tensorflow_pair):
    wanted = ((np.arange(6.0).reshape(2, 3) + 1) / 2).tolist()
    assert tensorflow_pair.run(on_ranks(beside_torch)) == [wanted, wanted]


# The example


def test_train_digits():
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    script = Path(__file__).parents[2] / "python/examples/tensorflow/train_digits.py"
    result = launch([sys.executable, str(script)], timeout=START_SECONDS)
    assert result.returncode == 0, result.stdout
    assert "largest difference to training in one process" in result.stdout
