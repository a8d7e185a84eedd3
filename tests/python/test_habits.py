"""What users of torch do by habit: it trains as in one process, or says what to do instead."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import byteps.torch as bps
from byteps.errors import ConfigError, UsageError
from byteps.torch.cross_barrier import CrossBarrier
from byteps.torch.parallel import DistributedDataParallel
from small_models import Branches, batch, difference, loss_of, share, start

WAYS = ["optimizer", "cross", "ddp"]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(way, model, make=sgd, **options):
    """The model as it is called, and its optimizer."""
    optimizer = make(model)
    if way == "optimizer":
        optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    elif way == "cross":
        optimizer = CrossBarrier(model, optimizer, model.named_parameters(), **options)
    elif way == "ddp":
        model = DistributedDataParallel(model, **options)
    return model, optimizer


def finish(optimizer):
    getattr(optimizer, "flush", lambda: None)()


def gradients_are_averages_after_backward(way):
    """Clipping and logging between backward() and step() need no call of ours."""
    alone, raw = start(), start()
    reference, (model, optimizer) = sgd(alone), train(way, raw)
    for number in range(4):
        inputs, targets = batch(number)
        reference.zero_grad()
        loss_of(alone, inputs, targets).backward()
        wanted = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
        reference.step()
        optimizer.zero_grad()
        loss_of(model, share(inputs), share(targets)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        assert torch.allclose(norm, wanted), "the norm is that of the average"
        optimizer.step()
    assert difference(alone, raw) < 1e-9


@pytest.mark.parametrize("way", ["optimizer", "ddp"])
def test_gradients_are_averages_after_backward(job, way):
    job.run(gradients_are_averages_after_backward, way)


def changes_under_way_are_errors():
    def clipped(model, optimizer):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        with pytest.raises(UsageError, match=r"'Gradient.*more\).*optimizer.synchronize\(\)"):
            optimizer.step()

    def replaced(model, optimizer):
        model.last.bias.grad = model.last.bias.grad * 0.5
        with pytest.raises(UsageError, match=r"last.bias' was changed or replaced.*synchronize"):
            optimizer.step()

    for change in (clipped, replaced):
        model, optimizer = train("cross", start())
        inputs, targets = batch(0)
        loss_of(model, share(inputs), share(targets)).backward()
        change(model, optimizer)
        # As the message says; the optimizer goes on.
        optimizer.zero_grad()
        loss_of(model, share(inputs), share(targets)).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()


def test_changes_under_way_are_errors(job):
    job.run(changes_under_way_are_errors)


def hooks_that_change_gradients(way):
    """A hook from before ours changes what is sent; one that comes later changes it or raises."""
    alone, raw = start(), start()

    def twice(param):
        param.grad.mul_(2)

    for model in (alone, raw):
        model.last.bias.register_post_accumulate_grad_hook(twice)
    reference, (model, optimizer) = sgd(alone), train(way, raw)
    for number in range(2):
        inputs, targets = batch(number)
        loss_of(alone, inputs, targets).backward()
        reference.step()
        reference.zero_grad()
        loss_of(model, share(inputs), share(targets)).backward()
        optimizer.step()
        finish(optimizer)
        optimizer.zero_grad()
        # Fewer bytes than a batch: all are sent after the last hook.
        for one in (alone, raw):
            one.conv.bias.register_post_accumulate_grad_hook(twice)
    assert difference(alone, raw) < 1e-9


@pytest.mark.parametrize("way", WAYS)
def test_hooks_that_change_gradients(pair, way):
    pair.run(hooks_that_change_gradients, way)


def several_losses(way):
    """Each pass adds to gradients that are averages already."""
    alone, raw = start(), start()
    reference, (model, optimizer) = sgd(alone), train(way, raw)
    for number in range(3):
        reference.zero_grad()
        optimizer.zero_grad()
        for part in range(1 + number):
            inputs, targets = batch(10 * number + part)
            loss_of(alone, inputs, targets).backward()
            loss_of(model, share(inputs), share(targets)).backward()
        reference.step()
        optimizer.step()
    assert difference(alone, raw) < 1e-9


@pytest.mark.parametrize("way", ["optimizer", "ddp"])
def test_several_losses(job, way):
    job.run(several_losses, way)


def unequal_passes():
    model, optimizer = train("optimizer", start())
    inputs, targets = batch(0)
    if bps.rank() == 0:
        loss_of(model, inputs, targets).backward()
    with pytest.raises(UsageError, match=r"unequally often.*together 3 times"):
        for _ in range(2):
            loss_of(model, inputs, targets).backward()
            if bps.rank() == 1:
                optimizer.step()


def test_unequal_passes(pair):
    pair.run(unequal_passes)


def a_pass_less():
    """A rank without data skips backward()."""
    alone, raw = start(), start()
    model, optimizer = train("optimizer", raw)
    for number in range(3):
        inputs, targets = batch(number)
        optimizer.zero_grad()
        if bps.rank() == 0:
            loss_of(model, inputs, targets).backward()
        optimizer.step()
        alone.zero_grad()
        (loss_of(alone, inputs, targets) / bps.size()).backward()
        sgd(alone).step()
    assert difference(alone, raw) < 1e-9


def test_a_pass_less(job):
    job.run(a_pass_less)


def sums_are_summed_once():
    raw = torch.nn.Linear(2, 2).double()
    model, optimizer = train("optimizer", raw, op=bps.Sum)
    inputs = torch.ones(1, 2, dtype=torch.float64)
    for clear in (optimizer.zero_grad, optimizer.step):
        clear()
        raw.zero_grad()
        model(inputs).sum().backward()
        assert torch.equal(raw.bias.grad, torch.full((2,), float(bps.size())).double())
    with pytest.raises(UsageError, match="sum over all ranks already"):
        model(inputs).sum().backward()


def test_sums_are_summed_once(job):
    job.run(sums_are_summed_once)


class Gan:
    """As torch's DCGAN example: the generator's loss reaches the discriminator's parameters."""

    def __init__(self, way):
        torch.manual_seed(7)
        self.raw = [
            torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4)),
            torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)),
        ]
        made = [train(way, raw.double()) for raw in self.raw]
        (self.generator, self.steps_generator), (self.judge, self.steps_judge) = made

    def step(self, noise, real, one_pass):
        judge, mean = self.judge, lambda output: output.square().mean()
        self.raw[1].zero_grad()
        fake = self.generator(noise)
        if one_pass:
            (mean(judge(real) - 1) + mean(judge(fake.detach()))).backward()
        else:
            mean(judge(real) - 1).backward()
            mean(judge(fake.detach())).backward()
        self.steps_judge.step()
        self.raw[0].zero_grad()
        mean(judge(fake) - 1).backward()
        self.steps_generator.step()


