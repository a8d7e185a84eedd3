"""The programs of the wheel: each is a function of the engine, called with the command line."""

import os
import signal
import sys

from byteps import _native


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


if __name__ == "__main__":
    {"launch": launch, "server": server, "scheduler": scheduler}[sys.argv.pop(1)]()
