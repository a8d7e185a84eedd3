"""How the rows of an all-to-all are divided, where they are known when it is called."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from byteps.errors import ConfigError

__all__ = ["rows_for_each"]


def rows_for_each(rows: int, splits: Iterable[object] | None, name: str, count: int) -> list[int]:
    """How many of ``rows`` go to each of ``count`` ranks: as ``splits`` says, else equally many.

    ``name`` is the tensor's, for messages.

    Raises:
        byteps.errors.ConfigError: if the rows are not divided by the ranks and there are no splits,
            or these are not whole numbers, one for each rank, that are all rows together.
    """
    if splits is None:
        if rows % count:
            raise ConfigError(
                f"alltoall of '{name}': {rows} rows are not divided by {count} ranks: pass splits"
            )
        return [rows // count] * count
    try:
        parts = [operator.index(part) for part in splits]  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigError(
            f"alltoall of '{name}': splits={splits!r}: whole numbers are wanted, in a list or an "
            "array of a whole type"
        ) from error
    if len(parts) != count or min(parts) < 0 or sum(parts) != rows:
        raise ConfigError(
            f"alltoall of '{name}': splits={parts} for {count} ranks and {rows} rows: one number "
            "for each rank, none below 0, and all rows together"
        )
    return parts
