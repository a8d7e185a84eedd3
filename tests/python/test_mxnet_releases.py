"""Which MXNet byteps.mxnet refuses: other releases, other libraries."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("mxnet", reason="MXNet is not installed in this environment")

import mxnet as mx

import byteps.mxnet as bps
from byteps.errors import ConfigError, StartError
from cluster import clean_environment

REAL_LIBRARY = mx.base._LIB


@pytest.mark.parametrize("release", ["1.8.0", "2.0.0b1", None])
def test_another_release_is_refused_when_it_is_imported(tmp_path, release):
    """A stand-in for it has nothing else, as others lack what this package asks of MXNet."""
    (tmp_path / "mxnet").mkdir()
    says = f"__version__ = {release!r}" if release else ""
    (tmp_path / "mxnet/__init__.py").write_text(says)
    environment = clean_environment()
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"
    result = subprocess.run(
        [sys.executable, "-c", "import byteps.mxnet"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        "byteps.errors.ConfigError: byteps.mxnet speaks the C interface of MXNet 1.9.1, and this "
        f"is {release or 'one without a version'}: install mxnet==1.9.1"
    )


class Library:
    """MXNet's, but for what is said of it here."""

    def __init__(self, number=10901, lacks=""):
        self._number, self._lacks, self._name = number, lacks, "libmxnet.so"

    def MXGetVersion(self, number):
        number._obj.value = self._number
        return 0

    def __getattr__(self, name):
        if name == self._lacks:
            raise AttributeError(name)
        return getattr(REAL_LIBRARY, name)


def test_another_library_is_refused(monkeypatch):
    engine = bps._engine
    engine.check_release()
    monkeypatch.setattr(mx.base, "_LIB", Library(number=20001))
    with pytest.raises(ConfigError, match=r"this is 1\.9\.1 with the library of 2\.0\.1, libmxnet"):
        engine.check_release()
    # One that says it is the right one, and is not.
    for name in engine._FUNCTIONS:
        monkeypatch.setattr(engine, "_is_loaded", False)
        monkeypatch.setattr(mx.base, "_LIB", Library(lacks=name))
        engine.check_release()
        with pytest.raises(StartError, match="lacks a function of its C interface"):
            engine.load()
