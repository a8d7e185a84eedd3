"""What goes wrong in steps of Keras's models, on whichever back end: functions for two ranks."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest

import byteps.keras as bps
from byteps.errors import MismatchError, PeerDiedError
from keras_ranks import data, momentum, network

NOTICED_SECONDS = 5


def on_ranks(function):
    """The function, to be run on a rank: its engine is started before."""

    def started(*arguments):
        if keras.backend.backend() == "tensorflow":
            import tensorflow_ranks

            tensorflow_ranks.few_threads()
        bps.init()
        return function(*arguments)

    return started


def backend():
    """That of this rank."""
    return keras.backend.backend()


class Forgets(keras.Sequential):
    """Exchanges in its step what it never uses, in a program and behind each batch."""

    def train_step(self, *arguments):
        # JAX has a state in front of the batch.
        features = keras.utils.unpack_x_y_sample_weight(arguments[-1])[0]
        bps.push_pull(keras.ops.mean(features), "keras.forgotten")
        return super().train_step(*arguments)


class Drops(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        bps.push_pull(np.ones(1000), "keras.dropped")


def uses_nothing():
    """Gradients that no optimizer gets, and results that nobody reads, disturb no training."""

    def trained(kind, *callbacks):
        keras.utils.set_random_seed(4)
        model = kind([keras.Input((5,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
        model.compile(bps.DistributedOptimizer(momentum()), "mse")
        model.fit(*data(bps.rank(), 2), 6, 3, verbose=0, callbacks=list(callbacks))
        return model.get_weights()

    forgetful, plain = trained(Forgets, Drops()), trained(keras.Sequential)
    assert all(np.array_equal(*pair) for pair in zip(forgetful, plain, strict=True))
    used = keras.ops.convert_to_numpy(bps.push_pull(np.ones(2), "keras.used"))
    assert np.array_equal(used, np.ones(2))
    return [one.tobytes() for one in forgetful]


def traced_again():
    """One rank traces its programs more often than the other, and builds them anew."""
    model = network(5, bps.DistributedOptimizer(momentum()))
    features, labels = data(bps.rank(), 2)
    rows = [12, 4] if bps.rank() == 0 else [12, 4, 3, 1]
    for count in rows:  # Of these, no gradients are exchanged.
        model.test_on_batch(features[:count], labels[:count])
    for count in (12, 5, 12, 3):
        model.train_on_batch(features[:count], labels[:count])
    if bps.rank() == 1:
        model.make_train_function(force=True)
    model.train_on_batch(features, labels)
    assert np.isfinite(model.get_weights()[0]).all()
    return [one.tobytes() for one in model.get_weights()]


def in_another_order():
    """The ranks call in another order, each by a thread of its own for what waits."""
    names = [f"keras.order.{number}" for number in range(4)]
    own = names if bps.rank() == 0 else names[::-1]
    with ThreadPoolExecutor(len(own)) as threads:
        started = [threads.submit(bps.push_pull, np.full(3, float(one[-1])), one) for one in own]
        found = {name: one.result() for name, one in zip(own, started, strict=True)}
    for name in names:
        assert np.array_equal(keras.ops.convert_to_numpy(found[name]), np.full(3, float(name[-1])))


class Breaks(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            raise ZeroDivisionError("in a step")


def raises_in_a_step():
    """An error in a step, after its exchange, on all ranks: the next step works."""
    model = network(1, bps.DistributedOptimizer(momentum()))
    with pytest.raises(ZeroDivisionError, match="in a step"):
        model.fit(*data(), 12, verbose=0, callbacks=[Breaks()])
    assert model.fit(*data(), 12, verbose=0).history["loss"][0] > 0
    return [one.tobytes() for one in model.get_weights()]


def disagrees():
    """Ranks whose models differ are told so by both names, and train on with others."""

    def distributed(name, width):
        keras.utils.set_random_seed(2)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(width)])
        model.compile(bps.DistributedOptimizer(momentum(), name=name), "mse")
        return model

    differ = distributed("keras.differ", 3 + bps.rank())
    labels = np.zeros((len(data()[0]), 3 + bps.rank()), "float32")
    with pytest.raises(MismatchError, match=r"keras\.differ\.") as caught, bps.typed_errors():
        differ.fit(data()[0], labels, 12, verbose=0)
    assert all(f"rank {rank} declared" in str(caught.value) for rank in range(2))
    alike = distributed("keras.alike", 1)
    alike.fit(*data(bps.rank(), 2), 12, verbose=0)
    return [one.tobytes() for one in alike.get_weights()]


class Dies(keras.callbacks.Callback):
    def __init__(self, times):
        super().__init__()
        self.times = times

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.times.append(time.monotonic())
            if bps.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)


def killed_in_fit():
    """How long it took the other to hear of it."""
    times = []
    model = network(1, bps.DistributedOptimizer(momentum()))
    with pytest.raises(PeerDiedError, match="rank 1"), bps.typed_errors():
        model.fit(*data(), 12, epochs=3, verbose=0, callbacks=[Dies(times)])
    return time.monotonic() - times[0]
