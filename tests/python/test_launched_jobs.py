"""Jobs that torchrun, srun, mpirun and mpiexec start: one job, with the launcher's ranks."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster import clean_environment
from test_failures import descendants
from test_launchers import elastic, mpich, open_mpi, slurm, torch

PATIENCE_SECONDS = 120

#: A line of a result is one write: ranks share a pipe, and Python may write pieces of a print.
#: Sums through the engine and through torch's own process group, which has the same port.
TRAIN = """
import os, sys, torch, torch.distributed as dist
import byteps.torch as bps
if "first" in sys.argv: dist.init_process_group("gloo")
for generation in range(2):
    bps.init()
    assert bps.rank() == int(os.environ["RANK"]) and bps.size() == int(os.environ["WORLD_SIZE"])
    if "LOCAL_RANK" in os.environ: assert bps.local_rank() == int(os.environ["LOCAL_RANK"])
    total = bps.push_pull(torch.full((1000,), bps.rank() + 1.0), False, "x")[0].item()
    place = f"{bps.rank()} {bps.size()} {bps.local_rank()} {bps.local_size()}"
    sys.stdout.write(f"result {generation} {place} {total}\\n")
    if generation == 0: bps.shutdown()
if "first" not in sys.argv: dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
assert ones.item() == bps.size()
dist.destroy_process_group()
"""

#: The same without torch: what the launchers of other frameworks' programs meet.
MEET = """
import sys
import byteps.common as bps
bps.init()
bps.barrier()
place = f"{bps.rank()} {bps.size()} {bps.local_rank()} {bps.local_size()}"
sys.stdout.write(f"result {place}\\n")
"""


@pytest.fixture
def run(tmp_path):
    """Starts processes with their outputs in files; ends what is left of them."""
    processes = []

    def start(name, command, environment=None):
        with (tmp_path / name).open("wb") as log:
            process = subprocess.Popen(
                command,
                env=clean_environment() | (environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        processes.append(process)
        process.log = tmp_path / name
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def finish(*processes, code=0):
    """The processes' outputs, once they have ended with this code."""
    outputs = []
    for process in processes:
        try:
            status = process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            status = "no end"
        outputs.append(process.log.read_text(errors="replace"))
        assert status == code, (status, outputs)
    return outputs


def python(text, *arguments):
    return [sys.executable, "-c", text, *arguments]


def torchrun(script, *options, arguments=()):
    launcher = [sys.executable, "-m", "torch.distributed.run", *options]
    return [*launcher, str(script), *arguments]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def results(text):
    """The lines of results, without their first word, sorted."""
    return sorted(re.findall(r"^result (.*)$", text, re.MULTILINE))


def test_torchrun(run, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    job = run("job", torchrun(script, "--standalone", "--nproc-per-node", "2"))
    [text] = finish(job)
    assert results(text) == [f"{g} {rank} 2 {rank} 2 3.0" for g in (0, 1) for rank in (0, 1)], text
    assert "with a job key" in text and "sums do not pass servers" in text, text


@pytest.mark.parametrize("order", ["first", "last"])
def test_torchrun_on_two_nodes(run, tmp_path, order):
    """Both are on this machine, so their ranks are kept from reducing among themselves."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    meet = f"--rdzv-backend=c10d --rdzv-id=7 --rdzv-endpoint=localhost:{free_port()}".split()
    options = ["--nnodes=2", "--nproc-per-node=1", *meet]
    command = torchrun(script, *options, arguments=[order])
    nodes = [run(f"node{node}", command, {"BPS_LOCAL_REDUCE": "0"}) for node in (0, 1)]
    texts = finish(*nodes)
    expected = [f"{g} {rank} 2 0 1 3.0" for g in (0, 1) for rank in (0, 1)]
    assert results("".join(texts)) == expected, texts
    assert all("bps server" in text for text in texts), texts


def test_torchrun_starts_again_after_a_failure(run, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        MEET + "import os, sys\n"
        "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "sys.stdout.write(f'attempt {attempt} {bps.rank()}\\n')\n"
        "sys.stdout.flush()\n"
        "if attempt == '0' and bps.rank() == 1: os._exit(1)\n"
        "bps.barrier()\n"
    )
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    [text] = finish(run("job", torchrun(script, *options)))
    for attempt, rank in [("0", 1), ("1", 0), ("1", 1)]:
        assert f"attempt {attempt} {rank}" in text, text


def test_torchrun_starts_again_after_a_rank_was_killed(run, tmp_path):
    """In DDP over the backend; rank 0 has the job's scheduler."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal, sys, torch, torch.distributed as dist\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "dist.init_process_group('byteps')\n"
        "rank, attempt = dist.get_rank(), os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "model = DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))\n"
        "for step in range(3):\n"
        "    if (attempt, rank, step) == ('0', 0, 1): os.kill(os.getpid(), signal.SIGKILL)\n"
        "    model.zero_grad()\n"
        "    model(torch.full((1, 4), rank + 1.0)).sum().backward()\n"
        "gradient = model.module.weight.grad.mean().item()\n"
        "sys.stdout.write(f'result {attempt} {rank} {gradient}\\n')\n"
        "dist.destroy_process_group()\n"
    )
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    [text] = finish(run("job", torchrun(script, *options)))
    assert results(text) == ["1 0 1.5", "1 1 1.5"], text


