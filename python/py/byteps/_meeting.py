"""How the ranks of a launched job learn where rank 0 has put the scheduler, and the job's key.

On one host through a Unix socket that only processes of the same user are answered on; on several
through torch's store at ``MASTER_ADDR:MASTER_PORT``, which tells whoever reaches it, as torch
itself does; and without torch by a port that all ranks derive from what their launcher told them,
which carries no key.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import socket
import struct
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from datetime import timedelta
from typing import Any

from byteps._launchers import Place
from byteps.errors import ConfigError, StartError

__all__ = ["ByGroup", "Meeting", "open_meeting"]

#: Derived ports lie here: below those that kernels hand out by themselves.
_FIRST_PORT, _PORTS = 10_000, 20_000
#: How often a rank looks for rank 0, and after how long it says that it does.
_LOOK_SECONDS, _REMINDER_SECONDS = 0.1, 5.0
_NEWS_BYTES = 65_536


class Meeting(ABC):
    """A way to tell the other ranks something, once."""

    #: Where others find rank 0's host.
    host: str
    #: The port that the scheduler must take; 0 leaves it to the kernel.
    port = 0
    #: Whether a key may be told.
    keeps_secrets = True

    def __init__(self, place: Place, seconds: float) -> None:
        self.place = place
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds

    def located(self, host_id: str) -> Place:
        """The place with its numbers within the host, from all ranks if the launcher is silent."""
        del host_id
        return self.place

    @abstractmethod
    def announce(self, news: dict[str, str]) -> None:
        """Tells all other ranks; does not wait for them. For rank 0."""

    @abstractmethod
    def hear(self) -> dict[str, str]:
        """What rank 0 announces; waits for it until the deadline."""

    def _late(self, where: str) -> StartError:
        error = StartError(
            f"rank {self.place.rank} has not heard from rank 0 within {self.seconds:.0f} s (by "
            f"{where}): does rank 0 run, and does every rank call init()? its own output says "
            f"more; BPS_START_TIMEOUT gives it longer"
        )
        error.rank, error.ranks, error.waited_s = 0, (0,), self.seconds
        return error


def open_meeting(place: Place, generation: int, seconds: float) -> Meeting:
    """The way for this job. ``generation`` counts the jobs that these processes have formed."""
    attempt = f"{place.job} {generation}"
    if place.local_size == place.size and place.local_rank is not None:
        return _BySocket(place, place.job, seconds)
    is_located = place.local_size is not None and place.local_rank is not None
    if place.host and place.port and _has_torch():
        return _ByStore(place, generation, seconds)
    if not is_located:
        raise ConfigError(
            f"{place.said} ({place.launcher}) says nothing of the processes of one host: set "
            f"LOCAL_RANK and LOCAL_WORLD_SIZE for each process"
        )
    if not place.host:
        raise ConfigError(
            f"{place.said} ({place.launcher}) spans several hosts and does not say where rank 0 "
            f"runs: set MASTER_ADDR to its host, and MASTER_PORT to a free port there, for every "
            f"process (mpirun -x MASTER_ADDR -x MASTER_PORT)"
        )
    return _ByPort(place, attempt, seconds)


class _BySocket(Meeting):
    host = "127.0.0.1"

    def __init__(self, place: Place, job: str, seconds: float) -> None:
        super().__init__(place, seconds)
        name = hashlib.sha256(job.encode()).hexdigest()[:32]
        self.address = f"\0byteps-{os.getuid()}-{name}"

    def announce(self, news: dict[str, str]) -> None:
        listener = socket.socket(socket.AF_UNIX)
        try:
            self._bind(listener)
        except OSError:
            listener.close()
            raise
        text = json.dumps(news).encode()
        threading.Thread(
            target=self._serve, args=(listener, text), name="bps-meeting", daemon=True
        ).start()

    def _bind(self, listener: socket.socket) -> None:
        while True:
            try:
                listener.bind(self.address)
                listener.listen(self.place.size)
                return
            except OSError as error:
                # The attempt before this one may be about to end.
                if time.monotonic() > self.deadline:
                    raise StartError(
                        f"another job on this host has the name of this one ({self.place.job}): "
                        f"give each its own MASTER_PORT, or end the other one"
                    ) from error
            time.sleep(_LOOK_SECONDS)

    def _serve(self, listener: socket.socket, text: bytes) -> None:
        """Answers until every other rank has been told."""
        told: set[bytes] = set()
        with listener:
            while len(told) < self.place.size - 1:
                left = self.deadline - time.monotonic()
                if left <= 0:
                    return
                listener.settimeout(left)
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    with connection:
                        if _user(connection) != os.getuid():
                            continue
                        connection.settimeout(1.0)
                        rank = connection.recv(16)
                        connection.sendall(text)
                        told.add(rank)

    def hear(self) -> dict[str, str]:
        reminder = _Reminder(self.place)
        while time.monotonic() < self.deadline:
            with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):
                connection.settimeout(1.0)
                connection.connect(self.address)
                if _user(connection) != os.getuid():
                    raise StartError(
                        f"a process of user {_user(connection)} stands where rank 0 should be: it "
                        f"is not of this job, and is not listened to"
                    )
                connection.sendall(str(self.place.rank).encode())
                text = b""
                while part := connection.recv(_NEWS_BYTES):
                    text += part
                if text:
                    return _news(text)
            reminder.look()
            time.sleep(_LOOK_SECONDS)
        raise self._late(f"the Unix socket @{self.address[1:]}")


class _ByStore(Meeting):
    """Keys hold the generation and torch's restarts: the store outlives both."""

    def __init__(self, place: Place, generation: int, seconds: float) -> None:
        super().__init__(place, seconds)
        self.host = place.host or ""
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.prefix = f"byteps/{restart}/{generation}"
        self.where = f"torch's store at {place.host}:{place.port}"
        self.store = _store(place, seconds)

    def located(self, host_id: str) -> Place:
        place = self.place
        if place.local_size is not None and place.local_rank is not None:
            return place
        self._set(f"host/{place.rank}", host_id)
        hosts = [self._get(f"host/{rank}").decode() for rank in range(place.size)]
        counts = Counter(hosts)
        if len(set(counts.values())) > 1:
            numbers = ", ".join(str(count) for count in counts.values())
            raise ConfigError(
                f"the hosts of this job have {numbers} processes: start as many on every host"
            )
        local_rank = hosts[: place.rank].count(host_id)
        return replace(
            place,
            local_rank=local_rank if place.local_rank is None else place.local_rank,
            local_size=counts[host_id],
            node=list(counts).index(host_id),
        )

    def announce(self, news: dict[str, str]) -> None:
        self._set("scheduler", json.dumps(news))

    def hear(self) -> dict[str, str]:
        return _news(self._get("scheduler"))

    def _set(self, name: str, text: str) -> None:
        try:
            self.store.set(f"{self.prefix}/{name}", text)
        except RuntimeError as error:
            raise StartError(f"{self.where} takes nothing: {error}") from error

    def _get(self, name: str) -> bytes:
        key = f"{self.prefix}/{name}"
        reminder = _Reminder(self.place)
        while time.monotonic() < self.deadline:
            try:
                if self.store.check([key]):
                    return bytes(self.store.get(key))
            except RuntimeError as error:
                raise StartError(f"{self.where} is gone: {error}") from error
            reminder.look()
            time.sleep(_LOOK_SECONDS)
        raise self._late(self.where)


