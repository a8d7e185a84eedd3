"""The names that this process has declared, and the push_pulls under way.

It knows names, numbers and addresses, and no framework: a module of a framework hands it what to
send and keeps nothing itself.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from byteps import _native
from byteps.errors import (
    BytePSError,
    ForkedError,
    MismatchError,
    TensorError,
    UsageError,
    WaitTimeoutError,
)

# Operations without a name that may be under way. They take turns at as many names, in the order of
# the calls, so that ranks which pass different tensors in the same call are found out; the next one
# waits for the first. The number has many divisors: where calls of several types and shapes follow
# each other again and again, each name mostly keeps its meaning, and is not declared anew.
_UNNAMED = 60
_UNNAMED_PREFIX = "<unnamed "
_UNNAMED_FORM = re.compile(
    rf"{_UNNAMED_PREFIX}(?P<number>\d+)(?: of lap (?P<lap>\d+))?(?:, again (?P<failures>\d+))?>"
)
# What an alltoall sends from one rank to another, with its size behind it in some programs.
_PAIR_FORM = re.compile(r"\.(\d+) to (\d+)(?:\.\d+)*$")
_WIRE_PREFIX = "byteps."
#: In the place of an encoding, in programs.
NOT_ENCODED = "none"
# Longer lists of ranks stand in names as a digest.
_SCOPE_CHARACTERS_MAX = 64


class Store(NamedTuple):
    """A value that stays on the servers. The first push of ``root`` is the value, that of any other
    rank asks for it; each later push of a rank is a delta, and brings the value with it in. A rank
    may be ``staleness`` pushes ahead of the slowest; as ``BPS_STALENESS`` says if that is None."""

    root: int = 0
    staleness: int | None = None


class Act(NamedTuple):
    """What a round of tensors with optimizers is for: ``step`` at a learning ``rate``, ``set`` a
    ``slot`` behind so many ``steps``, or ``get`` one. Slot 0 is the parameters."""

    what: str
    rate: float = 0.0
    slot: int = 0
    steps: int = 0


class Tensor(NamedTuple):
    """What the ranks must agree on. ``operation`` is sum, average or broadcast (from ``root``);
    ``device`` says that it travels from GPU to GPU: where it does not, each rank may have it on its
    GPU or in host memory. ``ranks`` are those that it is for, in rising
    order; all where it is None. ``encoding`` is how the engine encodes it, if it does, and
    ``store`` how its value stays on the servers, if it does: for deltas, or with an optimizer, as
    text; or, a number, for how many slow ranks its rounds do not wait."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    operation: str = "average"
    root: int = 0
    device: bool = False
    ranks: tuple[int, ...] | None = None
    encoding: str | None = None
    store: Store | str | int | None = None


class Kept(NamedTuple):
    """What an encoded tensor has left out of its rounds so far, on this rank: float32 in the
    machine's order of bytes, one for each element, or nothing."""

    residue: bytes
    velocity: bytes


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


class _Turn:
    """One of the names that operations without a name take turns at."""

    __slots__ = ("failures", "native", "refused")

    def __init__(self) -> None:
        self.failures = 0
        self.refused = False  # The ranks disagreed about the last operation under it.
        self.native: int | None = None  # That operation, if it is not known to be over.


_lock = threading.RLock()
_declared: dict[Tensor, int] = {}
_on_wire: dict[str, Tensor] = {}
_pending: dict[int, _Pending] = {}
_abandoned: list[_Pending] = []
_next_handle = 1
_counters: dict[Any, int] = {}
# What modules of frameworks keep alive until the engine is done with it.
held: set[Any] = set()
_jobs = 0
# How often the host looks whether a GPU has done what is enqueued there.
_LOOK_S = 2e-5

_gpu: int | None = None
_gpu_alone: int | None = None
_gpu_of_programs: int | None = None
# What encoded tensors are to go on with, once they are declared.
_to_keep: dict[Tensor, Kept] = {}
_turns: dict[tuple[tuple[int, ...] | None, int, int], _Turn] = {}
_turn_of: dict[str, _Turn] = {}
_turn_of_native: dict[int, _Turn] = {}


def _new_lock() -> None:
    global _lock
    _lock = threading.RLock()


# A thread of the parent may have held it.
os.register_at_fork(after_in_child=_new_lock)


