"""perf/hooks.py, which measures what hooks cost: its figures agree, and what it times is right."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cluster import clean_environment

PERF = Path(__file__).resolve().parents[2] / "perf"
sys.path.insert(0, str(PERF))

import hooks
from beside_gloo import join

TINY = "--layers 3 --size 256 --rounds 3 --steps 2 --json"


@pytest.mark.parametrize("workers", [1, 2])
def test_figures_agree_with_each_other(workers):
    launcher = [sys.executable, "-m", "byteps.launch", "--no-prefix", "--local", str(workers)]
    result = subprocess.run(
        [*launcher, "--servers", "0", sys.executable, PERF / "hooks.py", *TINY.split()],
        capture_output=True, text=True, timeout=120, check=False, env=clean_environment(),
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    rows = {(row["work"], row["way"]): row for row in map(json.loads, lines)}
    assert set(rows) == {(work, way) for work in hooks.WORKS for way in hooks.WAYS}
    assert len(lines) == len(rows), "a row stands twice"
    for (work, way), row in rows.items():
        assert (row["parameters"], row["size_bytes"], row["workers"]) == (6, 256, workers), row
        assert 0 < row["ms_p50"] <= row["ms_p99"], row
        assert row["ms_p50"] <= rows["step", way]["ms_p50"], "a part is longer than the step"
        added = row["ms_p50"] - rows[work, "alone"]["ms_p50"]
        assert row["us_per_parameter"] == pytest.approx(added * 1e3 / 6), row
        assert 0 <= row["gc_ms"] <= rows["step", way]["gc_ms"], row
        assert row["peer_ms_p50"] == rows[work, "ddp"]["ms_p50"], row
        assert row["ratio"] == pytest.approx(row["peer_ms_p50"] / row["ms_p50"]), row


def trains_alike():
    """Every way but `alone` yields the same parameters; the script names one that does not."""
    join()
    try:
        work = hooks.chain(3, 256)
        collector = hooks.Collector()
        trained = {way: hooks.Trained(way, work, collector) for way in hooks.WAYS}
        gc.collect()
        assert collector.seconds > 0
        before = [param.detach().clone() for param in work.model.parameters()]
        for one in trained.values():
            one.train(3)
            assert not any(map(torch.equal, before, one.training.raw.parameters()))
        hooks.check(trained)
        with torch.no_grad():
            next(trained["each"].training.raw.parameters()).add_(0.01)
        with pytest.raises(AssertionError, match="DistributedDataParallel: each"):
            hooks.check(trained)
        trained["ours"] = trained["alone"]
        with pytest.raises(AssertionError, match="DistributedDataParallel: ours"):
            hooks.check(trained)
    finally:
        dist.destroy_process_group()


def test_all_ways_train_alike(pair):
    pair.run(trains_alike)
