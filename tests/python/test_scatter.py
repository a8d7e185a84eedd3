"""reducescatter and alltoall: even and uneven rows, types, sets of ranks, gradients, and what ranks
disagree about."""

from __future__ import annotations

import pytest
import torch

import byteps.torch as bps
from byteps.errors import ConfigError, MismatchError, TensorError


def rows_of(rows, rank, size):
    return torch.tensor_split(torch.arange(rows), size)[rank]


def reducescatters():
    size, rank = bps.size(), bps.rank()
    for dtype in (torch.float32, torch.float16, torch.int64):
        for rows in (0, 1, size, 2 * size + 1, 7):
            every = [(torch.arange(rows * 3).view(rows, 3) % 5 + r).to(dtype) for r in range(size)]
            mine = every[rank].clone()
            total = sum(every[1:], every[0])
            own = rows_of(rows, rank, size)
            for op, wanted in (
                (bps.Sum, total),
                (bps.Max, every[-1]),
                (bps.Min, every[0]),
            ):
                got = bps.reducescatter(mine, f"{dtype}.{rows}.{op}", op=op)
                assert torch.equal(got, wanted[own]), (dtype, rows, op)
            assert torch.equal(mine, every[rank])
    whole = torch.arange(12.0) + rank
    mean = torch.arange(12.0) + (size - 1) / 2
    own = rows_of(12, rank, size)
    assert torch.allclose(bps.reducescatter(whole), mean[own])
    handle = bps.reducescatter_async(whole, op=bps.Sum, prescale_factor=0.5, postscale_factor=4.0)
    assert torch.allclose(bps.synchronize(handle), mean[own] * size * 2)
    half = bps.reducescatter(whole, compression=bps.Compression.fp16)
    assert half.dtype == torch.float32 and torch.allclose(half, mean[own])
    group = [whole, torch.ones(size, 2)]
    first, second = bps.grouped_reducescatter(group, "group", op=bps.Sum)
    assert torch.allclose(first, mean[own] * size) and second.tolist() == [[size, size]]
    handle = bps.grouped_reducescatter_async(group, "group", op=bps.Sum)
    assert torch.equal(bps.synchronize(handle)[1], second)
    for op, factor in ((bps.Sum, 1), (bps.Average, 1 / size)):
        leaf = torch.ones(7, 2, requires_grad=True)
        (bps.reducescatter(leaf, f"grad.{op}", op=op) * (rank + 1)).sum().backward()
        wanted = [(r + 1) * factor for r in range(size) for _ in rows_of(7, r, size)]
        assert torch.allclose(leaf.grad[:, 0], torch.tensor(wanted, dtype=torch.float32))
    with pytest.raises(TensorError, match="at least one dimension"):
        bps.reducescatter(torch.tensor(1.0))


def test_reducescatter(job):
    job.run(reducescatters)


def alltoalls():
    size, rank = bps.size(), bps.rank()

    def sent(origin, to, rows, dtype=torch.float32):
        return torch.full((rows, 2), 10 * origin + to).to(dtype)

    for dtype in (torch.float32, torch.bool, torch.complex64, torch.int16):
        mine = torch.cat([sent(rank, to, 3, dtype) for to in range(size)])
        before = mine.clone()
        wanted = torch.cat([sent(origin, rank, 3, dtype) for origin in range(size)])
        assert torch.equal(bps.alltoall(mine), wanted) and torch.equal(mine, before)
    # As many rows as the sum of both places, also none.
    for rows in (lambda a, b: a + b, lambda a, b: 1000 * (a == 0) + b, lambda a, b: 0):
        splits = [rows(rank, to) for to in range(size)]
        mine = torch.cat([sent(rank, to, splits[to]) for to in range(size)])
        for given in (splits, torch.tensor(splits, dtype=torch.int32)):
            got, received = bps.alltoall(mine, given, "named")
            origins = [rows(origin, rank) for origin in range(size)]
            assert received.tolist() == origins and received.dtype == torch.int32
            wanted = [sent(origin, rank, count) for origin, count in enumerate(origins)]
            assert torch.equal(got, torch.cat(wanted))
    handles = [bps.alltoall_async(mine[:0], [0] * size), bps.alltoall_async(torch.ones(size))]
    assert bps.synchronize(handles[1])[0].tolist() == [1] * size
    assert bps.synchronize(handles[0])[1].tolist() == [0] * size
    splits = [to + 1 for to in range(size)]
    leaf = torch.ones(sum(splits), requires_grad=True)
    got, _ = bps.alltoall(leaf, splits)
    (got * (rank + 1)).sum().backward()
    assert leaf.grad.tolist() == [to + 1 for to in range(size) for _ in range(splits[to])]
    for wrong in ([1] * (size + 1), [-1] + [1] * (size - 1), [3] * size):
        with pytest.raises(ConfigError, match="one number for each rank"):
            bps.alltoall(torch.ones(size * 2), wrong)
    if size > 1:
        with pytest.raises(ConfigError, match="are not divided"):
            bps.alltoall(torch.ones(size + 1))


def test_alltoall(job):
    job.run(alltoalls)


def disagreements():
    rank, size = bps.rank(), bps.size()
    with pytest.raises(MismatchError, match="only dimension 0 may differ") as raised:
        bps.alltoall(torch.ones(size, 1 + rank % 2), name="widths")
    assert (raised.value.rank, raised.value.ranks, raised.value.tensor) == (0, (0, 1), "widths")
    with pytest.raises(ConfigError if rank == 1 else MismatchError):
        bps.alltoall(torch.ones(size + (rank == 1)), name="uneven")
    with pytest.raises(MismatchError):
        bps.reducescatter(torch.ones(size, 1 + rank % 2), "widths")
    assert bps.alltoall(torch.ones(size), name="after").tolist() == [1] * size


def test_disagreements_are_told_to_all(trio):
    trio.run(disagreements)


def among_some():
    rank = bps.rank()
    few = bps.add_process_set([0, 2])
    if few.included():
        place = few.rank()
        got = bps.reducescatter(torch.arange(4.0) + rank, op=bps.Sum, process_set=few)
        assert got.tolist() == [2 * row + 2 for row in (2 * place, 2 * place + 1)]
        got, received = bps.alltoall(torch.arange(3.0) + 10 * rank, [1, 2], process_set=few)
        wanted = [0, 20] if rank == 0 else [1, 2, 21, 22]
        assert got.tolist() == wanted and received.tolist() == [len(wanted) // 2] * 2
    else:
        with pytest.raises(ConfigError, match="is not in"):
            bps.reducescatter(torch.ones(2), process_set=few)
        with pytest.raises(ConfigError, match="is not in"):
            bps.alltoall(torch.ones(2), process_set=few)
    bps.remove_process_set(few)


def test_among_some_ranks(trio):
    trio.run(among_some)
