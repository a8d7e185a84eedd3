"""What ranks of Keras tests run, on whichever back end: a small network, and its training."""

from __future__ import annotations

import keras
import numpy as np

import byteps.keras as bps

ROWS = 24  # Which 1, 2 and 3 ranks share evenly.


def data(rank=0, size=1):
    """Every size-th row, so that the batches of all ranks make those of one."""
    random = np.random.default_rng(3)
    features = random.normal(size=(ROWS, 5)).astype("float32")
    labels = (features @ random.normal(size=(5, 1))).astype("float32")
    return features[rank::size], labels[rank::size]


def network(seed, optimizer, **compiled):
    """A model that begins with the numbers of this seed."""
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((5,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(optimizer, "mse", **compiled)
    return model


def train(optimizer, distributed, epochs=3, **compiled):
    """The weights and the history after training, on all ranks together or on each alone."""
    rank, size = (bps.rank(), bps.size()) if distributed else (0, 1)
    if distributed:
        optimizer = bps.DistributedOptimizer(optimizer)
    model = network(10 + rank, optimizer, **compiled)
    callbacks = []
    if distributed:
        callbacks.append(bps.callbacks.BroadcastGlobalVariablesCallback(0))
        callbacks.append(bps.callbacks.MetricAverageCallback())
    history = model.fit(
        *data(rank, size),
        batch_size=12 // size,
        epochs=epochs,
        verbose=0,
        shuffle=False,
        callbacks=callbacks,
    )
    return model.get_weights(), history.history


def check(make_optimizer, **compiled):
    """Trains together and alone: the same to rounding. Returns this rank's bits."""
    together, history = train(make_optimizer(), True, **compiled)
    alone, alone_history = train(make_optimizer(), False, **compiled)
    start = network(10, make_optimizer()).get_weights()
    for one, other in zip(together, alone, strict=True):
        assert np.allclose(one, other, rtol=1e-4, atol=1e-5), np.abs(one - other).max()
    assert not np.allclose(alone[0], start[0]), "it learns"
    assert np.allclose(history["loss"], alone_history["loss"], rtol=1e-4)
    return [one.tobytes() for one in together]


def momentum():
    """SGD, whose rounding errors stay small."""
    return keras.optimizers.SGD(0.05, momentum=0.9)
