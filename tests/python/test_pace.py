"""How CrossBarrier finds out whether steps that overlap are the faster ones: by a clock that is
told the time."""

from __future__ import annotations

import pytest

from byteps.torch import _pace
from byteps.torch._pace import Pace

AT_FIRST = _pace._STEPS_AT_FIRST
WINDOW = _pace._STEPS_OF_A_WINDOW
TRIAL = _pace._STEPS_OF_A_TRIAL


class Clock:
    """Its moments come when `reached` says so, as those of a stream do."""

    def __init__(self):
        self.now = 0.0
        self.reached = float("inf")

    def mark(self):
        return Moment(self, self.now)


class Moment:
    def __init__(self, clock, at):
        self.clock = clock
        self.at = at

    def since(self, earlier):
        return None if self.at > self.clock.reached else self.at - earlier.at


class Training:
    """Steps that take as long as their way does."""

    def __init__(self, overlapping, whole):
        self.clock = Clock()
        self.pace = Pace(self.clock.mark)
        self.took = {True: overlapping, False: whole}

    def steps(self, count):
        """Which of these steps overlapped."""
        ways = []
        for _ in range(count):
            ways.append(self.pace.advance())
            self.clock.now += self.took[ways[-1]]
        return ways


A_TRIAL = [True] * WINDOW + [False] * WINDOW + [True] * WINDOW + [False] * WINDOW


@pytest.mark.parametrize(("overlapping", "whole"), [(4.0, 5.0), (5.0, 4.0), (4.0, 4.0)])
def test_takes_the_faster_one(overlapping, whole):
    training = Training(overlapping, whole)
    assert training.steps(AT_FIRST) == [True] * AT_FIRST
    assert training.steps(TRIAL) == A_TRIAL
    assert not training.pace.is_found, "the last step is not over"
    assert training.steps(100) == [overlapping <= whole] * 100
    assert training.pace.is_found


def test_outliers_do_not_count():
    """A step that saves a checkpoint, or the first one behind the other way, in either way."""
    training = Training(4.0, 5.0)
    training.steps(AT_FIRST)
    for number in range(TRIAL):
        training.steps(1)
        if number % WINDOW in (0, 3) and A_TRIAL[number]:
            training.clock.now += 1000.0
    assert training.steps(1) == [True]


def test_tries_again():
    training = Training(4.0, 5.0)
    assert training.steps(AT_FIRST + _pace._STEPS_BETWEEN)[-1] is True
    # From now on the other one is faster: by and by it is the other one that is taken.
    training.took = {True: 5.0, False: 4.0}
    ways = training.steps(TRIAL + 10)
    assert ways[-1] is False
    # No more than one trial in so many steps.
    later = training.steps(2 * _pace._STEPS_BETWEEN)
    assert later.count(True) == 2 * (TRIAL // 2)


def test_says_when_steps_are_whole_for_a_while():
    """So that nobody needs to know which modules run, except before a step that overlaps."""
    training = Training(5.0, 4.0)
    known = []
    for _ in range(AT_FIRST + 2 * _pace._STEPS_BETWEEN):
        # As it was during the forward and the backward pass.
        was_settled = training.pace.is_settled
        known.append(was_settled)
        assert not (training.steps(1) == [True] and was_settled)
    assert known.count(False) < 3 * (AT_FIRST + TRIAL)
    overlapping = Training(4.0, 5.0)
    for _ in range(AT_FIRST + TRIAL + 20):
        overlapping.steps(1)
        assert not overlapping.pace.is_settled


def test_steps_that_cannot_overlap_begin_a_trial_anew():
    training = Training(4.0, 5.0)
    training.steps(AT_FIRST + 2 * WINDOW)
    training.pace.interrupt()
    assert training.steps(TRIAL) == A_TRIAL
    # Where each second step is such a one nothing is ever found, and all others overlap.
    training = Training(5.0, 4.0)
    for _ in range(200):
        assert training.steps(1) == [True]
        training.pace.interrupt()
    assert not training.pace.is_found


def test_waits_for_a_stream_that_is_behind():
    training = Training(5.0, 4.0)
    training.steps(AT_FIRST)
    training.clock.reached = training.clock.now
    training.steps(TRIAL + 20)
    assert not training.pace.is_found
    assert len(training.pace._marks) == TRIAL + 1, "no more is measured meanwhile"
    training.clock.reached = float("inf")
    assert training.steps(2) == [False, False]
    assert training.pace.is_found and not training.pace._marks
