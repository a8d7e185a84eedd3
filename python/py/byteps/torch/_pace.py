"""Whether steps that overlap the next forward pass are the faster ones, as is tried in training.

A step by parts costs the host more than one of all parameters: it asks each module, and launches
kernels for each part. What it gains is the time that the last results are on their way. Which of
the two is more depends on the model, on the line and on the processors, and on nothing that could
be told before.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from byteps.torch import _gpu

# Steps that are not measured: the first ones set up what later ones use.
_STEPS_AT_FIRST = 3
# The trial: so many steps in each way, both ways in turn, as a machine's speed may change. On some
# machines one step takes half as long again as the next: two windows of each way said little.
_STEPS_OF_A_WINDOW = 6
_WINDOWS = (True, False) * 8
_STEPS_OF_A_TRIAL = len(_WINDOWS) * _STEPS_OF_A_WINDOW
# Steps from one trial to the next.
_STEPS_BETWEEN = 2000
# So many steps in a row that could not overlap, and the next ones are taken to be such, too.
_INTERRUPTIONS = 2
# Steps that overlap have to be so much shorter: the others leave more of the processors alone.
_WORTH_IT = 0.99


def _is_in_trial(number: int) -> bool:
    return 0 <= number < _STEPS_OF_A_TRIAL


class Mark(Protocol):
    """A moment of a training."""

    def since(self, earlier: Mark) -> float | None:
        """Milliseconds from an earlier one; None if the later one has not come yet."""
        ...


class _OfHost:
    """When the host came here."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _OfHost)
        return (self._at - earlier._at) * 1e3


def marker(params: Iterable[torch.Tensor]) -> Callable[[], Mark]:
    """What marks a moment: on the GPU of these parameters, if that is where they are.

    A host may be some steps ahead of its GPU, so its own clock would not tell how long these take.
    """
    device = next((param.device for param in params if _gpu.holds(param)), None)
    return _OfHost if device is None else lambda: _gpu.Moment(device)


class Pace:
    """Which way the next step goes: by trials of both, it is the one of the shorter steps."""

    def __init__(self, mark: Callable[[], Mark]) -> None:
        self._mark = mark
        self._marks: list[Mark] = []
        self._number = -_STEPS_AT_FIRST
        # Steps that could not overlap since the last one that could.
        self._interruptions = 0
        # How the next step goes, and whether a trial has said so.
        self.overlaps = True
        self.is_found = False

    def advance(self) -> bool:
        """A step is due that could overlap the next forward pass: whether it should."""
        came_unexpected = self._interruptions >= _INTERRUPTIONS
        self._interruptions = 0
        if came_unexpected:
            return False
        number = self._number
        self._number += 1
        if 0 <= number <= _STEPS_OF_A_TRIAL:
            self._marks.append(self._mark())
        if _is_in_trial(number):
            self.overlaps = _WINDOWS[number // _STEPS_OF_A_WINDOW]
        elif self._marks:
            self._decide()
        elif number >= _STEPS_BETWEEN:
            self._number = 0
        return self.overlaps

    @property
    def may_overlap(self) -> bool:
        """Whether the next step may overlap the forward pass behind it."""
        if self._interruptions >= _INTERRUPTIONS:
            return False
        if _is_in_trial(self._number):
            return _WINDOWS[self._number // _STEPS_OF_A_WINDOW]
        # The next step decides, where none has.
        return self.overlaps or bool(self._marks)

    def interrupt(self) -> None:
        """A step was taken that could not overlap: what a trial has measured tells nothing.

        Whoever clips gradients does so in each step: these are not worth watching who runs.
        """
        self._interruptions += 1
        if self._marks:
            self._marks.clear()
            self._number = 0

    def _decide(self) -> None:
        times = [later.since(mark) for mark, later in itertools.pairwise(self._marks)]
        if None in times:
            return  # The GPU has not come so far: the next step asks again.
        of_way: dict[bool, list[float]] = {True: [], False: []}
        for number, took in enumerate(times):
            window, step = divmod(number, _STEPS_OF_A_WINDOW)
            overlaps = _WINDOWS[window]
            # The first step of a window begins behind one of the other way. Behind the last one
            # that is whole there are hooks in the forward pass, which whole steps do without.
            counts = step > 0 and (overlaps or step < _STEPS_OF_A_WINDOW - 1)
            if took is not None and counts:
                of_way[overlaps].append(took)
        self._marks.clear()
        self.is_found = True
        overlapping, whole = (statistics.median(of_way[overlaps]) for overlaps in (True, False))
        self.overlaps = overlapping < _WORTH_IT * whole
