"""Stands for a rank that is a fork of :mod:`forks`, as which this process is started.

    python -I -S forked.py SOCKET SCRIPT [ARGUMENT...]

A launcher starts and watches this one. It has next to nothing to import; the fork has all of it.
Signals go on to the fork, whose end is this process's end, and the other way round.
"""

import contextlib
import json
import os
import signal
import socket
import struct
import sys

#: What launchers send to ranks. A SIGKILL of this process closes its socket, which kills the fork.
PASSED_ON = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
)


def main() -> None:
    path, *command = sys.argv[1:]
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)

    def pass_on(number: int, frame: object) -> None:
        with contextlib.suppress(OSError):  # It has just ended.
            server.send(bytes([number]))

    place = {
        "command": command,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "processors": sorted(os.sched_getaffinity(0)),
    }
    said = json.dumps(place, ensure_ascii=True).encode()
    socket.send_fds(server, [struct.pack("=I", len(said))], [0, 1, 2])
    server.sendall(said)
    for number in PASSED_ON:
        signal.signal(number, pass_on)
    answer = server.recv(4, socket.MSG_WAITALL)
    if len(answer) < 4:
        sys.exit("the process that forks ranks has ended")
    (code,) = struct.unpack("=i", answer)
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler.
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