def a_gan(way, one_pass):
    alone, gan = Gan("alone"), Gan(way)
    generator = torch.Generator("cpu").manual_seed(1)
    for _ in range(4):
        noise, real = (
            torch.randn(12, width, generator=generator, dtype=torch.float64) for width in (3, 4)
        )
        alone.step(noise, real, one_pass)
        gan.step(share(noise), share(real), one_pass)
    finish(gan.steps_judge)
    finish(gan.steps_generator)
    assert max(map(difference, alone.raw, gan.raw)) < 1e-9


@pytest.mark.parametrize("way", WAYS)
def test_a_gan(job, way):
    job.run(a_gan, way, True)


@pytest.mark.parametrize("way", ["optimizer", "ddp"])
def test_a_gan_with_two_passes(pair, way):
    pair.run(a_gan, way, False)


def one_pass_through_two_models(way):
    """Each rank meets their gradients in another order, and uses other branches."""
    rank, size = bps.rank(), bps.size()
    torch.manual_seed(2)
    raw = [Branches().double() for _ in range(2)]
    before = copy.deepcopy(raw)
    made = [train(way, one, lambda m: torch.optim.SGD(m.parameters(), lr=1.0)) for one in raw]
    inputs = torch.ones(1, 3, dtype=torch.float64)
    first, second = made if rank % 2 == 0 else made[::-1]
    (first[0](inputs, rank) + 2 * second[0](inputs, rank)).sum().backward()
    for _, optimizer in made:
        optimizer.step()
        finish(optimizer)
    for number, (old, new) in enumerate(zip(before, raw, strict=True)):
        for index, branch in enumerate(new.branches):
            moved = old.branches[index].bias - branch.bias
            factor = 1.0 if index % 2 == number else 2.0
            wanted = factor / size if index < size else 0.0
            assert torch.allclose(moved, torch.full((2,), wanted, dtype=torch.float64)), index


@pytest.mark.parametrize("way", WAYS)
def test_one_pass_through_two_models(job, way):
    job.run(one_pass_through_two_models, way)


