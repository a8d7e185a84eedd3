"""Elastic jobs of MXNet: a rank dies, the other goes on as if alone, and a new one joins."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mxnet", reason="MXNet is not installed in this environment")

import mxnet as mx
from mxnet import autograd, gluon, nd

import byteps.mxnet as bps
from byteps.errors import ConfigError, PeerDiedError
from cluster import Cluster, launch
from mxnet_ranks import close, digest, on_ranks, parameters

PROGRAM = Path(__file__).with_name("mxnet_elastic.py")
SECONDS = 240
#: Through the server: ranks of one host sum among themselves otherwise.
ENVIRONMENT = {"BPS_LOCAL_REDUCE": "0"}


@pytest.mark.parametrize(
    ("mode", "store", "ends"),
    [
        ("redo", "trainer", 1),
        ("redo", "store", 1),
        ("redo", "module", 1),
        ("shrink", "trainer", 1),
        ("rejoin", "trainer", 2),
        ("rejoin", "store", 2),
        ("rejoin", "module", 2),
    ],
)
def test_goes_on(mode, store, ends):
    elastic = "shrink" if mode == "shrink" else "redo"
    options = ["--elastic", elastic, "--min-workers", "1"]
    if mode == "rejoin":
        options += ["--max-workers", "2"]
    program = [sys.executable, str(PROGRAM), mode, store]
    result = launch([*options, *program], timeout=SECONDS, environment=ENVIRONMENT)
    told = re.findall(r"went on: (\d+ steps, \w+)", result.stdout)
    assert len(told) == ends and len(set(told)) == 1, result.stdout[-8000:]
    assert result.returncode == 0, result.stdout[-8000:]


def network():
    mx.random.seed(5)
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(6, in_units=4), gluon.nn.BatchNorm(in_channels=6))
    net.add(gluon.nn.Dense(2, in_units=6))
    net.initialize()
    return net


def step(net, trainer, seed):
    random = np.random.RandomState(seed)
    rows = nd.array(random.rand(8, 4))
    with autograd.record():
        if net[0].weight.dtype == "float16":  # MXNet has no such layers on the CPU.
            arrays = [one.data() for one in net.collect_params().values()]
            factors = [nd.array(random.rand(*one.shape), dtype=one.dtype) for one in arrays]
            pairs = zip(arrays, factors, strict=True)
            loss = sum((one * factor).sum().astype("float32") for one, factor in pairs)
        else:
            loss = (net(rows) ** 2).sum()
    loss.backward()
    trainer.step(8)


def with_scheduler():
    schedule = mx.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.1)
    return mx.optimizer.Adam(learning_rate=0.1, lr_scheduler=schedule)


def goes_back(kind):
    """Three steps that are taken back and made again end where they did."""
    net = network()
    # The optimizer that a program has stays the one that is used.
    optimizer = {
        "adam": with_scheduler(),
        "wrapped": bps.DistributedOptimizer(mx.optimizer.SGD(learning_rate=0.1, momentum=0.9)),
        "float16": mx.optimizer.SGD(learning_rate=0.1, momentum=0.9, multi_precision=True),
        "codec": mx.optimizer.SGD(learning_rate=0.1),
    }[kind]
    if kind == "float16":
        net.cast("float16")
        assert net[0].weight.dtype == "float16"
    if kind == "codec":
        codec = {"compressor": "onebit", "momentum": "nesterov", "momentum_mu": 0.9}
        trainer = bps.DistributedTrainer(net.collect_params(), optimizer, compression_params=codec)
    else:
        trainer = gluon.Trainer(net.collect_params(), optimizer, kvstore=None)
    state = bps.elastic.MXNetState(net.collect_params(), trainer, step=0, notes=[])
    step(net, trainer, 0)
    state.step = 1
    state.save()
    committed = parameters(net.collect_params())

    def three():
        for seed in range(1, 4):
            step(net, trainer, seed)
            state.step += 1
            state.notes.append(seed)
        return parameters(net.collect_params()), trainer.learning_rate

    first, rate = three()
    assert digest(first) != digest(committed)
    if kind == "adam":
        assert optimizer.num_update == 4 and rate < 0.1
    for _ in range(2):
        state.restore()
        assert digest(parameters(net.collect_params())) == digest(committed)
        assert (state.step, state.notes) == (1, [])
        assert trainer._optimizer is optimizer
        if kind == "adam":
            assert optimizer.num_update == 1 and trainer.learning_rate == 0.1
        again, same_rate = three()
        assert same_rate == rate and close(again, first)
        assert digest(again) == digest(first), "bit for bit"


@pytest.fixture(scope="module")
def single():
    with Cluster(1) as cluster:
        yield cluster


@pytest.mark.parametrize("kind", ["adam", "wrapped", "float16", "codec"])
def test_a_state_goes_back_to_what_was_saved(single, kind):
    single.run(on_ranks(goes_back), kind)


def module_of(network, **options):
    """That network as a Module, with an optimizer if options are given."""
    scores = network(mx.sym.Variable("data"))
    loss = mx.sym.MakeLoss((scores**2).sum(), name="loss")
    module = mx.mod.Module(loss, label_names=None)
    module.bind([("data", (8, 4))])
    module.init_params(mx.init.Xavier())
    if options:
        module.init_optimizer(**options)
    return module


def a_module_goes_back():
    """Likewise with a Module, whose optimizer stays the one that the program has."""
    optimizer = with_scheduler()
    wrapped = bps.DistributedOptimizer(optimizer)
    module = module_of(network(), kvstore=None, optimizer=wrapped)

    def step(seed):
        rows = nd.array(np.random.RandomState(seed).rand(8, 4))
        module.forward_backward(mx.io.DataBatch([rows], None))
        module.update()

    def values():
        mx.nd.waitall()  # BatchNorm's statistics are handed out as they are before the last step.
        return {
            name: array.asnumpy() for some in module.get_params() for name, array in some.items()
        }

    state = bps.elastic.MXNetState(module, step=0)
    step(0)
    state.step = 1
    state.save()
    committed = digest(values())

    def three():
        for seed in range(1, 4):
            step(seed)
            state.step += 1
        return digest(values()), optimizer.learning_rate

    first = three()
    assert first[0] != committed and optimizer.num_update == 4
    for _ in range(2):
        state.restore()
        assert digest(values()) == committed and state.step == 1
        assert optimizer.num_update == 1 and optimizer.learning_rate == 0.1
        for gradients in module._exec_group.grad_arrays:
            assert not any(one.asnumpy().any() for one in gradients if one is not None)
        assert three() == first, "bit for bit"


def test_a_module_goes_back_to_what_was_saved(single):
    single.run(on_ranks(a_module_goes_back))


def test_what_cannot_be_done_with_a_module_is_refused():
    state = bps.elastic.MXNetState
    with pytest.raises(ConfigError, match=r"call the module's bind\(\), init_params\(\) and"):
        state(module_of(network()))
    with pytest.raises(ConfigError, match="a Module has no trainer, but 'sgd' was given"):
        state(module_of(network()), "sgd")
    with pytest.raises(ConfigError, match="Module alone has a state, and this is"):
        state(mx.mod.SequentialModule())
    store = mx.kvstore.create("local")
    in_store = module_of(network(), kvstore=store, optimizer="sgd")
    assert in_store._update_on_kvstore
    with pytest.raises(ConfigError, match="runs in a key-value store: pass kvstore=None"):
        state(in_store)


def gradients_that_add_up():
    net = network()
    for param in net.collect_params().values():
        if param.grad_req != "null":
            param.grad_req = "add"
    state = bps.elastic.MXNetState(net)
    with autograd.record():
        loss = net(nd.ones((8, 4))).sum()
    loss.backward()
    state.restore()
    gradients = [one.grad() for one in net.collect_params().values() if one.grad_req == "add"]
    assert len(gradients) == 6 and not any(one.asnumpy().any() for one in gradients)


def test_gradients_of_what_failed_are_not_added_to(single):
    single.run(on_ranks(gradients_that_add_up))


def test_what_cannot_be_sent_is_refused():
    elastic = bps.elastic
    late = gluon.nn.Dense(3)
    late.initialize()
    with pytest.raises(ConfigError, match=r"weight' has no value yet.* or run the network once"):
        elastic.MXNetState(late)
    late(nd.ones((2, 2)))
    elastic.MXNetState(late)
    sparse = gluon.nn.Embedding(5, 2, sparse_grad=True).collect_params()
    sparse.get("rows", shape=(3, 2), stype="row_sparse").initialize()
    with pytest.raises(ConfigError, match="stored as row_sparse"):
        elastic.MXNetState({"rows": sparse.get("rows")})
    for nothing in (None, {}, {"weight": nd.ones((2,))}, gluon.nn.Flatten()):
        with pytest.raises(ConfigError, match="pass a block of Gluon's with parameters"):
            elastic.MXNetState(nothing)
    with pytest.raises(ConfigError, match="trainer is 'sgd', and not one of Gluon's"):
        elastic.MXNetState(late, "sgd")


def commits_what_has_failed():
    net = network()
    state = bps.elastic.MXNetState(net, step=0)
    committed = digest(parameters(net.collect_params()))
    for turn in range(2):
        for name, param in sorted(net.collect_params().items()):
            array = param.data()
            array += 1
            if turn == 0 or bps.rank() == 0:
                bps.push_pull(array, name=name)
            array *= 2
        bps.barrier()
    if bps.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    state.step = 1
    with pytest.raises(PeerDiedError, match="rank 1"):
        state.save()
    state.restore()
    assert state.step == 0 and digest(parameters(net.collect_params())) == committed
    mx.nd.waitall()
    # Nothing is left of the error: other arrays of these names are as good as ever.
    assert bps._engine._tokens, "they stand for the names"
    for token in bps._engine._tokens.values():
        token.wait_to_read()


def test_a_commit_has_nothing_of_what_failed():
    with Cluster(2) as cluster:
        cluster.broken = True
        cluster.start(on_ranks(commits_what_has_failed))
        cluster.results(ranks=[0])
        cluster.kill()
