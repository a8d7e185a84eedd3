"""What a push_pull computes, as callers name it and as the engine does."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from byteps.errors import ConfigError


class ReduceOp(IntEnum):
    """What a push_pull computes.

    ``Adasum`` is a sum of floats in which what ranks have in common counts once: Maleki et al.,
    "Scaling Distributed Training with Adaptive Summation" (2020). The ranks compute it themselves,
    in a tree; with n of them that is no power of two, those from the next lower one, p, on go
    first: rank p + i with rank i.

    ``Min`` and ``Max`` are NaN where any rank's element is. A ``Product`` of integers wraps; one of
    half types is kept in float32 by servers, and rounded once.
    """

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product

#: What the engine calls them; it does not know Adasum.
_OPERATIONS = {
    Average: "average",
    Sum: "sum",
    Adasum: "adasum",
    Min: "min",
    Max: "max",
    Product: "product",
}


def operation_of(average: bool, op: Any) -> str:
    """What the engine calls ``op`` or, where that is None, an average or a sum."""
    if op is None:
        return "average" if average else "sum"
    operation = _OPERATIONS.get(op)
    if operation is None:
        known = ", ".join(op.name for op in _OPERATIONS)
        raise ConfigError(f"op={op!r}: it is one of {known}")
    return operation


def either(average: bool | None, op: Any) -> str:
    """The same where callers give one of both, or neither for an average."""
    if average is not None and op is not None:
        raise ConfigError("give op or average, not both")
    return operation_of(average is not False, op)
