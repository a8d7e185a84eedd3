"""Timelines from Python: by variables, at run time, and merged into one file."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from cluster import Cluster
from conftest import initialise

STAGES = ["QUEUE", "PUSH", "SUM", "PULL", "DONE"]


def push(name, rounds):
    import torch

    import byteps.torch as bps

    for _ in range(rounds):
        bps.push_pull(torch.ones(1000), name=name)


def slices(trace):
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def names(trace):
    return {event["name"] for event in slices(trace)}


def merged(folder):
    """The merged timeline, made by the command."""
    command = [sys.executable, "-m", "byteps.timeline", "merge", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result
    assert result.stdout.strip() == str(folder / "timeline.json")
    return json.loads((folder / "timeline.json").read_text())


def test_by_variables(tmp_path):
    """The servers write to the same folder: a job of bpslaunch --local has a key."""
    folder = tmp_path / "trace"
    window = {"BYTEPS_TRACE_START_STEP": "2", "BYTEPS_TRACE_END_STEP": "3"}
    environment = {"BYTEPS_TRACE_ON": "1", "BYTEPS_TRACE_DIR": str(folder)} | window
    with Cluster(2, environment=environment) as job:
        job.run(initialise, timeout=120)
        job.run(push, "x", 5)
    trace = merged(folder)
    assert set(trace["metadata"]) == {"0", "1", "server-0"}
    for pid in (1, 2):
        rounds = {
            (event["name"], event["args"]["round"])
            for event in slices(trace)
            if event["pid"] == pid and event["args"].get("name") == "Comm.byteps.x"
        }
        assert rounds == {
            (f"Comm.byteps.x{stage}", step)
            for stage in ["", *(f".{stage}" for stage in STAGES)]
            for step in (2, 3)
        }
    assert {"sum", "land", "publish"} <= names(trace)
    tracks = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert any("core 0 key" in track and "byteps.x part 1 of 1" in track for track in tracks)
    processes = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert processes == {"rank 0", "rank 1", "server 0"}


def record(folder):
    import byteps.torch as bps
    from byteps.errors import BytePSError

    push("timeline.before", 1)
    bps.start_timeline(folder)
    with pytest.raises(BytePSError, match="stop it first"):
        bps.start_timeline(folder)
    bps.barrier(30)
    push("timeline.during", 3)
    bps.stop_timeline()
    push("timeline.after", 1)
    bps.stop_timeline()
    return bps.rank()


def test_at_run_time(pair, tmp_path):
    pair.run(record, tmp_path / "trace")
    for rank in (0, 1):
        trace = json.loads((tmp_path / "trace" / str(rank) / "comm.json").read_text())
        found = names(trace)
        assert {f"Comm.byteps.timeline.during.{stage}" for stage in STAGES} <= found
        assert not any("before" in name or "after" in name for name in found)
    assert (tmp_path / "trace" / "server-0" / "comm.json").exists()


def start_nowhere():
    import byteps.torch as bps
    from byteps.errors import BytePSError

    with pytest.raises(BytePSError, match="can't be written"):
        bps.start_timeline("/proc/nothing/here")


def test_a_folder_that_cannot_be_written(pair):
    pair.run(start_nowhere)


def test_what_cannot_be_merged(tmp_path):
    from byteps.timeline import main, merge

    with pytest.raises(FileNotFoundError, match="BYTEPS_TRACE_ON"):
        merge(tmp_path)
    assert main(["merge", str(tmp_path)]) == 1
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "comm.json").write_text('{"traceEvents": [')
    with pytest.raises(ValueError, match="is no timeline"):
        merge(tmp_path)
    event = {"ph": "X", "pid": 1, "tid": 1, "name": "x", "ts": 1, "dur": 1, "args": {}}
    for folder in ("0", "1"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "comm.json").write_text(json.dumps({"traceEvents": [event]}))
    with pytest.raises(ValueError, match="of the same process"):
        merge(tmp_path)
