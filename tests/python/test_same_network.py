"""One small network trains in every framework as in NumPy, with the same bits on all ranks."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

from test_failures import launch

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("same_network.py")
# Importing TensorFlow takes long where tests run side by side.
SECONDS, START_SECONDS = 300, 240
#: Through the servers, which add up in the order in which contributions come.
ENVIRONMENT = {
    "BPS_LOCAL_REDUCE": "0",
    "BPS_START_TIMEOUT": str(START_SECONDS),
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
FRAMEWORKS = [
    *("torch", "jax", "tensorflow", "mxnet"),
    *("keras-tensorflow", "keras-jax", "keras-torch"),
]


def on_demand():
    """Skips what shows less than it takes: an import of each framework by each rank."""
    if os.environ.get("TEST_FRAMEWORKS") != "all":
        pytest.skip("takes minutes, and others show most of it: tests/run --frameworks all")


def interpreter(framework):
    if framework == "mxnet":
        python = ROOT / "target/mxnet/bin/python"
        if not python.exists():
            pytest.skip("MXNet has no environment here: python/environment makes it")
        return str(python)
    for module in framework.split("-"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: python/environment installs it")
    return sys.executable


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_trains_as_in_numpy(framework, ranks):
    if ranks == 2 or framework.startswith("keras"):
        on_demand()
    command = [interpreter(framework), str(PROGRAM), framework]
    result = launch(command, workers=ranks, timeout=SECONDS, environment=ENVIRONMENT)
    assert result.returncode == 0, result.stdout[-8000:]
    digests = re.findall(rf"digest of {ranks} ranks: (\w+)", result.stdout)
    assert len(digests) == ranks and len(set(digests)) == 1, result.stdout[-8000:]
