"""What Horovod's callers know of TensorFlow: ranks that run out of data."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip(
    "tensorflow", reason="TensorFlow is not installed; python/environment installs it"
)

import tensorflow as tf

import byteps.tensorflow as bps
from byteps.errors import UsageError
from tensorflow_ranks import equal, on_ranks

START_SECONDS = 180


@pytest.fixture
def ranks(trio):
    """Three ranks that have imported TensorFlow."""
    trio.run(on_ranks(bps.size), timeout=START_SECONDS)
    return trio


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


def test_ranks_without_data(ranks):
    ranks.run(on_ranks(joins))
