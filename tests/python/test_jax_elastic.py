"""Elastic jobs of JAX: a rank dies, and the other goes on as if alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="JAX is not installed")

import jax.numpy as jnp

import byteps.jax as bps
from byteps.errors import ConfigError
from test_failures import launch
from test_same_network import ENVIRONMENT, SECONDS

PROGRAM = Path(__file__).with_name("jax_elastic.py")


@pytest.mark.parametrize("mode", ["redo", "shrink"])
def test_goes_on_alone(mode):
    options = ["--elastic", mode, "--min-workers", "1"]
    program = [sys.executable, str(PROGRAM), mode]
    # Ranks of one host sum among themselves otherwise, and the loss of one forms the job again.
    environment = ENVIRONMENT | {"BPS_LOCAL_REDUCE": "0"}
    result = launch([*options, *program], timeout=SECONDS, environment=environment)
    assert result.stdout.count("went on alone") == 1, result.stdout[-8000:]
    assert result.returncode == 0, result.stdout[-8000:]


def test_a_state_keeps_copies_and_takes_them_back():
    params = {"w": jnp.arange(3.0), "none": None}
    state = bps.elastic.JaxState(params=params, step=1, seen=[1])
    state.params["w"].delete()
    state.params = {"w": jnp.zeros(3), "none": None}
    state.step, state.other = 2, 5
    state.seen.append(2)
    for _ in range(2):
        state.restore()
        assert state.params["w"].tolist() == [0.0, 1.0, 2.0] and state.params["none"] is None
        assert (state.step, state.seen, state.other) == (1, [1], 5)
        state.params["w"].delete()
    with pytest.raises(ConfigError, match="no array was passed"):
        bps.elastic.JaxState(step=0)
