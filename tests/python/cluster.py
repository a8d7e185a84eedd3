"""Runs functions on the ranks of a job on this machine, and gathers what they return.

A :class:`Cluster` is one job under ``bpslaunch --local``; its ranks wait for functions, so many
tests share the time that it takes to start. Tests that end or break a job start their own.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import cloudpickle

import forks

HERE = Path(__file__).parent
START_SECONDS = 90
#: TensorFlow's tuning of input pipelines sleeps for up to a minute, and may miss the one call that
#: wakes it when an iterator ends: one that lives to the end of a process delays it by as much.
END_SECONDS = 90
CALL_SECONDS = 60


#: What ranks have when they begin, by how the files of tests are called; torch in all others.
MODULES = {
    "test_jax": ("jax", "cloudpickle", "pytest"),
    "test_tensorflow": ("tensorflow", "keras", "cloudpickle", "pytest"),
    "test_keras": ("tensorflow", "keras", "cloudpickle", "pytest"),
    "test_mxnet": (),
    "": ("torch", "torch.distributed", "cloudpickle", "pytest"),
}


class RankError(AssertionError):
    """A function failed on some rank; the message has its traceback."""


class Cluster:
    """One job of ``size`` ranks. Without servers and launcher if ``size`` is 1."""

    def __init__(
        self, size: int, servers: int = 1, cores: int = 1, environment: dict[str, str] | None = None
    ) -> None:
        self.size = size
        self.broken = False
        self._folder = tempfile.TemporaryDirectory(prefix="bps")
        self._log = Path(self._folder.name) / "log"
        listener = Listener(str(Path(self._folder.name) / "socket"), "AF_UNIX", backlog=16)
        rank = forks.forked(_modules(environment or {}), environment)
        rank += [str(HERE / "rank.py"), listener.address]
        launcher = [sys.executable, "-m", "byteps.launch", "--local", str(size)]
        launcher += ["--servers", str(servers), "--server-cores", str(cores)]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                rank if size == 1 else launcher + rank,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # The path through the servers, unless a test says otherwise.
                env=clean_environment() | {"BPS_LOCAL_REDUCE": "0"} | (environment or {}),
            )
        self.pids = [0] * size
        self._ranks: list[Connection | None] = [None] * size
        try:
            with listener:
                self._accept(listener)
        except BaseException:
            self.kill()
            raise

    def _accept(self, listener: Listener) -> None:
        listener._listener._socket.settimeout(1)
        deadline = time.monotonic() + START_SECONDS
        while None in self._ranks:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RankError(f"the job did not start:\n{self.log()}")
            try:
                connection = listener.accept()
            except TimeoutError:
                continue
            local_rank, pid = connection.recv()
            self._ranks[local_rank] = connection
            self.pids[local_rank] = pid

    def run(self, function: Any, *arguments: Any, timeout: float = CALL_SECONDS) -> list[Any]:
        """What the function returned, by rank; raises if it raised on any."""
        try:
            self.start(function, *arguments)
            return self.results(timeout)
        except BaseException:
            self.broken = True
            raise

    def start(self, function: Any, *arguments: Any) -> None:
        """Starts the function on all ranks."""
        call = cloudpickle.dumps((function, arguments))
        for connection in self._ranks:
            connection.send_bytes(call)

    def results(self, timeout: float = CALL_SECONDS, ranks: Any = None) -> list[Any]:
        """The results of what was started, of these ranks or of all."""
        deadline = time.monotonic() + timeout
        results = []
        for rank in range(self.size) if ranks is None else ranks:
            connection = self._ranks[rank]
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                self._dump_stacks()
                raise RankError(f"rank {rank} did not return within {timeout} s:\n{self.log()}")
            try:
                ok, value = pickle.loads(connection.recv_bytes())
            except EOFError:
                raise RankError(f"rank {rank} is gone:\n{self.log()}") from None
            if not ok:
                raise RankError(f"rank {rank}:\n{value}\n{self.log()}")
            results.append(value)
        return results

    def _dump_stacks(self) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(1)  # Each rank writes its stacks to the log, which nobody acknowledges.
        # Those do not say where a rank is that is ending, or in a library.
        with self._log.open("a") as log:
            for pid in self.pids:
                log.write(where_threads_wait(pid))
                log.write(native_stacks(pid))

    def log(self) -> str:
        """What all processes of the job have printed."""
        return self._log.read_text(errors="replace")[-60000:]

    def wait(self, timeout: float) -> int:
        """Waits for the end of the job; its exit status."""
        return self.process.wait(timeout)

    def close(self) -> None:
        """Lets the ranks end in good order, and checks that they do."""
        for connection in self._ranks:
            connection.send_bytes(cloudpickle.dumps(None))
        try:
            status = self.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._dump_stacks()
            log = self.log()
            self.kill()
            raise RankError(f"the job did not end:\n{log}") from None
        log = self.log()
        self.kill()
        if status != 0:
            raise RankError(f"the job ended with status {status}:\n{log}")

    def kill(self) -> None:
        """Ends whatever is left of it."""
        for connection in self._ranks:
            if connection is not None:
                connection.close()
        self._ranks = []
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._folder.cleanup()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is None and self._ranks:
            self.close()
        else:
            self.kill()


def _modules(environment: dict[str, str]) -> tuple[str, ...]:
    """Those of :data:`MODULES` that the ranks of the test under way use."""
    file = Path(os.environ["PYTEST_CURRENT_TEST"].partition("::")[0]).name
    modules = next(modules for name, modules in MODULES.items() if file.startswith(name))
    backend = environment.get("KERAS_BACKEND", "tensorflow")
    return tuple(name for name in modules if name != "tensorflow" or backend == name)


def where_threads_wait(pid: int) -> str:
    """What a process's threads are called, and the functions of the kernel that they sleep in."""
    lines = ["--- hangs; its threads wait in:"]
    for task in sorted(Path("/proc").glob(f"{pid}/task/*")):
        with contextlib.suppress(OSError):  # It may have ended meanwhile.
            name = (task / "comm").read_text().strip()
            lines.append(f"{task.name} {name}: {(task / 'wchan').read_text().strip()}")
    return "\n".join([*lines, ""])


