"""The oldest releases of frameworks that the documents name, each in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import clean_environment

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "python" / "examples"
SECONDS = 900  # Packages of some hundred megabytes are fetched.

#: By folder of the environment: what is installed there, and programs that end with these words.
#: Names after ``--no-deps`` are installed without what they want, of which there is another build.
FLOORS = {
    "tensorflow-2.15": (
        ["tensorflow-cpu==2.15.1", "scikit-learn"],
        {ROOT / "tests/python/floor_keras.py": "all is right"},
    ),
    "tf_keras-2.16": (
        ["tensorflow-cpu==2.16.2", "scikit-learn", "--no-deps", "tf_keras==2.16.0"],
        {ROOT / "tests/python/floor_keras.py": "all is right"},
    ),
    "jax-0.4.38": (
        ["jax==0.4.38", "jaxlib==0.4.38", "optax==0.2.4", "scikit-learn"],
        {EXAMPLES / "jax/train_digits.py": "accuracy"},
    ),
}


def run(*command, **environment):
    done = subprocess.run(
        [str(word) for word in command],
        env=clean_environment() | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


@pytest.mark.parametrize("name", FLOORS)
def test_programs_run(name):
    if os.environ.get("TEST_FRAMEWORKS") != "all":
        pytest.skip("fetches some hundred megabytes: tests/run --frameworks all")
    wheels = sorted(ROOT.glob("target/wheels-*/*.whl"))
    if not wheels:
        pytest.skip("there is no wheel: python/environment builds one")
    packages, programs = FLOORS[name]
    python = ROOT / "target" / "floors" / name / "bin" / "python"
    if not python.exists():
        run(sys.executable, "-m", "venv", python.parents[1])
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    apart = packages.index("--no-deps") if "--no-deps" in packages else len(packages)
    run(*pip, *packages[:apart])
    if apart < len(packages):
        run(*pip, *packages[apart:])
    run(*pip, "--no-deps", "--force-reinstall", wheels[-1])
    for program, words in programs.items():
        launcher = (python, "-m", "byteps.launch", "--local", "2", python)
        variables = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_USE_LEGACY_KERAS": str(int("keras" in name))}
        assert words in run(*launcher, program, **variables)
