"""Ranks of one machine that pass for those of several: the engine knows a host by its kernel's boot
and its network, so a rank that sees another number of the boot is on another host."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile

import pytest

_BOOT = b"/proc/sys/kernel/random/boot_id"
_CLONE_NEWNS = 0x20000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000


def needs_mounts() -> None:
    """Skips a test where nothing may be mounted."""
    words = ["unshare", "--mount", "mount", "--bind", "/dev/null", _BOOT.decode()]
    tried = subprocess.run(words, check=False, capture_output=True, text=True, timeout=30)
    if tried.returncode != 0:
        pytest.skip(f"ranks pass for those of several hosts by mounts: {tried.stderr.strip()}")


def move_to(host: str) -> None:
    """Lets the calling thread see another number of the boot, before it starts the engine."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: object) -> None:
        if getattr(libc, name)(*arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{name}: {os.strerror(number)}")

    call("unshare", _CLONE_NEWNS)
    call("mount", b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(host)
        file.flush()
        # The file is there for as long as it is mounted.
        call("mount", file.name.encode(), _BOOT, None, ctypes.c_ulong(_MS_BIND), None)
