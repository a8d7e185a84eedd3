"""Measures a step of one exchange, and of eight, with the framework on the command line.

``test_in_flight.py`` has ``bpslaunch`` run it on two ranks. Rank 0 runs the framework's program;
rank 1 is late by 200 ms, and needs the last result before it sends what is for the one before: if
rank 0 waited for any of them before it has sent them all, nothing would move.
"""

from __future__ import annotations

import array
import os
import sys
import time

import numpy as np

from byteps import _registry, common

DELAY_SECONDS, ROUNDS, ELEMENTS = 0.2, 7, 64


def value():
    return np.arange(ELEMENTS, dtype="float32")


def names_of(count):
    return [f"flight.{count}.{index}" for index in range(count)]


def check(results):
    """The others send zeros."""
    for result in results:
        assert np.array_equal(np.asarray(result), value() / 2), result


def torch(count):
    import torch

    import byteps.torch as bps

    x = torch.tensor(value())

    def step():
        handles = [bps.push_pull_async(x, name=name) for name in names_of(count)]
        check([bps.synchronize(handle) for handle in handles])

    return step, names_of(count)


def jax(count):
    import jax

    import byteps.jax as bps

    @jax.jit
    def program(x):
        return bps.push_pull([x * 1 for _ in range(count)], name=f"flight.{count}")

    names = [f"flight.{count}[{index}]" for index in range(count)]
    return lambda: check(program(value())), names


def tensorflow(count):
    import tensorflow as tf

    import byteps.tensorflow as bps

    @tf.function
    def program(x):
        return [bps.push_pull(x, name=name) for name in names_of(count)]

    return lambda: check(one.numpy() for one in program(tf.constant(value()))), names_of(count)


def mxnet(count):
    import mxnet as mx

    import byteps.mxnet as bps

    def step():
        arrays = [mx.nd.array(value()) for _ in range(count)]
        for one, name in zip(arrays, names_of(count), strict=True):
            bps.push_pull(one, name=name)
        check(one.asnumpy() for one in arrays)

    return step, names_of(count)


def keras(count):
    """The gradients of a distributed optimizer, in a program of its back end's."""
    import keras

    import byteps.keras as bps

    optimizer = bps.DistributedOptimizer(keras.optimizers.SGD(1.0), name=f"flight.{count}")
    variables = [keras.Variable(np.zeros(ELEMENTS, "float32")) for _ in range(count)]
    optimizer.build(variables)
    backend = keras.backend.backend()

    def apply(gradients):
        optimizer.apply(gradients, variables)

    if backend == "tensorflow":
        import tensorflow as tf

        apply = tf.function(apply)
    elif backend == "jax":
        import jax

        program = jax.jit(optimizer.stateless_apply)

        def apply(gradients):
            state = [one.value for one in optimizer.variables]
            found, _ = program(state, gradients, [one.value for one in variables])
            for variable, one in zip(variables, found, strict=True):
                variable.assign(one)

    def step():
        for variable in variables:
            variable.assign(np.zeros(ELEMENTS, "float32"))
        apply([keras.ops.convert_to_tensor(value()) for _ in range(count)])
        check(-keras.ops.convert_to_numpy(one) for one in variables)

    names = names_of(count)
    return step, [f"keras['{name}']" for name in names] if backend == "jax" else names


def others(names):
    """What rank 1 does in a step."""
    for name in reversed(names):
        zeros = array.array("f", bytes(4 * ELEMENTS))
        address = zeros.buffer_info()[0]
        tensor = _registry.Tensor(name, "f32", (ELEMENTS,))
        send = _registry.Send(tensor, address, address)
        _registry.synchronize(_registry.start([send], zeros, list))


def milliseconds(make, count):
    """Of a step, to its end on both ranks, the fastest of some; as rank 1 sees it."""
    step, names = make(count)
    seconds = []
    for round_ in range(1 + ROUNDS):
        common.barrier()
        begun = time.perf_counter()
        if common.rank() == 0:
            step()
        else:
            time.sleep(DELAY_SECONDS if round_ else 0.0)
            others(names)
        common.barrier()
        if round_:
            seconds.append(time.perf_counter() - begun)
    return min(seconds) * 1e3


def one_thread():
    """Lets the framework run its programs on one thread."""
    os.environ["MXNET_CPU_WORKER_NTHREADS"] = "1"
    os.environ["NPROC"] = "1"  # Of XLA's pool of threads.
    if "tensorflow" in sys.argv[1]:
        import tensorflow as tf

        tf.config.threading.set_inter_op_parallelism_threads(1)
        tf.config.threading.set_intra_op_parallelism_threads(1)


def main():
    framework, _, backend = sys.argv[1].partition("-")
    if backend:
        os.environ["KERAS_BACKEND"] = backend
    one_thread()
    if framework == "mxnet":
        import byteps.mxnet as bps  # Its engine is wanted when the job begins.
    elif framework == "jax" or backend == "jax":
        import byteps.jax as bps
    else:
        bps = common
    bps.init()
    one, eight = (milliseconds(globals()[framework], count) for count in (1, 8))
    if common.rank() == 1:
        print(f"one exchange {one:.1f} ms, eight {eight:.1f} ms", flush=True)
    bps.shutdown()


main()
