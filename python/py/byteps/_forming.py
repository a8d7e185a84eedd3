"""Forms the job of processes that torchrun, srun, mpirun or mpiexec started.

Rank 0 starts the scheduler, as a process of its own, and tells the other ranks where it is. Where
the job has several nodes, the first rank of each starts a server there. ``DMLC_*`` variables
overrule all of it: those that say which process this is leave the launcher's out of account; those
that say where the scheduler is, and how many servers there are, leave starting them to the user.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

from byteps import _launchers, _native
from byteps._launchers import Place
from byteps._meeting import Meeting, open_meeting
from byteps.errors import ConfigError, StartError

__all__ = [
    "end",
    "is_described",
    "settings",
    "settings_of",
    "start_seconds",
    "wait_for_helpers",
]

#: Variables that say which process of a job this is.
_WHO = ("DMLC_WORKER_ID", "BYTEPS_GLOBAL_RANK")
#: How long a rank that has left waits for its helpers without a word.
_PATIENCE_SECONDS = 3.0

_helpers: list[_Helper] = []
#: Jobs formed so far. All ranks count alike.
_generation = 0
#: Keeps the scheduler's port.
_reserved: socket.socket | None = None


class _Helper:
    """A scheduler or server that this process started. It ends with its job, or with us."""

    def __init__(self, role: str, settings: Mapping[str, str]) -> None:
        self.role = role
        self.owner = os.getpid()
        environment = {name: value for name, value in os.environ.items() if name not in _WHO}
        environment |= settings
        environment |= {"DMLC_ROLE": role, "BPS_ENVIRONMENT_CHECKED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "byteps._programs", role, "--of-rank", str(self.owner)],
            env=environment,
            stdin=subprocess.DEVNULL,
            # Ctrl-C in the terminal is for the ranks; the helper hears how they end.
            start_new_session=True,
        )


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Forms the job, if a launcher announces one, and returns what the engine is to be told.

    Empty where the ``DMLC_*`` variables describe the job, or this process is a job of one.
    """
    if environment.get("BYTEPS_LOCAL_RANK"):
        return {}  # From bpslaunch, or as it does.
    if any(environment.get(name) for name in _WHO):
        _refuse_job_of_one(environment)
        return {}
    place = _launchers.find(environment)
    task = environment.get("DMLC_TASK_ID", "")
    if place is None and task.isdecimal() and environment.get("DMLC_ROLE") == "worker":
        return {"DMLC_WORKER_ID": task}  # From MXNet's launcher, which numbers workers so.
    if place is None or place.size == 1:
        line = _launchers.hint(environment) if place is None else None
        if line and not environment.get("DMLC_NUM_WORKER"):
            _say(line)
        return {}
    return _form(place, environment, _open_meeting)


def settings_of(place: Place, meeting: Meeting, environment: Mapping[str, str]) -> dict[str, str]:
    """Forms the job of processes that have met already, with their own place in it; returns what
    the engine is to be told, as :func:`settings` does."""
    if is_described(environment):
        return settings(environment)
    if place.size == 1:
        return {}
    return _form(place, environment, lambda *_: meeting)


def is_described(environment: Mapping[str, str]) -> bool:
    """Whether ``DMLC_*`` variables, or ``bpslaunch``, say which process of a job this is."""
    return any(environment.get(name) for name in ("BYTEPS_LOCAL_RANK", *_WHO))


def _refuse_job_of_one(environment: Mapping[str, str]) -> None:
    """What ``DMLC_*`` says counts, unless it makes a job of one out of each of several."""
    counts = [environment.get(name) or "1" for name in ("DMLC_NUM_WORKER", "BYTEPS_LOCAL_SIZE")]
    if counts != ["1", "1"]:
        return
    place = _launchers.find(environment)
    if place is not None and place.size > 1:
        known = [f"{name}={environment[name]}" for name in _WHO if environment.get(name)]
        raise ConfigError(
            f"{place.said} ({place.launcher}) announces {place.size} processes, but "
            f"{' '.join(known)} without DMLC_NUM_WORKER and BYTEPS_LOCAL_SIZE makes each a job of "
            f"one; unset {' and '.join(name.split('=')[0] for name in known)}, or set all of them"
        )


