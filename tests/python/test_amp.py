"""Mixed precision as torch has it: a gradient scaler decides alike on all ranks."""

from __future__ import annotations

import pytest
import torch

import byteps.torch as bps
from byteps.torch.parallel import DistributedDataParallel
from small_models import OPTIMIZERS, batch, difference, loss_of, share, start

# The steps in which one rank's gradients are infinite.
OVERFLOWS = (1, 4)


def here():
    """The kind of device that the test runs on."""
    return torch.get_default_device().type


def make(kind, model, **options):
    """The model as it is called, its optimizer, and a gradient scaler."""
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    if kind == "optimizer":
        optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    scaler = torch.amp.GradScaler(here(), init_scale=1024.0, growth_interval=2)
    return model, optimizer, scaler


def scaled_step(made, inputs, targets, overflow, clipped):
    model, optimizer, scaler = made
    optimizer.zero_grad()
    loss = loss_of(model, inputs, targets)
    scaler.scale(loss * float("inf") if overflow else loss).backward()
    if clipped:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    scaler.step(optimizer)
    scaler.update()


def overflow_on_one_rank(kind, clipped):
    last = bps.size() - 1
    alone, model = start(), start()
    reference, distributed = make("alone", alone), make(kind, model)
    for step in range(6):
        inputs, targets = batch(step)
        before = [param.detach().clone() for param in model.parameters()]
        scaled_step(reference, inputs, targets, step in OVERFLOWS, clipped)
        overflow = step in OVERFLOWS and bps.rank() == last
        scaled_step(distributed, share(inputs), share(targets), overflow, clipped)
        skipped = all(map(torch.equal, before, model.parameters()))
        assert skipped == (step in OVERFLOWS), step
        assert distributed[2].get_scale() == reference[2].get_scale(), step
    assert distributed[2].get_scale() != 1024.0
    assert difference(alone, model) < 1e-9


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("kind", ["optimizer", "ddp"])
def test_overflow_on_one_rank(job, kind, clipped):
    job.run(overflow_on_one_rank, kind, clipped)


def several_passes(kind):
    """Gradients of two passes are added up, then averaged, then unscaled."""
    alone, model = start(), start()
    _, reference, plain = make("alone", alone)
    options = {"backward_passes_per_step": 2} if kind == "optimizer" else {}
    wrapped, optimizer, scaler = make(kind, model, **options)
    for step in range(4):
        reference.zero_grad()
        optimizer.zero_grad()
        for number in range(2):
            inputs, targets = batch(10 * step + number)
            # The first pass of the third step overflows, on one rank alone.
            factor = float("inf") if step == 2 and number == 0 else 0.5
            plain.scale(loss_of(alone, inputs, targets) * factor).backward()
            factor = factor if bps.rank() == 0 else 0.5

            def backward(inputs=inputs, targets=targets, factor=factor):
                loss = loss_of(wrapped, share(inputs), share(targets))
                scaler.scale(loss * factor).backward()

            if kind == "ddp" and number == 0:
                with wrapped.no_sync():
                    backward()
            else:
                backward()
        plain.step(reference)
        plain.update()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == plain.get_scale(), step
    assert difference(alone, model) < 1e-9


@pytest.mark.parametrize("kind", ["optimizer", "ddp"])
def test_several_passes(job, kind):
    job.run(several_passes, kind)


def as_horovod_has_it():
    alone, model = start(), start()
    reference, distributed = make("alone", alone), make("optimizer", model)
    _, optimizer, scaler = distributed
    for step in range(3):
        inputs, targets = batch(step)
        scaled_step(reference, inputs, targets, step == 1, True)
        optimizer.zero_grad()
        loss = loss_of(model, share(inputs), share(targets))
        scaler.scale(loss * (float("inf") if step == 1 and bps.rank() == 0 else 1.0)).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == reference[2].get_scale()
    assert difference(alone, model) < 1e-9


def test_as_horovod_has_it(pair):
    pair.run(as_horovod_has_it)


def fused_optimizers():
    """An optimizer that unscales in its own kernel is asked in another way."""
    torch.manual_seed(3)
    alone, model = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    model.load_state_dict(alone.state_dict())
    reference = torch.optim.AdamW(alone.parameters(), lr=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters())
    bps.broadcast_parameters(model.state_dict(), 0)
    alone.load_state_dict(model.state_dict())
    scaler = torch.amp.GradScaler(here(), init_scale=64.0)
    for step in range(4):
        inputs = torch.full((2, 4), float(step + 1))
        overflow = float("inf") if step == 2 and bps.rank() == 0 else 1.0
        optimizer.zero_grad()
        loss = model(inputs).pow(2).mean() * (bps.rank() + 1)
        scaler.scale(loss * overflow).backward()
        scaler.step(optimizer)
        scaler.update()
        if step != 2:
            reference.zero_grad()
            (alone(inputs).pow(2).mean() * (bps.size() + 1) / 2).backward()
            reference.step()
    assert scaler.get_scale() == 32.0
    assert difference(alone, model) < 1e-5


def test_fused_optimizers(pair):
    pair.run(fused_optimizers)


def reading_options_waits_for_nothing():
    """Who reads a learning rate between two backward passes does not send what is not there."""
    model = start()
    optimizer = bps.DistributedOptimizer(
        OPTIMIZERS["sgd"](model.parameters()), model.named_parameters(), backward_passes_per_step=2
    )
    inputs, targets = batch(0)
    loss_of(model, share(inputs), share(targets)).backward()
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert not optimizer._byteps.is_under_way and not optimizer._byteps.synchronized

    class Wrapper:
        """As some libraries put around an optimizer."""

        def __init__(self, inner):
            self.inner = inner

        @property
        def param_groups(self):
            return self.inner.param_groups

        def step(self):
            return self.inner.step()

    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    scaler.unscale_(Wrapper(optimizer))
    assert not optimizer._byteps.is_under_way and optimizer._byteps.synchronized
    optimizer.step()


def test_reading_options_waits_for_nothing(pair):
    pair.run(reading_options_waits_for_nothing)


def autocast():
    """bfloat16 needs no scaler; the gradients are those of the float32 parameters."""
    torch.manual_seed(3)
    model = start().float()
    optimizer = bps.DistributedOptimizer(
        OPTIMIZERS["sgd"](model.parameters()), model.named_parameters()
    )
    for step in range(2):
        inputs, targets = (share(t.float()) for t in batch(step))
        optimizer.zero_grad()
        with torch.autocast(here(), dtype=torch.bfloat16):
            loss = loss_of(model, inputs, targets.bfloat16())
        loss.backward()
        assert all(param.grad.dtype == torch.float32 for param in model.parameters())
        optimizer.step()
    for param in model.parameters():
        assert torch.equal(bps.broadcast(param.detach(), 0), param)


def test_autocast(pair):
    pair.run(autocast)
