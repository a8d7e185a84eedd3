"""CrossBarrier against DistributedOptimizer: the same bits, and steps that do not wait."""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import torch

import byteps.torch as bps
from byteps.errors import ConfigError, UsageError
from byteps.torch import _pace
from byteps.torch.cross_barrier import CrossBarrier
from small_models import batch, loss_of, share, start
from test_amp import here

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
}


def same(one, other):
    """The same bits; with more than two ranks, sums in another order are allowed.

    Adam makes much of gradients that are nought but for rounding, hence the absolute bound.
    """
    if bps.size() <= 2:
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=1e-9, atol=1e-8)


def equal(one, other):
    return all(map(same, one.parameters(), other.parameters()))


def pair_of(kind, model=None, **options):
    """A model with DistributedOptimizer, and a copy with CrossBarrier."""
    one = model or start()
    other = copy.deepcopy(one)
    barrier = bps.DistributedOptimizer(OPTIMIZERS[kind](one.parameters()), one.named_parameters())
    crossed = CrossBarrier(
        other, OPTIMIZERS[kind](other.parameters()), other.named_parameters(), **options
    )
    return (one, barrier), (other, crossed)


def step(made, number, zero=True, loss=loss_of):
    model, optimizer = made
    if zero:
        optimizer.zero_grad()
    inputs, targets = batch(number)
    value = loss(model, share(inputs), share(targets))
    value.backward()
    optimizer.step()
    return value.detach()


def same_bits(kind):
    one, other = pair_of(kind)
    assert type(other[1]).__name__ == type(one[1]).__name__
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(made[1], max_lr=0.1, total_steps=7)
        if "momentum" in made[1].defaults
        else torch.optim.lr_scheduler.ExponentialLR(made[1], gamma=0.7)
        for made in (one, other)
    ]
    for number in range(6):
        assert same(step(one, number), step(other, number)), "the loss of the forward pass"
        # The optimizer's own step counts with the options of then, whatever comes between.
        assert len(other[1]._updates.pending) == 6
        for scheduler in schedulers:
            scheduler.step()
    other[1].flush()
    assert not other[1]._updates.pending and equal(one[0], other[0])
    states = [made[1].state_dict() for made in (one, other)]
    for key, value in states[0]["state"].items():
        for name, entry in value.items():
            found = states[1]["state"][key][name]
            assert same(entry, found) if torch.is_tensor(entry) else entry == found
    assert states[0]["param_groups"] == states[1]["param_groups"]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_same_bits(pair, kind):
    pair.run(same_bits, kind)


def test_same_bits_alone(single):
    single.run(same_bits, "adam")


def does_not_wait():
    """Rank 1 holds back what the last layer waits for until rank 0 has run the others."""
    rank = bps.rank()
    model = start()
    reference = copy.deepcopy(model)
    optimizer = CrossBarrier(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = torch.ones(1, 1, 6, 6, dtype=torch.float64)

    def hidden(model):
        return torch.tanh(model.hidden(torch.relu(model.conv(inputs)).flatten(1)))

    for net in (model, reference):
        (net.last(hidden(net)) if rank == 0 else hidden(net)).sum().backward()
    if rank == 1:
        bps.barrier()
    optimizer.step()
    pending = optimizer._updates.pending
    assert len(pending) == 6
    with torch.no_grad():
        hidden(model)
        if rank == 0:
            assert set(pending) == set(model.last.parameters()), "the front has been stepped"
            bps.barrier()
        model.last(hidden(model))
    assert not pending
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        gradient = torch.zeros_like(other) if other.grad is None else other.grad
        wanted = other - 0.1 * bps.push_pull(gradient)
        assert torch.allclose(param, wanted, atol=1e-12)


def test_step_does_not_wait(pair):
    pair.run(does_not_wait)


def front_layers_first():
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(16)])
    optimizer = CrossBarrier(model, torch.optim.SGD(model.parameters(), lr=0.1))
    priorities = [optimizer._byteps.priority_of(param) for param in model.parameters()]
    # Sixteen equal layers in eight classes.
    assert priorities == [-(number // 4) for number in range(32)]
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(4))]})
    late = optimizer.param_groups[-1]["params"][0]
    assert optimizer._byteps.priority_of(late) == -7


def test_front_layers_first(single):
    single.run(front_layers_first)


