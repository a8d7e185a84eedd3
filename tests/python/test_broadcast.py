"""broadcast, and what starts all ranks from the same place."""

from __future__ import annotations

import copy
import pickle
import time

import pytest
import torch

import byteps.torch as bps
from byteps.errors import ConfigError, CorruptionError, MismatchError, TensorError
from byteps.torch import functions
from cluster import Cluster
from conftest import initialise

EVERY_DTYPE = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def mine(shape, dtype, rank=None):
    rank = bps.rank() if rank is None else rank
    generator = torch.Generator().manual_seed(rank + 1)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 50).abs().to(dtype)


def every_type_and_root():
    for dtype in EVERY_DTYPE:
        for shape in [(), (0,), (17,), (3, 4, 5)]:
            for root in range(bps.size()):
                tensor, wanted = mine(shape, dtype), mine(shape, dtype, root)
                name = f"broadcast.{dtype}.{shape}"
                before = tensor.clone()
                assert torch.equal(bps.broadcast(tensor, root, name), wanted), name
                assert torch.equal(tensor, before)
                assert torch.equal(bps.synchronize(bps.broadcast_async(tensor, root)), wanted)
                inplace = tensor.clone()
                assert bps.broadcast_(inplace, root, name) is inplace
                assert torch.equal(inplace, wanted)
                inplace = tensor.clone()
                assert bps.synchronize(bps.broadcast_async_(inplace, root)) is inplace
                assert torch.equal(inplace, wanted)


def test_every_type_and_root(job):
    job.run(every_type_and_root)


def bit_for_bit():
    root = torch.tensor([float("nan"), float("-inf"), -0.0, 1e-45])
    other = torch.tensor([float("inf"), float("nan"), 7.0, float("nan")])
    result = bps.broadcast(root if bps.rank() == 0 else other, 0, "bits")
    assert torch.equal(result.view(torch.int32), root.view(torch.int32))
    gap = torch.arange(12.0).reshape(3, 4) + 100 * bps.rank()
    bps.broadcast_(gap[:, 1:3], 0, "bits.gap")
    assert torch.equal(gap[:, 1:3], torch.arange(12.0).reshape(3, 4)[:, 1:3])
    assert torch.equal(gap[:, 0], torch.arange(12.0).reshape(3, 4)[:, 0] + 100 * bps.rank())


def test_bit_for_bit(job):
    job.run(bit_for_bit)


def wrong_roots():
    for root in (-1, bps.size(), 1000):
        with pytest.raises(ConfigError, match="rank"):
            bps.broadcast(torch.ones(3), root)
        with pytest.raises(ValueError):
            bps.broadcast_parameters({"w": torch.ones(3)}, root)
    with pytest.raises(TensorError):
        bps.broadcast(torch.eye(3).to_sparse(), 0)


def test_wrong_roots(job):
    job.run(wrong_roots)


