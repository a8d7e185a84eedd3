"""Trains with Keras 2, of TensorFlow 2.15 or of tf_keras, on two ranks as on one:
``test_floors.py`` has ``bpslaunch`` run it."""

from __future__ import annotations

import os
import tempfile

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf

import byteps.keras as bps
import byteps.tensorflow
from byteps.errors import ConfigError

keras = tf.keras
ROWS = 24
OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.05),
    "clipped": lambda: keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.5),
    "legacy": lambda: keras.optimizers.legacy.Adam(0.05),
    "scaled": lambda: keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.05)),
    "legacy scaled": lambda: keras.mixed_precision.LossScaleOptimizer(
        keras.optimizers.legacy.SGD(0.05)
    ),
}


def data(rank, size):
    random = np.random.default_rng(3)
    features = random.normal(size=(ROWS, 5)).astype("float32")
    labels = (features @ random.normal(size=(5, 1))).astype("float32")
    return features[rank::size], labels[rank::size]


def network(seed, optimizer, **compiled):
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((5,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(optimizer, "mse", **compiled)
    return model


def fit(model, rank, size, callbacks=(), epochs=3, batch_size=None):
    return model.fit(
        *data(rank, size),
        batch_size=batch_size or 12 // size,
        epochs=epochs,
        verbose=0,
        shuffle=False,
        callbacks=list(callbacks),
    ).history


def trains_as_one(name, compiled):
    together = network(10 + bps.rank(), bps.DistributedOptimizer(OPTIMIZERS[name]()), **compiled)
    begin = bps.callbacks.BroadcastGlobalVariablesCallback(0)
    means = bps.callbacks.MetricAverageCallback()
    seen = fit(together, bps.rank(), bps.size(), [begin, means])
    alone = network(10, OPTIMIZERS[name](), **compiled)
    wanted = fit(alone, 0, 1)
    for one, other in zip(together.get_weights(), alone.get_weights(), strict=True):
        assert np.allclose(one, other, rtol=1e-4, atol=1e-5), (name, compiled)
    assert np.allclose(seen["loss"], wanted["loss"], rtol=1e-4), (name, compiled)
    return together


def several_passes(name, compiled, average):
    """Two batches make a step, as one of all their rows does."""
    rank, size = bps.rank(), bps.size()
    passes = {"backward_passes_per_step": 2, "average_aggregated_gradients": average}
    optimizer = bps.DistributedOptimizer(OPTIMIZERS[name](), **passes)
    together = network(10, optimizer, **compiled)
    fit(together, rank, size, batch_size=6)
    alone = network(10, OPTIMIZERS[name](), **compiled)
    loss = (
        "mse" if average else lambda true, found: 2 * keras.losses.mean_squared_error(true, found)
    )
    alone.compile(alone.optimizer, loss, **compiled)
    fit(alone, 0, 1, batch_size=24)
    for one, other in zip(together.get_weights(), alone.get_weights(), strict=True):
        assert np.allclose(one, other, rtol=1e-4, atol=1e-5), (name, compiled, average)


def saved_and_loaded(model, folder):
    for ending in ("keras", "h5"):
        path = os.path.join(folder, f"{bps.rank()}.{ending}")
        model.save(path)
        assert type(keras.models.load_model(path).optimizer) is keras.optimizers.Adam
        again = bps.load_model(path)
        assert again.optimizer.is_distributed_by_byteps
        fit(again, bps.rank(), bps.size(), epochs=1)


def main():
    bps.init()
    size = bps.size()
    for name in OPTIMIZERS:
        ways = [{}, {"run_eagerly": True}]
        for compiled in ways if "legacy" in name else [*ways, {"jit_compile": True}]:
            model = trains_as_one(name, compiled)
        if name == "adam":
            with tempfile.TemporaryDirectory() as folder:
                saved_and_loaded(model, folder)
    for name, average in (("clipped", False), ("adam", True), ("legacy", True)):
        for compiled in ({}, {"run_eagerly": True}):
            several_passes(name, compiled, average)
    model = network(bps.rank(), bps.DistributedOptimizer(keras.optimizers.SGD(0.01 * size)))
    warm_up = bps.callbacks.LearningRateWarmupCallback(2)
    rates = fit(model, bps.rank(), size, [warm_up])["lr"]
    assert np.isclose(rates[-1], 0.01 * size), rates
    assert float(bps.push_pull(bps.rank() + 1.0, "x", average=False)) == size * (size + 1) / 2
    assert float(bps.broadcast(float(bps.rank()), 1, "y")) == 1.0
    for kind in (tf.keras.optimizers.Adam, tf.keras.optimizers.legacy.Adam):
        assert byteps.tensorflow.DistributedOptimizer(kind()).is_distributed_by_byteps
    try:
        bps.DistributedOptimizer(object())
    except ConfigError as error:
        assert "an optimizer of Keras 2." in str(error)
    else:
        raise AssertionError("it is no optimizer")
    bps.shutdown()
    print("all is right")


main()
