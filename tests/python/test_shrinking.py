"""Who is in the results of a job that goes on without a dead rank, in frameworks other than torch:
``test_shrink.py`` is of torch."""

from __future__ import annotations

from pathlib import Path

import pytest

import byteps.common
from test_failures import launch
from test_same_network import ENVIRONMENT, SECONDS, interpreter, on_demand

PROGRAM = Path(__file__).with_name("shrinking.py")


@pytest.mark.parametrize(
    "framework", ["jax", "tensorflow", "mxnet", "keras-tensorflow", "keras-jax", "keras-torch"]
)
def test_the_others_know_who_is_left(framework):
    if framework in ("keras-jax", "keras-torch"):
        on_demand()
    program = [interpreter(framework), str(PROGRAM), framework]
    options = ["--elastic", "shrink", "--min-workers", "2"]
    result = launch([*options, *program], workers=3, timeout=SECONDS, environment=ENVIRONMENT)
    said = result.stdout.count("went on without the rank that died")
    assert said == 2 and "2 ranks of 3 go on without rank 1" in result.stdout, result.stdout[-8000:]
    assert result.returncode == 0 and "epoch 2" not in result.stdout, result.stdout[-8000:]


def alone():
    byteps.common.init()
    return byteps.common.live_ranks()


def test_all_live_where_nobody_has_died(job):
    assert job.run(alone) == [list(range(job.size))] * job.size
