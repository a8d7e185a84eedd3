"""byteps.mxnet: push_pull as operations of MXNet's engine, and training built on it.

It runs in an environment of its own, since MXNet 1.9.1 needs an older numpy: python/environment
makes that, and tests/run has a step for it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

pytest.importorskip("mxnet", reason="MXNet is not installed in this environment")

import mxnet as mx
from mxnet import gluon, nd

import byteps.mxnet as bps
from byteps.errors import ConfigError, MismatchError, TensorError
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
    parameters,
    samples,
    train,
)

NOTICED_SECONDS = 5
DTYPES = ["float32", "float64", "float16", "uint8", "int8", "int32", "int64"]


@pytest.fixture(scope="module", params=[2, 3])
def job(request):
    """Two ranks with a server, and three with two, whose averages are not exact in binary."""
    with Cluster(request.param, servers=request.param - 1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pair():
    with Cluster(2) as cluster:
        yield cluster


# Values


def every_type_and_shape():
    rank, size = bps.rank(), bps.size()
    for dtype in DTYPES:
        for shape in [(1,), (5, 7, 3)]:
            for is_average in (True, False):
                base = np.arange(np.prod(shape)).reshape(shape) % 9
                array = nd.array(base + rank, dtype=dtype)
                name = f"{dtype}.{shape}.{is_average}"
                bps.byteps_push_pull(array, name=name.encode(), is_average=is_average)
                exact = (base * size + size * (size - 1) / 2).astype(np.float64)
                if is_average:
                    exact /= size
                    exact = exact if dtype.startswith("float") else np.floor(exact)
                found = array.asnumpy()
                assert found.dtype == dtype and found.shape == shape
                assert np.allclose(found.astype(np.float64), exact, 1e-3), (name, found, exact)


def test_every_type_and_shape(job):
    job.run(on_ranks(every_type_and_shape))


def in_the_order_of_the_engine():
    size = bps.size()
    total = size * (size - 1) / 2
    chain, expected = nd.zeros((1000,)) + bps.rank(), float(bps.rank())
    for step in range(5):
        chain += 10
        bps.push_pull(chain, name="chain", is_average=False)
        chain *= 2
        # After the first exchange all ranks have the same.
        expected = (total + 10 * size if step == 0 else (expected + 10) * size) * 2
    arrays = [nd.ones((500,)) * (number + bps.rank()) for number in range(300)]
    for number, array in enumerate(arrays):
        bps.push_pull(array, name=f"many.{number}", priority=-number, is_average=False)
    assert chain.asnumpy()[0] == expected, (chain.asnumpy()[0], expected)
    for number, array in enumerate(arrays):
        assert (array.asnumpy() == number * size + total).all(), number
    # Two arrays by one name, and arrays without one: in the order of the calls on every rank.
    for _ in range(20):
        one, two = nd.ones((10,)), nd.ones((10,)) * 2
        if bps.rank() == 0:
            one += nd.dot(nd.ones((300, 300)), nd.ones((300, 300)))[0, :10] * 0
        for name in ("same", None):
            bps.push_pull(one, name=name, is_average=True)
            bps.push_pull(two, name=name, is_average=True)
        assert one.asnumpy()[0] == 1 and two.asnumpy()[0] == 2


def test_exchanges_keep_the_order_of_the_engine(job):
    job.run(on_ranks(in_the_order_of_the_engine))


def arrays_are_dropped():
    for number in range(50):
        array = nd.ones((100_000,))
        bps.push_pull(array, name=f"dropped.{number}")
        del array
    mx.nd.waitall()


def test_arrays_may_be_dropped_under_way(pair):
    pair.run(on_ranks(arrays_are_dropped))


def broadcasts():
    rank = bps.rank()
    arrays = {"b": nd.zeros((3,)) + rank, "a": nd.zeros((2, 2), dtype="int32") + rank}
    bps.broadcast_parameters(arrays, root_rank=1)
    assert all((array.asnumpy() == 1).all() for array in arrays.values()), arrays
    net = network(rank)
    bps.broadcast_parameters(net.collect_params())
    net(nd.array(samples()[0][:2])).wait_to_read()
    late = digest(parameters(net.collect_params()))
    for param in net.collect_params().values():
        param.set_data(param.data() + rank)
    bps.broadcast_parameters(net.collect_params())
    assert digest(parameters(net.collect_params())) == late
    return digest(parameters(net.collect_params()))


def stores():
    store, rank, size = mx.kv.create("dist_byteps"), bps.rank(), bps.size()
    assert (store.rank, store.num_workers, store.type) == (rank, size, "dist_byteps")
    value, outs = nd.ones((4,)) * (rank + 1), [nd.zeros((4,)), nd.zeros((4,))]
    store.broadcast("weight", value, outs)
    assert all((out.asnumpy() == 1).all() for out in outs) and value.asnumpy()[0] == rank + 1
    store.pushpull("gradient", [value, value], outs)
    assert all((out.asnumpy() == size * (size + 1)).all() for out in outs)
    assert value.asnumpy()[0] == rank + 1


def test_a_store_by_itself(job):
    job.run(on_ranks(stores))


def twice_broadcast():
    net = network(bps.rank())
    bps.broadcast_parameters(net.collect_params())
    bps.DistributedTrainer(net.collect_params(), "sgd")
    net(nd.array(samples()[0][:2])).wait_to_read()
    return digest(parameters(net.collect_params()))


def test_what_is_broadcast_twice(pair):
    assert len(set(pair.run(on_ranks(twice_broadcast)))) == 1


def test_broadcast_parameters(job):
    assert len(set(job.run(on_ranks(broadcasts)))) == 1


# Training


def with_trainer(how):
    rank, size = bps.rank(), bps.size()
    # A trainer of ours broadcasts before the first pass, and a store of MXNet's trainer after it.
    net = network(3 + (rank if how == "trainer" else 0))
    params = net.collect_params()
    if how == "trainer":
        trainer, divisor = bps.DistributedTrainer(params, "sgd", OPTIMIZER), BATCH // size
    else:
        store = mx.kv.create("byteps") if how == "store" else "dist_byteps"
        trainer, divisor = gluon.Trainer(params, "sgd", OPTIMIZER, kvstore=store), BATCH
    return train(net, trainer, rank, size, divisor)


@pytest.mark.parametrize("how", ["trainer", "store", "store by name"])
def test_trainers_equal_one_process(job, how):
    trained = job.run(on_ranks(with_trainer), how)
    assert len(set(map(digest, trained))) == 1
    assert close(trained[0], alone())


def half_precision():
    # MXNet has no products of matrices in float16 on CPUs: a scale for each element.
    weights = gluon.Parameter("weights", shape=(1000,), dtype="float16")
    weights.initialize(mx.init.Constant(bps.rank() + 1))
    options = {"learning_rate": 0.05, "momentum": 0.5, "multi_precision": True}
    trainer = bps.DistributedTrainer([weights], "sgd", options)
    assert (weights.data().asnumpy() == 1).all()
    # Each rank would have another target; the ranks together have the mean.
    target = nd.ones((1000,), dtype="float16") * (3 + bps.rank())
    for _ in range(40):
        with mx.autograd.record():
            loss = (weights.data() - target) ** 2
        loss.backward()
        trainer.step(1)
    found = weights.data().asnumpy()
    assert found.dtype == np.float16
    assert np.allclose(found, 3 + (bps.size() - 1) / 2, atol=2e-2), found[:4]
    return found.tobytes()


def test_half_precision_with_master_weights(job):
    assert len(set(job.run(on_ranks(half_precision)))) == 1


def module_on_ranks():
    return module_fit(bps.rank(), bps.size(), bps.DistributedOptimizer)


def test_module_with_distributed_optimizer(job):
    trained = job.run(on_ranks(module_on_ranks))
    assert len(set(map(digest, trained))) == 1
    assert close(trained[0], module_fit(0, 1, lambda optimizer: optimizer))


def test_a_distributed_optimizer_is_what_it_wraps():
    optimizer = bps.DistributedOptimizer(mx.optimizer.SGD(learning_rate=0.1, momentum=0.9))
    optimizer.set_learning_rate(0.2)
    optimizer.rescale_grad = 0.5
    again = pickle.loads(pickle.dumps(optimizer))
    for one in (optimizer, again):
        assert (one.learning_rate, one.momentum, one.rescale_grad) == (0.2, 0.9, 0.5)
        assert isinstance(one, mx.optimizer.Optimizer)
    with pytest.raises(ConfigError, match="wants an optimizer"):
        bps.DistributedOptimizer("sgd")


def encoded():
    net = gluon.nn.Dense(256, in_units=256, prefix="wide_")
    net.initialize(mx.init.Xavier())
    params = {"compressor": "onebit", "ef": "vanilla", "scaling": True}
    trainer = bps.DistributedTrainer(
        net.collect_params(), "sgd", {"learning_rate": 0.1}, compression_params=params
    )
    target = nd.array(np.random.RandomState(1).rand(256, 256) - 0.5)
    inputs = nd.array(np.random.RandomState(bps.rank()).rand(64, 256))
    losses = []
    for step in range(30):
        if step == 20:
            trainer.set_learning_rate(0.05)
        with mx.autograd.record():
            loss = ((net(inputs) - nd.dot(inputs, target)) ** 2).mean()
        loss.backward()
        trainer.step(1)
        losses.append(float(loss.asscalar()))
    assert losses[-1] < losses[0] / 2, losses
    # The last step's gradients may be on their way yet, and are encoded then: it waits for them.
    early, _, kept = bps.compression_state_dict(), nd.waitall(), bps.compression_state_dict()
    assert all((early[name]["residue"] == kept[name]["residue"]).all() for name in kept)
    sizes = {name: values["residue"].size for name, values in kept.items()}
    assert sorted(sizes.values()) == [256, 256 * 256], sizes
    bps.load_compression_state_dict(kept)
    again = bps.compression_state_dict()
    assert all((again[name]["residue"] == kept[name]["residue"]).all() for name in kept)
    return digest(parameters(net.collect_params()))


def with_momentum():
    """The codec has it in the place of the optimizer, and small arrays have it too."""
    nets = []
    for name in ("mine_", "alone_"):
        net = gluon.nn.Dense(16, in_units=32, prefix=name)
        net.initialize(mx.init.One())
        nets.append(net)
    mine, alone = (net.collect_params() for net in nets)
    params = {"compressor": "onebit", "momentum": "nesterov"}
    how = {"learning_rate": 0.01, "momentum": 0.5}
    trainer = bps.DistributedTrainer(mine, "sgd", how, compression_params=params)
    wanted = gluon.Trainer(alone, "nag", how, kvstore=None)
    for step in range(6):
        if step == 3:
            # As a checkpoint has it.
            kept = bps.compression_state_dict()
            assert sorted(one["velocity"].size for one in kept.values()) == [16, 512]
            trainer._velocities.clear()
            bps.load_compression_state_dict(kept)
        for net, by, ranks in ((nets[0], trainer, [bps.rank()]), (nets[1], wanted, [0, 1])):
            with mx.autograd.record():
                losses = []
                for rank in ranks:
                    inputs = nd.array(np.random.RandomState(10 * step + rank).rand(8, 32))
                    losses.append(((net(inputs) - 1) ** 2).mean() / len(ranks))
                loss = sum(losses[1:], losses[0])
            loss.backward()
            by.step(1)
    for one, other in zip(mine.values(), alone.values(), strict=True):
        np.testing.assert_allclose(one.data().asnumpy(), other.data().asnumpy(), rtol=1e-4)


def test_a_codecs_momentum_is_the_optimizers(pair):
    pair.run(on_ranks(with_momentum))


def test_gradients_may_be_encoded():
    # Nothing is encoded within a host, and two ranks without a common reduction are two hosts.
    with Cluster(2, environment={"BYTEPS_MIN_COMPRESS_BYTES": "0"}) as cluster:
        assert len(set(cluster.run(on_ranks(encoded)))) == 1


# What cannot be


def refusals():
    bad = {
        "a list": [1.0],
        "sparse": nd.ones((4, 2)).tostype("row_sparse"),
    }
    for name, array in bad.items():
        with pytest.raises(TensorError, match=f"'{name}'"):
            bps.push_pull(array, name=name)
    net = network(1)
    net(nd.array(samples()[0][:2])).wait_to_read()
    params = net.collect_params()
    with pytest.raises(ConfigError, match="train each rank by itself"):
        trainer = gluon.Trainer(params, "sgd", kvstore="byteps")
        trainer._init_kvstore()
    for name in ("dist_sync", "dist_async"):
        with pytest.raises(ConfigError, match="MXNet's own parameter server"):
            mx.kv.create(name)
    with pytest.raises(ConfigError, match="make it with momentum"):
        bps.DistributedTrainer(
            params,
            mx.optimizer.SGD(momentum=0.5),
            compression_params={"compressor": "topk", "momentum": "nesterov"},
        )
    with pytest.warns(UserWarning, match="averages gradients itself"):
        bps.DistributedTrainer(params, bps.DistributedOptimizer(mx.optimizer.SGD()))
    # The rank that comes first learns of it from the exchange.
    array = nd.ones((3 + bps.rank(),))
    with pytest.raises((MismatchError, mx.MXNetError), match="declare it alike on all ranks"):
        bps.push_pull(array, name="another shape on each rank")
        array.wait_to_read()


def test_refusals(pair):
    pair.run(on_ranks(refusals))


def test_the_scheduler_knows_a_process_of_mxnets_own():
    """Which imports nothing of this package, and waits for a scheduler of MXNet's."""
    launcher = [sys.executable, "-m", "byteps.launch", "--local", "2"]
    waits = "import mxnet; mxnet.kv.create('dist_sync')"
    process = subprocess.Popen(
        [*launcher, sys.executable, "-c", waits],
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    timer = threading.Timer(90, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    seen = []
    try:
        for line in process.stdout:
            seen.append(line)
            if "[scheduler]" in line and "kvstore 'dist_sync'" in line:
                break
        else:
            pytest.fail("".join(seen))
    finally:
        timer.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert "use 'dist_byteps'" in seen[-1], seen[-1]


def a_layout_of_mxnet():
    convolution = gluon.nn.Conv2D(64, 3, in_channels=64)
    convolution.initialize(mx.init.One())
    # As oneDNN lays it out.
    result = convolution(nd.ones((8, 64, 16, 16)))
    result.wait_to_read()
    bps.push_pull(result, name="result")
    with pytest.raises(mx.MXNetError, match="TensorError: MXNet does not lend the memory"):
        result.wait_to_read()
    plain = nd.empty((8, 64, 14, 14))
    convolution(nd.ones((8, 64, 16, 16))).copyto(plain)
    before = plain.asnumpy()
    bps.push_pull(plain, name="result", is_average=False)
    assert np.allclose(plain.asnumpy(), 2 * before, atol=1e-5)
    # The engine goes on.
    ones = nd.ones((3,))
    bps.push_pull(ones, name="after")
    assert ones.asnumpy()[0] == 1


def test_a_layout_of_mxnet_is_an_error(pair):
    pair.run(on_ranks(a_layout_of_mxnet))


def raises_in_a_step():
    """An error between an exchange and its use, on all ranks: the next step works."""
    weights = gluon.Parameter("weights", shape=(100,))
    weights.initialize(mx.init.One())
    trainer = bps.DistributedTrainer([weights], "sgd", {"learning_rate": 1.0})

    def step(breaks):
        with mx.autograd.record():
            loss = weights.data() * (bps.rank() + 1)
        loss.backward()
        bps.push_pull(nd.ones((10,)) * bps.rank(), name="beside", is_average=False)
        if breaks:
            raise ZeroDivisionError("in a step")
        trainer.step(1)

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            step(True)
        step(False)
    mean = (bps.size() + 1) / 2
    assert np.allclose(weights.data().asnumpy(), 1 - 2 * mean)


def test_an_error_in_a_step_leaves_the_next_one_whole(pair):
    pair.run(on_ranks(raises_in_a_step))


def in_another_order():
    """Each rank calls in an order of its own: all are under way together."""
    arrays = {name: nd.ones((50,)) * bps.rank() for name in ("one", "two", "three")}
    for name in sorted(arrays, reverse=bps.rank() == 0):
        bps.push_pull(arrays[name], name=f"order.{name}", is_average=False)
    for array in arrays.values():
        assert (array.asnumpy() == bps.size() * (bps.size() - 1) / 2).all()


def test_the_order_of_names_does_not_matter(job):
    job.run(on_ranks(in_another_order))


# The life of a job


def joins(name):
    """A rank without data has never heard of what the others exchange."""
    rank, size = bps.rank(), bps.size()
    if rank == size - 1:
        last = bps.join()
    else:
        array = nd.full((4,), 6.0)
        for _ in range(2):
            mean = array.copy()
            bps.push_pull(mean, name=f"{name}.mean")
            assert np.allclose(mean.asnumpy(), np.full(4, 6 * (size - 1) / size))
        params = {"weight": nd.full((3,), 5.0 + rank)}
        bps.broadcast_parameters(params)
        assert np.array_equal(params["weight"].asnumpy(), np.full(3, 5.0))
        last = bps.join()
    assert last != size - 1 or size == 1
    # All take part again.
    after = nd.ones((2,))
    bps.push_pull(after, name=f"{name}.after", is_average=False)
    assert np.array_equal(after.asnumpy(), np.full(2, size))


def test_a_rank_without_data_joins(job):
    job.run(on_ranks(joins), "joined")


def suspends():
    array = nd.ones((1000,)) * bps.rank()
    bps.push_pull(array, name="kept")
    bps.suspend()
    bps.resume(num_workers=1, num_servers=1)  # Hosts with workers, of which there is one.
    bps.push_pull(array, name="kept", is_average=False)
    assert (array.asnumpy() == 1).all()


def test_suspend_and_resume(pair):
    pair.run(on_ranks(suspends))


def waits_for_a_rank_that_dies(victim):
    bps.push_pull(nd.ones((10,)), name="before")
    mx.nd.waitall()
    if bps.rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    array = nd.ones((10,))
    bps.push_pull(array, name="before")
    with pytest.raises(mx.MXNetError, match=r"PeerDiedError.*rank 1"):
        array.wait_to_read()
    return time.monotonic() - begun


def test_a_killed_rank_is_an_error_of_mxnet():
    with Cluster(2) as cluster:
        cluster.start(on_ranks(waits_for_a_rank_that_dies), 1)
        (waited,) = cluster.results(timeout=60, ranks=[0])
        cluster.broken = True
        cluster.kill()
    assert waited < NOTICED_SECONDS