class Checkpointed(torch.nn.Module):
    """Its backward pass runs others inside."""

    def __init__(self, reentrant):
        super().__init__()
        self.inner, self.reentrant = start(), reentrant

    def forward(self, x):
        net = self.inner
        x = checkpoint(lambda x: net.conv(x).relu(), x, use_reentrant=self.reentrant)
        x = net.hidden(x.flatten(1)).tanh()
        return checkpoint(net.last, x, use_reentrant=self.reentrant)


def checkpoints(way, reentrant):
    alone = start()
    raw = Checkpointed(reentrant)
    reference, (model, optimizer) = sgd(alone), train(way, raw)
    for number in range(3):
        inputs, targets = batch(number)
        reference.zero_grad()
        loss_of(alone, inputs, targets).backward()
        reference.step()
        optimizer.zero_grad()
        loss_of(model, share(inputs).requires_grad_(), share(targets)).backward()
        if way != "cross":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
    finish(optimizer)
    assert difference(alone, raw.inner) < 1e-9


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_checkpoints(pair, way, reentrant):
    pair.run(checkpoints, way, reentrant)


def cleared_in_odd_places(way):
    """Gradients that are dropped after backward(): no rank waits for another."""
    alone, raw = start(), start()
    reference, (model, optimizer) = sgd(alone), train(way, raw)
    clears = [
        optimizer.zero_grad,
        model.zero_grad,
        lambda: optimizer.zero_grad(set_to_none=False),
        lambda: [setattr(param, "grad", None) for param in raw.parameters()],
    ]
    for number, clear in enumerate(clears):
        inputs, targets = batch(number)
        loss_of(model, share(inputs), share(targets)).backward()
        clear()
        loss_of(model, share(inputs), share(targets)).backward()
        optimizer.step()
        clear()
        reference.zero_grad()
        loss_of(alone, inputs, targets).backward()
        reference.step()
    finish(optimizer)
    assert difference(alone, raw) < 1e-9


@pytest.mark.parametrize("way", WAYS)
def test_cleared_in_odd_places(job, way):
    job.run(cleared_in_odd_places, way)


def another_type_after_wrapping(way):
    for dtype in (torch.bfloat16, torch.float32):
        raw = torch.nn.Linear(4, 3).double()
        with torch.no_grad():
            raw.weight.fill_(0.5)
            raw.bias.fill_(0.5)
        model, optimizer = train(way, raw, lambda m: torch.optim.SGD(m.parameters(), lr=1.0))
        for _ in range(2):
            for now in (torch.float64, dtype):
                raw.to(now)
                optimizer.zero_grad()
                (model(torch.ones(1, 4, dtype=now)).sum() * (bps.rank() + 1)).backward()
                optimizer.step()
                finish(optimizer)
        wanted = torch.full((3,), 0.5 - 4 * (bps.size() + 1) / 2, dtype=dtype)
        assert torch.allclose(raw.bias, wanted, atol=1e-2), raw.bias


@pytest.mark.parametrize("way", WAYS)
def test_another_type_after_wrapping(job, way):
    job.run(another_type_after_wrapping, way)


def saved(what):
    buffer = io.BytesIO()
    torch.save(what, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda what: pickle.loads(pickle.dumps(what)),
    "torch.save": saved,
}


def trained_model_is_copied(way, kind):
    raw = start()
    _, optimizer = train(way, raw)
    inputs, targets = batch(0)
    loss_of(raw, share(inputs), share(targets)).backward()
    optimizer.step()
    finish(optimizer)
    make_copy = COPIES[kind]
    for name, value in make_copy(raw.state_dict(keep_vars=True)).items():
        assert torch.equal(value, raw.state_dict()[name])
    sent = bps.broadcast_object(raw if bps.rank() == 0 else None, 0, "whole model")
    assert difference(sent, raw) == 0
    # A copy trains by itself, and with an optimizer of its own on all ranks.
    other, alone = make_copy(raw), make_copy(raw)
    assert not other.conv.weight._post_accumulate_grad_hooks
    reference, (_, optimizer) = sgd(alone), train(way, other)
    loss_of(alone, inputs, targets).backward()
    reference.step()
    loss_of(other, share(inputs), share(targets)).backward()
    optimizer.step()
    finish(optimizer)
    assert difference(alone, other) < 1e-9 < difference(raw, other)


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("way", ["optimizer", "cross"])
def test_trained_model_is_copied(pair, way, kind):
    pair.run(trained_model_is_copied, way, kind)


