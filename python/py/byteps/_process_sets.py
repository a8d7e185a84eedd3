"""Horovod's process sets, of which there is one: all ranks of the job."""

from __future__ import annotations

from typing import Any

from byteps import _native
from byteps.errors import ConfigError

__all__ = ["GlobalProcessSet", "check", "global_process_set"]


class GlobalProcessSet:
    """All ranks of the job."""

    process_set_id = 0

    @property
    def ranks(self) -> list[int]:
        """Its members."""
        return list(range(self.size()))

    def size(self) -> int:
        """How many there are."""
        return _native.size()

    def rank(self) -> int:
        """The number of this process among them."""
        return _native.rank()

    def included(self) -> bool:
        """Whether this process is one of them."""
        return True

    def __repr__(self) -> str:
        return "global_process_set"

    def __reduce__(self) -> str:
        return "global_process_set"


#: What every function takes as ``process_set`` that has one in Horovod.
global_process_set = GlobalProcessSet()


def check(process_set: Any) -> None:
    """Raises where a call wants other ranks than all."""
    if process_set is not None and process_set is not global_process_set:
        raise ConfigError(
            f"process_set={process_set!r}: calls are for all ranks of the job, so pass "
            "global_process_set or None"
        )
