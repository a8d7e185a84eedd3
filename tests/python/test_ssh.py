"""``bpslaunch --hosts`` over a real sshd on each of three machines, which `machines.py` makes.

What does not depend on ssh itself is tested beside the launcher, with a script in its place.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from machines import Launched, Machines, machines

ELASTIC = Path(__file__).parents[2] / "python" / "examples" / "elastic.py"

#: A line of a result is one write. Sums through the engine and through torch's own process group.
TRAIN = """
import os, sys, torch, torch.distributed as dist
import byteps.torch as bps
bps.init()
dist.init_process_group("gloo")
total = bps.push_pull(torch.full((100_000,), bps.rank() + 1.0), False, "x")
assert torch.equal(total, torch.full((100_000,), 10.0)), total
ones = torch.ones(1)
dist.all_reduce(ones)
assert ones.item() == bps.size()
place = f"{bps.rank()} {bps.size()} {bps.local_rank()} {bps.local_size()}"
sys.stdout.write(f"result {place} {os.getcwd()}\\n")
sys.stderr.write(f"aside {bps.rank()}\\n")
dist.destroy_process_group()
bps.shutdown()
"""

#: Looks at all processes of all machines, whose numbers they share, for the job key.
LOOK = """
import os, pathlib, time
key = pathlib.Path(os.environ["BPS_JOB_KEY_FILE"]).read_bytes().strip()
assert len(key) == 64, key
seen = []
for process in pathlib.Path("/proc").iterdir():
    if not process.name.isdecimal(): continue
    for name in ("cmdline", "environ"):
        try: text = (process / name).read_bytes()
        except OSError: continue
        assert key not in text, (process, text)
        if name == "cmdline": seen.append(text)
