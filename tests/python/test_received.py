"""Sums that one rank receives: reduce and reduce-scatter of torch.distributed, and their bytes."""

from __future__ import annotations

import re
import time
import urllib.request

import pytest

from cluster import Cluster
from conftest import initialise
from test_distributed import in_group
from test_sub_groups import keys_of

COUNTED = {"BPS_METRICS_PORT": "0", "BPS_HEARTBEAT_INTERVAL": "0.05"}
COUNT = 50_000


def reduced_to_one():
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    dtypes = torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64
    for dtype in dtypes:
        for count in (1, 3_001, 300_000):
            for root in range(size):
                tensor = torch.full((count,), rank + 1, dtype=dtype)
                dist.reduce(tensor, root)
                wanted = size * (size + 1) // 2 if rank == root else rank + 1
                assert (tensor == wanted).all(), (dtype, count, root)
        tensor = torch.full((3_001,), rank + 1, dtype=dtype)
        dist.reduce(tensor, size - 1, dist.ReduceOp.MAX)
        assert (tensor == (size if rank == size - 1 else rank + 1)).all()
    mean = torch.full((300_000,), float(rank))
    dist.reduce(mean, 1, dist.ReduceOp.AVG)
    assert (mean == ((size - 1) / 2 if rank == 1 else rank)).all()
    gaps = torch.zeros(4, 6)
    gaps[:, ::2] = rank + 1
    dist.reduce(gaps[:, ::2], 0)
    assert (gaps[:, ::2] == (size * (size + 1) / 2 if rank == 0 else rank + 1)).all()
    assert (gaps[:, 1::2] == 0).all()
    works, several = [], [torch.full((count,), float(rank)) for count in (10, 70_000) * 5]
    for number, one in enumerate(several):
        works.append(dist.reduce(one, number % size, async_op=True))
    for number, (work, one) in enumerate(zip(works, several, strict=True)):
        work.wait()
        wanted = size * (size - 1) / 2 if rank == number % size else rank
        assert (one == wanted).all(), number


def scattered():
    import torch
    import torch.distributed as dist

    from byteps.torch.distributed import _group

    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (1, 5_000, 70_001):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            # Whole numbers, as small as bf16 has them.
            whole = (torch.arange(count * size) % 19).to(dtype)
            wanted = whole[count * rank :][:count] * size + size * (size - 1) // 2
            own = torch.empty(count, dtype=dtype)
            dist.reduce_scatter_tensor(own, whole + rank)
            assert torch.equal(own, wanted), (count, dtype)
            own.fill_(0)
            dist.reduce_scatter(own, list((whole + rank).chunk(size)))
            assert torch.equal(own, wanted)
        # The output may be the rank's own part of the input, and either may have gaps.
        whole = torch.arange(float(count * size)) + rank
        wanted = torch.arange(float(count * size))[count * rank :][:count] + (size - 1) / 2
        inside = whole.clone()
        dist.reduce_scatter_tensor(inside[count * rank :][:count], inside, dist.ReduceOp.AVG)
        assert torch.allclose(inside[count * rank :][:count], wanted)
        others = torch.ones(count * size, dtype=torch.bool)
        others[count * rank :][:count] = False
        assert torch.equal(inside[others], whole[others]), "the input of others is as it was"
        gaps, wide = torch.zeros(count, 2), torch.zeros(count * size, 3)
        wide[:, 1] = whole
        dist.reduce_scatter_tensor(gaps[:, 0], wide[:, 1], dist.ReduceOp.AVG)
        assert torch.allclose(gaps[:, 0], wanted) and (gaps[:, 1] == 0).all()
        assert torch.equal(wide[:, 1], whole)
    outputs = [torch.empty(100), torch.empty(30_000)]
    inputs = [torch.arange(float(one.numel() * size)) for one in outputs]
    works = [
        dist.reduce_scatter_tensor(output, source, async_op=True)
        for output, source in zip(outputs, inputs, strict=True)
    ]
    for work, output, source in zip(works, outputs, inputs, strict=True):
        work.wait()
        assert torch.equal(output, source.chunk(size)[rank] * size)
    assert 4 * size < _group.SCATTER_BYTES_MIN <= 70_001 * 4 * size, "both ways were gone"


