"""What tests of byteps.mxnet train: a small network, alone or on the ranks of a job."""

from __future__ import annotations

import hashlib

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd

import byteps.mxnet as bps

BATCH, STEPS = 24, 8
OPTIMIZER = {"learning_rate": 0.05, "momentum": 0.9, "wd": 1e-4}


def on_ranks(function):
    """The function, to be run on a rank: the engine is started before."""

    def started(*arguments):
        bps.init()
        return function(*arguments)

    return started


def samples():
    random = np.random.RandomState(7)
    images = random.rand(96, 1, 8, 8).astype("float32")
    return images, (images.reshape(96, 4, 16).sum(2)).argmax(1).astype("float32")


def network(seed):
    mx.random.seed(seed)
    net = gluon.nn.HybridSequential(prefix="small_")
    with net.name_scope():
        net.add(gluon.nn.Conv2D(8, 3, activation="relu"), gluon.nn.Dense(16, activation="relu"))
        net.add(gluon.nn.Dense(4))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def train(net, trainer, rank, size, divisor):
    """The parameters after some steps on this rank's share of each batch."""
    images, labels = samples()
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    for step in range(STEPS):
        batch = np.random.RandomState(step).permutation(len(images))[:BATCH][rank::size]
        with autograd.record():
            loss = loss_of(net(nd.array(images[batch])), nd.array(labels[batch]))
        loss.backward()
        trainer.step(divisor)
    return parameters(net.collect_params())


def module_fit(rank, size, wrap, store=None):
    mx.random.seed(5)
    images, labels = samples()
    data = mx.sym.Variable("data")
    hidden = mx.sym.FullyConnected(mx.sym.Flatten(data), num_hidden=16, name="hidden")
    last = mx.sym.FullyConnected(
        mx.sym.Activation(hidden, act_type="relu"), num_hidden=4, name="last"
    )
    module = mx.mod.Module(mx.sym.SoftmaxOutput(last, name="softmax"))
    share = mx.io.NDArrayIter(images[rank::size], labels[rank::size], 24 // size)
    module.bind(share.provide_data, share.provide_label)
    module.init_params(mx.init.Xavier())
    # A store sums over the ranks.
    scale = 1 / 24 if store else size / 24
    module.init_optimizer(
        kvstore=store,
        optimizer=wrap(mx.optimizer.SGD(rescale_grad=scale, **OPTIMIZER)),
    )
    for batch in [*share] * 2:
        module.forward_backward(batch)
        module.update()
    return {name: array.asnumpy() for name, array in sorted(module.get_params()[0].items())}


def parameters(params):
    return {name: param.data().asnumpy() for name, param in sorted(params.items())}


def digest(params):
    return hashlib.sha256(b"".join(array.tobytes() for array in params.values())).hexdigest()


def alone():
    """The same training in one process."""
    net = network(3)
    trainer = gluon.Trainer(net.collect_params(), "sgd", OPTIMIZER, kvstore=None)
    return train(net, trainer, 0, 1, BATCH)


def close(one, other):
    return all(np.allclose(one[name], other[name], 1e-5, 1e-5) for name in one)
