"""How many rounds there were since the last step, which the ranks compare."""

from __future__ import annotations

from typing import Any

import torch

from byteps.errors import UsageError
from byteps.torch import ops

# Larger than the priority of any gradient.
_URGENT = 1 << 30


class Rounds:
    """The number of the current round, which is sent along with its gradients.

    If one rank runs a backward pass more than the others, its round would meet their next one. The
    numbers then add up to something else. A second number tells whether any rank has news about its
    gradients, which all ranks have to hear before they can end the round. A third counts the ranks:
    those that have joined send zeros.
    """

    def __init__(self, prefix: str, process_set: Any) -> None:
        self._name, self._process_set = f"{prefix}round", process_set
        self.number = 0
        self._told: torch.Tensor | None = None
        self._handle: int | None = None

    def forget(self) -> None:
        """The job is over, and nothing is under way any more."""
        self.number, self._told, self._handle = 0, None, None

    def send(self, size: int, news: bool) -> None:
        """A round of so many ranks has begun; ``news`` of any is what :meth:`wait` tells all."""
        self.number += 1
        if size == 1:
            return
        self._told = torch.tensor([self.number, news, 1], dtype=torch.int64, device="cpu")
        # Ahead of the gradients that wait for the line: backward() waits for this as well.
        self._handle = ops.push_pull_async_inplace(
            self._told, False, self._name, priority=_URGENT, process_set=self._process_set
        )

    def wait(self) -> bool:
        """Waits for the numbers of all ranks; whether one of them has news."""
        if self._handle is None or self._told is None:
            return False
        ops.synchronize(self._handle)
        self._handle = None
        return bool(self._told[1])

    def check(self) -> None:
        """Raises if the ranks are not in the same round."""
        if self._told is None:
            return
        (told, _, ranks), self._told = self._told.tolist(), None
        if told != self.number * ranks:
            raise UsageError(
                f"the ranks have called backward() unequally often since their last step(): this "
                f"one {self.number} times, all {ranks} together {told} times; "
                "every rank must run the same backward passes before it calls step()"
            )