@pytest.mark.parametrize("order", ["first", "last"])
def test_torchs_variables_by_hand(run, order):
    """Rank 0 hosts torch's store itself; no variable tells which ranks share a host."""
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [run(f"rank{r}", python(TRAIN, order), torch(r, 2) | store) for r in (0, 1)]
    text = "".join(finish(*ranks))
    assert results(text) == [f"{g} {rank} 2 {rank} 2 3.0" for g in (0, 1) for rank in (0, 1)], text


LAUNCHERS = {
    "srun": lambda rank: slurm(rank, 2, "2", SLURM_STEP_NODELIST="localhost"),
    "srun on two nodes": lambda rank: slurm(
        rank,
        2,
        "1(x2)",
        SLURM_STEP_NODELIST="localhost,b",
        SLURM_NODEID=str(rank),
        SLURM_LOCALID="0",
    ),
    "mpirun": lambda rank: open_mpi(rank, 2),
    "mpiexec": lambda rank: mpich(rank, 2),
    "torchrun": lambda rank: elastic(rank, 2),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_variables_of(run, tmp_path, launcher):
    """The variables as the launcher sets them, in processes without torch."""
    names = {"SLURM_JOB_ID": str(os.getpid()), "PMIX_NAMESPACE": str(tmp_path)}
    names["TORCHELASTIC_RUN_ID"] = str(tmp_path)
    nodes = 2 if launcher.endswith("two nodes") else 1

    def variables(rank):
        own = LAUNCHERS[launcher](rank)
        return own | {name: value for name, value in names.items() if name in own}

    ranks = [run(f"rank{rank}", python(MEET), variables(rank)) for rank in (1, 0)]
    texts = finish(*ranks)
    local = [0, 0] if nodes == 2 else [0, 1]
    expected = [f"{rank} 2 {local[rank]} {2 // nodes}" for rank in (0, 1)]
    assert results("".join(texts)) == expected, texts


def test_srun_starts_bpslaunch(run):
    """`srun bpslaunch python train.py`: one rank of Slurm's job each."""
    command = [sys.executable, "-m", "byteps.launch", *python(MEET)]
    job = {"SLURM_JOB_ID": f"{os.getpid()}7", "SLURM_STEP_ID": "0"}
    ranks = [run(f"rank{rank}", command, slurm(rank, 2, "2") | job) for rank in (0, 1)]
    assert results("".join(finish(*ranks))) == ["0 2 0 2", "1 2 1 2"]


def test_mpirun(run):
    if shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun")
    options = ["--allow-run-as-root", "--oversubscribe", "-np", "2"]
    [text] = finish(run("job", ["mpirun", *options, *python(MEET)]))
    assert results(text) == ["0 2 0 2", "1 2 1 2"], text


def test_servers_and_scheduler_of_the_users_own(run):
    """DMLC_* variables that say where leave the launcher to say who."""
    where = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(free_port()),
        "DMLC_NUM_SERVER": "1",
        "BPS_LOCAL_REDUCE": "0",
    }
    roles = ("import byteps.server", "import byteps.server", MEET, MEET)
    own = ({"DMLC_ROLE": "scheduler"}, {"DMLC_ROLE": "server"}, torch(0, 2, 2), torch(1, 2, 2))
    job = [
        run(f"{n}", python(role), where | mine)
        for n, (role, mine) in enumerate(zip(roles, own, strict=True))
    ]
    texts = finish(*job)
    assert results("".join(texts)) == ["0 2 0 2", "1 2 1 2"], texts


