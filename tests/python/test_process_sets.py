"""Process sets: some ranks reduce, gather and train among themselves, while others do otherwise."""

from __future__ import annotations

import pytest
import torch

import byteps.torch as bps
from byteps.errors import ConfigError, MismatchError, UsageError, WaitTimeoutError
from cluster import Cluster
from conftest import initialise
from stand_in import Gpu


@pytest.fixture(scope="module", params=["servers", "one host"])
def four(request):
    """Four ranks, whose sums pass through servers, or stay on their host."""
    environment = {"BPS_LOCAL_REDUCE": "1" if request.param == "one host" else "0"}
    cluster = Cluster(4, servers=1, cores=2, environment=environment)
    cluster.run(initialise, timeout=120)
    yield cluster
    cluster.kill() if cluster.broken else cluster.close()


class Sets:
    """Adds sets for as long as it is entered."""

    def __init__(self, *ranks):
        self.ranks = ranks

    def __enter__(self):
        self.sets = [bps.add_process_set(list(ranks)) for ranks in self.ranks]
        return self.sets

    def __exit__(self, kind, *_):
        for one in self.sets if kind is None else ():
            assert bps.remove_process_set(one)


def own(*sets):
    return next(one for one in sets if one.included())


def names_and_numbers():
    before = bps.get_process_set_ids_and_ranks()
    assert before == {0: [0, 1, 2, 3]}
    few = bps.ProcessSet([3, 1])
    assert (few.process_set_id, few.size(), few.rank(), few.included()) == (None,) * 4
    assert bps.add_process_set(few) is few and few.ranks == [1, 3]
    assert few.size() == 2 and few.included() == (bps.rank() in (1, 3))
    assert few.rank() == {1: 0, 3: 1}.get(bps.rank(), -1)
    others = bps.add_process_set(range(3))
    assert others.process_set_id == few.process_set_id + 1
    assert bps.get_process_set_ids_and_ranks() == {
        0: [0, 1, 2, 3],
        few.process_set_id: [1, 3],
        others.process_set_id: [0, 1, 2],
    }
    for wrong in ([], [0, 0], [-1], ["0"], "01", 3, [0.5]):
        with pytest.raises(ConfigError):
            bps.ProcessSet(wrong)
    for wrong in ([0, 4], [1, 3], few, bps.global_process_set):
        with pytest.raises(ConfigError):
            bps.add_process_set(wrong)
    assert not bps.remove_process_set(bps.global_process_set)
    assert not bps.remove_process_set(bps.ProcessSet([0]))
    assert bps.remove_process_set(few) and not bps.remove_process_set(few)
    assert few.process_set_id is None and few.ranks == [1, 3]
    with pytest.raises(ConfigError, match="call add_process_set on all ranks"):
        bps.allreduce(torch.ones(2), process_set=few)
    # The same ranks again are another set, with a number of its own.
    again = bps.add_process_set([1, 3])
    assert again.process_set_id == others.process_set_id + 1
    assert bps.remove_process_set(again) and bps.remove_process_set(others)


def test_sets_have_names_and_numbers(four):
    four.run(names_and_numbers)


def adds_otherwise():
    rank = bps.rank()
    with pytest.raises(MismatchError, match=r"rank \d adds the process set \[0, \d\], and other"):
        bps.add_process_set([0, 1 if rank < 2 else 2])
    kept = bps.add_process_set([0, 1])
    with pytest.raises(MismatchError, match="make the same calls"):
        bps.remove_process_set(kept) if rank else bps.add_process_set([2, 3])
    assert bps.remove_process_set(kept)


def test_all_ranks_add_the_same(four):
    four.run(adds_otherwise)


