"""Training that goes on when ranks or servers die, and when new ones come; for any framework.

The names are Horovod's. A job is elastic if its scheduler has ``BPS_ELASTIC=redo``, or its launcher
``--elastic redo``. :mod:`byteps.torch.elastic` has what knows torch.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from array import array
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from byteps import _native, _registry, common
from byteps.errors import (
    BytePSError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    PeerDiedError,
)

__all__ = [
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "leave",
    "run",
    "run_fn",
]

_Result = TypeVar("_Result")
_Hook = TypeVar("_Hook", bound=Callable[[int, int], Any])

#: A state was synchronized in this process.
_synchronized = False
#: :func:`leave` was called.
_asked = False
#: To be called between two epochs, when nothing of the former one is under way any more.
_forgetters: list[Callable[[], None]] = []


def awaits_state() -> bool:
    """Whether this process has come to an elastic job that trains, and has not got its state."""
    if not _native.is_initialized() or _native.newcomers() is None:
        return False
    return _native.epoch() > 1 and not _synchronized


def leave() -> None:
    """Asks for an orderly end of this rank, at its next :meth:`State.commit`.

    For programs that handle SIGTERM themselves; where nobody does, :func:`run` does this. In a job
    that is not elastic it has no effect.
    """
    global _asked
    _asked = True


def settle() -> None:
    """Waits until all results have come for which streams of a GPU wait: what is saved then has
    nothing of one that does not come.

    Raises:
        HorovodInternalError: the job is over, and some may not have come.
    """
    if _native.is_initialized():
        _native.settle()


def _is_to_leave() -> bool:
    return _asked or _native.is_to_leave()


def on_epoch_end(forget: Callable[[], None]) -> None:
    """Registers what forgets the operations of an epoch that is over."""
    _forgetters.append(forget)


class State:
    """What the ranks must agree on: saved by :meth:`commit`, taken back by :meth:`restore`, and
    given to all by :meth:`sync`.

    ``bcast_object(object, root_rank=..., name=...)`` is the framework's; ``get_rank`` is there for
    Horovod's callers. A subclass defines :meth:`save`, :meth:`restore`, :meth:`send` and perhaps
    :meth:`reset`.
    """

    def __init__(
        self, bcast_object: Callable[..., Any], get_rank: Callable[[], int] = common.rank
    ) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], None]] = []
        self._change_callbacks: list[Callable[[int, int], Any]] = []
        # The ranks that it is of, once it is synchronized.
        self._size: int | None = None
        # All ranks know that this one leaves.
        self._leaves = False
        # Commits that this state has in it; none yet of a process that has just begun.
        self._commits = 0
        self._has_state = False

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Functions without arguments, to be called when the ranks have changed: to scale the
        learning rate by :func:`size`, for example."""
        self._reset_callbacks.extend(callbacks)

    def on_change(self, callback: _Hook) -> _Hook:
        """Registers ``callback(old, new)``, to be called with both sizes when the job has another
        size than the one that the state is of: to keep the global batch, or to scale the learning
        rate by ``new / old``. Returns it, so it decorates, too.

        It is called behind the callbacks above and before the state is synchronized, so what the
        rank changes whose state all get holds for everyone. After a death the state is the last
        commit's, and ``old`` the size of then.
        """
        self._change_callbacks.append(callback)
        return callback

    def on_reset(self) -> None:
        """The ranks have changed; :meth:`sync` follows."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()
        old, new = self._size, common.size()
        if old not in (None, new):
            for change in self._change_callbacks:
                change(old, new)

    def commit(self) -> None:
        """Saves the state, and lets newcomers in and ranks leave, if there are any.

        To be called by every rank at the same step: after an error each goes back to its last
        commit, and all go on from the latest one.
        """
        settle()
        self.save()
        self._commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises :class:`HostsUpdatedInterrupt` on every rank if nodes wait to be let in, or ranks
        to leave.

        All ranks call it together. It costs one small sum in an elastic job, and nothing in any
        other.
        """
        waiting = _native.newcomers()
        if waiting is None:
            return
        self._leaves = _is_to_leave()
        waiting, leaving = _sum("changes", [waiting, int(self._leaves)])
        if leaving:
            self.hand_over()
        if waiting or leaving:
            raise HostsUpdatedInterrupt

    def sync(self) -> None:
        """Gives every rank the state of the one that has committed most often, and saves it.

        The state never comes from a process that has just begun, unless all have.
        """
        global _synchronized
        progress = [0] * common.size()
        progress[common.rank()] = self._commits + 1 if self._has_state else 0
        progress = _sum("progress", progress)
        root = progress.index(max(progress))
        self.send(root)
        # Only now: had it failed half-way, this rank would have gone back to a commit of its own,
        # and would pass that for the root's.
        self._commits = max(progress[root] - 1, 0)
        self._has_state = _synchronized = True
        self._size = common.size()
        self.save()

    def send(self, root_rank: int) -> None:
        """Gives every rank the state of ``root_rank``."""
        raise NotImplementedError

    def hand_over(self) -> None:
        """Ranks are about to leave: all give to the others what only they know, and save it."""

    def save(self) -> None:
        """Keeps a copy of the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Takes back the copy that was last saved."""
        raise NotImplementedError

    def reset(self) -> None:
        """The ranks have changed: whatever depends on :func:`rank` and :func:`size` is stale."""


