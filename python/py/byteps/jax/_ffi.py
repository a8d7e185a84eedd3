"""The way into XLA: which releases of jaxlib there may be, and our custom calls in them."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from typing import Any

from byteps import _native
from byteps.errors import ConfigError

#: The oldest release whose functions for custom calls stand where ours expect them.
_FLOOR = (0, 4, 38)

PUSH = "byteps_push"
PULL = "byteps_pull"
PUSH_ON_GPU = "byteps_push_on_gpu"
PULL_ON_GPU = "byteps_pull_on_gpu"

_PLATFORMS = {PUSH: "cpu", PULL: "cpu", PUSH_ON_GPU: "CUDA", PULL_ON_GPU: "CUDA"}


def _release() -> tuple[int, int, int]:
    own = importlib.metadata.version("jaxlib")
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", own)
    if numbers is None:
        raise ConfigError(
            f"jaxlib calls itself {own!r}, which is no release: install one of "
            f"{_text(_FLOOR)} or later"
        )
    major, minor, patch = map(int, numbers.groups())
    return major, minor, patch


def _text(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def _load() -> Any:
    """The module of JAX for custom calls, in which ours are known."""
    release = _release()
    if release < _FLOOR:
        raise ConfigError(
            f"byteps.jax needs jaxlib {_text(_FLOOR)} or later, and this is {_text(release)}: "
            "install a later jax"
        )
    try:
        ffi = importlib.import_module("jax.ffi")
    except ImportError:  # Before 0.5.
        ffi = importlib.import_module("jax.extend.ffi")
    for (name, platform), address in zip(
        _PLATFORMS.items(), _native.xla_handlers(release), strict=True
    ):
        ffi.register_ffi_target(name, ffi.pycapsule(address), platform=platform)
    return ffi


ffi = _load()


def check_version() -> None:
    """Raises if XLA's interface for custom calls is one that we do not know.

    It is known once XLA has asked the custom calls what they are: when they were registered or, in
    some releases, when JAX opens its first device.
    """
    version = _native.xla_version()
    if version is not None and not version[2]:
        raise ConfigError(
            f"jaxlib {_text(_release())} has version {version[0]}.{version[1]} of XLA's interface "
            "for custom calls, which this release of byteps does not know: install an earlier "
            "jaxlib, or a later byteps"
        )