def native_stacks(pid: int) -> str:
    """The stacks of a process's threads, where elfutils or gdb is installed; gdb takes a minute to
    read the libraries of a framework."""
    tools = {
        "eu-stack": ["-p", str(pid), "-n", "24"],
        "gdb": ["-p", str(pid), "-batch", "-ex", "thread apply all backtrace 24"],
    }
    tool = next((tool for tool in tools if shutil.which(tool)), None)
    if tool is None or not Path(f"/proc/{pid}").exists():
        return ""
    try:
        said = subprocess.run([tool, *tools[tool]], check=False, capture_output=True, timeout=100)
    except subprocess.TimeoutExpired:
        return f"{tool} took too long\n"
    return said.stdout.decode(errors="replace")


def launch(
    command: list[str],
    workers: int = 2,
    timeout: float = 90,
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs this command under ``bpslaunch --local``."""
    launcher = [sys.executable, "-m", "byteps.launch", "--local", str(workers), "--servers", "1"]
    return subprocess.run(
        launcher + command,
        env=clean_environment() | (environment or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )


def clean_environment() -> dict[str, str]:
    """The environment without any job's variables, ours or a launcher's."""
    jobs = ("DMLC_", "BYTEPS_", "BPS_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_")
    plain = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(jobs) and name not in plain
    }
    path = os.pathsep.join(filter(None, [str(HERE), kept.get("PYTHONPATH")]))
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def servers_of(launcher):
    """The process ids of a launcher's servers."""
    found = []
    for task in Path(f"/proc/{launcher}/task").iterdir():
        for pid in (task / "children").read_text().split():
            with contextlib.suppress(OSError):
                if b"DMLC_ROLE=server" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(int(pid))
    return found
