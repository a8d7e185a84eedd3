"""Codecs of the engine, against numpy: what a push_pull gives, what is kept from round to round."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

import byteps.torch as bps
import codec_references as references
from byteps.errors import ConfigError, MismatchError, UsageError
from byteps.torch import Compression
from cluster import Cluster

COUNT = 20_000


@pytest.fixture(scope="module")
def encoded_job():
    """Two ranks, each a host of its own, and tensors of one part, of which all may be encoded."""
    environment = {"BYTEPS_MIN_COMPRESS_BYTES": "0", "BYTEPS_PARTITION_BYTES": "1M"}
    with Cluster(2, environment=environment) as job:
        job.run(bps.init)
        yield job


def gradient(rank, step=0, count=COUNT):
    """Numbers of several magnitudes."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    scales = torch.rand(count, generator=generator).mul(8).exp2() / 64
    return torch.randn(count, generator=generator) * scales


REFERENCES = {
    "fp16": (Compression.wire_fp16(), references.by_half),
    "bf16": (Compression.wire_bf16(), references.by_bfloat),
    "fp8_e4m3": (Compression.fp8_e4m3(), references.to_nearest(references.E4M3)),
    "fp8_e5m2": (Compression.fp8_e5m2(), references.to_nearest(references.E5M2)),
    "int8": (Compression.int8(), references.to_nearest(references.INT8)),
    "onebit": (Compression.onebit(error_feedback=False), references.by_scaled_sign),
    "onebit without scaling": (
        Compression.onebit(scaling=False, error_feedback=False),
        references.by_sign,
    ),
    "topk": (Compression.topk(0.05, error_feedback=False), references.by_size(0.05)),
}
AT_RANDOM = {
    "fp8_e4m3": (Compression.fp8_e4m3(stochastic=True), references.at_random(references.E4M3)),
    "fp8_e5m2": (Compression.fp8_e5m2(stochastic=True), references.at_random(references.E5M2)),
    "int8": (Compression.int8(stochastic=True), references.at_random(references.INT8)),
    "linear": (Compression.dithering(7), references.linear(7)),
    "natural": (Compression.dithering(5, "natural"), references.natural(5)),
}


def push_pulls(codec, name, steps=1, average=False):
    return [
        bps.push_pull(gradient(bps.rank(), step), average, name, compression=codec)
        for step in range(steps)
    ]


@pytest.mark.parametrize("name", REFERENCES)
def test_results_are_what_the_formulas_say(encoded_job, name):
    codec, formula = REFERENCES[name]
    wanted = formula(formula(gradient(0).numpy()) + formula(gradient(1).numpy()))
    for [got] in encoded_job.run(push_pulls, codec, f"formula of {name}"):
        assert torch.allclose(got, torch.from_numpy(wanted), rtol=1e-5, atol=1e-6)
        # It was not simply sent.
        assert not torch.equal(got, gradient(0) + gradient(1))


@pytest.mark.parametrize("name", AT_RANDOM)
def test_random_rounding_is_to_a_neighbour_and_right_on_average(encoded_job, name):
    codec, formula = AT_RANDOM[name]
    count, rounds = 700, 400
    values = gradient(0, count=count).numpy()
    below, above, way = formula(values)

    def several():
        # Of one rank alone, so that the server finds what it can say exactly.
        mine = gradient(0, count=count) * (bps.rank() == 0)
        at_random = f"at random by {name}"
        results = [bps.push_pull(mine, False, at_random, compression=codec) for _ in range(rounds)]
        return torch.stack(results).numpy()

    for results in encoded_job.run(several):
        step = np.abs(above - below)
        far = np.minimum(np.abs(results - below), np.abs(results - above))
        assert (far <= 1e-4 * step).all()
        ups = np.abs(results - above) < np.abs(results - below)
        # Elements near a code are rounded to it nearly always: their few other draws are counted
        # together.
        drawn = (way > 0.1) & (way < 0.9)
        variance = way * (1 - way) / rounds
        assert drawn.sum() > 100
        assert (np.abs(ups.mean(0) - way) <= 6 * np.sqrt(variance))[drawn].all()
        assert abs((ups.mean(0) - way).sum()) <= 5.5 * np.sqrt(variance.sum()) + 1e-3 * count


