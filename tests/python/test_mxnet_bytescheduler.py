"""Programs for ByteScheduler on MXNet: its stores, and training with them."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest

pytest.importorskip("mxnet", reason="MXNet is not installed in this environment")

import mxnet as mx
from mxnet import gluon, nd

import byteps.mxnet as bps
from byteps.errors import ConfigError, UsageError
from cluster import Cluster, clean_environment
from mxnet_ranks import (
    BATCH,
    OPTIMIZER,
    alone,
    close,
    digest,
    module_fit,
    network,
    on_ranks,
    samples,
    train,
)


@pytest.fixture(scope="module")
def pair():
    with Cluster(2) as cluster:
        yield cluster


@contextlib.contextmanager
def bytescheduler():
    """MXNet's names of stores are ByteScheduler's here, and refused again by later tests' ranks."""
    registry = mx.kvstore.KVStoreBase.kv_registry
    before = dict(registry)
    from bytescheduler.mxnet import kvstore

    registry.update(kvstore._STORES)
    try:
        yield kvstore.ScheduledKVStore
    finally:
        registry.clear()
        registry.update(before)


def scheduled(how):
    """As programs for ByteScheduler: MXNet's store of several workers, wrapped."""
    rank, size = bps.rank(), bps.size()
    with bytescheduler() as ScheduledKVStore:
        store = ScheduledKVStore(mx.kvstore.create("dist_sync"))
    assert (store.type, store.rank, store.num_workers) == ("dist_sync", rank, size)
    if how == "module":
        return module_fit(rank, size, lambda optimizer: optimizer, store)
    net = network(3 + rank)
    update = {"updates in the store": True, "updates by the trainer": False}[how]
    params = net.collect_params()
    # Weights get their shapes, and the store the root's, before the first backward pass.
    net(nd.array(samples()[0][:2])).wait_to_read()
    bps.broadcast_parameters(params)
    trainer = gluon.Trainer(params, "sgd", OPTIMIZER, kvstore=store, update_on_kvstore=update)
    return train(net, trainer, rank, size, BATCH)


@pytest.mark.parametrize("how", ["updates in the store", "updates by the trainer", "module"])
def test_bytescheduler_equals_one_process(pair, how):
    trained = pair.run(on_ranks(scheduled), how)
    assert len(set(map(digest, trained))) == 1
    assert close(trained[0], module_fit(0, 1, lambda it: it) if how == "module" else alone())


def a_scheduled_store(path):
    rank, size = bps.rank(), bps.size()
    with bytescheduler() as ScheduledKVStore:
        store = ScheduledKVStore(mx.kvstore.create("dist_device_sync"))
    value, out = nd.ones((3,)) * (rank + 1), nd.zeros((3,))
    with pytest.raises(UsageError, match="call init"):
        store.push("before", value)
    store.init(["a", "b"], [value, value * 2])
    store.pull("b", out)
    assert out.asnumpy().tolist() == [2, 2, 2], "what rank 0 has"
    with pytest.raises(UsageError, match="initialized before"):
        store.init("a", value)
    # Without an optimizer a key is the last sum; arrays of several devices are summed before.
    store.push("a", [value, value])
    value[:] = 0
    store.pull("a", [out])
    assert out.asnumpy()[0] == size * (size + 1)
    with pytest.raises(UsageError, match="set_optimizer"):
        store.save_optimizer_states(path)
    store.set_optimizer(mx.optimizer.SGD(learning_rate=1.0, momentum=0.5))
    store.pushpull(["b"], [nd.ones((3,))], out=[out])
    assert out.asnumpy()[0] == 2 - size
    store.save_optimizer_states(f"{path}.{rank}")
    store.load_optimizer_states(f"{path}.{rank}")
    store.pushpull("b", nd.ones((3,)), out=out)
    assert out.asnumpy()[0] == 2 - size - 1.5 * size, "the momentum was kept"
    with pytest.raises(ConfigError, match="dense values only"):
        store.row_sparse_pull("a", out=out)
    with pytest.raises(ConfigError, match="takes no compression_params"):
        store.set_gradient_compression({"type": "2bit"})
    with pytest.raises(ConfigError, match="python -m bytescheduler"):
        ScheduledKVStore(mx.kvstore.create("local"))


def test_a_scheduled_store_by_itself(pair, tmp_path):
    pair.run(on_ranks(a_scheduled_store), str(tmp_path / "states"))


def test_bytescheduler_runs_a_program_unchanged(tmp_path):
    """Which makes MXNet's store before it imports anything of ByteScheduler."""
    program = tmp_path / "train.py"
    program.write_text(
        "import mxnet as mx\n"
        "kv = mx.kvstore.create('dist_sync')\n"
        "from bytescheduler.mxnet.kvstore import ScheduledKVStore\n"
        "kv = ScheduledKVStore(kv)\n"
        "kv.init(0, mx.nd.zeros((2,)))\n"
        "kv.push(0, mx.nd.ones((2,)) * (kv.rank + 1))\n"
        "out = mx.nd.zeros((2,))\n"
        "kv.pull(0, out)\n"
        "print('sum', out.asnumpy()[0], 'of', kv.num_workers, flush=True)\n"
    )
    launcher = [sys.executable, "-m", "byteps.launch", "--local", "2"]
    result = subprocess.run(
        [*launcher, sys.executable, "-m", "bytescheduler", str(program)],
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("sum 3.0 of 2") == 2, result.stdout