class Net(torch.nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.first = torch.nn.Linear(3, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.last = torch.nn.Linear(width, 2)
        self.register_buffer("mask", torch.rand(width) > 0.5)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


def seeded(width=4):
    torch.manual_seed(bps.rank())
    return Net(width)


def parameters():
    root = bps.size() - 1
    torch.manual_seed(root)
    wanted = Net().state_dict()
    for form in ("state_dict", "dict", "named_parameters", "list", "tensors"):
        model = seeded()
        if form == "state_dict":
            bps.broadcast_parameters(model.state_dict(), root)
        elif form == "dict":
            bps.broadcast_parameters(dict(model.named_parameters()), root_rank=root)
        elif form == "named_parameters":
            bps.broadcast_parameters(model.named_parameters(), root)
        elif form == "list":
            bps.broadcast_parameters(list(model.named_parameters()), root, prefix="Other.")
        else:
            bps.broadcast_parameters(list(model.parameters()), root)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, wanted[name]), (form, name)
        if form == "state_dict":
            assert torch.equal(model.mask, wanted["mask"])
    # Another model whose layers have the same names and other sizes.
    other = seeded(width=6)
    bps.broadcast_parameters(other.state_dict(), root)
    torch.manual_seed(root)
    assert torch.equal(other.first.weight, Net(6).first.weight)
    # One weight under two names.
    tied = seeded()
    tied.last = tied.first
    bps.broadcast_parameters(tied.state_dict(), 0)
    bps.broadcast_parameters({}, 0)
    for wrong in ([1], [("a", 1)], [("a", torch.ones(1), 2)]):
        with pytest.raises(ValueError):
            bps.broadcast_parameters(wrong, 0)


def test_parameters(job):
    job.run(parameters)


def nested_parameters():
    rank, root = bps.rank(), bps.size() - 1
    mine = lambda: torch.full((3,), float(rank))  # noqa: E731
    nested = {"model": {"weight": mine()}, "ema": [mine(), (mine(), 0.5)], "step": rank, 7: mine()}
    bps.broadcast_parameters(nested, root, prefix="Nested.")
    tensors = nested["model"]["weight"], nested["ema"][0], nested["ema"][1][0], nested[7]
    for tensor in tensors:
        assert torch.equal(tensor, torch.full((3,), float(root)))
    assert nested["step"] == rank
    model = seeded()
    optimizer = torch.optim.Adam(model.parameters())
    # A fresh optimizer has options and no tensor, a trained one has both, a checkpoint has it
    # beside the model.
    for _ in range(2):
        state = optimizer.state_dict()
        for wrong in (state, {"model": model.state_dict(), "optimizer": state}, optimizer):
            with pytest.raises(ConfigError, match="broadcast_optimizer_state"):
                bps.broadcast_parameters(wrong, 0)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    with pytest.raises(ConfigError, match=r"no tensor in a dict of 2 other values, such as 'a.b'"):
        bps.broadcast_parameters({"a": {"b": 1}, "c": "text"}, 0)


def test_nested_parameters(job):
    job.run(nested_parameters)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1),
}


def train(model, optimizer, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        inputs = torch.randn(8, 3, generator=generator)

        def closure(inputs=inputs):
            optimizer.zero_grad()
            loss = model(inputs).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def optimizer_state(kind, root_steps, steps):
    make = OPTIMIZERS[kind]
    root = bps.size() - 1
    is_root = bps.rank() == root
    model = seeded()
    optimizer = make(model.parameters())
    train(model, optimizer, root_steps if is_root else steps, bps.rank())
    if is_root:
        optimizer.param_groups[0]["lr"] = 0.0625
    before = copy.deepcopy(model.state_dict())
    own = copy.deepcopy(optimizer.state_dict())
    bps.broadcast_optimizer_state(optimizer, root_rank=root)
    assert equal(before, model.state_dict()), "no parameter changes"
    wanted = bps.broadcast_object(own, root, name=f"wanted.{kind}")
    assert equal(optimizer.state_dict(), wanted)
    assert optimizer.param_groups[0]["lr"] == 0.0625
    assert optimizer.param_groups[0]["params"][0] is model.first.weight
    # And it goes on in the same way everywhere.
    bps.broadcast_parameters(model.state_dict(), root)
    train(model, optimizer, 2, seed=5)
    for name, tensor in model.state_dict().items():
        assert torch.equal(bps.broadcast(tensor, root), tensor), name


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("root_steps", "steps"), [(0, 0), (3, 0), (0, 3), (2, 5)])
def test_optimizer_state(pair, kind, root_steps, steps):
    pair.run(optimizer_state, kind, root_steps, steps)


def test_optimizer_state_of_one_process(single):
    for kind in OPTIMIZERS:
        single.run(optimizer_state, kind, 2, 0)


