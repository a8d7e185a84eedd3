"""byteps.tensorflow: what gathers and scatters, sparse gradients, and process sets."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip(
    "tensorflow", reason="TensorFlow is not installed; python/environment installs it"
)

import tensorflow as tf

import byteps.tensorflow as bps
from byteps._operations import Adasum
from byteps.errors import ConfigError, MismatchError, TensorError
from cluster import Cluster
from tensorflow_ranks import array, equal, few_threads, on_ranks

START_SECONDS = 180


@pytest.fixture(scope="module")
def ranks():
    """Three ranks, which import no other framework."""
    cluster = Cluster(3)
    try:
        cluster.run(initialise, timeout=START_SECONDS)
        yield cluster
    finally:
        cluster.kill() if cluster.broken else cluster.close()


def initialise():
    few_threads()
    bps.init()


def rows(rank, dtype="float32"):
    """As many rows as the rank's number, and one; of rank 1 none."""
    count = 0 if rank == 1 else rank + 1
    return tf.cast(tf.reshape(tf.range(count * 6) + 10 * rank, [count, 2, 3]), dtype)


def of_all(dtype="float32"):
    return np.concatenate([array(rows(rank, dtype)) for rank in range(bps.size())])


def gathers():
    rank, size = bps.rank(), bps.size()
    for form in (lambda f: f, tf.function):
        for dtype in ("float32", "bool", "int16", "int8", "complex128", "bfloat16"):
            result = form(lambda x, name=f"g.{dtype}": bps.allgather(x, name=name))(
                rows(rank, dtype)
            )
            assert result.dtype == dtype and equal(result, of_all(dtype)), dtype
    # More rows than before under the same name, several at once, and none at all.
    for count in (3, 700):
        tensors = [tf.fill([count * rank, 2], rank), tf.fill([1], float(rank)), tf.zeros([0, 4])]
        many, one, none = bps.grouped_allgather(tensors, name="several")
        assert equal(many[:, 1], np.repeat(range(size), [count * one for one in range(size)]))
        assert equal(one, np.arange(size)) and none.shape == (0, 4)
    assert equal(bps.allgather([rank, rank]), np.repeat(range(size), 2)), "without a name"
    unknown = tf.function(bps.allgather, input_signature=[tf.TensorSpec([None, None])])
    assert equal(unknown(tf.fill([rank, 5], 1.0)), np.ones((3, 5)))
    assert bps.allgather_object({"rank": rank}) == [{"rank": one} for one in range(size)]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        found = session.run(bps.allgather(tf.compat.v1.placeholder_with_default([rank], [None])))
    assert found.tolist() == list(range(size))


def refuses_to_gather():
    with pytest.raises(MismatchError, match=r"wrong\.form"):
        bps.allgather(tf.zeros([2, 3 + bps.rank()]), name="wrong")
    with pytest.raises(MismatchError, match=r"type\.form"), bps.typed_errors():
        of_type = tf.zeros([2], tf.float32 if bps.rank() else tf.float64)
        tf.function(lambda x: bps.allgather(x, name="type"))(of_type)
    with pytest.raises(TensorError, match=r"shape \(\): numbers are wanted"):
        bps.allgather(1.0)
    with pytest.raises(TensorError, match="type string"):
        bps.allgather(["text"])
    with pytest.raises(ConfigError, match="2 names for 1 tensors"):
        bps.grouped_allgather([tf.ones(1)], ["one", "other"])
    with pytest.raises(MismatchError):
        bps.allgather(tf.zeros([2, 3 + bps.rank()]))
    assert equal(bps.allgather(tf.ones(1)), np.ones(3)), "it goes on"


def scatters():
    rank, size = bps.rank(), bps.size()
    whole = np.arange(14.0).reshape(7, 2)  # 3, 2 and 2 rows.
    begin, end = [(0, 3), (3, 5), (5, 7)][rank]
    for form in (lambda f: f, tf.function):

        def reduce(x):
            first = bps.reducescatter(x, op=bps.Sum, name="r.sum", prescale_factor=2)
            return first, bps.reducescatter(x, name="r.average")

        summed, mean = form(reduce)(tf.constant(whole * (rank + 1), tf.float32))
        assert equal(summed, 2 * whole[begin:end] * 6) and equal(mean, whole[begin:end] * 2)
    first, second = bps.grouped_reducescatter([tf.ones(4), tf.fill([3], rank)], op=bps.Max)
    assert first.shape == (2 if rank == 0 else 1,) and equal(second, [size - 1])
    with pytest.raises(ConfigError, match="op=Adasum"):
        bps.reducescatter(tf.ones(3), op=Adasum)
    with pytest.raises(TensorError, match="reducescatter of a tensor"):
        bps.reducescatter(tf.constant(1.0))


