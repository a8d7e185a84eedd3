"""Ranks of which one is slow for some steps, and sums that show whose contributions are in them."""

from __future__ import annotations

import time
from typing import Any

RANKS = 3
STEPS = 12
#: The first rounds of a tensor wait for all.
WHOLE = 4
#: Each rank has a digit of its own in what is summed: of which step its contribution is.
BASE = 32


def linger(rank: int, step: int) -> None:
    """What a rank does besides at this step."""
    time.sleep(0.3 if rank == 1 and step in (6, 7, 8) else 0.01)


def contribution(rank: int, step: int) -> float:
    """What a rank has in a sum of this step."""
    return float((step + 1) * BASE**rank)


def digits(total: Any) -> list[int]:
    """By rank, the step behind the one whose contribution is in a sum; 0 where there is none."""
    return [int(total) // BASE**rank % BASE for rank in range(RANKS)]
