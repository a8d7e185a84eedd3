"""Tensors whose rounds do not wait for the slowest ranks (docs/stragglers.md)."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from byteps import _native
from byteps._registry import Tensor
from byteps.errors import ConfigError


class Backups:
    """For how many ranks rounds of some tensors do not wait, and who says so: the caller, or the
    environment. What the environment says leaves out what has to be whole; what a caller says and
    can't be is refused where it is declared, by the scheduler."""

    def __init__(self, workers: int, is_default: bool = False) -> None:
        self.workers = workers
        self.is_default = is_default

    @classmethod
    def asked(cls, workers: int | None) -> Backups:
        """What ``backup_workers`` says, or the environment where it is None."""
        if workers is None:
            return cls(_native.backup_workers(), is_default=True)
        if workers < 0:
            raise ConfigError(f"backup_workers={workers}: 0 or more")
        return cls(workers)

    @classmethod
    def of_program(cls, number: int) -> Backups:
        """What a compiled program says by a :func:`number_of`, in the job that it runs in."""
        return cls.asked(None if number == _BY_ENVIRONMENT else number)

    def over(self, tensor: Tensor) -> Tensor:
        """The tensor, declared so, and as one of the host, wherever each rank has it."""
        if not self.workers:
            return tensor
        why = self._whole(tensor) if self.is_default else None
        if why is not None:
            _tell(
                f"BPS_BACKUP_WORKERS={self.workers} is not for '{tensor.name}' and its like: {why}"
            )
            return tensor
        # NCCL's collectives would wait for all ranks of a host.
        return tensor._replace(store=self.workers, device=False)

    def unless(self, why: str | None) -> Backups:
        """The same, or none if there is a reason; an error where a caller wanted some."""
        if why is None or not self.workers:
            return self
        if not self.is_default:
            raise ConfigError(f"backup_workers={self.workers}: {why}")
        _tell(f"BPS_BACKUP_WORKERS={self.workers} has no effect here: {why}")
        return WAITS

    def _whole(self, tensor: Tensor) -> str | None:
        """Why rounds of a tensor have to wait for all ranks, if so."""
        if tensor.operation not in ("sum", "average"):
            return f"{tensor.operation} is of all ranks"
        if tensor.dtype not in _FLOATS:
            return f"whole numbers, as {tensor.dtype}, often count something of all ranks"
        encoding = tensor.encoding or ""
        if "+" in encoding or encoding.startswith("auto"):
            return f"what the encoding {encoding} keeps would be wrong without a contribution"
        size = _native.size() if tensor.ranks is None else len(tensor.ranks)
        if self.workers >= size:
            return f"it is for {size} ranks, and rounds would wait for nobody"
        return None


_FLOATS = ("f16", "bf16", "f32", "f64")
#: Of a program that does as the environment says where it runs.
_BY_ENVIRONMENT = -1
#: Why rounds of a tensor without a name wait for all ranks.
UNNAMED = "a tensor without a name: such names are used again for others; give it one"


def number_of(workers: int | None, names: Iterable[str | None] = ()) -> int:
    """What stands for ``backup_workers`` in programs, which may be compiled before there is a job;
    of tensors with these names."""
    if not all(names):
        wait_for_all(workers, UNNAMED)
        return 0
    return _BY_ENVIRONMENT if workers is None else Backups.asked(workers).workers


def wait_for_all(workers: int | None, why: str) -> None:
    """Refuses ``backup_workers`` of tensors whose rounds wait for all ranks, or tells that the
    environment has no effect, if there is a job to ask."""
    if workers is not None or _native.is_initialized():
        Backups.asked(workers).unless(why)


#: Rounds wait for all ranks.
WAITS = Backups(0)

_told: set[str] = set()


def _tell(line: str) -> None:
    """Warns once for each reason."""
    reason = line.partition(": ")[2]
    if reason not in _told:
        _told.add(reason)
        warnings.warn(f"{line}; rounds wait for all ranks", stacklevel=2)
