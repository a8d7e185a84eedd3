"""join(): ranks that run out of data before others, as Horovod's callers know it."""

from __future__ import annotations

import time

import pytest
import torch

import byteps.torch as bps
from byteps.errors import MismatchError, PeerDiedError, UsageError
from cluster import Cluster
from conftest import initialise


@pytest.fixture(scope="module")
def near():
    """Three ranks that reduce within their host, with a key: objects are authenticated."""
    environment = {"BPS_LOCAL_REDUCE": "1", "BPS_JOB_KEY": "cd" * 32}
    cluster = Cluster(3, servers=0, environment=environment)
    cluster.run(initialise, timeout=120)
    yield cluster
    cluster.kill() if cluster.broken else cluster.close()


@pytest.fixture(params=["trio", "near"])
def three(request):
    """Three ranks, whose sums pass through servers, or stay on their host."""
    return request.getfixturevalue(request.param)


def network(seed=0):
    torch.manual_seed(seed)
    layers = torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    return torch.nn.Sequential(*layers).double()


def batch(rank, step):
    generator = torch.Generator().manual_seed(10 * rank + step)
    return torch.randn(5, 6, generator=generator, dtype=torch.float64)


def reference(epochs, size):
    """The parameters of one process that sees all data: a rank without data counts with zeros."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batches in epochs:
        for step in range(max(batches)):
            optimizer.zero_grad()
            for rank in range(size):
                if step < batches[rank]:
                    (model(batch(rank, step)).square().mean() / size).backward()
            optimizer.step()
    return [param.detach() for param in model.parameters()]


def train(epochs):
    """Each rank has so many batches in each epoch; those with less join and get the parameters."""
    rank, size = bps.rank(), bps.size()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters(prefix="uneven"))
    for batches in epochs:
        for step in range(batches[rank]):
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
        last = bps.join()
        assert batches[last] == max(batches)
        # Horovod's callers go on from the model of the rank that was last.
        bps.broadcast_parameters(model.state_dict(), root_rank=last)
        bps.broadcast_optimizer_state(optimizer, root_rank=last)
    for param, wanted in zip(model.parameters(), reference(epochs, size), strict=True):
        assert torch.allclose(param, wanted, rtol=0, atol=1e-12)
    return last


def test_uneven_batches_of_two_ranks(pair):
    lasts = pair.run(train, [[2, 5], [3, 1]])
    assert lasts == [0, 0]


def test_uneven_batches_of_three_ranks_in_several_epochs(three):
    lasts = three.run(train, [[1, 4, 2], [0, 2, 3], [2, 2, 2]])
    assert len(set(lasts)) == 1


def new_to_the_rank_that_joined():
    """Horovod's test: one rank joins at once, and has never heard of what the others reduce."""
    size = bps.size()
    for first in range(size):
        if bps.rank() == first:
            last = bps.join()
        else:
            for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.float64):
                name = f"joined.{first}.{dtype}"
                ones = torch.full((17, 3), 6, dtype=dtype)
                mean = bps.allreduce(ones, name=name)
                assert torch.equal(mean, torch.full_like(ones, 6 * (size - 1) / size)), mean
                assert torch.equal(bps.allreduce(ones, op=bps.Sum), ones * (size - 1))
            weights = torch.arange(2.0, 4.0)
            assert torch.equal(bps.allreduce(-weights, op=bps.Max), -weights)
            assert torch.equal(bps.allreduce(weights, op=bps.Min), weights)
            product = bps.allreduce(weights, op=bps.Product)
            assert torch.equal(product, weights ** (size - 1))
            bps.barrier()
            # Before the last one comes, all others wait.
            if bps.rank() == (first + 1) % size:
                time.sleep(0.2)
            last = bps.join()
        assert last != first
    return bps.allreduce(torch.ones(3), op=bps.Sum).tolist()


def test_a_rank_that_joins_at_once_reduces_what_it_does_not_know(three):
    assert three.run(new_to_the_rank_that_joined) == [[3.0] * 3] * 3


def after_a_mismatch():
    """The rank that declared a tensor first has pushed it, and no other one ever will."""
    size = bps.size()
    for first in range(size):
        with pytest.raises(MismatchError):
            bps.allreduce(torch.ones(3 + bps.rank()), name=f"disagreed.{first}")
        with pytest.raises(MismatchError):
            bps.allreduce(torch.ones(3 + bps.rank()))
        if bps.rank() == first:
            bps.join()
        else:
            total = bps.allreduce(torch.ones(3), name=f"agreed.{first}", op=bps.Sum)
            assert total.tolist() == [size - 1.0] * 3
            assert bps.allreduce(torch.ones(4), op=bps.Sum).tolist() == [size - 1.0] * 4
            bps.join()


def test_what_ranks_have_disagreed_about_is_not_followed(three):
    three.run(after_a_mismatch)


def all_at_once():
    lasts = [bps.join() for _ in range(5)]
    return lasts, bps.allreduce(torch.ones(1), op=bps.Sum).item()


def test_all_ranks_join_in_the_same_step(three):
    results = three.run(all_at_once)
    assert len({tuple(lasts) for lasts, _ in results}) == 1
    assert [total for _, total in results] == [3] * 3


