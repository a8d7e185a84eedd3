"""The example programs of JAX, TensorFlow, Keras and MXNet, each by the command that its head says.

Each looks by itself whether all ranks end alike, and whether the network has learned. Those of
torch are run by ``test_programs.py`` and others.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from test_failures import launch
from test_same_network import ENVIRONMENT, SECONDS

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "python/examples"
SMALL = "--model small --batch-size 4 --num-warmup-batches 1 --num-iters 2 --num-batches-per-iter 2"
HELD_OUT = r"2 ranks: accuracy 0\.9\d+|2 ranks: accuracy 1\."
RATE = r"Total img/sec on 2 rank\(s\): [1-9]"

#: By program: its arguments, and what it says at its end.
PROGRAMS = {
    "jax/train_digits.py": ("", "largest difference to training in one process"),
    "jax/train_flax.py": ("", HELD_OUT),
    "jax/train_equinox.py": ("", HELD_OUT),
    "keras/train_digits_advanced.py": ("", HELD_OUT),
    "keras/synthetic_benchmark.py": (SMALL, RATE),
    "tensorflow/mirrored_strategy.py": ("", HELD_OUT),
    "tensorflow/synthetic_benchmark.py": (f"{SMALL} --fp16-pushpull", RATE),
    "tensorflow/train_in_a_session.py": ("", HELD_OUT),
    "mxnet/train.py": ("", "difference from single-process training"),
    "mxnet/train_compressed.py": (
        "--compressor onebit --ef vanilla --onebit-scaling",
        "with onebit",
    ),
    "mxnet/train_module.py": ("--network lenet", "on 2 ranks, with Module"),
}
#: What others of the same framework show as well, run by ``tests/run --frameworks all``.
ON_DEMAND = {"keras/synthetic_benchmark.py", "jax/train_equinox.py"}
#: Run by other tests.
ELSEWHERE = {
    "keras/train_digits.py": "test_keras.py",
    "keras/train_images.py": "test_goes_on_from_a_checkpoint",
    "tensorflow/train_digits.py": "test_tensorflow.py",
}


def interpreter(framework):
    """The Python that has it: MXNet's is another one."""
    python = sys.executable
    if framework == "mxnet":
        python = ROOT / "target/mxnet/bin/python"
        if not python.exists():
            pytest.skip("MXNet has no environment here: python/environment makes it")
    return str(python)


def check_modules(python, script):
    """Skips where a module that the program imports is not installed."""
    names = re.findall(r"^(?:import|from) (\w+)", script.read_text(), re.MULTILINE)
    code = "import importlib.util as u, sys\nfor n in sys.argv[1:]:\n  u.find_spec(n) or print(n)"
    done = subprocess.run(
        [python, "-c", code, *names], capture_output=True, text=True, timeout=60, check=True
    )
    if done.stdout:
        pytest.skip(f"not installed: {', '.join(done.stdout.split())}")


def run(program, arguments=""):
    """What it prints on two ranks."""
    script = EXAMPLES / program
    python = interpreter(script.parent.name)
    check_modules(python, script)
    command = [python, str(script), *arguments.split()]
    result = launch(command, timeout=SECONDS, environment=ENVIRONMENT)
    assert result.returncode == 0, result.stdout[-8000:]
    return result.stdout


@pytest.mark.parametrize("program", PROGRAMS)
def test_runs(program):
    if program in ON_DEMAND and os.environ.get("TEST_FRAMEWORKS") != "all":
        pytest.skip("on demand: tests/run --frameworks all")
    arguments, words = PROGRAMS[program]
    said = run(program, arguments)
    assert re.search(words, said), said[-8000:]


def test_goes_on_from_a_checkpoint(tmp_path):
    common = f"--images 576 --base-lr 0.05 --fp16-pushpull --checkpoints {tmp_path}"
    first = run("keras/train_images.py", f"{common} --epochs 4")
    assert "2 ranks, epochs 1 to 4: loss" in first
    assert (tmp_path / "epoch-04.keras").exists()
    again = run("keras/train_images.py", f"{common} --epochs 5")
    assert "2 ranks, epochs 5 to 5: loss" in again
    losses = [float(re.search(r"to \d: loss ([0-9.]+)", said)[1]) for said in (first, again)]
    # It went on: a network that begins anew is far above.
    assert losses[1] < 1.3 * losses[0], losses


def test_every_example_is_run():
    found = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.glob("*/*.py")}
    assert found == set(PROGRAMS) | set(ELSEWHERE)
