"""A job that goes on without a rank that is killed, with scripts that do not know of it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import time
import urllib.request

import cloudpickle
import pytest
import torch

import byteps.torch as bps
from byteps.errors import PeerDiedError
from cluster import Cluster
from hosts import move_to, needs_mounts
from stand_in import Pipeline

# How many steps are made once a rank is missing.
STEPS_AFTER = 20
STEPS_MAX = 20_000
VICTIM = 1


def training(started, victims=(VICTIM,)):
    """Trains as any script does; by step, when it ended, what the parameters are, and of whom."""
    bps.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8))
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters())
    torch.manual_seed(bps.rank())
    steps, after = [], 0
    while after < STEPS_AFTER and len(steps) < STEPS_MAX:
        probe = torch.tensor([1 << 8 * bps.rank()], dtype=torch.int64)
        handle = bps.push_pull_async_inplace(probe, average=False, name="probe")
        optimizer.zero_grad()
        model(torch.randn(16, 256)).square().mean().backward()
        optimizer.step()
        contributors = bps.contributors(handle)
        bps.synchronize(handle)
        assert bps.contributors(handle) is None, "it is spent"
        assert probe.item() == sum(1 << 8 * rank for rank in contributors), contributors
        flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        digest = hashlib.sha256(flat.cpu().numpy().tobytes()).hexdigest()
        steps.append((time.time(), digest, contributors))
        after += not set(victims) & set(contributors)
        if len(steps) == 5 and bps.rank() == 0:
            open(started, "w").close()
    return steps


def afterwards():
    """What else is done together, without the one that is gone."""
    rank = bps.rank()
    assert bps.size() == 3, "numbers and size stay"
    bps.barrier()
    for attempt in range(2):
        with pytest.raises(PeerDiedError, match=f"rank {VICTIM} died, from which round") as caught:
            bps.broadcast(torch.zeros(1000), root_rank=VICTIM, name="from the dead")
        assert caught.value.ranks == (VICTIM,) and caught.value.round == attempt + 1
    given = bps.broadcast(torch.full((3,), float(rank)), root_rank=2, name="from the living")
    assert given.tolist() == [2.0] * 3
    # A new name, and types that are summed in others or floored.
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int32):
        tensor = torch.full((70_000,), rank + 5, dtype=dtype)
        assert set(bps.push_pull(tensor, name=f"mean {dtype}").tolist()) == {6}
    # Another shape of a known name, again and again: nobody waits for the dead to follow.
    for length in range(1, 9):
        total = bps.push_pull(torch.ones(length), average=False, name="changing")
        assert total.tolist() == [2.0] * length
    gathered = bps.allgather(torch.full((rank + 1, 2), rank), name="rows")
    assert gathered.tolist() == [[0, 0], *[[2, 2]] * 3], "the dead have no rows"
    codec = bps.Compression.topk(0.02)
    compressed = bps.push_pull(torch.ones(50_000), compression=codec, name="coded")
    assert int((compressed == 1).sum()) == 1000
    both = bps.add_process_set([VICTIM, 2])
    if both.included():
        handle = bps.push_pull_async(torch.ones(2), name="set", process_set=both)
        assert bps.contributors(handle) == [2]
        assert bps.synchronize(handle).tolist() == [1.0, 1.0]
    return True


def on_cpus(function, *arguments):
    return function(*arguments)


def on_gpus_that_are_none(function, *arguments):
    """On memory of the host that passes for a GPU's, and goes the way of that."""
    bps.init()
    with Pipeline().plugged_in() as gpu:
        result = function(*arguments)
        assert gpu.handed_over > 0
        return result


def test_others_go_on_without_a_rank_that_is_killed(tmp_path):
    others_go_on(tmp_path, on_cpus)


def test_others_go_on_without_a_rank_and_its_gpu(tmp_path):
    environment = Pipeline.libraries(tmp_path)
    if environment is None:
        pytest.skip("tests/fake_gpu is not built: cargo build -p bps-fake-gpu")
    others_go_on(tmp_path, on_gpus_that_are_none, environment)