def test_randomk_takes_the_same_elements_of_all(encoded_job):
    codec = Compression.randomk(0.1, seed=5, error_feedback=False)
    exact = [gradient(0, step) + gradient(1, step) for step in range(2)]
    for results in encoded_job.run(push_pulls, codec, "randomk", 2):
        for got, whole in zip(results, exact, strict=True):
            kept = got != 0
            assert int(kept.sum()) == COUNT // 10
            assert torch.equal(got[kept], whole[kept])
        assert not torch.equal(results[0] != 0, results[1] != 0), "others in each round"


@pytest.mark.parametrize("levels", [1, 7])
@pytest.mark.parametrize("normalize", ["max", "l2"])
def test_dithering_is_right_on_average(encoded_job, levels, normalize):
    codec = Compression.dithering(levels, normalize=normalize)

    def mean():
        values, rounds = gradient(0, count=500), 400
        name = f"dithering {levels} {normalize}"
        results = [
            bps.push_pull(values, True, name, compression=codec).double() for _ in range(rounds)
        ]
        return torch.stack(results).mean(0) - values

    values = gradient(0, count=500)
    step = (values.abs().max() if normalize == "max" else values.norm()) / levels
    # Half a step at the ranks, of which there are two, and half a step at the server.
    deviation = (0.25 / 2 + 0.25) ** 0.5 * step.item() / 400**0.5
    for error in encoded_job.run(mean):
        assert error.abs().max() < 6 * deviation
        assert error.mean().abs() < 6 * deviation / 500**0.5
        assert error.abs().max() > 0


def test_what_is_left_out_comes_later(encoded_job):
    """Error feedback sends in the end what the codec alone would never send."""
    codecs = [Compression.topk(0.05), Compression.topk(0.05, error_feedback=False)]

    def sums(codec, name, steps):
        mine, total = gradient(bps.rank(), count=2000), torch.zeros(2000)
        for _ in range(steps):
            total += bps.push_pull(mine, False, name, compression=codec)
        return total / steps, bps.compression_state_dict().get(name)

    whole = gradient(0, count=2000) + gradient(1, count=2000)
    errors = []
    for codec in codecs:
        results = encoded_job.run(sums, codec, f"later with {codec}", 200)
        assert torch.equal(results[0][0], results[1][0])
        errors.append((results[0][0] - whole).norm() / whole.norm())
        for _, kept in results:
            assert (kept is not None) == (codec is codecs[0])
            assert kept is None or (kept["residue"].numel(), kept["velocity"].numel()) == (2000, 0)
    assert errors[0] < 0.25 < 0.5 < errors[1]


def train(compression, steps, rates, state=None):
    """A model of one layer, and what its optimizer keeps; every rank has data of its own."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False)
    known = set(bps.compression_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=rates[0])
    optimizer = bps.DistributedOptimizer(
        optimizer, model.named_parameters(), compression=compression
    )
    if state is not None:
        model.load_state_dict(state[0])
        # The names of this optimizer's gradients are not those of the one before.
        [now] = set(bps.compression_state_dict()) - known
        bps.load_compression_state_dict({now: state[1]} if len(state) > 1 else {})
    for step in steps:
        optimizer.param_groups[0]["lr"] = rates[step]
        generator = torch.Generator().manual_seed(100 * step + bps.rank())
        inputs = torch.randn(16, 64, generator=generator)
        optimizer.zero_grad()
        (model(inputs) - inputs.flip(1)).pow(2).mean().backward()
        optimizer.step()
    [mine] = set(bps.compression_state_dict()) - known
    return model.state_dict(), bps.compression_state_dict()[mine]


def test_training_goes_on_where_its_checkpoint_was(encoded_job):
    """With all that codecs keep, two halves are one whole; the server's share is the smaller."""
    codec = Compression.topk(0.1, momentum=0.5)
    rates = [0.5] * 10

    def halves():
        whole, _ = train(codec, range(10), rates)
        first, kept = train(codec, range(5), rates)
        assert kept["residue"].abs().sum() > 0 and kept["velocity"].abs().sum() > 0
        rest, _ = train(codec, range(5, 10), rates, (first, kept))
        anew, _ = train(codec, range(5, 10), rates, (first,))
        far = (anew["weight"] - whole["weight"]).norm()
        return whole["weight"], rest["weight"], (rest["weight"] - whole["weight"]).norm() / far

    results = encoded_job.run(halves)
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    for _, _, share in results:
        assert share < 0.7, "what codecs keep was lost"


