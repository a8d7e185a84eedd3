"""DistributedOptimizer against training in one process on the whole batch."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import byteps.torch as bps
from byteps.errors import ConfigError, UsageError
from small_models import OPTIMIZERS, Branches, batch, difference, loss_of, share, start


def as_one_process(kind, with_closure):
    alone, model = start(), start()
    reference = OPTIMIZERS[kind](alone.parameters())
    plain = OPTIMIZERS[kind](model.parameters())
    optimizer = bps.DistributedOptimizer(plain, model.named_parameters())
    assert type(optimizer).__name__ == type(reference).__name__ and isinstance(
        optimizer, type(reference)
    )
    for step in range(5):
        inputs, targets = batch(step)
        reference.zero_grad()
        loss_of(alone, inputs, targets).backward()
        reference.step()
        if with_closure:

            def closure(inputs=inputs, targets=targets):
                optimizer.zero_grad()
                loss = loss_of(model, share(inputs), share(targets))
                loss.backward()
                return loss

            assert isinstance(optimizer.step(closure), torch.Tensor)
        else:
            optimizer.zero_grad()
            loss_of(model, share(inputs), share(targets)).backward()
            optimizer.step()
    assert difference(alone, model) < 1e-9


@pytest.mark.parametrize("with_closure", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_as_one_process(job, kind, with_closure):
    job.run(as_one_process, kind, with_closure)


def lbfgs_as_one_process(line_search):
    alone, model = start(), start()
    options = {"lr": 0.5, "max_iter": 4, "line_search_fn": line_search}
    reference = torch.optim.LBFGS(alone.parameters(), **options)
    optimizer = bps.DistributedOptimizer(torch.optim.LBFGS(model.parameters(), **options))
    inputs, targets = batch(0)

    def whole():
        reference.zero_grad()
        loss = loss_of(alone, inputs, targets)
        loss.backward()
        return loss

    def part():
        optimizer.zero_grad()
        loss = loss_of(model, share(inputs), share(targets))
        loss.backward()
        return loss

    for _ in range(4):
        one, other = reference.step(whole), optimizer.step(part)
        # The loss that decides is that of all ranks, so they all decide alike.
        assert abs(float(one) - float(other)) < 1e-9
    assert difference(alone, model) < 1e-7


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_as_one_process(job, line_search):
    job.run(lbfgs_as_one_process, line_search)


def several_passes():
    alone, model = start(), start()
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = bps.DistributedOptimizer(
        optimizer, model.named_parameters(), backward_passes_per_step=2
    )
    for step in range(3):
        if step == 2:
            optimizer.set_backward_passes_per_step(3)
        passes = 3 if step == 2 else 2
        reference.zero_grad()
        optimizer.zero_grad()
        for number in range(passes):
            inputs, targets = batch(10 * step + number)
            loss_of(alone, inputs, targets).backward()
            loss_of(model, share(inputs), share(targets)).backward()
        reference.step()
        optimizer.step()
    assert difference(alone, model) < 1e-9
    # Fewer passes than announced: step() sends what there is.
    inputs, targets = batch(99)
    optimizer.zero_grad()
    reference.zero_grad()
    loss_of(alone, inputs, targets).backward()
    loss_of(model, share(inputs), share(targets)).backward()
    reference.step()
    optimizer.step()
    assert difference(alone, model) < 1e-9


def test_several_passes(job):
    job.run(several_passes)


def clipping():
    alone, model = start(), start()
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters())
    for step in range(3):
        inputs, targets = batch(step)
        reference.zero_grad()
        loss_of(alone, inputs, targets).backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
        reference.step()
        optimizer.zero_grad()
        loss_of(model, share(inputs), share(targets)).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        if step == 1:
            optimizer.step()  # Averaged already: without skip_synchronize the result is the same.
        else:
            with optimizer.skip_synchronize():
                optimizer.step()
    assert difference(alone, model) < 1e-9


def test_clipping(job):
    job.run(clipping)


def unused_parameters():
    rank, size = bps.rank(), bps.size()
    torch.manual_seed(1)
    model = Branches().double()
    before = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters())
    inputs = torch.ones(1, 3, dtype=torch.float64)
    for _ in range(2):
        optimizer.zero_grad()
        model(inputs, rank).sum().backward()
        optimizer.step()
    for number, branch in enumerate(model.branches):
        moved = before.branches[number].bias - branch.bias
        wanted = 2 * 0.5 / size if number < size else 0.0
        assert torch.allclose(moved, torch.full((2,), wanted, dtype=torch.float64)), number
    assert torch.equal(model.never.weight, before.never.weight)


def test_unused_parameters(job):
    job.run(unused_parameters)


def frozen_and_thawed():
    size = bps.size()
    model = start()
    model.conv.requires_grad_(False)
    params = [
        {"params": model.conv.parameters()},
        {"params": list(model.hidden.parameters()) + list(model.last.parameters())},
    ]
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(params, lr=0.1), model.named_parameters())
    frozen = model.conv.weight.clone()
    inputs, targets = batch(0)
    loss_of(model, share(inputs), share(targets)).backward()
    optimizer.step()
    assert torch.equal(frozen, model.conv.weight)
    model.conv.requires_grad_(True)
    alone = copy.deepcopy(model)
    optimizer.zero_grad()
    alone.zero_grad()
    loss_of(model, share(inputs), share(targets)).backward()
    loss_of(alone, inputs, targets).backward()
    optimizer.synchronize()
    assert torch.allclose(model.conv.weight.grad, alone.conv.weight.grad), size
    model.last.requires_grad_(False)
    with optimizer.skip_synchronize():
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model, share(inputs), share(targets)).backward()
    optimizer.step()


def test_frozen_and_thawed(job):
    job.run(frozen_and_thawed)


def groups_and_names():
    model = start()
    params = [{"params": [p]} for p in model.parameters()]
    alone = start()
    reference = torch.optim.SGD([{"params": [p]} for p in alone.parameters()], lr=0.1)
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(params, lr=0.1))
    extra, alone_extra = (torch.nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
    optimizer.add_param_group({"params": [extra], "lr": 0.3})
    reference.add_param_group({"params": [alone_extra], "lr": 0.3})
    for step in range(2):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        reference.zero_grad()
        (
            loss_of(model, share(inputs), share(targets)) + (extra * (bps.rank() + 1)).sum()
        ).backward()
        (loss_of(alone, inputs, targets) + (alone_extra * (bps.size() + 1) / 2).sum()).backward()
        optimizer.step()
        reference.step()
    assert difference(alone, model) < 1e-9
    assert torch.allclose(extra, alone_extra)


def test_groups_without_names(job):
    job.run(groups_and_names)


def wrong_names():
    model = start()

    def make(named):
        return bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named)

    named = list(model.named_parameters())
    with pytest.raises(ValueError, match=r"more than once: conv\.weight"):
        make([*named, ("conv.weight", torch.nn.Parameter(torch.ones(1)))])
    with pytest.raises(ValueError, match="pairs"):
        make([param for _, param in named])
    with pytest.raises(ValueError, match="named_parameters"):
        make(named[1:])
    with pytest.raises(ConfigError):
        bps.DistributedOptimizer(model)
    with pytest.raises(ConfigError):
        bps.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), backward_passes_per_step=0
        )
    # More names than the optimizer has parameters are no error, as in BytePS.
    half = torch.optim.SGD(model.last.parameters(), lr=0.1)
    bps.DistributedOptimizer(half, named)


def test_wrong_names(job):
    job.run(wrong_names)


def two_optimizers():
    """Two models with layers of the same names, and their steps interleaved."""
    rank = bps.rank()
    torch.manual_seed(2)
    models = [
        torch.nn.Linear(3, 2).double(),
        torch.nn.Linear(3, 5).double(),
        torch.nn.Linear(3, 2).double(),
    ]
    optimizers = [
        bps.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=1.0), m.named_parameters())
        for m in models
    ]
    before = copy.deepcopy(models)
    inputs = torch.full((1, 3), float(rank + 1), dtype=torch.float64)
    for model in models:
        model(inputs).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    mean = (bps.size() + 1) / 2
    for old, new in zip(before, models, strict=True):
        assert torch.allclose(old.weight - new.weight, torch.full_like(old.weight, mean))


def test_two_optimizers(job):
    job.run(two_optimizers)


def wrapped_again():
    model = start()
    first = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    second = bps.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.1), model.named_parameters()
    )
    inputs, targets = batch(0)
    loss_of(model, share(inputs), share(targets)).backward()
    second.step()
    with pytest.raises(UsageError, match="taken over"):
        first.step()
    second = bps.DistributedOptimizer(second, model.named_parameters())
    second.zero_grad()
    loss_of(model, share(inputs), share(targets)).backward()
    second.step()


def test_wrapped_again(job):
    job.run(wrapped_again)


def schedulers():
    for scheduler_first in (True, False):
        model = start()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if scheduler_first:
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
                optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters())
            else:
                optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters())
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            calls = []
            optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append(1))
            for step in range(3):
                inputs, targets = batch(step)
                optimizer.zero_grad()
                loss_of(model, share(inputs), share(targets)).backward()
                optimizer.step()
                scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.125
        assert len(calls) == 3
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["lr"] == 0.125
        optimizer.zero_grad()
        loss_of(model, share(inputs), share(targets)).backward()
        optimizer.step()
        assert len(calls) == 4


def test_schedulers(job):
    job.run(schedulers)


def compressed(name):
    compression = getattr(bps.Compression, name)
    alone, model = start().float(), start().float()
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = bps.DistributedOptimizer(
        optimizer, model.named_parameters(), compression=compression
    )
    for step in range(3):
        inputs, targets = (t.float() for t in batch(step))
        for m, o, x, y in (
            (alone, reference, inputs, targets),
            (model, optimizer, share(inputs), share(targets)),
        ):
            o.zero_grad()
            loss_of(m, x, y).backward()
            o.step()
    assert model.conv.weight.grad.dtype == torch.float32
    limit = {"none": 1e-6, "fp16": 1e-3, "bf16": 1e-2}[name]
    assert difference(alone, model) < limit
    for parameter in model.parameters():
        assert torch.equal(bps.broadcast(parameter.detach(), 0), parameter), (
            "all ranks hold the same bits"
        )


@pytest.mark.parametrize("name", ["none", "fp16", "bf16"])
def test_compression(job, name):
    job.run(compressed, name)


def half_models(dtype):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3).to(dtype)
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters()
    )
    before = model.bias.detach().clone()
    (model(torch.ones(1, 4, dtype=dtype)) * (bps.rank() + 1)).sum().backward()
    optimizer.step()
    wanted = before - torch.full((3,), (bps.size() + 1) / 2, dtype=dtype)
    assert torch.allclose(model.bias, wanted, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_models(job, dtype):
    job.run(half_models, dtype)


def sparse_gradients():
    rank, size = bps.rank(), bps.size()
    embedding = torch.nn.Embedding(6, 2, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    optimizer = bps.DistributedOptimizer(
        optimizer, embedding.named_parameters(), sparse_as_dense=True
    )
    bps.broadcast_parameters(embedding.state_dict(), 0)
    before = embedding.weight.detach().clone()
    embedding(torch.tensor([rank, 5])).sum().backward()
    optimizer.step()
    moved = before - embedding.weight
    for row in range(6):
        wanted = 1.0 if row == 5 else 1.0 / size if row < size else 0.0
        assert torch.allclose(moved[row], torch.full((2,), wanted)), row


def test_sparse_gradients_as_dense_ones(job):
    job.run(sparse_gradients)


def sums():
    model = torch.nn.Linear(2, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters(), op=bps.Sum)
    model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    optimizer.synchronize()
    assert torch.equal(model.bias.grad, torch.full((2,), float(bps.size()), dtype=torch.float64))
    with optimizer.skip_synchronize():
        optimizer.step()


def test_sums(job):
    job.run(sums)
