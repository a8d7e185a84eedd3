"""Sparse tensors: ranks gather each other's slices, and nobody makes a dense tensor of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from byteps import _process_sets
from byteps._operations import ReduceOp, either
from byteps.errors import ConfigError, TensorError
from byteps.tensorflow import _xla, gather, ops
from byteps.tensorflow._exchange import not_converted, place_in_program

__all__ = ["sparse_push_pull", "sparse_push_pull_group"]


def sparse_push_pull(
    slices: Any,
    name: str | None = None,
    average: bool | None = None,
    op: ReduceOp | None = None,
    process_set: Any = None,
) -> Any:
    """The average (or sum) over all ranks of ``tf.IndexedSlices``, as such: those of all ranks,
    one behind the other, in the order of the ranks. An index may stand there more than once, and
    its slices are meant to be added up, as all of TensorFlow's optimizers do.

    Args:
        slices: ``tf.IndexedSlices``. A rank may have none: values of no rows.
        name: Its name in the job; as of :func:`push_pull`.
        average: Whether to average (the default) or to sum; ``op`` says the same.
        op: ``Average`` or ``Sum``.
        process_set: A :class:`~byteps.common.ProcessSet` of the ranks that take part.

    Raises:
        TensorError: These are no slices.
        MismatchError: The ranks' types, or shapes of a slice, differ.
    """
    return sparse_push_pull_group([slices], [name], average, op, process_set)[0]


@not_converted
def sparse_push_pull_group(
    slices: Sequence[Any],
    names: Sequence[str | None] | None = None,
    average: bool | None = None,
    op: ReduceOp | None = None,
    process_set: Any = None,
) -> list[Any]:
    """:func:`sparse_push_pull` of several, all under way together."""
    operation = either(average, op)
    if operation not in ("average", "sum"):
        raise ConfigError(
            f"op={op!r}: slices of several ranks are averaged or summed (Average, Sum); pass dense "
            "tensors, tf.convert_to_tensor(slices)"
        )
    for one in slices:
        if not isinstance(one, tf.IndexedSlices):
            raise TensorError(
                f"sparse_push_pull of a {type(one).__name__}: tf.IndexedSlices are wanted; "
                "push_pull takes dense tensors"
            )
    names = list(names or [None] * len(slices))
    if not tf.executing_eagerly():
        names = [name or place_in_program() for name in names]
        if not _xla.compiles(tf.compat.v1.get_default_graph()):
            # Each goes when it is there.
            return [
                _gathered([one], [name], operation, process_set)[0]
                for one, name in zip(slices, names, strict=True)
            ]
    return _gathered(slices, names, operation, process_set)


def _gathered(
    slices: Sequence[Any], names: Sequence[str | None], operation: str, process_set: Any
) -> list[Any]:
    called = [
        f"{name or f'sparse_push_pull.{index}'}.{part}"
        for index, name in enumerate(names)
        for part in ("values", "indices")
    ]
    tensors = [part for one in slices for part in (one.values, one.indices)]
    found = gather.grouped_allgather(tensors, called, process_set=process_set)
    count = len(_process_sets.members(_process_sets.ranks_of(process_set)))
    results = []
    for one, values, indices in zip(slices, found[::2], found[1::2], strict=True):
        share = ops.scaled(values, 1 / count if operation == "average" else 1.0)
        results.append(tf.IndexedSlices(share, indices, one.dense_shape))
    return results
