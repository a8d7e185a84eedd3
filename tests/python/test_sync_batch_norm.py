"""SyncBatchNorm normalizes the batch of all ranks as torch's layers do one of their own."""

from __future__ import annotations

import copy

import pytest
import torch

import byteps.torch as bps
import seeded
from byteps.torch.parallel import DistributedDataParallel

CHANNELS = 5
SHAPES = {
    "1d": (torch.nn.BatchNorm1d, ()),
    "1d in time": (torch.nn.BatchNorm1d, (7,)),
    "2d": (torch.nn.BatchNorm2d, (4, 3)),
    "3d": (torch.nn.BatchNorm3d, (2, 3, 2)),
}
# Samples of each rank; a rank beyond them has none.
SAMPLES = (4, 7)


def counts():
    """The samples of each rank."""
    return [*SAMPLES, *[0] * bps.size()][: bps.size()]


def whole_batch(rest, dtype, seed):
    generator = seeded.generator(seed)
    size = (sum(counts()), CHANNELS, *rest)
    inputs = torch.randn(size, generator=generator, dtype=torch.float64) * 3 + 10
    return inputs.to(dtype), torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def own(tensor):
    """This rank's part of the batch."""
    begin = sum(counts()[: bps.rank()])
    return tensor[begin : begin + counts()[bps.rank()]].clone()


def pair_of_layers(kind, dtype, **options):
    """One of torch, and ours with the same parameters."""
    torch.manual_seed(3)
    plain = kind(CHANNELS, **options).to(dtype)
    if plain.affine:
        torch.nn.init.uniform_(plain.weight, 0.5, 2)
        torch.nn.init.uniform_(plain.bias)
    return plain, bps.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))


def close(a, b, dtype):
    tolerance = {torch.float64: 1e-11, torch.float32: 3e-5, torch.bfloat16: 0.1}[dtype]
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def passes(shape, dtype, options):
    kind, rest = SHAPES[shape]
    plain, synchronized = pair_of_layers(kind, dtype, **options)
    for step in range(3):
        inputs, factors = whole_batch(rest, dtype, step)
        mine = own(inputs).requires_grad_()
        inputs.requires_grad_()
        expected, found = plain(inputs), synchronized(mine)
        assert (found.dtype, found.shape) == (dtype, mine.shape)
        close(found, own(expected), dtype)
        (expected * factors).sum().backward()
        (found * own(factors)).sum().backward()
        close(mine.grad, own(inputs.grad), dtype)
    for name, buffer in plain.named_buffers():
        close(dict(synchronized.named_buffers())[name], buffer, dtype)
    for name, param in plain.named_parameters():
        total = bps.push_pull(
            dict(synchronized.named_parameters())[name].grad, average=False, name=f"sum.{name}"
        )
        close(total, param.grad, dtype)
    # In evaluation it is the plain layer, of this rank alone.
    plain.eval()
    synchronized.eval()
    if bps.rank() == 0:
        close(synchronized(own(inputs)), plain(own(inputs)), dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_passes_are_those_of_the_whole_batch(job, shape):
    job.run(passes, shape, torch.float64, {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_smaller_types_are_summed_in_larger_ones(pair, dtype):
    pair.run(passes, "2d", dtype, {})


@pytest.mark.parametrize(
    "options", [{"affine": False}, {"momentum": None}, {"track_running_stats": False}], ids=str
)
def test_options_are_torch_s(pair, options):
    pair.run(passes, "1d", torch.float64, options)


def empty_batches():
    """Some ranks have no samples at all."""
    plain, synchronized = pair_of_layers(torch.nn.BatchNorm1d, torch.float64)
    inputs = torch.randn(
        6,
        CHANNELS,
        dtype=torch.float64,
        generator=seeded.generator(1),
    )
    mine = (inputs if bps.rank() == 0 else inputs[:0]).clone().requires_grad_()
    close(synchronized(mine), plain(inputs)[: len(mine)], torch.float64)
    synchronized(mine).square().sum().backward()
    assert mine.grad.shape == mine.shape and mine.grad.isfinite().all()


def test_a_rank_may_have_no_samples(trio):
    trio.run(empty_batches)


def trained():
    """A network with it, wrapped, equals one with torch's layers that sees the whole batch."""
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, CHANNELS, 3), torch.nn.BatchNorm2d(CHANNELS), torch.nn.Flatten()]
    alone = torch.nn.Sequential(*layers, torch.nn.Linear(CHANNELS * 36, 2)).double()
    network = bps.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone))
    assert isinstance(network[1], bps.SyncBatchNorm)
    copied = copy.deepcopy(network)
    copied.load_state_dict(alone.state_dict())
    wrapped = DistributedDataParallel(network)
    steps = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (alone, wrapped)]
    for step in range(4):
        batch = torch.randn(
            2 * bps.size(),
            3,
            8,
            8,
            dtype=torch.float64,
            generator=seeded.generator(step),
        )
        part = batch[2 * bps.rank() : 2 * bps.rank() + 2]
        for model, optimizer, inputs in ((alone, steps[0], batch), (wrapped, steps[1], part)):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    for expected, found in zip(alone.parameters(), network.parameters(), strict=True):
        close(found, expected, torch.float64)


def test_a_wrapped_network_trains_as_on_the_whole_batch(pair):
    pair.run(trained)


def refused():
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        bps.SyncBatchNorm(3)(torch.ones(3))


def test_inputs_need_channels(pair):
    pair.run(refused)
