"""Optimizers that step on the servers, beside those of torch in one process."""

from __future__ import annotations

import pytest

from cluster import Cluster

STEPS = 20


def shapes():
    return {"weight": (7, 33), "bias": (33,), "scale": ()}


def params(seed=0, dtype=None):
    import torch

    generator = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes().items()}
    return {name: value.to(dtype).requires_grad_() for name, value in made.items()}


def gradient(rank, step, name):
    import torch

    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(shapes()[name], generator=generator)


def optimizer(kind, named, **options):
    """One with a group of its own for the bias, of another rate and decay."""
    import torch

    own = {"params": [named["bias"]], "lr": 0.003, "weight_decay": 0.25}
    others = {"params": [named["weight"], named["scale"]]}
    return getattr(torch.optim, kind)([others, own], lr=0.05, **options)


def schedule(optimizer):
    import torch

    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 15)


class Alone:
    """The same training in one process, with the averages of all ranks' gradients."""

    def __init__(self, kind, size, options):
        self.size = size
        self.params = params()
        self.optimizer = optimizer(kind, self.params, **options)
        self.schedule = schedule(self.optimizer)

    def step(self, step):
        for name, param in self.params.items():
            gradients = [gradient(rank, step, name) for rank in range(self.size)]
            param.grad = sum(gradients[1:], gradients[0]) / self.size
        self.optimizer.step()
        self.schedule.step()


def distance(one, other):
    """By how many units in the last place of the largest of 1 and its value an element differs."""
    import torch

    size = torch.maximum(other.abs(), torch.ones_like(other))
    return ((one - other).abs() / (size * torch.finfo(torch.float32).eps)).max().item()


def same_everywhere(named):
    import torch

    import byteps.torch as bps

    for param in named.values():
        flat = param.detach().reshape(1, -1)
        assert all(torch.equal(flat[0], other) for other in bps.allgather(flat))


def compare(kind, options):
    import byteps.torch as bps

    # Only the root has the right ones: nobody broadcasts.
    named = params(bps.rank())
    alone = Alone(kind, bps.size(), options)
    servers = bps.ServerOptimizer(optimizer(kind, named, **options), named.items())
    rates = schedule(servers)
    worst = 0.0
    for step in range(STEPS):
        servers.zero_grad()
        for name, param in named.items():
            param.grad = gradient(bps.rank(), step, name)
        servers.step()
        rates.step()
        alone.step(step)
        same_everywhere(named)
        for name, param in named.items():
            worst = max(worst, distance(param.detach(), alone.params[name].detach()))
    assert not servers.state, "the state is on the servers"
    for name, kept in bps.server_state_dict(servers).items():
        expected = alone.optimizer.state[alone.params[name]]
        assert kept.pop("step") == STEPS
        worst = max(worst, distance(kept.pop("master"), alone.params[name].detach()))
        for what, value in kept.items():
            worst = max(worst, distance(value, expected[what]))
    return worst


@pytest.mark.parametrize(
    ("ranks", "kind", "options"),
    [
        ("pair", "SGD", {}),
        ("trio", "SGD", {"momentum": 0.9, "dampening": 0.25, "weight_decay": 0.01}),
        ("pair", "SGD", {"momentum": 0.9, "nesterov": True}),
        ("trio", "Adam", {"weight_decay": 0.01}),
        ("pair", "AdamW", {"betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}),
        ("trio", "AdamW", {}),
    ],
)
def test_parameters_are_those_of_one_process(request, ranks, kind, options):
    """Also the state, with learning rates of a schedule, in two groups of other options."""
    for worst in request.getfixturevalue(ranks).run(compare, kind, options):
        print(f"{kind} {options}: {worst:.1f} units in the last place after {STEPS} steps")
        assert worst <= 16


def learn(wire, dtype_name):
    import torch
    from torch import nn

    import byteps.torch as bps

    torch.manual_seed(bps.rank())
    dtype = getattr(torch, dtype_name)
    model = nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 1)).to(dtype)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
    servers = bps.ServerOptimizer(adamw, model.named_parameters(), wire=wire)
    generator = torch.Generator().manual_seed(bps.rank())
    inputs = torch.randn(128, 12, generator=generator)
    inputs, targets = inputs.to(dtype), inputs.sum(1, keepdim=True).sin().to(dtype)
    losses = []
    for _ in range(60):
        servers.zero_grad()
        loss = (model(inputs) - targets).float().square().mean()
        loss.backward()
        servers.step()
        losses.append(loss.item())
    same_everywhere(dict(model.named_parameters()))
    kept = bps.server_state_dict(servers)
    for name, param in model.named_parameters():
        master = kept[name]["master"]
        assert master.dtype == torch.float32
        seen = {"f32": master, "bf16": master.bfloat16(), "fp16": master.half()}[wire]
        assert torch.equal(param.detach(), seen.to(dtype))
        if wire != "f32" and param.ndim > 1:
            assert not torch.equal(master, seen.float()), "the master has more digits"
    return losses[0], losses[-1]