def started() -> None:
    """To be called when an engine has started: declares again what a suspend has kept.

    Tensors of GPUs are declared again when they are next sent: all ranks have to open their GPUs
    before, and those that are new to the job are not there yet.
    """
    global _jobs
    with _lock:
        _jobs += 1
        _native.forget_numbers()
        # Turns begin again, also with ranks that are new to the job, and process sets are added
        # again: their ranks may be others. Values that servers kept begin again when next used.
        for tensor in list(_declared):
            is_unnamed = tensor.name.startswith(_UNNAMED_PREFIX)
            is_stored = isinstance(tensor.store, Store | str)
            if tensor.ranks is not None or is_unnamed or is_stored:
                del _declared[tensor], _on_wire[_wire_name(tensor)]
        size = _native.size()
        for tensor in [one for one in _declared if one.operation == "broadcast"]:
            if tensor.root >= size:  # The job has shrunk, and nobody can send it any more.
                del _declared[tensor], _on_wire[_wire_name(tensor)]
        known = [tensor for tensor in _declared if not tensor.device]
        _declared.clear()
        _counters.clear()
        _turn_of.clear()
        _turns.clear()
        _abandoned.extend(_pending.values())
        _pending.clear()
        declare(known)


def encoded() -> list[Tensor]:
    """The declared tensors that keep something from round to round."""
    with _lock:
        return [tensor for tensor in _declared if "+" in (tensor.encoding or "")]


def kept() -> dict[Tensor, Kept]:
    """What this rank's encoded tensors keep from round to round. None of them is to be under way.

    Codecs leave something out, which error feedback adds to what comes next, and momentum is a sum
    over all rounds: who goes on without begins anew with both.
    """
    with _lock:
        told = {tensor: Kept(*_native.kept(_declared[tensor])) for tensor in encoded()}
    return {tensor: kept for tensor, kept in told.items() if any(kept)} | _to_keep


def keep(what: dict[Tensor, Kept]) -> None:
    """Lets these tensors go on with what :func:`kept` has told; some may not be declared yet."""
    with _lock:
        for tensor, kept in what.items():
            if tensor in _declared:
                _native.keep(_declared[tensor], *kept)
            else:
                _to_keep[tensor] = kept


def job_number() -> int:
    """Counts the jobs of this process: numbers of tensors hold in one of them."""
    return _jobs


def ended(keep_names: bool, kept: dict[Tensor, Kept] | None = None) -> None:
    """To be called when the engine has ended: nothing is under way any more.

    ``kept`` is what tensors are to go on with, once there is an engine again.
    """
    global _gpu, _gpu_alone
    with _lock:
        _gpu = _gpu_alone = None
        _pending.clear()
        _abandoned.clear()
        held.clear()
        _native.forget_numbers()
        _native.xla_forget()
        if not keep_names:
            _declared.clear()
            _on_wire.clear()
        _to_keep.clear()
        _to_keep.update(kept or {})


def never_free() -> None:
    """Keeps the memory of what is under way until the process is gone, whatever is torn down."""
    for kept in (_pending, _abandoned, held):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def use_gpu(ordinal: int, jointly: bool = True) -> None:
    """To be called before tensors of this GPU are declared or sent. The first call opens it.

    That is done by all ranks together, ``jointly``, where a tensor is one of GPUs to the job
    (:attr:`Tensor.device`), and by this rank alone where none is. A second GPU of one process is a
    ConfigError.
    """
    global _gpu, _gpu_alone
    if jointly and ordinal != _gpu:
        with _lock:
            _native.open_gpu(ordinal)
            _gpu = ordinal
    elif not jointly and ordinal not in (_gpu, _gpu_alone):
        with _lock:
            _native.use_gpu(ordinal)
            _gpu_alone = ordinal


def send_programs_from(ordinal: int) -> None:
    """To be called when a program is compiled for this GPU: it may run in jobs that are to come."""
    global _gpu_of_programs
    _gpu_of_programs = ordinal


def open_gpu() -> int | None:
    """The GPU of this process, if it is open."""
    return _gpu


def count_up(what: Any) -> int:
    """How often it was called for ``what`` since the engine started: the same on every rank that
    makes the same calls."""
    with _lock:
        number = _counters.get(what, 0)
        _counters[what] = number + 1
        return number


