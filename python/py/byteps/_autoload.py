"""What torch calls at the end of its own import: makes the backend ``byteps`` known to it.

Every program that imports torch runs this where the package is installed, whether or not it wants
the backend. So it imports nothing of the package, defers the work to the first group of the
backend, and never fails: an exception here would end ``import torch``.
"""

from __future__ import annotations

import contextlib
from typing import Any

__all__ = ["register"]

NAME = "byteps"


def register() -> None:
    """Registers the backend, unless this torch finds it by an entry point when it is asked for."""
    with contextlib.suppress(Exception):
        import torch.distributed as dist

        if dist.is_available() and not hasattr(dist.Backend, "_ensure_backend_registered"):
            add()


def add() -> None:
    """Registers the backend with torch. A second time it does nothing."""
    import torch.distributed as dist

    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: Any = None) -> Any:
    from byteps.torch.distributed import create

    return create(options, backend_options)
