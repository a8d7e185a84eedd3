"""byteps.mxnet with rounds that do not wait for slow ranks."""

from __future__ import annotations

import hashlib
import pickle
import time

import numpy as np
import pytest

pytest.importorskip("mxnet", reason="MXNet is not installed in this environment")

import mxnet as mx
from mxnet import autograd, gluon, nd

import byteps.mxnet as bps
from byteps.errors import BytePSError, ConfigError, MismatchError
from cluster import Cluster
from mxnet_ranks import on_ranks

RANKS = 3
# The first rounds of a tensor wait for all.
WHOLE = 4
STEPS = 12
# Each rank has a digit of its own in what is summed: of which step its contribution is.
BASE = 32
SGD = {"learning_rate": 0.01, "momentum": 0.9}


def training(kind):
    """Trains while one rank is slow; by step, what all have to have alike, and who was late."""
    rank = bps.rank()
    net = gluon.nn.Dense(8, in_units=64)
    net.initialize(mx.init.One())
    params = [net.weight, net.bias]
    if kind == "trainer":
        trainer = bps.DistributedTrainer(params, "sgd", SGD, prefix="trainer.")
    else:
        optimizer = pickle.loads(pickle.dumps(bps.DistributedOptimizer(mx.optimizer.SGD(**SGD))))
        update = mx.optimizer.get_updater(optimizer)
    random = np.random.RandomState(rank)
    steps = []
    for step in range(STEPS):
        time.sleep(0.3 if rank == 1 and step in (6, 7, 8) else 0.01)
        probe = nd.full((1,), (step + 1) * BASE**rank)
        bps.push_pull(probe, name=f"{kind}: probe", is_average=False, backup_workers=1)
        with autograd.record():
            loss = net(nd.array(random.rand(16, 64))).square().mean()
        loss.backward()
        if kind == "trainer":
            trainer.step(1)
        else:
            for index, param in enumerate(params):
                update(index, param.grad(), param.data())
        flat = b"".join(param.data().asnumpy().tobytes() for param in params)
        total = int(probe.asscalar())
        digits = [total // BASE**one % BASE for one in range(RANKS)]
        assert set(digits) <= {0, step + 1}
        steps.append((hashlib.sha256(flat).hexdigest(), digits))
    # What says nothing is whole, whatever is set.
    mean = nd.full((1,), rank)
    bps.push_pull(mean, name="metric")
    assert mean.asscalar() == (RANKS - 1) / 2
    start = {"start": nd.full((4,), rank)}
    bps.broadcast_parameters(start, root_rank=1)
    assert start["start"].asnumpy().tolist() == [1.0] * 4
    return steps


def refused():
    rank = bps.rank()
    ones = nd.ones((4,))

    def waits(array=ones, **arguments):
        bps.push_pull(array, **arguments)
        array.wait_to_read()

    for workers in (RANKS, RANKS + 1):
        with pytest.raises(BytePSError, match=f"{workers} of {RANKS} ranks"):
            waits(name=f"all {workers}", backup_workers=workers)
    with pytest.raises(BytePSError, match="only floats"):
        waits(nd.ones((4,), dtype="int32"), name="count", backup_workers=1)
    with pytest.raises(ConfigError, match="without a name"):
        waits(backup_workers=1)
    with pytest.raises(ConfigError, match="0 or more"):
        waits(name="few", backup_workers=-1)
    # By the environment, they wait for all.
    count = nd.full((1,), rank, dtype="int32")
    with pytest.warns(UserWarning, match="whole numbers"):
        waits(count, name="counted", is_average=False, backup_workers=None)
    assert count.asscalar() == sum(range(RANKS))
    with pytest.warns(UserWarning, match="without a name"):
        waits(backup_workers=None)
    # Ranks that disagree are told so: the first one where it waits for the array.
    with pytest.raises((MismatchError, mx.MXNetError), match="slowest"):
        waits(nd.ones((4,)), name="other", backup_workers=min(rank, 1))


def refused_of_gradients():
    net = gluon.nn.Dense(64, in_units=256, use_bias=False)
    net.initialize(mx.init.One())
    params = [net.weight]
    with pytest.raises(ConfigError, match="0 or more"):
        bps.DistributedOptimizer(mx.optimizer.SGD(), backup_workers=-1)
    with pytest.raises(ConfigError, match="0 or more"):
        bps.DistributedTrainer(params, "sgd", backup_workers=-1)

    def step(codec, **arguments):
        way = {"compressor": "topk", "k": 0.1, **codec}
        trainer = bps.DistributedTrainer(params, "sgd", compression_params=way, **arguments)
        with autograd.record():
            loss = net(nd.ones((2, 256))).mean()
        loss.backward()
        trainer.step(1)
        mx.nd.waitall()

    # The codec alone is fine; what error feedback and momentum keep would be wrong.
    step({}, prefix="plain.", backup_workers=1)
    with pytest.raises(BytePSError, match="feedback"):
        step({"ef": "vanilla"}, prefix="feedback.", backup_workers=1)
    with pytest.raises(ConfigError, match="momentum"):
        step({"momentum": "nesterov"}, prefix="momentum.", backup_workers=1)
    with pytest.warns(UserWarning, match="feedback"):
        step({"ef": "vanilla"}, prefix="whole feedback.")
    with pytest.warns(UserWarning, match="momentum"):
        step({"momentum": "nesterov"}, prefix="whole momentum.")


def test_rounds_without_the_slowest_rank():
    environment = {"BPS_BACKUP_WORKERS": "1", "BPS_BACKUP_BEHIND": "4"}
    with Cluster(RANKS, servers=1, environment=environment) as job:
        for kind in ("trainer", "optimizer"):
            check(job.run(on_ranks(training), kind))
        job.run(on_ranks(refused_of_gradients))
        job.run(on_ranks(refused))


def check(steps):
    """All ranks saw the same, and the slow rank was late."""
    assert steps[0] == steps[1] == steps[2]
    assert len({digest for digest, _ in steps[0]}) == STEPS, "nothing was trained"
    late = [digits.count(0) for _, digits in steps[0]]
    print(f"late ranks, by step: {late}")
    assert max(late) == 1 and not any(late[:WHOLE]), late
    assert any(digits[1] == 0 for _, digits in steps[0]), "the slow rank was not late"
