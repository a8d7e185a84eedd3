"""The programs of the wheel: each is a function of the engine, called with the command line."""

import os
import signal
import sys
import threading
import time

from byteps import _native

#: How often a helper looks for the rank that started it, how long the job then has to end by
#: itself, having lost that rank, and how long the helper has to end when it is told to.
_LOOK_SECONDS, _OVER_SECONDS, _END_SECONDS = 0.25, 3.0, 5.0


def launch() -> None:
    """``bpslaunch``: starts the processes of a job."""
    roles = ([sys.executable, "-m", "byteps._programs", role] for role in ("scheduler", "server"))
    sys.exit(_native.launch_main(sys.argv[1:], *roles))


def server() -> None:
    """``bps-server``: sums what workers push."""
    sys.exit(_native.server_main(sys.argv[1:]))


def scheduler() -> None:
    """``bps-scheduler``: brings the nodes of a job together."""
    sys.exit(_native.scheduler_main(sys.argv[1:]))


def top() -> None:
    """``bps-top``: shows a running job as a live table."""
    # The engine's loop does not come back to the interpreter, which would have to see Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(_native.top_main(sys.argv[1:]))


def run_role() -> None:
    """Runs the server or the scheduler, as ``DMLC_ROLE`` says; a server where it is not set."""
    role = os.environ.setdefault("DMLC_ROLE", "server")
    main = _native.scheduler_main if role.lower() == "scheduler" else _native.server_main
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
