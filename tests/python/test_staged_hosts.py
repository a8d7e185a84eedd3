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
    "gpu --device cpu --hosts 2 --servers 1 --cores 1 --rate 500mbit --rounds 2 --steps 2 "
    "--batch 2 --size 256K --model small --losses small --loss-steps 4 --loss-runs 1 --json "
    "--ways ddp,ours,group,hook"
)


def test_ranks_of_torch_take_turns_on_staged_hosts(tmp_path):
    if not PROGRAM.exists():
        pytest.skip("bps-perf is not built: cargo build -p bps-perf -p bps-server")
    result = subprocess.run(
        [PROGRAM, *TINY.split(), "--python", sys.executable, "--trace", tmp_path / "timelines"],
        capture_output=True, text=True, timeout=240, check=False, cwd=ROOT,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    if result.stdout.startswith("skipped: "):
        pytest.skip(result.stdout.removeprefix("skipped: ").strip())
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    found = {(row["work"], row.get("way")): row for row in rows}
    ways = ("ours", "group", "hook")
    assert set(found) == {
        ("sum", None), ("small", "ddp"), *(("small", way) for way in ways),
        *(("losses of small", way) for way in ways),
    }, rows  # fmt: skip
    assert found["sum", None]["group_ms_p50"] > 0, "no sum over a group"
    assert 0 < found["sum", None]["algbw_gbs"] < 0.0625, "faster than its link"
    step = found["small", "ours"]
    assert step["ratio"] == pytest.approx(step["peer_ms_p50"] / step["ms_p50"]), step
    assert step["parameters"] == 3962, "another model than gpu_rank.py has"
    for way in ways:
        losses = found["losses of small", way]
        assert abs(losses["last_loss"] - losses["peer_last_loss"]) < 1e-4, losses
    _check_timelines(tmp_path / "timelines", result.stderr)


def _check_timelines(folder: Path, said: str) -> None:
    """One for each thing timed at that rate that uses the engine, with all processes in it."""
    parts = {
        "sum-262144-500mbit": ["collective.262144"],
        "small-fp32-ours-500mbit": ["weight", "bias", "round"],
    }
    buckets = {f"small-fp32-{way}-500mbit" for way in ("group", "hook")}
    assert {path.name for path in folder.iterdir()} == set(parts) | buckets
    for name, tensors in parts.items():
        path = folder / name / "timeline.json"
        assert f"timeline: {path}" in said
        trace = json.loads(path.read_text())
        assert set(trace["metadata"]) == {"0", "1", "server-0"}, name
        names = [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]
        # A sum is one round of five parts. Two steps are three, of which two are timed: of each of
        # six parameters, and of the number of the round.
        rounds = 5 if name.startswith("sum") else 3 * (6 + 1)
        # Before them goes one round of the tensor whose keys the server takes once it records.
        first = f"timeline.{name}."
        assert names.count("sum") == rounds + 1, "the server's"
        for stage in ("QUEUE", "PUSH", "SUM", "PULL"):
            found = [one for one in names if one.endswith(f".{stage}") and first not in one]
            assert len(found) == 2 * rounds, f"{name}: {stage} of two ranks"
            assert all(any(tensor in one for tensor in tensors) for one in found), found


def test_auto_encodes_on_a_slow_line():
    if not PROGRAM.exists():
        pytest.skip("bps-perf is not built: cargo build -p bps-perf -p bps-server")
    words = "cluster --workers 2 --servers 2 --rate 100mbit --size 4M --rounds 8 --json"
    encodings = ["--encoding", "none", "--encoding", "auto"]
    result = subprocess.run(
        [PROGRAM, *words.split(), *encodings],
        capture_output=True, text=True, timeout=240, check=False, cwd=ROOT,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    if result.stdout.startswith("skipped: "):
        pytest.skip(result.stdout.removeprefix("skipped: ").strip())
    rows = {row["encoding"]: row for row in map(json.loads, result.stdout.splitlines())}
    # Without, a round takes the third of a second of its bytes; by int8 less than a third of that,
    # once the line is known.
    assert rows["auto(int8)"]["speed_to_first"] > 2, rows
