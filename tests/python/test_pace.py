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


A_TRIAL = ([True] * WINDOW + [False] * WINDOW) * 8


@pytest.mark.parametrize(
    ("overlapping", "whole"), [(4.0, 5.0), (5.0, 4.0), (4.0, 4.0), (4.96, 5.0), (4.94, 5.0)]
)
def test_takes_the_faster_one(overlapping, whole):
    training = Training(overlapping, whole)
    assert training.steps(AT_FIRST) == [True] * AT_FIRST
    assert training.steps(TRIAL) == A_TRIAL
    assert not training.pace.is_found, "the last step is not over"
    assert training.steps(100) == [overlapping < 0.99 * whole] * 100
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


def test_says_before_a_step_that_it_may_overlap():
    """So that nobody needs to know which modules run, except before a step that overlaps."""
    training = Training(5.0, 4.0)
    said = []
    for _ in range(AT_FIRST + 2 * _pace._STEPS_BETWEEN):
        # As it was during the forward and the backward pass.
        said.append(training.pace.may_overlap)
        assert said[-1] or training.steps(1) == [False]
        if said[-1]:
            training.steps(1)
    # What decides a trial is not known before it.
    assert said.count(True) == AT_FIRST + 2 * (TRIAL // 2 + 1)
    # Whole steps of a trial are as those behind it are.
    assert said[AT_FIRST : AT_FIRST + TRIAL] == A_TRIAL
    overlapping = Training(4.0, 5.0)
    overlapping.steps(AT_FIRST + TRIAL + 1)
    for _ in range(20):
        assert overlapping.pace.may_overlap
        overlapping.steps(1)


def test_whole_steps_are_measured_without_what_comes_before_one_that_overlaps():
    """Hooks at each module, and putting them there: that is behind the last whole one."""
    training = Training(4.5, 4.0)
    training.steps(AT_FIRST)
    for number in range(TRIAL):
        training.steps(1)
        if not A_TRIAL[number]:
            # Half of those that count took longer, and so did the last one.
            training.clock.now += {1: 0.6, 2: 0.6, WINDOW - 1: 1.0}.get(number % WINDOW, 0.0)
    assert training.steps(1) == [False]


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


def test_steps_that_never_overlap_are_not_expected_to():
    """As those of a program that clips gradients: the first other one is whole as well."""
    training = Training(4.0, 5.0)
    for interruptions in (AT_FIRST + TRIAL + 1, WINDOW, 0):
        training.steps(interruptions)
        expected = training.pace.may_overlap
        training.pace.interrupt()
        assert training.pace.may_overlap or not expected, "one alone says nothing"
        for _ in range(5):
            training.pace.interrupt()
            assert not training.pace.may_overlap
        assert training.steps(1) == [False]
        assert training.pace.may_overlap and training.steps(1) == [True]


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
