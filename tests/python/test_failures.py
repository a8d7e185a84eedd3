"""What goes wrong says so, on every rank, in time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import byteps.torch as bps
from byteps.errors import (
    BytePSError,
    ForkedError,
    MismatchError,
    NotInitializedError,
    StallError,
)
from cluster import Cluster, clean_environment, launch
from conftest import initialise

NOTICED_SECONDS = 5


# Ranks that disagree


def mismatch(kind):
    rank = bps.rank()
    mine = {
        "size": (torch.ones(10 + rank), True),
        "shape": (torch.ones((3, 2) if rank else (2, 3)), True),
        "type": (torch.ones(10, dtype=torch.float64 if rank else torch.float32), True),
        "operation": (torch.ones(10), rank == 0),
    }
    bps.barrier()
    begun = time.monotonic()
    with pytest.raises(MismatchError) as caught:
        if kind == "root":
            bps.broadcast(torch.ones(3), root_rank=rank, name="mismatch.root")
        else:
            tensor, average = mine[kind]
            bps.push_pull(tensor, average, f"mismatch.{kind}")
    assert time.monotonic() - begun < NOTICED_SECONDS
    message = str(caught.value)
    assert f"mismatch.{kind}" in message and "rank 0" in message and "rank 1" in message, message
    assert (caught.value.ranks, caught.value.tensor) == ((0, 1), f"byteps.mismatch.{kind}")
    if kind == "shape":
        assert "[2, 3]" in message and "[3, 2]" in message, message
    bps.barrier()
    # The job goes on without that tensor.
    assert bps.push_pull(torch.ones(10), False, f"after.{kind}")[0] == bps.size()


@pytest.mark.parametrize("kind", ["size", "shape", "type", "operation", "root"])
def test_mismatch(pair, kind):
    pair.run(mismatch, kind)


def without_a_name(kind):
    rank = bps.rank()
    send = {
        "size": lambda: bps.push_pull(torch.ones(10 + rank)),
        "shape": lambda: bps.push_pull(torch.ones((3, 2) if rank else (2, 3))),
        "type": lambda: bps.push_pull(torch.ones(5, dtype=torch.float64 if rank else None)),
        "operation": lambda: bps.push_pull(torch.ones(5), average=rank == 0),
        "root": lambda: bps.broadcast(torch.ones(5), root_rank=min(rank, 1)),
        "group": lambda: bps.push_pull_group([torch.ones(n) for n in (3, 4 + rank, 5)]),
    }[kind]

    def agree():
        assert bps.push_pull(torch.ones(rank + 1).sum(), average=False) == sum(
            range(1, bps.size() + 1)
        )

    # Often enough for every name of an operation without one to come again.
    for _ in range(3):
        for count in (1, 30, 61):
            for _ in range(count):
                agree()
            begun = time.monotonic()
            with pytest.raises(MismatchError, match=r"rank \d declared .*rank \d declared "):
                send()
            assert time.monotonic() - begun < NOTICED_SECONDS
    # Ranks may notice it late: operations under way at the same time are not touched.
    before = [bps.push_pull_async(torch.full((7,), float(n)), average=False) for n in range(20)]
    wrong = None
    with contextlib.suppress(MismatchError):  # Another rank was faster.
        wrong = bps.push_pull_async(torch.ones(8 + rank))
    after = [bps.push_pull_async(torch.full((7,), float(n)), average=False) for n in range(100)]
    for handles in (before, after):
        for number, handle in enumerate(handles):
            assert torch.equal(
                bps.synchronize(handle), torch.full((7,), number * float(bps.size()))
            )
    if wrong is not None:
        with pytest.raises(MismatchError):
            bps.synchronize(wrong)
    many = bps.push_pull_group([torch.full((2,), float(n)) for n in range(200)], average=False)
    assert all(
        torch.equal(one, torch.full((2,), n * float(bps.size()))) for n, one in enumerate(many)
    )
    agree()


@pytest.mark.parametrize("kind", ["size", "shape", "type", "operation", "root", "group"])
def test_mismatch_without_a_name(pair, kind):
    pair.run(without_a_name, kind)


def test_mismatch_without_a_name_of_one_in_three(trio):
    trio.run(without_a_name, "size")


def same_name_other_size():
    for turn in range(3):
        for shape in ((4,), (5,), (2, 2), (300, 1000), (0,), ()):
            for dtype in (torch.float32, torch.bfloat16, torch.int64):
                for _ in range(turn):
                    mine = torch.full(shape, bps.rank() + 1, dtype=dtype)
                    result = bps.push_pull(mine, average=False, name="resized")
                    wanted = torch.full(shape, sum(range(1, bps.size() + 1)), dtype=dtype)
                    assert torch.equal(result, wanted), (shape, dtype)


def test_same_name_other_size(job):
    job.run(same_name_other_size)


def cast_after_wrapping():
    torch.manual_seed(3)
    model = torch.nn.Linear(20, 5)
    optimizer = bps.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    for step, dtype in enumerate((torch.float32, torch.bfloat16, torch.float64, torch.float32)):
        model.to(dtype)
        optimizer.zero_grad()
        data = torch.full((2, 20), float(bps.rank() + step), dtype=dtype)
        model(data).sum().backward()
        optimizer.synchronize()
        mean = sum(2 * (rank + step) for rank in range(bps.size())) / bps.size()
        assert torch.allclose(model.weight.grad, torch.full((5, 20), mean, dtype=dtype))
        with optimizer.skip_synchronize():
            optimizer.step()


def test_model_cast_after_wrapping(job):
    job.run(cast_after_wrapping)


# Ranks that are gone


DATA = ("rank", "ranks", "server", "host", "pid", "tensor", "round", "waited_s")


def wait_for_the_dead():
    try:
        bps.push_pull(torch.ones(1000), name="from.the.dead")
    except BytePSError as error:
        data = {name: getattr(error, name) for name in DATA}
        return type(error).__name__, str(error), data
    return None


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_dead_worker(how):
    with Cluster(2) as cluster:
        cluster.run(initialise)

        def one_dies(how):
            if bps.rank() == 1:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                os._exit(3)
            return wait_for_the_dead()

        begun = time.monotonic()
        cluster.start(one_dies, how)
        try:
            [(name, message, data)] = cluster.results(15, ranks=[0])
            assert name == "PeerDiedError" and "rank 1" in message, message
            assert (data["rank"], data["ranks"], data["server"]) == (1, (1,), None), data
            assert f"(host {data['host']}, pid {data['pid']})" in message, (message, data)
        except AssertionError as error:
            # The launcher ends the survivor too; then it has said so before.
            assert "rank 1" in str(error), error
        assert time.monotonic() - begun < 2 * NOTICED_SECONDS
        assert cluster.wait(15) != 0
        cluster.kill()


def test_a_script_that_fails_is_named(tmp_path):
    """A rank that ends by an exception does not leave in good order: the others hear of it."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, byteps.torch as bps\n"
        "bps.init()\n"
        "bps.push_pull(torch.ones(3), name='first')\n"
        "if bps.rank() == 1: raise KeyError('on purpose')\n"
        "bps.push_pull(torch.ones(3), name='second')\n"
    )
    begun = time.monotonic()
    result = launch([sys.executable, str(script)], timeout=60)
    assert result.returncode != 0
    assert "on purpose" in result.stdout and "rank 1" in result.stdout, result.stdout
    assert "Segmentation" not in result.stdout and time.monotonic() - begun < 40