@pytest.mark.parametrize(
    ("wire", "dtype"), [("f32", "bfloat16"), ("bf16", "float32"), ("bf16", "bfloat16"),
                        ("fp16", "float32")]
)  # fmt: skip
def test_halves_travel_and_masters_are_float32(coded, wire, dtype):
    for first, last in coded.run(learn, wire, dtype):
        assert last < first / 3


@pytest.fixture(scope="module")
def coded():
    """A job that encodes small tensors, too, in several parts, added up in hosts first."""
    environment = {
        "BYTEPS_MIN_COMPRESS_BYTES": "0",
        "BYTEPS_PARTITION_BYTES": "4096",
        "BPS_LOCAL_REDUCE": "1",
        "BYTEPS_FORCE_DISTRIBUTED": "1",
    }
    with Cluster(2, servers=2, environment=environment) as cluster:
        cluster.run(initialise)
        yield cluster


def initialise():
    import torch

    import byteps.torch as bps

    torch.set_num_threads(1)
    bps.init()


def in_parts():
    import torch

    import byteps.torch as bps

    start = torch.linspace(-1, 1, 30_000)
    param = start.clone().requires_grad_()
    servers = bps.ServerOptimizer(torch.optim.SGD([param], lr=0.5, momentum=0.5))
    for _ in range(3):
        param.grad = torch.arange(30_000.0) * (1 + bps.rank())
        servers.step()
    gradient = torch.arange(30_000.0) * 1.5
    moved = gradient * (1 + 1.5 + 1.75)
    assert torch.allclose(param.detach(), start - 0.5 * moved, rtol=1e-6)
    kept = bps.server_state_dict(servers)["push_pull.noname.0"]
    assert torch.equal(kept["momentum_buffer"], gradient * 1.75)


def test_a_tensor_of_several_parts_is_whole(coded):
    coded.run(in_parts)


def steps_from(servers, named, first, last):
    for step in range(first, last):
        for name, param in named.items():
            # The same in a job of any number of ranks.
            param.grad = gradient(0, step, name)
        servers.step()


def save(path):
    import torch

    import byteps.torch as bps

    named = params()
    servers = bps.ServerOptimizer(optimizer("AdamW", named), named.items(), wire="bf16")
    steps_from(servers, named, 0, 5)
    kept, plain = bps.server_state_dict(servers), servers.state_dict()
    if bps.rank() == 0:
        torch.save({"servers": kept, "optimizer": plain}, path)
    bps.barrier()
    steps_from(servers, named, 5, 10)
    return {name: param.detach() for name, param in named.items()}


def load(path, how):
    import torch

    import byteps.torch as bps

    named = params(7)
    servers = bps.ServerOptimizer(optimizer("AdamW", named), named.items(), wire="bf16")
    state = torch.load(path, weights_only=True)
    if how == "servers":
        bps.load_server_state_dict(servers, state["servers"])
    else:
        servers.load_state_dict(state["optimizer"])
        # Before a step it is what was loaded, also if another rank is not asked.
        again = servers.state_dict()["state"]
        assert torch.equal(again[0]["exp_avg"], state["optimizer"]["state"][0]["exp_avg"])
    assert torch.equal(named["bias"].detach(), state["servers"]["bias"]["master"])
    steps_from(servers, named, 5, 10)
    return {name: param.detach() for name, param in named.items()}


def test_a_state_goes_on_with_other_ranks_and_servers(pair, trio, coded, tmp_path):
    import torch

    path = str(tmp_path / "state")
    expected = coded.run(save, path)[0]
    for cluster, how in ((coded, "optimizer"), (coded, "servers")):
        for seen in cluster.run(load, path, how):
            assert all(torch.equal(seen[name], value) for name, value in expected.items())
    # Three ranks average to other roundings, and here small tensors are not encoded.
    for cluster in (pair, trio):
        for seen in cluster.run(load, path, "servers"):
            for name, value in expected.items():
                assert torch.allclose(seen[name], value, rtol=0.01, atol=1e-3)