def optimizer_state_in_other_types():
    # State of another type than its parameters, scalars, strings, nested lists.
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([{"params": [param], "tag": f"rank {bps.rank()}"}], lr=0.1)
    if bps.rank() == 0:
        optimizer.state[param] = {
            "master": torch.full((3,), 1.00001, dtype=torch.float32),
            "history": [torch.arange(4), (True, None, 2.5)],
            "note": "x",
        }
    bps.broadcast_optimizer_state(optimizer, 0)
    state = optimizer.state[param]
    assert state["master"].dtype == torch.float32 and state["master"][0].item() == pytest.approx(
        1.00001, abs=1e-7
    )
    assert torch.equal(state["history"][0], torch.arange(4))
    assert state["history"][1] == (True, None, 2.5) and state["note"] == "x"
    assert optimizer.param_groups[0]["tag"] == "rank 0"


def test_optimizer_state_in_other_types(job):
    job.run(optimizer_state_in_other_types)


def optimizers_that_differ():
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2 + bps.rank())]
    optimizer = torch.optim.SGD(params, lr=0.1)
    if bps.rank() == 0:
        bps.broadcast_optimizer_state(optimizer, 0)
    else:
        with pytest.raises(MismatchError, match="rank 0"):
            bps.broadcast_optimizer_state(optimizer, 0)


def test_optimizers_that_differ(pair):
    pair.run(optimizers_that_differ)


def objects():
    root = bps.size() - 1
    for thing in (
        None,
        7,
        "text",
        {"a": [1, 2, {"b": (3,)}]},
        b"x" * 5000,
        list(range(100000)),
        torch.arange(5),
    ):
        given = thing if bps.rank() == root else "not looked at"
        result = bps.broadcast_object(given, root, name="objects")
        assert (
            equal(result, thing)
            if not isinstance(thing, torch.Tensor)
            else torch.equal(result, thing)
        )
    assert bps.broadcast_object(lambda x: x + 1, 0)(1) == 2
    assert bps.broadcast_object({"rank": bps.rank()}) == {"rank": 0}


def test_objects(job):
    job.run(objects)


def object_that_cannot_be_pickled(root):
    begun = time.monotonic()
    with pytest.raises(TensorError, match=rf"rank {root} .*cannot be pickled.*cannot pickle 'gen"):
        bps.broadcast_object((number for number in range(3)), root, name="generator")
    assert time.monotonic() - begun < 30
    # The name works again, with an object.
    assert bps.broadcast_object([bps.rank()], root, name="generator") == [root]


@pytest.mark.parametrize("root", [0, 1])
def test_object_that_cannot_be_pickled(pair, root):
    pair.run(object_that_cannot_be_pickled, root)


class Trap:
    """Whoever unpickles it runs code."""

    def __reduce__(self):
        return print, ("code ran",)


def objects_changed_on_the_way():
    """What a box between this rank and a server can do to the bytes of an object."""
    honest, seen = functions.ops.broadcast_, []

    def spoilt(trick):
        def broadcast_(tensor, root_rank, name, process_set):
            honest(tensor, root_rank, name, process_set)
            if ".bytes." in name:
                seen.append(tensor.clone())
                trick(tensor)

        return broadcast_

    def forged(payload):
        code = pickle.dumps(Trap())
        payload[: len(code)] = torch.frombuffer(bytearray(code), dtype=torch.uint8)

    def flipped(payload):
        payload[3] ^= 1

    def repeated(payload):
        payload.copy_(seen[0])

    for trick in (lambda payload: None, forged, flipped, repeated):
        if bps.rank() == 1:
            functions.ops.broadcast_ = spoilt(trick)
        try:
            # All of one size, so that what is repeated fits.
            if bps.rank() == 0 or not seen:
                assert bps.broadcast_object([7], 0, name="spoilt") == [7]
            else:
                with pytest.raises(CorruptionError, match=r"'spoilt' of rank 0 .*not unpickled"):
                    bps.broadcast_object(None, 0, name="spoilt")
        finally:
            functions.ops.broadcast_ = honest
    # The name goes on working.
    assert bps.broadcast_object([bps.rank()], 0, name="spoilt") == [0]


def test_objects_changed_on_the_way_are_not_unpickled():
    with Cluster(2, environment={"BPS_JOB_KEY": "ab" * 32}) as keyed:
        keyed.run(initialise)
        keyed.run(objects_changed_on_the_way)
        assert "code ran" not in keyed.log()