def own_address():
    """Where other machines find this one; its loopback address where it has no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # Sends nothing: it asks for the route.
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


@pytest.mark.parametrize("key", ["", "5e" * 32], ids=["no key", "key"])
def test_torchrun_with_servers_of_the_users_own(run, tmp_path, key):
    """They come to rank 0 from other machines: by an address that is not the loopback's."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN.replace("range(2)", "range(1)").replace("bps.shutdown()", "pass"))
    job = {
        "DMLC_PS_ROOT_PORT": str(free_port()),
        "DMLC_NUM_SERVER": "2",
        "BPS_LOCAL_REDUCE": "0",
        "BPS_JOB_KEY": key,
    }
    here = {"DMLC_ROLE": "server", "DMLC_PS_ROOT_URI": own_address(), "DMLC_NUM_WORKER": "1"}
    servers = [run(f"server{n}", python("import byteps.server"), job | here) for n in (0, 1)]
    ranks = run("job", torchrun(script, "--standalone", "--nproc-per-node", "2"), job)
    [text, *said] = finish(ranks, *servers)
    assert results(text) == [f"0 {rank} 2 {rank} 2 3.0" for rank in (0, 1)], text
    assert "2 servers" in text and ("no job key" in text) == (not key), text
    assert all("the job is over: all workers have finished" in one for one in said), said


def test_servers_of_the_users_own_must_know_the_port(run):
    for rank in (0, 1):
        environment = torch(rank, 2, 2) | {"DMLC_NUM_SERVER": "1"}
        refused(run, environment, "ConfigError", "DMLC_NUM_SERVER=1", "set DMLC_PS_ROOT_PORT")


@pytest.mark.parametrize("order", ["first", "last"])
def test_bpslaunch(run, order):
    """The scheduler and the server outlive a generation, and torch finds its variables."""
    launcher = [sys.executable, "-m", "byteps.launch", "--local", "2", "--servers", "1"]
    settings = {"BPS_LOCAL_REDUCE": "0"}
    [text] = finish(run("job", [*launcher, *python(TRAIN, order)], settings))
    expected = [f"{g} {rank} 2 {rank} 2 3.0" for g in (0, 1) for rank in (0, 1)]
    assert results(re.sub(r"^\[rank .\] ", "", text, flags=re.MULTILINE)) == expected, text
    assert "did not end in time" not in text and "error" not in text, text


# Where no job can be formed


def refused(run, environment, *words):
    begun = time.monotonic()
    process = run("refused", python(MEET), environment)
    [text] = finish(process, code=1)
    for word in words:
        assert word in text, text
    assert "result" not in text
    return time.monotonic() - begun


def test_a_size_without_a_rank_is_no_job_of_one(run):
    refused(run, {"WORLD_SIZE": "2"}, "ConfigError", "WORLD_SIZE=2", "RANK is not set", "torchrun")


def test_rank_0_that_does_not_come_is_named(run):
    environment = torch(1, 2, 2, MASTER_PORT="1") | {"BPS_START_TIMEOUT": "2"}
    refused(run, environment, "StartError", "rank 1 has not heard from rank 0 within 2 s")


