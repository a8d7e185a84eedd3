"""Ranks of several frameworks in one job sum what they declare alike; all else is refused."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from test_failures import launch
from test_same_network import ENVIRONMENT, ROOT, SECONDS

PROGRAM = Path(__file__).with_name("mixed_frameworks.py")


@pytest.mark.parametrize("local", ["0", "1"], ids=["through servers", "within the host"])
def test_ranks_of_all_frameworks_sum_one_array(local):
    frameworks = ["torch", "jax", "tensorflow"]
    frameworks = [name for name in frameworks if importlib.util.find_spec(name) is not None]
    mxnet = ROOT / "target/mxnet/bin/python"
    if mxnet.exists():
        frameworks.insert(1, f"mxnet={mxnet}")
    if len(frameworks) < 2:
        pytest.skip("there are no two frameworks here: python/environment installs them")
    command = [sys.executable, str(PROGRAM), *frameworks]
    environment = ENVIRONMENT | {"BPS_LOCAL_REDUCE": local}
    result = launch(command, len(frameworks), SECONDS, environment)
    assert result.returncode == 0, result.stdout[-8000:]
    assert result.stdout.count("all is right") == len(frameworks), result.stdout[-8000:]
