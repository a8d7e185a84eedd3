"""The programs of the wheel: each is a function of the engine, called with the command line."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

from byteps import _native

#: How often a helper looks for the rank that started it, how long the job then has to end by
#: itself, having lost that rank, and how long the helper has to end when it is told to.
_LOOK_SECONDS, _OVER_SECONDS, _END_SECONDS = 0.25, 3.0, 5.0


@contextlib.contextmanager
def _without_keyboard_interrupt() -> Iterator[None]:
    """Leaves Ctrl-C to the engine: Python would raise KeyboardInterrupt once that has ended."""
    before = signal.getsignal(signal.SIGINT)
    if (
        threading.current_thread() is not threading.main_thread()
        or before is not signal.default_int_handler
    ):
        yield  # Somebody has decided already, such as nohup.
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    yield  # A program that ends here leaves it so.
    signal.signal(signal.SIGINT, before)


def launch() -> None:
    """``bpslaunch``: starts the processes of a job."""
    names = ("scheduler", "server", "launch")
    programs = ([sys.executable, "-m", "byteps._programs", name] for name in names)
    with _without_keyboard_interrupt():
        sys.exit(_native.launch_main(sys.argv[1:], *programs))


def server() -> None:
    """``bps-server``: sums what workers push."""
    with _without_keyboard_interrupt():
        sys.exit(_native.server_main(sys.argv[1:]))


def scheduler() -> None:
    """``bps-scheduler``: brings the nodes of a job together."""
    with _without_keyboard_interrupt():
        sys.exit(_native.scheduler_main(sys.argv[1:]))


def top() -> None:
    """``bps-top``: shows a running job as a live table."""
    with _without_keyboard_interrupt():
        sys.exit(_native.top_main(sys.argv[1:]))


def run_role() -> None:
    """Runs the server or the scheduler, as ``DMLC_ROLE`` says; a server where it is not set."""
    role = os.environ.setdefault("DMLC_ROLE", "server")
    main = _native.scheduler_main if role.lower() == "scheduler" else _native.server_main
    with _without_keyboard_interrupt():
        status = main([])
    if status != 0:
        sys.exit(status)


def _follow(rank: int) -> None:
    """Ends this process once the rank's process, which started it, is gone.

    A rank that leaves in good order waits for it. The kernel's signal at a parent's death would not
    do: it comes when the starting *thread* ends.
    """
    while os.getppid() == rank:
        time.sleep(_LOOK_SECONDS)
    time.sleep(_OVER_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_END_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    program = {"launch": launch, "server": server, "scheduler": scheduler}[sys.argv.pop(1)]
    if sys.argv[1:2] == ["--of-rank"]:
        threading.Thread(target=_follow, args=(int(sys.argv[2]),), daemon=True).start()
        del sys.argv[1:3]
    program()
