"""Trains a Keras model, or TensorFlow's variables, in a job whose last rank dies on the way.

``test_keras_elastic.py`` has ``bpslaunch --elastic redo`` run it. The rank that is left must end
with the parameters that one process finds by itself.
"""

from __future__ import annotations

import os
import signal
import sys

import numpy as np

EPOCHS, DEATH = 6, 3


def by_keras(name):
    os.environ["KERAS_BACKEND"] = name
    import byteps.keras as bps

    bps.init()
    from keras_ranks import data, keras, momentum, network

    model = network(10 + bps.rank(), bps.DistributedOptimizer(momentum()))

    class Dies(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if state.epoch == DEATH and bps.size() > 1 and bps.rank() == bps.size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)

    def changed():
        sizes.append(bps.size())

    sizes = [bps.size()]
    state = bps.elastic.KerasState(model, epoch=0, batch=0)
    state.register_reset_callbacks([changed])

    @bps.elastic.run
    def train(state):
        features, labels = data()
        callbacks = [
            bps.elastic.UpdateEpochStateCallback(state),
            bps.elastic.UpdateBatchStateCallback(state),
            Dies(),
            bps.elastic.CommitStateCallback(state, batches_per_commit=5),
        ]
        # All ranks have the same rows, so the averages are those of one.
        model.fit(
            *(features, labels, 12),
            epochs=EPOCHS - state.epoch,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )

    train(state)
    assert sizes == [2, 1] and state.epoch == EPOCHS and state.batch == 0, (sizes, state.epoch)
    alone = network(10, momentum())
    alone.fit(*data(), 12, epochs=EPOCHS, shuffle=False, verbose=0)
    return bps, model.get_weights(), alone.get_weights()


def by_tensorflow(_):
    import tensorflow as tf

    import byteps.tensorflow as bps

    bps.init()

    def start(rank):
        return [tf.Variable(np.full(4, 1.0 + rank)), tf.Variable(np.full(2, 3.0 + rank))]

    def make_step(variables, distributed):
        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variables[0] ** 2) + tf.reduce_sum(variables[1] ** 3)
            tape = bps.DistributedGradientTape(tape) if distributed else tape
            for variable, one in zip(variables, tape.gradient(loss, variables), strict=True):
                variable.assign_sub(0.01 * one)

        return step

    variables = start(bps.rank())
    step = make_step(variables, True)

    @bps.elastic.run
    def train(state):
        while state.step < EPOCHS:
            if state.step == DEATH and bps.size() > 1 and bps.rank() == bps.size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            step()
            state.step += 1
            if state.step % 2 == 0:
                state.commit()

    state = bps.elastic.TensorFlowState(variables, step=0)
    train(state)
    alone = start(0)
    step = make_step(alone, False)
    for _ in range(EPOCHS):
        step()
    return bps, [one.numpy() for one in variables], [one.numpy() for one in alone]


def main():
    framework, _, backend = sys.argv[1].partition("-")
    bps, found, wanted = globals()[f"by_{framework}"](backend)
    for one, other in zip(found, wanted, strict=True):
        assert np.allclose(one, other, rtol=1e-6, atol=1e-7), (one, other)
    assert bps.size() == 1
    print("went on alone", flush=True)
    bps.shutdown()


main()