def test_what_is_left_out_is_worth_what_it_was(encoded_job):
    """A residue is multiplied by the rate before over the rate of now."""

    def rates():
        known = set(bps.compression_state_dict())
        codec = Compression.topk(1, error_feedback=True)
        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters(), compression=codec)
        for rate in (1.0, 0.25, 0.25):
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            # A gradient of (4, 1): one element is sent at a time.
            (model.weight * torch.tensor([[4.0, 1.0]])).sum().backward()
            optimizer.step()
        [name] = set(bps.compression_state_dict()) - known
        return model.weight.detach().clone(), bps.compression_state_dict()[name]["residue"]

    for weight, residue in encoded_job.run(rates):
        # Step 1 sends (4, 0) and keeps 1. Step 2 has (4, 1 + 1 / 0.25): sends 5, keeps 4. Step 3
        # has (8, 1): sends 8.
        assert torch.equal(weight, torch.tensor([[-1.0 * 4 - 0.25 * 8, -0.25 * 5]]))
        assert torch.equal(residue, torch.tensor([0.0, 1.0]))


def linear():
    """A model of one layer, and what every rank sees in a step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)

    def batch(step, rank):
        inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(100 * step + rank))
        return inputs, inputs.flip(1)

    return model, batch


def momentum_of_all():
    """The parameters of a model whose codec has the momentum, and by torch's own."""
    model, batch = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = bps.DistributedOptimizer(
        optimizer, model.named_parameters(), compression=Compression.int8(momentum=0.9)
    )
    alone, _ = linear()
    wanted = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    for step in range(8):
        for trained, by, ranks in ((model, optimizer, [bps.rank()]), (alone, wanted, [0, 1])):
            by.zero_grad()
            for rank in ranks:
                inputs, outputs = batch(step, rank)
                ((trained(inputs) - outputs).pow(2).mean() / len(ranks)).backward()
            by.step()
    # Velocities are each rank's own.
    kept = bps.compression_state_dict()
    sizes = sorted(values["velocity"].numel() for values in kept.values())
    return list(zip(model.parameters(), alone.parameters(), strict=True)), sizes


@pytest.mark.parametrize("reduced_here", ["0", "1"])
def test_what_is_not_encoded_has_the_momentum_too(reduced_here):
    """Small tensors, and those that stay on a host."""
    with Cluster(2, environment={"BPS_LOCAL_REDUCE": reduced_here}) as job:
        job.run(bps.init)
        for pairs, sizes in job.run(momentum_of_all):
            assert sizes == [64, 64 * 64]
            for got, wanted in pairs:
                assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-6)


