"""Groups of torch.distributed whose ranks change: enable_reconfigure, of torch 2.15 on, and groups
for libraries that make one after another."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import os
import signal
import time

import pytest
import torch.distributed as dist

from cluster import Cluster

reconfigures = pytest.mark.skipif(
    "enable_reconfigure" not in inspect.signature(dist.init_process_group).parameters,
    reason="this torch has no enable_reconfigure",
)


@pytest.fixture
def store():
    """The members' store: like that of torchrun's agent it outlives them."""
    seconds = datetime.timedelta(seconds=30)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=seconds, wait_for_workers=False)


@contextlib.contextmanager
def processes(count, **environment):
    """Processes that no launcher has started."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(Cluster(1, environment={"BPS_START_TIMEOUT": "60", **environment}))
            for _ in range(count)
        ]


def on(members, function, *arguments, timeout=60):
    """What the function returns on each of these, which run it side by side."""
    for member in members:
        member.start(function, *arguments)
    return [member.results(timeout)[0] for member in members]


def begin(port, rank, size):
    """A group without ranks; its handle."""
    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    seconds = datetime.timedelta(seconds=30)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=seconds)
    place = {"store": store, "rank": rank, "world_size": size}
    dist.init_process_group("byteps", enable_reconfigure=True, **place)
    assert dist._supports_reconfigure()
    for call in dist.barrier, lambda: dist.all_reduce(torch.ones(2)):
        with pytest.raises(RuntimeError, match=r"call reconfigure\(\) first"):
            call()
    return dist._get_reconfigure_handle()


def handle():
    import torch.distributed as dist

    return dist._get_reconfigure_handle()


def reconfigure(uuid, handles, seconds=30):
    import datetime

    import torch.distributed as dist

    work = dist._reconfigure(uuid, handles, timeout=datetime.timedelta(seconds=seconds))
    assert work.wait()
    return check()


def check():
    """Sums of every kind of path; this rank's place."""
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (3, 100_000):
        tensor = torch.full((count,), rank + 1.0)
        dist.all_reduce(tensor)
        assert (tensor == size * (size + 1) / 2).all()
    dist.monitored_barrier()
    objects = [None] * size
    dist.all_gather_object(objects, rank)
    assert objects == list(range(size))
    got = torch.empty(1)
    sent = dist.isend(torch.tensor([float(rank)]), (rank + 1) % size) if size > 1 else None
    if sent is not None:
        dist.recv(got, (rank - 1) % size)
        sent.wait()
        assert got.item() == (rank - 1) % size
    return rank, size