def torch_state():
    import byteps.torch as bps

    local = params()
    alone = optimizer("AdamW", local)
    steps_from(alone, local, 0, 3)
    # A state of torch's goes to the servers, and back.
    named = {name: param.detach().clone().requires_grad_() for name, param in local.items()}
    servers = bps.ServerOptimizer(optimizer("AdamW", named), named.items())
    servers.load_state_dict(alone.state_dict())
    steps_from(servers, named, 3, 6)
    steps_from(alone, local, 3, 6)
    again = {name: param.detach().clone().requires_grad_() for name, param in named.items()}
    back = optimizer("AdamW", again)
    back.load_state_dict(servers.state_dict())
    steps_from(back, again, 6, 8)
    steps_from(alone, local, 6, 8)
    for name, param in local.items():
        assert distance(again[name].detach(), param.detach()) <= 8


def test_states_of_torch_and_of_servers_are_exchanged(pair, trio):
    pair.run(torch_state)
    trio.run(torch_state)


def in_epochs():
    import torch

    import byteps.torch as bps

    param = torch.full((5,), 1.0 + bps.rank()).requires_grad_()
    servers = bps.ServerOptimizer(torch.optim.SGD([param], lr=1.0, momentum=0.5))

    def step():
        param.grad = torch.full_like(param, -1.0)
        servers.step()
        return param.detach().tolist()

    assert step() == [2.0] * 5
    assert step() == [3.5] * 5
    state = bps.server_state_dict(servers)
    bps.suspend()
    bps.resume(1, 1)
    # The parameters of the root, and moments that begin anew.
    with torch.no_grad():
        param.fill_(10.0 * (1 + bps.rank()))
    assert step() == [11.0] * 5
    bps.suspend()
    bps.resume(1, 1)
    # Or what was saved, also if only the root has it.
    if bps.rank() == 0:
        bps.load_server_state_dict(servers, state)
    assert step() == [3.5 + 1.75] * 5
    saved = bps.elastic.TorchState(None, servers)
    saved.commit()
    bps.suspend()
    bps.resume(1, 1)
    # An elastic job that lets newcomers in takes moments of the last commit, and parameters of now.
    with torch.no_grad():
        param.fill_(10.0)
    saved.sync()
    assert step() == [10.0 + 1.875] * 5
    saved.commit()
    step()
    # One in which somebody died takes both.
    bps.suspend()
    bps.resume(1, 1)
    saved.restore()
    saved.sync()
    assert step() == [11.875 + 1.9375] * 5


def test_an_epoch_begins_with_what_the_root_has(coded):
    coded.run(in_epochs)


def refusals():
    import torch

    import byteps.torch as bps
    from byteps.errors import ConfigError, MismatchError, UsageError

    def made(kind="SGD", dtype=torch.float32, options=(), **arguments):
        param = torch.zeros(2, dtype=dtype, requires_grad=True)
        param.grad = torch.zeros(2, dtype=dtype)
        return bps.ServerOptimizer(
            getattr(torch.optim, kind)([param], lr=1.0, **dict(options)), **arguments
        )

    for arguments, why in (
        ({"kind": "RMSprop"}, "SGD, Adam and AdamW do, not as RMSprop"),
        ({"kind": "Adam", "options": {"amsgrad": True}}, "amsgrad=True: servers have no such"),
        ({"options": {"maximize": True}}, "maximize=True"),
        ({"dtype": torch.float64}, "of torch.float64, and servers step in float32"),
        ({"wire": "int8"}, "wire='int8': one of f32, bf16, fp16"),
    ):
        with pytest.raises(ConfigError, match=why):
            made(**arguments)
    servers = made(options={"momentum": 0.9})
    with pytest.raises(UsageError, match="skip_synchronize"), servers.skip_synchronize():
        pass
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    with pytest.raises(UsageError, match="a gradient scaler skips steps of single ranks"):
        scaler.unscale_(servers)
    servers.step()
    servers.param_groups[0]["momentum"] = 0.5
    with pytest.raises(ConfigError, match=r"have become sgd\(momentum=0.5.* only learning rates"):
        servers.step()
    with pytest.raises(ConfigError, match="'nobody', which no parameter"):
        bps.load_server_state_dict(servers, {"nobody": {}})
    name = "push_pull.noname.0"
    with pytest.raises(ConfigError, match="a master of shape"):
        bps.load_server_state_dict(servers, {name: {"master": torch.zeros(3)}})
    with pytest.raises(UsageError, match="keeps its state in this process"):
        bps.server_state_dict(torch.optim.SGD([torch.zeros(1)], lr=1.0))
    disputed = made(kind=["SGD", "Adam"][bps.rank()])
    with pytest.raises(MismatchError, match="on the servers"):
        disputed.step()
    bps.barrier()


def test_what_cannot_be_is_refused_with_what_to_do(pair):
    pair.run(refusals)