def test_hosts_that_nobody_can_find_are_asked_for(run):
    refused(run, open_mpi(1, 4, 2), "ConfigError", "MASTER_ADDR", "-x MASTER_ADDR")


def test_variables_of_ours_that_make_jobs_of_one_are_refused(run):
    environment = torch(1, 2, 2) | {"DMLC_WORKER_ID": "0"}
    refused(run, environment, "RANK=1 WORLD_SIZE=2", "DMLC_WORKER_ID=0")
    environment = torch(1, 2, 2) | {"DMLC_NUM_WORKER": "2"}
    refused(run, environment, "DMLC_NUM_WORKER=2", "RANK=1 WORLD_SIZE=2")


def test_a_shell_in_an_allocation_is_a_job_of_one_and_says_so(run):
    [text] = finish(run("job", python(MEET), {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}))
    assert results(text) == ["0 1 0 1"]
    assert "SLURM_NTASKS=4" in text and "srun python" in text, text


# The end


def test_rank_0_waits_for_the_others(run, tmp_path):
    """It serves the scheduler, which the others need after it has left."""
    script = MEET + (
        "import time\n"
        "if bps.rank() == 1: time.sleep(5)\n"
        "if bps.rank() == 0: bps.shutdown()\n"
        f"else: bps.start_timeline({str(tmp_path)!r}); bps.stop_timeline(); print('served')\n"
    )
    port = {"MASTER_PORT": str(free_port())}
    ranks = [run(f"rank{r}", python(script), torch(r, 2, 2) | port) for r in (0, 1)]
    first, second = finish(*ranks)
    assert "waits for ranks that have not" in first and "served" in second, (first, second)
    assert "ERROR" not in first and "error" not in first + second, (first, second)


def test_nothing_outlives_a_killed_rank_0(run):
    port = {"MASTER_PORT": str(free_port())}
    script = MEET + "import time\ntime.sleep(600)\n"
    settings = port | {"BPS_LOCAL_REDUCE": "0"}
    ranks = [run(f"rank{r}", python(script), torch(r, 2, 2) | settings) for r in (0, 1)]
    until(lambda: all("result" in rank.log.read_text() for rank in ranks))
    helpers = [pid for pid, line in descendants(ranks[0].pid) if "--of-rank" in line]
    assert len(helpers) == 2, "a scheduler and a server"
    os.kill(ranks[0].pid, signal.SIGKILL)
    until(lambda: "rank 0" in ranks[1].log.read_text().split("result")[1])
    assert "died" in ranks[1].log.read_text()
    until(lambda: not any(is_running(pid) for pid in helpers))


def test_a_rank_that_is_told_to_end_is_named(run):
    port = {"MASTER_PORT": str(free_port())}
    script = MEET + (
        "import os, signal, sys, time\n"
        "child = os.fork()\n"
        "if child == 0: time.sleep(600)\n"
        "os.kill(child, signal.SIGTERM)\n"
        "assert os.waitpid(child, 0)[1] == signal.SIGTERM, 'a child ends as ever'\n"
        "print('ready', flush=True)\n"
        "if bps.rank() == 0: bps.barrier()\n"
        "time.sleep(600)\n"
    )
    ranks = [run(f"rank{r}", python(script), torch(r, 2, 2) | port) for r in (0, 1)]
    until(lambda: all("ready" in rank.log.read_text() for rank in ranks))
    ranks[1].terminate()
    [text] = finish(ranks[1], code=-signal.SIGTERM)
    [text] = finish(ranks[0], code=1)
    assert re.search(r"PeerDiedError: rank 1 .*it was stopped by SIGTERM", text), text


def test_ctrl_c_reaches_the_program(run):
    script = MEET + (
        "import time\n"
        "try: time.sleep(600)\n"
        "except KeyboardInterrupt: print('interrupted', bps.rank(), flush=True)\n"
        "finally: time.sleep(0.5); print('saved', bps.rank(), flush=True)\n"
    )
    launcher = [sys.executable, "-m", "byteps.launch", "--local", "2"]
    job = run("job", [*launcher, *python(script)])
    until(lambda: job.log.read_text().count("result") == 2)
    job.send_signal(signal.SIGINT)
    [text] = finish(job, code=130)
    for rank in (0, 1):
        assert f"interrupted {rank}" in text and f"saved {rank}" in text, text
    assert "KeyboardInterrupt" not in text, text