def changed_on_the_way():
    model, batch = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = bps.DistributedOptimizer(
        optimizer, model.named_parameters(), compression=Compression.int8(momentum=0.5)
    )
    losses = []

    def train(steps):
        for step in steps:
            inputs, outputs = batch(step, bps.rank())
            optimizer.zero_grad()
            loss = (model(inputs) - outputs).pow(2).mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()

    def kept(which):
        state = bps.compression_state_dict()
        return {name: values[which] for name, values in state.items() if values[which].numel()}

    known = set(bps.compression_state_dict())
    train(range(20))
    velocities = {name: kept("velocity")[name] for name in set(kept("velocity")) - known}
    assert not set(kept("residue")) - known and velocities
    optimizer.set_compression(Compression.topk(0.1, momentum=0.5))
    # Momentum goes on, and what is sent is less now.
    assert all(torch.equal(kept("velocity")[name], one) for name, one in velocities.items())
    train(range(20, 60))
    residues = {name: kept("residue")[name] for name in velocities}
    assert all(one.abs().sum() > 0 for one in residues.values())
    optimizer.set_compression(Compression.topk(0.2))
    assert all(torch.equal(kept("residue")[name], one) for name, one in residues.items())
    train(range(60, 80))

    optimizer.set_compression(Compression.none)
    train(range(80, 90))
    assert not set(bps.compression_state_dict()) & set(velocities)
    done = list(losses), [parameter.detach().clone() for parameter in model.parameters()]

    optimizer.set_backward_passes_per_step(2)
    model(batch(0, bps.rank())[0]).sum().backward()
    optimizer._byteps.send_rest()
    with pytest.raises(UsageError, match="between step"):
        optimizer.set_compression(Compression.int8())
    optimizer.synchronize()
    optimizer.step()
    return done


def changed_to_two_codecs():
    model, batch = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters())
    wanted = [Compression.int8(), Compression.wire_fp16()][bps.rank()]
    before = time.monotonic()
    with pytest.raises(
        MismatchError, match="rank 0 goes on with int8, and rank 1 with fp16"
    ) as told:
        optimizer.set_compression(wanted)
    assert (told.value.rank, told.value.ranks) == (0, (0, 1))
    assert time.monotonic() - before < 5
    # All go on as they were.
    model(batch(0, bps.rank())[0]).sum().backward()
    optimizer.step()
    optimizer.set_compression(Compression.int8())
    model(batch(1, bps.rank())[0]).sum().backward()
    optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_ranks_that_would_change_to_two_codecs_all_raise(encoded_job):
    first, second = encoded_job.run(changed_to_two_codecs)
    assert all(map(torch.equal, first, second))


def test_a_codec_may_be_changed_on_the_way(encoded_job):
    results = encoded_job.run(changed_on_the_way)
    for losses, _ in results:
        assert losses[-1] < 0.7 * losses[0]
    assert all(torch.equal(*pair) for pair in zip(*(one for _, one in results), strict=True))


def test_names_stay_and_what_is_kept_too_over_a_suspend():
    def over():
        bps.init()
        codec = Compression.topk(0.1)
        bps.push_pull(gradient(bps.rank()), True, "kept", compression=codec)
        before = bps.compression_state_dict()["kept"]["residue"]
        bps.suspend()
        bps.resume(1, 1)
        return torch.equal(before, bps.compression_state_dict()["kept"]["residue"])

    with Cluster(2, environment={"BYTEPS_MIN_COMPRESS_BYTES": "0"}) as job:
        assert job.run(over) == [True, True]


def test_every_way_of_training_takes_a_codec(encoded_job):
    """The optimizer, CrossBarrier, the module: all ranks have the same weights, and learn."""

    def ways():
        seen = []
        for way in ("optimizer", "cross barrier", "module"):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
            parameters, codec = model.named_parameters(), Compression.int8()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            trained = model
            if way == "optimizer":
                optimizer = bps.DistributedOptimizer(optimizer, parameters, codec)
            elif way == "cross barrier":
                from byteps.torch.cross_barrier import CrossBarrier

                optimizer = CrossBarrier(model, optimizer, parameters, codec, num_steps=30)
            else:
                from byteps.torch.parallel import DistributedDataParallel

                trained = DistributedDataParallel(model, compression=codec)
            losses = []
            for step in range(30):
                generator = torch.Generator().manual_seed(10 * step + bps.rank())
                inputs = torch.randn(16, 32, generator=generator)
                optimizer.zero_grad()
                loss = (trained(inputs) - inputs).pow(2).mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            if way == "cross barrier":
                optimizer.synchronize()
            seen.append((losses[0], losses[-1], [p.detach().clone() for p in model.parameters()]))
        return seen

    for mine, other in zip(*encoded_job.run(ways), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine[2], other[2], strict=True))
        assert mine[1] < 0.6 * mine[0]


