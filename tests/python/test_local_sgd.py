"""Local SGD and DiLoCo, beside the same arithmetic in one process."""

from __future__ import annotations

import re
import time
import urllib.request

import pytest

from cluster import Cluster

STEPS, EVERY = 16, 4


def model(seed):
    import torch
    from torch import nn

    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def batch(rank, step):
    import torch

    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(16, 6, generator=generator, dtype=torch.float64)


def outer_of(kind):
    import torch

    return {
        "none": None,
        "nesterov": lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True),
        "adam": lambda params: torch.optim.Adam(params, lr=0.05),
    }[kind]


def inner(parameters):
    import torch

    return torch.optim.AdamW(parameters, lr=0.02)


def alone(size, rank, outer, fragments, delay=0, keep=0.0):
    """The parameters of a rank, of a training of all in this process."""
    import torch

    common = list(model(0).parameters())
    models = [model(0) for _ in range(size)]
    inners = [inner(one.parameters()) for one in models]
    outers = [outer(common[first::fragments]) if outer else None for first in range(fragments)]
    sent = {}

    def outer_step(first, averages):
        for start, average in zip(common[first::fragments], averages, strict=True):
            start.grad = average
            if outer is None:
                start.data.sub_(average)
        if outer is not None:
            outers[first].step()
        with torch.no_grad():
            for one in models:
                params = list(one.parameters())[first::fragments]
                for param, start in zip(params, common[first::fragments], strict=True):
                    param.copy_(keep * param + (1 - keep) * start)

    for step in range(1, STEPS + 1):
        for other in range(size):
            inners[other].zero_grad()
            models[other](batch(other, step - 1)).square().mean().backward()
            inners[other].step()
        turn, left = divmod(step, EVERY // fragments)
        if left == 0:
            first = (turn - 1) % fragments
            of_all = [list(one.parameters())[first::fragments] for one in models]
            averages = [
                sum(start.detach() - param.detach() for param in params) / size
                for start, *params in zip(common[first::fragments], *of_all, strict=True)
            ]
            sent[step + delay] = first, averages
        if step in sent:
            outer_step(*sent[step])
    return [param.detach() for param in models[rank].parameters()]


def together(kind, fragments, delay=0, keep=0.0):
    import torch

    import byteps.torch as bps

    own = model(0)
    how = {"fragments": fragments, "delay": delay, "keep": keep}
    local = bps.LocalSGD(own, inner(own.parameters()), EVERY, outer_of(kind), **how)
    for step in range(STEPS):
        if step == (6 if delay else 7):
            # From a checkpoint within a round, and with an outer step due if they are delayed.
            state = local.state_dict()
            assert ("sent" in state) == (delay > 0)
            local = bps.LocalSGD(own, local.optimizer, EVERY, outer_of(kind), **how)
            local.load_state_dict(state)
        local.zero_grad()
        own(batch(bps.rank(), step)).square().mean().backward()
        local.step()
    expected = alone(bps.size(), bps.rank(), outer_of(kind), fragments, delay, keep)
    for mine, right in zip(own.parameters(), expected, strict=True):
        assert torch.allclose(mine, right, rtol=0, atol=1e-12)
    local.synchronize()
    for mine in own.parameters():
        assert all(torch.equal(mine, other) for other in bps.allgather(mine.detach()[None]))


@pytest.mark.parametrize(
    ("kind", "fragments"), [("none", 1), ("nesterov", 1), ("adam", 1), ("nesterov", 2)]
)
def test_it_equals_the_arithmetic_of_one_process(trio, kind, fragments):
    trio.run(together, kind, fragments)


@pytest.mark.parametrize(
    ("kind", "fragments", "delay", "keep"),
    [("nesterov", 1, 3, 0.0), ("none", 1, 3, 0.5), ("nesterov", 2, 1, 0.5)],
)
def test_ranks_train_on_while_an_outer_gradient_is_averaged(trio, kind, fragments, delay, keep):
    trio.run(together, kind, fragments, delay, keep)


def begins():
    import torch

    import byteps.torch as bps
    from byteps.errors import ConfigError

    own = model(bps.rank())
    local = bps.LocalSGD(own, torch.optim.SGD(own.parameters(), lr=0.0), every=10)
    for param in own.parameters():
        param.grad = torch.zeros_like(param)
    local.step()
    for mine, first in zip(own.parameters(), model(0).parameters(), strict=True):
        assert torch.equal(mine, first)
    # What is left of a round at the end of a training.
    with torch.no_grad():
        for param in own.parameters():
            param.add_(bps.rank())
    local.synchronize()
    for mine, first in zip(own.parameters(), model(0).parameters(), strict=True):
        assert torch.allclose(mine, first + (bps.size() - 1) / 2)
    for every, fragments in ((0, 1), (4, 0), (3, 2), (10, 5)):
        with pytest.raises(ConfigError, match="every is a multiple of fragments"):
            bps.LocalSGD(own, local.optimizer, every, fragments=fragments)
    for delay, keep in ((-1, 0.0), (2, 0.0), (1, 1.0), (1, -0.1)):
        with pytest.raises(ConfigError, match=r"delay is below 2, and keep is from 0 to below 1"):
            bps.LocalSGD(own, local.optimizer, 4, fragments=2, delay=delay, keep=keep)


def test_it_begins_with_the_parameters_of_rank_0(job):
    job.run(begins)


def trained(every, steps):
    """So many steps, of which those with ``every`` are local."""
    import torch

    import byteps.torch as bps

    bps.init()
    own = model(0)
    optimizer = inner(own.parameters())
    if every:
        optimizer = bps.LocalSGD(own, optimizer, every)
    else:
        bps.broadcast_parameters(own.state_dict(), root_rank=0)
        optimizer = bps.DistributedOptimizer(optimizer, own.named_parameters())
    for step in range(steps):
        optimizer.zero_grad()
        own(batch(bps.rank(), step)).square().mean().backward()
        optimizer.step()
    assert all(bool(torch.isfinite(param).all()) for param in own.parameters())


def received(job):
    """Bytes of contributions that the servers have received, once no more come."""
    address = re.search(r"metrics of the job on (http://\S+)", job.log()).group(1)
    before, deadline = -1, time.monotonic() + 30
    while time.monotonic() < deadline:
        # Nodes tell the scheduler five times a second.
        time.sleep(0.6)
        with urllib.request.urlopen(address, timeout=10) as page:
            text = page.read().decode()
        found = re.findall(r"^bps_core_receive_bytes_total\{[^}]*\} (\d+)", text, re.MULTILINE)
        now = sum(map(int, found))
        if now == before:
            return now
        before = now
    raise AssertionError("the servers' counters do not come to rest")


def test_its_traffic_is_what_is_left_of_steps():
    variables = {"BPS_METRICS_PORT": "0", "BPS_HEARTBEAT_INTERVAL": "0.2"}
    with Cluster(2, servers=1, environment=variables) as job:
        sent = {}
        for every in (0, EVERY):
            totals = [received(job)]
            # The beginning is the same for so many steps and for twice as many.
            for steps in (STEPS, 2 * STEPS):
                job.run(trained, every, steps)
                totals.append(received(job))
            sent[every] = (totals[2] - totals[1]) - (totals[1] - totals[0])
        gradients = 2 * sum(param.numel() * 8 for param in model(0).parameters())
        assert sent[EVERY] == STEPS // EVERY * gradients
        # A batch of gradients begins and ends at whole words.
        assert STEPS * gradients <= sent[0] <= STEPS * gradients * 1.1


class ManagerOfGloo:
    """What torchft's DiLoCo asks of its manager, where nobody fails."""

    _use_async_quorum = False

    def __init__(self):
        self.steps = 0

    def current_step(self):
        return self.steps

    def should_commit(self):
        self.steps += 1
        return True

    def allreduce(self, tensor, should_quantize=False):
        import torch.distributed as dist

        assert not should_quantize
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()
        return self

    def nothing(self, *arguments):
        """For a job that does not change."""

    wait = start_quorum = register_state_dict_fn = nothing
    allow_state_dict_read = disallow_state_dict_read = nothing


def beside_torchft(kind):
    import torch
    import torch.distributed as dist
    from torchft.local_sgd import DiLoCo

    import byteps.torch as bps

    bps.init()
    dist.init_process_group("gloo")
    theirs, ours = model(0), model(0)
    local = bps.LocalSGD(ours, inner(ours.parameters()), EVERY, outer_of(kind))
    optimizer, outer = inner(theirs.parameters()), outer_of(kind)(theirs.parameters())
    with DiLoCo(ManagerOfGloo(), [theirs], optimizer, outer, sync_every=EVERY):
        for step in range(STEPS):
            inputs = batch(bps.rank(), step)
            for one, stepping in ((theirs, optimizer), (ours, local)):
                stepping.zero_grad()
                one(inputs).square().mean().backward()
                stepping.step()
            for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert torch.allclose(one, other, rtol=0, atol=1e-13), step
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["nesterov", "adam"])
def test_it_equals_torchfts(kind):
    """With torchft in the environment, which the tests do not install."""
    pytest.importorskip("torchft", reason="torchft is not installed")
    with Cluster(2) as job:
        job.run(beside_torchft, kind)
