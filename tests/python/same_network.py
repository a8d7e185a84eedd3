"""Trains one small network with the framework that is named on the command line.

``test_same_network.py`` has ``bpslaunch`` run it. Each rank starts elsewhere and trains on its
share of the rows; the parameters must be those that NumPy finds, in float64, for all rows at once.
It prints a digest of their bits, which the test compares over the ranks.
"""

from __future__ import annotations

import hashlib
import os
import sys

import numpy as np

ROWS, STEPS, RATE = 24, 8, 0.2  # 2 and 3 ranks share the rows evenly.
SHAPES = [(5, 8), (8,), (8, 1), (1,)]


def data(rank=0, size=1):
    random = np.random.RandomState(3)
    features = random.normal(size=(ROWS, 5)).astype("float32")
    targets = np.tanh(features @ random.normal(size=(5, 1))).astype("float32")
    return features[rank::size], targets[rank::size]


def start(rank=0):
    """The parameters; each rank begins elsewhere, and takes those of rank 0."""
    random = np.random.RandomState(11)
    return [(random.normal(size=shape) * 0.5 + rank).astype("float32") for shape in SHAPES]


def by_numpy():
    """Gradient descent on the mean of squares, by hand."""
    features, targets = (one.astype("float64") for one in data())
    w, b, v, c = (one.astype("float64") for one in start())
    for _ in range(STEPS):
        hidden = np.tanh(features @ w + b)
        error = 2 * (hidden @ v + c - targets) / ROWS
        inner = (error @ v.T) * (1 - hidden**2)
        steps = features.T @ inner, inner.sum(0), hidden.T @ error, error.sum(0)
        w, b, v, c = (one - RATE * step for one, step in zip((w, b, v, c), steps, strict=True))
    return [w, b, v, c]


def by_torch():
    import torch

    import byteps.torch as bps

    bps.init()
    named = [(str(n), torch.nn.Parameter(torch.tensor(p))) for n, p in enumerate(start(bps.rank()))]
    bps.broadcast_parameters(named, root_rank=0)
    parameters = [parameter for _, parameter in named]
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(parameters, RATE), named)
    features, targets = map(torch.tensor, data(bps.rank(), bps.size()))
    w, b, v, c = parameters
    for _ in range(STEPS):
        optimizer.zero_grad()
        ((torch.tanh(features @ w + b) @ v + c - targets) ** 2).mean().backward()
        optimizer.step()
    return bps, [parameter.detach().numpy() for parameter in parameters]


def by_jax():
    import jax
    import jax.numpy as jnp
    import optax

    import byteps.jax as bps

    bps.init()
    parameters = bps.broadcast_parameters([jnp.asarray(p) for p in start(bps.rank())], root_rank=0)
    optimizer = bps.DistributedOptimizer(optax.sgd(RATE))
    state = optimizer.init(parameters)
    features, targets = data(bps.rank(), bps.size())

    def loss_of(parameters):
        w, b, v, c = parameters
        return ((jnp.tanh(features @ w + b) @ v + c - targets) ** 2).mean()

    @jax.jit
    def step(parameters, state):
        updates, state = optimizer.update(jax.grad(loss_of)(parameters), state, parameters)
        return optax.apply_updates(parameters, updates), state

    for _ in range(STEPS):
        parameters, state = step(parameters, state)
    return bps, [np.asarray(parameter) for parameter in parameters]


def by_tensorflow():
    import tensorflow as tf

    import byteps.tensorflow as bps

    bps.init()
    parameters = [tf.Variable(parameter) for parameter in start(bps.rank())]
    bps.broadcast_variables(parameters, root_rank=0)
    features, targets = map(tf.constant, data(bps.rank(), bps.size()))

    @tf.function
    def step():
        w, b, v, c = parameters
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.tanh(features @ w + b) @ v + c - targets) ** 2)
        gradients = bps.DistributedGradientTape(tape).gradient(loss, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.assign_sub(RATE * gradient)

    for _ in range(STEPS):
        step()
    return bps, [parameter.numpy() for parameter in parameters]


def by_keras():
    import byteps.keras as bps

    bps.init()
    import keras

    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
    )
    model.set_weights(start(bps.rank()))
    model.compile(bps.DistributedOptimizer(keras.optimizers.SGD(RATE)), "mse")
    first = bps.callbacks.BroadcastGlobalVariablesCallback(0)
    features, targets = data(bps.rank(), bps.size())
    model.fit(
        features, targets, len(features), epochs=STEPS, shuffle=False, verbose=0, callbacks=[first]
    )
    return bps, model.get_weights()


def by_mxnet():
    import mxnet as mx

    import byteps.mxnet as bps

    bps.init()
    parameters = []
    for index, value in enumerate(start(bps.rank())):
        parameter = mx.gluon.Parameter(f"p{index}", shape=value.shape, init=mx.init.Constant(0))
        parameter.initialize()
        parameter.set_data(mx.nd.array(value))
        parameters.append(parameter)
    trainer = bps.DistributedTrainer(parameters, "sgd", {"learning_rate": RATE})
    features, targets = map(mx.nd.array, data(bps.rank(), bps.size()))
    for _ in range(STEPS):
        with mx.autograd.record():
            w, b, v, c = (parameter.data() for parameter in parameters)
            hidden = mx.nd.tanh(mx.nd.dot(features, w) + b)
            loss = ((mx.nd.dot(hidden, v) + c - targets) ** 2).sum()
        loss.backward()
        trainer.step(len(features))
    return bps, [parameter.data().asnumpy() for parameter in parameters]


def main():
    framework, _, backend = sys.argv[1].partition("-")
    if backend:
        os.environ["KERAS_BACKEND"] = backend
    bps, found = globals()[f"by_{framework}"]()
    apart = max(
        float(np.abs(one - other).max()) for one, other in zip(found, by_numpy(), strict=True)
    )
    moved = max(float(np.abs(one - other).max()) for one, other in zip(found, start(), strict=True))
    assert apart < 1e-5 < 1e-2 < moved, f"apart {apart}, moved {moved}"
    bits = b"".join(np.ascontiguousarray(one).tobytes() for one in found)
    print(f"digest of {bps.size()} ranks: {hashlib.sha256(bits).hexdigest()}", flush=True)
    bps.shutdown()


main()
