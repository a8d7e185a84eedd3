"""torch.distributed over the backend ``byteps``, and DDP's communication hook."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid

import pytest

from cluster import Cluster


def in_group(job, function, *arguments, **options):
    """Runs the function on the ranks of a job, within a default group of the backend."""
    # A file, so that no group finds what a former one has left in a store.
    meeting = f"file:///tmp/byteps-{uuid.uuid4().hex}"

    def run():
        import torch.distributed as dist

        import byteps.torch as bps

        place = {"rank": bps.rank(), "world_size": bps.size()}
        backend = options.get("backend", "byteps")
        dist.init_process_group(backend, init_method=meeting, **place)
        try:
            return function(*arguments)
        finally:
            dist.destroy_process_group()

    try:
        return job.run(run)
    finally:
        if os.path.exists(meeting.removeprefix("file://")):
            os.unlink(meeting.removeprefix("file://"))


def reductions():
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    dtypes = torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64
    for dtype in dtypes:
        for operation, wanted in (
            (dist.ReduceOp.SUM, size * (size + 1) // 2),
            (dist.ReduceOp.MAX, size),
            (dist.ReduceOp.MIN, 1),
            (dist.ReduceOp.PRODUCT, 2 if size == 2 else 6),
        ):
            tensor = torch.full((3, 5), rank + 1, dtype=dtype)
            dist.all_reduce(tensor, operation)
            assert (tensor == wanted).all(), (dtype, operation, tensor)
        if dtype.is_floating_point:
            tensor = torch.full((7,), rank + 1, dtype=dtype)
            dist.all_reduce(tensor, dist.ReduceOp.AVG)
            assert (tensor == (size + 1) / 2).all()
    gaps = torch.zeros(4, 6)
    gaps[:, ::2] = rank + 1
    dist.all_reduce(gaps[:, ::2])
    assert (gaps[:, ::2] == size * (size + 1) / 2).all() and (gaps[:, 1::2] == 0).all()
    dist.all_reduce(torch.empty(0))
    several = [torch.full((count,), float(rank)) for count in (1, 1000, 70_000)]
    dist.all_reduce_coalesced(several)
    assert all((tensor == size * (size - 1) / 2).all() for tensor in several)
    for root in range(size):
        tensor = torch.full((9,), float(rank + 1))
        dist.reduce(tensor, root)
        assert (tensor == (size * (size + 1) / 2 if rank == root else rank + 1)).all()
    whole = torch.arange(4.0 * size)
    own = torch.empty(4)
    dist.reduce_scatter_tensor(own, whole + rank)
    wanted = whole[4 * rank : 4 * rank + 4] * size + size * (size - 1) / 2
    assert torch.equal(own, wanted)
    assert torch.equal(whole, torch.arange(4.0 * size)), "the input is as it was"
    dist.reduce_scatter(own, list((whole + rank).chunk(size)))
    assert torch.equal(own, wanted)
    dist.reduce_scatter_tensor(own, whole, dist.ReduceOp.MAX)
    assert torch.equal(own, whole[4 * rank : 4 * rank + 4])


def moves():
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    for root in range(size):
        for dtype in (torch.float32, torch.bool, torch.complex64, torch.int16):
            tensor = torch.full((5, 2), rank + 1).to(dtype)
            dist.broadcast(tensor, root)
            assert (tensor == torch.tensor(root + 1).to(dtype)).all()
    slots = [torch.empty(2 + other) for other in range(size)]  # Of unequal sizes.
    dist.all_gather(slots, torch.full((2 + rank,), float(rank)))
    assert [slot.tolist() for slot in slots] == [[float(r)] * (2 + r) for r in range(size)]
    output = torch.empty(size, 3)
    dist.all_gather_into_tensor(output, torch.full((3,), float(rank)))
    assert output[:, 0].tolist() == list(range(size))
    dist.all_gather_into_tensor(output, output[rank])  # Its input is part of its output.
    assert output[:, 2].tolist() == list(range(size))
    with pytest.raises(Exception, match="elements"):
        dist.all_gather_into_tensor(torch.empty(1), torch.empty(4))
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert [found["rank"] for found in objects] == list(range(size))
    one = ["of rank 1" if rank == 1 else None]
    dist.broadcast_object_list(one, 1)
    assert one == ["of rank 1"]
    dist.barrier()
    dist.monitored_barrier()


def fallbacks():
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    gathered = [torch.empty(1) for _ in range(size)] if rank == 0 else None
    dist.gather(torch.tensor([float(rank)]), gathered)
    assert gathered is None or [t.item() for t in gathered] == list(range(size))
    got = torch.empty(1)
    dist.scatter(got, [torch.tensor([10.0 * r]) for r in range(size)] if rank == 0 else None)
    assert got.item() == 10 * rank
    output = torch.empty(size)
    dist.all_to_all_single(output, torch.arange(size) + 100.0 * rank)
    assert output.tolist() == [100.0 * other + rank for other in range(size)]
    sent = dist.isend(torch.tensor([float(rank)]), (rank + 1) % size)
    dist.recv(got, (rank - 1) % size)
    sent.wait()
    assert got.item() == (rank - 1) % size
    part = dist.new_group([0, 1])
    if rank < 2:
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=part)
        assert (tensor == 2).all()
    everyone = dist.new_group(list(range(size)))
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=everyone)
    assert (tensor == size).all()
    served = [
        group._get_backend(torch.device("cpu"))._keys is not None
        for group in (dist.group.WORLD, everyone, *((part,) if rank < 2 else ()))
    ]
    return served


@pytest.mark.parametrize("operations", [reductions, moves])
def test_collectives(pair, trio, operations):
    in_group(pair, operations)
    in_group(trio, operations)


def test_what_the_engine_has_not_goes_to_the_fallback(pair, trio):
    assert in_group(pair, fallbacks) == [[True, True, True]] * 2
    assert in_group(trio, fallbacks) == [[True, True, True]] * 2 + [[True, True]]


def asynchronous():
    import datetime

    import torch
    import torch.distributed as dist

    from byteps.errors import WaitTimeoutError

    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((1000,), float(number)) for number in range(50)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for number, (tensor, work) in enumerate(zip(tensors, works, strict=True)):
        work.wait()
        assert (tensor == number * size).all()
        # As with gloo, whose future is complete by then: what is added to it runs at once.
        future = work.get_future()
        assert future.done() and future.then(lambda _: threading.get_ident()).done()
        assert future.then(lambda _: threading.get_ident()).value() == threading.get_ident()
    tensor = torch.ones(5)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    twice = future.then(lambda done: done.value()[0] * 2)
    assert (twice.wait() == 2 * size).all() and future.done()

    # A callback that makes a call and waits for its future: it blocks the thread that runs it.
    def again(done):
        inner = dist.all_reduce(done.value()[0], async_op=True)
        return inner.get_future().wait()[0]

    futures = [
        dist.all_reduce(torch.ones(count), async_op=True).get_future().then(again)
        for count in (3, 30_000, 300)
    ]
    assert [future.wait()[0].item() for future in futures] == [size**2] * 3
    for _ in range(100):  # Nobody waits for these.
        dist.all_reduce(torch.ones(10_000), async_op=True)
    dist.barrier()
    late = torch.ones(3)
    if rank == 0:
        work = dist.all_reduce(late, async_op=True)
        with pytest.raises(WaitTimeoutError, match=r"all_reduce .* not done after 0.2 s"):
            work.wait(datetime.timedelta(seconds=0.2))
    dist.monitored_barrier()  # By gloo: rank 1 has not made the call above.
    if rank > 0:
        dist.all_reduce(late)
    else:
        work.wait()
    assert (late == size).all()


def test_works_and_futures(pair):
    in_group(pair, asynchronous)


def many_sizes():
    import torch
    import torch.distributed as dist

    from byteps import _names
    from byteps.torch.distributed import _keys

    assert sum(_keys.split(1_000_001, 4)) == 1_000_001
    assert _keys.split(63, 4) == [63] and _keys.split(64, 4) == [64]
    assert max(_keys.split(100 << 20, 4)) * 4 == 64 << 20

    def declared():
        return sum(tensor.name.startswith("torch.distributed") for tensor in _names._declared)

    before, exact = declared(), _keys.EXACT_COUNT
    _keys.EXACT_COUNT = 4
    try:
        group = dist.new_group(list(range(dist.get_world_size())))
        for number in range(300):
            count = 1 + number * 977 % 60_000
            tensor = torch.arange(count, dtype=torch.float32)
            dist.all_reduce(tensor, group=group)
            assert torch.equal(tensor, torch.arange(count) * 2.0)
            dist.broadcast(tensor, number % 2, group=group)
    finally:
        _keys.EXACT_COUNT = exact
    return declared() - before


def test_many_sizes_use_few_tensors(pair):
    # 64 sizes below the smallest piece and 12 powers of two, twice; and of bytes from two roots.
    counts = in_group(pair, many_sizes)
    assert counts[0] == counts[1] < 450


def resident_mib(pid):
    with open(f"/proc/{pid}/status") as status:
        line = next(line for line in status if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def descendants(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as children:
        for child in children.read().split():
            yield int(child)
            yield from descendants(int(child))


def repeat(times):
    import torch
    import torch.distributed as dist

    tensor = torch.zeros(2 << 20)
    for _ in range(times):
        dist.all_reduce(tensor)


def test_repeated_calls_take_no_more_memory(pair):
    in_group(pair, repeat, 4)

    def now():
        return sum(resident_mib(pid) for pid in descendants(pair.process.pid))

    def measure():
        repeat(4)  # The tensors of a new group.

    in_group(pair, measure)
    before = now()
    in_group(pair, repeat, 300)
    # The third group's own two accumulators of 8 MiB, and what allocators keep.
    assert now() - before < 64, "300 times 8 MiB"


def trained(backend):
    """Parameters after some steps with DDP, whose gradients take this way."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import byteps.torch as bps

    gloo = dist.new_group(backend="gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(48, 48) for _ in range(5)))
    group = None if backend == "byteps" else gloo
    parallel = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.02)
    if backend == "hook":
        parallel.register_comm_hook(None, bps.comm_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(8):
        inputs = torch.randn(4, 48, generator=generator)
        optimizer.zero_grad()
        (parallel(inputs) - inputs).square().mean().backward()
        optimizer.step()
    with parallel.join():
        for _ in range(1 + dist.get_rank()):
            parallel(torch.ones(4, 48)).sum().backward()
    return b"".join(param.detach().numpy().tobytes() for param in model.parameters())


def test_ddp_is_that_over_gloo(pair):
    found = [in_group(pair, trained, backend) for backend in ("gloo", "byteps", "hook")]
    assert len({bytes for ranks in found for bytes in ranks}) == 1


def calls_in_callbacks():
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    order = []

    def again(factor):
        def callback(done):
            inner = dist.all_reduce(done.value()[0] * factor, async_op=True)
            order.append(factor)
            return inner.get_future().wait()[0]

        return callback

    futures = []
    for factor in range(1, 13):
        # The first is done long after the others.
        count = 4 << 20 if factor == 1 else 100
        future = dist.all_reduce(torch.ones(count), async_op=True).get_future()
        if (factor + rank) % 3 == 0:
            future.wait()  # Its callbacks run at once, on this thread.
        futures.append(future.then(again(factor)))
        plain = torch.full((100,), 1000.0)  # Of the size of those that the callbacks reduce.
        dist.all_reduce(plain)
        assert (plain == 1000 * size).all()
    found = [future.wait()[0].item() for future in futures]
    assert found == [factor * size**2 for factor in range(1, 13)]
    assert order == sorted(order)


def test_calls_in_callbacks_have_an_order(pair):
    in_group(pair, calls_in_callbacks)


def power_sgd(group_backend, bias):
    """Parameters after some steps with PowerSGD, whose callbacks make further calls."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
    from torch.nn.parallel import DistributedDataParallel

    group = dist.new_group(backend=group_backend)
    torch.manual_seed(0)
    # All buckets have equal sizes, and so have biases and the factors of PowerSGD: nothing but the
    # order of the calls tells them apart.
    model = nn.Sequential(*(nn.Linear(64, 64, bias=bias) for _ in range(8)))
    parallel = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.01)
    state = power.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)

    def one_after_the_other(state, bucket):
        # With two buckets under way, both threads of gloo wait in callbacks for each other.
        future = power.powerSGD_hook(state, bucket)
        future.wait()
        return future

    hook = one_after_the_other if group_backend == "gloo" else power.powerSGD_hook
    parallel.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(40):
        inputs = torch.randn(4, 64, generator=generator)
        optimizer.zero_grad()
        (parallel(inputs) - inputs).square().mean().backward()
        optimizer.step()
    return torch.cat([param.detach().flatten() for param in model.parameters()])


@pytest.mark.parametrize("bias", [True, False])
def test_power_sgd_is_that_over_gloo(pair, bias):
    import torch

    ours, others = in_group(pair, power_sgd, "byteps", bias)
    assert torch.equal(ours, others)
    one, other = in_group(pair, power_sgd, "gloo", bias)
    assert torch.equal(one, other) and torch.allclose(ours, one, atol=1e-5)


def sharded(folder):
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    rank, size = dist.get_rank(), dist.get_world_size()

    def new():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    alone = new()
    alone(inputs).square().mean().backward()
    with torch.no_grad():
        for param in alone.parameters():
            dist.all_reduce(param.grad, dist.ReduceOp.AVG)
            param.sub_(param.grad, alpha=0.1)
    for shape, names in (((size,), ("shard",)), ((size, 1), ("replicate", "shard"))):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = new()
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(inputs).square().mean().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(one.full_tensor(), other, atol=1e-6)
    state = {"model": model.state_dict()}
    dcp.save(state, checkpoint_id=folder)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    dcp.load(state, checkpoint_id=folder)
    first = next(model.parameters()).full_tensor()
    assert torch.allclose(first, next(alone.parameters()), atol=1e-6)
    mesh = init_device_mesh("cpu", (size,))
    tensor = distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [Shard(0)])
    assert tensor.sum().full_tensor().item() == 120 and tensor.max().full_tensor().item() == 15
    ones = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])
    assert (ones.redistribute(placements=[Shard(0)]).to_local() == size).all()
    model = nn.parallel.DistributedDataParallel(new())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    model(inputs).sum().backward()
    optimizer.step()
    optimizer.consolidate_state_dict(0)


def test_what_is_built_on_collectives(pair, tmp_path):
    in_group(pair, sharded, str(tmp_path))


def functional():
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as funcol

    group, size = dist.group.WORLD, dist.get_world_size()

    def step(tensor):
        return funcol.all_reduce(tensor * 2, "sum", group) + 1

    assert (step(torch.ones(4)) == 2 * size + 1).all()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert (compiled(torch.ones(4)) == 2 * size + 1).all()
    gathered = funcol.all_gather_tensor(torch.full((2,), float(dist.get_rank())), 0, group)
    assert (gathered + 0).tolist() == [0.0, 0.0, 1.0, 1.0]
    both = funcol.all_reduce_coalesced([torch.ones(2), torch.ones(3)], "avg", group)
    assert all((one + 0 == 1).all() for one in both)


def test_functional_and_compiled_collectives(pair):
    in_group(pair, functional)


def joins_and_leaves(folder):
    import torch.distributed as dist

    import byteps.torch as bps

    for number in range(80):
        meeting = f"file://{folder}/{number}"
        dist.init_process_group("byteps", meeting, rank=bps.rank(), world_size=bps.size())
        dist.destroy_process_group()


def test_a_group_may_be_left_at_once(trio, tmp_path):
    """By each rank as soon as it is in it, while others still connect to each other."""
    trio.run(joins_and_leaves, str(tmp_path))


def until_dead(way):
    """Trains until a step fails; how long that step took."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import byteps.torch as bps
    from byteps.errors import PeerDiedError

    bps.init()
    backend = "gloo" if way == "hook" else "byteps"
    place = {"rank": bps.rank(), "world_size": bps.size()}
    dist.init_process_group(backend, **place)
    model = DistributedDataParallel(torch.nn.Linear(500, 500))
    if way == "hook":
        model.register_comm_hook(None, bps.comm_hook)
    for step in range(1000):
        if step == 10 and bps.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        try:
            model(torch.ones(2, 500)).sum().backward()
        except RuntimeError as error:
            seconds = time.monotonic() - begin
            assert "rank 1" in str(error) and "PeerDiedError" in str(error), error
            if way == "ddp":
                with pytest.raises(PeerDiedError, match="rank 1"):
                    dist.all_reduce(torch.ones(3))
            return seconds
    raise AssertionError("rank 1 is dead, and nothing has failed")


@pytest.mark.parametrize("way", ["ddp", "hook"])
def test_a_dead_rank_is_an_exception(way):
    with Cluster(2) as job:
        job.start(until_dead, way)
        (seconds,) = job.results(150, ranks=[0])  # DDP imports the compiler.
        job.kill()
    assert seconds < 10


def test_a_hook_for_other_ranks_than_those_of_the_job(pair):
    def refused():
        import torch
        from torch.nn.parallel import DistributedDataParallel

        import byteps.torch as bps

        class Other:
            def size(self):
                return 5

        model = DistributedDataParallel(torch.nn.Linear(2, 2))
        model.register_comm_hook(Other(), bps.comm_hook)
        with pytest.raises(RuntimeError, match="5 ranks and the job of byteps 2"):
            model(torch.ones(1, 2)).sum().backward()

    in_group(pair, refused)
