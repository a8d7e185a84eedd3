"""The processes of a job of ``tests/kill-campaign``, their logs, and the network between them."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kill_plan
from cluster import clean_environment, where_threads_wait
from kill_plan import SCHEDULER, SUCCESSOR, Fault, Member, Plan

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWNET = 0x20000, 0x8000000, 0x40000000
TARGET = Path(__file__).parents[2] / "target"
NETWORK = TARGET / "debug" / "bps-test-network"
#: The scheduler's, on a host that is a namespace of its own.
PORT = 9000


def call(name: str, *arguments: Any) -> None:
    """A function of libc that returns 0; raises OSError if it does not."""
    if getattr(LIBC, name)(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


class NoNetwork(Exception):
    """This machine cannot have hosts; the message says why."""


class Network:
    """Hosts that are network namespaces, and what is between them."""

    def __init__(self, hosts: int) -> None:
        if not NETWORK.exists():
            raise NoNetwork("bps-test-network is not built: cargo build --workspace --bins")
        pipe = subprocess.PIPE
        command = [str(NETWORK), str(hosts)]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        lines = [self._read() for _ in range(hosts)]
        if not all(lines):
            self.close()
            raise NoNetwork(" ".join(filter(None, lines)) or "no network")
        self.hosts = [line.split() for line in lines]

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def address(self, host: int) -> str:
        return str(self.hosts[host][1])

    def enter(self, host: int) -> None:
        """Moves this process to a host."""
        namespace = os.open(self.hosts[host][0], os.O_RDONLY)
        call("setns", namespace, CLONE_NEWNET)
        os.close(namespace)

    def set(self, one: int, other: int, rule: str) -> None:
        """``pass``, ``block`` or the size of the largest packet, from one host to another."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{one} {other} {rule}\n")
        self.process.stdin.flush()
        if self._read() != "ok":
            raise NoNetwork("the network has ended")

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.process.wait(10)