def by_itself():
    named = params()
    import byteps.torch as bps

    servers = bps.ServerOptimizer(optimizer("AdamW", named), named.items())
    alone = params()
    torch_optimizer = optimizer("AdamW", alone)
    for one, of_one in ((servers, named), (torch_optimizer, alone)):
        steps_from(one, of_one, 0, 4)
    assert all(alone[name].equal(param) for name, param in named.items())
    assert servers.state_dict()["state"][0]["step"] == 4


def test_a_process_alone_steps_by_itself(single):
    single.run(by_itself)


def some_ranks():
    import torch

    import byteps.torch as bps

    ranks = bps.add_process_set([0, 2])
    param = torch.full((4,), 5.0 * bps.rank(), requires_grad=True)
    servers = bps.ServerOptimizer(torch.optim.SGD([param], lr=1.0), process_set=ranks)
    param.grad = torch.full_like(param, -2.0 * bps.rank())
    servers.step()
    # The rank that is not in the set has trained alone.
    assert param.detach().tolist() == [7.0 if bps.rank() == 1 else 2.0] * 4
    bps.barrier()
    bps.remove_process_set(ranks)


def test_a_process_set_trains_among_itself(trio):
    trio.run(some_ranks)


def frozen():
    import torch

    import byteps.torch as bps

    one, other = (torch.zeros(3, requires_grad=True) for _ in range(2))
    servers = bps.ServerOptimizer(torch.optim.SGD([one, other], lr=1.0))
    other.requires_grad_(False)

    def closure():
        servers.zero_grad()
        loss = (one + other).sum() * (1 + bps.rank())
        loss.backward()
        return loss

    assert servers.step(closure).item() == 0.0
    assert (one.tolist(), other.tolist()) == ([-1.5] * 3, [0.0] * 3)
    # It joins when it is thawed; the other goes on, without a gradient on one rank.
    other.requires_grad_(True)
    servers.zero_grad()
    ((one if bps.rank() else 0.0) + other).sum().backward()
    servers.step()
    assert (one.tolist(), other.tolist()) == ([-2.0] * 3, [-1.0] * 3)
    late = torch.full((2,), 1.0 + bps.rank(), requires_grad=True)
    servers.add_param_group({"params": [late], "lr": 0.5})
    servers.zero_grad()
    late.sum().backward()
    servers.step()
    assert late.tolist() == [0.5] * 2


def test_parameters_are_frozen_thawed_and_added(pair):
    pair.run(frozen)


def overlapping():
    import torch
    from torch import nn

    import byteps.torch as bps
    from byteps.errors import UsageError

    def training(overlap):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3), nn.Linear(3, 1))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        servers = bps.ServerOptimizer(sgd, model.named_parameters(), overlap=overlap)
        rates = torch.optim.lr_scheduler.ExponentialLR(servers, 0.9)
        inputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(bps.rank()))
        for step in range(5):
            servers.zero_grad()
            # A layer is left out on one rank now and then.
            layers = model[:2] if step == 3 and bps.rank() == 0 else model
            layers(inputs).square().mean().backward()
            assert len(servers._under_way) == (overlap and step > 0) * len(
                list(layers.parameters())
            )
            servers.step()
            rates.step()
        return model, servers, inputs

    plain, *_ = training(False)
    model, servers, inputs = training(True)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
    model(inputs).mean().backward()
    with pytest.raises(UsageError, match="a second backward"):
        model(inputs).mean().backward()
    servers.step()
    servers.zero_grad()
    model(inputs).mean().backward()
    servers.param_groups[0]["lr"] = 7.0
    with pytest.raises(UsageError, match=r"and step\(\) comes at 7\.0"):
        servers.step()


def test_gradients_leave_while_backward_runs(pair):
    pair.run(overlapping)


def other_rates():
    import torch

    import byteps.torch as bps
    from byteps.errors import BytePSError

    param = torch.zeros(4, requires_grad=True)
    servers = bps.ServerOptimizer(torch.optim.SGD([param], lr=0.5), [("layer", param)])
    param.grad = torch.ones(4)
    servers.step()
    servers.param_groups[0]["lr"] = 0.25 * (1 + bps.rank())
    both = r"rate 0\.25.*rate 0\.5|rate 0\.5.*rate 0\.25"
    with pytest.raises(BytePSError, match=both) as error:
        servers.step()
    return type(error.value).__name__, error.value.ranks


def test_ranks_with_other_learning_rates_are_told_of_both(coded):
    """The last one: it ends the job."""
    told = coded.run(other_rates)
    assert ("MismatchError", (0, 1)) in told
    coded.kill()