def _open_meeting(place: Place, environment: Mapping[str, str]) -> Meeting:
    global _generation
    _generation += 1
    return open_meeting(place, _generation, start_seconds(environment))


def _form(
    place: Place,
    environment: Mapping[str, str],
    meet: Callable[[Place, Mapping[str, str]], Meeting],
) -> dict[str, str]:
    _helpers[:] = [helper for helper in _helpers if helper.process.poll() is None]
    meeting = meet(place, environment)
    place = meeting.located(_native.host_id())
    local_rank, local_size = place.local_rank, place.local_size
    assert local_rank is not None and local_size is not None, "the meeting has filled them in"
    nodes = place.size // local_size
    _agree(place, environment, "DMLC_NUM_WORKER", nodes)
    _agree(place, environment, "BYTEPS_LOCAL_SIZE", local_size)
    given = environment.get("DMLC_NUM_SERVER") or None
    in_order = place.rank // local_size
    node = in_order if place.node is None or place.node >= nodes else place.node
    shared = {
        "DMLC_NUM_WORKER": str(nodes),
        "DMLC_NUM_SERVER": given or str(_servers(nodes, environment)),
        "BYTEPS_LOCAL_SIZE": str(local_size),
    }
    own = {
        "DMLC_WORKER_ID": str(node),
        "BYTEPS_LOCAL_RANK": str(local_rank),
        "BYTEPS_GLOBAL_RANK": str(place.rank),
    }
    if environment.get("DMLC_PS_ROOT_URI"):
        return shared | own  # The scheduler is the user's, and so are the servers.
    if given not in (None, "0") and not (environment.get("DMLC_PS_ROOT_PORT") or meeting.port):
        raise ConfigError(
            f"DMLC_NUM_SERVER={given} stands for servers of your own, which must know the "
            f"scheduler's port: set DMLC_PS_ROOT_PORT to one that is free on the host of rank 0, "
            f"for the ranks and the servers; without DMLC_NUM_SERVER the ranks start what they need"
        )
    if place.rank == 0:
        shared |= _start_scheduler(meeting, nodes, shared, environment)
    else:
        shared |= meeting.hear()
    if local_rank == 0 and given is None and shared["DMLC_NUM_SERVER"] != "0":
        address = _own_address(shared["DMLC_PS_ROOT_URI"], environment)
        _helpers.append(_Helper("server", shared | address))
    return shared | own


def _agree(place: Place, environment: Mapping[str, str], name: str, here: int) -> None:
    text = environment.get(name) or str(here)
    if text != str(here):
        raise ConfigError(
            f"{name}={text}, but {place.said} ({place.launcher}) makes it {here}; unset {name}, or "
            f"start with bpslaunch"
        )


def _servers(nodes: int, environment: Mapping[str, str]) -> int:
    """One for each node, where sums leave the node at all."""
    reduces = environment.get("BPS_LOCAL_REDUCE", "").lower() not in ("0", "false")
    forced = environment.get("BYTEPS_FORCE_DISTRIBUTED", "").lower() in ("1", "true")
    return nodes if nodes > 1 or forced or not reduces else 0


