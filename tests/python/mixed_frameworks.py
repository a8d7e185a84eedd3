"""Sums one array on ranks of different frameworks, which the command line names by rank.

``test_mixed_frameworks.py`` has ``bpslaunch`` run it. Each framework may be given an interpreter:
``mxnet=path``.
"""

from __future__ import annotations

import importlib
import os
import sys

import numpy as np

from byteps import common
from byteps._typed_errors import typed
from byteps.errors import MismatchError


def torch(value, name):
    import torch

    import byteps.torch as bps

    return bps.push_pull(torch.tensor(value), average=False, name=name)


def jax(value, name):
    import jax

    import byteps.jax as bps

    return jax.jit(lambda x: bps.push_pull(x, average=False, name=name))(value)


def tensorflow(value, name):
    import tensorflow as tf

    import byteps.tensorflow as bps

    return tf.function(lambda x: bps.push_pull(x, average=False, name=name))(value).numpy()


def mxnet(value, name):
    import mxnet as mx

    import byteps.mxnet as bps

    array = mx.nd.array(value)
    bps.push_pull(array, name=name, is_average=False)
    return array.asnumpy()


NAMES = {"torch": "PyTorch", "jax": "JAX", "tensorflow": "TensorFlow", "mxnet": "MXNet"}


def refusal(exchange, rank):
    """What is said where the last rank has another shape, and whose frameworks its data names."""
    value = np.ones(8 if rank == common.size() - 1 else 4, np.float32)
    try:
        with typed(Exception):
            exchange(value, "other")
    except MismatchError as error:
        return str(error), dict(error.frameworks)
    raise AssertionError("the ranks differ")


def main():
    rank = int(os.environ["BYTEPS_LOCAL_RANK"])
    framework, _, python = sys.argv[1 + rank].partition("=")
    if python and os.environ.get("MIXED_PYTHON") != python:
        os.environ["MIXED_PYTHON"] = python
        os.execv(python, [python, *sys.argv])
    exchange = globals()[framework]
    bps = importlib.import_module(f"byteps.{framework}")
    bps.init()
    ranks = common.size()
    for step in range(3):
        found = np.asarray(exchange(np.arange(6, dtype="float32") + rank + step, "same"))
        wanted = (np.arange(6) + step) * ranks + ranks * (ranks - 1) / 2
        assert np.array_equal(found, wanted), (framework, found, wanted)
    said, named = refusal(exchange, rank)
    assert "'byteps.other'" in said.replace("`", "'"), said
    # Another of the first ranks may have been the first to declare it.
    last = NAMES[sys.argv[ranks].partition("=")[0]]
    assert f"rank {ranks - 1}, which speaks {last}, declared f32 of shape [8]" in said, said
    assert said.count("which speaks") == 2, said
    assert named[ranks - 1] == last and len(named) == 2, named
    common.barrier()
    print(f"rank {rank} with {framework}: all is right", flush=True)
    bps.shutdown()


main()
