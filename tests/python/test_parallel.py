"""DistributedDataParallel against training in one process on the whole batch."""

from __future__ import annotations

import copy

import pytest
import torch

import byteps.torch as bps
from byteps.errors import ConfigError
from byteps.torch.parallel import DistributedDataParallel
from small_models import Branches, Net, batch, difference, loss_of, share


def seeded(seed):
    torch.manual_seed(seed)
    return Net().double()


def as_one_process(find_unused):
    alone = seeded(0)
    # Each rank draws its own; rank 0's is what all get.
    model = DistributedDataParallel(seeded(bps.rank()), find_unused_parameters=find_unused)
    assert difference(alone, model.module) == 0
    reference = torch.optim.Adam(alone.parameters(), lr=0.01)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(5):
        inputs, targets = batch(step)
        reference.zero_grad()
        loss_of(alone, inputs, targets).backward()
        reference.step()
        optimizer.zero_grad()
        loss_of(model, share(inputs), share(targets)).backward()
        optimizer.step()
    assert difference(alone, model.module) < 1e-9


@pytest.mark.parametrize("find_unused", [False, True])
def test_as_one_process(job, find_unused):
    job.run(as_one_process, find_unused)


def several_instances():
    inputs, targets = batch(0)
    alone = [seeded(1), seeded(2)]
    models = [
        DistributedDataParallel(seeded(1 + 10 * bps.rank())),
        DistributedDataParallel(seeded(2 + 10 * bps.rank())),
    ]
    (loss_of(alone[0], inputs, targets) * 2 + loss_of(alone[1], inputs, targets)).backward()
    parts = [loss_of(model, share(inputs), share(targets)) for model in models]
    (parts[0] * 2 + parts[1]).backward()
    for one, model in zip(alone, models, strict=True):
        for a, b in zip(one.parameters(), model.parameters(), strict=True):
            assert torch.allclose(a.grad, b.grad, atol=1e-12)


def test_several_instances(job):
    job.run(several_instances)


def no_sync():
    alone, model = seeded(0), DistributedDataParallel(seeded(0))
    for number in range(3):
        inputs, targets = batch(number)
        loss_of(alone, inputs, targets).backward()
        if number < 2:
            with model.no_sync():
                loss_of(model, share(inputs), share(targets)).backward()
        else:
            loss_of(model, share(inputs), share(targets)).backward()
    for a, b in zip(alone.parameters(), model.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-12)


def test_no_sync(job):
    job.run(no_sync)


def two_backward_passes():
    """Without zero_grad in between, as with several losses."""
    alone, model = seeded(0), DistributedDataParallel(seeded(0))
    for number in range(2):
        inputs, targets = batch(number)
        loss_of(alone, inputs, targets).backward()
        loss_of(model, share(inputs), share(targets)).backward()
    for a, b in zip(alone.parameters(), model.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-12)


def test_two_backward_passes(job):
    job.run(two_backward_passes)


def buffers():
    rank = bps.rank()

    class Counter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(3)
            self.register_buffer("flags", torch.tensor([rank == 0, True]))

        def forward(self, x):
            return self.norm(x)

    for broadcast in (True, False):
        model = DistributedDataParallel(Counter(), broadcast_buffers=broadcast)
        assert model.module.flags.tolist() == [True, True]
        for _ in range(3):
            model(torch.full((4, 3), float(rank)) + torch.arange(4.0).unsqueeze(1)).sum().backward()
        mean = model.module.norm.running_mean.clone()
        assert model.module.norm.num_batches_tracked.item() == 3
        if broadcast and rank != 0:
            # Two forward passes as on rank 0, then one of its own.
            own = torch.nn.BatchNorm1d(3)
            for number in range(3):
                own(
                    torch.full((4, 3), float(rank if number == 2 else 0))
                    + torch.arange(4.0).unsqueeze(1)
                )
            assert torch.allclose(mean, own.running_mean)
        elif not broadcast and rank != 0:
            assert not torch.allclose(mean, bps.broadcast(mean, 0, "mean"))
            continue
        if not broadcast:
            bps.broadcast(mean, 0, "mean")


def test_buffers(job):
    job.run(buffers)


def unused(find_unused):
    rank, size = bps.rank(), bps.size()
    torch.manual_seed(1)
    model = DistributedDataParallel(Branches().double(), find_unused_parameters=find_unused)
    inputs = torch.ones(1, 3, dtype=torch.float64)
    for number in range(2):
        model.zero_grad()
        model(inputs, (rank + number) % size).sum().backward()
        for index, branch in enumerate(model.module.branches):
            wanted = 1.0 / size if index < size else 0.0
            if index >= size and (find_unused or size == 1):
                assert branch.bias.grad is None
            else:
                assert torch.allclose(
                    branch.bias.grad, torch.full((2,), wanted, dtype=torch.float64)
                )
        if find_unused or size == 1:
            assert model.module.never.weight.grad is None
        else:
            assert not model.module.never.weight.grad.any()


@pytest.mark.parametrize("find_unused", [False, True])
def test_unused(job, find_unused):
    job.run(unused, find_unused)


def no_parameter_used_on_one_rank():
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    if bps.rank() == 0:
        model(torch.ones(1, 2)).sum().backward()
    else:
        model.synchronize()
    assert torch.allclose(model.module.bias.grad, torch.full((2,), 1.0 / bps.size()))


def test_no_parameter_used_on_one_rank(job):
    job.run(no_parameter_used_on_one_rank)


def other_arguments():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="device_ids"):
        DistributedDataParallel(model, device_ids=[0, 1])
    wrapped = DistributedDataParallel(
        model, device_ids=[0], bucket_cap_mb=10, compression=bps.Compression.fp16
    )
    wrapped(torch.ones(1, 2)).sum().backward()
    assert model.bias.grad.dtype == torch.float32 and torch.equal(model.bias.grad, torch.ones(2))
    assert set(wrapped.state_dict()) == {"module.weight", "module.bias"}
    frozen = copy.deepcopy(model)
    frozen.weight.requires_grad_(False)
    wrapped = DistributedDataParallel(frozen)
    wrapped(torch.ones(1, 2)).sum().backward()
    assert frozen.weight.grad is None


def test_other_arguments(job):
    job.run(other_arguments)


def a_failed_backward_pass():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise KeyError("on purpose")

    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    )
    with pytest.raises(KeyError):
        hidden = Fails.apply(model.module[0](torch.ones(1, 2)))
        model.module[1](hidden).sum().backward()
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    assert torch.allclose(model.module[1].bias.grad, torch.ones(2))


def test_a_failed_backward_pass(job):
    job.run(a_failed_backward_pass)
