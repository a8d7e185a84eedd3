"""Operations under way, as ``torch.distributed`` sees them: work objects and their futures.

A work object waits in the engine, on the thread of its caller. A future is made where one is asked
for, as DDP's reducer does, and completed as ``_futures`` says.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from byteps import _native
from byteps.errors import WaitTimeoutError
from byteps.torch import _gpu
from byteps.torch._compiled import untraced
from byteps.torch.distributed._futures import Line, future_of, outputs_in_order

__all__ = ["Flight", "Operation", "all_of", "done", "give"]


class Operation:
    """What the engine has been handed for one call: its memory, and what follows once it is done.

    ``outputs`` are the tensors that the caller gets; ``copies`` says which results have still to be
    copied, as (to, from); ``device`` is that of a GPU, or None; ``line`` is that of the group's
    futures.
    """

    __slots__ = ("_error", "_lock", "_over", "batch", "copies", "device", "line", "memory",
                 "outputs", "timeout", "what")  # fmt: skip

    def __init__(
        self,
        what: str,
        batch: _native.Batch,
        outputs: Any,
        memory: Sequence[torch.Tensor],
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
        device: torch.device | None,
        timeout: float | None,
        line: Line,
    ) -> None:
        self.what = what
        self.batch = batch
        self.outputs = outputs
        self.memory = memory
        self.copies = copies
        self.device = device
        self.timeout = timeout
        self.line = line
        self._over = False
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        if device is not None:
            # Whoever waits has a stream wait.
            _native.enqueue_results_of_batches([(batch, None)])

    @property
    def is_finished(self) -> bool:
        """Whether somebody has waited for the result, and it is there."""
        return self._over

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
        error = WaitTimeoutError(
            f"{self.what} of torch.distributed is not done after {timeout or 0:g} s. It goes on: "
            "leave its tensors alone. Look for a rank that has not made this call, or give "
            "init_process_group or new_group a longer timeout"
        )
        error.waited_s = timeout or 0
        return error


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

    def __init__(self, outputs: Any, line: Line) -> None:
        super().__init__()
        self._outputs = outputs
        self._line = line

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
        return outputs_in_order(self._outputs, self._line)


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


def done(outputs: Any, line: Line) -> Any:
    """The work object of what needs no exchange."""
    if _KEEPS_PYTHON_WORKS:
        return _Done(outputs, line)
    return c10d._create_work_from_future(outputs_in_order(outputs, line))


class _Works(c10d.Work):
    """Several works that are waited for as one."""

    def __init__(self, works: list[Any], outputs: Any) -> None:
        super().__init__()
        self._works, self._outputs = works, outputs

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        outputs = self._outputs
        futures = [work.get_future() for work in self._works]
        return torch.futures.collect_all(futures).then(lambda _: outputs)


def all_of(works: list[Any], outputs: Any) -> Any:
    """The work object of several, which together are one call."""
    return works[0] if len(works) == 1 else _Works(works, outputs)
