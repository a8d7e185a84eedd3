"""Groups of torch.distributed that have some ranks of the job, over the engine."""

from __future__ import annotations

import pytest

from cluster import Cluster
from conftest import initialise
from test_distributed import in_group


def keys_of(group):
    import torch

    return group._get_backend(torch.device("cpu"))._keys


def sub_groups():
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    rank = dist.get_rank()
    # Overlapping, apart, and of one rank; all ranks of the world make each of them.
    wanted = [[0, 2], [1, 2, 3], [1, 3], [2], [0, 1, 2, 3]]
    groups = [dist.new_group(ranks) for ranks in wanted]
    for ranks, group in zip(wanted, groups, strict=True):
        if rank not in ranks:
            continue
        assert keys_of(group) is not None and keys_of(group).are_all == (len(ranks) == 4)
        size, place = len(ranks), ranks.index(rank)
        assert (dist.get_rank(group), dist.get_world_size(group)) == (place, size)
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            for operation, result in (
                (dist.ReduceOp.SUM, sum(r + 1 for r in ranks)),
                (dist.ReduceOp.MAX, ranks[-1] + 1),
                (dist.ReduceOp.MIN, ranks[0] + 1),
            ):
                tensor = torch.full((3, 50), rank + 1, dtype=dtype)
                dist.all_reduce(tensor, operation, group=group)
                assert (tensor == result).all(), (ranks, operation, tensor)
        mean = torch.full((70_001,), float(rank))
        work = dist.all_reduce(mean, dist.ReduceOp.AVG, group=group, async_op=True)
        work.wait()
        assert torch.allclose(mean, torch.full_like(mean, sum(ranks) / size))
        for root in ranks:
            flags = torch.tensor([rank == root, True])
            dist.broadcast(flags, root, group=group)
            assert flags.tolist() == [True, True]
            tensor = torch.full((4,), float(rank))
            dist.reduce(tensor, root, group=group)
            assert (tensor == (sum(ranks) if rank == root else rank)).all()
        slots = [torch.empty(r + 1) for r in ranks]
        dist.all_gather(slots, torch.full((rank + 1,), float(rank)), group=group)
        assert all((slot == r).all() for slot, r in zip(slots, ranks, strict=True))
        whole = torch.empty(2 * size)
        dist.all_gather_into_tensor(whole, torch.tensor([rank, -1.0]), group=group)
        assert whole[::2].tolist() == ranks
        own = torch.empty(5)
        dist.reduce_scatter_tensor(own, torch.arange(5.0 * size) + rank, group=group)
        assert torch.equal(own, torch.arange(5.0 * size)[5 * place :][:5] * size + sum(ranks))
        objects = [None] * size
        dist.all_gather_object(objects, {"rank": rank}, group=group)
        assert objects == [{"rank": r} for r in ranks]
        dist.barrier(group=group)
        # What goes to the fallback still does.
        output = torch.empty(size)
        dist.all_to_all_single(output, torch.full((size,), float(rank)), group=group)
        assert output.tolist() == ranks
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for name, ranks in (
        ("replicate", [rank % 2, rank % 2 + 2]),
        ("shard", [rank // 2 * 2, rank // 2 * 2 + 1]),
    ):
        group = mesh.get_group(name)
        assert keys_of(group) is not None and not keys_of(group).are_all
        tensor = torch.full((3,), float(rank))
        dist.all_reduce(tensor, group=group)
        assert (tensor == sum(ranks)).all()


@pytest.mark.parametrize("local_reduce", ["0", "1"])
def test_sub_groups_are_served(local_reduce):
    with Cluster(4, environment={"BPS_LOCAL_REDUCE": local_reduce}) as cluster:
        cluster.run(initialise, timeout=120)
        in_group(cluster, sub_groups)


def group_beside_another_backend():
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    part = dist.new_group([0, 2], backend="byteps")
    if rank != 1:
        assert keys_of(part) is not None and not keys_of(part).are_all
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=part)
        assert tensor.item() == 2


def test_a_sub_group_beside_a_default_group_of_gloo(trio):
    in_group(trio, group_beside_another_backend, backend="gloo")
