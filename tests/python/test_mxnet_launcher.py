"""byteps.mxnet in a script that MXNet's launcher starts once for each role.

It runs where ``test_mxnet.py`` does, and without MXNet's launcher: with what that sets.
"""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

pytest.importorskip("mxnet", reason="MXNet is not installed in this environment")

from cluster import clean_environment

SECONDS = 90
SCRIPT = """
import byteps.mxnet as bps
import mxnet as mx

bps.init()
store = mx.kv.create("byteps")
total = mx.nd.full((1000,), bps.rank() + 1.0)
store.pushpull("total", total)
print("worker", bps.rank(), "of", bps.size(), "has", total.asnumpy().max(), total.asnumpy().min())
{more}
bps.shutdown()
"""
#: As ``launch.py -n 2 -s 1 --launcher local`` numbers the processes.
ROLES = {
    "scheduler": {"DMLC_ROLE": "scheduler"},
    "worker 0": {"DMLC_ROLE": "worker", "DMLC_TASK_ID": "0", "DMLC_JOB_CLUSTER": "local"},
    "worker 1": {"DMLC_ROLE": "worker", "DMLC_TASK_ID": "1", "DMLC_JOB_CLUSTER": "local"},
    "server": {"DMLC_ROLE": "server", "DMLC_TASK_ID": "2", "DMLC_JOB_CLUSTER": "local"},
}


def run(folder, more=""):
    """The status and the output of each process of a job."""
    script = folder / "train.py"
    script.write_text(SCRIPT.format(more=more))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port)}
    job |= {"DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1", "BPS_LOCAL_REDUCE": "0"}
    processes = {}
    try:
        for name, role in ROLES.items():
            with (folder / name).open("wb") as log:
                processes[name] = subprocess.Popen(
                    [sys.executable, str(script)],
                    env=clean_environment() | job | role,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
        statuses = {name: process.wait(SECONDS) for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    return statuses, {name: (folder / name).read_text() for name in ROLES}


def test_every_role_is_the_same_script(tmp_path):
    statuses, said = run(tmp_path)
    assert set(statuses.values()) == {0}, said
    for rank in (0, 1):
        assert f"worker {rank} of 2 has 3.0 3.0" in said[f"worker {rank}"], said
    assert "bps scheduler: " in said["scheduler"] and "bps server: " in said["server"], said
    # There the script ends at its import; and nothing that the launcher sets is called unknown.
    assert not any("has 3.0" in said[role] for role in ("scheduler", "server")), said
    assert not any("not known here" in text for text in said.values()), said


def test_a_failed_worker_fails_all_roles(tmp_path):
    statuses, said = run(tmp_path, "if bps.rank() == 1: raise SystemExit(3)\nbps.barrier()")
    assert statuses.pop("worker 1") == 3, said
    assert all(status != 0 for status in statuses.values()), (statuses, said)
