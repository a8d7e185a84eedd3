"""Forks ranks from a process that has imported their framework already.

Importing torch takes a processor some seconds, which a test run would spend for each rank of each
job. With :func:`forked` in front of its script, a rank is started as ever, by a launcher and with
its environment, but what runs the script is a fork (:mod:`forked` stands for it). Forks share the
seed of Python's hashes, which processes of their own do not.

    python forks.py SOCKET MODULE...

is that process. It serves until its standard input ends.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
#: Variables that are read when a job begins, and not when a library is loaded.
OF_JOBS = ("BPS_", "BYTEPS_", "DMLC_", "HOROVOD_")
#: Variables that libraries read when they are loaded: each value has a process of its own.
OF_LIBRARIES = ("KERAS_BACKEND",)
PR_SET_PDEATHSIG = 1


def forked(modules: tuple[str, ...], environment: dict[str, str] | None = None) -> list[str]:
    """What to write for ``python`` in front of a script that uses these modules.

    The interpreter itself if there are none, or if the environment has other variables that they
    may read when they are loaded."""
    environment = environment or {}
    of_libraries = tuple((name, environment[name]) for name in OF_LIBRARIES if name in environment)
    others = [name for name in environment if not name.startswith(OF_JOBS)]
    if not modules or len(others) > len(of_libraries):
        return [sys.executable]
    return [sys.executable, "-I", "-S", str(HERE / "forked.py"), _server(modules, of_libraries)]


@functools.cache
def _server(modules: tuple[str, ...], of_libraries: tuple[tuple[str, str], ...]) -> str:
    """The socket of the process that has loaded these modules with these variables."""
    from cluster import clean_environment

    folder = tempfile.TemporaryDirectory(prefix="bps")
    path = str(Path(folder.name) / "socket")
    process = subprocess.Popen(
        [sys.executable, str(HERE / "forks.py"), path, *modules],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env=clean_environment() | dict(of_libraries),
    )

    @atexit.register
    def end() -> None:
        process.kill()
        process.wait()
        folder.cleanup()

    # It listens now, and answers once it has them.
    if process.stdout.readline() != b"ready\n":
        raise RuntimeError(f"the process that forks ranks with {modules} did not start: see above")
    return path


class Fork:
    """A rank, and the process that stands for it."""

    def __init__(self, pid: int, stand_in: socket.socket) -> None:
        self.pid = pid
        self.stand_in = stand_in
        self.end = os.pidfd_open(pid)

    def pass_on(self, numbers: bytes) -> None:
        """Sends it these signals."""
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.end, number)

    def bury(self) -> None:
        """Tells how it ended."""
        _, status = os.waitpid(self.pid, 0)
        with contextlib.suppress(OSError):
            self.stand_in.send(struct.pack("=i", os.waitstatus_to_exitcode(status)))
        self.stand_in.close()
        os.close(self.end)


def serve(listener: socket.socket) -> dict[str, Any]:
    """Forks whenever it is asked to. Returns in the forks alone, with what each is to be."""
    forks: set[Fork] = set()
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            # One at a time: what was ready with it may be no more.
            key, _ = selector.select()[0]
            fork = key.data
            if key.fileobj is sys.stdin:
                sys.exit()
            if key.fileobj is listener:
                stand_in, _ = listener.accept()
                place = receive(stand_in)
                if place is None:
                    continue
                pid = os.fork()
                if pid == 0:
                    listener.close()
                    for descriptor in [stand_in.detach(), *(fork.end for fork in forks)]:
                        os.close(descriptor)
                    for fork in forks:
                        fork.stand_in.close()
                    return place
                for descriptor in place["outputs"]:
                    os.close(descriptor)
                fork = Fork(pid, stand_in)
                forks.add(fork)
                selector.register(fork.stand_in, selectors.EVENT_READ, fork)
                selector.register(fork.end, selectors.EVENT_READ, fork)
            elif key.fileobj == fork.end:
                selector.unregister(fork.end)
                with contextlib.suppress(KeyError):
                    selector.unregister(fork.stand_in)
                forks.remove(fork)
                fork.bury()
            elif numbers := received(fork.stand_in):
                fork.pass_on(numbers)
            else:
                # Its launcher has killed the process that stands for it.
                selector.unregister(fork.stand_in)
                fork.pass_on(bytes([signal.SIGKILL]))


def received(stand_in: socket.socket) -> bytes:
    """What has come; nothing if the other end is gone."""
    with contextlib.suppress(ConnectionError):
        return stand_in.recv(64)
    return b""


def receive(stand_in: socket.socket) -> dict[str, Any] | None:
    """What a process says of itself, with its standard streams; nothing if it has been killed."""
    head, outputs, _, _ = socket.recv_fds(stand_in, 4, 3)
    said = b""
    if len(head) == 4:
        (length,) = struct.unpack("=I", head)
        said = stand_in.recv(length, socket.MSG_WAITALL)
        if len(said) == length:
            return json.loads(said) | {"outputs": outputs}
    for descriptor in outputs:
        os.close(descriptor)
    stand_in.close()
    return None


def become(place: dict[str, Any]) -> None:
    """Makes this process what the other one is, but for its number and its group."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    for number, descriptor in enumerate(place["outputs"]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(place["folder"])
    os.sched_setaffinity(0, place["processors"])
    os.environ.clear()
    os.environ.update(place["environment"])
    sys.argv = place["command"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def main() -> None:
    path, *modules = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        for module in modules:
            importlib.import_module(module)
        if "torch" in modules:
            import torch

            # An optimizer imports as much again.
            torch.optim.SGD([torch.zeros(1)])
        # The collector need not look through them again, in each fork.
        gc.freeze()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        place = serve(listener)
    become(place)
    run()


def run() -> None:
    """Runs the script and ends as an interpreter does, but for freeing all that a framework has
    made, which takes a processor a second."""
    code = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        if isinstance(end.code, int | None):
            code = end.code or 0
        else:
            sys.stderr.write(f"{end.code}\n")
    except BaseException:  # As for any script.
        traceback.print_exc()
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