def looked_at_between_steps():
    one, other = pair_of("adam")
    inputs, _ = batch(50)
    looks = {
        "model": lambda made: list(made[0].state_dict().values()),
        "part": lambda made: list(made[0].hidden.state_dict().values()),
        "optimizer": lambda made: [
            entry for value in made[1].state_dict()["state"].values() for entry in value.values()
        ],
        "eval": lambda made: [made[0].eval()(inputs)],
        "inference": lambda made: [infer(made[0], inputs)],
    }
    for number, (name, look) in enumerate(looks.items()):
        step(one, number)
        step(other, number)
        assert other[1]._updates.pending
        for wanted, found in zip(look(one), look(other), strict=True):
            assert same(wanted, found), name
    saved = copy.deepcopy(one[0].state_dict()), copy.deepcopy(one[1].state_dict())
    for made in (one, other):
        step(made, 90)
        # What is loaded is not stepped by what came before.
        made[0].load_state_dict(saved[0])
        made[1].load_state_dict(copy.deepcopy(saved[1]))
        step(made, 91)
    bps.broadcast_optimizer_state(other[1], 0)
    bps.broadcast_parameters(other[0].state_dict(), 0)
    assert equal(one[0], other[0])


def infer(model, inputs):
    with torch.inference_mode():
        return model(inputs).clone()


def test_looked_at_between_steps(pair):
    pair.run(looked_at_between_steps)


def gradients_of_several_passes():
    one, other = pair_of("sgd", backward_passes_per_step=2)
    one[1].set_backward_passes_per_step(2)
    for number in range(4):
        for model, optimizer in (one, other):
            # Zeroed, set to None by the optimizer or the model, or not at all.
            zero = [optimizer.zero_grad, model.zero_grad][number % 2]
            zero(set_to_none=number < 2)
            for part in range(2):
                inputs, targets = batch(10 * number + part)
                loss_of(model, share(inputs), share(targets)).backward()
            optimizer.step()
        assert all(param.grad is None for param in other[0].parameters())
    other[1].flush()
    assert equal(one[0], other[0])
    assert all(param.grad is None for param in other[0].parameters())


def test_gradients_of_several_passes(pair):
    pair.run(gradients_of_several_passes)


class Tied(torch.nn.Module):
    """Weights used twice, weights of a child that never runs, and a branch that is left out."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(7, 8)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.branches = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.scale = torch.nn.Parameter(torch.ones(8))
        self.never = torch.nn.Linear(2, 2)

    def forward(self, words, branch):
        x = self.embed(words)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.branches[branch](x) * self.scale
        return torch.nn.functional.linear(x, self.embed.weight)


def tied_weights():
    torch.manual_seed(5)
    one, other = pair_of("adamw", Tied().double())
    outside = [torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2)]
    for made, extra in zip((one, other), outside, strict=True):
        made[1].add_param_group({"params": [extra], "lr": 0.02})
    for number in range(6):
        branch = (number + bps.rank()) % 2
        generator = torch.Generator("cpu").manual_seed(number)
        words = torch.randint(0, 7, (2, 5), generator=generator, device="cpu").to(here())
        losses = []
        for (model, optimizer), extra in zip((one, other), outside, strict=True):
            optimizer.zero_grad()
            logits = model(words, branch)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten())
            loss = loss + extra.pow(2).sum()
            losses.append(loss.detach())
            loss.backward()
            optimizer.step()
        assert same(*losses), number
    other[1].flush()
    assert equal(one[0], other[0]) and same(*outside)


def test_tied_weights(pair):
    pair.run(tied_weights)


class Wrapped(torch.nn.Module):
    """Modules without parameters of their own, the inner one of which uses those of its child."""

    class Inner(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.child = torch.nn.Linear(8, 8)
            self.relu = torch.nn.ReLU()

        def forward(self, x):
            return self.relu(torch.nn.functional.linear(x, self.child.weight, self.child.bias))

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(Wrapped.Inner(), torch.nn.ReLU())
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.inner(x))


def asks_few_modules():
    """A module without parameters is watched only once one below it was used without running."""
    torch.manual_seed(5)
    one, other = pair_of("sgd", Wrapped().double())
    model = other[0]

    def asked():
        return {name for name, module in model.named_modules() if module._forward_pre_hooks}

    assert asked() == {"", "inner.0.child", "head"}
    for number in range(4):
        inputs = torch.ones(2, 8, dtype=torch.float64, device=here()) * (number + bps.rank())
        for made in (one, other):
            made[1].zero_grad()
            made[0](inputs).pow(2).sum().backward()
            made[1].step()
        assert asked() == {"", "inner", "inner.0", "inner.0.child", "head"}
    other[1].flush()
    assert equal(one[0], other[0])


def test_asks_few_modules(pair):
    pair.run(asks_few_modules)


def used_behind_its_back():
    """A weight that another module uses for the first time while its update is under way."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = CrossBarrier(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = torch.ones(1, 2)
    if bps.rank() == 1:
        model[0](inputs).sum().backward()
        bps.barrier()  # Until then rank 0 waits for what the second layer needs.
        optimizer.step()
    else:
        model(inputs).sum().backward()
        optimizer.step()
        loss = torch.nn.functional.linear(model[0](inputs), model[1].weight).sum()
        with pytest.raises(UsageError, match=r"'Gradient.*1\.weight'.*flush"):
            loss.backward()
        bps.barrier()
    optimizer.flush()