def once_begun(started):
    """Waits for the first steps, and for a moment in the midst of one; what time it is then."""
    deadline = time.monotonic() + 60
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.0317)
    return time.time()


def shown(job):
    """The changes of who takes part, as the scheduler's metrics have them."""
    address = re.search(r"metrics of the job on (\S+)", job.log())
    assert address is not None, job.log()
    page = urllib.request.urlopen(address[1], timeout=10).read().decode()
    assert "bps_job_deaths_total 1\n" in page, page
    return re.findall(r'^bps_job_change_seconds\{.*what="(.*)"\} [0-9.]+$', page, re.MULTILINE)


def noted(folder, rank):
    """Moments of a rank's timeline."""
    trace = json.loads((folder / str(rank) / "comm.json").read_text())
    return [event["name"] for event in trace["traceEvents"] if event["ph"] == "i"]


def lasts(job, ranks, line):
    """The ranks that live leave in good order, and the job says this and has formed once."""
    for rank in ranks:
        job._ranks[rank].send_bytes(cloudpickle.dumps(None))
    assert job.wait(30) == 0, job.log()
    log = job.log()
    assert line in log and "epoch 2" not in log, log
    with contextlib.suppress(OSError):
        job.kill()


def others_go_on(tmp_path, where, environment=None):
    """The job of three ranks, each as on a host of its own, of which one is killed midway."""
    started = tmp_path / "started"
    shrinks = {"BPS_ELASTIC": "shrink", "BPS_MIN_WORKERS": "2", "BPS_METRICS_PORT": "0"}
    traced = {"BYTEPS_TRACE_ON": "1", "BYTEPS_TRACE_DIR": str(tmp_path / "trace")}
    traced |= {"BYTEPS_TRACE_START_STEP": "1", "BYTEPS_TRACE_END_STEP": "1000000"}
    with Cluster(3, servers=2, environment=shrinks | traced | (environment or {})) as job:
        job.start(where, training, str(started))
        killed = once_begun(started)
        os.kill(job.pids[VICTIM], signal.SIGKILL)
        first, second = job.results(ranks=(0, 2))
        assert [step[1:] for step in first] == [step[1:] for step in second]
        sets = [step[2] for step in first]
        alive = sets.index([0, 2])
        assert alive >= 5 and set(map(tuple, sets[:alive])) == {(0, 1, 2)}
        assert set(map(tuple, sets[alive:])) == {(0, 2)}, "the dead do not come back"
        ends = [min(end for end, *_ in steps if end > killed) for steps in (first, second)]
        short = [steps[alive][0] - killed for steps in (first, second)]
        usual = (first[alive - 1][0] - first[0][0]) / (alive - 1)
        print(
            f"from the kill to the end of the next step: {max(ends) - killed:.4f} s; of the first "
            f"without the rank: {max(short):.4f} s; a step took {usual:.4f} s before"
        )
        assert max(short) < 10, "on a busy machine"
        for rank in (0, 2):
            job._ranks[rank].send_bytes(cloudpickle.dumps((where, (afterwards,))))
        assert job.results(ranks=(0, 2)) == [True, True]
        line = "2 ranks of 3 go on without rank 1: rank 1"
        [change] = shown(job)
        assert change.startswith(line), change
        lasts(job, (0, 2), line)
        for who in (0, 2, "server-0", "server-1"):
            [note] = noted(tmp_path / "trace", who)
            assert note.startswith(line), note


def broadcasts_from_the_dead(started):
    """The root of a broadcast dies before it; how often the function was called, and what came."""
    calls = []

    def train(state):
        calls.append(bps.size())
        while len(calls) == 1:
            handle = bps.push_pull_async_inplace(torch.ones(4), name="step")
            alive = bps.contributors(handle)
            bps.synchronize(handle)
            if bps.rank() == 0 and not started_before.pop("begun", True):
                open(started, "w").close()
            if VICTIM not in alive:
                break
        name = f"from rank {VICTIM}"
        return bps.broadcast(torch.full((3,), float(bps.rank())), root_rank=VICTIM, name=name)

    started_before = {"begun": False}
    bps.init()
    state = bps.elastic.ObjectState(bps.broadcast_object, bps.rank, step=0)
    return calls, bps.elastic.run(train)(state).tolist()


