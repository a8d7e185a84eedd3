"""byteps.mxnet by Horovod's names: ``import byteps.mxnet as hvd``."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("mxnet", reason="MXNet is not installed in this environment")

import mxnet as mx
from mxnet import gluon, nd

import byteps.mxnet as hvd
from byteps.errors import ConfigError, MismatchError, TensorError, UsageError
from cluster import Cluster, clean_environment
from mxnet_ranks import (
    BATCH,
    OPTIMIZER,
    alone,
    close,
    digest,
    network,
    on_ranks,
    train,
)


@pytest.fixture(scope="module", params=[2, 3])
def job(request):
    with Cluster(request.param, servers=request.param - 1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def trio():
    with Cluster(3) as cluster:
        yield cluster


# Reductions


def reduces():
    rank, size = hvd.rank(), hvd.size()
    total = size * (size + 1) / 2
    own = nd.arange(6).reshape((2, 3)) + 1 + rank
    before, base = own.asnumpy(), np.arange(6).reshape(2, 3)
    mean = hvd.allreduce(own, name="mean")
    assert np.allclose(mean.asnumpy(), base + total / size)
    assert np.array_equal(own.asnumpy(), before), "a new array"
    for options in ({"average": False}, {"op": hvd.Sum}):
        found = hvd.allreduce(own, name="sum", **options).asnumpy()
        assert np.allclose(found, base * size + total), options
    assert np.array_equal(hvd.allreduce(own, op=hvd.Max).asnumpy(), base + size)
    assert np.array_equal(hvd.allreduce(own, op=hvd.Min).asnumpy(), base + 1)
    scaled = hvd.allreduce(own, False, "scaled", prescale_factor=0.5, postscale_factor=4.0)
    assert np.allclose(scaled.asnumpy(), 2 * (base * size + total))
    assert hvd.allreduce_(own, name="in place") is own
    assert np.allclose(own.asnumpy(), base + total / size)
    # The scales belong to the exchange: what comes behind it uses the result.
    chain = nd.ones((100,))
    for _ in range(5):
        hvd.allreduce_(chain, False, "chain", prescale_factor=0.5, postscale_factor=2.0)
        chain /= size
    assert np.allclose(chain.asnumpy(), 1)
    whole = nd.ones((3,), dtype="int32") * (rank + 1)
    assert hvd.allreduce(whole, average=False).asnumpy().tolist() == [total] * 3
    group = [nd.ones((number + 1,)) * (rank + number) for number in range(4)]
    results = hvd.grouped_allreduce(group, average=False, name="group")
    for number, one in enumerate(results):
        assert one.shape == (number + 1,)
        assert np.allclose(one.asnumpy(), total - size + size * number)
        assert group[number].asnumpy()[0] == rank + number
    same = hvd.grouped_allreduce_(group, name=["a", "b", "c", "d"])
    assert all(one is other for one, other in zip(same, group, strict=True))
    assert np.allclose(group[3].asnumpy(), 3 + (size - 1) / 2)
    assert hvd.grouped_allreduce([]) == []
    # While autograd records, which refuses changes in place.
    with mx.autograd.record():
        recorded = hvd.allreduce_(nd.ones((2,)), name="recorded", postscale_factor=3.0)
    assert np.allclose(recorded.asnumpy(), 3)


def test_allreduce(job):
    job.run(on_ranks(reduces))


def broadcasts():
    rank = hvd.rank()
    own = nd.zeros((2, 2)) + rank
    assert (hvd.broadcast(own, 1, name="one").asnumpy() == 1).all()
    assert (own.asnumpy() == rank).all()
    assert hvd.broadcast_(own, 0) is own and (own.asnumpy() == 0).all()
    # Of a layout of MXNet's own, as weights of convolutions have once they were used.
    convolution = gluon.nn.Conv2D(64, 3, in_channels=64)
    convolution.initialize(mx.init.Constant(rank + 1))
    convolution(nd.ones((8, 64, 16, 16))).wait_to_read()
    hvd.broadcast_(convolution.weight.data(), 1, name="weight")
    assert (convolution.weight.data().asnumpy() == 2).all()
    result = hvd.allreduce(convolution(nd.ones((1, 64, 8, 8))), name="result")
    assert result.asnumpy().std() < 1e-3
    assert hvd.broadcast_object({"rank": rank}, 1) == {"rank": 1}
    assert hvd.allgather_object(rank) == list(range(hvd.size()))
    # Two models whose parameters have other shapes, without a prefix, and with one.
    for columns in (3, 4):
        net = gluon.nn.Dense(2, in_units=columns)
        net.initialize(mx.init.Constant(rank))
        hvd.broadcast_parameters(net.collect_params(), root_rank=1)
        assert (net.weight.data().asnumpy() == 1).all()
        hvd.broadcast_parameters(net.collect_params(), prefix=f"model {columns}.")
        assert (net.weight.data().asnumpy() == 1).all()


def test_broadcast(job):
    job.run(on_ranks(broadcasts))


# Gathering


def gathers():
    rank, size = hvd.rank(), hvd.size()
    for dtype in ("float32", "float16", "int64", "uint8", "bool"):
        own = nd.ones((rank + 1, 2)).astype(dtype) * (1 if dtype == "bool" else rank + 1)
        for _ in range(2):
            found = hvd.allgather(own.astype(dtype), name=f"gather {dtype}")
            assert found.dtype == np.dtype(dtype) and found.shape == (size * (size + 1) // 2, 2)
            wanted = np.concatenate([np.full((one, 2), one) for one in range(1, size + 1)])
            wanted = wanted.astype(dtype)
            assert np.array_equal(found.asnumpy(), wanted), dtype
    # Another number of rows under the same name, and several arrays at once.
    for rows in (1, 300):
        found = hvd.allgather(nd.full((rows, 3), rank), name="rows")
        assert found.asnumpy()[:, 0].tolist() == [one for one in range(size) for _ in range(rows)]
    first, second = hvd.grouped_allgather([nd.full((2,), rank), nd.full((1, 2), -rank)])
    assert first.asnumpy().tolist() == [one for one in range(size) for _ in "ab"]
    assert second.asnumpy()[:, 1].tolist() == [-one for one in range(size)]
    # Behind an exchange of the same array that is under way.
    array = nd.ones((2,)) * rank
    hvd.allreduce_(array, average=False, name="before")
    assert np.allclose(hvd.allgather(array).asnumpy(), size * (size - 1) / 2)


def test_allgather(job):
    job.run(on_ranks(gathers))


def deals_out():
    rank, size = hvd.rank(), hvd.size()
    own = nd.array([[rank, place] for place in range(size) for _ in "ab"])
    found = hvd.alltoall(own).asnumpy()
    assert found.tolist() == [[other, rank] for other in range(size) for _ in "ab"]
    # Rank r has r + 1 rows for each other one and none for itself.
    splits = [0 if place == rank else rank + 1 for place in range(size)]
    own = nd.array([[rank]] * sum(splits), dtype="int32")
    for form in (splits, nd.array(splits, dtype="int64")):
        found, received = hvd.alltoall(own, form, name="uneven")
        counts = [0 if other == rank else other + 1 for other in range(size)]
        assert received.asnumpy().tolist() == counts and received.dtype == np.int32
        rows = [other for other in range(size) if other != rank for _ in range(other + 1)]
        assert found.asnumpy()[:, 0].tolist() == rows and found.dtype == np.int32
    # All rows go to rank 0.
    found, received = hvd.alltoall(nd.ones((2, 3)), [2] + [0] * (size - 1))
    if rank == 0:
        assert found.shape == (2 * size, 3)
    assert received.asnumpy().tolist() == [2 if rank == 0 else 0] * size
    rows = nd.arange(size + 1).reshape((size + 1, 1)) * (rank + 1)
    part = hvd.reducescatter(rows, op=hvd.Sum)
    wanted = np.arange(size + 1) * size * (size + 1) / 2
    begin = 0 if rank == 0 else rank + 1
    assert np.allclose(part.asnumpy()[:, 0], wanted[begin : rank + 2])
    (mean,) = hvd.grouped_reducescatter([rows], name="part", postscale_factor=2.0)
    assert np.allclose(mean.asnumpy()[:, 0], 2 * wanted[begin : rank + 2] / size)


def test_alltoall_and_reducescatter(job):
    job.run(on_ranks(deals_out))


# What cannot be


def refusals():
    rank, size = hvd.rank(), hvd.size()
    ones = nd.ones((2,))
    with pytest.raises(ConfigError, match=r"MXNet's do not"):
        hvd.allreduce(ones, op=hvd.Adasum)
    with pytest.raises(ConfigError, match="op or average"):
        hvd.allreduce(ones, average=True, op=hvd.Sum)
    with pytest.raises(ConfigError, match="3 names for 1 arrays"):
        hvd.grouped_allreduce([ones], name=["a", "b", "c"])
    with pytest.raises(TensorError, match="'sparse' is stored as row_sparse"):
        hvd.allreduce(nd.ones((4, 2)).tostype("row_sparse"), name="sparse")
    with pytest.raises(TensorError, match="whole numbers have no fractions"):
        hvd.allreduce(nd.ones((2,), dtype="int32"), prescale_factor=0.5)
    with pytest.raises(ConfigError, match="the ranks are 0 to"):
        hvd.broadcast(ones, size)
    with pytest.raises(ConfigError, match="the ranks are 0 to"):
        hvd.broadcast_parameters({"a": ones}, root_rank=-1)
    with pytest.raises(TensorError, match="each rank needs one"):
        hvd.reducescatter(nd.ones((1, 2)))
    with pytest.raises(MismatchError, match="only dimension 0 may differ"):
        hvd.allgather(nd.ones((2, 2 + rank)), name="columns")
    # One rank has what cannot be sent, and the others hear of it.
    wrong = TensorError if rank == 0 else MismatchError
    with pytest.raises(wrong):
        hvd.allgather(ones.tostype("row_sparse") if rank == 0 else ones, name="dense here")
    with pytest.raises(ConfigError, match="are not divided by"):
        hvd.alltoall(nd.ones((size + 1,)))
    with pytest.raises(ConfigError, match="one number for each rank"):
        hvd.alltoall(ones, [5] * size)
    with pytest.raises(ConfigError, match="whole numbers are wanted"):
        hvd.alltoall(ones, nd.array([1.0] * size))
    weight = gluon.Parameter("weight", shape=(2,))
    weight.initialize()
    for options, said in [
        ({"gradient_predivide_factor": 0}, "above 0"),
        ({"num_groups": -1}, "0 or more"),
        ({"process_set": 3}, "a ProcessSet is wanted"),
    ]:
        with pytest.raises(ConfigError, match=said):
            hvd.DistributedOptimizer(mx.optimizer.SGD(), **options)
        with pytest.raises(ConfigError, match=said):
            hvd.DistributedTrainer([weight], "sgd", **options)
    with pytest.raises(ConfigError, match="are given by name here"):
        hvd.DistributedTrainer([weight], "sgd", None, hvd.Compression.fp16)
    with pytest.raises(ConfigError, match="not both"):
        both = {"compression": hvd.Compression.fp16, "compression_params": {"fp16": True}}
        hvd.DistributedTrainer([weight], "sgd", **both)
    # All goes on.
    assert hvd.allgather(nd.ones((1,)), name="columns").shape == (size,)


def test_refusals(job):
    job.run(on_ranks(refusals))


def joins():
    """A rank that has joined gathers no rows, and an alltoall with it is an error."""
    rank, size = hvd.rank(), hvd.size()
    if rank < size - 1:
        assert hvd.allgather(nd.ones((2, 3)), name="joined").shape == (2 * (size - 1), 3)
        assert hvd.allreduce(nd.ones((2,)), name="sum", op=hvd.Sum).asnumpy()[0] == size - 1
        with pytest.raises(UsageError, match=rf"rank {size - 1} has called join"):
            hvd.alltoall(nd.ones((size,)), name="joined")
    hvd.join()
    assert hvd.allgather(nd.ones((2, 3)), name="joined").shape == (2 * size, 3)


def test_a_rank_that_has_joined(job):
    job.run(on_ranks(joins))


# Process sets


def some_ranks():
    rank = hvd.rank()
    ends = hvd.add_process_set(hvd.ProcessSet([0, 2]))
    own = nd.ones((2,)) * rank
    middle = {"learning_rate": 1.0}
    weight = gluon.Parameter("weight", shape=(2,))
    weight.initialize(mx.init.Constant(rank))
    trainer = hvd.DistributedTrainer([weight], "sgd", middle, root_rank=1, process_set=ends)
    assert weight.data().asnumpy()[0] == (1 if rank == 1 else 0), "the first of the set"
    with mx.autograd.record():
        loss = weight.data() * (rank + 1)
    loss.backward()
    trainer.step(1)
    wanted = 1 - 2 if rank == 1 else 0 - (1 + 3) / 2
    assert weight.data().asnumpy()[0] == wanted, "others train by themselves"
    # All ranks may use a name that the set uses.
    assert hvd.allreduce(own, name="shared").asnumpy()[0] == 1
    if rank == 1:
        with pytest.raises(ConfigError, match="rank 1 is not in"):
            hvd.allreduce(own, process_set=ends)
        assert hvd.allreduce(nd.ones((2,)), op=hvd.Sum).asnumpy()[0] == 3
        return
    assert hvd.allreduce(own, False, "shared", process_set=ends).asnumpy()[0] == 2
    assert hvd.allreduce(own, process_set=ends).asnumpy()[0] == 1
    assert hvd.broadcast(own, 2, process_set=ends).asnumpy()[0] == 2
    with pytest.raises(ConfigError, match="the root is one of them"):
        hvd.broadcast(own, 1, process_set=ends)
    assert hvd.allgather(own, process_set=ends).asnumpy().tolist() == [0, 0, 2, 2]
    assert hvd.alltoall(own, process_set=ends).asnumpy().tolist() == [0, 2]
    assert hvd.reducescatter(own, hvd.Sum, process_set=ends).asnumpy().tolist() == [2]
    params = {"a": nd.ones((3,)) * rank}
    hvd.broadcast_parameters(params, root_rank=2, process_set=ends)
    assert params["a"].asnumpy()[0] == 2
    assert hvd.allgather_object(rank, process_set=ends) == [0, 2]
    optimizer = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=1.0), process_set=ends)
    value = nd.zeros((1,))
    optimizer.update(0, value, nd.ones((1,)) * rank, None)
    assert value.asnumpy()[0] == -1
    # Calls without a name are counted for the set and for all apart.
    assert hvd.allreduce(nd.ones((2,)), op=hvd.Sum).asnumpy()[0] == 3


def test_process_sets(trio):
    trio.run(on_ranks(some_ranks))


# Training


def trained(options):
    rank, size = hvd.rank(), hvd.size()
    net = network(3 + rank)
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", OPTIMIZER, **options)
    return train(net, trainer, rank, size, BATCH // size)


OPTIONS = [
    {"gradient_predivide_factor": 2.0, "num_groups": 2},
    {"prefix": "model.", "compression": None},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_trainers_equal_one_process(job, options):
    results = job.run(on_ranks(trained), options)
    assert len(set(map(digest, results))) == 1
    assert close(results[0], alone())


def halves():
    """Sums of float16 that would not fit, were they not divided before."""
    weights = gluon.Parameter("weights", shape=(10,), dtype="float16")
    weights.initialize(mx.init.Zero())
    for number, options in enumerate(({}, {"compression": hvd.Compression.fp16})):
        trainer = hvd.DistributedTrainer(
            [weights],
            "sgd",
            {"learning_rate": 1.0},
            gradient_predivide_factor=float(hvd.size()),
            prefix=f"halves {number}.",
            **options,
        )
        with mx.autograd.record():
            loss = weights.data() * 1000 * (hvd.rank() + 1)
        loss.backward()
        trainer.step(1000)
        mean = (hvd.size() + 1) / 2
        assert np.allclose(weights.data().asnumpy(), -mean * (number + 1), atol=5e-2)


def test_predivided_halves(job):
    job.run(on_ranks(halves))


def by_optimizer():
    """As programs with a Module do: each gradient where the optimizer gets it."""
    rank, size = hvd.rank(), hvd.size()
    sgd = mx.optimizer.SGD(learning_rate=0.5, rescale_grad=1.0)
    optimizer = hvd.DistributedOptimizer(sgd, gradient_predivide_factor=4.0, num_groups=2)
    weights = [nd.zeros((3,)), nd.zeros((2,))]
    grads = [nd.ones((3,)) * (rank + 1), nd.ones((2,)) * rank]
    optimizer.update([0, 1], weights, grads, [None, None])
    assert np.allclose(weights[0].asnumpy(), -0.5 * (size + 1) / 2)
    assert np.allclose(weights[1].asnumpy(), -0.5 * (size - 1) / 2)


def test_distributed_optimizer(job):
    job.run(on_ranks(by_optimizer))


PROGRAM = """
import mxnet as mx
import horovod.mxnet as hvd
hvd.init()
net = mx.gluon.nn.Dense(1, in_units=2)
net.initialize(mx.init.Constant(hvd.rank()))
hvd.broadcast_parameters(net.collect_params(), root_rank=0)
trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
with mx.autograd.record():
    loss = net(mx.nd.ones((4, 2)) * (hvd.rank() + 1)).sum()
loss.backward()
trainer.step(4)
print(f"weight {net.weight.data().asnumpy()[0, 0]:.2f} of {hvd.size()}", flush=True)
"""


def test_a_program_of_horovod_runs_unchanged(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
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
    assert result.stdout.count("weight -0.15 of 2") == 2, result.stdout
