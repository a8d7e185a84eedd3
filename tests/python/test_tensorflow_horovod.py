"""What Horovod's callers know of TensorFlow: several passes a step, ranks without data or with
layers of their own, and ranks as operations."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip(
    "tensorflow", reason="TensorFlow is not installed; python/environment installs it"
)

import tensorflow as tf

import byteps.tensorflow as bps
from byteps.errors import ConfigError, UsageError
from tensorflow_ranks import array, equal, on_ranks

START_SECONDS = 180


@pytest.fixture
def ranks(trio):
    """Three ranks that have imported TensorFlow."""
    trio.run(on_ranks(bps.size), timeout=START_SECONDS)
    return trio


# Several passes


def passes_in_a_session():
    """Each pass has other gradients; two make a step."""
    v1 = tf.compat.v1
    rank, size = bps.rank(), bps.size()
    found = {}
    for average in (False, True):
        for is_sparse in (False, True):
            with tf.Graph().as_default():
                weight = v1.get_variable("w", initializer=np.ones((3, 2)), use_resource=True)
                unused = v1.get_variable("u", initializer=np.ones(2), use_resource=True)
                factor = v1.placeholder(tf.float64, [])
                used = tf.gather(weight, [0, 2, 2]) if is_sparse else weight
                optimizer = bps.DistributedOptimizer(
                    v1.train.MomentumOptimizer(0.1, 0.5),
                    backward_passes_per_step=2,
                    average_aggregated_gradients=average,
                )
                count = v1.train.get_or_create_global_step()
                pairs = optimizer.compute_gradients(tf.reduce_sum(used) * factor, [weight, unused])
                assert pairs[1][0] is None
                train = optimizer.apply_gradients(pairs, count)
                hooks = [bps.BroadcastGlobalVariablesHook(0)]
                seen = []
                with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
                    for step in range(4):
                        session.run(train, {factor: (step + 1) * (rank + 1.0)})
                        seen.append(session.run(weight))
                    assert session.run(count) == 4
            # Of the mean over the ranks, with the factors 1 and 2, then 3 and 4.
            mean = np.mean(np.arange(1, size + 1)) / (2 if average else 1)
            rows = np.array([[1], [0], [2]]) if is_sparse else np.ones((3, 1))
            first = 1 - 0.1 * rows * np.ones(2) * mean * 3
            second = first - 0.1 * rows * np.ones(2) * mean * (0.5 * 3 + 7)
            for one, exact in zip(seen, [np.ones((3, 2)), first, first, second], strict=True):
                assert np.allclose(one, exact), (average, is_sparse, seen, exact)
            found[average, is_sparse] = seen[-1].tobytes()
    return found


def passes_outside():
    """An optimizer of TensorFlow 1 with eager execution, and in a function."""
    for form in (lambda f: f, tf.function):
        weight = tf.Variable([1.0, 2.0])
        optimizer = bps.DistributedOptimizer(
            tf.compat.v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=3
        )

        def step(factor, weight=weight, optimizer=optimizer):
            pairs = optimizer.compute_gradients(lambda: tf.reduce_sum(weight * factor), [weight])
            optimizer.apply_gradients(pairs)

        step = form(step)
        for number in range(6):
            step(tf.fill([2], float(number * (bps.rank() + 1))))
            exact = -2 * (0 + 1 + 2) if number >= 2 else 0
            exact += -2 * (3 + 4 + 5) if number >= 5 else 0
            assert equal(weight, [1 + exact, 2 + exact]), (number, weight)
    with pytest.raises(ConfigError, match="backward_passes_per_step=0"):
        bps.DistributedOptimizer(
            tf.compat.v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=0
        )


# Gradients of a rank's own


def own_layers():
    rank, size = bps.rank(), bps.size()
    shared, own = tf.Variable([1.0]), tf.Variable([2.0])
    layer = tf.keras.layers.Dense(1)
    layer.build([None, 1])

    def gradients(make, sources, **options):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sum(tf.reduce_sum(one * (rank + 1)) for one in sources))
        return make(tape, **options).gradient(loss, sources)

    def registered(tape, **options):
        tape = bps.DistributedGradientTape(tape, **options)
        tape.register_local_source(own)
        return tape

    mean = (size + 1) / 2
    for form in (lambda f: f, tf.function):
        scaled = form(lambda: gradients(registered, [own, shared]))()
        assert np.allclose([array(one)[0] for one in scaled], [(rank + 1) / size, mean])
        kept = form(lambda: gradients(registered, [own, shared], scale_local_gradients=False))()
        assert np.allclose([array(one)[0] for one in kept], [rank + 1, mean])
        found = form(
            lambda: gradients(
                bps.PartialDistributedGradientTape,
                [shared, *layer.trainable_weights],
                local_layers=layer,
                scale_local_gradients=False,
            )
        )()
        assert np.allclose([array(one).item() for one in found], [mean, rank + 1, rank + 1])
    with pytest.raises(ConfigError, match="layers of Keras are wanted"):
        bps.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[3])


# Ranks without data


def joins():
    """Each rank in turn has no more data, and has never heard of what the others exchange."""
    rank, size = bps.rank(), bps.size()
    for first in range(size):
        others = [one for one in range(size) if one != first]

        def exchange(x, name, first=first):
            return [
                bps.push_pull(x, name=f"{name}.mean"),
                bps.push_pull(x, name=f"{name}.max", op=bps.Max),
                bps.push_pull(tf.cast(x, tf.bfloat16), name=f"{name}.min", op=bps.Min),
                bps.push_pull(tf.cast(x, tf.int32), name=f"{name}.product", op=bps.Product),
                bps.allgather(x[: rank + 1], name=f"{name}.rows"),
                bps.broadcast(x, (first + 1) % size, name=f"{name}.root"),
                bps.sparse_push_pull(tf.IndexedSlices(x, tf.range(4)), f"{name}.s").indices,
            ]

        if rank == first:
            last = bps.join()
        else:
            x = tf.fill([4], -2.0)
            for form in (lambda f: f, tf.function)[: 2 if first == 1 else 1]:
                name = f"join.{first}.{form is tf.function}"
                run = form(lambda x, name=name: exchange(x, name))
                for _ in range(2):
                    found = run(x)
                assert np.allclose(found[0], np.full(4, -2 * (size - 1) / size)), found
                assert equal(found[1], x) and equal(tf.cast(found[2], tf.float32), x)
                assert equal(found[3], np.full(4, 4))
                assert equal(found[4], np.full(sum(one + 1 for one in others), -2.0))
                assert equal(found[5], x) and equal(found[6], list(range(4)) * len(others))
                lost = form(lambda x, first=first: bps.broadcast(x, first, name="lost"))
                joined = f"rank {first}, which has called join"
                with pytest.raises(UsageError, match=joined), bps.typed_errors():
                    lost(x)
            assert equal(bps.push_pull(tf.ones(3), average=False), np.full(3, size - 1))
            if first == 2:
                by_xla = tf.function(
                    lambda x: bps.push_pull(x, name="by xla", average=False), jit_compile=True
                )
                assert equal(by_xla(tf.ones(2)), np.full(2, size - 1))
            last = bps.join()
        assert last != first
        # Names that nobody chose go on together.
        assert equal(bps.push_pull(tf.ones(2), average=False), np.full(2, size))


# Ranks as operations


def places():
    rank, size = bps.rank(), bps.size()
    ends = bps.add_process_set([0, 2])

    def all_of_them():
        return [
            bps.rank_op(),
            bps.size_op(),
            bps.local_rank_op(),
            bps.local_size_op(),
            bps.size_op(ends.process_set_id),
            bps.process_set_included_op(ends.process_set_id),
            bps.process_set_included_op(),
        ]

    wanted = [rank, size, rank, size, 2, int(rank != 1), 1]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        assert session.run(all_of_them()) == wanted
    for form in (lambda f: f, tf.function, lambda f: tf.function(f, jit_compile=True)):
        found = form(all_of_them)()
        assert [int(one) for one in found] == wanted
        assert all(one.dtype == tf.int32 and one.shape == () for one in found)
    with pytest.raises(ConfigError, match="no process set 9"):
        bps.size_op(9)
    bps.remove_process_set(ends)


@pytest.mark.parametrize(
    "function",
    [passes_outside, own_layers, joins, places],
    ids=lambda one: one.__name__,
)
def test_horovod(ranks, function):
    ranks.run(on_ranks(function))


def test_several_passes_in_a_session(ranks):
    results = ranks.run(on_ranks(passes_in_a_session))
    assert results[0] == results[1] == results[2], "all ranks have the same bits"
