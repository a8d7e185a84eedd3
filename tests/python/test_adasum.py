"""Adasum against its formula in numpy, in a tree over the ranks."""

from __future__ import annotations

import copy
import pickle

import numpy
import pytest
import torch

import byteps.torch as bps
import seeded
from byteps.errors import ConfigError, TensorError, UsageError
from cluster import Cluster
from conftest import initialise


@pytest.fixture(scope="module")
def five():
    """A tree of four, and one rank beyond; without servers."""
    cluster = Cluster(5, servers=1, environment={"BPS_LOCAL_REDUCE": "1"})
    cluster.run(initialise, timeout=120)
    yield cluster
    cluster.kill() if cluster.broken else cluster.close()


def adasum(one, other):
    product, square, other_square = (
        numpy.vdot(*p) for p in ((one, other), (one, one), (other,) * 2)
    )
    return (1 - product / (2 * square) if square else 1) * one + (
        1 - product / (2 * other_square) if other_square else 1
    ) * other


def reference(vectors):
    """Those beyond a power of two first, then neighbours."""
    vectors = [numpy.asarray(vector, dtype=numpy.float64) for vector in vectors]
    power = 1 << (len(vectors).bit_length() - 1)
    for place, beyond in enumerate(vectors[power:]):
        vectors[place] = adasum(vectors[place], beyond)
    vectors = vectors[:power]
    while len(vectors) > 1:
        vectors = [adasum(*vectors[at : at + 2]) for at in range(0, len(vectors), 2)]
    return vectors[0]


def drawn(rank, shape, dtype=torch.float64):
    generator = seeded.generator(100 + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def as_the_formula():
    size, rank = bps.size(), bps.rank()
    tolerances = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-2}
    for dtype, tolerance in {**tolerances, torch.float16: 1e-3}.items():
        for shape in ((1,), (7,), (3, 0), (), (5, 3), (1001,)):
            every = [drawn(other, shape, dtype) for other in range(size)]
            wanted = reference([one.double().cpu().numpy() for one in every])
            mine = every[rank].clone()
            found = bps.allreduce(mine, op=bps.Adasum, name=f"a.{dtype}.{len(shape)}.{sum(shape)}")
            assert (found.dtype, found.shape) == (dtype, mine.shape)
            assert torch.equal(mine, every[rank])
            numpy.testing.assert_allclose(
                found.double().cpu(), wanted, rtol=tolerance, atol=tolerance
            )
            if found.numel():
                every = bps.allgather(found.view(1, -1), name="bits")
                assert all(torch.equal(row, every[0]) for row in every), "other bits elsewhere"
    # Equal vectors count once, those at right angles in full, and zeros not at all.
    same = torch.arange(1.0, 6.0)
    assert torch.allclose(bps.push_pull(same, op=bps.Adasum), same)
    apart = torch.eye(size)[rank].clone()
    assert torch.equal(bps.push_pull_inplace(apart, op=bps.Adasum), torch.ones(size))
    assert torch.equal(apart, torch.ones(size))
    lonely = same if rank == size - 1 else torch.zeros(5)
    assert torch.equal(bps.push_pull(lonely, op=bps.Adasum, name="lonely"), same)
    assert not bps.push_pull(torch.zeros(4), op=bps.Adasum).any()
    # Each tensor has factors of its own; not contiguous; scaled; asynchronous.
    pair = [drawn(rank, (4, 6)).t(), drawn(rank + 50, (3,))]
    every = [[drawn(o, (4, 6)).t(), drawn(o + 50, (3,))] for o in range(size)]
    handle = bps.grouped_allreduce_async(
        pair, op=bps.Adasum, name="pair", prescale_factor=2.0, postscale_factor=0.25
    )
    assert bps.poll(handle)
    for found, *parts in zip(bps.synchronize(handle), *every, strict=True):
        numpy.testing.assert_allclose(
            found.cpu(), reference([part.cpu() for part in parts]) / 2, rtol=1e-12
        )


def test_as_the_formula(job):
    job.run(as_the_formula)


def test_as_the_formula_on_five_ranks(five):
    five.run(as_the_formula)


def in_a_process_set():
    mine = bps.add_process_set([0, 2])
    if mine.included():
        found = bps.push_pull(drawn(bps.rank(), (9,)), op=bps.Adasum, process_set=mine)
        numpy.testing.assert_allclose(
            found, reference([drawn(0, (9,)), drawn(2, (9,))]), rtol=1e-12
        )
    bps.barrier()
    assert bps.remove_process_set(mine)


def test_in_a_process_set(trio):
    trio.run(in_a_process_set)


def refused():
    with pytest.raises(TensorError, match=r"Adasum of 'whole': .* not of torch\.int64"):
        bps.push_pull(torch.ones(2, dtype=torch.int64), op=bps.Adasum, name="whole")
    with pytest.raises(ConfigError, match="not adasum"):
        bps.push_pull(torch.ones(2), op=bps.Adasum, compression=bps.Compression.fp16)
    weight = torch.ones(2, requires_grad=True)
    with pytest.raises(ConfigError, match="adasum has no gradient"):
        bps.push_pull(weight, op=bps.Adasum).sum().backward()
    model = torch.nn.Linear(2, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="not Adasum"):
        bps.DistributedOptimizer(plain, op=bps.Adasum, compression=bps.Compression.fp16)
    optimizer = bps.DistributedOptimizer(plain, op=bps.Adasum)
    with pytest.raises(UsageError, match="with op=Adasum"), optimizer.skip_synchronize():
        pass
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        with pytest.raises(UsageError, match="is a copy of a distributed one"):
            copied.step()


def test_refused(pair):
    pair.run(refused)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


def steps(kind, with_closure):
    """Each step is the Adasum of what the ranks' own steps would have changed."""
    size, rank = bps.size(), bps.rank()
    torch.manual_seed(1)
    start = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    models = [copy.deepcopy(start).double() for _ in range(size)]
    locals_ = [OPTIMIZERS[kind](model.parameters()) for model in models]
    mine = copy.deepcopy(start).double()
    plain = OPTIMIZERS[kind](mine.parameters())
    optimizer = bps.DistributedOptimizer(plain, mine.named_parameters(), op=bps.Adasum)
    assert optimizer is plain and type(optimizer).__name__ == type(locals_[0]).__name__
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in locals_]
    for step in range(4):
        before = [param.detach().clone() for param in models[0].parameters()]
        for other, (model, local) in enumerate(zip(models, locals_, strict=True)):
            local.zero_grad()
            model(drawn(10 * step + other, (5, 3))).pow(2).mean().backward()
            local.step()
            schedulers[other].step()
        optimizer.zero_grad()

        def closure(step=step):
            loss = mine(drawn(10 * step + rank, (5, 3))).pow(2).mean()
            loss.backward()
            return loss

        if with_closure:
            assert optimizer.step(closure).item() > 0
        else:
            closure()
            optimizer.step()
        scheduler.step()
        for of_ranks in zip(before, *(model.parameters() for model in models), strict=True):
            begin, *ends = (one.detach() for one in of_ranks)
            change = reference([(end - begin).cpu().numpy() for end in ends])
            for end in ends:
                end.copy_(begin + torch.from_numpy(change).to(begin.device))
        for a, b in zip(mine.parameters(), models[0].parameters(), strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-12), step
    assert scheduler.get_last_lr() == schedulers[0].get_last_lr()


@pytest.mark.parametrize("with_closure", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps(job, kind, with_closure):
    job.run(steps, kind, with_closure)