def train(seed):
    """Some steps of DDP, made anew as after any change of the ranks; equal to one process."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed + rank)  # DDP gives all the model of rank 0.
    model = DistributedDataParallel(torch.nn.Linear(6, 3).double())
    torch.manual_seed(seed)
    alone = torch.nn.Linear(6, 3).double()
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, alone)]
    for step in range(3):
        inputs = [
            torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + other)).double()
            for other in range(size)
        ]
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(inputs[rank]).square().mean().backward()
        for each in inputs:
            (alone(each).square().mean() / size).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.allclose(model.module.weight, alone.weight, rtol=1e-12, atol=1e-14)


def sub_group():
    """A group of the first two ranks, which the engine serves."""
    import torch
    import torch.distributed as dist

    part = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        tensor = torch.full((5,), dist.get_rank() + 1.0)
        dist.all_reduce(tensor, group=part)
        assert (tensor == 3).all()
        return part._get_backend(torch.device("cpu"))._keys is not None
    return None


def until_death():
    """Sums until a member is dead; the seconds that the last one took, and the error."""
    import torch
    import torch.distributed as dist

    while True:
        begun = time.monotonic()
        try:
            dist.all_reduce(torch.ones(1000))
        except RuntimeError as error:
            return time.monotonic() - begun, f"{type(error).__name__}: {error}"


def die(after):
    time.sleep(after)
    os.kill(os.getpid(), signal.SIGKILL)


@reconfigures
@pytest.mark.parametrize("by", ["themselves", "a server"])
def test_members_die_and_come(store, by):
    trains = by == "themselves"
    with processes(4, BPS_LOCAL_REDUCE=str(int(trains))) as (a, b, c, d):
        for rank, member in enumerate((a, b, c)):
            member.start(begin, store.port, rank, 3)
        handles = [member.results(120)[0] for member in (a, b, c)]
        # A list says who has which rank: c has the scheduler.
        assert on((a, b, c), reconfigure, 1, handles[::-1]) == [(2, 3), (1, 3), (0, 3)]
        if trains:
            on((a, b, c), train, 5, timeout=120)
        assert on((a, b, c), sub_group) == [None, True, True]
        for member in (a, b):
            member.start(until_death)
        c.start(die, 0.2)
        for member in (a, b):
            seconds, text = member.results()[0]
            assert seconds < 10 and text.startswith("PeerDiedError: rank 0 ("), text
        c.kill()
        # Those of a set keep their order.
        assert on((a, b), reconfigure, 2, set(on((a, b), handle))) == [(1, 2), (0, 2)]
        if trains:
            on((a, b), train, 6, timeout=120)
        # A new one comes, and is to be the first.
        newcomer = d.run(begin, store.port, 0, 1, timeout=120)
        handles = [*newcomer, *on((a, b), handle)]
        assert on((d, a, b), reconfigure, 3, handles) == [(0, 3), (1, 3), (2, 3)]
        if trains:
            on((d, a, b), train, 7, timeout=120)
        # One that is alive and makes calls is left out.
        a.start(until_death)
        time.sleep(0.2)
        handles = on((b, d), handle)
        assert on((b, d), reconfigure, 4, handles) == [(0, 2), (1, 2)]
        seconds, text = a.results()[0]
        assert seconds < 20 and "Error" in text, text
        # And one goes on alone, the other too.
        on((b,), reconfigure, 5, on((b,), handle))
        on((d,), reconfigure, 6, on((d,), handle))
        on((a, b, d), dist.destroy_process_group)


def refused(uuid, handles, kind, text, seconds=2):
    import byteps.errors

    with pytest.raises(getattr(byteps.errors, kind), match=text):
        reconfigure(uuid, handles, seconds)


@reconfigures
def test_what_cannot_be(store):
    with processes(2) as (a, b):
        for rank, member in enumerate((a, b)):
            member.start(begin, store.port, rank, 2)
        handles = [member.results(120)[0] for member in (a, b)]
        assert on((a, b), reconfigure, 1, handles) == [(0, 2), (1, 2)]
        on((a, b), refused, 1, handles, "ConfigError", "uuid 1 was used before")
        on((a, b), refused, 2, ["gloo:0:1"], "ConfigError", "not the handle of a group of byteps")
        a.run(refused, 3, handles[1:], "ConfigError", "is not among the 1 of the members")
        a.run(refused, 4, [handles[0]] * 2, "ConfigError", "two of the handles are of one member")
        # Who waits for a member in vain goes on in the group of before.
        a.run(refused, 5, handles, "StartError", "has not heard from all 2 ranks")
        assert on((a, b), check) == [(0, 2), (1, 2)]
        gone = handles[0].replace(str(store.port), "1")
        b.run(refused, 6, [gone, handles[1]], "StartError", "no connection to the store")
        on((a, b), dist.destroy_process_group)
        a.run(byteps_init)
        text = r"byteps.torch.init\(\) has put this process into a job"
        a.run(refused, 7, a.run(begin, store.port, 0, 1), "UsageError", text)


def byteps_init():
    import byteps.torch as bps

    bps.init()


def begin_launched(port):
    rank = int(os.environ["BYTEPS_LOCAL_RANK"])
    return begin(port, rank, int(os.environ["BYTEPS_LOCAL_SIZE"]))


def die_if(local_rank):
    if os.environ["BYTEPS_LOCAL_RANK"] == str(local_rank):
        die(0.2)
    return until_death()


@reconfigures
def test_an_elastic_job_of_the_launcher(store):
    """Its scheduler outlives the ranks, and numbers them."""
    with Cluster(3, environment={"BPS_ELASTIC": "redo"}) as job:
        handles = job.run(begin_launched, store.port, timeout=120)
        assert job.run(reconfigure, 1, set(handles)) == [(0, 3), (1, 3), (2, 3)]
        job.start(die_if, 0)
        for seconds, text in job.results(ranks=(1, 2)):
            assert seconds < 10 and text.startswith("PeerDiedError: rank 0 ("), text
        job._ranks[0].close()
        handles = set(handles[1:])
        for rank in (1, 2):
            job._ranks[rank].send_bytes(pickled(reconfigure, 2, handles))
        assert job.results(ranks=(1, 2)) == [(0, 2), (1, 2)]
        job.kill()


def pickled(function, *arguments):
    import cloudpickle

    return cloudpickle.dumps((function, arguments))


@reconfigures
def test_a_job_of_the_launcher_that_is_not_elastic(store):
    with Cluster(2) as job:
        handles = job.run(begin_launched, store.port, timeout=120)
        job.run(refused_late, handles)
        job.run(dist.destroy_process_group)


def refused_late(handles):
    assert reconfigure(1, handles) == check()
    refused(2, handles, "ConfigError", "is not elastic")
    check()  # It goes on.


def quorum(port, number, rank, size, ends):
    """What torchft's manager does with the groups of two quorums, one after another."""
    import datetime

    import torch
    import torch.distributed as dist

    import byteps.torch
    from byteps.torch.distributed import process_group

    torch.set_num_threads(1)
    seconds = datetime.timedelta(seconds=30)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=seconds)
    group = process_group(dist.PrefixStore(f"quorum {number}", store), rank, size, seconds)
    assert (
        (group.rank(), group.size()) == (rank, size) == (byteps.torch.rank(), byteps.torch.size())
    )
    tensor = torch.full((1000,), rank + 1.0)
    group.allreduce([tensor]).wait()
    assert (tensor == size * (size + 1) / 2).all()
    if ends == "die":
        die(0.2)
    if ends == "until a death":
        with pytest.raises(RuntimeError, match=f"rank {size - 1}"):
            while True:
                group.allreduce([tensor]).wait()
    group.abort()
    assert not byteps.torch.is_initialized()


def test_a_group_for_each_quorum(store):
    with processes(3) as (a, b, c):
        a.start(quorum, store.port, 1, 0, 2, "until a death")
        b.start(quorum, store.port, 1, 1, 2, "die")
        a.results(120)
        b.kill()
        a.start(quorum, store.port, 2, 1, 2, "well")
        c.start(quorum, store.port, 2, 0, 2, "well")
        for member in (a, c):
            member.results(120)
        a.run(quorum, store.port, 3, 0, 1, "well")
