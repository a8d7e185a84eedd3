"""Ranks and sizes as operations: programs look at them when they run, and not when they are traced.

An elastic job may go on with other numbers. They call Python, so they have no meaning in another
process that loads a saved program; and XLA has no such call, so what it compiles holds the numbers
of the time at which it was traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from byteps import _process_sets, common
from byteps.errors import ConfigError
from byteps.tensorflow import _xla
from byteps.tensorflow._exchange import not_converted

__all__ = ["local_rank_op", "local_size_op", "process_set_included_op", "rank_op", "size_op"]


def rank_op(name: str | None = None) -> Any:
    """:func:`rank` as an int32 tensor, of the time at which it is computed."""
    return _number(common.rank, name or "rank")


def local_rank_op(name: str | None = None) -> Any:
    """:func:`local_rank` likewise."""
    return _number(common.local_rank, name or "local_rank")


def local_size_op(name: str | None = None) -> Any:
    """:func:`local_size` likewise."""
    return _number(common.local_size, name or "local_size")


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """How many ranks the job has, or the set of this number, likewise."""
    return _number(lambda: len(_ranks(process_set_id)), name or "size")


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """1 if this rank is in the set of this number, else 0, likewise."""
    return _number(lambda: common.rank() in _ranks(process_set_id), name or "process_set_included")


def _ranks(process_set_id: int) -> list[int]:
    known = _process_sets.get_process_set_ids_and_ranks()
    if process_set_id not in known:
        raise ConfigError(
            f"there is no process set {process_set_id!r} in this job, but {sorted(known)}: add it "
            "on all ranks, and pass its process_set_id"
        )
    return known[process_set_id]


@not_converted
def _number(found: Callable[[], int], name: str) -> Any:
    is_known = tf.executing_eagerly() or _xla.compiles(tf.compat.v1.get_default_graph())
    if is_known:
        return tf.constant(int(found()), tf.int32, name=name)
    number = tf.py_function(lambda: tf.constant(int(found()), tf.int32), [], tf.int32, name=name)
    return tf.ensure_shape(number, [])
