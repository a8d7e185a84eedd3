"""Sparse tensors and gradients, which are gathered, against one process on the whole batch."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import byteps.torch as bps
import seeded
from byteps.errors import ConfigError, MismatchError, TensorError
from byteps.torch.cross_barrier import CrossBarrier
from byteps.torch.parallel import DistributedDataParallel
from small_models import difference

ROWS, WIDTH = 11, 3


def drawn(rank, rows, dtype=torch.float64):
    """Uncoalesced: some rows come twice."""
    generator = seeded.generator(rank)
    index = torch.randint(ROWS, (1, rows), generator=generator)
    values = torch.randint(-50, 50, (rows, WIDTH), generator=generator).to(dtype)
    return torch.sparse_coo_tensor(index, values, (ROWS, WIDTH), check_invariants=True)


def same_bits_everywhere(tensor):
    for part in (tensor.indices(), tensor.values()):
        every = bps.allgather(part.contiguous().view(1, *part.shape), name="bits")
        assert all(torch.equal(one, part) for one in every)


def sums():
    size, rank = bps.size(), bps.rank()
    for number, rows in enumerate([lambda r: 4, lambda r: 7 * r, lambda r: 5 * (r == size - 1)]):
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64):
            every = [drawn(other, rows(other), dtype) for other in range(size)]
            total = sum(one.to_dense() for one in every)
            found = bps.sparse_allreduce(every[rank], f"sum.{number}.{dtype}", bps.Sum)
            assert found.is_sparse and found.is_coalesced() and found.dtype == dtype
            assert torch.equal(found.to_dense(), total), (number, dtype)
    # The elements that any rank has, and no more; and an average.
    handle = bps.sparse_allreduce_async(every[rank].float(), name="mean")
    mean = handle()
    assert torch.allclose(mean.to_dense(), total.float() / size)
    assert mean._nnz() == every[-1].coalesce()._nnz()
    assert bps.synchronize(handle) is None, "the handle is spent"
    # Of integers, rounded down; several under way without names; scalars and several dimensions.
    ones = torch.sparse_coo_tensor([[1]], [-1], (2,)) if rank == 0 else torch.zeros(2).to_sparse()
    handles = [bps.sparse_allreduce_async(ones.long() * factor) for factor in range(1, 4)]
    for factor, handle in zip(range(1, 4), handles, strict=True):
        assert bps.synchronize(handle).to_dense().tolist() == [0, math.floor(-factor / size)]
    matrix = (torch.eye(4) * (rank + 1)).to_sparse()
    found = bps.sparse_allreduce(matrix, op=bps.Sum, process_set=bps.global_process_set)
    assert torch.equal(found.to_dense(), torch.eye(4) * sum(range(1, size + 1)))
    thirds = torch.rand(ROWS, WIDTH, generator=seeded.generator(rank)).to_sparse(1)
    same_bits_everywhere(bps.sparse_allreduce(thirds, "thirds"))


def test_sums(job):
    job.run(sums)


def refused():
    rank = bps.rank()
    with pytest.raises(ConfigError, match="averaged or summed"):
        bps.sparse_allreduce(torch.eye(2).to_sparse(), op=bps.Max)
    with pytest.raises(TensorError, match=r"'dense': a tensor of layout torch\.sparse_coo"):
        bps.sparse_allreduce(torch.eye(2), "dense")
    with pytest.raises(TensorError, match="a torch tensor is wanted, not list"):
        bps.sparse_allreduce([1])
    with pytest.raises(TensorError, match=r"to_dense\(\), or call sparse_allreduce"):
        bps.push_pull(torch.eye(2).to_sparse())
    for other in (torch.eye(3), torch.eye(2, 3), torch.eye(2).double(), torch.zeros(2, 2, 1)):
        odd = (torch.eye(2) if rank == 0 else other).to_sparse()
        with pytest.raises(MismatchError, match=r"sparse_allreduce of 'odd\.\w+': rank 0 has"):
            bps.sparse_allreduce(odd, "odd")
    assert bps.sparse_allreduce(torch.eye(2).to_sparse())._nnz() == 2, "and all goes on"


def test_disagreements_are_errors_on_all_ranks(pair):
    pair.run(refused)


class Words(torch.nn.Module):
    """Two tables of embeddings and a dense layer."""

    def __init__(self, rows=ROWS):
        super().__init__()
        self.words = torch.nn.Embedding(rows, WIDTH, sparse=True)
        self.bags = torch.nn.EmbeddingBag(rows, WIDTH, sparse=True, mode="sum")
        self.last = torch.nn.Linear(WIDTH, 1)

    def forward(self, numbers):
        return self.last(torch.tanh(self.words(numbers).sum(1) + self.bags(numbers)))


def start():
    torch.manual_seed(5)
    return Words().double()


def batch(step):
    generator = seeded.generator(step)
    return torch.randint(ROWS, (6, 4), generator=generator)


def share(numbers):
    return numbers[bps.rank() :: bps.size()]


def loss_of(model, numbers):
    return (model(numbers) ** 2).mean()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sparse adam": lambda p: torch.optim.SparseAdam(list(p), lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


def tables(model):
    return [(n, p) for n, p in model.named_parameters() if not n.startswith("last")]


def as_one_process(kind, wrapped, passes):
    alone, model = start(), start()
    reference = OPTIMIZERS[kind](p for _, p in tables(alone))
    if wrapped:
        forward = DistributedDataParallel(model)
        optimizer = OPTIMIZERS[kind](p for _, p in tables(model))
    else:
        forward = model
        optimizer = bps.DistributedOptimizer(
            OPTIMIZERS[kind](p for _, p in tables(model)),
            tables(model),
            backward_passes_per_step=passes,
        )
    for step in range(4):
        parts = [batch(step * passes + number) for number in range(passes)]
        reference.zero_grad()
        for part in parts:
            loss_of(alone, part).backward()
        reference.step()
        optimizer.zero_grad()
        for number, part in enumerate(parts):
            if wrapped and number < passes - 1:
                with forward.no_sync():
                    loss_of(forward, share(part)).backward()
            else:
                loss_of(forward, share(part)).backward()
        for name, param in tables(model):
            assert param.grad.is_sparse, name
            if bps.size() > 1:
                same_bits_everywhere(param.grad)
        optimizer.step()
    assert difference(alone, model) < 1e-12


def every_optimizer(wrapped):
    for kind in OPTIMIZERS:
        for passes in (1, 2):
            as_one_process(kind, wrapped, passes)


@pytest.mark.parametrize("wrapped", [False, True])
def test_as_one_process(job, wrapped):
    job.run(every_optimizer, wrapped)


def dense_and_sparse_together(how):
    """SGD over all parameters; ranks have other numbers of rows, and none."""
    alone, model = start(), start()
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forward = model
    if how == "wrapped":
        forward = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        compression = bps.Compression.fp16 if how == "compressed" else bps.Compression.none
        optimizer = bps.DistributedOptimizer(
            optimizer, model.named_parameters(), compression=compression
        )
    size, rank = bps.size(), bps.rank()
    for step in range(4):
        # One rank has no data in its first step, and others have more than their share.
        parts = [batch(step)[:2] if step else batch(step)[: 2 * other] for other in range(size)]
        reference.zero_grad()
        sum(model_loss.sum() for model_loss in map(alone, parts)).div(size).backward()
        reference.step()
        optimizer.zero_grad()
        if len(parts[rank]):
            forward(parts[rank]).sum().backward()
        elif how == "wrapped":
            forward.synchronize()
        if how != "wrapped":
            optimizer.synchronize()
        assert model.words.weight.grad is None or model.words.weight.grad.is_sparse or size == 1
        optimizer.step()
    assert difference(alone, model) < (1e-3 if how == "compressed" else 1e-12)


@pytest.mark.parametrize("how", ["plain", "compressed", "wrapped"])
def test_ranks_without_rows_and_without_a_pass(job, how):
    job.run(dense_and_sparse_together, how)


def dense_on_another_rank():
    """A weight that is looked up on rank 0 and multiplied with on others."""
    size, rank = bps.size(), bps.rank()
    table = torch.nn.Embedding(ROWS, WIDTH, sparse=True).double()
    bps.broadcast_parameters(table.state_dict(), 0)
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters()
    )
    for _ in range(2):
        before = table.weight.detach().clone()
        if rank == 0:
            table(torch.tensor([1, 1])).sum().backward()
        else:
            (table.weight * rank).sum().backward()
        assert not table.weight.grad.is_sparse
        wanted = torch.full((ROWS, WIDTH), float(sum(range(size))), dtype=torch.float64)
        wanted[1] += 2
        optimizer.step()
        assert torch.allclose(before - table.weight, wanted / size)
        optimizer.zero_grad()
    # What is sparse is settled, and a later pass makes a dense gradient.
    known = torch.nn.Embedding(ROWS, WIDTH, sparse=True)
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(known.parameters(), lr=1.0))
    known(torch.tensor([rank])).sum().backward()
    optimizer.zero_grad()
    (known.weight * (torch.arange(ROWS) == rank).view(-1, 1)).sum().backward()
    found = known.weight.grad.to_dense()[:, 0]
    assert torch.allclose(found, (torch.arange(ROWS) < size) / size), found


def test_dense_on_another_rank(pair, trio):
    pair.run(dense_on_another_rank)
    trio.run(dense_on_another_rank)


def dropped_and_repeated():
    """Passes without a step between, gradients that nobody wants, and sums."""
    size, rank = bps.size(), bps.rank()
    table = torch.nn.Embedding(ROWS, 1, sparse=True)
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0))
    for _ in range(2):
        table(torch.tensor([rank, ROWS - 1])).sum().backward()
    found = table.weight.grad.to_dense()[:, 0].tolist()
    assert found == pytest.approx([2 / size] * size + [0] * (ROWS - 1 - size) + [2])
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(3)
    table(torch.tensor([rank])).sum().backward()
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(1)
    # Of two rows: to_dense() of torch 2.15 forgets a single one of width 1.
    table(torch.tensor([0, 2])).sum().backward()
    assert table.weight.grad.to_dense()[:3, 0].tolist() == [1, 0, 1]
    optimizer.step()
    summed = torch.nn.Embedding(ROWS, 1, sparse=True)
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(summed.parameters(), lr=1.0), op=bps.Sum)
    summed(torch.tensor([rank, ROWS - 1])).sum().backward()
    found = summed.weight.grad.to_dense()[:, 0].tolist()
    assert found == [1.0] * size + [0] * (ROWS - 1 - size) + [size]
    optimizer.step()


def test_dropped_and_repeated(job):
    job.run(dropped_and_repeated)


def in_a_process_set():
    rank, mine = bps.rank(), bps.add_process_set([0, 2])
    table = torch.nn.Embedding(ROWS, 1, sparse=True)
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=1.0), process_set=mine
    )
    table(torch.tensor([rank] * (1 + rank))).sum().backward()
    wanted = {0: [0.5, 0, 1.5], 1: [0, 2, 0], 2: [0.5, 0, 1.5]}[rank]
    assert table.weight.grad.to_dense()[:3, 0].tolist() == wanted
    optimizer.step()
    if mine.included():
        total = bps.sparse_allreduce(table.weight.grad, "in a set", bps.Sum, process_set=mine)
        assert total.to_dense()[:3, 0].tolist() == [1, 0, 3]
    bps.barrier()
    assert bps.remove_process_set(mine)


def test_in_a_process_set(trio):
    trio.run(in_a_process_set)


class Looked(torch.nn.Module):
    """Makes sparse gradients, and does not say so."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(ROWS, WIDTH))

    def forward(self, numbers):
        return torch.nn.functional.embedding(numbers, self.weight, sparse=True)


def where_they_cannot_be():
    model = Words()
    with pytest.raises(ConfigError, match=r"'words\.weight' has sparse gradients: CrossBarrier"):
        CrossBarrier(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for model, message in (
        (DistributedDataParallel(Looked()), "an Embedding or EmbeddingBag with sparse=True"),
        (Looked(), "use DistributedOptimizer"),
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if isinstance(model, Looked):
            optimizer = CrossBarrier(model, optimizer)
        with pytest.raises(TensorError, match=message):
            model(torch.tensor([1])).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
    # Copies of a wrapped module know it too.
    copied = copy.deepcopy(DistributedDataParallel(start()))
    loss_of(copied, batch(0)).backward()
    assert copied.module.words.weight.grad.is_sparse


def test_where_they_cannot_be(single):
    single.run(where_they_cannot_be)