def test_ranks_come_back_where_the_root_of_a_broadcast_has_died(tmp_path):
    started = tmp_path / "started"
    shrinks = {"BPS_ELASTIC": "shrink", "BPS_MIN_WORKERS": "2"}
    with Cluster(3, environment=shrinks) as job:
        job.start(broadcasts_from_the_dead, str(started))
        once_begun(started)
        os.kill(job.pids[VICTIM], signal.SIGKILL)
        results = job.results(ranks=(0, 2))
        # The rank that was the last one is the second of two now.
        assert results == [([3, 2], [1.0] * 3)] * 2
        assert "2 ranks of 3 go on without rank 1" in job.log()
        with contextlib.suppress(OSError):
            job.kill()


def on_hosts_of_two(where, function, *arguments):
    """As if the first two ranks were on one machine, and the others on another."""
    if not bps.is_initialized():
        move_to(f"host {int(os.environ['BYTEPS_LOCAL_RANK']) // 2}")
    return where(function, *arguments)


def without_a_host():
    """What is done together without ranks 2 and 3."""
    rank = bps.rank()
    assert bps.size() == 4
    bps.barrier()
    with pytest.raises(PeerDiedError, match="rank 3 died, from which round") as caught:
        bps.broadcast(torch.zeros(100_000), root_rank=3, name="from the dead")
    assert caught.value.ranks == (3,)
    given = bps.broadcast(torch.full((100_000,), float(rank)), root_rank=1, name="from the living")
    assert set(given.tolist()) == {1.0}
    for dtype in (torch.float16, torch.float32, torch.int32):
        tensor = torch.full((700_000,), 2 * rank + 5, dtype=dtype)
        assert set(bps.push_pull(tensor, name=f"mean {dtype}").tolist()) == {6}
    return True


def test_others_go_on_without_a_host_that_is_lost(tmp_path):
    others_go_on_without_a_host(tmp_path, on_cpus)


def test_others_go_on_without_a_host_and_its_gpus(tmp_path):
    environment = Pipeline.libraries(tmp_path)
    if environment is None:
        pytest.skip("tests/fake_gpu is not built: cargo build -p bps-fake-gpu")
    others_go_on_without_a_host(tmp_path, on_gpus_that_are_none, environment)


def others_go_on_without_a_host(tmp_path, where, environment=None):
    """Two hosts of two ranks, which sum among themselves; one loses both, one after the other."""
    needs_mounts()
    started = tmp_path / "started"
    environment = {"BPS_ELASTIC": "shrink", "BPS_LOCAL_REDUCE": "1"} | (environment or {})
    with Cluster(4, servers=2, environment=environment) as job:
        job.start(on_hosts_of_two, where, training, str(started), (2, 3))
        killed = once_begun(started)
        for victim in (3, 2):
            os.kill(job.pids[victim], signal.SIGKILL)
            # The kernel closes its connections once it has freed its memory.
            time.sleep(0.1)
        first, second = job.results(ranks=(0, 1))
        assert [step[1:] for step in first] == [step[1:] for step in second]
        sets = [step[2] for step in first]
        alive = sets.index([0, 1])
        assert alive >= 5 and set(map(tuple, sets[:alive])) == {(0, 1, 2, 3)}
        assert set(map(tuple, sets[alive:])) == {(0, 1)}
        short = max(steps[alive][0] for steps in (first, second)) - killed
        print(f"from the first kill to the end of the first step without the host: {short:.4f} s")
        assert short < 10, "on a busy machine"
        for rank in (0, 1):
            call = (on_hosts_of_two, (where, without_a_host))
            job._ranks[rank].send_bytes(cloudpickle.dumps(call))
        assert job.results(ranks=(0, 1)) == [True, True]
        lasts(job, (0, 1), "2 ranks of 4 go on without ranks 2, 3 of one host: rank 3")
