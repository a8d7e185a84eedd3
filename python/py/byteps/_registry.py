"""The push_pulls under way, of the names that :mod:`byteps._names` has declared.

It knows handles and addresses, and no framework: a module of a framework hands it what to send and
keeps nothing itself. What modules of frameworks want of names stands here too.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from byteps import _names, _native
from byteps._names import Kept as Kept
from byteps._names import Store as Store
from byteps._names import Tensor as Tensor
from byteps._names import count_up as count_up
from byteps._names import declare as declare
from byteps._names import declare_each as declare_each
from byteps._names import encoded as encoded
from byteps._names import followed as followed
from byteps._names import is_declared as is_declared
from byteps._names import job_number as job_number
from byteps._names import keep as keep
from byteps._names import kept as kept
from byteps._names import refused as refused
from byteps._names import scoped as scoped
from byteps._names import settled as settled
from byteps._names import take_turn as take_turn
from byteps._names import unnamed as unnamed
from byteps.errors import (
    BytePSError,
    ForkedError,
    MismatchError,
    UsageError,
    WaitTimeoutError,
)

# What an alltoall sends from one rank to another, with its size behind it in some programs.
_PAIR_FORM = re.compile(r"\.(\d+) to (\d+)(?:\.\d+)*$")
#: In the place of an encoding, in programs.
NOT_ENCODED = "none"


class Act(NamedTuple):
    """What a round of tensors with optimizers is for: ``step`` at a learning ``rate``, ``set`` a
    ``slot`` behind so many ``steps``, or ``get`` one. Slot 0 is the parameters."""

    what: str
    rate: float = 0.0
    slot: int = 0
    steps: int = 0


class Send(NamedTuple):
    """One tensor on its way: where it is read, and where its result is written; both in the memory
    of the GPU or of the host."""

    tensor: Tensor
    source: int
    target: int
    priority: int = 0
    on_gpu: bool = False


class _Pending:
    """Push_pulls that share a handle, and the ``memory`` that must stay alive until they are done;
    then ``finish(memory)`` is their result.

    ``ranks`` are those that they are for, all where it is None. ``on_gpu`` are those of ``natives``
    whose results the framework's stream has to wait for, and ``stream()`` is that stream.
    ``broadcasts`` are those among them from other ranks, each with its number and how often this
    rank had pushed it by then.

    A training step makes one for each gradient, and they live as long as it takes: each object
    that Python's garbage collector watches brings its next collection nearer, while all other
    ranks wait. So there are few: tuples of numbers are not watched, and functions are shared.
    """

    __slots__ = (
        *("broadcasts", "finish", "label", "memory", "natives", "on_gpu"),
        *("ranks", "stream"),
    )

    def __init__(
        self,
        natives: tuple[int, ...],
        on_gpu: tuple[int, ...],
        label: str,
        memory: Any,
        finish: Callable[[Any], Any],
        stream: Callable[[], int] | None,
    ) -> None:
        self.natives = natives
        self.on_gpu = on_gpu
        self.label = label
        self.memory = memory
        self.finish = finish
        self.stream = stream
        self.ranks: tuple[int, ...] | None = None
        self.broadcasts: tuple[tuple[Tensor, int, int], ...] = ()


_pending: dict[int, _Pending] = {}
_abandoned: list[_Pending] = []
_next_handle = 1
# What modules of frameworks keep alive until the engine is done with it.
held: set[Any] = set()
# How often the host looks whether a GPU has done what is enqueued there.
_LOOK_S = 2e-5

_gpu: int | None = None
_gpu_alone: int | None = None
_gpu_of_programs: int | None = None
_turn_of_native: dict[int, _names.Turn] = {}


def started() -> None:
    """To be called when an engine has started: declares again what a suspend has kept."""
    with _names.lock:
        _abandoned.extend(_pending.values())
        _pending.clear()
        _names.started()


def ended(keep_names: bool, kept: dict[Tensor, Kept] | None = None) -> None:
    """To be called when the engine has ended: nothing is under way any more.

    ``kept`` is what tensors are to go on with, once there is an engine again.
    """
    global _gpu, _gpu_alone
    with _names.lock:
        _gpu = _gpu_alone = None
        _pending.clear()
        _abandoned.clear()
        held.clear()
        _native.xla_forget()
        _names.ended(keep_names, kept)


def never_free() -> None:
    """Keeps the memory of what is under way until the process is gone, whatever is torn down."""
    for needed in (_pending, _abandoned, held):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(needed))


def use_gpu(ordinal: int, jointly: bool = True) -> None:
    """To be called before tensors of this GPU are declared or sent. The first call opens it.

    That is done by all ranks together, ``jointly``, where a tensor is one of GPUs to the job
    (:attr:`Tensor.device`), and by this rank alone where none is. A second GPU of one process is a
    ConfigError.
    """
    global _gpu, _gpu_alone
    if jointly and ordinal != _gpu:
        with _names.lock:
            _native.open_gpu(ordinal)
            _gpu = ordinal
    elif not jointly and ordinal not in (_gpu, _gpu_alone):
        with _names.lock:
            _native.use_gpu(ordinal)
            _gpu_alone = ordinal


def send_programs_from(ordinal: int) -> None:
    """To be called when a program is compiled for this GPU: it may run in jobs that are to come."""
    global _gpu_of_programs
    _gpu_of_programs = ordinal


def open_gpu() -> int | None:
    """The GPU of this process, if it is open."""
    return _gpu


def declare_for_program(
    said: Sequence[tuple[str, str, list[int], str, int, str, list[int], bool, int]],
) -> tuple[list[int | None], MismatchError | None]:
    """The numbers of tensors that a compiled program exchanges, and what the ranks disagree about.

    Each is (name, type, shape, operation, root, encoding or :data:`NOT_ENCODED`, ranks or none, on
    the GPU, backup workers).
    """
    from byteps._backups import Backups  # It imports this module.

    tensors = [
        Tensor(
            name,
            dtype,
            tuple(shape),
            operation,
            root,
            device,
            ranks=tuple(ranks) or None,
            encoding=None if encoding == NOT_ENCODED else encoding,
        )
        for name, dtype, shape, operation, root, encoding, ranks, device, _ in said
    ]
    tensors = [
        Backups.of_program(backups).over(tensor)
        for tensor, (*_, backups) in zip(tensors, said, strict=True)
    ]
    sets = {tensor.ranks for tensor in tensors if not _is_of_pair(tensor)} - {None}
    if sets:
        from byteps import _process_sets  # It imports this module.

        for ranks in filter(None, sets):
            _process_sets.check_of_program(ranks)
    with _names.lock:
        if _gpu_of_programs is not None:
            use_gpu(_gpu_of_programs, any(tensor.device for tensor in tensors))
        return declare_each(tensors)


def _is_of_pair(tensor: Tensor) -> bool:
    """Whether an alltoall sends it from one rank to another, which need no set for that."""
    found = _PAIR_FORM.search(tensor.name)
    return found is not None and set(map(int, found.groups())) == set(tensor.ranks or ())


_native.declare_by(declare_for_program)


def start(
    sends: Sequence[Send],
    memory: Any,
    finish: Callable[[Any], Any],
    stream: Callable[[], int] | None = None,
    host_waits: bool = False,
    act: Act | None = None,
) -> int:
    """Starts to send; returns one handle for all.

    ``memory`` is kept alive until it is done, and ``finish(memory)`` is what :func:`synchronize`
    returns.
    Tensors of a GPU are read after what ``stream()`` says that the framework has enqueued there by
    now, and :func:`synchronize` makes ``stream()`` of then wait for the results, not the host;
    with ``host_waits`` it is the host that waits.
    Tensors with optimizers are sent for ``act``.
    """
    global _next_handle
    tensors = [send.tensor for send in sends]
    names = [tensor.name for tensor in tensors]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"the name '{twice}' stands twice in one group: give each its own")
    with _names.lock:
        numbers, mismatch = declare_each(tensors)
        declared = [
            (number, send)
            for number, send in zip(numbers, sends, strict=True)
            if number is not None
        ]
        sends = [send for _, send in declared]
        in_host: list[tuple[int, int, int, int]] = []
        on_gpu: list[tuple[int, int, int, int]] = []
        host_turns: list[_names.Turn | None] = []
        gpu_turns: list[_names.Turn | None] = []
        for number, send in declared:
            item = number, send.source, send.target, send.priority
            (on_gpu if send.on_gpu else in_host).append(item)
            (gpu_turns if send.on_gpu else host_turns).append(_names.turn_of(send.tensor.name))
        label = sends[0].tensor.name if sends else "nothing"
        if len(sends) > 1:
            label += f" and {len(sends) - 1} more"
        pending = _Pending((), (), label, memory, finish, None if host_waits else stream)
        pending.ranks = sends[0].tensor.ranks if sends else None
        try:
            if on_gpu:
                assert stream is not None, "tensors on a GPU go with the stream that writes them"
                pending.natives = pending.on_gpu = tuple(_native.push_pull_gpu(on_gpu, stream()))
            if in_host:
                started = _native.update(in_host, act) if act else _native.push_pull(in_host)
                pending.natives += tuple(started)
            pending.broadcasts = tuple(
                (send.tensor, number, _native.pushes(number))
                for number, send in declared
                if _waits_for_root(send.tensor)
            )
            for turn, native in zip(gpu_turns + host_turns, pending.natives, strict=True):
                if turn is not None:
                    turn.native = native
                    _turn_of_native[native] = turn
        except BaseException:
            _abandoned.append(pending)  # What has been started still needs its memory.
            raise
        if mismatch is not None:
            # The others send the rest of the group: without this rank they would wait for ever.
            _abandoned.append(pending)
            raise mismatch
        handle = _next_handle
        _next_handle += 1
        _pending[handle] = pending
        return handle


def _waits_for_root(tensor: Tensor) -> bool:
    """Whether something is missing here if the root has joined."""
    is_from_other = tensor.operation == "broadcast" and tensor.root != _native.rank()
    return is_from_other and 0 not in tensor.shape


def _find(handle: int) -> _Pending | None:
    pending = _pending.get(handle)
    if pending is None:
        if not isinstance(handle, int) or not 0 < handle < _next_handle:
            raise ValueError(f"{handle!r} is not a handle: it comes from none of the async calls")
    return pending


def poll(handle: int) -> bool:
    """Whether :func:`synchronize` would return, or raise, at once."""
    pending = _find(handle)
    return pending is None or all(_native.poll(native) for native in pending.natives)


def wait(handle: int, timeout: float | None = None) -> bool:
    """Waits until it is done; False if ``timeout`` seconds passed before. Keeps the handle."""
    pending = _find(handle)
    if pending is None:
        return True
    deadline = None if timeout is None else time.monotonic() + timeout
    for native in pending.natives:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            if not _native.wait(native, left):
                return False
        except ForkedError:
            raise
        except BytePSError:
            _give_up(handle)
            raise
    # All is enqueued. Where no stream is put behind the results, the host is.
    while pending.stream is None and not all(map(_native.poll, pending.on_gpu)):
        if deadline is not None and time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
    return True


def synchronize(handle: int, timeout: float | None = None) -> Any:
    """Waits until it is done and returns the result; None for a handle that is spent.

    What happens on a GPU is done, to the host, when the engine has enqueued the last of it.
    """
    pending = _find(handle)
    if pending is not None and pending.on_gpu and pending.stream:
        _native.enqueue_results(pending.on_gpu)
    if not wait(handle, timeout):
        label = _pending[handle].label
        error = WaitTimeoutError(
            f"push_pull of '{label}' is not done after {timeout} s; it goes on, and its handle may "
            "be waited for again"
        )
        error.tensor, error.waited_s = label, timeout
        raise error
    with _names.lock:
        pending = _pending.get(handle)
        if pending is None:
            return None
        if pending.on_gpu and pending.stream:
            _native.stream_wait(pending.on_gpu, pending.stream())
        del _pending[handle]
        _release(pending)
    _check_roots(pending)
    return pending.finish(pending.memory)


def contributors(handle: int) -> list[int] | None:
    """Waits until it is done; the ranks whose contributions are in all of its results, or None for
    a handle that is spent."""
    pending = _find(handle)
    if pending is None:
        return None
    wait(handle)
    lacking = {rank for native in pending.natives for rank in _native.lacking(native)}
    ranks = range(_native.size()) if pending.ranks is None else pending.ranks
    return [rank for rank in ranks if rank not in lacking]


def _check_roots(pending: _Pending) -> None:
    """Raises if one that should have sent something has joined before."""
    for tensor, number, round_ in pending.broadcasts:
        joined_after = _native.root_joined_after(number)
        if joined_after is not None and round_ > joined_after:
            error = UsageError(
                f"'{tensor.name}' is broadcast from rank {tensor.root}, which has called join() "
                "and sends nothing more: broadcast from a rank that has data, or after all ranks "
                "have joined"
            )
            error.rank, error.ranks, error.tensor = tensor.root, (tensor.root,), tensor.name
            raise error


def _release(pending: _Pending) -> None:
    for native in pending.natives:
        turn = _turn_of_native.pop(native, None)
        if turn is not None and turn.native == native:
            try:
                _native.wait(native)  # It is over.
            except BytePSError as error:
                turn.refused = isinstance(error, MismatchError)
            turn.native = None
        _native.release(native)


def _give_up(handle: int) -> None:
    """Drops a handle that failed, and its memory only if nothing of it is still under way."""
    with _names.lock:
        pending = _pending.pop(handle, None)
        if pending is None:
            return
        if all(_native.poll(native) for native in pending.natives):
            _release(pending)
        else:
            _abandoned.append(pending)