def optimizer_is_copied(way, kind):
    raw, alone = start(), start()
    make = lambda m: torch.optim.Adam(m.parameters(), lr=0.01)  # noqa: E731
    reference, (_, optimizer) = make(alone), train(way, raw, make)

    def step(model, optimizer, number, part=share):
        inputs, targets = batch(number)
        optimizer.zero_grad()
        loss_of(model, part(inputs), part(targets)).backward()
        optimizer.step()

    whole = lambda tensor: tensor  # noqa: E731
    step(raw, optimizer, 0)
    step(alone, reference, 0, whole)
    finish(optimizer)
    other, copied = COPIES[kind]((raw, optimizer))
    assert type(copied).__name__ == "Adam" and isinstance(copied, torch.optim.Adam)
    assert copied.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    copied.load_state_dict(copied.state_dict())
    copied.zero_grad()
    before = copy.deepcopy(other)
    for refused in (copied.step, copied.synchronize):
        with pytest.raises(UsageError, match=r"copy of a distributed one.*DistributedOptimizer"):
            refused()
    assert difference(other, before) == 0
    # The first one goes on, and so does the copy once it is distributed.
    step(raw, optimizer, 1)
    finish(optimizer)
    step(alone, reference, 1, whole)
    copied = (
        CrossBarrier(other, copied)
        if way == "cross"
        else bps.DistributedOptimizer(copied, other.named_parameters())
    )
    step(other, copied, 1)
    finish(copied)
    assert difference(alone, raw) < 1e-9 and difference(alone, other) < 1e-9


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("way", ["optimizer", "cross"])
def test_optimizer_is_copied(pair, way, kind):
    pair.run(optimizer_is_copied, way, kind)


def wrapped_module_is_copied(kind):
    alone, model = start(), DistributedDataParallel(start(), find_unused_parameters=True)
    inputs, targets = batch(0)
    loss_of(model, share(inputs), share(targets)).backward()
    model.zero_grad()
    if bps.rank() == 0:
        # As an average of weights that one rank keeps.
        kept = COPIES[kind](model).eval().requires_grad_(False)
        assert torch.allclose(kept(inputs), model.module(inputs))
    other = COPIES[kind](model)
    reference, optimizer = sgd(alone), sgd(other)
    for number in range(2):
        inputs, targets = batch(number)
        reference.zero_grad()
        loss_of(alone, inputs, targets).backward()
        reference.step()
        optimizer.zero_grad()
        loss_of(other, share(inputs), share(targets)).backward()
        optimizer.step()
    assert difference(alone, other.module) < 1e-9
    assert difference(start(), model.module) == 0


@pytest.mark.parametrize("kind", COPIES)
def test_wrapped_module_is_copied(job, kind):
    job.run(wrapped_module_is_copied, kind)


def arguments_of_torchs_class():
    module = torch.nn.Linear(2, 2)
    model = DistributedDataParallel(
        module,
        output_device="cpu",
        process_group=None,
        bucket_cap_mb=None,
        static_graph=True,
        gradient_as_bucket_view=True,
    )
    model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(module.bias.grad, torch.ones(2))
    for wrong in ({"process_group": object()}, {"output_device": 3}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))}.*pass None"):
            DistributedDataParallel(module, **wrong)


def test_arguments_of_torchs_class(single):
    single.run(arguments_of_torchs_class)


def unused_in_the_last_pass_alone():
    """A parameter that only passes without sync have used is averaged, too."""
    rank, size = bps.rank(), bps.size()
    model = DistributedDataParallel(Branches().double(), find_unused_parameters=True)
    inputs = torch.ones(1, 3, dtype=torch.float64)
    with model.no_sync():
        model(inputs, rank).sum().backward()
    model(inputs, 3).sum().backward()
    for index, branch in enumerate(model.module.branches[:size]):
        assert torch.allclose(branch.bias.grad, torch.full((2,), 1 / size).double()), index


def test_unused_in_the_last_pass_alone(job):
    job.run(unused_in_the_last_pass_alone)


def compiled(way):
    """torch.compile says nothing of us, and trains alike."""
    alone = start()
    for is_compiled in (False, True):
        raw = copy.deepcopy(alone)
        model, optimizer = train(way, raw)
        if is_compiled:
            model = torch.compile(model, backend="eager")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for number in range(2):
                inputs, targets = batch(number)
                optimizer.zero_grad()
                loss_of(model, share(inputs), share(targets)).backward()
                optimizer.step()
        finish(optimizer)
        if not is_compiled:
            wanted = raw
    assert difference(wanted, raw) < 1e-12


@pytest.mark.parametrize("way", WAYS)
def test_compiled(pair, way):
    pair.run(compiled, way, timeout=180)
