"""Minima, maxima and products, against torch: by name, and through torch.distributed."""

from __future__ import annotations

import operator
import time
from functools import reduce

import pytest
import torch

import byteps.torch as bps
import seeded
from byteps.errors import ConfigError, MismatchError
from cluster import Cluster
from test_distributed import in_group
from test_ops import DTYPES

FOLDS = {"Min": torch.minimum, "Max": torch.maximum, "Product": operator.mul}


def contribution(rank, count, dtype):
    """Numbers whose products of three are exact in every type, or wrap."""
    generator = seeded.generator(rank)
    low = 0 if dtype == torch.uint8 else -6
    return torch.randint(low, 7, (count,), generator=generator).to(dtype)


def expected(op, count, dtype):
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize == 2 else dtype
    ranks = [contribution(rank, count, dtype).to(wide) for rank in range(bps.size())]
    return reduce(FOLDS[op], ranks).to(dtype)


def every_type_and_operation():
    for dtype in DTYPES:
        for op in FOLDS:
            for count in (0, 1, 33, 100_003):
                mine = contribution(bps.rank(), count, dtype)
                name = f"{dtype}.{op}.{count}"
                result = bps.allreduce(mine, name=name, op=bps.ReduceOp[op])
                assert result.dtype == dtype and torch.equal(result, expected(op, count, dtype)), (
                    name
                )
                assert torch.equal(mine, contribution(bps.rank(), count, dtype))
                bps.allreduce_(mine, name=f"{name}, in place", op=getattr(bps, op))
                assert torch.equal(mine, result)
    for op, wanted in ((bps.Min, 1.0), (bps.Max, float(bps.size()))):
        whole = [torch.full((5,), 1.0 + bps.rank()), torch.full((70_000,), 1.0 + bps.rank())]
        forms = (
            bps.push_pull(whole[0], op=op),
            bps.synchronize(bps.push_pull_async(whole[0], op=op)),
            *bps.push_pull_group(whole, op=op),
            *bps.grouped_allreduce(whole, op=op),
            *bps.synchronize(bps.grouped_allreduce_async(whole, op=op)),
            bps.push_pull_inplace(whole[0].clone(), op=op),
            *bps.push_pull_group_inplace([tensor.clone() for tensor in whole], op=op),
        )
        assert all((tensor == wanted).all() for tensor in forms)


def nan_on_one_rank():
    nan = float("nan")
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        mine = torch.ones(100, dtype=dtype)
        mine[bps.rank()] = nan
        for op in (bps.Min, bps.Max, bps.Product):
            result = bps.allreduce(mine, op=op)
            assert result.isnan().tolist() == [place < bps.size() for place in range(100)]
            assert (result[bps.size() :] == 1).all()


def test_every_type_and_operation(job):
    job.run(every_type_and_operation)
    job.run(nan_on_one_rank)


def test_among_the_ranks_of_a_host():
    with Cluster(3, environment={"BPS_LOCAL_REDUCE": "1"}) as job:
        job.run(bps.init)
        job.run(every_type_and_operation)
        job.run(nan_on_one_rank)


def disagree():
    bps.barrier()
    begun = time.monotonic()
    op = bps.Max if bps.rank() == 0 else bps.Sum
    with pytest.raises(MismatchError, match=r"rank \d declared .*\((max|sum)\), rank \d"):
        bps.allreduce(torch.ones(10), name="differs", op=op)
    assert time.monotonic() - begun < 2.0
    assert bps.allreduce(torch.ones(3), name="after it", op=bps.Product)[0] == 1


def test_ranks_that_disagree(pair):
    pair.run(disagree)


def what_is_refused():
    tensor = torch.ones(3)
    for op in (bps.Min, bps.Max, bps.Product):
        with pytest.raises(ConfigError, match="is for averages and sums"):
            bps.allreduce(tensor, op=op, compression=bps.Compression.fp16)
        with pytest.raises(ConfigError, match="averaged or summed"):
            bps.DistributedOptimizer(torch.optim.SGD([tensor.clone().requires_grad_()], 0.1), op=op)
        with pytest.raises(ConfigError, match="has no gradient"):
            bps.allreduce(tensor.clone().requires_grad_(), op=op).sum().backward()
    with pytest.raises(ConfigError, match="it is one of Average, Sum, Adasum, Min, Max, Product"):
        bps.allreduce(tensor, op=6)
    with pytest.raises(ConfigError, match="not both"):
        bps.allreduce(tensor, average=True, op=bps.Min)


def test_what_is_refused(single):
    single.run(what_is_refused)


def through_the_group():
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    gloo = dist.new_group(backend="gloo")
    group = dist.group.WORLD._get_backend(torch.device("cpu"))
    before = group._sequence
    operations = dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT
    group._host_fallback, fallback = None, group._host_fallback
    try:
        for dtype in DTYPES:
            for operation in operations:
                mine = contribution(rank, 1000, dtype)
                wanted = mine.clone()
                dist.all_reduce(mine, operation)
                dist.all_reduce(wanted, operation, group=gloo)
                assert torch.equal(mine, wanted), (dtype, operation)
        whole = torch.arange(4.0 * size) * (1 - 2 * rank)
        own = torch.empty(4)
        dist.reduce_scatter_tensor(own, whole, dist.ReduceOp.MAX)
        assert torch.equal(own, torch.arange(4.0 * size)[4 * rank : 4 * rank + 4])
        kept = torch.full((3,), float(rank))
        dist.reduce(kept, 1, dist.ReduceOp.MIN)
        assert (kept == (0 if rank == 1 else rank)).all()
    finally:
        group._host_fallback = fallback
    assert group._sequence == before + len(DTYPES) * len(operations) + 2


def test_through_torch_distributed(pair, trio):
    in_group(pair, through_the_group)
    in_group(trio, through_the_group)