class Process:
    """A fork of this one, which does not have to import anything any more."""

    def __init__(self, log: Path, environment: dict[str, str], body: Callable[[], None]) -> None:
        self.code: int | None = None
        self.log = log
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
            with log.open("ab") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
            os.environ.clear()
            os.environ.update(environment)
            body()
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:  # It is read in the log.
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def ended(self) -> bool:
        """Whether it has, by itself or not."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def send(self, number: int) -> None:
        if not self.ended():
            os.kill(self.pid, number)

    def end(self) -> None:
        """Ends it at once."""
        self.send(signal.SIGKILL)
        while not self.ended():
            time.sleep(0.002)

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class Job:
    """A scheduler, servers and ranks."""

    def __init__(self, plan: Plan, folder: Path, network: Network | None, isolated: bool) -> None:
        self.plan, self.folder, self.network = plan, folder, network
        #: Nobody else uses /dev/shm.
        self.has_own_memory = isolated
        self.events = folder / "events.jsonl"
        self.stop = folder / "stop"
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.lines: list[dict[str, Any]] = []
        self._read = 0
        self.processes: dict[Member, Process] = {}
        # Keeps the port for the scheduler, which asks to share it.
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("127.0.0.1", 0))
        port = PORT if network else self._port.getsockname()[1]
        address = network.address(plan.hosts[plan.members[0]]) if network else "127.0.0.1"
        self.environment = clean_environment() | {
            "DMLC_PS_ROOT_URI": address,
            "DMLC_PS_ROOT_PORT": str(port),
            "DMLC_NUM_WORKER": str(plan.ranks),
            "DMLC_NUM_SERVER": str(plan.servers),
            "BYTEPS_LOCAL_SIZE": "1",
            "BYTEPS_LOCAL_RANK": "0",
            "BPS_JOB_KEY": f"{plan.seed:032x}",
            "BPS_PIN": "0",
            "BPS_HEARTBEAT_TIMEOUT": str(kill_plan.HEARTBEAT_TIMEOUT),
            "BPS_HEARTBEAT_INTERVAL": str(kill_plan.HEARTBEAT_INTERVAL),
            "BPS_START_TIMEOUT": str(kill_plan.START_TIMEOUT),
            "BPS_STALL_TIMEOUT": str(kill_plan.STALL_TIMEOUT),
            "BPS_STALL_REPORT": "1.5",
            "TMPDIR": str(self.temporary),
            **plan.settings,
        }
        if plan.elastic:
            self.environment |= {
                "BPS_ELASTIC": plan.elastic,
                "BPS_SCHEDULER_WAIT": str(plan.scheduler_wait),
                "BPS_MIN_WORKERS": str(plan.min_workers),
            }
        for member in plan.members:
            self.start(member)

    def start(self, member: Member, place: int | None = None) -> Process:
        """Starts a member; a rank that comes later takes the place of another."""
        host = self.plan.hosts.get(SCHEDULER if member == SUCCESSOR else member)
        if place is not None:
            host = self.plan.hosts.get(Member("rank", place))
        place = member.index if place is None else place
        variables = {"DMLC_ROLE": member.role, "DMLC_WORKER_ID": str(place)}
        variables["DMLC_NODE_HOST"] = "127.0.0.1"
        if self.network is not None:
            assert host is not None
            variables["DMLC_NODE_HOST"] = self.network.address(host)
        if member.role == "server":
            variables["BPS_LEAVE_NOTICE"] = str(kill_plan.LEAVE_NOTICE)
        if member.role != "rank":
            del variables["DMLC_WORKER_ID"]
        else:
            variables["DMLC_ROLE"] = "worker"

        def body() -> None:
            if self.network is not None:
                self.network.enter(host)
            if member.role == "rank":
                import kill_rank

                kill_rank.train(self.events, self.stop, member.index, self.plan.mode)
            else:
                program = [sys.executable, "-m", "byteps._programs", member.role]
                os.execve(sys.executable, program, dict(os.environ))

        log = self.folder / f"{member.role}-{member.index}.log"
        process = Process(log, self.environment | variables, body)
        self.processes[member] = process
        return process

    def read(self) -> None:
        """Takes in what ranks have written since the last time."""
        if not self.events.exists():
            return
        with self.events.open("rb") as events:
            events.seek(self._read)
            data = events.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        self.lines += [json.loads(line) for line in whole.splitlines()]

    def latest(self) -> int:
        """The latest epoch of which a rank has written."""
        return max((line.get("epoch", 0) for line in self.lines), default=0)

    def of(self, member: Member, event: str) -> list[dict[str, Any]]:
        """What a rank has written of an event."""
        pid = self.processes[member].pid
        return [line for line in self.lines if line["pid"] == pid and line["event"] == event]

    def ranks(self) -> list[Member]:
        return [member for member in self.processes if member.role == "rank"]

    def strike(self, fault: Fault) -> None:
        """Begins a fault."""
        if fault.kind == "kill":
            self.processes[fault.victim].end()
        elif fault.kind in ("stop", "term"):
            number = signal.SIGSTOP if fault.kind == "stop" else signal.SIGTERM
            self.processes[fault.victim].send(number)
        else:
            self._set(fault, str(kill_plan.HOLE_BYTES) if fault.kind == "hole" else "block")

    def heal(self, fault: Fault) -> None:
        """Ends it."""
        if fault.kind == "stop":
            self.processes[fault.victim].send(signal.SIGCONT)
        elif fault.is_network:
            self._set(fault, "pass")

    def _set(self, fault: Fault, rule: str) -> None:
        assert self.network is not None
        one, hosts = self.plan.hosts[fault.victim], self.plan.hosts
        if fault.other is not None:
            others = [hosts[fault.other]]
        else:
            others = [host for host in hosts.values() if host != one]
        for other in others:
            self.network.set(one, other, rule)
            if fault.kind != "one-way":
                self.network.set(other, one, rule)

    def show_stacks(self) -> None:
        """Lets what still runs write where it is."""
        for member, process in self.processes.items():
            if process.ended():
                continue
            with process.log.open("a") as log:
                log.write(where_threads_wait(process.pid))
            if member.role == "rank":
                process.send(signal.SIGUSR1)
        time.sleep(0.5)  # The ranks write their stacks, which nobody acknowledges.

    def close(self) -> None:
        """Ends whatever still runs."""
        for process in self.processes.values():
            process.end()
        self._port.close()
