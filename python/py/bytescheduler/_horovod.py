"""``import horovod.torch`` in programs of ByteScheduler's: byteps.torch under that name; and so
``horovod.mxnet``.

Nothing is installed by the name of Horovod, and one that is installed is found first, unless the
program was started by ``python -m bytescheduler``.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

# What answers for which module. Horovod's package itself holds nothing that programs use.
_ANSWERS: dict[str, str | None] = {
    "horovod": None,
    "horovod.common": None,
    "horovod.common.exceptions": "byteps.errors",
    "horovod.mxnet": "byteps.mxnet",
    "horovod.torch": "byteps.torch",
    "horovod.torch.elastic": "byteps.torch.elastic",
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes modules that hold the names of others."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A module below Horovod's package is answered for only where the package is ours."""
        if fullname not in _ANSWERS:
            return None
        if fullname != "horovod":
            package = sys.modules.get("horovod")
            if package is None or getattr(package.__spec__, "loader", None) is not self:
                return None
        is_package = any(name.startswith(f"{fullname}.") for name in _ANSWERS)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        """Fills the module with the public names of the one that answers."""
        source = _ANSWERS[module.__name__]
        module.__doc__ = f"The names of {source or 'Horovod'}, by bytescheduler."
        if source is None:
            return
        answering = importlib.import_module(source)
        names = list(answering.__all__)
        module.__dict__.update({name: getattr(answering, name) for name in names})
        module.__dict__["__all__"] = names


_finder = _Finder()


def answer(instead: bool) -> None:
    """Answers imports of Horovod from now on.

    Args:
        instead: Also where a Horovod is installed, which then cannot be imported. Without it, only
            where none is.
    """
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    sys.meta_path.insert(0 if instead else len(sys.meta_path), _finder)