def test_a_second_ctrl_c_ends_a_rank_that_still_waits(run):
    port = {"MASTER_PORT": str(free_port())}
    script = MEET + (
        "import time\n"
        "if bps.rank() == 0: time.sleep(600)\n"
        "try: bps.barrier()\n"
        "except KeyboardInterrupt: print('interrupted', flush=True); raise\n"
        "finally:\n"
        "    print('saves', flush=True)\n"
        "    try: bps.barrier()\n"
        "    finally: print('gives up', flush=True)\n"
    )
    ranks = [run(f"rank{r}", python(script), torch(r, 2, 2) | port) for r in (0, 1)]
    log = ranks[1].log
    until(lambda: all("result" in rank.log.read_text() for rank in ranks))
    time.sleep(0.5)  # It waits for the other.
    ranks[1].send_signal(signal.SIGINT)
    until(lambda: "saves" in log.read_text())
    time.sleep(0.5)
    assert ranks[1].poll() is None and "gives up" not in log.read_text(), log.read_text()
    ranks[1].send_signal(signal.SIGINT)
    begun = time.monotonic()
    [text] = finish(ranks[1], code=-signal.SIGINT)
    assert time.monotonic() - begun < 5
    assert text.count("interrupted\n") == 1 and "gives up" in text, text
    ranks[0].kill()


def test_a_second_ctrl_c_ends_a_job_whose_ranks_take_their_time(run):
    script = MEET + (
        "import time\n"
        "try: time.sleep(600)\n"
        "except KeyboardInterrupt: print('interrupted', bps.rank(), flush=True)\n"
        "finally: time.sleep(600)\n"
    )
    launcher = [sys.executable, "-m", "byteps.launch", "--local", "2"]
    job = run("job", [*launcher, *python(script)])
    until(lambda: job.log.read_text().count("result") == 2)
    job.send_signal(signal.SIGINT)
    until(lambda: job.log.read_text().count("interrupted") == 2)
    begun = time.monotonic()
    job.send_signal(signal.SIGINT)
    [text] = finish(job, code=130)
    assert time.monotonic() - begun < 5 and "SIGINT again: killing all processes" in text, text


def test_an_exit_code_is_the_jobs(run):
    script = MEET + "import sys\nif bps.rank() == 1: sys.exit(3)\nbps.barrier()\n"
    launcher = [sys.executable, "-m", "byteps.launch", "--local", "2", "--servers", "1"]
    settings = {"BPS_LOCAL_REDUCE": "0"}
    [text] = finish(run("job", [*launcher, *python(script)], settings), code=3)
    ends = [line for line in text.splitlines() if re.match("bpslaunch: .* exited", line)]
    assert ends[0] == "bpslaunch: rank 1 exited with code 3; ending the other processes", text


@pytest.mark.parametrize("program", ["launch", "server", "scheduler"])
def test_programs_end_by_ctrl_c_without_a_traceback(run, program):
    """A server that has not found the scheduler, and whoever waits for others."""
    words = {
        "launch": ["--local", "1", "--servers", "0", "sh", "-c", "echo up; sleep 600"],
        "server": ["--root-port", str(free_port())],
        "scheduler": ["--root-port", "0"],
    }
    where = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_NUM_SERVER": "1"}
    command = [sys.executable, "-m", "byteps._programs", program, *words[program]]
    process = run(program, command, where)
    said = {"launch": "up", "server": "core", "scheduler": "listening"}[program]
    until(lambda: said in process.log.read_text())
    time.sleep(0.2)  # The server dials next.
    process.send_signal(signal.SIGINT)
    status = process.wait(PATIENCE_SECONDS)
    text = process.log.read_text()
    assert "Traceback" not in text and status == (1 if program == "scheduler" else 130), text


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def until(condition):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
