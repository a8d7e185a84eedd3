"""Which TensorFlow byteps.tensorflow refuses: other releases, other libraries."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

pytest.importorskip(
    "tensorflow", reason="TensorFlow is not installed; python/environment installs it"
)

import tensorflow as tf

from byteps.errors import ConfigError
from cluster import clean_environment


def test_other_releases_are_refused(monkeypatch):
    from byteps.tensorflow import _exchange

    monkeypatch.setattr(tf, "__version__", "2.14.1")
    with pytest.raises(ConfigError, match=r"needs TensorFlow 2\.15 or later"):
        _exchange._load()


@pytest.mark.parametrize("name", ["", "libtensorflow_framework.so.2"])
def test_another_library_is_refused(tmp_path, name):
    """One without any function stands in for that of a release to come, or there is none."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no cc: install gcc")
    source, library = tmp_path / "nothing.c", tmp_path / "nothing.so"
    source.write_text("int nothing;\n")
    options = ("-shared", "-o", library, source, *([f"-Wl,-soname,{name}"] if name else []))
    subprocess.run([compiler, *map(str, options)], check=True, timeout=60)
    code = (
        "import ctypes, sys; from byteps import _native\n"
        "ctypes.CDLL(sys.argv[1]); _native.tf_register()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(library)],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = "has no function TF_NewStatus" if name else "has not loaded libtensorflow_framework"
    assert result.returncode == 1 and said in result.stderr.splitlines()[-1], result.stderr
    assert result.stderr.splitlines()[-1].startswith("byteps.errors."), result.stderr