def gathered():
    rank, size = bps.rank(), bps.size()
    rows = torch.full((rank + 1, 4), rank, dtype=torch.int16)
    if rank == 1:
        bps.join()
    else:
        there = [other for other in range(size) if other != 1]
        expected = torch.cat([torch.full((other + 1, 4), other) for other in there])
        assert torch.equal(bps.allgather(rows, name="rows"), expected.to(torch.int16))
        both = bps.grouped_allgather([rows, torch.full((1,), float(rank))])
        assert torch.equal(both[0], expected.to(torch.int16))
        assert both[1].tolist() == there
        sparse = torch.sparse_coo_tensor([[rank]], [3.0], (size,))
        total = bps.sparse_allreduce(sparse, name="sparse", op=bps.Sum).to_dense()
        assert total.tolist() == [3.0 * (other != 1) for other in range(size)]
        part = bps.reducescatter(torch.ones(2 * size), op=bps.Sum)
        assert torch.equal(part, torch.full((2,), size - 1.0))
        bps.join()
    # Names that nobody chose go on together.
    assert bps.allreduce(torch.tensor(1.0), op=bps.Sum).item() == size
    assert torch.equal(bps.broadcast(torch.tensor(rank), root_rank=1), torch.tensor(1))


def test_a_rank_that_has_joined_gathers_no_rows(three):
    three.run(gathered)


def broadcasts():
    rank = bps.rank()
    if rank == 1:
        bps.join()
    else:
        with pytest.raises(UsageError, match="rank 1, which has called join"):
            bps.broadcast(torch.ones(3), root_rank=1, name="from.joined")
        with pytest.raises(UsageError, match="rank 1 has called join"):
            bps.alltoall(torch.ones(3), name="with.joined")
        with pytest.raises(UsageError, match="join"):
            bps.allreduce(torch.ones(8), op=bps.Adasum, name="adasum.joined")
        # From another rank it is as ever.
        assert bps.broadcast_object({"epoch": rank}, root_rank=2, name="object") == {"epoch": 2}
        assert bps.broadcast(torch.tensor(rank), root_rank=0, name="number").item() == 0
        bps.join()
    # The names are of use again.
    assert (
        bps.broadcast(torch.full((3,), rank), root_rank=1, name="from.joined").tolist() == [1] * 3
    )
    assert bps.broadcast_object({"rank": rank}, root_rank=2, name="object") == {"rank": 2}
    bps.alltoall(torch.ones(3), name="with.joined")


def test_what_a_rank_that_has_joined_would_have_to_send_is_an_error(three):
    three.run(broadcasts)


def in_a_set():
    rank = bps.rank()
    members = bps.add_process_set([0, 1])
    if rank == 2:
        bps.join()
    else:
        if rank == 0:
            for step in range(3):
                mean = bps.allreduce(torch.full((5,), 4.0), name=f"set.{step}", process_set=members)
                assert torch.equal(mean, torch.full((5,), 2.0))
        bps.join()
    assert bps.remove_process_set(members)


def test_a_rank_that_has_joined_takes_part_in_its_process_sets(three):
    three.run(in_a_set)


def other_shapes():
    """Names are given other shapes while a rank has joined, named and unnamed."""
    rank, size = bps.rank(), bps.size()
    bps.allreduce(torch.ones(4), name="changing")
    if rank == 0:
        bps.join()
    else:
        for count in (4, 7, 4, 2):
            total = bps.allreduce(torch.ones(count), name="changing", op=bps.Average)
            assert torch.equal(total, torch.ones(count) * (size - 1) / size)
        for count in range(1, 130):
            handle = bps.allreduce_async(torch.ones(1 + count % 7), op=bps.Sum)
            assert torch.equal(bps.synchronize(handle), torch.full((1 + count % 7,), size - 1.0))
        bps.join()
    assert bps.allreduce(torch.ones(2), name="changing", op=bps.Average).tolist() == [1.0] * 2
    assert bps.allreduce(torch.ones(9), op=bps.Sum).tolist() == [float(size)] * 9


def test_names_change_their_shapes_meanwhile(pair):
    pair.run(other_shapes)


def encoded():
    rank, size = bps.rank(), bps.size()
    codec = bps.Compression.bf16
    if rank == 1:
        bps.join()
    else:
        for _ in range(3):
            mean = bps.allreduce(torch.full((4096,), 2.0), name="half", compression=codec)
            assert torch.equal(mean, torch.full((4096,), 2.0 * (size - 1) / size))
            mean = bps.allreduce(
                torch.full((1 << 15,), 4.0), name="onebit", compression=bps.Compression.int8()
            )
            assert torch.allclose(mean, torch.full((1 << 15,), 4.0 * (size - 1) / size), rtol=0.02)
        bps.join()


def test_encoded_tensors(pair):
    pair.run(encoded)


def dies():
    import os
    import signal
    import threading

    if bps.rank() == 1:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        bps.join()
    with pytest.raises(PeerDiedError, match="rank 1"):
        if bps.rank() == 0:
            bps.join()
        for _ in range(1000):
            bps.allreduce(torch.ones(4), name="until.it.dies")
            time.sleep(0.01)


def test_a_rank_that_has_joined_dies():
    with Cluster(3, servers=0, environment={"BPS_LOCAL_REDUCE": "1"}) as job:
        job.run(initialise)
        job.start(dies)
        job.results(20, ranks=[0, 2])
        job.kill()


def test_a_job_of_one_rank_does_not_wait(single):
    assert single.run(bps.join) == [0]