def swaps():
    rank, size = bps.rank(), bps.size()
    for form in (lambda f: f, tf.function):
        even = form(lambda x: bps.alltoall(x, name="even"))(tf.range(2 * size) + 100 * rank)
        wanted = [100 * root + 2 * rank + index for root in range(size) for index in range(2)]
        assert equal(even, wanted)
        # Rank r sends r + t rows to rank t.
        splits = [rank + to for to in range(size)]
        mine = np.concatenate([np.full((rank + to, 2), 10.0 * rank + to) for to in range(size)])
        for of_kind in ("float64", "bool"):
            value = tf.cast(tf.constant(mine), of_kind)
            output, received = form(
                lambda x, s, name=of_kind: bps.alltoall(x, s, name=f"uneven.{name}")
            )(value, splits)
            came = [np.full((root + rank, 2), 10.0 * root + rank) for root in range(size)]
            assert equal(output, np.concatenate(came).astype(of_kind))
            assert equal(received, [root + rank for root in range(size)])
    with pytest.raises(ConfigError, match="4 rows are not divided by 3 ranks"):
        bps.alltoall(tf.ones(4))
    for splits in ([1, 1], [4, -1, 1], [1, 1, 1]):
        with pytest.raises(ConfigError, match="one number for each rank"):
            bps.alltoall(tf.ones(4), splits)
    with pytest.raises(ConfigError, match="whole numbers are wanted"):
        bps.alltoall(tf.ones(3), [1.0, 1.0, 1.0])
    unknown = tf.function(lambda x, s: bps.alltoall(x, s, name="unknown"))
    with pytest.raises(ConfigError, match="for 3 ranks"), bps.typed_errors():
        unknown(tf.ones(4), tf.constant([1, 1, 1]))
    with pytest.raises(ConfigError, match="compiled by XLA"):
        tf.function(bps.alltoall, jit_compile=True)(tf.ones(3))


def gradients():
    rank, size = bps.rank(), bps.size()
    x = tf.Variable([[1.0 + rank, 2.0]] * 3)
    weights = tf.reshape(tf.range(18.0), [9, 2]) * (rank + 1.0)

    def gradient(exchange, weights):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(exchange(x * 2) * weights)
        return tape.gradient(loss, x)

    cases = {
        # The average of the ranks' weights, at this rank's rows.
        "gather": (bps.allgather, weights, 2 * np.arange(18).reshape(9, 2)[3 * rank :][:3] * 2),
        # Each rank has a row, whose weights all get.
        "scatter": (
            lambda y: bps.reducescatter(y, op=bps.Sum, name="g.scatter"),
            weights[:1],
            [[0, 2 * (one + 1)] for one in range(size)],
        ),
        "swap": (
            lambda y: bps.alltoall(y, name="g.swap"),
            tf.fill([3, 2], float(rank)),
            [[2 * one] * 2 for one in range(size)],
        ),
    }
    for name, (exchange, by, wanted) in cases.items():
        assert np.allclose(gradient(exchange, by), wanted), name
        compiled = tf.function(lambda exchange=exchange, by=by: gradient(exchange, by))
        assert np.allclose(compiled(), wanted), name


@pytest.mark.parametrize(
    "function",
    [gathers, refuses_to_gather, scatters, swaps, gradients],
    ids=lambda one: one.__name__,
)
def test_moves(ranks, function):
    ranks.run(on_ranks(function))


# Sparse gradients


def slices_of(rank):
    """As many slices as the rank's number, and one."""
    indices = tf.range(rank + 1)
    return tf.IndexedSlices(tf.fill([rank + 1, 2], rank + 1.0), indices, tf.constant([4, 2]))


def dense(slices):
    assert isinstance(slices, tf.IndexedSlices), slices
    return array(tf.math.unsorted_segment_sum(slices.values, slices.indices, 4))


