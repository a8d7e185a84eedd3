"""Futures of operations: they complete in one order on all ranks, and so do their callbacks run.

Callbacks make further calls, as those of PowerSGD do, and calls have no names: ranks match them by
their order. The engine is done with operations in an order of its own on each rank, so futures that
completed in that order would have callbacks mix up their calls.

Two things keep the order. A :class:`Line` completes the futures of a group in the order in which
they were asked for, one after another: the next is complete when the callbacks of the one before
have returned. And calls made in callbacks have tensors of their own (:func:`is_in_callback`),
because nothing says how far the program itself has come by then.
"""

from __future__ import annotations

import atexit
import inspect
import os
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from byteps import _native
from byteps.errors import BytePSError
from byteps.torch import _compiled

if TYPE_CHECKING:
    from byteps.torch.distributed._works import Operation

__all__ = ["Line", "future_of", "is_in_callback", "outputs_in_order"]

_Future = torch.futures.Future
_TAKES_CALLBACKS = {_Future.then.__code__, _Future.add_done_callback.__code__}
#: Files through which calls come, and which have no callbacks: it takes time to look at arguments.
_BETWEEN = {
    dist.distributed_c10d.__file__,
    dist.c10d_logger.__file__,
    _compiled.__file__,
    os.path.join(os.path.dirname(__file__), "_group.py"),
}

#: The line of the futures that a callback asks for, on the thread that runs the callback.
_running = threading.local()


class _Place:
    """A future's place in its line. ``told`` is complete before the future that the caller has.

    ``operation`` is None for what needed no exchange.
    """

    __slots__ = ("is_late", "is_over", "line", "operation", "told")

    def __init__(self, operation: Operation | None, told: _Future[None], line: Line) -> None:
        self.operation = operation
        self.told = told
        self.line = line
        self.is_over = operation is None
        self.is_late = False

    def complete(self) -> None:
        """Runs the callbacks, on this thread."""
        operation = self.operation
        try:
            if operation is not None and self.is_late:
                operation.fail(operation.late(operation.timeout))
            elif operation is not None:
                operation.batch.wait()
        except BytePSError as error:
            operation.fail(error)  # type: ignore[union-attr]
        outer = getattr(_running, "line", None)
        # Callbacks wait for what they ask for: it cannot stand behind the future that they run for.
        _running.line = Line()
        try:
            self.told.set_result(None)
        finally:
            _running.line = outer


class Line:
    """Futures that complete one after another, in the order in which they were asked for.

    A group has one, and so has each callback that runs. ``has_futures`` says whether the line has
    ever had any.
    """

    __slots__ = ("_is_busy", "_lock", "_places", "has_futures")

    def __init__(self) -> None:
        self.has_futures = False
        self._lock = threading.Lock()
        self._places: deque[_Place] = deque()
        self._is_busy = False

    def add(self, place: _Place) -> None:
        with self._lock:
            self._places.append(place)

    def advance(self) -> None:
        """Completes what can be, unless another thread is doing so: that one goes on."""
        while True:
            with self._lock:
                if self._is_busy or not self._places or not self._places[0].is_over:
                    return
                self._is_busy = True
                place = self._places.popleft()
            try:
                place.complete()
            finally:
                del place  # It may be the last to know the tensors.
                with self._lock:
                    self._is_busy = False


def _line_here(line: Line) -> Line:
    """Where a future of this group belongs that this thread asks for now."""
    line.has_futures = True
    return getattr(_running, "line", None) or line


def future_of(operation: Operation) -> _Future[Any]:
    """A future of the operation's outputs. On a GPU, what follows it runs on streams that wait for
    the result."""
    device = operation.device
    told: _Future[None] = _Future(devices=None if device is None else [device])

    def outputs(_: _Future[None]) -> Any:
        # C++ takes what `Future.set_exception` sets for a value, and crashes; what a callback
        # raises is an error to C++ and to Python.
        operation.finish()
        return operation.outputs

    future = told.then(outputs)
    place = _Place(operation, told, _line_here(operation.line))
    place.line.add(place)
    if operation.is_finished:
        # Who has waited for the work finds its future complete, as with torch's own backends.
        place.is_over = True
        place.line.advance()
    else:
        _completer().add(operation, place)
    return future


def outputs_in_order(outputs: Any, line: Line) -> _Future[Any]:
    """A future of outputs that are there: complete when those before it in the line are."""
    told: _Future[None] = _Future()
    future = told.then(lambda _: outputs)
    place = _Place(None, told, _line_here(line))
    place.line.add(place)
    place.line.advance()
    return future


def is_in_callback() -> bool:
    """Whether a callback of a future is making the call.

    A callback runs on a thread of this module or, if its future is complete by then, on the thread
    that calls ``then``; which of them it is may differ between ranks. So this asks for nothing but
    the code that runs: a function that takes a future is on the stack.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        count = code.co_argcount + code.co_kwonlyargcount
        variadic = bool(code.co_flags & inspect.CO_VARARGS)
        is_between = code.co_filename in _BETWEEN or code in _TAKES_CALLBACKS
        if count + variadic and not is_between:
            values = frame.f_locals
            names = code.co_varnames
            if any(isinstance(values.get(name), torch._C.Future) for name in names[:count]):
                return True
            if variadic:
                rest = values.get(names[count], ())
                if any(isinstance(value, torch._C.Future) for value in rest):
                    return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class _Completer:
    """The threads that learn of ends from the engine and complete futures.

    Callbacks of a future run on the thread that completes it, and they may wait for other futures,
    as those of PowerSGD do. So a thread that has learned of an end lets another one wait for the
    next before it completes futures: there is one more thread than callbacks that block.
    """

    def __init__(self) -> None:
        self._ends = _native.Completions()
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._spare = 0
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def add(self, operation: Operation, place: _Place) -> None:
        if not self._threads:
            self._start_thread()
        self._ends.add(operation.batch, place, operation.timeout)

    def _start_thread(self) -> None:
        with self._lock:
            if self._spare or self._is_closed:
                return
            self._spare += 1
            thread = threading.Thread(target=self._serve, name="bps-futures", daemon=True)
            self._threads = [thread, *(one for one in self._threads if one.is_alive())]
            thread.start()

    def _serve(self) -> None:
        while True:
            with self._turn:
                end = self._ends.next()
                with self._lock:
                    self._spare -= 1
            if end is None:
                return
            if self._spare == 0:
                self._start_thread()
            place, is_over = end
            line = place.line
            place.is_late = not is_over
            place.is_over = True
            del place, end  # They may be the last to know the tensors.
            line.advance()
            with self._lock:
                self._spare += 1

    def close(self) -> None:
        """Ends the threads: they must not wake when the interpreter is gone."""
        with self._lock:
            self._is_closed = True
            threads = self._threads
        self._ends.close()
        for thread in threads:
            thread.join(1.0)


_shared: _Completer | None = None
_shared_lock = threading.Lock()


def _completer() -> _Completer:
    global _shared
    if _shared is None:
        with _shared_lock:
            if _shared is None:
                _shared = _Completer()
                atexit.register(_shared.close)
    return _shared


def _forget() -> None:
    global _shared, _shared_lock
    _shared, _shared_lock = None, threading.Lock()


# The threads are the parent's.
os.register_at_fork(after_in_child=_forget)
