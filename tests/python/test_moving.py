"""A job that goes on when servers are killed, with scripts that do not know of it."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import signal
import time

import cloudpickle
import pytest
import torch

import byteps.torch as bps
from cluster import Cluster, servers_of

STEPS = 300
ENVIRONMENT = {
    "BPS_ELASTIC": "shrink",
    "BPS_MIN_WORKERS": "2",
    # Many parts, on all servers.
    "BYTEPS_PARTITION_BYTES": "16384",
}
# The ranks sum among themselves, and one of them speaks to a server for all.
AS_A_HOST = {"BPS_LOCAL_REDUCE": "1", "BYTEPS_FORCE_DISTRIBUTED": "1"}


def training(started):
    """Trains as any script does; by step, when it ended, what the parameters are, and of whom."""
    bps.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8))
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters())
    torch.manual_seed(bps.rank())
    steps = []
    codec = bps.Compression.topk(0.1)
    for step in range(STEPS):
        probe = torch.tensor([1 << 8 * bps.rank()], dtype=torch.int64)
        handle = bps.push_pull_async_inplace(probe, average=False, name="probe")
        coded = bps.push_pull(torch.randn(5000), compression=codec, name="coded")
        optimizer.zero_grad()
        model(torch.randn(16, 256)).square().mean().backward()
        optimizer.step()
        contributors = bps.contributors(handle)
        bps.synchronize(handle)
        assert probe.item() == sum(1 << 8 * rank for rank in contributors), contributors
        flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        digest = hashlib.sha256(torch.cat([flat, coded]).numpy().tobytes()).hexdigest()
        steps.append((time.time(), digest, contributors))
        if step == 5 and bps.rank() == 0:
            open(started, "w").close()
    return steps


def afterwards():
    """What else is done together, with the servers that are left."""
    bps.barrier()
    others = len(bps.contributors(bps.push_pull_async(torch.ones(1), name="who")))
    for dtype in (torch.float16, torch.float32, torch.int32):
        tensor = torch.full((70_000,), 6, dtype=dtype)
        assert set(bps.push_pull(tensor, name=f"mean {dtype}").tolist()) == {6}
    for length in range(1, 9):
        total = bps.push_pull(torch.ones(length), average=False, name="changing")
        assert total.tolist() == [others] * length
    return True


@pytest.mark.parametrize(
    ("size", "servers", "with_rank", "how", "number"),
    [
        (3, 2, False, {}, signal.SIGKILL),
        (3, 3, True, {}, signal.SIGKILL),
        (4, 2, False, AS_A_HOST, signal.SIGKILL),
        (3, 3, False, {}, signal.SIGTERM),
    ],
)
def test_others_go_on_without_servers_that_end(tmp_path, size, servers, with_rank, how, number):
    """They are killed, or leave in good order: nothing is redone, and the sums are right."""
    started = tmp_path / "started"
    with Cluster(size, servers=servers, environment=ENVIRONMENT | how) as job:
        job.start(training, str(started))
        deadline = time.monotonic() + 180
        while not started.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        pids = servers_of(job.process.pid)
        assert len(pids) == servers, job.log()
        # One after another, and a rank with the last of them.
        kills = []
        for pid in pids[1:]:
            time.sleep(0.0317)
            kills.append(time.time())
            os.kill(pid, number)
        if with_rank:
            os.kill(job.pids[1], signal.SIGKILL)
        everybody = tuple(range(size))
        ranks = (0, 2) if with_rank else everybody
        results = job.results(180, ranks=ranks)
        assert all(len(steps) == STEPS for steps in results), "nobody leaves out a step"
        for steps in results[1:]:
            assert [step[1:] for step in steps] == [step[1:] for step in results[0]]
        ends = [steps[0][0] for steps in results]
        assert max(ends) < kills[0] < min(steps[-1][0] for steps in results)
        sets = {tuple(step[2]) for step in results[0]}
        assert sets == ({everybody, (0, 2)} if with_rank else {everybody})
        for kill in kills:
            after = max(min(end for end, *_ in steps if end > kill) for steps in results)
            print(f"from the kill of a server to the end of the next step: {after - kill:.4f} s")
        ends = [end for end, *_ in results[0]]
        times = sorted(later - sooner for sooner, later in itertools.pairwise(ends))
        print(f"a step took {times[len(times) // 2]:.4f} s, the longest {times[-1]:.4f} s")
        for rank in ranks:
            job._ranks[rank].send_bytes(cloudpickle.dumps((afterwards, ())))
        assert job.results(ranks=ranks) == [True] * len(ranks)
        for rank in ranks:
            job._ranks[rank].send_bytes(cloudpickle.dumps(None))
        assert job.wait(30) == 0, job.log()
        log = job.log()
        assert f"of {servers} goes on without server" in log, log
        leavers = servers - 1 if number == signal.SIGTERM else 0
        assert log.count("this server has left; the job goes on without it") == leavers, log
        assert ("died" in log) == (leavers == 0), log
        assert "parts moved to other servers within" in log and "epoch 2" not in log, log
        print("\n".join(line for line in log.splitlines() if "moved to other" in line))
        with contextlib.suppress(OSError):
            job.kill()