def test_used_behind_its_back(pair):
    pair.run(used_behind_its_back)


def whole_steps():
    """Clipping, closures, hooks and scalers look at all gradients: such steps do not overlap."""
    one, other = pair_of("sgd")
    scalers = [torch.amp.GradScaler(here(), init_scale=64.0) for _ in range(2)]
    for number in range(5):
        for made, scaler in zip((one, other), scalers, strict=True):
            model, optimizer = made
            optimizer.zero_grad()
            inputs, targets = (share(tensor) for tensor in batch(number))
            overflow = float("inf") if number == 3 and bps.rank() == 0 else 1.0
            if number == 0:
                loss_of(model, inputs, targets).backward()
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
            elif number == 1:

                def closure(made=made, inputs=inputs, targets=targets):
                    made[1].zero_grad()
                    loss = loss_of(made[0], inputs, targets)
                    loss.backward()
                    return loss

                assert torch.is_tensor(optimizer.step(closure))
            elif number == 4:
                calls = []
                handle = optimizer.register_step_post_hook(lambda *_, c=calls: c.append(1))
                loss_of(model, inputs, targets).backward()
                optimizer.step()
                handle.remove()
                assert calls == [1]
            else:
                scaler.scale(loss_of(model, inputs, targets) * overflow).backward()
                scaler.step(optimizer)
                scaler.update()
        assert not other[1]._updates.pending and equal(*[made[0] for made in (one, other)])
    assert scalers[0].get_scale() == scalers[1].get_scale() == 32.0
    step(one, 9)
    step(other, 9)
    other[1].flush()
    assert equal(one[0], other[0])


def test_whole_steps(pair):
    pair.run(whole_steps)


def clipped_steps():
    """A program that clips gradients has no use for hooks, until it leaves out a step of that."""
    one, other = pair_of("sgd")
    for number in range(4):
        for model, optimizer in (one, other):
            optimizer.zero_grad()
            loss_of(model, *map(share, batch(number))).backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
        assert equal(one[0], other[0])
        assert hooks_of(other[0]) == (4, 0, 0, 0)[number]
    for number in range(4, 7):
        assert same(step(one, number), step(other, number))
        assert bool(other[1]._updates.pending) == (number > 4), "nobody has watched the first one"
        assert hooks_of(other[0]) == 4
    other[1].flush()
    assert equal(one[0], other[0])


def test_clipped_steps(pair):
    pair.run(clipped_steps)


def ways_in_turn(overlapping, whole):
    """It tries which steps are the faster ones, by a clock of the test, and takes those."""
    one, other = pair_of("adam")
    updates, pace = other[1]._updates, other[1]._pace
    now = [0.0]
    pace._mark = lambda: _At(now[0])
    ways = []
    for number in range(_pace._STEPS_AT_FIRST + _pace._STEPS_OF_A_TRIAL + 4):
        # As the forward pass of the next step does, but for a layer, which then comes at once.
        assert same(step(one, number), step(other, number))
        ways.append(len(updates.pending) == 6)
        assert ways[-1] or not updates.pending
        assert all(param.grad is None for param in other[0].parameters())
        now[0] += overlapping if ways[-1] else whole
    assert True in ways and False in ways
    assert ways[-4:] == [overlapping < whole] * 4
    assert updates.steps_left == 10**6 - len(ways)
    # Which modules run is looked at where it may be needed, and where a trial comes next: else the
    # model has no hooks.
    assert updates.is_watching == (overlapping < whole)
    assert hooks_of(other[0]) == (4 if updates.is_watching else 0)
    loss_of(other[0], *map(share, batch(0)))
    assert bool(updates.called) == updates.is_watching
    pace._number = _pace._STEPS_BETWEEN
    for number in range(3):
        assert same(step(one, number), step(other, number))
    assert updates.is_watching and updates.pending
    other[1].flush()
    assert equal(one[0], other[0])
    # A gradient that changed on its way is told of in both ways.
    step(other, 0)
    other[1].zero_grad()
    loss_of(other[0], *map(share, batch(1))).backward()
    other[0].last.weight.grad.mul_(0.5)
    with pytest.raises(UsageError, match="changed"):
        other[1].step()


