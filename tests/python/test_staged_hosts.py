"""Ranks of torch on staged hosts, as `bps-perf gpu` measures them, with CPUs in place of GPUs.

The Rust tests try it too; here the environment that has torch is known to be there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "target/debug/bps-perf"
TINY = (
    "gpu --device cpu --hosts 2 --servers 1 --cores 1 --rate 500mbit --rounds 2 --steps 2 --batch 2 "
    "--size 64K --model small --losses small --loss-steps 4 --loss-runs 1 --json"
)


def test_ranks_of_torch_take_turns_on_staged_hosts():
    if not PROGRAM.exists():
        pytest.skip("bps-perf is not built: cargo build -p bps-perf -p bps-server")
    result = subprocess.run(
        [PROGRAM, *TINY.split(), "--python", sys.executable],
        capture_output=True, text=True, timeout=240, check=False, cwd=ROOT,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    if result.stdout.startswith("skipped: "):
        pytest.skip(result.stdout.removeprefix("skipped: ").strip())
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    found = {(row["work"], row.get("way")): row for row in rows}
    assert set(found) == {
        ("sum", None), ("small", "ddp"), ("small", "ours"), ("losses of small", "ours")
    }, rows  # fmt: skip
    assert 0 < found["sum", None]["algbw_gbs"] < 0.0625, "faster than its link"
    step = found["small", "ours"]
    assert step["ratio"] == pytest.approx(step["peer_ms_p50"] / step["ms_p50"]), step
    assert step["parameters"] == 3962, "another model than gpu_rank.py has"
    losses = found["losses of small", "ours"]
    assert abs(losses["last_loss"] - losses["peer_last_loss"]) < 1e-4, losses