def reductions():
    rank = bps.rank()
    with Sets([0, 2], [1, 3], [3], [0, 1, 2, 3]) as (even, odd, last, every):
        mine = own(even, odd)
        ranks, number = mine.ranks, float(rank + 1)
        # Both sets use the same names at the same time, and so do all ranks.
        numbers = [float(other + 1) for other in ranks]
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64):
            values = torch.full((3, 5), rank + 1, dtype=dtype)
            name = f"reduced.{dtype}"
            total = bps.allreduce(values, op=bps.Sum, name=name, process_set=mine)
            assert torch.equal(total, torch.full((3, 5), sum(numbers)).to(dtype))
            assert torch.equal(bps.push_pull(values, False, name, process_set=mine), total)
            assert torch.equal(bps.push_pull(values, False, name), torch.full_like(values, 10))
        large = torch.full((300_000,), number)
        mean = sum(numbers) / 2
        assert torch.equal(bps.allreduce(large, process_set=mine), torch.full_like(large, mean))
        assert (bps.allreduce(large, op=bps.Max, process_set=mine) == numbers[1]).all()
        assert (
            bps.allreduce(large, op=bps.Product, process_set=mine) == numbers[0] * numbers[1]
        ).all()
        handle = bps.push_pull_group_async([large, large[:7]], process_set=mine)
        assert all((one == mean).all() for one in bps.synchronize(handle))
        bps.grouped_allreduce_([large, large[:0]], op=bps.Sum, process_set=mine)
        assert (large == sum(numbers)).all()
        # Ranks outside make no calls of a set, whose own calls they do not hold up.
        if last.included():
            alone = torch.tensor([7.0])
            assert bps.allreduce_(alone, process_set=last).item() == 7
            assert bps.broadcast(alone, 3, process_set=last).item() == 7
        assert bps.allreduce(torch.ones(2), op=bps.Sum, process_set=every).tolist() == [4, 4]
        leaf = torch.tensor([number], requires_grad=True)
        (bps.allreduce(leaf, process_set=mine) * number).sum().backward()
        assert leaf.grad.item() == mean


def test_sets_reduce_among_themselves(four):
    four.run(reductions)


def copies():
    rank = bps.rank()
    with Sets([0, 3], [1, 2]) as (outer, inner):
        mine = own(outer, inner)
        for root in mine.ranks:
            got = bps.broadcast(torch.full((9,), rank), root, name="copy", process_set=mine)
            assert (got == root).all()
            flags = torch.tensor([rank == root])
            assert bps.broadcast_(flags, root, process_set=mine).item()
        rows = torch.full((rank + 1, 2), float(rank))
        gathered = bps.allgather(rows, name="rows", process_set=mine)
        assert torch.equal(
            gathered, torch.cat([torch.full((r + 1, 2), float(r)) for r in mine.ranks])
        )
        leaf = rows.clone().requires_grad_()
        (bps.allgather(leaf, process_set=mine) * (rank + 1)).sum().backward()
        assert (leaf.grad == sum(r + 1 for r in mine.ranks) / 2).all()
        assert bps.allgather_object({"rank": rank}, process_set=mine) == [
            {"rank": r} for r in mine.ranks
        ]
        root = mine.ranks[1]
        assert bps.broadcast_object(f"of {rank}", root, process_set=mine) == f"of {root}"
        weights = {"w": torch.full((4,), float(rank)), "b": torch.tensor(rank)}
        bps.broadcast_parameters(weights, root, process_set=mine)
        assert weights["w"].tolist() == [root] * 4 and weights["b"].item() == root
        leaf = torch.ones(2, requires_grad=True)
        (bps.broadcast(leaf, root, process_set=mine) * (rank + 1)).sum().backward()
        expected = sum(r + 1 for r in mine.ranks) / 2 if rank == root else 0
        assert leaf.grad.tolist() == [expected] * 2
        for wrong in (2 if rank in (0, 3) else 3, 4, -1):
            with pytest.raises(ConfigError, match=f"broadcast from rank {wrong}"):
                bps.broadcast(torch.ones(1), wrong, process_set=mine)


def test_sets_broadcast_and_gather(four):
    four.run(copies)


def refusals():
    rank = bps.rank()
    ones = torch.ones(2)
    with Sets([0, 1]) as (few,):
        if rank > 1:
            calls = (
                lambda: bps.allreduce(ones, process_set=few),
                lambda: bps.push_pull_async_inplace(ones, process_set=few),
                lambda: bps.broadcast_(ones, 0, process_set=few),
                lambda: bps.allgather(ones, process_set=few),
                lambda: bps.allgather_object(1, process_set=few),
                lambda: bps.barrier(process_set=few),
                lambda: bps.broadcast_parameters({"w": ones}, 0, process_set=few),
            )
            for call in calls:
                with pytest.raises(ConfigError, match=f"rank {rank} is not in ProcessSet"):
                    call()
            return
        bps.barrier(few)
        if rank == 0:
            late = r"barrier of ranks \[0, 1\]: not all came"
            with pytest.raises(WaitTimeoutError, match=late) as raised:
                bps.barrier(0.2, few)
            assert raised.value.waited_s == 0.2
            bps.allreduce_(ones, name="it has passed", process_set=few)
        else:
            # The other one does not wait for this any more.
            bps.allreduce_(ones, name="it has passed", process_set=few)
            bps.barrier(process_set=few)
        bps.barrier(process_set=few)
        # What disagrees within a set is told within it.
        with pytest.raises(MismatchError, match="for ranks 0, 1"):
            bps.allreduce(torch.ones(2 + rank), name="uneven", process_set=few)
        assert bps.allreduce(ones, process_set=few).tolist() == [1, 1]


