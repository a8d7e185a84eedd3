"""Operations under way, as ``torch.distributed`` sees them: work objects and their futures.

A work object waits in the engine, on the thread of its caller. A future is made where one is asked
for, as DDP's reducer does, and completed by a thread of this module.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from byteps import _native
from byteps.errors import BytePSError, WaitTimeoutError
from byteps.torch import _gpu
from byteps.torch._compiled import untraced

__all__ = ["Flight", "Operation", "done", "give"]


class Operation:
    """What the engine has been handed for one call: its memory, and what follows once it is done.

    ``outputs`` are the tensors that the caller gets; ``copies`` says which results have still to be
    copied, as (to, from); ``device`` is that of a GPU, or None.
    """

    __slots__ = ("_error", "_lock", "_over", "batch", "copies", "device", "memory", "outputs",
                 "timeout", "what")  # fmt: skip

    def __init__(
        self,
        what: str,
        batch: _native.Batch,
        outputs: Any,
        memory: Sequence[torch.Tensor],
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
        device: torch.device | None,
        timeout: float | None,
    ) -> None:
        self.what = what
        self.batch = batch
        self.outputs = outputs
        self.memory = memory
        self.copies = copies
        self.device = device
        self.timeout = timeout
        self._over = False
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: float | None) -> None:
        """Waits until the engine is done, and has what comes next in the caller's stream wait for
        the result. Raises what went wrong, and WaitTimeoutError after so many seconds."""
        if not self._over and not self.batch.wait(None, timeout):
            raise self.late(timeout)
        self.finish()

    def finish(self) -> None:
        """What is left to do once the engine is done: at once, on the current stream."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if self.device is not None:
                stream = _gpu.current_stream(self.device)
                _native.stream_wait_batch(self.batch, stream)
                if not self._over:
                    _gpu.keep_for_current_stream(self.memory)
            if self.copies:
                with torch.no_grad():
                    for target, source in self.copies:
                        target.copy_(source)
                self.copies = ()
            self._over = True

    def fail(self, error: BaseException) -> None:
        """It will not be waited for any more, because of this."""
        self._error = error

    def late(self, timeout: float | None) -> WaitTimeoutError:
        """The error after so many seconds."""
        return WaitTimeoutError(
            f"{self.what} of torch.distributed is not done after {timeout or 0:g} s. It goes on: "
            "leave its tensors alone. Look for a rank that has not made this call, or give "
            "init_process_group or new_group a longer timeout"
        )


class Flight:
    """Keeps the memory of operations until the engine is done with it, waited for or not."""

    def __init__(self) -> None:
        self._operations: deque[Operation] = deque()

    def add(self, operation: Operation) -> None:
        """Keeps this one, and lets go of older ones that are over."""
        operations = self._operations
        try:
            while operations and operations[0].batch.is_over():
                operations.popleft()
        except IndexError:
            pass  # Another thread has taken the last one.
        operations.append(operation)


class _Work(c10d.Work):
    """An operation, as c10d's callers hold it."""

    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self._operation = operation

    @untraced
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        seconds = timeout.total_seconds()
        self._operation.wait(seconds if seconds > 0 else self._operation.timeout)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._operation.batch.is_over()

    def is_success(self) -> bool:
        return self.is_completed()

    def result(self) -> Any:
        self.wait()
        return self._operation.outputs

    @untraced
    def get_future(self) -> torch.futures.Future[Any]:
        return future_of(self._operation)


class _Done(c10d.Work):
    """What needed no exchange."""

    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self._outputs = outputs

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> Any:
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([])
        return future


def _keeps_python_works() -> bool:
    """Whether C++ keeps the Python part of a work object alive: torch 2.6 does not."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return version >= (2, 7)


_KEEPS_PYTHON_WORKS = _keeps_python_works()


def give(operation: Operation) -> Any:
    """The work object of an operation."""
    if _KEEPS_PYTHON_WORKS:
        return _Work(operation)
    return c10d._create_work_from_future(future_of(operation))


def done(outputs: Any) -> Any:
    """The work object of what needs no exchange."""
    if _KEEPS_PYTHON_WORKS:
        return _Done(outputs)
    return c10d._create_work_from_future(_Done(outputs).get_future())


def future_of(operation: Operation) -> torch.futures.Future[Any]:
    """A future of the operation's outputs. It is complete when the engine is done; on a GPU, what
    follows it runs on streams that wait for the result."""
    device = operation.device
    told: torch.futures.Future[Any] = torch.futures.Future(
        devices=None if device is None else [device]
    )

    def outputs(_: torch.futures.Future[Any]) -> Any:
        # C++ takes what `Future.set_exception` sets for a value, and crashes; what a callback
        # raises is an error to C++ and to Python.
        operation.finish()
        return operation.outputs

    future = told.then(outputs)
    _completer().add(operation, told)
    return future


class _Completer:
    """Completes futures in the order in which the engine is done with their operations.

    Callbacks of a future run on the thread that completes it, and they may wait for other futures,
    as those of PowerSGD do. So a thread that has taken a future lets another one take the next
    before it completes its own: there is one more thread than callbacks that block.
    """

    def __init__(self) -> None:
        self._ends = _native.Completions()
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._spare = 0
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def add(self, operation: Operation, told: torch.futures.Future[Any]) -> None:
        if not self._threads:
            self._start_thread()
        self._ends.add(operation.batch, (operation, told), operation.timeout)

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
            (operation, told), is_over = end
            self._complete(operation, told, is_over)
            del operation, told, end  # They may be the last to know the tensors.
            with self._lock:
                self._spare += 1

    def _complete(
        self, operation: Operation, told: torch.futures.Future[Any], is_over: bool
    ) -> None:
        try:
            if is_over:
                operation.batch.wait()
            else:
                operation.fail(operation.late(operation.timeout))
        except BytePSError as error:
            operation.fail(error)
        told.set_result(None)

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
