"""Local SGD and DiLoCo, beside the same arithmetic in one process."""

from __future__ import annotations

import pytest

ROUNDS, EVERY = 4, 3


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


def alone(size, outer):
    """All ranks' training in this process."""
    import torch

    start = model(0)
    ranks = [model(0) for _ in range(size)]
    inners = [inner(rank.parameters()) for rank in ranks]
    over = outer(start.parameters()) if outer else None
    for round in range(ROUNDS):
        for rank in range(size):
            for step in range(EVERY):
                inners[rank].zero_grad()
                ranks[rank](batch(rank, round * EVERY + step)).square().mean().backward()
                inners[rank].step()
        every = zip(start.parameters(), *(rank.parameters() for rank in ranks), strict=True)
        for common, *params in every:
            moved = sum(common.detach() - param.detach() for param in params) / size
            if over is None:
                common.data.sub_(moved)
            else:
                common.grad = moved
        if over is not None:
            over.step()
        for rank in ranks:
            rank.load_state_dict(start.state_dict())
    with torch.no_grad():
        return [param.clone() for param in start.parameters()]


def together(kind):
    import torch

    import byteps.torch as bps

    own = model(0)
    local = bps.LocalSGD(own, inner(own.parameters()), EVERY, outer_of(kind))
    for step in range(ROUNDS * EVERY):
        if step == 7:
            # From a checkpoint within a round.
            state = local.state_dict()
            local = bps.LocalSGD(own, local.optimizer, EVERY, outer_of(kind))
            local.load_state_dict(state)
        local.zero_grad()
        own(batch(bps.rank(), step)).square().mean().backward()
        local.step()
    for mine, expected in zip(own.parameters(), alone(bps.size(), outer_of(kind)), strict=True):
        assert torch.allclose(mine, expected, rtol=0, atol=1e-12)
        assert all(torch.equal(mine, other) for other in bps.allgather(mine.detach()[None]))


@pytest.mark.parametrize("kind", ["none", "nesterov", "adam"])
def test_it_equals_the_arithmetic_of_one_process(trio, kind):
    trio.run(together, kind)


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
    with pytest.raises(ConfigError, match="1 or more of both"):
        bps.LocalSGD(own, local.optimizer, every=0)


def test_it_begins_with_the_parameters_of_rank_0(job):
    job.run(begins)
