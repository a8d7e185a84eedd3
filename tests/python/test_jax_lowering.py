"""What byteps.jax refuses before a program runs, and what it makes of one: no job is needed."""

from __future__ import annotations

import importlib.metadata

import pytest

pytest.importorskip("jax", reason="JAX is not installed")

import jax
import jax.numpy as jnp

import byteps.jax as bps
from byteps.errors import ConfigError, TensorError


def test_other_releases_are_refused(monkeypatch):
    from byteps.jax import _ffi

    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.4.37")
    with pytest.raises(ConfigError, match=r"needs jaxlib 0\.4\.38 or later"):
        _ffi._load()
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "soon")
    with pytest.raises(ConfigError, match="which is no release"):
        _ffi._load()
    monkeypatch.undo()
    monkeypatch.setattr(_ffi._native, "xla_version", lambda: (0, 99, False))
    with pytest.raises(ConfigError, match=r"version 0\.99 of XLA's interface"):
        _ffi.check_version()


def test_arrays_elsewhere_are_refused():
    class Device:
        platform = "tpu"

    class Array:
        is_fully_addressable = True

        def devices(self):
            return {Device()}

    from byteps.jax import _arrays

    with pytest.raises(TensorError, match=r"device of kind 'tpu': set JAX_PLATFORMS=cpu"):
        _arrays.gpu_of(Array(), _arrays.How("x", "sum", 0, 0))
    traced = jax.jit(lambda x: bps.push_pull(x, name="x")).trace(jnp.ones(3))
    with pytest.raises(TensorError, match=r"push_pull of 'x': byteps.jax sends arrays from host"):
        traced.lower(lowering_platforms=("tpu",))


def test_a_program_for_gpus_exchanges_arrays_in_their_places():
    tree = {"a": jnp.ones(3), "b": jnp.ones((2, 2))}
    traced = jax.jit(lambda tree: bps.push_pull(tree, name="x")).trace(tree)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    pushes = [line for line in text.splitlines() if "@byteps_push_on_gpu(" in line]
    pull = next(line for line in text.splitlines() if "@byteps_pull_on_gpu(" in line)
    alias = "output_operand_alias<output_tuple_indices = [0], operand_index = 0"
    assert len(pushes) == 2 and "output_operand_alias" not in pull
    for push in pushes:
        assert alias in push
        # The pull takes what the push has returned in the array's place.
        result = push.split(":2 =")[0].strip()
        assert f"{result}#0" in pull and f"{result}#1" in pull
