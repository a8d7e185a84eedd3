"""Runs a program that was written for ByteScheduler, unchanged::

    bpslaunch --local 2 python -m bytescheduler train.py --its --arguments

``import horovod.torch`` in it is answered by :mod:`byteps.torch`, also where a Horovod is
installed, and ``mx.kvstore.create("dist_sync")`` by the ranks of this job.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from bytescheduler import _horovod


class _ThenStores(importlib.abc.Loader):
    """Loads MXNet, and then what gives it our stores: before a program can make one of its own."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As the loader of MXNet does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Loads it, and what takes the place of its stores."""
        self._loader.exec_module(module)
        importlib.import_module("bytescheduler.mxnet.kvstore")


class _MXNetFinder(importlib.abc.MetaPathFinder):
    """Waits for the import of MXNet, which may never come."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Where MXNet is, with our stores behind it."""
        if fullname != "mxnet":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenStores(spec.loader)
        return spec


def main() -> None:
    """Runs the program that the arguments name, as Python itself would."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print("usage: python -m bytescheduler PROGRAM.py [ARGUMENTS]", file=sys.stderr)
        sys.exit(0 if sys.argv[1:] in (["-h"], ["--help"]) else 2)
    program = Path(sys.argv[1])
    if not program.is_file():
        print(
            f"bytescheduler: there is no program {program} (from {Path.cwd()}): name a file of "
            "Python",
            file=sys.stderr,
        )
        sys.exit(2)
    _horovod.answer(instead=True)
    sys.meta_path.insert(0, _MXNetFinder())
    sys.argv = sys.argv[1:]
    # Python puts a program's folder where it found this package's name.
    sys.path[0] = str(program.resolve().parent)
    runpy.run_path(str(program), run_name="__main__")


main()