def unnamed(count: int, ranks: tuple[int, ...] | None = None) -> list[str]:
    """Names for operations that the caller gave none: they follow from the order of calls, of those
    for the same ranks.

    A name about which the ranks disagreed is of no use, on any rank. So the last operation under a
    name must be over, to see whether there has to be another one.
    """
    names = []
    for index in range(count):
        number = count_up((_UNNAMED_PREFIX, ranks)) % _UNNAMED
        # Those of one call are under way together, however many they are.
        turn = _turns.setdefault((ranks, number, index // _UNNAMED), _Turn())
        native = turn.native
        if native is not None:
            try:
                _native.wait(native)
            except MismatchError:
                turn.refused = True
            turn.native = None
        if turn.refused:
            turn.failures += 1
            turn.refused = False
        lap = f" of lap {index // _UNNAMED}" if index >= _UNNAMED else ""
        again = f", again {turn.failures}" if turn.failures else ""
        names.append(scoped(f"{_UNNAMED_PREFIX}{number}{lap}{again}>", ranks))
        _turn_of[names[-1]] = turn
    return names


def take_turn(tensor: Tensor) -> None:
    """Counts an operation of other ranks, if it is without a name: this rank takes part without
    having called it, and its next one is to have the same name as theirs."""
    found = _UNNAMED_FORM.match(tensor.name)
    if found is None:
        return
    number, lap, failures = (int(text or 0) for text in found.groups())
    with _lock:
        what = _UNNAMED_PREFIX, tensor.ranks
        count = _counters.get(what, 0)
        ahead = (number + 1 - count) % _UNNAMED
        # Those of one call may be told in another order.
        if ahead <= _UNNAMED // 2:
            _counters[what] = count + ahead
        turn = _turns.setdefault((tensor.ranks, number, lap), _Turn())
        turn.failures, turn.refused = failures, False
        _turn_of[tensor.name] = turn


def scoped(name: str, ranks: tuple[int, ...] | None) -> str:
    """The name that it has among these ranks, which no other ranks have for theirs."""
    if ranks is None:
        return name
    text = ",".join(map(str, ranks))
    if len(text) > _SCOPE_CHARACTERS_MAX:
        text = hashlib.sha256(text.encode()).hexdigest()
    return f"{name}@{text}"


def _wire_name(tensor: Tensor) -> str:
    """The name that the job sees.

    One name may be averaged, summed and broadcast: what comes second has its operation in the wire
    name. What comes first has not, so that ranks which disagree about it are found out. Names that
    nobody chose stand for one operation at a time. Each process set has names of its own, since
    others may train a model of the same names.
    """
    plain = scoped(f"{_WIRE_PREFIX}{tensor.name}", tensor.ranks)
    known = _on_wire.get(plain, tensor)
    if (known.operation, known.root) == (tensor.operation, tensor.root):
        return plain
    if tensor.name.startswith(_UNNAMED_PREFIX):
        return plain
    return plain + _suffix(tensor)


def _suffix(tensor: Tensor) -> str:
    root = f".{tensor.root}" if tensor.operation == "broadcast" else ""
    return f":{tensor.operation}{root}"


def followed(
    wire: str,
    dtype: str,
    shape: Sequence[int],
    operation: str,
    root: int,
    device: bool,
    ranks: Sequence[int] | None,
    encoding: str | None,
) -> Tensor:
    """The tensor that other ranks have declared so, under this name in the job."""
    members = None if ranks is None else tuple(ranks)
    tensor = Tensor("", dtype, tuple(shape), operation, root, device, members, encoding)
    scope = scoped("", members)
    for end in (scope, scope + _suffix(tensor)):
        name = wire.removeprefix(_WIRE_PREFIX).removesuffix(end)
        if _wire_name(tensor._replace(name=name)) == wire:
            return tensor._replace(name=name)
    raise UsageError(
        f"join: the other ranks use '{wire}' for the operation {operation}. This one has used that "
        "name otherwise, or it is the engine's own, as when GPUs are opened: use each name for one "
        "operation, and send a tensor of each GPU before any rank joins"
    )


def is_declared(tensor: Tensor) -> bool:
    """Whether it is what its name stands for on this rank."""
    return tensor in _declared


def settled(tensor: Tensor) -> Tensor:
    """The tensor under a name that stands for no other type, shape or place in this process.

    For names that the caller did not choose for the job as a whole: a second model may have layers
    of the same names. It follows from the order of calls, so all ranks find the same.
    """
    name, version = tensor.name, 1
    with _lock:
        while _on_wire.get(_wire_name(tensor), tensor) != tensor:
            version += 1
            tensor = tensor._replace(name=f"{name}~{version}")
    return tensor


def _check_name(name: str) -> None:
    """Raises for a name that has no UTF-8: one from a file name that is none, say."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise TensorError(
            f"{name!a} cannot be the name of a tensor: character {error.start} is a lone "
            "surrogate, which UTF-8 has no bytes for; give it another name"
        ) from None


def declare(tensors: Sequence[Tensor]) -> list[int]:
    """The numbers of these tensors; one round trip for all that are new.

    A name may get another type or shape, if every rank gives it that after as many operations.
    Raises :class:`MismatchError` on every rank where they differ, or one has it in host memory and
    another on a GPU.
    """
    with _lock:
        new = [tensor for tensor in dict.fromkeys(tensors) if tensor not in _declared]
        if new:
            wire_names = []
            for tensor in new:
                _check_name(tensor.name)
                wire_names.append(_wire_name(tensor))
            specs = [(wire, *tensor[1:]) for wire, tensor in zip(wire_names, new, strict=True)]
            numbers = _native.declare(specs)
            for wire, tensor, number in zip(wire_names, new, numbers, strict=True):
                # What the name stood for before has to be declared again before it is sent again.
                if _declared.pop(_on_wire.get(wire, tensor), None) is not None:
                    _native.forget_numbers()
                _on_wire[wire] = tensor
                _declared[tensor] = number
                if tensor in _to_keep:
                    _native.keep(number, *_to_keep.pop(tensor))
        return [_declared[tensor] for tensor in tensors]


def declare_each(tensors: Sequence[Tensor]) -> tuple[list[int | None], MismatchError | None]:
    """Their numbers; none for those about which the ranks disagree, and that error."""
    try:
        return list(declare(tensors)), None
    except MismatchError as error:
        mismatch = error
    numbers: list[int | None] = []
    for tensor in tensors:
        try:
            numbers += declare([tensor])
        except MismatchError:
            numbers.append(None)
            if tensor.name in _turn_of:
                refused(tensor.name)
    return numbers, mismatch


def declare_for_program(
    said: Sequence[tuple[str, str, list[int], str, int, str, list[int], bool]],
) -> tuple[list[int | None], MismatchError | None]:
    """The numbers of tensors that a compiled program exchanges, and what the ranks disagree about.

    Each is (name, type, shape, operation, root, encoding or :data:`NOT_ENCODED`, ranks or none, on
    the GPU).
    """
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
        for name, dtype, shape, operation, root, encoding, ranks, device in said
    ]
    sets = {tensor.ranks for tensor in tensors if not _is_of_pair(tensor)} - {None}
    if sets:
        from byteps import _process_sets  # It imports this module.

        for ranks in filter(None, sets):
            _process_sets.check_of_program(ranks)
    with _lock:
        if _gpu_of_programs is not None:
            use_gpu(_gpu_of_programs, any(tensor.device for tensor in tensors))
        return declare_each(tensors)


def _is_of_pair(tensor: Tensor) -> bool:
    """Whether an alltoall sends it from one rank to another, which need no set for that."""
    found = _PAIR_FORM.search(tensor.name)
    return found is not None and set(map(int, found.groups())) == set(tensor.ranks or ())


_native.declare_by(declare_for_program)


def refused(name: str) -> None:
    """The ranks disagreed about the last operation under this one of :func:`unnamed`'s names."""
    _turn_of[name].refused = True


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
    with _lock:
        numbers, mismatch = declare_each(tensors)
        declared = [
            (number, send)
            for number, send in zip(numbers, sends, strict=True)
            if number is not None
        ]
        sends = [send for _, send in declared]
        in_host: list[tuple[int, int, int, int]] = []
        on_gpu: list[tuple[int, int, int, int]] = []
        host_turns: list[_Turn | None] = []
        gpu_turns: list[_Turn | None] = []
        for number, send in declared:
            item = number, send.source, send.target, send.priority
            (on_gpu if send.on_gpu else in_host).append(item)
            (gpu_turns if send.on_gpu else host_turns).append(_turn_of.get(send.tensor.name))
        label = sends[0].tensor.name if sends else "nothing"
        if len(sends) > 1:
            label += f" and {len(sends) - 1} more"
        pending = _Pending((), (), label, memory, finish, None if host_waits else stream)
        pending.ranks = sends[0].tensor.ranks if sends else None
        try:
            if on_gpu and stream:
                pending.natives = pending.on_gpu = tuple(_native.push_pull_gpu(on_gpu, stream()))
            if in_host:
                started = _native.update(in_host, act) if act else _native.push_pull(in_host)
                pending.natives += tuple(started)
            pending.broadcasts = tuple(
                (send.tensor, number, _native.pushes(number))
                for number, send in declared
                if send.tensor.operation == "broadcast" and send.tensor.root != _native.rank()
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
    with _lock:
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
    with _lock:
        pending = _pending.pop(handle, None)
        if pending is None:
            return
        if all(_native.poll(native) for native in pending.natives):
            _release(pending)
        else:
            _abandoned.append(pending)
