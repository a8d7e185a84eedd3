"""Elastic jobs of Keras and TensorFlow: a rank dies, and the other goes on as if alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from test_failures import launch
from test_same_network import ENVIRONMENT, SECONDS, interpreter, on_demand

PROGRAM = Path(__file__).with_name("keras_elastic.py")


@pytest.mark.parametrize(
    "framework", ["tensorflow", "keras-tensorflow", "keras-jax", "keras-torch"]
)
def test_goes_on_alone(framework):
    if framework in ("keras-jax", "keras-torch"):
        on_demand()
    program = [interpreter(framework), str(PROGRAM), framework]
    options = ["--elastic", "redo", "--min-workers", "1"]
    result = launch([*options, *program], timeout=SECONDS, environment=ENVIRONMENT)
    assert result.stdout.count("went on alone") == 1, result.stdout[-8000:]
    assert result.returncode == 0, result.stdout[-8000:]