class ByGroup(_ByStore):
    """Through the store of a process group of torch: its ranks have met there before. ``prefix``
    tells what this meeting leaves there from what others have left."""

    def __init__(self, place: Place, seconds: float, store: Any, prefix: str) -> None:
        Meeting.__init__(self, place, seconds)
        self.host = ""
        self.prefix = prefix
        self.where = "the store of torch's process group"
        self.store = store

    def located(self, host_id: str) -> Place:
        place = super().located(host_id)
        # Only rank 0 says where it is: `announce` follows.
        is_alone = place.local_size == place.size
        self.host = "127.0.0.1" if is_alone else (place.host or own_address())
        return place


def own_address() -> str:
    """An address of this host that other hosts reach, as far as this one can tell."""
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        if not address.startswith("127."):
            return address
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Sends nothing: it asks for the default route, by an address kept for documents.
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return "127.0.0.1"


class _ByPort(Meeting):
    keeps_secrets = False

    def __init__(self, place: Place, attempt: str, seconds: float) -> None:
        super().__init__(place, seconds)
        self.host = place.host or ""
        number = int.from_bytes(hashlib.sha256(attempt.encode()).digest()[:8], "big")
        self.port = _FIRST_PORT + number % _PORTS

    def announce(self, news: dict[str, str]) -> None:
        """All ranks know it already."""

    def hear(self) -> dict[str, str]:
        port = os.environ.get("DMLC_PS_ROOT_PORT") or str(self.port)
        return {"DMLC_PS_ROOT_URI": self.host, "DMLC_PS_ROOT_PORT": port}


class _Reminder:
    """Says now and then that a rank waits."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.begun = self.said = time.monotonic()

    def look(self) -> None:
        now = time.monotonic()
        if now - self.said >= _REMINDER_SECONDS:
            self.said = now
            print(
                f"byteps: rank {self.place.rank} waits for rank 0 to call init() "
                f"({now - self.begun:.0f} s)",
                file=sys.stderr,
                flush=True,
            )


#: torch's store, for the life of the process: its server ends with its last owner.
_stores: dict[tuple[str, int], Any] = {}


def _has_torch() -> bool:
    """Whether torch's store may be used: without importing torch where nobody else has."""
    return "torch" in sys.modules or "TORCHELASTIC_RUN_ID" in os.environ


def _store(place: Place, seconds: float) -> Any:
    address = (place.host or "", place.port or 0)
    if address not in _stores:
        # As init_process_group does it: the store is the agent's under torchrun and rank 0's else,
        # where all stores of a process on one port are one.
        rendezvous = importlib.import_module("torch.distributed").rendezvous
        host = f"[{place.host}]" if ":" in (place.host or "") else place.host
        url = f"tcp://{host}:{place.port}"
        timeout = timedelta(seconds=seconds)
        try:
            _stores[address], _, _ = _interruptibly(
                lambda: next(rendezvous(url, place.rank, place.size, timeout=timeout))
            )
        except (RuntimeError, ValueError) as error:
            raise StartError(
                f"no connection to torch's store at {host}:{place.port} (MASTER_ADDR and "
                f"MASTER_PORT): {error}"
            ) from error
    return _stores[address]


def _interruptibly(function: Callable[[], Any]) -> Any:
    """Calls the function on another thread: torch's waits keep Ctrl-C waiting."""
    result: Future[Any] = Future()

    def call() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=call, name="bps-store", daemon=True).start()
    while not result.done():
        wait([result], _LOOK_SECONDS)
    return result.result()


def _news(text: bytes) -> dict[str, str]:
    news = json.loads(text)
    return {str(name): str(value) for name, value in news.items()}


def _user(connection: socket.socket) -> int:
    """The user at the other end of a Unix socket."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(struct.unpack("3i", credentials)[1])
