"""The end of a backward pass, for all whose gradients it has completed."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Protocol

import torch


class Participant(Protocol):
    """Owns gradients that a backward pass completes."""

    # Counts up in the order of creation, which all ranks share.
    number: int

    def send_at_end(self) -> None:
        """The pass is over: sends what the hooks have not sent."""

    def wait_at_end(self) -> None:
        """Waits for what was sent."""

    def pause(self) -> bool:
        """An inner pass is over: sends what is ready; returns whether that was everything."""


# The participants of each running pass, by the number of its graph task in autograd.
_running: dict[int, list[Participant]] = {}

# Stands in the stack of a pass that runs inside a node of another.
_NODE = torch.autograd.function.BackwardCFunction.apply.__code__


def join(participant: Participant) -> None:
    """Called in a hook, once a pass: `participant` wants to know when the pass is over."""
    task = torch._C._current_graph_task_id()
    if task not in _running:
        _running[task] = []
        torch.autograd.Variable._execution_engine.queue_callback(lambda: _end(task))
    _running[task].append(participant)


def leave(participant: Participant) -> None:
    """Forgets that `participant` joined: the pass may have failed, and then its end never comes."""
    for participants in _running.values():
        if participant in participants:
            participants.remove(participant)


def _end(task: int) -> None:
    participants = sorted(_running.pop(task), key=lambda participant: participant.number)
    for stale in [task for task, joined in _running.items() if not joined]:
        del _running[stale]
    if _is_inner():
        waiting = [participant for participant in participants if participant.pause()]
    else:
        # A rank may have only some of the participants, so all send before the first one waits.
        for participant in participants:
            participant.send_at_end()
        waiting = participants
    for participant in waiting:
        participant.wait_at_end()


def _is_inner() -> bool:
    """Whether the pass that ends runs inside another one, as reentrant checkpoints do."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _NODE:
            return True
        frame = frame.f_back
    return False