def sparse():
    rank, size = bps.rank(), bps.size()
    total = sum(dense(slices_of(one)) for one in range(size))
    for form in (lambda f: f, tf.function):
        both = form(
            lambda: [
                bps.allreduce(slices_of(rank), name="s.average"),
                bps.sparse_push_pull(slices_of(rank), op=bps.Sum),
            ]
        )()
        assert np.allclose(dense(both[0]), total / size) and equal(dense(both[1]), total)
    mixed = bps.grouped_allreduce(
        [slices_of(rank), tf.ones(2), slices_of(rank)], op=bps.Sum, postscale_factor=2.0
    )
    assert equal(dense(mixed[0]), 2 * total) and equal(mixed[1], [2 * size] * 2)
    with pytest.raises(ConfigError, match="averaged or summed"):
        bps.allreduce(slices_of(rank), op=bps.Max)
    with pytest.raises(TensorError, match=r"IndexedSlices are wanted"):
        bps.sparse_push_pull(tf.ones(2))

    table, weight = tf.Variable(tf.ones([4, 2])), tf.Variable(2.0)

    def step(**options):
        with tf.GradientTape() as tape:
            picked = tf.gather(table, tf.range(rank + 1))
            loss = tf.reduce_sum(picked) * weight * (rank + 1)
        return bps.DistributedGradientTape(tape, **options).gradient(loss, [table, weight])

    for form in (lambda f: f, tf.function):
        gathered, mean = form(step)()
        assert np.allclose(dense(gathered), 2 * total / size)
        assert np.isclose(mean, sum(2 * (one + 1) ** 2 for one in range(size)) / size)
        whole, _ = form(lambda: step(sparse_as_dense=True, gradient_predivide_factor=2.0))()
        assert isinstance(whole, tf.Tensor) and np.allclose(whole, 2 * total / size)
    with pytest.raises(ConfigError, match="gradient_predivide_factor=0"):
        bps.DistributedGradientTape(tf.GradientTape(), gradient_predivide_factor=0)
    return [array(one).tobytes() for one in (dense(gathered), whole)]


def test_sparse_gradients(ranks):
    results = ranks.run(on_ranks(sparse))
    assert results[0] == results[1] == results[2], "all ranks have the same bits"


def train_an_embedding():
    """Of Keras's optimizer and of one of version 1: as dense gradients do."""
    rank = bps.rank()
    found = {}
    for as_dense in (False, True):
        table = tf.Variable(tf.ones([4, 2]))
        optimizer = bps.DistributedOptimizer(
            tf.keras.optimizers.SGD(0.1), sparse_as_dense=as_dense, name=f"embedding.{as_dense}"
        )
        optimizer.build([table])

        @tf.function
        def step(table=table, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, tf.range(rank + 1)) ** 2)
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])

        step()
        step()
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            old = tf.compat.v1.get_variable("table", initializer=np.ones((4, 2), np.float32))
            loss = tf.reduce_sum(tf.gather(old, tf.range(rank + 1)) ** 2)
            descent = tf.compat.v1.train.GradientDescentOptimizer(0.1)
            train = bps.DistributedOptimizer(descent, sparse_as_dense=as_dense).minimize(loss)
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(train)
            session.run(train)
            before = session.run(old)
        found[as_dense] = array(table), before
    for one in (*found[False], found[True][1]):
        assert np.allclose(one, found[True][0])
    assert not np.allclose(found[True][0][0], 1) and np.allclose(found[True][0][3], 1)


def test_an_embedding_trains(ranks):
    ranks.run(on_ranks(train_an_embedding))


# Process sets


def in_a_set():
    rank = bps.rank()
    ends = bps.add_process_set([0, 2])
    assert bps.get_process_set_ids_and_ranks()[ends.process_set_id] == [0, 2]
    gradient = tf.Variable(float(rank))

    def step():
        with tf.GradientTape() as tape:
            loss = gradient * gradient
        return bps.DistributedGradientTape(tape, process_set=ends).gradient(loss, gradient)

    # On a rank that is none of it gradients stay as they are.
    assert float(tf.function(step)()) == (2.0 if rank != 1 else 2.0 * rank)
    if rank == 1:
        with pytest.raises(ConfigError, match="rank 1 is not in"):
            bps.allgather(tf.ones(1), process_set=ends)
    else:
        place = ends.rank()
        for form in (lambda f: f, tf.function):

            def all_kinds(x):
                return [
                    bps.push_pull(x, name="in", process_set=ends, average=False),
                    bps.allgather(x[: place + 1], name="in.g", process_set=ends),
                    bps.reducescatter(x, name="in.r", op=bps.Sum, process_set=ends),
                    bps.alltoall(x, name="in.a", process_set=ends),
                    bps.broadcast(x, 2, name="in.b", process_set=ends),
                    bps.allreduce(
                        tf.IndexedSlices(x, [0, 0]), name="in.s", process_set=ends
                    ).values,
                ]

            results = form(all_kinds)(tf.fill([2], float(rank)))
            wanted = [[2, 2], [0, 2, 2], [2], [0, 2], [2, 2], [0, 0, 1, 1]]
            for result, exact in zip(results, wanted, strict=True):
                assert equal(result, exact), (results, exact)
        assert bps.allgather_object(rank, process_set=ends) == [0, 2]
        variable = tf.Variable(float(rank))
        bps.broadcast_variables([variable], 2, process_set=ends)
        assert float(variable) == 2
    assert bps.remove_process_set(ends)
    if rank == 0:
        with pytest.raises(ConfigError, match="not added to this job"):
            bps.push_pull(tf.ones(1), process_set=ends)


def test_process_sets(ranks):
    ranks.run(on_ranks(in_a_set))
