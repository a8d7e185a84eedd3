"""What tests of byteps.tensorflow and Keras share: how functions are run on ranks."""

from __future__ import annotations

import functools

import numpy as np
import tensorflow as tf

import byteps.tensorflow as bps


def array(one):
    """The values of a tensor, a variable or an array: NumPy refuses tensors of no dimension."""
    return np.asarray(one.numpy() if hasattr(one, "numpy") else one)


def equal(one, other):
    """Whether two tensors or arrays hold the same values."""
    return bool(np.array_equal(array(one), array(other)))


@functools.cache
def few_threads():
    """Lets the ranks of a test share its CPUs. Once, before TensorFlow is first used."""
    tf.config.threading.set_inter_op_parallelism_threads(2)
    tf.config.threading.set_intra_op_parallelism_threads(1)


def on_ranks(function):
    """The function, to be run on a rank: the engine of TensorFlow's module is started before."""

    def started(*arguments):
        few_threads()
        bps.init()
        return function(*arguments)

    return started