def _start_scheduler(
    meeting: Meeting, nodes: int, shared: Mapping[str, str], environment: Mapping[str, str]
) -> dict[str, str]:
    """Starts the scheduler, and tells the other ranks what this returns."""
    _end_schedulers(meeting.deadline)
    text = environment.get("DMLC_PS_ROOT_PORT", "")
    awaits_servers = environment.get("DMLC_NUM_SERVER") not in (None, "", "0")
    address = "127.0.0.1" if nodes == 1 and not awaits_servers else "0.0.0.0"
    port = _reserve(address, int(text) if text.isdecimal() else meeting.port)
    news = {"DMLC_PS_ROOT_URI": meeting.host, "DMLC_PS_ROOT_PORT": str(port)}
    has_key = any(environment.get(name) for name in ("BPS_JOB_KEY", "BPS_JOB_KEY_FILE"))
    # Nobody would tell a new key to servers that the user starts.
    if meeting.keeps_secrets and not has_key and not awaits_servers:
        news["BPS_JOB_KEY"] = secrets.token_hex(32)
    # On all interfaces: which of them the others reach is for their routes to say.
    listen = {"DMLC_PS_ROOT_URI": address, "DMLC_NODE_HOST": "", "DMLC_INTERFACE": ""}
    _helpers.append(_Helper("scheduler", {**shared, **news, **listen}))
    meeting.announce(news)
    return news


def _end_schedulers(deadline: float) -> None:
    """Waits for those of former jobs, whose port may be wanted again."""
    for helper in _helpers:
        if helper.role == "scheduler" and helper.owner == os.getpid():
            with contextlib.suppress(subprocess.TimeoutExpired):
                helper.process.wait(max(0.0, deadline - time.monotonic()))


def _reserve(address: str, port: int) -> int:
    """A port for the scheduler that nobody else is given.

    The socket does not listen, and both it and the scheduler's ask to share the port, so the
    scheduler alone can listen on it.
    """
    global _reserved
    if _reserved is not None:
        _reserved.close()
    _reserved = socket.socket()
    _reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        _reserved.bind((address, port))
    except OSError as error:
        raise StartError(
            f"the scheduler cannot have port {port} of {address}: {error.strerror}; another job "
            f"has it, perhaps: set DMLC_PS_ROOT_PORT to a free one for all ranks"
        ) from error
    return int(_reserved.getsockname()[1])


def _own_address(root: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Where a server listens, if the address of rank 0 does not show how others reach this host.

    Distributions resolve a host's own name to a loopback address.
    """
    if any(environment.get(name) for name in ("DMLC_NODE_HOST", "DMLC_INTERFACE")):
        return {}
    if root == "localhost" or _is_loopback(root):
        return {}  # The user's choice: all is on one machine.
    try:
        if not _is_loopback(socket.gethostbyname(root)):
            return {}
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Sends nothing: it asks for the default route, by an address kept for documents.
            probe.connect(("192.0.2.1", 9))
            return {"DMLC_NODE_HOST": str(probe.getsockname()[0])}
    except OSError:
        return {}


def _is_loopback(text: str) -> bool:
    return text.startswith("127.") or text == "::1"


def start_seconds(environment: Mapping[str, str]) -> float:
    """How long the ranks of a job wait for one another when it starts."""
    return _seconds(environment, "BPS_START_TIMEOUT", 120.0)


def _seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    try:
        return float(environment.get(name) or default)
    except ValueError:
        return default  # The engine refuses the value in a moment.


def end() -> None:
    """Ends this process's helpers: the job was not formed."""
    for helper in _helpers:
        if helper.owner == os.getpid():
            helper.process.terminate()


def wait_for_helpers(environment: Mapping[str, str]) -> None:
    """Waits until the job that this process's helpers serve is over, before the process ends.

    Other ranks may still train. They may take as long as they may be away from a round.
    """
    limit = _seconds(environment, "BPS_STALL_TIMEOUT", 300.0)
    begun = time.monotonic()
    said = False
    try:
        for helper in [helper for helper in _helpers if helper.owner == os.getpid()]:
            while helper.process.poll() is None:
                waited = time.monotonic() - begun
                if waited > limit:
                    _say(f"the {helper.role} serves other ranks after {limit:.0f} s: it ends now")
                    helper.process.terminate()
                    break
                if waited > _PATIENCE_SECONDS and not said:
                    said = True
                    _say("this process has left the job, and waits for ranks that have not")
                time.sleep(0.05)
    except KeyboardInterrupt:
        end()


def _say(line: str) -> None:
    print(f"byteps: {line}", file=sys.stderr, flush=True)
