"""push_pull and broadcast of TensorFlow's tensors, in programs and outside, on CPUs.

A *push_pull* gives every rank the sum, the average, or another reduction (:class:`ReduceOp`), of
what all ranks passed under one name. Outside of programs, what goes wrong is raised as a class of
:mod:`byteps.errors`; in a program it is an error of TensorFlow's with the same text, of which
:func:`typed_errors` makes that class again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from byteps import _backups, _objects, _process_sets, _typed_errors
from byteps._codecs import encoding_for
from byteps._dtypes import DTYPES
from byteps._operations import Adasum, ReduceOp, either
from byteps.errors import ConfigError, TensorError
from byteps.tensorflow._exchange import How, exchange, not_converted
from byteps.tensorflow.compression import Compression

__all__ = [
    "allreduce",
    "broadcast",
    "broadcast_group",
    "grouped_allreduce",
    "push_pull",
    "push_pull_group",
    "typed_errors",
]


@not_converted
def push_pull(
    tensor: Any,
    scope: str = "",
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    enable_async: bool = False,
    name: str | None = None,
    priority: int = 0,
    process_set: Any = None,
    backup_workers: int | None = 0,
) -> Any:
    """The average over all ranks of ``tensor``, as a tensor of its shape and type.

    Integers are averaged by floor division. ``tf.IndexedSlices`` are exchanged as a dense tensor.
    Averages and sums have gradients: that of an average is the average of the ranks' gradients.

    Without a ``name`` the order of the calls is what matters outside of programs, and in a program
    the place: of one function, and of one branch or loop in it, the calls are told apart by their
    order. A name may be under way once at a time.

    Args:
        tensor: A tensor, a variable or what ``tf.convert_to_tensor`` takes, of float16, bfloat16,
            float32, float64, uint8, int8, int32 or int64.
        scope: What the name begins with.
        average: Whether to average (the default) or to sum; ``op`` says the same and more.
        device_dense, device_sparse: Not used: tensors are sent from host memory.
        compression: One of :class:`Compression`; codecs are for averages and sums of floats.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``.
        enable_async: BytePS's asynchronous training, which is not there.
        priority: Among tensors that wait, one with a larger priority is sent sooner.
        process_set: A :class:`~byteps.common.ProcessSet` of the ranks that take part.
        backup_workers: For how many of the slowest ranks the result does not wait
            (docs/stragglers.md), of a tensor with a name; as ``BPS_BACKUP_WORKERS`` says where it
            is None.

    Raises:
        TensorError: A tensor of a type that is not summed.
        MismatchError: The ranks disagree about what a name stands for.
        BytePSError: It has to wait for all ranks, and ``backup_workers`` says otherwise.
        ConfigError: In a function that XLA compiles (``jit_compile=True``), of a tensor whose shape
            is not fixed there, or where TensorFlow's XLA is one that is not known here.
    """
    del device_dense, device_sparse
    if enable_async:
        raise ConfigError(
            "push_pull(enable_async=True): there is no asynchronous training here; leave it out"
        )
    names = [scope + name if name else None]
    return push_pull_group(
        [tensor], names, average, compression, op, priority, process_set, backup_workers
    )[0]


@not_converted
def push_pull_group(
    tensors: Sequence[Any],
    names: Sequence[str | None] | None = None,
    average: bool | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    priority: int = 0,
    process_set: Any = None,
    backup_workers: int | None = 0,
) -> list[Any]:
    """:func:`push_pull` of several tensors, all under way together.

    The first of them is the most urgent. ``names`` has one for each, or None.
    """
    if op == Adasum:
        raise ConfigError("op=Adasum: ranks of byteps.torch compute it, and TensorFlow's do not")
    operation, ranks = either(average, op), _process_sets.ranks_of(process_set)
    encoding = encoding_for(compression, True, operation)  # Of floats; the others have none.
    named = names or [None] * len(tensors)
    backups = _backups.number_of(backup_workers, named)
    how = How(operation, priority=priority, encoding=encoding, ranks=ranks, backups=backups)
    made = [compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors]
    sent = exchange([small for small, _ in made], named, how)
    return [
        compression.decompress(result, context)
        for result, (_, context) in zip(sent, made, strict=True)
    ]


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: Any = None,
    ignore_name_scope: bool = False,
) -> Any:
    """:func:`push_pull` as Horovod calls it.

    The tensor is multiplied by ``prescale_factor`` before, and by ``postscale_factor`` after it.
    Of ``tf.IndexedSlices`` all ranks gather those of all, as :func:`sparse_push_pull` does.
    ``ignore_name_scope`` is not used: scopes of names have no meaning here.
    """
    tensors, factors = [tensor], (prescale_factor, postscale_factor)
    names = None if name is None else [name]
    return _allreduced(tensors, names, average, compression, op, factors, process_set)[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: Any = None,
    ignore_name_scope: bool = False,
) -> list[Any]:
    """:func:`allreduce` of several tensors at once, named by their places after ``name``."""
    names = None if name is None else [f"{name}.{index}" for index in range(len(tensors))]
    factors = prescale_factor, postscale_factor
    return _allreduced(tensors, names, average, compression, op, factors, process_set)


def _allreduced(
    tensors: Sequence[Any],
    names: Sequence[str | None] | None,
    average: bool | None,
    compression: Any,
    op: ReduceOp | None,
    factors: tuple[float, float],
    process_set: Any,
) -> list[Any]:
    """The dense ones together, and the sparse ones together."""
    names = names or [None] * len(tensors)
    results: list[Any] = [scaled(tensor, factors[0]) for tensor in tensors]
    sparse = [index for index, one in enumerate(results) if isinstance(one, tf.IndexedSlices)]
    dense = [index for index in range(len(results)) if index not in sparse]

    def exchange_these(indices: Sequence[int], exchange: Any) -> None:
        sent, called = [results[index] for index in indices], [names[index] for index in indices]
        for index, result in zip(indices, exchange(sent, called), strict=True):
            results[index] = scaled(result, factors[1])

    if dense:
        exchange_these(
            dense,
            lambda sent, called: push_pull_group(
                sent, called, average, compression, op, 0, process_set
            ),
        )
    if sparse:
        from byteps.tensorflow import sparse as gathered  # It imports this module.

        exchange_these(
            sparse,
            lambda sent, called: gathered.sparse_push_pull_group(
                sent, called, average, op, process_set
            ),
        )
    return results


def scaled(tensor: Any, factor: float) -> Any:
    """The tensor, or slices, times a factor."""
    if isinstance(tensor, tf.IndexedSlices):
        return tf.IndexedSlices(scaled(tensor.values, factor), tensor.indices, tensor.dense_shape)
    tensor = tf.convert_to_tensor(tensor)
    return tensor if factor == 1.0 else tensor * tf.cast(factor, tensor.dtype)


# Broadcast


def broadcast(
    tensor: Any,
    root_rank: int,
    scope: str = "",
    name: str | None = None,
    is_variable: bool = True,
    process_set: Any = None,
    ignore_name_scope: bool = False,
) -> Any:
    """The tensor of ``root_rank``, bit for bit.

    All ranks pass one of its shape and type, which may be any but strings and handles. The root's
    gradient is the average of the ranks' gradients, that of the others is zero; only floating point
    types that can be summed have one. ``is_variable`` is there for BytePS's callers, and
    ``ignore_name_scope`` for Horovod's.
    """
    del is_variable, ignore_name_scope
    names = [scope + name if name else None]
    return broadcast_group([tensor], root_rank, names, process_set)[0]


@not_converted
def broadcast_group(
    tensors: Sequence[Any],
    root_rank: int,
    names: Sequence[str | None] | None = None,
    process_set: Any = None,
) -> list[Any]:
    """:func:`broadcast` of several tensors at once."""
    ranks = _process_sets.ranks_of(process_set)
    _objects.check_root(root_rank, ranks)
    values = [tf.convert_to_tensor(tensor) for tensor in tensors]
    names = names or [None] * len(values)
    sent = [sendable(value, name) for value, name in zip(values, names, strict=True)]
    how = How("broadcast", root_rank, _objects.BROADCAST_PRIORITY, ranks=ranks)
    results = exchange(sent, names, how)
    return [restored(result, value) for result, value in zip(results, values, strict=True)]


def sendable(tensor: Any, name: str | None) -> Any:
    """What the engine can send in its place: a tensor of bytes if need be."""
    dtype = tensor.dtype.base_dtype
    if dtype.name in DTYPES:
        return tensor
    if dtype == tf.bool:
        return tf.cast(tensor, tf.uint8)
    if dtype in (tf.string, tf.resource, tf.variant):
        raise TensorError(
            f"broadcast of '{name}': a tensor of type {dtype.name} has no memory of its own; send "
            "its value by broadcast_object"
        )
    return tf.bitcast(tensor, tf.uint8)


def restored(sent: Any, tensor: Any) -> Any:
    """The tensor that was sent as this, of the type of the other."""
    dtype = tensor.dtype.base_dtype
    if dtype.name in DTYPES:
        return sent
    return tf.cast(sent, dtype) if dtype == tf.bool else tf.bitcast(sent, dtype)


# Errors


def typed_errors() -> contextlib.AbstractContextManager[None]:
    """Raises what went wrong in a program as the class of :mod:`byteps.errors` that it is::

        with bps.typed_errors():
            loss = step(images, labels)

    TensorFlow's programs know texts alone, so what leaves one by itself is a
    ``tf.errors.FailedPreconditionError``.
    """
    return _typed_errors.typed(tf.errors.OpError)
