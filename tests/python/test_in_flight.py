"""Eight exchanges of a step take as long as one in every framework, on one thread of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from test_failures import launch
from test_same_network import ENVIRONMENT, FRAMEWORKS, SECONDS, interpreter, on_demand

PROGRAM = Path(__file__).with_name("in_flight.py")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_eight_take_as_long_as_one(framework):
    python = interpreter(framework)
    if "tensorflow" in framework or framework.startswith("keras"):
        on_demand()
    environment = ENVIRONMENT | {"BPS_STALL_TIMEOUT": "20"}
    result = launch([python, str(PROGRAM), framework], timeout=SECONDS, environment=environment)
    assert result.returncode == 0, result.stdout[-8000:]
    one, eight = map(
        float, re.search(r"one exchange (\S+) ms, eight (\S+) ms", result.stdout).groups()
    )
    assert one >= 200, result.stdout
    assert eight <= 1.15 * one, f"one exchange takes {one} ms, eight {eight} ms"