def in_sub_groups():
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    for ranks in ([0, 2], [3, 1, 2]):
        group = dist.new_group(ranks)
        if rank not in ranks:
            continue
        assert not keys_of(group).are_all
        size, place = len(ranks), dist.get_rank(group)
        for root in ranks:
            tensor = torch.full((COUNT,), float(rank))
            dist.reduce(tensor, root, group=group)
            assert (tensor == (sum(ranks) if rank == root else rank)).all()
        own, whole = torch.empty(COUNT), torch.arange(float(COUNT * size))
        dist.reduce_scatter_tensor(own, whole + rank, group=group)
        assert torch.equal(own, whole[COUNT * place :][:COUNT] * size + sum(ranks))


def test_one_rank_receives(pair, trio):
    for job in (pair, trio):
        in_group(job, reduced_to_one)
        in_group(job, scattered)


@pytest.mark.parametrize("local_reduce", ["0", "1"])
def test_one_rank_of_four_receives(local_reduce):
    with Cluster(4, environment={"BPS_LOCAL_REDUCE": local_reduce}) as cluster:
        cluster.run(initialise, timeout=120)
        for function in (reduced_to_one, scattered, in_sub_groups):
            in_group(cluster, function)


def counted(job):
    """Bytes of payload that the servers have received and sent, once there are no more."""
    address = re.search(r"metrics of the job on (http://\S+)", job.log()).group(1)
    before, deadline = None, time.monotonic() + 30
    while time.monotonic() < deadline:
        # Nodes tell the scheduler twenty times a second.
        time.sleep(0.2)
        with urllib.request.urlopen(address, timeout=10) as page:
            text = page.read().decode()
        form = r"^bps_core_{}_bytes_total\{{[^}}]*\}} (\d+)"
        now = tuple(
            sum(map(int, re.findall(form.format(way), text, re.MULTILINE)))
            for way in ("receive", "transmit")
        )
        if now == before:
            return now
        before = now
    raise AssertionError("the servers' counters do not come to rest")


def repeated(what, times):
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(times):
        if what == "reduce":
            dist.reduce(torch.ones(COUNT), 1)
        elif what == "reduce_scatter":
            parts = [torch.full((COUNT,), float(rank)) for _ in range(size)]
            own = torch.empty(COUNT)
            dist.reduce_scatter(own, parts)
            assert (own == size * (size - 1) / 2).all()
        else:
            own, whole = torch.empty(COUNT), torch.ones(COUNT * size)
            dist.reduce_scatter_tensor(own, whole)
            assert (own == size).all()
    return keys_of(dist.group.WORLD).has_receivers


def moved(job, what):
    """What the servers of a job receive and send for one call, and whether one rank receives."""
    totals = []
    # What a group does besides is the same for so many calls and for twice as many.
    for times in (0, 5, 10):
        before = counted(job)
        (has_receivers, *_) = in_group(job, repeated, what, times)
        after = counted(job)
        totals.append([now - then for now, then in zip(after, before, strict=True)])
    none, few, many = totals
    for at in (0, 1):
        assert many[at] - few[at] == few[at] - none[at], totals
    return [(now - then) / 5 for now, then in zip(few, none, strict=True)], has_receivers


def test_servers_send_a_part_to_the_rank_that_receives_it():
    with Cluster(3, servers=2, environment=COUNTED) as job:
        job.run(initialise, timeout=120)
        part = COUNT * 4
        # Three ranks send what they have, and one result goes back.
        assert moved(job, "reduce") == ([3 * part, part], True)
        # Each sends all three parts, and gets one of them.
        for what in ("reduce_scatter", "reduce_scatter_tensor"):
            assert moved(job, what) == ([9 * part, 3 * part], True), what


def test_a_job_that_shrinks_gives_all_ranks_the_result():
    environment = COUNTED | {"BPS_ELASTIC": "shrink"}
    with Cluster(2, servers=1, environment=environment) as job:
        job.run(initialise, timeout=120)
        part = COUNT * 4
        assert moved(job, "reduce") == ([2 * part, 2 * part], False)
        assert moved(job, "reduce_scatter_tensor") == ([4 * part, 4 * part], False)