print("agents seen", sum(b"--agent" in text for text in seen))
print("clients seen", sum(text.startswith(b"ssh\\0") for text in seen))
"""

#: Ignores requests to end, and has a child that does so too.
STUBBORN = "trap '' TERM INT HUP; sleep 1000 & echo running; wait; sleep 1000"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    network = machines(3, tmp_path_factory.mktemp("machines"))
    yield network
    network.close()


@pytest.fixture
def launch(nodes: Machines):
    """Starts launchers; nothing of them may be left at the end."""
    launched: list[Launched] = []

    def start(*words: str, **environment: str) -> Launched:
        launched.append(nodes.launch(*words, **environment))
        return launched[-1]

    yield start
    for one in launched:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()
    nodes.settle()


HOSTS = ("--hosts", "node1:2,node2:2", "--servers", "node3:2", "--grace", "1")


def test_a_job_on_three_machines(nodes, launch):
    script = nodes.folder / "train.py"
    script.write_text(TRAIN)
    job = launch(*HOSTS, "--env", "GLOO_SOCKET_IFNAME=eth0", sys.executable, str(script))
    output, errors = job.finish(0)
    wanted = [
        f"[rank {rank} on node{1 + rank // 2}] result {rank} 4 {rank % 2} 2 {nodes.folder}"
        for rank in range(4)
    ]
    assert sorted(output.splitlines()) == wanted, (output, errors)
    for rank in range(4):
        assert f"[rank {rank} on node{1 + rank // 2}] aside {rank}\n" in errors, errors
    # The launcher's own machine is reached by all: the scheduler is there.
    assert "scheduler at 10.99.1.1 port" in errors, errors
    assert "2 cores on 10.99.3.2" in errors, errors


def test_the_key_is_in_no_command_line_and_no_environment(nodes, launch):
    script = nodes.folder / "look.py"
    script.write_text(LOOK)
    output, _ = launch(*HOSTS, sys.executable, str(script)).finish(0)
    assert output.count("agents seen") == 4, output
    # With the client's own line; the launcher's machine has an agent for the scheduler.
    assert "clients seen 3" in output, output


def test_a_rank_that_fails_ends_all_and_is_named(nodes, launch):
    worker = f"[ $RANK = 3 ] && {{ sleep 1; exit 3; }}; {STUBBORN}"
    _, errors = launch(*HOSTS, "sh", "-c", worker).finish(3)
    line = "bpslaunch: rank 3 on node2 exited with code 3; ending the other processes"
    assert line in errors.splitlines(), errors
    nodes.settle()


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_end_leaves_nothing(nodes, launch, kind):
    job = launch(*HOSTS, "sh", "-c", "echo running; exec sleep 1000")
    job.wait_for("] running", 4)
    assert nodes.left()
    job.process.send_signal(kind)
    job.finish(128 + kind)
    nodes.settle()


def test_a_launcher_that_is_killed_leaves_nothing(nodes, launch):
    job = launch(*HOSTS, "sh", "-c", STUBBORN)
    job.wait_for("] running", 4)
    job.process.kill()
    nodes.settle()


def test_a_connection_that_is_cut_ends_all(nodes, launch):
    job = launch(*HOSTS, "sh", "-c", STUBBORN)
    job.wait_for("] running", 4)
    nodes.cut(2)
    _, errors = job.finish(255)
    assert "rank 2 on node2 was lost with node2: ssh has lost the connection" in errors, errors
    nodes.settle()


def test_an_elastic_job_goes_on_without_a_machine(nodes, launch):
    hosts = ("-H", "node1:1,node2:1", "--servers", "node3:1", "--elastic", "redo")
    command = (sys.executable, str(ELASTIC), "--pause", "0.02", "--epochs", "3")
    job = launch(*hosts, *command)
    job.wait_for("epoch 1, step")
    nodes.cut(2)
    output, errors = job.finish(0)
    assert "[rank 0 on node1] rank 0 of 1: final loss" in output, (output, errors)
    assert "rank 1 on node2 was lost with node2" in errors, errors
    assert "the job goes on with 1 worker\n" in errors, errors


def test_machines_come_and_go_as_a_command_says(nodes, launch):
    hosts = nodes.folder / "hosts"
    hosts.write_text("node1:1\n")
    flags = ("--host-discovery", f"cat {hosts}", "--discovery-interval", "0.1")
    more = ("--max-workers", "2", "--elastic", "redo", "--servers", "node3:1")
    command = (sys.executable, str(ELASTIC), "--pause", "0.05", "--epochs", "3")
    job = launch(*flags, *more, *command)
    job.wait_for("] rank 0 of 1 is process")
    hosts.write_text("node1:1\nnode2:1\n")
    job.wait_for("[rank 0 on node1] the job has 2 ranks now, and this is rank 0")
    hosts.write_text("node2:1\n")
    # The first rank leaves, and the one that came later is rank 0 then.
    job.wait_for("[slot 0 on node2] the job has 1 ranks now, and this is rank 0")
    output, errors = job.finish(0)
    assert "[slot 0 on node2] rank 0 of 1: final loss" in output, (output, errors)
    assert "rank 0 on node1 has left (exited with code 0)" in errors, errors
    assert "died" not in errors, errors
    nodes.settle()


def test_machines_that_cannot_be_reached_are_named_in_time(nodes, launch):
    with nodes.config.open("a") as file:
        file.write("Host nowhere\n    HostName 10.99.1.77\n")
        file.write("Host stranger\n    User root\n    HostName 10.99.2.2\n")
        file.write(f"    UserKnownHostsFile {nodes.folder}/nothing\n")
        file.write("    StrictHostKeyChecking yes\n    IdentityAgent none\n")
        file.write(
            "Host locked\n    User nobody\n    HostName 10.99.2.2\n    HostKeyAlias 10.99.2.2\n"
        )
        file.write(f"    UserKnownHostsFile {nodes.folder}/known_hosts\n    IdentityAgent none\n")
    begun = time.monotonic()
    for host, words in (
        ("nowhere", "nowhere: cannot log in: ssh: connect to host 10.99.1.77 port 22"),
        ("stranger", "stranger: cannot log in: Host key verification failed.; log in once by hand"),
        ("locked", "bpslaunch asks for no password: log in by a key (ssh-copy-id locked"),
        ("no.such.host.invalid", "no.such.host.invalid: cannot log in: ssh: Could not resolve"),
    ):
        job = launch("-H", f"node1:1,{host}:1", "--ssh-timeout", "4", "true")
        _, errors = job.finish(1)
        assert words in errors, errors
    assert time.monotonic() - begun < 40


def test_the_scheduler_is_where_all_reach_it(nodes, launch):
    """One machine has no way to the launcher's: then the first of the list has the scheduler."""
    nodes.nodes[2].run("ip", "route", "add", "blackhole", "10.99.1.1/32")
    try:
        job = launch(*HOSTS, "sh", "-c", "echo meet at $DMLC_PS_ROOT_URI")
        output, errors = job.finish(0)
    finally:
        nodes.nodes[2].run("ip", "route", "del", "blackhole", "10.99.1.1/32")
    assert "[rank 3 on node2] meet at 10.99.1.2\n" in output, output
    assert "[scheduler on node1]" in errors and "scheduler at 10.99.1.2 port" in errors, errors


def test_another_program_is_asked_for(launch):
    job = launch("-H", "node1:1,node2:1", "--remote-program", "/nonexistent/bpslaunch", "true")
    _, errors = job.finish(1)
    assert "there is no /nonexistent/bpslaunch" in errors and "--remote-program" in errors, errors
