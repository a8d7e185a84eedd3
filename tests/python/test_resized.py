"""Jobs that go on with another number of ranks as BytePS's do: every rank suspends, and resumes
with the new counts; who is new starts with them. The benchmark is what BytePS's
`elastic_benchmark_byteps.py` does, with a small model."""

from __future__ import annotations

import json
import sys
import time

import pytest

from test_launched_jobs import PATIENCE_SECONDS, finish, free_port, python, run  # noqa: F401

#: Trains by the wall clock, suspends, resumes with so many workers, and prints what it measured:
#: after `suspend` it still asks for its local rank. Then the ranks of the new job train on.
BENCHMARK = """
import sys, time, timeit
from pathlib import Path
import torch
import torch.nn.functional as F
import byteps.torch as bps

def log(text):
    if bps.local_rank() == 0: sys.stdout.write(text + "\\n"); sys.stdout.flush()

def train(count):
    return timeit.timeit(step, number=count)

def step():
    optimizer.zero_grad()
    F.cross_entropy(model(data), target).backward()
    optimizer.step()

def agree():
    mine = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    theirs = bps.push_pull(mine, average=True, name="agree")
    assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-7), (mine - theirs).abs().max()

workers = [int(count) for count in sys.argv[2:]]
torch.set_num_threads(1)
bps.init()
assert bps.size() == workers[0], (bps.size(), workers)
torch.manual_seed(bps.rank())
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(),
                            torch.nn.Linear(4 * 14 * 14, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = bps.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
bps.broadcast_parameters(model.state_dict(), root_rank=0)
bps.broadcast_optimizer_state(optimizer, root_rank=0)
data, target = torch.rand(8, 3, 16, 16), torch.randint(10, (8,))

log(f"training on {bps.size()}")
train(4)
agree()
for count in [*workers[1:], 0]:
    rates = [8 * 4 / train(4) for _ in range(3)]
    if count == 0: break
    bps.suspend()
    log("suspended")
    # The others are started meanwhile, with the new counts.
    deadline = time.monotonic() + 60
    while not Path(sys.argv[1], f"go.{count}").exists():
        assert time.monotonic() < deadline, "nobody has started the others"
        time.sleep(0.02)
    bps.resume(count, 1, 0)
    log("resumed")
    assert (bps.rank(), bps.size()) == (0, count)
    log(f"{bps.size() * sum(rates) / len(rates):.1f} a second on {bps.size()}")
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    bps.broadcast_optimizer_state(optimizer, root_rank=0)
    train(4)
    agree()
    log(f"trained on {bps.size()}")
"""


@pytest.mark.parametrize("stays", [False, True])
def test_the_elastic_benchmark_runs_whole(run, tmp_path, stays):  # noqa: F811
    """From one rank to two, and back to one. A rank alone needs no scheduler and no server, and
    they are started while it is suspended, as BytePS's are, unless it is told to use them all the
    same. Those that are there stay until it ends, and end with it."""
    job = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(free_port()),
        "DMLC_NUM_SERVER": "1",
        "BYTEPS_LOCAL_SIZE": "1",
    }
    if stays:
        job["BYTEPS_FORCE_DISTRIBUTED"] = "1"
    everybody = []

    def start(name, command, workers, **variables):
        process = run(name, command, job | {"DMLC_NUM_WORKER": workers} | variables)
        everybody.append(process)
        return process

    def servers(workers):
        command = [sys.executable, "-m", "byteps.server"]
        return [start(role, command, workers, DMLC_ROLE=role) for role in ("scheduler", "server")]

    def worker(place, *workers):
        variables = {"DMLC_ROLE": "worker", "DMLC_WORKER_ID": place}
        command = python(BENCHMARK, str(tmp_path), *workers)
        return start(f"rank{place}", command, workers[0], **variables)

    def outputs():
        return [process.log.read_text(errors="replace") for process in everybody]

    serving = servers("1") if stays else []
    first = worker("0", "1", "2", "1")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while "suspended" not in first.log.read_text(errors="replace"):
        assert first.poll() is None and time.monotonic() < deadline, outputs()
        time.sleep(0.02)
    serving = serving or servers("2")
    # The rank that comes trains beside the first one until it ends.
    for count in (1, 2):
        (tmp_path / f"go.{count}").touch()
    second = worker("1", "2")
    finish(first, second, *serving)
    lines = [line for line in outputs()[everybody.index(first)].splitlines() if line[:4] != "bps "]
    there = ["training on 1", "suspended", "resumed", "on 2", "trained on 2"]
    back = ["suspended", "resumed", "on 1", "trained on 1"]
    said = [line.split(" a second ")[-1] for line in lines]
    assert said == there + back, outputs()