def test_dead_server():
    with Cluster(2) as cluster:
        cluster.run(initialise)
        servers = [pid for pid, line in descendants(cluster.process.pid) if "server" in line]
        cluster.start(wait_for_rank_1)
        assert servers, "no server among the launcher's processes"
        time.sleep(0.5)  # Rank 0 waits by then; if not, it hears of it when it begins to.
        os.kill(servers[-1], signal.SIGKILL)
        try:
            for name, message, data in cluster.results(15):
                assert name == "PeerDiedError" and "server 0" in message, message
                assert (data["rank"], data["ranks"], data["server"]) == (None, (), 0), data
                assert data["pid"] == servers[-1], data
        except AssertionError as error:
            assert "server" in str(error), error
        assert cluster.wait(15) != 0
        cluster.kill()


def wait_for_rank_1():
    if bps.rank() == 1:
        time.sleep(2)
    return wait_for_the_dead()


def descendants(parent):
    """(pid, command line) of all processes below this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if int(stat[1]) == parent:
            found.append((int(entry.name), line))
            found += descendants(int(entry.name))
    return found


def stalls():
    if bps.rank() == 0:
        with pytest.raises(StallError) as caught:
            bps.push_pull(torch.ones(10), name="stalled.tensor")
        error = caught.value
        assert "stalled.tensor" in str(error) and "1" in str(error)
        assert (error.rank, error.ranks, error.server) == (1, (1,), None)
        assert (error.tensor, error.round) == ("byteps.stalled.tensor", 1)
        assert error.waited_s is not None and 3 <= error.waited_s < 10, error.waited_s
        return str(error)
    time.sleep(6)
    return None


def test_stall():
    settings = {"BPS_STALL_REPORT": "1", "BPS_STALL_TIMEOUT": "3"}
    with Cluster(2, environment=settings) as cluster:
        cluster.run(initialise)
        cluster.start(stalls)
        cluster.results(30, ranks=[0])
        log = cluster.log()
        assert "stalled.tensor" in log and "rank 1" in log, log
        cluster.kill()


def sum_many():
    names = [f"many.{number}" for number in range(500)]
    handles = [bps.push_pull_async(torch.ones(10), False, name) for name in names]
    assert all((bps.synchronize(handle) == 2).all() for handle in handles)


def late_with_many():
    if bps.rank() == 1:
        time.sleep(12)
    sum_many()


def test_a_late_rank_is_told_in_few_lines():
    settings = {"BPS_STALL_REPORT": "1"}
    with Cluster(2, environment=settings) as cluster:
        cluster.run(initialise)
        # Declared before: what takes time is rank 1, not 500 answers of the scheduler.
        cluster.run(sum_many)
        begun = len(cluster.log())
        cluster.run(late_with_many)
        log = cluster.log()[begun:]
        said = [line for line in log.splitlines() if "many." in line or "rank 1 is late" in line]
        # In 12 s, each process says it when it is seen, and once more or twice.
        for process in ("scheduler", "rank 0", "rank 1"):
            lines = [line for line in said if line.startswith(f"[{process}]")]
            assert 1 <= len(lines) <= 3, log
            assert "rank 1 is late by" in lines[0] and "500 tensors wait for it" in lines[0], log
            assert "round 2 of `byteps.many.0`" in lines[0] and lines[0].endswith(", …)"), log
        assert all(line.count("`byteps.many.") <= 5 for line in said), log


# Waits that are interrupted


def interrupted(what):
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    bps.barrier()
    name = f"interrupted.{what}"
    if bps.rank() == 0:
        handle = bps.push_pull_async(torch.ones(10), False, name)
        timer.start()
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            bps.synchronize(handle) if what == "synchronize" else bps.wait(handle, timeout=60)
        assert time.monotonic() - begun < 3
        bps.broadcast_object(None, 0, name="go on")
        assert bps.synchronize(handle)[0] == 2
    else:
        bps.broadcast_object(None, 0, name="go on")
        bps.push_pull(torch.ones(10), False, name)


@pytest.mark.parametrize("what", ["synchronize", "wait"])
def test_ctrl_c(pair, what):
    pair.run(interrupted, what)


def test_ctrl_c_while_starting():
    code = (
        "import os, signal, threading, time\n"
        "import byteps.torch as bps\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "begun = time.monotonic()\n"
        "try: bps.init()\n"
        "except KeyboardInterrupt: print('interrupted', time.monotonic() - begun < 3)\n"
    )
    result = python(code, DMLC_NUM_WORKER="2", DMLC_NUM_SERVER="1", **address())
    assert "interrupted True" in result.stdout, result.stdout


# Children


def children():
    read, write = os.pipe()
    tensor = torch.ones(5)
    handle = bps.push_pull_async(tensor, False, "fork.handle")
    child = os.fork()
    if child == 0:
        said = []
        for call in (
            lambda: bps.push_pull(tensor, name="fork.new"),
            lambda: bps.push_pull(tensor),
            lambda: bps.synchronize(handle),
            lambda: bps.wait(handle, timeout=1),
            lambda: bps.poll(handle),
            lambda: bps.barrier(),
            lambda: bps.broadcast_object(1),
            bps.init,
            bps.get_pushpull_speed,
        ):
            try:
                call()
                said.append("nothing raised")
            except ForkedError as error:
                said.append("ok" if "fork()" in str(error) else str(error))
            except BaseException as error:
                said.append(repr(error))
        said += [bps.rank(), bps.size(), bps.is_initialized()]
        bps.shutdown()
        bps.suspend()
        os.write(write, repr(said).encode())
        import atexit

        atexit._run_exitfuncs()
        os._exit(0)
    os.close(write)
    said = b""
    while chunk := os.read(read, 4096):
        said += chunk
    os.close(read)
    assert os.waitpid(child, 0)[1] == 0
    assert eval(said.decode()) == ["ok"] * 9 + [bps.rank(), bps.size(), False]
    assert bps.synchronize(handle)[0] == bps.size()
    assert bps.push_pull(tensor, False, "fork.after")[0] == bps.size()


def test_fork(job):
    job.run(children)


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.tensor([float(index)]), torch.tensor([3.0 * index])


def data_loader():
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters())
    bps.broadcast_parameters(model.state_dict(), 0)
    sampler = torch.utils.data.distributed.DistributedSampler(Numbers(), bps.size(), bps.rank())
    loader = torch.utils.data.DataLoader(
        Numbers(), batch_size=4, sampler=sampler, num_workers=2, multiprocessing_context="fork"
    )
    losses = []
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert torch.equal(bps.broadcast(model.weight.detach(), 0), model.weight.detach())
    return losses[0] > losses[-1]


def test_data_loader(job):
    assert all(job.run(data_loader))


def test_fork_before_init():
    """A child of a process that has started nothing may start an engine of its own."""
    code = (
        "import os, torch, byteps.torch as bps\n"
        "child = os.fork()\n"
        "bps.init()\n"
        "assert bps.push_pull(torch.ones(1)).item() == 1\n"
        "if child: assert os.waitpid(child, 0)[1] == 0; print('both')\n"
    )
    assert "both" in python(code).stdout


# Starting and ending


def test_nobody_answers():
    begun = time.monotonic()
    where = address()
    result = python(
        "import byteps.torch as bps\n"
        "from byteps.errors import StartError\n"
        "try: bps.init()\n"
        "except StartError as error: print('said:', error)\n"
        "assert not bps.is_initialized()\n",
        DMLC_NUM_WORKER="2",
        DMLC_NUM_SERVER="1",
        BPS_START_TIMEOUT="2",
        **where,
    )
    assert "said:" in result.stdout, result.stdout
    assert where["DMLC_PS_ROOT_PORT"] in result.stdout.split("said:")[1], result.stdout
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize(
    "settings",
    [{"DMLC_NUM_WORKER": "two"}, {"DMLC_NUM_WORKER": "2"}, {"BYTEPS_PARTITION_BYTES": "-1"}],
)
def test_wrong_settings(settings):
    result = python(
        "import byteps.torch as bps\n"
        "from byteps.errors import ConfigError\n"
        "try: bps.init()\n"
        "except ConfigError as error: print('said:', error)\n",
        **settings,
    )
    assert "said:" in result.stdout, result.stdout
    if "two" in settings.values():
        assert "DMLC_NUM_WORKER" in result.stdout.split("said:")[1]


def test_before_and_after():
    code = (
        "import torch, byteps.torch as bps\n"
        "from byteps.errors import NotInitializedError\n"
        "places = [bps.rank, bps.size, bps.local_rank, bps.local_size, bps.cross_rank]\n"
        "calls = [bps.barrier, bps.get_pushpull_speed,\n"
        "         lambda: bps.push_pull(torch.ones(1)), lambda: bps.broadcast(torch.ones(1), 0)]\n"
        "def refused(has_place=False):\n"
        "    if has_place: assert [place() for place in places] == [0, 1, 0, 1, 0]\n"
        "    for call in calls if has_place else calls + places:\n"
        "        try: call()\n"
        "        except NotInitializedError as error: assert 'init()' in str(error)\n"
        "        else: raise AssertionError(call)\n"
        "assert not bps.is_initialized()\n"
        "refused(); bps.shutdown(); bps.suspend(); refused()\n"
        "bps.init(); assert bps.is_initialized() and bps.rank() == 0\n"
        "bps.shutdown(); refused()\n"
        "bps.init(); assert bps.push_pull(torch.ones(1)).item() == 1\n"
        "assert bps.push_pull(torch.ones(1), name='x').item() == 1\n"
        "bps.suspend(); refused(has_place=True)\n"
        "bps.resume(1, 0); assert bps.push_pull(torch.ones(1), name='x').item() == 1\n"
        "print('all')\n"
    )
    assert "all" in python(code).stdout


def suspend_and_resume():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.full((1, 2), float(bps.rank()))).sum().backward()
        optimizer.step()
        assert bps.push_pull(torch.ones(3), False, "kept")[0] == 2
        place = bps.rank(), bps.size(), bps.local_rank(), bps.local_size()
        bps.suspend()
        assert place == (bps.rank(), bps.size(), bps.local_rank(), bps.local_size())
        with pytest.raises(NotInitializedError):
            bps.barrier()
        workers = int(os.environ["DMLC_NUM_WORKER"])
        bps.resume(workers, int(os.environ["DMLC_NUM_SERVER"]))
        assert bps.size() == 2
        bps.broadcast_parameters(model.state_dict(), 0)


def test_suspend_and_resume():
    with Cluster(2) as cluster:
        cluster.run(initialise)
        cluster.run(suspend_and_resume)


# Helpers


def address():
    """A port of this machine where nobody listens."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port), "DMLC_WORKER_ID": "0"}


def python(code, **environment):
    """Runs this code in a fresh interpreter; standard error comes with its output."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment() | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