class ObjectState(State):
    """A state of plain values, which are attributes: ``ObjectState(bcast_object, epoch=0)``."""

    def __init__(
        self,
        bcast_object: Callable[..., Any],
        get_rank: Callable[[], int] = common.rank,
        **values: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved = dict(values)
        vars(self).update(values)

    def save(self) -> None:
        """See :class:`State`. An attribute that was not given at first is not saved."""
        self._saved = {name: copy.deepcopy(getattr(self, name)) for name in self._saved}

    def restore(self) -> None:
        """See :class:`State`."""
        vars(self).update(copy.deepcopy(self._saved))

    def send(self, root_rank: int) -> None:
        """See :class:`State`."""
        if self._saved:
            values = {name: getattr(self, name) for name in self._saved}
            # Ranks that were there before have declared the name with the root of then, and a
            # newcomer must not disagree with that.
            name = f"elastic.values.{root_rank}"
            values = self._bcast_object(values, root_rank=root_rank, name=name)
            vars(self).update(values)


def run(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Decorates a function that trains, ``train(state, ...)``, so that it outlives its peers.

    When a rank or a server dies, the call under way raises :class:`HorovodInternalError`. The
    state goes back to its last commit, the ranks that are left form the job again, every rank gets
    the state of the one that is furthest, and the function is called again. So it is after another
    error of the function if streams of a GPU have waited for results that do not come, since NaN
    stands in their place. When newcomers wait, :meth:`State.commit` lets them in the same way, and
    nothing is lost. In a job that is not elastic the error ends the function, as without the
    decorator.

    A rank that SIGTERM has told to leave goes on until :meth:`State.commit`. There all ranks agree;
    it leaves, and ends by ``SystemExit(0)``, and the others go on without it as above.
    """

    @functools.wraps(function)
    def wrapper(state: State, *arguments: Any, **options: Any) -> _Result:
        _native.take_notice(True)
        try:
            return _run(function, state, arguments, options)
        finally:
            _native.take_notice(False)

    return wrapper


def _run(
    function: Callable[..., _Result],
    state: State,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> _Result:
    came_back = False
    while True:
        try:
            if came_back:
                state.on_reset()
            state.sync()
            result = function(state, *arguments, **options)
            settle()
            return result
        except HorovodInternalError as error:
            # An epoch goes on without the root of a broadcast, which all ranks lack then: they come
            # back together.
            if not _native.may_return(suspend=isinstance(error, PeerDiedError)):
                raise
            # The others do without it already.
            leaves, restores = _is_to_leave(), True
        except HostsUpdatedInterrupt:
            if not _native.is_initialized() or _native.newcomers() is None:
                raise
            leaves, restores = state._leaves, False
        except Exception:
            # It may have met what stands in the place of results that do not come, which is NaN.
            if _have_all_come() or not _native.may_return():
                raise
            leaves, restores = _is_to_leave(), True
        if leaves:
            _leave()
        come_back()
        if restores:
            state.restore()
        came_back = True


def _have_all_come() -> bool:
    """Whether all results have come for which streams of a GPU wait."""
    try:
        settle()
    except HorovodInternalError:
        return False
    return True


def _leave() -> NoReturn:
    """Leaves the job for good, and ends the program."""
    with contextlib.suppress(BytePSError):  # What ended the epoch, which is known.
        common.shutdown()
    _native.has_left()
    raise SystemExit(0)


def run_fn(function: Callable[..., _Result], reset: Any = None) -> Callable[..., _Result]:
    """:func:`run` under Horovod's other name; ``reset``, which would start its library again, is
    not used."""
    del reset
    return run(function)


def come_back() -> None:
    """Leaves the epoch, and returns in the next one that is not over before it has begun here."""
    while True:
        with contextlib.suppress(BytePSError):  # What ended the epoch, which is known.
            common.suspend()
        for forget in _forgetters:
            forget()
        try:
            return common.init()
        except HorovodInternalError as error:
            # Another member has died while tensors were declared again.
            if not _native.may_return(suspend=isinstance(error, PeerDiedError)):
                raise


def _sum(name: str, values: list[int]) -> list[int]:
    """The sums over all ranks."""
    if common.size() == 1:
        return values
    memory = array("q", values)
    address, count = memory.buffer_info()
    # A name stands for one shape, and the ranks may be as many as they were before, or not.
    tensor = _registry.Tensor(f"elastic.{name}.{count}", "i64", (count,), "sum")
    handle = _registry.start([_registry.Send(tensor, address, address)], memory, list)
    return list(_registry.synchronize(handle))
