"""Averages with one framework in a job that goes on without a rank that is killed.

``test_shrinking.py`` has ``bpslaunch --elastic shrink`` run it on three ranks, the second of which
kills itself between two steps. The others must find so in the same step, and average without it.
"""

from __future__ import annotations

import os
import signal
import sys

import numpy as np

RANKS, VICTIM, STEPS, DEATH = 3, 1, 8, 4
ALIVE = [0, 2]
#: What each rank contributes: 3 on average, and 2 without the victim.
VALUES = [1.0, 5.0, 3.0]


def jax():
    import jax

    import byteps.jax as bps

    compiled = jax.jit(lambda x: bps.push_pull(x, name="compiled"))

    def average(value):
        handle = bps.push_pull_async({"some": value, "others": value + 1}, name="tree")
        ranks = bps.contributors(handle)
        found = bps.synchronize(handle)
        assert bps.contributors(handle) is None, "it is spent"
        assert np.array_equal(found["some"] + 1, found["others"])
        assert found["some"][0] == np.mean([VALUES[rank] for rank in ranks]), (found, ranks)
        assert np.array_equal(compiled(value), found["some"])
        return found["some"]

    def average_of(value, members):
        handle = bps.push_pull_async(value, name="set", process_set=members)
        assert bps.contributors(handle) == members.ranks
        return bps.synchronize(handle)

    return bps, average, average_of


def tensorflow():
    import tensorflow as tf

    import byteps.tensorflow as bps

    compiled = tf.function(lambda x: bps.push_pull(x, name="compiled"))

    def average(value):
        found = bps.push_pull(value, name="mean")
        assert np.array_equal(compiled(value), found)
        return found

    return bps, average, lambda value, members: bps.push_pull(value, process_set=members)


def keras():
    import byteps.keras as bps

    def average(value):
        return bps.push_pull(value, name="mean")

    return bps, average, lambda value, members: bps.push_pull(value, process_set=members)


def mxnet():
    import mxnet as mx

    import byteps.mxnet as bps

    def average(value):
        array = mx.nd.array(value)
        bps.push_pull(array, name="mean")
        return array.asnumpy()

    def average_of(value, members):
        return bps.allreduce(mx.nd.array(value), process_set=members).asnumpy()

    return bps, average, average_of


def main():
    framework, _, backend = sys.argv[1].partition("-")
    os.environ["KERAS_BACKEND"] = backend
    bps, average, average_of = globals()[framework]()
    bps.init()
    rank = bps.rank()
    own = np.full(1000, VALUES[rank], np.float32)
    for step in range(STEPS):
        if step == DEATH and rank == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        wanted = 3.0 if step < DEATH else 2.0
        assert set(np.asarray(average(own)).tolist()) == {wanted}, (step, wanted)
        ranks = bps.live_ranks()
        assert ranks == (list(range(RANKS)) if step < DEATH else ALIVE), (step, ranks)
        assert bps.size() == RANKS, "it stays"
    members = bps.add_process_set(bps.live_ranks())
    assert set(np.asarray(average_of(own, members)).tolist()) == {2.0}
    print("went on without the rank that died", flush=True)
    bps.shutdown()


main()
