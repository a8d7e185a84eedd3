"""Start, end, and one's place in the job: what the module of every framework offers too."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from byteps import _forming, _native, _process_sets, _registry
from byteps._process_sets import (
    ProcessSet,
    add_process_set,
    get_process_set_ids_and_ranks,
    global_process_set,
    live_ranks,
    remove_process_set,
)
from byteps.errors import BytePSError, ConfigError

__all__ = [
    "BytePSBasics",
    "ProcessSet",
    "add_process_set",
    "barrier",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "get_process_set_ids_and_ranks",
    "get_pushpull_speed",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "live_ranks",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "resume",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "suspend",
]

_FRAMEWORKS = {"jax": "JAX", "mxnet": "MXNet", "tensorflow": "TensorFlow", "torch": "PyTorch"}

_lock = threading.Lock()
_at_exit_registered = False
#: What the launcher's variables mean to the engine, in place of variables of ours; kept while the
#: job is suspended.
_settings: dict[str, str] = {}
#: Whether this process is a rank alone that goes through the servers of the job that it was in.
_stays_served = False

_FORCED = "BYTEPS_FORCE_DISTRIBUTED"


def _new_lock() -> None:
    global _lock
    _lock = threading.Lock()


# A thread of the parent may have held it.
os.register_at_fork(after_in_child=_new_lock)


def init(lazy: Any = True, comm: Any = None, process_sets: Any = None) -> None:
    """Starts the engine of this process and returns when all nodes of the job are there.

    Who the process is and where the scheduler is come from the environment, which ``bpslaunch``
    sets. Under ``torchrun``, ``srun``, ``mpirun`` and ``mpiexec`` rank and size are theirs, and
    rank 0 starts the scheduler. Without any of it the process is a job of one, and needs neither
    scheduler nor server. A second call does nothing.

    ``lazy`` is there for BytePS's callers: both of its values connect now, so that what is wrong
    with the job shows here and not at the first tensor. ``comm`` is there for Horovod's: a list of
    all ranks, or an MPI communicator of as many processes; the first argument may be ``comm``, as
    in Horovod. ``process_sets`` are added as by :func:`add_process_set`, in their order.
    """
    if comm is None and not isinstance(lazy, (bool, int)):
        comm = lazy
    begins = begin()
    try:
        _check_members(comm)
        # Horovod's word for sets that come later is no set; they may come here.
        for process_set in () if process_sets in (None, "dynamic") else process_sets:
            add_process_set(process_set)
    except (BytePSError, TypeError):
        if begins:
            shutdown()
        raise


def _speaks() -> str | None:
    """The frameworks whose modules of this package are imported, for messages."""
    names = [name for module, name in _FRAMEWORKS.items() if f"byteps.{module}" in sys.modules]
    if "byteps.keras" in sys.modules:
        return " on ".join(["Keras", " and ".join(names)]) if names else "Keras"
    return " and ".join(names) or None


def begin(form: Callable[[], dict[str, str]] = lambda: _forming.settings(os.environ)) -> bool:
    """Starts the engine; does nothing and returns False where it runs.

    ``form`` forms the job, if it has to be formed, and returns what the engine is to be told.
    """
    global _at_exit_registered, _settings
    with _lock:
        if _native.is_initialized():
            return False
        try:
            if not (_settings or _native.is_forked()):
                _settings = form()
            _native.init(_settings, _speaks())
        except BaseException:
            _settings = {}
            _forming.end()
            raise
        _registry.started()
        if not _at_exit_registered:
            atexit.register(_end_of_process)
            _at_exit_registered = True
    return True


def _check_members(comm: Any) -> None:
    """Raises if these are not all ranks of the job."""
    if comm is None:
        return
    count = size()
    if hasattr(comm, "Get_size"):
        others = comm.Get_size() != count
    else:
        others = len(comm) > 0 and sorted(comm) != list(range(count))
    if others:
        raise ConfigError(
            f"comm={comm!r} is not all {count} ranks of the job: leave it out, and start a job of "
            "the processes that are to take part"
        )


def shutdown() -> None:
    """Ends the engine of this process in good order. Without one it does nothing."""
    _end(suspend=False)


def suspend() -> None:
    """Leaves the job for a while: servers and scheduler stay, and the declared names are kept.

    Every worker of the job must call it; :func:`resume` comes back.
    """
    _end(suspend=True)


def resume(num_workers: int, num_servers: int, global_rank: int = -1, context: Any = None) -> None:
    """Comes back after :func:`suspend`, perhaps into a job of another size.

    ``num_workers`` and ``num_servers`` are the new counts and ``global_rank`` the new rank of this
    process (-1: as computed from its host and local rank). What had been declared is declared
    again; parameters are not sent again, so broadcast them. ``context`` is not used.

    A rank that was one of several and comes back alone, with ``num_servers`` of 1 or more, goes on
    with the scheduler and the servers of its job, as with ``BYTEPS_FORCE_DISTRIBUTED=1``: they wait
    for it, and end with it.
    """
    global _stays_served
    del context
    # A job that a launcher formed is described here, any other in the environment.
    where = _settings or os.environ
    where["DMLC_NUM_WORKER"] = str(num_workers)
    where["DMLC_NUM_SERVER"] = str(num_servers)
    if _stays_served or (_FORCED not in where and size() > 1):
        _stays_served = num_workers == 1 and num_servers > 0 and local_size() == 1
        if _stays_served:
            where[_FORCED] = "1"
        else:
            where.pop(_FORCED, None)
    if global_rank >= 0:
        where["BYTEPS_GLOBAL_RANK"] = str(global_rank)
    else:
        where.pop("BYTEPS_GLOBAL_RANK", None)
    init(lazy=False)


def _end(suspend: bool) -> None:
    global _settings
    if _native.is_forked():
        return
    with _lock:
        if not _native.is_initialized():
            return
        kept: dict[_registry.Tensor, _registry.Kept] = {}
        if suspend:
            # Of a job that is over, nobody knows which rounds were.
            with contextlib.suppress(BytePSError):
                kept = _registry.kept()
        try:
            _native.shutdown(suspend)
        except BytePSError:
            _registry.ended(keep_names=suspend)  # The engine is gone all the same.
            raise
        except BaseException:
            _registry.never_free()  # Interrupted: it may still be at work.
            raise
        finally:
            if not suspend:
                _settings = {}
        _registry.ended(suspend, kept)


def _end_of_process() -> None:
    if _native.is_forked():
        return
    if getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1"):
        # The process ends because of an error. To leave in good order would let the other ranks
        # wait for a rank that does not come; the broken connection tells them at once. Until
        # then the engine may still write into the tensors of this process, so they stay.
        _registry.never_free()
        return
    # What ended the job has been said before: by an exception, and by the engine's own line.
    with contextlib.suppress(BytePSError):
        shutdown()
    _forming.wait_for_helpers(os.environ)


def is_initialized() -> bool:
    """Whether :func:`init` has been called and :func:`shutdown` has not; no forked child has."""
    return _native.is_initialized()


def rank() -> int:
    """The number of this process in the job, from 0. Answers in a forked child too."""
    return _native.rank()


def size() -> int:
    """The processes of the job."""
    return _native.size()


def local_rank() -> int:
    """The number of this process on its host, from 0."""
    return _native.local_rank()


def local_size() -> int:
    """The worker processes of this host."""
    return _native.local_size()


def cross_rank() -> int:
    """The number of this host among the hosts with workers, from 0."""
    return rank() // local_size()


def cross_size() -> int:
    """The hosts with workers."""
    return -(-size() // local_size())


def barrier(
    timeout: float | ProcessSet | None = None, process_set: ProcessSet | None = None
) -> None:
    """Waits until all ranks, or those of ``process_set``, have called it; at most ``timeout``
    seconds, if given.

    Horovod has ``process_set`` in the place of ``timeout``, where it may stand here, too.
    """
    if isinstance(timeout, ProcessSet):
        timeout, process_set = None, timeout
    ranks = _process_sets.ranks_of(process_set)
    if ranks is None:
        _native.barrier(timeout)
    else:
        _process_sets.barrier(ranks, timeout)


# What Horovod's callers ask of a build


def is_homogeneous() -> bool:
    """Whether every host has as many ranks: a job is not formed otherwise."""
    return size() % local_size() == 0


def mpi_threads_supported() -> bool:
    """Whether MPI may be used beside the engine from any thread: it makes no call of MPI."""
    return True


def mpi_enabled() -> bool:
    """Whether MPI moves bytes here: it does not."""
    return False


def mpi_built() -> bool:
    """Whether the engine was built with MPI: there is no such build."""
    return False


def gloo_enabled() -> bool:
    """Whether gloo moves bytes here: it does not."""
    return False


def gloo_built() -> bool:
    """Whether the engine was built with gloo: there is no such build."""
    return False


def nccl_built() -> bool:
    """Whether GPUs of a host may use NCCL: each build opens it where it finds it."""
    return True


def ddl_built() -> bool:
    """Whether the engine was built with DDL: there is no such build."""
    return False


def ccl_built() -> bool:
    """Whether the engine was built with oneCCL: there is no such build."""
    return False


def cuda_built() -> bool:
    """Whether tensors may be on CUDA devices: each build opens the driver where it finds it."""
    return True


def rocm_built() -> bool:
    """Whether tensors may be on ROCm devices: there is no such build."""
    return False


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Begins to record a timeline of this rank, and of the servers, in the folder ``file_path``.

    The folder gets ``RANK/comm.json`` and, where the servers run, ``server-INDEX/comm.json``;
    ``python -m byteps.timeline merge FOLDER`` makes one file of them, which Perfetto opens. It goes
    on until :func:`stop_timeline` or :func:`shutdown`; a tensor's round that is under way now may
    be in it in part. ``mark_cycles`` is there for Horovod's callers and has no effect: nothing here
    works in cycles. Raises where the file can't be written, or a timeline is being recorded.
    """
    del mark_cycles
    _native.start_timeline(os.fspath(file_path))


def stop_timeline() -> None:
    """Ends the timeline of this rank and returns when its file is written.

    The servers' ends with that of the last rank. Without a timeline it does nothing.
    """
    _native.stop_timeline()


def get_pushpull_speed() -> tuple[int, float]:
    """The oldest throughput sample that nobody has asked for: (ms since 1970, MB/s pushed).

    ``(0, -5.0)`` when there is none.
    """
    return _native.speed() or (0, -5.0)


class BytePSBasics:
    """The functions of this module as methods, for code that was written against BytePS's class."""

    def __init__(self, *unused: Any) -> None:
        """The arguments, which told BytePS where its libraries were, are not needed."""

    init = staticmethod(init)
    shutdown = staticmethod(shutdown)
    suspend = staticmethod(suspend)
    resume = staticmethod(resume)
    size = staticmethod(size)
    local_size = staticmethod(local_size)
    rank = staticmethod(rank)
    local_rank = staticmethod(local_rank)
    get_pushpull_speed = staticmethod(get_pushpull_speed)
    start_timeline = staticmethod(start_timeline)
    stop_timeline = staticmethod(stop_timeline)
