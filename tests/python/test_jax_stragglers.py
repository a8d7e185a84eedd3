"""byteps.jax with rounds that do not wait for slow ranks, outside of programs and in them."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is not installed")

import jax
import jax.numpy as jnp
import optax

import byteps.jax as bps
from byteps.errors import BytePSError, ConfigError, MismatchError
from cluster import Cluster
from straggling import RANKS, STEPS, WHOLE, contribution, digits, linger


def training():
    """Trains while one rank is slow; by step, what all have to have alike, and who was late."""
    bps.init()
    rank = bps.rank()
    optimizer = bps.DistributedOptimizer(optax.sgd(0.01, momentum=0.9))
    params = {"w": jnp.ones((64, 8)), "b": jnp.zeros(8)}
    state = optimizer.init(params)

    def loss(params, x):
        return jnp.square(x @ params["w"] + params["b"]).mean()

    @jax.jit
    def step_of(params, state, x, own):
        gradients = jax.grad(loss)(params, x)
        updates, state = optimizer.update(gradients, state, params)
        total = bps.push_pull(own, average=False, name="in a program", backup_workers=1)
        return optax.apply_updates(params, updates), state, total

    random = np.random.default_rng(rank)
    steps = []
    for step in range(STEPS):
        linger(rank, step)
        own = jnp.float32(contribution(rank, step))
        handle = bps.push_pull_async(own, average=False, name="probe", backup_workers=1)
        x = jnp.asarray(random.normal(size=(16, 64)), jnp.float32)
        params, state, total = step_of(params, state, x, own)
        contributors = bps.contributors(handle)
        wanted = [step + 1 if one in contributors else 0 for one in range(RANKS)]
        assert digits(bps.synchronize(handle)) == wanted, contributors
        inside = digits(total)
        assert set(inside) <= {0, step + 1}
        flat = b"".join(np.asarray(params[name]).tobytes() for name in ("w", "b"))
        steps.append((hashlib.sha256(flat).hexdigest(), contributors, inside))
    # What says nothing is whole, whatever is set.
    mean = bps.push_pull(jnp.float32(rank), name="metric")
    assert float(mean) == sum(range(RANKS)) / RANKS
    start = bps.broadcast_parameters({"start": jnp.full(4, float(rank))}, root_rank=1)
    assert start["start"].tolist() == [1.0] * 4
    return steps


def refused():
    rank = bps.rank()
    ones = jnp.ones(4)
    for workers in (RANKS, RANKS + 1):
        with pytest.raises(BytePSError, match=f"{workers} of {RANKS} ranks"):
            bps.push_pull(ones, name=f"all {workers}", backup_workers=workers)
    in_program = jax.jit(lambda x: bps.push_pull(x, name="all", backup_workers=RANKS))
    with pytest.raises(BytePSError, match=f"{RANKS} of {RANKS} ranks"):
        in_program(ones)
    with pytest.raises(BytePSError, match="only floats"):
        bps.push_pull(jnp.ones(4, jnp.int32), name="count", backup_workers=1)
    with pytest.raises(BytePSError, match="only sums and averages"):
        bps.push_pull(ones, name="largest", op=bps.Max, backup_workers=1)
    for call in (bps.push_pull, jax.jit(lambda x, **how: bps.push_pull(x, backup_workers=1))):
        with pytest.raises(ConfigError, match="without a name"):
            call(ones, backup_workers=1)
    with pytest.raises(ConfigError, match="0 or more"):
        bps.push_pull(ones, name="few", backup_workers=-1)
    with pytest.raises(ConfigError, match="0 or more"):
        bps.DistributedOptimizer(optax.sgd(0.1), backup_workers=-1)
    # Ranks that disagree are told so, by type.
    with pytest.raises(MismatchError, match="slowest"):
        bps.push_pull(ones, name="other", backup_workers=min(rank, 1))
        bps.barrier()
    other = jax.jit(lambda x: bps.push_pull(x, name="inside", backup_workers=min(rank, 1)))
    with pytest.raises(MismatchError, match="slowest"), bps.typed_errors():
        jax.block_until_ready(other(ones))
        bps.barrier()
    # Gradients without names wait for all, and the warning says why.
    with pytest.warns(UserWarning, match="without a name"):
        _, gradient = bps.value_and_grad(lambda x: (x * (rank + 1)).sum())(ones)
    assert gradient.tolist() == [2.0] * 4
    # The codec alone is fine; what error feedback keeps would be wrong.
    wide = jnp.ones(100_000)
    good = bps.push_pull(
        wide, name="good", backup_workers=1, compression=bps.Compression.wire_bf16()
    )
    assert good[0] == 1.0
    with pytest.raises(BytePSError, match="feedback"):
        codec = bps.Compression.topk(0.1, error_feedback=True)
        bps.push_pull(wide, name="kept", backup_workers=1, compression=codec)


def test_rounds_without_the_slowest_rank():
    environment = {"BPS_BACKUP_WORKERS": "1", "BPS_BACKUP_BEHIND": "4"}
    with Cluster(RANKS, servers=1, environment=environment) as job:
        check(job.run(training))
        job.run(refused)


def check(steps):
    """All ranks saw the same, and the slow rank was late."""
    assert steps[0] == steps[1] == steps[2]
    assert len({digest for digest, _, _ in steps[0]}) == STEPS, "nothing was trained"
    sets = [contributors for _, contributors, _ in steps[0]]
    assert all(len(one) >= RANKS - 1 for one in sets), sets
    assert all(len(one) == RANKS for one in sets[:WHOLE]), sets
    inside = [inside.count(0) for _, _, inside in steps[0]]
    print(f"late in the program, by step: {inside}; contributors of the probe: {sets}")
    assert max(inside) == 1 and not any(inside[:WHOLE]), inside
    assert any(1 not in one for one in sets), "the slow rank was not late"
