"""Asynchronous training: parameters on the servers, and ranks that do not wait for each other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import Cluster, clean_environment


def recorder(kind, params, **options):
    """An optimizer of this kind that writes down by how much each of its steps changes things."""
    import torch

    class Recorder(kind):
        def step(self, *args, **kwargs):
            params = [param for group in self.param_groups for param in group["params"]]
            before = [param.detach().clone() for param in params]
            result = super().step(*args, **kwargs)
            changes = [param.detach() - old for param, old in zip(params, before, strict=True)]
            self.changes = [
                total + change for total, change in zip(self.changes, changes, strict=True)
            ]
            return result

    optimizer = Recorder(params, **options)
    optimizer.changes = [torch.zeros_like(param) for param in params]
    return optimizer


def problem(rank):
    """Points of one line in twelve dimensions, others on each rank."""
    import torch

    truth = torch.arange(12, dtype=torch.float64) / 4 - 1
    points = torch.randn(64, 12, generator=torch.Generator().manual_seed(rank)).double()
    return points, points @ truth, truth


def train(name, options, steps):
    import torch

    import byteps.torch as bps

    points, values, truth = problem(bps.rank())
    # Only rank 0 has the right ones: nobody broadcasts.
    weights = torch.full((12,), 0.5 + bps.rank(), dtype=torch.float64, requires_grad=True)
    bias = torch.full((), 3.0 * bps.rank(), dtype=torch.float64, requires_grad=True)
    recording = recorder(getattr(torch.optim, name), [weights, bias], **options)
    optimizer = bps.DistributedOptimizer(
        recording, [("weights", weights), ("bias", bias)], async_=True
    )
    for _ in range(steps + 5 * bps.rank()):
        optimizer.zero_grad()
        (points @ weights + bias - values).square().mean().backward()
        optimizer.step()
    bps.barrier()
    # Nothing is added any more: who asks now gets what all steps have made.
    for param in (weights, bias):
        param.requires_grad_(False)
    stored = dict(zip(("weights", "bias"), optimizer._named, strict=True))
    optimizer._stored.push(list(stored.values()))
    for param, start, change in zip((weights, bias), (0.5, 0.0), optimizer.changes, strict=True):
        total = bps.push_pull(change, average=False, name=f"sum of changes {param.ndim}")
        assert torch.allclose(param, start + total, rtol=0, atol=1e-9)
        assert all(torch.equal(param, other) for other in bps.allgather(param[None]))
    return (weights - truth).abs().max().item()


@pytest.mark.parametrize(
    ("ranks", "name", "options", "steps"),
    [
        ("pair", "SGD", {"lr": 0.02}, 60),
        ("trio", "SGD", {"lr": 0.01, "momentum": 0.5}, 60),
        ("trio", "Adam", {"lr": 0.02}, 80),
    ],
)
def test_parameters_hold_every_step_of_every_rank_and_converge(
    request, ranks, name, options, steps
):
    cluster = request.getfixturevalue(ranks)
    for distance in cluster.run(train, name, options, steps):
        assert distance < 0.2


def go_on_alone():
    import torch

    import byteps.torch as bps

    param = torch.zeros(1000, requires_grad=True)
    optimizer = bps.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), async_=True)

    def step():
        param.grad = torch.full_like(param, -1.0)
        optimizer.step()

    step()
    bps.barrier()
    if bps.rank() == 2:
        # Until the others have gone on, this rank does nothing.
        bps.barrier()
        step()
        assert torch.equal(param.detach(), torch.full((1000,), 3.0 + 2 * 20 + 1))
        return
    for _ in range(20):
        step()
    bps.barrier()


def test_no_rank_waits_for_another(trio):
    trio.run(go_on_alone)


def bounded():
    import threading

    import torch

    import byteps.torch as bps

    param = torch.zeros(3, requires_grad=True)
    optimizer = bps.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), async_=True, staleness=2)

    def step():
        param.grad = torch.full_like(param, -1.0)
        optimizer.step()

    if bps.rank() == 1:
        step()
        bps.barrier()
        bps.barrier()
        step()
        bps.barrier()
        return
    for _ in range(3):
        step()
    bps.barrier()
    ahead = threading.Thread(target=step, daemon=True)
    ahead.start()
    ahead.join(0.5)
    assert ahead.is_alive(), "three steps ahead of the other rank"
    bps.barrier()
    ahead.join(30)
    assert not ahead.is_alive(), "the other rank has come nearer"
    bps.barrier()


def test_a_bound_holds_back_who_is_too_far_ahead(pair):
    pair.run(bounded)


def half_types():
    import torch

    import byteps.torch as bps

    start = torch.linspace(1.0, 2.0, 129).bfloat16()
    param = (start.clone() if bps.rank() == 0 else torch.zeros_like(start)).requires_grad_()
    recording = recorder(torch.optim.SGD, [param], lr=2.0**-7)
    optimizer = bps.DistributedOptimizer(recording, async_=True)

    def step(gradient):
        param.grad = torch.full_like(param, gradient)
        optimizer.step()
        bps.barrier()

    step(0.0)
    # Both begin at the same value: together they leave what bfloat16 can say.
    step(-1.0 - bps.rank())
    for _ in range(5):
        step(0.0)
    changes = bps.push_pull(optimizer.changes[0].float(), average=False, name="changes")
    expected = start.float() + changes
    assert not torch.equal(expected, expected.bfloat16().float()), "the sum has to be rounded"
    # What rounding took is nobody's change, however often a rank steps.
    assert torch.equal(param.detach(), expected.bfloat16())


def test_a_half_type_is_kept_in_float32(pair):
    pair.run(half_types)


def some_ranks():
    import torch

    import byteps.torch as bps

    ranks = bps.add_process_set([0, 2])
    param = torch.full((4,), 5.0 * bps.rank(), requires_grad=True)
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD([param], lr=1.0), process_set=ranks, async_=True
    )
    param.grad = torch.full_like(param, -1.0)
    optimizer.step()
    bps.barrier()
    param.grad = torch.zeros_like(param)
    optimizer.step()
    # The rank that is not in the set has trained alone.
    expected = 6.0 if bps.rank() == 1 else 2.0
    assert torch.equal(param.detach(), torch.full((4,), expected))
    bps.barrier()
    bps.remove_process_set(ranks)


def test_a_process_set_shares_among_itself(trio):
    trio.run(some_ranks)


def refusals():
    import torch

    import byteps.torch as bps
    from byteps.errors import ConfigError, MismatchError, UsageError

    def optimizer(**options):
        param = torch.zeros(2, requires_grad=True)
        param.grad = torch.zeros(2)
        return bps.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), **options)

    with pytest.raises(ConfigError, match="pass async_=True, or set BYTEPS_ENABLE_ASYNC=1"):
        optimizer(staleness=2)
    with pytest.raises(ConfigError, match="0 or more"):
        optimizer(async_=True, staleness=-1)
    with pytest.raises(ConfigError, match="op=Adasum"):
        optimizer(async_=True, op=bps.Adasum)
    with pytest.raises(ConfigError, match="not compressed"):
        optimizer(async_=True, compression=bps.Compression.fp16)
    skipping = optimizer(async_=True).skip_synchronize()
    with pytest.raises(UsageError, match="skip_synchronize"), skipping:
        pass
    disputed = optimizer(async_=True, staleness=1 + bps.rank())
    if bps.rank() == 0:
        disputed.step()  # It waits for nobody, and nobody has said anything else yet.
    bps.barrier()
    for rank in (1, 0):
        if bps.rank() == rank:
            with pytest.raises(MismatchError, match="nobody over 1 pushes ahead"):
                disputed.step()
        bps.barrier()


def test_what_cannot_be_is_refused_with_what_to_do(pair):
    pair.run(refusals)


def without_servers():
    import torch

    import byteps.torch as bps
    from byteps.errors import BytePSError

    bps.init()
    param = torch.zeros(2, requires_grad=True)
    param.grad = torch.zeros(2)
    optimizer = bps.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), async_=True)
    with pytest.raises(BytePSError, match="BYTEPS_FORCE_DISTRIBUTED=1 or BYTEPS_ENABLE_ASYNC=1"):
        optimizer.step()
    bps.shutdown()


def test_a_job_without_servers_says_how_to_get_one():
    with Cluster(2, servers=0, environment={"BPS_LOCAL_REDUCE": "1"}) as cluster:
        cluster.run(without_servers)


def by_environment():
    import torch

    import byteps.torch as bps

    bps.init()
    param = torch.full((5,), float(bps.rank()), requires_grad=True)
    optimizer = bps.DistributedOptimizer(torch.optim.SGD([param], lr=1.0))
    for _ in range(3):
        param.grad = torch.full_like(param, -1.0)
        optimizer.step()
    bps.barrier()
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert torch.equal(param.detach(), torch.full((5,), 6.0))
    # The ranks of this host reduce other tensors among themselves all the same.
    assert bps.push_pull(torch.ones(3), average=False, name="sum").tolist() == [2.0] * 3

    bps.suspend()
    bps.resume(1, 1)
    # Values begin again with those of rank 0.
    with torch.no_grad():
        param.fill_(10.0 * (bps.rank() + 1))
    optimizer.step()
    assert torch.equal(param.detach(), torch.full((5,), 10.0))
    bps.shutdown()


def test_the_environment_makes_optimizers_asynchronous_and_a_new_epoch_begins_again():
    environment = {"BPS_LOCAL_REDUCE": "1", "BYTEPS_ENABLE_ASYNC": "1", "BPS_STALENESS": "2"}
    with Cluster(2, environment=environment) as cluster:
        cluster.run(by_environment)


def test_the_measurement_of_a_slow_rank():
    """On a busy machine: what is due on an idle one, the script itself says by its status."""
    script = Path(__file__).parents[2] / "perf" / "asynchronous.py"
    options = "--ranks 2 --runs 1 --seconds 1 --compute 0.05 --megabytes 1".split()
    done = subprocess.run(
        [sys.executable, str(script), *options],
        env=clean_environment(),
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 3, done.stdout + done.stderr
    least, most = lines[-1]["asynchronous_kept_least"], lines[-1]["synchronous_kept_most"]
    assert (done.returncode == 0) == (least >= 0.95 and most <= 0.45)
    assert least > 1.5 * most, "the slow rank held the other back"