def hooks_of(model):
    return sum(len(module._forward_pre_hooks) for module in model.modules())


def compiled_without_hooks():
    """Modules that were compiled while none had a hook are not asked: each step waits for them."""
    layers = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 2))
    one, other = pair_of("adam", torch.nn.Sequential(layers).double())
    model, updates, pace = other[0], other[1]._updates, other[1]._pace
    pace._number, pace.is_found, pace.overlaps = _pace._STEPS_OF_A_TRIAL + 1, True, False
    step(one, 0)
    step(other, 0)
    assert hooks_of(model) == 0

    @functools.partial(torch.compile, backend="eager")
    def compiled(inputs):
        return model(inputs)

    called = []

    def loss(_, inputs, targets):
        value = torch.nn.functional.mse_loss(compiled(inputs), targets)
        called.append(len(updates.called))
        return value

    for number in range(1, 8):
        if number == 3:
            pace._number = _pace._STEPS_BETWEEN
        assert same(step(one, number), step(other, number, loss=loss)), number
        # The layer, the model, and when nobody was seen to be asked, what is between.
        assert hooks_of(model) == (0, 0, 2, 3, 3, 3, 3)[number - 1]
        assert pace.overlaps == (number > 3) and not updates.pending
    assert called == [0] * 7
    assert equal(one[0], model)


def test_compiled_without_hooks(pair):
    pair.run(compiled_without_hooks, timeout=180)


class _At:
    def __init__(self, at):
        self.at = at

    def since(self, earlier):
        return self.at - earlier.at


@pytest.mark.parametrize("times", [(2.0, 1.0), (1.0, 2.0)])
def test_ways_in_turn(pair, times):
    pair.run(ways_in_turn, *times)


def last_steps():
    one, other = pair_of("sgd", num_steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(4):
            step(one, number)
            step(other, number)
            assert bool(other[1]._updates.pending) == (number == 0)
    assert equal(one[0], other[0])
    # Made distributed anew, it is brought up to date and left alone.
    model, optimizer = start(), None
    optimizer = CrossBarrier(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step((model, optimizer), 0)
    before = model.last.weight.clone()
    again = bps.DistributedOptimizer(optimizer, model.named_parameters())
    assert again is optimizer and not torch.equal(before, model.last.weight)
    step((model, again), 1)


def test_last_steps(pair):
    pair.run(last_steps)


def compressed():
    one, other = start().float(), start().float()
    compression = bps.Compression.fp16
    barrier = bps.DistributedOptimizer(
        OPTIMIZERS["adam"](one.parameters()), one.named_parameters(), compression
    )
    crossed = CrossBarrier(other, OPTIMIZERS["adam"](other.parameters()), None, compression)
    for number in range(4):
        for model, optimizer in ((one, barrier), (other, crossed)):
            inputs, targets = (share(tensor.float()) for tensor in batch(number))
            optimizer.zero_grad()
            with torch.autocast(here(), dtype=torch.bfloat16):
                loss = loss_of(model, inputs, targets.bfloat16())
            loss.backward()
            optimizer.step()
    crossed.flush()
    assert equal(one, other)


def test_compressed_and_autocast(pair):
    pair.run(compressed)


class Counts(torch.optim.SGD):
    """Keeps a number for all of its parameters, as some optimizers do."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1


def wrong_arguments():
    model = start()
    with pytest.raises(ConfigError, match="LBFGS"):
        CrossBarrier(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ConfigError, match="module"):
        CrossBarrier(model.parameters(), torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="num_steps"):
        CrossBarrier(model, torch.optim.SGD(model.parameters(), lr=0.1), num_steps=0)
    with pytest.raises(ConfigError, match="torch optimizer"):
        CrossBarrier(model, model)
    optimizer = CrossBarrier(model, Counts(model.parameters(), lr=0.1))
    inputs, targets = batch(0)
    loss_of(model, inputs, targets).backward()
    optimizer.step()
    with pytest.raises(UsageError, match=r"Counts.*\(steps\)"):
        model(inputs)


def test_wrong_arguments(single):
    single.run(wrong_arguments)
