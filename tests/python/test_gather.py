"""allgather: tensors of every type, of sizes that differ, and what ranks disagree about."""

from __future__ import annotations

import pytest
import torch

import byteps.torch as bps
import seeded
from byteps.errors import ConfigError, MismatchError, TensorError

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.complex64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
]


def drawn(rank, shape, dtype):
    generator = seeded.generator(rank)
    return (torch.rand(shape, generator=generator) * 100).to(dtype)


def sizes(rows):
    """Every rank has as many rows as `rows` says of it, also none."""
    for dtype in DTYPES:
        for rest in ((), (3,), (2, 1, 5)):
            every = [drawn(rank, (rows(rank), *rest), dtype) for rank in range(bps.size())]
            mine = every[bps.rank()]
            before = mine.clone()
            gathered = bps.allgather(mine, name=f"{dtype}.{len(rest)}")
            assert (gathered.dtype, gathered.device) == (dtype, mine.device)
            assert torch.equal(gathered, torch.cat(every)), (dtype, rest)
            assert torch.equal(mine, before)


def several_sizes():
    sizes(lambda rank: 4)
    sizes(lambda rank: 100 * rank + 3)
    sizes(lambda rank: 5 * (rank == 0))
    sizes(lambda rank: 0)


def test_all_types_and_sizes(job):
    job.run(several_sizes)


def calls():
    size, rank = bps.size(), bps.rank()
    # Not contiguous, and unnamed; several calls under way under one name.
    mine = torch.arange(12.0).view(3, 4).t() + rank
    handles = [bps.allgather_async(mine * factor) for factor in range(4)]
    for factor, handle in enumerate(handles):
        expected = [(torch.arange(12.0).view(3, 4).t() + other) * factor for other in range(size)]
        assert torch.equal(bps.synchronize(handle), torch.cat(expected))
    group = [torch.full((rank + 1, 2), float(rank)), torch.tensor([rank])]
    first, second = bps.grouped_allgather(group)
    assert first[:, 0].tolist() == [float(r) for r in range(size) for _ in range(r + 1)]
    assert second.tolist() == list(range(size))
    handle = bps.grouped_allgather_async(group, name="named")
    assert torch.equal(bps.synchronize(handle)[1], second)
    objects = bps.allgather_object({"rank": rank, "text": "x" * rank})
    assert objects == [{"rank": other, "text": "x" * other} for other in range(size)]
    assert torch.equal(bps.allgather(mine, process_set=bps.global_process_set)[:4], mine - rank)


def test_calls(job):
    job.run(calls)


def gradients():
    size, rank = bps.size(), bps.rank()
    mine = torch.ones(rank + 2, 3, dtype=torch.float64, requires_grad=True)
    # Each rank weighs the part of each other by both their numbers.
    weights = torch.cat([torch.full((r + 2, 3), (rank + 1.0) * (r + 1)) for r in range(size)])
    (bps.allgather(mine) * weights).sum().backward()
    mean = sum(range(1, size + 1)) / size
    assert torch.allclose(mine.grad, torch.full_like(mine, mean * (rank + 1)))


def test_gradients_are_averages(job):
    job.run(gradients)


def refused():
    rank = bps.rank()
    odd = [torch.ones(2, 3), torch.ones(4, 2)][rank]
    both = r"rank 0 has torch\.float32 of \(2, 3\), rank 1 torch"
    with pytest.raises(MismatchError, match=both) as raised:
        bps.allgather(odd, name="odd")
    assert (raised.value.rank, raised.value.ranks, raised.value.tensor) == (0, (0, 1), "odd")
    with pytest.raises(MismatchError, match=r"rank 1 torch\.int64 of"):
        bps.allgather(torch.ones(2, dtype=[torch.float32, torch.int64][rank]))
    # What one rank has done wrong is told to all.
    wrong, names = [torch.ones(2), torch.tensor(1.0)][rank], [MismatchError, TensorError]
    with pytest.raises(names[rank], match="rank 1 has none" if rank == 0 else "view"):
        bps.allgather(wrong)
    with pytest.raises(ConfigError, match="names"):
        bps.grouped_allgather([torch.ones(1)], name=["a", "b"])
    with pytest.raises(MismatchError, match="shapes"):
        bps.grouped_allgather([torch.ones(1)] * (1 + rank), name="counts")
    assert bps.grouped_allgather([]) == []
    assert bps.allgather(torch.tensor([rank])).tolist() == [0, 1], "and all goes on"


def test_disagreements_are_errors_on_all_ranks(pair):
    pair.run(refused)