def test_only_members_take_part_and_they_agree(four):
    four.run(refusals)


def trains():
    """Two sets train models of their own, with the same names; the last rank trains alone."""
    rank = bps.rank()
    with Sets([0, 2], [1]) as (pair, single):
        torch.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
        inputs = [torch.randn(8, 6) for _ in range(4)]
        expected = [torch.clone(param) for param in model.parameters()]
        mine = single if rank == 1 else pair
        optimizer = bps.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            process_set=mine,
        )
        for _ in range(3):
            optimizer.zero_grad()
            model(inputs[rank]).pow(2).mean().backward()
            optimizer.step()
        # The same by hand, in one process.
        ranks = mine.ranks if mine.included() else [rank]
        reference = torch.nn.Sequential(
            torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1)
        )
        with torch.no_grad():
            for param, start in zip(reference.parameters(), expected, strict=True):
                param.copy_(start)
        by_hand = torch.optim.SGD(reference.parameters(), lr=0.1)
        for _ in range(3):
            by_hand.zero_grad()
            losses = [reference(inputs[other]).pow(2).mean() for other in ranks]
            (sum(losses) / len(losses)).backward()
            by_hand.step()
        for param, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(param, other, atol=1e-6), (param, other)


def test_optimizers_average_in_their_set(four):
    four.run(trains)


def trains_unevenly():
    rank = bps.rank()
    with Sets([0, 2]) as (pair,):
        model = torch.nn.Linear(2, 1)
        optimizer = bps.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), process_set=pair
        )
        model(torch.ones(1, 2)).sum().backward()
        if rank == 2:
            optimizer.step()
        if pair.included():
            with pytest.raises(UsageError, match="all 2 together 3 times"):
                model(torch.ones(1, 2)).sum().backward()


def test_unequal_passes_are_found_in_a_set(trio):
    trio.run(trains_unevenly)


def stays_behind():
    """A set does not outlive the job that it was added to."""
    few = bps.add_process_set([0, 1])
    model = torch.nn.Linear(2, 1)
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), process_set=few
    )
    assert bps.allreduce(torch.ones(1), op=bps.Sum, name="w", process_set=few).item() == 2
    bps.suspend()
    assert few.process_set_id is None
    bps.resume(1, 1)
    assert few.included() is None and bps.get_process_set_ids_and_ranks() == {0: [0, 1]}
    with pytest.raises(ConfigError, match="before its ranks changed"):
        bps.allreduce(torch.ones(1), name="w", process_set=few)
    with pytest.raises(ConfigError, match="before its ranks changed"):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    bps.add_process_set(few)
    assert bps.allreduce(torch.ones(1), op=bps.Sum, name="w", process_set=few).item() == 2
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    bps.shutdown()
    assert few.process_set_id is None


def test_a_set_ends_with_its_job():
    cluster = Cluster(2, servers=1, cores=1)
    cluster.run(initialise, timeout=120)
    cluster.run(stays_behind)
    cluster.close()


def on_a_gpu():
    """To the job they are tensors of the host, and only the ranks of the set use their GPUs."""
    rank = bps.rank()
    with Sets([0, 1]) as (few,), Gpu().plugged_in() as gpu:
        values = torch.full((5,), float(rank))
        if few.included():
            kept = values.clone()
            assert bps.allreduce(values, op=bps.Sum, process_set=few).tolist() == [1] * 5
            assert torch.equal(values, kept)
            bps.push_pull_inplace(values, False, "in place", process_set=few)
            assert values.tolist() == [1] * 5
            assert bps.broadcast(values + rank, 1, "copy", few).tolist() == [2] * 5
            model = torch.nn.Linear(3, 1, bias=False)
            optimizer = bps.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=1), process_set=few
            )
            model(torch.full((1, 3), float(rank))).sum().backward()
            assert model.weight.grad.tolist() == [[0.5] * 3]
            optimizer.step()
        assert gpu.opened is None and not any(gpu.declared.values())
        assert (gpu.used is not None) == bool(gpu.handed_over) == few.included()


def test_tensors_on_gpus(trio):
    trio.run(on_a_gpu)


def alone():
    few = bps.add_process_set([0])
    assert bps.allreduce(torch.ones(2), process_set=few).tolist() == [1, 1]
    assert bps.allgather(torch.ones(2), process_set=few).tolist() == [1, 1]
    with pytest.raises(ConfigError, match="are 0 to 0"):
        bps.add_process_set([1])
    assert bps.remove_process_set(few)


def test_a_job_of_one_has_sets_too(single):
    single.run(alone)
