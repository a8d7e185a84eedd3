"""Groups whose ranks change: ``init_process_group("byteps", enable_reconfigure=True)``.

Such a group has no ranks until the first ``reconfigure``, which every member calls with the same
handles. Each call leaves the job of before and forms a new one of those members, so it does not
matter who died, who comes and in which order they are to be. Where a launcher's variables describe
the job (``bpslaunch``, ``DMLC_*``), its scheduler says who is in it, and the group goes on with the
ranks that the elastic job has.

A backend in Python cannot change its size, so the group is the process group itself.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Collection
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from byteps import _forming, _native, common, elastic
from byteps.errors import BytePSError, ConfigError, StartError, UsageError
from byteps.torch.distributed import _joining
from byteps.torch.distributed._group import Named, Operations
from byteps.torch.distributed._keys import Keys
from byteps.torch.distributed._works import done

__all__ = ["create"]

_SCHEME = "byteps"


class Handle(NamedTuple):
    """What a member says of itself: its present rank, and the store in which others find it.

    The port is 0 where its store is none of TCP, so that the members must have one in common.
    """

    rank: int
    token: str
    port: int
    host: str

    def __str__(self) -> str:
        return f"{_SCHEME}:{self.rank}:{self.token}:{self.port}:{self.host}"


def _read(text: str) -> Handle:
    scheme, *rest = text.split(":", 4)
    try:
        rank, token, port, host = rest
        handle = Handle(int(rank), token, int(port), host)
    except ValueError:
        scheme = ""
    if scheme != _SCHEME:
        raise ConfigError(
            f"reconfigure: {text!r} is not the handle of a group of byteps: pass what "
            "get_reconfigure_handle() returned on each member"
        )
    return handle


_BASE: Any = dist.ProcessGroup


class _Group(Named, Operations, _BASE):  # type: ignore[misc]
    def __init__(self, options: Any) -> None:
        _BASE.__init__(self, options.group_rank, options.group_size)
        self._open(options.group_id, _joining.timeout_of(options))
        self._rank, self._size = options.group_rank, options.group_size
        store = options.store
        while isinstance(store, c10d.PrefixStore):
            store = store.underlying_store
        self._own_store = store
        self._port, self._host = 0, ""
        if isinstance(store, c10d.TCPStore):
            self._port, self._host = store.port, store.host
        self._token = uuid.uuid4().hex
        self._is_destroyed = False

    # C++ asks these, of a group that is not one of backends.

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._size

    @property
    def _device_types(self) -> list[torch.device]:
        # While it makes the group, torch looks for the backends of those that it finds here.
        kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(kind) for kind in kinds if self._host_fallback is not None]

    @property
    def supports_reconfigure(self) -> bool:
        return True

    def get_reconfigure_handle(self) -> str:
        return str(Handle(self._rank, self._token, self._port, self._host))

    def reconfigure(self, opts: Any) -> Any:
        """Makes this the group of these members. A list gives their ranks; members of a set are
        numbered by the ranks that they have, or by the launcher's scheduler.

        If not all of them come in time, the group stays as it was. Errors after that leave it
        without ranks. Either way it can be tried again, with another ``uuid``.
        """
        begun = time.monotonic()
        if self._is_destroyed:
            raise UsageError(f"group {self._name} of torch.distributed was destroyed")
        handles = [_read(text) for text in opts.handles]
        if isinstance(opts.handles, (set, frozenset)):
            handles.sort()
        rank, size = self._place_in(handles), len(handles)
        limit = opts.timeout
        seconds = limit.total_seconds() if limit else _forming.start_seconds(os.environ)
        store = self._meet(handles[0], opts.uuid, rank, size, begun + seconds)
        self._check_job()
        was_formed = self._host_fallback is not None
        # Nobody's operations are under way now. What is left of the former job may end.
        self._leave()
        _joining.agree(store, rank, size, b"left", _left(begun + seconds), "left")
        if _forming.is_described(os.environ):
            rank = self._return(was_formed, store, rank, size, seconds)
        else:
            _forming.end()
            _joining.form(store, rank, size, _left(begun + seconds).total_seconds())
        self._join(store, rank, size, Keys(self._name))
        return done([], self._line)

    def _place_in(self, handles: Collection[Handle]) -> int:
        tokens = [handle.token for handle in handles]
        if len(set(tokens)) != len(tokens):
            raise ConfigError("reconfigure: two of the handles are of one member")
        if self._token not in tokens:
            raise ConfigError(
                f"reconfigure: the handle of this process, {self.get_reconfigure_handle()}, is not "
                f"among the {len(tokens)} of the members: those alone are to call it"
            )
        return tokens.index(self._token)

    def _meet(self, first: Handle, number: int, rank: int, size: int, deadline: float) -> Any:
        """The store for this time, in which all members are."""
        store = self._own_store
        if first.port and (first.port, first.host) != (self._port, self._host):
            try:
                store = c10d.TCPStore(
                    first.host, first.port, is_master=False, timeout=_left(deadline)
                )
            except RuntimeError as error:
                raise StartError(
                    f"reconfigure: no connection to the store of the first member, rank "
                    f"{first.rank}, at {first.host}:{first.port}: {error}"
                ) from error
        store = c10d.PrefixStore(f"byteps/reconfigured/{number}", store)
        try:
            calls = store.add(f"calls of {rank}", 1)
        except RuntimeError as error:
            raise StartError(
                f"reconfigure: the store at {first.host}:{first.port} is gone, perhaps with the "
                f"process that had it; keep it in one that outlives the ranks: {error}"
            ) from error
        if calls > 1:
            raise ConfigError(
                f"reconfigure: uuid {number} was used before: take another one each time"
            )
        _joining.agree(store, rank, size, b"here", _left(deadline))
        return store

    def _check_job(self) -> None:
        if not _native.is_initialized():
            return
        if not _forming.is_described(os.environ):
            if not _joining.has_joined():
                raise UsageError(
                    "byteps.torch.init() has put this process into a job, and reconfigure forms "
                    "jobs of its own: leave init() out, or call it after reconfigure"
                )
        elif self._host_fallback is not None and _native.newcomers() is None:
            raise ConfigError(
                "reconfigure: the job that the launcher's variables describe is not elastic, so "
                "its ranks cannot change: use bpslaunch --elastic redo, or start the ranks without "
                "bpslaunch and DMLC_* variables"
            )

    def _leave(self) -> None:
        nccl, self._device_fallback = self._device_fallback, None
        self._keys = self._host_fallback = None
        if nccl is not None:
            nccl.abort()
        if not _forming.is_described(os.environ):
            # What has ended the job is known, by an operation or by who has called this.
            with contextlib.suppress(BytePSError):
                common.shutdown()

    def _return(self, was_formed: bool, store: Any, rank: int, size: int, seconds: float) -> int:
        """Into the launcher's job, or its next epoch, where the scheduler numbers the ranks."""
        if not _native.is_initialized():
            _joining.form(store, rank, size, seconds)
        elif was_formed or _native.may_return():
            elastic.come_back()
        if common.size() != size:
            raise ConfigError(
                f"reconfigure: {size} handles, but the launcher's job has {common.size()} ranks: "
                "pass those of its ranks, or start the ranks without bpslaunch and DMLC_* variables"
            )
        _joining.renumber(size)
        return common.rank()

    def _fallback(self, tensor: torch.Tensor) -> Any:
        if self._host_fallback is None and not self._is_destroyed:
            raise UsageError(
                f"group {self._name} of torch.distributed has no ranks: it was made with "
                "enable_reconfigure=True, so call reconfigure() first, on all members"
            )
        return super()._fallback(tensor)

    def shutdown(self) -> None:
        self._is_destroyed = True
        super().shutdown()

    abort = shutdown


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))


def create(options: Any) -> Any:
    """This process's end of a group that has no ranks yet."""
    return _Group(options)
