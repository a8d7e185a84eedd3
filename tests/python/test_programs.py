"""The programs of the wheel, BytePS's way to start them, and the examples."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import clean_environment
from test_failures import address, launch

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ["bpslaunch", "bps-server", "bps-scheduler"]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_programs_are_installed(program, flag):
    path = Path(sys.executable).parent / program
    result = subprocess.run([path, flag], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0 and program in result.stdout, result


def test_as_byteps_starts_it(tmp_path):
    """One scheduler, one server, two worker hosts, by DMLC variables alone."""
    job = address() | {"DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1"}
    worker = (
        "import torch, byteps.torch as bps\n"
        "bps.init()\n"
        "x = torch.full((1000,), float(bps.rank()))\n"
        "total = bps.push_pull(x, average=False, name='x')[0].item()\n"
        "print('result', bps.rank(), bps.size(), total)\n"
        "bps.shutdown()\n"
    )
    commands = {
        "scheduler": ([sys.executable, "-c", "import byteps.server"], {"DMLC_ROLE": "scheduler"}),
        "server": ([sys.executable, "-m", "byteps.server"], {"DMLC_ROLE": "server"}),
        "worker 0": (
            [sys.executable, "-c", worker],
            {"DMLC_ROLE": "worker", "DMLC_WORKER_ID": "0"},
        ),
        "worker 1": (
            [sys.executable, "-c", worker],
            {"DMLC_ROLE": "worker", "DMLC_WORKER_ID": "1"},
        ),
    }
    processes, logs = {}, {}
    try:
        for name, (command, role) in commands.items():
            logs[name] = tmp_path / name
            with logs[name].open("wb") as log:
                processes[name] = subprocess.Popen(
                    command,
                    env=clean_environment() | job | role,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
        for name, process in processes.items():
            assert process.wait(60) == 0, (name, logs[name].read_text())
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    for rank in (0, 1):
        assert f"result {rank} 2 1.0" in logs[f"worker {rank}"].read_text()


def test_train_digits(tmp_path):
    report = tmp_path / "report"
    script = ROOT / "python/examples/train_digits.py"
    result = launch([sys.executable, str(script), "--report", str(report)], timeout=180)
    assert result.returncode == 0, result.stdout
    assert float(report.read_text().removeprefix("accuracy=")) >= 0.96
    assert "difference from single-process training" in result.stdout


def test_compression():
    script = ROOT / "python/examples/compression.py"
    command = [sys.executable, str(script)]
    result = launch(command, timeout=400, environment={"BPS_LOCAL_REDUCE": "0"})
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("the same bits on all ranks") == 11


def test_compression_of_a_transformers_gradients():
    if os.environ.get("TEST_FRAMEWORKS") != "all":
        pytest.skip("two minutes of training, on demand: tests/run --frameworks all")
    script = ROOT / "python/examples/compression_text.py"
    result = launch(
        [sys.executable, str(script)], timeout=600, environment={"BPS_LOCAL_REDUCE": "0"}
    )
    assert result.returncode == 0, result.stdout
    accuracies = [float(found) for found in re.findall(r"accuracy ([0-9.]+)", result.stdout)]
    # What follows each character alone gives no more than 0.34.
    assert len(accuracies) == 6 and min(accuracies) > 0.45, result.stdout


def test_asynchronous():
    script = ROOT / "python/examples/asynchronous.py"
    command = [sys.executable, str(script), "--seconds", "5", "--accuracy", "0.85"]
    result = launch(command, timeout=120, environment={"BYTEPS_ENABLE_ASYNC": "1"})
    assert result.returncode == 0, result.stdout
    assert "steps of each rank" in result.stdout


def test_tuning(tmp_path):
    script, found = ROOT / "python/examples/tuning.py", tmp_path / "tuned.env"
    variables = {
        "BYTEPS_FORCE_DISTRIBUTED": "1",
        "BYTEPS_PARTITION_BYTES": "4096",
        "BYTEPS_SCHEDULING_CREDIT": "1",
        "BPS_TUNE_CREDIT": "1",
        "BPS_TUNE_PARTITION": "1",
        "BPS_TUNE_FILE": str(found),
    }
    command = [sys.executable, str(script), "--elements", str(1 << 18)]
    result = launch([*command, "--steps", "200"], timeout=120, environment=variables)
    assert result.returncode == 0, result.stdout
    assert "every sum was right" in result.stdout and "tuned after " in result.stdout
    # The next job takes over what was found.
    lines = dict(line.split("=", 1) for line in found.read_text().splitlines() if "=" in line)
    assert int(lines["BYTEPS_PARTITION_BYTES"]) > 4096, lines
    variables = {"BYTEPS_FORCE_DISTRIBUTED": "1"} | lines
    result = launch([*command, "--steps", "3"], timeout=120, environment=variables)
    assert result.returncode == 0, result.stdout
    assert "tuning: trial" not in result.stdout


def test_server_optimizer():
    script = ROOT / "python/examples/server_optimizer.py"
    command = [sys.executable, str(script), "--steps", "120", "--accuracy", "0.9"]
    result = launch(command, timeout=120, environment={"BYTEPS_FORCE_DISTRIBUTED": "1"})
    assert result.returncode == 0, result.stdout
    assert "state in a rank's optimizer: 0 parameters" in result.stdout


def test_synthetic_benchmark():
    script = ROOT / "python/examples/synthetic_benchmark.py"
    options = "--no-cuda --model small --batch-size 4 --num-warmup-batches 1 --num-iters 2".split()
    command = [sys.executable, str(script), *options, "--num-batches-per-iter", "2"]
    command += ["--cross-barrier", "--fp16-pushpull"]
    result = launch(command, timeout=180)
    assert result.returncode == 0, result.stdout
    each = re.search(r"Img/sec per CPU: ([0-9.]+) \+-", result.stdout)
    both = re.search(r"Total img/sec on 2 CPU\(s\): ([0-9.]+) \+-", result.stdout)
    assert each and both, result.stdout
    assert float(both[1]) == pytest.approx(2 * float(each[1]), abs=0.2) and float(each[1]) > 0


def test_mixed_precision():
    script = ROOT / "python/examples/mixed_precision.py"
    command = [sys.executable, str(script), "--no-cuda", "--precision", "float16"]
    result = launch(command, timeout=180)
    assert result.returncode == 0, result.stdout
    assert "difference between the ranks' parameters: 0.0" in result.stdout
    # The scale that it starts with overflows, so steps were skipped.
    assert "scale 1.07374e+09" not in result.stdout


@pytest.mark.parametrize(
    "script",
    [
        "python/quickstart",
        "python/environment",
        "python/wheel",
        "tests/wheel/root",
        "tests/aarch64/run",
    ],
)
def test_scripts_are_sound(script):
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)
