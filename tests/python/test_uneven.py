"""Ranks that run out of data before others, with torch's Join; test_joining.py has join()."""

from __future__ import annotations

import pytest

from test_distributed import in_group


def batches(rank):
    """So many has each rank: 1, 3, 2."""
    return 1 + 2 * rank % 3


def uneven():
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms.join import Join
    from torch.nn.parallel import DistributedDataParallel

    rank, size = dist.get_rank(), dist.get_world_size()

    def start():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()

    def batch(rank, step):
        generator = torch.Generator().manual_seed(10 * rank + step)
        return torch.randn(5, 6, generator=generator, dtype=torch.float64)

    alone = start()
    reference = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(max(map(batches, range(size)))):
        reference.zero_grad()
        for other in range(size):
            if step < batches(other):
                # Who has joined adds zeros, and still counts.
                (alone(batch(other, step)).square().mean() / size).backward()
        reference.step()

    model = start()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Join([parallel]):
        for step in range(batches(rank)):
            optimizer.zero_grad()
            parallel(batch(rank, step)).square().mean().backward()
            optimizer.step()
    # Those that have joined get the parameters of the last one.
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
    # And the rank that joined last, as Horovod's join() returns it.
    steps = torch.tensor([batches(rank) * size + rank])
    dist.all_reduce(steps, dist.ReduceOp.MAX)
    assert steps.item() % size == max(range(size), key=lambda other: (batches(other), other))


@pytest.mark.parametrize("ranks", ["pair", "trio"])
def test_join_of_torch(request, ranks):
    in_group(request.getfixturevalue(ranks), uneven)


def too_few():
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.join import Join
    from torch.nn.parallel import DistributedDataParallel

    parallel = DistributedDataParallel(torch.nn.Linear(2, 1))
    early = Join([parallel], throw_on_early_termination=True)
    with pytest.raises(RuntimeError, match="exhausted"), early:
        for _ in range(1 + dist.get_rank()):
            parallel(torch.ones(1, 2)).sum().backward()


def test_join_may_end_all_ranks(pair):
    in_group(pair, too_few)
