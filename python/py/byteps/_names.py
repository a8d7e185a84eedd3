"""The names that this process has declared: what each stands for, and its number in the job.

It knows names and numbers, and neither memory nor frameworks: :mod:`byteps._registry` sends what is
declared here.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from byteps import _native
from byteps.errors import MismatchError, TensorError, UsageError

# Operations without a name that may be under way. They take turns at as many names, in the order of
# the calls, so that ranks which pass different tensors in the same call are found out; the next one
# waits for the first. The number has many divisors: where calls of several types and shapes follow
# each other again and again, each name mostly keeps its meaning, and is not declared anew.
_UNNAMED = 60
_UNNAMED_PREFIX = "<unnamed "
_UNNAMED_FORM = re.compile(
    rf"{_UNNAMED_PREFIX}(?P<number>\d+)(?: of lap (?P<lap>\d+))?(?:, again (?P<failures>\d+))?>"
)
_WIRE_PREFIX = "byteps."
# Longer lists of ranks stand in names as a digest.
_SCOPE_CHARACTERS_MAX = 64


class Store(NamedTuple):
    """A value that stays on the servers. The first push of ``root`` is the value, that of any other
    rank asks for it; each later push of a rank is a delta, and brings the value with it in. A rank
    may be ``staleness`` pushes ahead of the slowest; as ``BPS_STALENESS`` says if that is None."""

    root: int = 0
    staleness: int | None = None


class Tensor(NamedTuple):
    """What the ranks must agree on. ``operation`` is sum, average or broadcast (from ``root``);
    ``device`` says that it travels from GPU to GPU: where it does not, each rank may have it on its
    GPU or in host memory. ``ranks`` are those that it is for, in rising
    order; all where it is None. ``encoding`` is how the engine encodes it, if it does, and
    ``store`` how its value stays on the servers, if it does: for deltas, or with an optimizer, as
    text; or, a number, for how many slow ranks its rounds do not wait. Where there is a
    ``receiver``, that rank alone gets its results; the others' targets may hold anything then."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    operation: str = "average"
    root: int = 0
    device: bool = False
    ranks: tuple[int, ...] | None = None
    encoding: str | None = None
    store: Store | str | int | None = None
    receiver: int | None = None


class Kept(NamedTuple):
    """What an encoded tensor has left out of its rounds so far, on this rank: float32 in the
    machine's order of bytes, one for each element, or nothing."""

    residue: bytes
    velocity: bytes


class Turn:
    """One of the names that operations without a name take turns at."""

    __slots__ = ("failures", "native", "refused")

    def __init__(self) -> None:
        self.failures = 0
        self.refused = False  # The ranks disagreed about the last operation under it.
        self.native: int | None = None  # That operation, if it is not known to be over.


#: Of this module's state and of :mod:`byteps._registry`'s.
lock = threading.RLock()
_declared: dict[Tensor, int] = {}
_on_wire: dict[str, Tensor] = {}
_counters: dict[Any, int] = {}
_jobs = 0
# What encoded tensors are to go on with, once they are declared.
_to_keep: dict[Tensor, Kept] = {}
_turns: dict[tuple[tuple[int, ...] | None, int, int], Turn] = {}
_turn_of: dict[str, Turn] = {}


def _new_lock() -> None:
    global lock
    lock = threading.RLock()


# A thread of the parent may have held it.
os.register_at_fork(after_in_child=_new_lock)


def started() -> None:
    """To be called when an engine has started: declares again what a suspend has kept.

    Tensors of GPUs are declared again when they are next sent: all ranks have to open their GPUs
    before, and those that are new to the job are not there yet.
    """
    global _jobs
    with lock:
        _jobs += 1
        _native.forget_numbers()
        # Turns begin again, also with ranks that are new to the job, and process sets are added
        # again: their ranks may be others. Values that servers kept begin again when next used.
        for tensor in list(_declared):
            is_unnamed = tensor.name.startswith(_UNNAMED_PREFIX)
            is_stored = isinstance(tensor.store, Store | str)
            is_for_some = tensor.ranks is not None or tensor.receiver is not None
            if is_for_some or is_unnamed or is_stored:
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
        declare(known)


def ended(keep_names: bool, kept: dict[Tensor, Kept] | None = None) -> None:
    """To be called when the engine has ended.

    ``kept`` is what tensors are to go on with, once there is an engine again.
    """
    with lock:
        _native.forget_numbers()
        if not keep_names:
            _declared.clear()
            _on_wire.clear()
        _to_keep.clear()
        _to_keep.update(kept or {})


def encoded() -> list[Tensor]:
    """The declared tensors that keep something from round to round."""
    with lock:
        return [tensor for tensor in _declared if "+" in (tensor.encoding or "")]


def kept() -> dict[Tensor, Kept]:
    """What this rank's encoded tensors keep from round to round. None of them is to be under way,
    but for those whose results streams of a GPU wait for: it waits for these.

    Codecs leave something out, which error feedback adds to what comes next, and momentum is a sum
    over all rounds: who goes on without begins anew with both.
    """
    _settle()
    with lock:
        told = {tensor: Kept(*_native.kept(_declared[tensor])) for tensor in encoded()}
    return {tensor: kept for tensor, kept in told.items() if any(kept)} | _to_keep


def keep(what: dict[Tensor, Kept]) -> None:
    """Lets these tensors go on with what :func:`kept` has told; some may not be declared yet. Waits
    as that does."""
    _settle()
    with lock:
        for tensor, kept in what.items():
            if tensor in _declared:
                _native.keep(_declared[tensor], *kept)
            else:
                _to_keep[tensor] = kept


def _settle() -> None:
    # Not under the lock, which whoever runs an exchange takes.
    if _native.is_initialized():
        _native.settle()


def job_number() -> int:
    """Counts the jobs of this process: numbers of tensors hold in one of them."""
    return _jobs


def count_up(what: Any) -> int:
    """How often it was called for ``what`` since the engine started: the same on every rank that
    makes the same calls."""
    with lock:
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
        turn = _turns.setdefault((ranks, number, index // _UNNAMED), Turn())
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


def turn_of(name: str) -> Turn | None:
    """The turn that an operation of this name has, if it is one of :func:`unnamed`'s."""
    return _turn_of.get(name)


def refused(name: str) -> None:
    """The ranks disagreed about the last operation under this one of :func:`unnamed`'s names."""
    _turn_of[name].refused = True


def take_turn(tensor: Tensor) -> None:
    """Counts an operation of other ranks, if it is without a name: this rank takes part without
    having called it, and its next one is to have the same name as theirs."""
    found = _UNNAMED_FORM.match(tensor.name)
    if found is None:
        return
    number, lap, failures = (int(text or 0) for text in found.groups())
    with lock:
        what = _UNNAMED_PREFIX, tensor.ranks
        count = _counters.get(what, 0)
        ahead = (number + 1 - count) % _UNNAMED
        # Those of one call may be told in another order.
        if ahead <= _UNNAMED // 2:
            _counters[what] = count + ahead
        turn = _turns.setdefault((tensor.ranks, number, lap), Turn())
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
    receiver: int | None,
) -> Tensor:
    """The tensor that other ranks have declared so, under this name in the job."""
    members = None if ranks is None else tuple(ranks)
    what = dtype, tuple(shape), operation, root, device, members, encoding
    tensor = Tensor("", *what, receiver=receiver)
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
    with lock:
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
    with lock:
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