def test_ranks_that_disagree_raise_on_all(encoded_job):
    def disagree():
        codec = [Compression.int8(), Compression.onebit()][bps.rank()]
        with pytest.raises(MismatchError, match="encoded as int8") as raised:
            bps.push_pull(torch.ones(1000), name="disputed", compression=codec)
        assert "encoded as onebit(scaling)+feedback" in str(raised.value)
        # The next one works.
        return bps.push_pull(torch.ones(1000), name="agreed", compression=Compression.int8())

    for result in encoded_job.run(disagree):
        assert torch.allclose(result, torch.ones(1000))


def test_whole_numbers_travel_as_they_are(encoded_job):
    def whole():
        return bps.push_pull(torch.arange(1000), False, "whole", compression=Compression.topk(0.01))

    for result in encoded_job.run(whole):
        assert torch.equal(result, 2 * torch.arange(1000))


PARAMS = [
    ({}, Compression.none),
    ({"fp16": True}, Compression.fp16),
    ({"compressor": "onebit"}, Compression.onebit(scaling=False, error_feedback=False)),
    (
        {"compressor": "onebit", "scaling": True, "ef": "vanilla", "momentum": "nesterov"},
        Compression.onebit(momentum=0.9),
    ),
    ({"compressor": "topk", "k": 0.001, "ef": "vanilla"}, Compression.topk(0.001)),
    (
        {"byteps_compressor_type": "randomk", "byteps_compressor_k": "8", "byteps_seed": "13"},
        Compression.randomk(8, seed=13, error_feedback=False),
    ),
    (
        {"compressor": "dithering", "k": 16, "partition": "natural", "normalize": "l2", "seed": 3},
        Compression.dithering(16, "natural", "l2", 3),
    ),
]


@pytest.mark.parametrize(("params", "wanted"), PARAMS)
def test_params_of_byteps_are_understood(params, wanted):
    assert Compression.from_params(params) == wanted


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"compressor": "zip"}, "compressor='zip'"),
        ({"compressor": "onebit", "k": 3}, "onebit has no k"),
        ({"compressor": "topk", "ef": "chocolate"}, "ef='chocolate'"),
        ({"ef": "vanilla"}, "without 'compressor'"),
    ],
)
def test_params_that_mean_nothing_raise(params, why):
    with pytest.raises(ConfigError, match=why):
        Compression.from_params(params)


@pytest.mark.parametrize("text", ["zip", "topk", "topk(k=0)", "int8(k=3)", "int8+speed"])
def test_a_text_that_is_no_codec_raises(text):
    with pytest.raises(ConfigError):
        bps.Codec(text)


def test_codecs_say_what_they_are():
    assert repr(Compression.int8()) == "Codec('int8')"
    assert bps.Codec("int8") == Compression.int8() != Compression.onebit()


def test_auto_names_the_strongest_codec_that_may_be_used():
    assert Compression.auto() == bps.Codec("auto") == Compression.auto("int8")
    named = Compression.auto(Compression.fp8_e4m3(stochastic=True))
    assert named.encoding == "auto(fp8_e4m3(stochastic))"
    for codec in (Compression.onebit(), "topk(k=0.01)", Compression.int8(error_feedback=True)):
        with pytest.raises(ConfigError, match="auto takes one codec of fp16, bf16"):
            Compression.auto(codec)


def test_auto_leaves_alone_what_stays_on_a_host(encoded_job):
    def summed():
        values = gradient(bps.rank(), step=7)
        wanted = gradient(0, step=7) + gradient(1, step=7)
        got = [
            bps.push_pull(values, average=False, name="auto", compression=Compression.auto())
            for _ in range(20)
        ]
        return all(bool((one == wanted).all()) for one in got)

    assert encoded_job.run(summed) == [True, True]
