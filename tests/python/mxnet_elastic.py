"""Trains with MXNet in a job whose last rank dies on the way, and perhaps is started again.

``test_mxnet_elastic.py`` has ``bpslaunch --elastic`` run it. Who is there at the end must have the
parameters that one process finds by itself in as many steps.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import mxnet as mx
from mxnet import autograd, gluon, nd

import byteps.mxnet as bps
from byteps import _native, _registry
from mxnet_ranks import close, digest, parameters, samples

MODE, STORE = sys.argv[1:]
DEATH, STEPS, TOGETHER, SECONDS = 4, 9, 3, 120
RATE, MOMENTUM = 0.05, {"momentum": 0.9, "wd": 1e-4}


def network(seed):
    mx.random.seed(seed)
    net = gluon.nn.HybridSequential(prefix="small_")
    with net.name_scope():
        net.add(gluon.nn.Conv2D(4, 3, activation="relu"), gluon.nn.BatchNorm())
        net.add(gluon.nn.Dense(8, activation="relu"), gluon.nn.Dense(4))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    net(nd.array(samples()[0][:2]))  # The others may have to send what has its size from now on.
    return net


class OfModule:
    """A Module of that network, with what is asked of a trainer of Gluon's."""

    def __init__(self, net, options, wrap=bps.DistributedOptimizer):
        images, _ = samples()
        scores = net(mx.sym.Variable("data"))
        self.module = mx.mod.Module(mx.sym.SoftmaxOutput(scores, name="softmax"))
        self.module.bind([("data", (24, *images.shape[1:]))], [("softmax_label", (24,))])
        values = {name: param.data() for name, param in net.collect_params().items()}
        self.module.init_params(arg_params=values, aux_params=values, allow_extra=True)
        self.optimizer = mx.optimizer.SGD(rescale_grad=1 / 24, **options)
        self.module.init_optimizer(kvstore=None, optimizer=wrap(self.optimizer))

    @property
    def learning_rate(self):
        return self.optimizer.learning_rate

    def set_learning_rate(self, rate):
        self.optimizer.set_learning_rate(rate)

    def values(self):
        mx.nd.waitall()  # BatchNorm's statistics are handed out as they are before the last step.
        found = {name: array for some in self.module.get_params() for name, array in some.items()}
        return {name: array.asnumpy() for name, array in sorted(found.items())}


def values(net, trainer):
    return trainer.values() if STORE == "module" else parameters(net.collect_params())


def one_step(net, trainer, rate, count):
    images, labels = samples()
    trainer.set_learning_rate(rate)
    if isinstance(trainer, OfModule):
        arrays = [nd.array(images[:24])], [nd.array(labels[:24])]
        trainer.module.forward_backward(mx.io.DataBatch(*arrays))
        trainer.module.update()
        return
    with autograd.record():
        scores = net(nd.array(images[:24]))
        loss = gluon.loss.SoftmaxCrossEntropyLoss()(scores, nd.array(labels[:24]))
    loss.backward()
    trainer.step(24 * count)


def push_later():
    """An exchange that MXNet has yet to run when the job forms again: of that one it is none."""
    large = nd.ones((1200, 1200))
    for _ in range(40):
        large = nd.dot(large, large) / 1200
    bps.push_pull(large, name="later")
    return large


def main():
    bps.init()
    net = network(3 + bps.rank())
    options = {"learning_rate": RATE, **MOMENTUM}
    if STORE == "store":
        trainer = gluon.Trainer(net.collect_params(), "sgd", options, kvstore="dist_byteps")
    elif STORE == "module":
        trainer = OfModule(net, options)
    else:
        trainer = bps.DistributedTrainer(net.collect_params(), "sgd", options)
    held = (trainer.module,) if STORE == "module" else (net, trainer)
    state = bps.elastic.MXNetState(*held, step=0, rates=[], died=False, together=0)
    changes, late, begun = [], [], time.monotonic()

    @state.on_change
    def changed(old, new):
        changes.append((old, new))
        trainer.set_learning_rate(trainer.learning_rate * new / old)
        state.died = state.died or new < old

    def is_over(state):
        return state.together == TOGETHER if MODE == "rejoin" else state.step == STEPS

    @bps.elastic.run
    def train(state):
        while not is_over(state):
            assert time.monotonic() - begun < SECONDS, "nobody came"
            if state.step == DEATH and not state.died and bps.rank() == bps.size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if state.step == DEATH and not state.died and MODE == "redo":
                late.append(push_later())
                bps.live_ranks()
                raise AssertionError("the other rank has died")
            # Its batch is that of all ranks where a store sums.
            count = len(bps.live_ranks()) if STORE == "store" else 1
            state.rates.append(trainer.learning_rate)
            one_step(net, trainer, trainer.learning_rate, count)
            state.step += 1
            state.together += state.died and bps.size() > 1
            if state.step % 3 == 0 or state.died:
                state.commit()

    train(state)
    wanted = {"redo": [(2, 1)], "shrink": [], "rejoin": [(2, 1), (1, 2)]}[MODE]
    # The new one joins as one of two.
    assert changes == wanted or (not changes and MODE == "rejoin"), changes
    if late:
        late[0].wait_to_read()  # What it failed by is known.
        (number,) = _registry.declare([_registry.Tensor("later", "f32", late[0].shape, "average")])
        assert _native.pushes(number) == 0, "it was pushed in another epoch"
    alone = network(3)
    if STORE == "module":
        # Of so many steps as these may be, Gluon's are rounded otherwise.
        local = OfModule(alone, options, wrap=lambda optimizer: optimizer)
    else:
        local = gluon.Trainer(alone.collect_params(), "sgd", options, kvstore=None)
    assert len(state.rates) == state.step
    for rate in state.rates:
        one_step(alone, local, rate, 1)
    found = values(net, trainer)
    assert close(found, values(alone, local))
    # The next step shows the momentum.
    one_step(alone, local, RATE, 1)
    one_step(net, trainer, RATE, len(bps.live_ranks()) if STORE == "store" else 1)
    assert close(values(net, trainer), values(alone, local))
    print(f"went on: {state.step} steps, {digest(found)}", flush=True)
    bps.shutdown()


main()