#: Trains as a worker of the first job, if it is one, and as one of the second, if it is one:
#: its place in each, or -1.
SEVERAL = """
import json, os, sys, time

counts, places, ready = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
if places[0] < 0:
    deadline = time.monotonic() + 60
    while not os.path.exists(ready):
        assert time.monotonic() < deadline, "the others did not suspend"
        time.sleep(0.02)
first = 0 if places[0] >= 0 else 1
os.environ["DMLC_NUM_WORKER"] = str(counts[first])
os.environ["DMLC_WORKER_ID"] = str(places[first])

import torch
import torch.nn.functional as F
import byteps.torch as bps

bps.init()
torch.manual_seed(100 + bps.rank())
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
optimizer = bps.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def begin():
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    bps.broadcast_optimizer_state(optimizer, root_rank=0)


def step():
    optimizer.zero_grad()
    F.cross_entropy(model(torch.rand(4, 6)), torch.arange(4) % 3).backward()
    optimizer.step()


def train():
    for _ in range(10):
        step()
    place = torch.tensor([float(bps.rank() + 1)])
    total = bps.push_pull(place, average=False, name="places").item()
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in model.parameters()])
    return bps.rank(), bps.size(), total, flat.tolist()


def momentum():
    kept = [state["momentum_buffer"].reshape(-1) for state in optimizer.state.values()]
    return torch.cat(kept).tolist()


said = {}
begin()
if first == 0:
    said["first"] = train()
    bps.suspend()
    print("suspended", flush=True)
    if places[1] >= 0:
        bps.resume(counts[1], 1, places[1])
        begin()
if places[1] >= 0:
    said["begun"] = momentum()
    said["second"] = train()
bps.shutdown()
print(json.dumps(said), flush=True)
"""


def check(ranks, size, part):
    """All were ranks of one job of this size, and end with the same parameters."""
    of = [said[part] for said in ranks if part in said]
    assert [rank for rank, *_ in of] == list(range(size))
    for _, told, total, flat in of:
        assert (told, total) == (size, size * (size + 1) / 2)
        assert flat == of[0][3]


@pytest.mark.parametrize("before, after", [(2, 3), (3, 2)])
def test_several_ranks_go_on_with_another_number(run, tmp_path, before, after):  # noqa: F811
    """Some leave or come in between; who stays or comes has the optimizer's state of rank 0."""
    job = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(free_port()),
        "DMLC_NUM_SERVER": "1",
        "DMLC_NUM_WORKER": str(before),
        "BYTEPS_LOCAL_SIZE": "1",
        "BPS_LOCAL_REDUCE": "0",
    }
    counts, ready = (before, after), tmp_path / "ready"
    command = [sys.executable, "-m", "byteps.server"]
    serving = [run(role, command, job | {"DMLC_ROLE": role}) for role in ("scheduler", "server")]
    workers = []
    for place in range(max(counts)):
        places = [place if place < count else -1 for count in counts]
        command = python(SEVERAL, json.dumps(counts), json.dumps(places), str(ready))
        workers.append(run(f"worker{place}", command, job | {"DMLC_ROLE": "worker"}))
    deadline = time.monotonic() + PATIENCE_SECONDS
    for worker in workers[:before]:
        while "suspended" not in worker.log.read_text(errors="replace"):
            said = worker.log.read_text(errors="replace")
            assert worker.poll() is None and time.monotonic() < deadline, said
            time.sleep(0.02)
    ready.touch()
    outputs = finish(*workers, *serving)[: len(workers)]
    ranks = [json.loads(output.splitlines()[-1]) for output in outputs]
    check(ranks, before, "first")
    check(ranks, after, "second")
    begun = [said["begun"] for said in ranks if "begun" in said]
    assert any(begun[0]) and all(state == begun[0] for state in begun)
