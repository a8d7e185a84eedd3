"""Gathering and scattering: what each rank has reaches all ranks, or one of them.

Each rank broadcasts what it has: it sends its own bytes once and receives those of the others. How
many rows a rank has may differ between ranks and calls, so ranks tell each other first. In an
alltoall two ranks at a time send each other what is for them, and a reducescatter is a push_pull of
which each rank keeps its rows.

All of it is made of operations of TensorFlow, so it works in programs as outside; there each call
runs a small program of its own, in which all of its tensors are under way together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from byteps import _native, _objects, _operations, _process_sets, _registry, _typed_errors
from byteps._operations import Adasum, Average, ReduceOp
from byteps.errors import ConfigError, MismatchError, TensorError
from byteps.tensorflow import _xla, ops
from byteps.tensorflow._exchange import How, exchange_each, not_converted, place_in_program
from byteps.tensorflow.compression import Compression

__all__ = [
    "allgather",
    "alltoall",
    "grouped_allgather",
    "grouped_reducescatter",
    "reducescatter",
]

Ranks = tuple[int, ...] | None

# A name stands for one size, so bytes travel in one of a few sizes: four for each power of two.
_ROOM_BYTES_MIN = 256
_ROOM_STEPS = 4
# Programs that are kept for calls outside of programs: each is of one name.
_PROGRAMS_MAX = 1024
# How often the ranks disagreed outside of programs, by the number of the job.
_mismatches: dict[int, int] = {}


# Allgather


def allgather(
    tensor: Any, name: str | None = None, ignore_name_scope: bool = False, process_set: Any = None
) -> Any:
    """The tensors of all ranks, one behind the other along dimension 0, in the order of the ranks.

    They have the same type and, but for dimension 0, the same shape; else it is a
    :class:`byteps.errors.MismatchError` on all ranks. Any type but strings and handles is copied
    bit for bit. The gradient is this rank's part of the average of the ranks' gradients. In a
    program that XLA compiles all ranks have as many rows.

    Args:
        tensor: A tensor of one dimension at least, or what ``tf.convert_to_tensor`` takes.
        name: Its name in the job; without one, what :func:`push_pull` says of names holds.
        ignore_name_scope: Not used: scopes of names have no meaning here.
        process_set: A :class:`~byteps.common.ProcessSet` of the ranks that take part.

    Raises:
        TensorError: A tensor without dimensions, or of strings or handles.
        MismatchError: The ranks' types, or shapes but for dimension 0, differ.
    """
    return grouped_allgather([tensor], [name], ignore_name_scope, process_set)[0]


@not_converted
def grouped_allgather(
    tensors: Sequence[Any],
    name: Any = None,
    ignore_name_scope: bool = False,
    process_set: Any = None,
) -> list[Any]:
    """:func:`allgather` of several tensors at once.

    ``name`` is a list of names, or one that the tensors' indices are added to.
    """
    del ignore_name_scope
    ranks = _process_sets.ranks_of(process_set)
    values = [_with_rows(tensor, "allgather") for tensor in tensors]
    if not values:
        return []
    names = _names(name, len(values), "allgather")
    return _run(_gather_all, values, tuple(names), ranks)


def _gather_all(values: Sequence[Any], names: Sequence[str], ranks: Ranks) -> list[Any]:
    """In a program. All rows are told before any are sent, so that they are under way together."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def gathered(*sent: Any) -> Any:
        if _xla.compiles(tf.compat.v1.get_default_graph()):
            counts = [[one.shape[0]] * len(_process_sets.members(ranks)) for one in sent]
            results = _gather_alike(sent, names, ranks)
        else:
            counts = _rows_of_all(sent, names, ranks)
            results = _gather_uneven(sent, names, counts, ranks)
        return results, lambda *gradients: _own_rows(gradients, names, counts, ranks)

    return list(gathered(*values))


def _own_rows(
    gradients: Sequence[Any], names: Sequence[str], counts: Sequence[Any], ranks: Ranks
) -> list[Any]:
    how = How("average", ranks=ranks)
    means = exchange_each(
        [tf.convert_to_tensor(one) for one in gradients],
        [f"{name}.grad" for name in names],
        [how] * len(names),
    )
    own = _process_sets.members(ranks).index(_native.rank())
    return [
        mean[sum(rows[:own]) : sum(rows[:own]) + rows[own]]
        for mean, rows in zip(means, counts, strict=True)
    ]


def _rows_of_all(values: Sequence[Any], names: Sequence[str], ranks: Ranks) -> list[list[Any]]:
    """How many rows each rank has of each tensor.

    Beside them one row of each is exchanged: should the ranks disagree about its type or shape, the
    engine says so on all of them.
    """
    members = _process_sets.members(ranks)
    own = members.index(_native.rank())
    tables, forms = [], []
    for value in values:
        rows = tf.shape(value, tf.int64)[0]
        tables.append(
            tf.one_hot(own, len(members), on_value=rows, off_value=tf.zeros([], tf.int64))
        )
        forms.append(_one_row(value))
    how = How("sum", priority=_objects.BROADCAST_PRIORITY, ranks=ranks)
    told = exchange_each(
        tables + forms,
        [f"{name}.rows" for name in names] + [f"{name}.form" for name in names],
        [how] * (2 * len(values)),
    )
    whole, rows = told[len(values) :], told[: len(values)]
    return [tf.unstack(_after(whole, one), len(members)) for one in rows]


def _after(results: Sequence[Any], counts: Any) -> Any:
    """These numbers, once the results are there. Control dependencies would not do: TensorFlow
    takes them away between operations without state."""
    if not results:
        return counts
    marks = [tf.reduce_any(tf.cast(tf.reshape(result, [-1])[:1], tf.bool)) for result in results]
    never = tf.logical_and(tf.timestamp() < 0, tf.reduce_any(tf.stack(marks)))
    return counts + tf.cast(never, counts.dtype)


def _one_row(value: Any) -> Any:
    """Zeros of the shape of a row, and of the type in which it is sent."""
    shape = tf.concat([[1], tf.shape(value)[1:]], 0)
    row = ops.sendable(tf.zeros(shape, value.dtype), None)
    # An empty one would tell nothing.
    return tf.reshape(row, tf.concat([[1], tf.shape(row)[1:]], 0))


def _gather_uneven(
    values: Sequence[Any], names: Sequence[str], counts: Sequence[Sequence[Any]], ranks: Ranks
) -> list[Any]:
    sent, called, hows, used = [], [], [], []
    for value, name, rows in zip(values, names, counts, strict=True):
        whole = _bytes_of(value)
        of_row = _row_bytes(value)
        for root, count in zip(_process_sets.members(ranks), rows, strict=True):
            used.append((count * of_row, count))
            sent.append(_padded(whole if root == _native.rank() else None, count * of_row))
            called.append(f"{name}.{root}")
            hows.append(_broadcast_from(root, ranks))
    results = exchange_each(sent, called, hows)
    parts = [
        _rows_from(result[:size], values[index // len(counts[0])], rows)
        for index, (result, (size, rows)) in enumerate(zip(results, used, strict=True))
    ]
    return _in_order(parts, values)


def _gather_alike(values: Sequence[Any], names: Sequence[str], ranks: Ranks) -> list[Any]:
    """Where all ranks have as many rows, as programs for XLA do."""
    sent, called, hows = [], [], []
    for value, name in zip(values, names, strict=True):
        own = ops.sendable(value, name)
        for root in _process_sets.members(ranks):
            sent.append(own)
            called.append(f"{name}.{root}")
            hows.append(_broadcast_from(root, ranks)._replace(sized=False))
    results = exchange_each(sent, called, hows)
    count = len(results) // len(values)
    parts = [ops.restored(one, values[index // count]) for index, one in enumerate(results)]
    return _in_order(parts, values)


def _in_order(parts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """What the ranks have of each tensor, one behind the other."""
    count = len(parts) // len(values)
    results = []
    for index, value in enumerate(values):
        result = tf.concat(parts[index * count : (index + 1) * count], 0)
        results.append(tf.ensure_shape(result, [None, *value.shape[1:]]))
    return results


def _broadcast_from(root: int, ranks: Ranks) -> How:
    return How("broadcast", root, _objects.BROADCAST_PRIORITY, ranks=ranks, sized=True)


# Reducescatter


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    name: str | None = None,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
) -> Any:
    """This rank's rows, along dimension 0, of the tensors of all ranks reduced by ``op``.

    The rows are dealt out evenly, in the order of the ranks; where they do not divide, the first
    ranks have one more. The gradient of a sum is what the ranks have of theirs, one behind the
    other, and of an average that over their number.

    Args:
        tensor: A tensor of one dimension at least, of a type that :func:`push_pull` takes.
        device_dense, ignore_name_scope: Not used.
        compression: One of :class:`Compression`; codecs are for averages and sums of floats.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``.
        name: Its name in the job.
        process_set: A :class:`~byteps.common.ProcessSet` of the ranks that take part.
        prescale_factor, postscale_factor: What it is multiplied by before, and after it.
    """
    factors = prescale_factor, postscale_factor
    return grouped_reducescatter(
        [tensor], device_dense, compression, op, process_set, *factors, [name], ignore_name_scope
    )[0]


@not_converted
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: Any = None,
    ignore_name_scope: bool = False,
) -> list[Any]:
    """:func:`reducescatter` of several tensors at once.

    ``name`` is a list of names, or one that the tensors' indices are added to.
    """
    del device_dense, ignore_name_scope
    if op == Adasum:
        raise ConfigError("op=Adasum: ranks of byteps.torch compute it, and TensorFlow's do not")
    _operations.operation_of(True, op)
    members = _process_sets.members(_process_sets.ranks_of(process_set))
    values = [_with_rows(tensor, "reducescatter") for tensor in tensors]
    names = _given(name, len(values))
    scaled = [ops.scaled(value, prescale_factor) for value in values]
    wholes = ops.push_pull_group(scaled, names, None, compression, op, 0, process_set)
    place, count = members.index(_native.rank()), len(members)
    parts = []
    for whole in wholes:
        rows = whole.shape[0] if whole.shape[0] is not None else tf.shape(whole)[0]
        least, more = rows // count, rows % count
        smaller = min if isinstance(rows, int) else tf.minimum
        begin = least * place + smaller(more, place)
        end = least * (place + 1) + smaller(more, place + 1)
        parts.append(ops.scaled(whole[begin:end], postscale_factor))
    return parts


# Alltoall


@not_converted
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = None,
) -> Any:
    """Parts of the tensors of all ranks, along dimension 0, in the order of the ranks.

    ``splits[i]`` rows go to rank ``i`` (or the rank at place ``i`` of the ``process_set``), the
    first ones to the first; without it all get as many. Where it is given, the result is a pair:
    the tensor, and how many rows came from each rank, an int32 tensor. Ranks pass the same type
    and, but for dimension 0, shape; else it is a :class:`byteps.errors.MismatchError` on all of
    them. Gradients go back the same way. Programs that XLA compiles have none.

    Args:
        tensor: A tensor of one dimension at least, of any type but strings and handles.
        splits: Whole numbers, one for each rank, none below 0 and all rows together.
        name: Its name in the job.
        ignore_name_scope: Not used.
        process_set: A :class:`~byteps.common.ProcessSet` of the ranks that take part.

    Raises:
        ConfigError: ``splits`` is not that, or the rows are not divided by the ranks.
    """
    del ignore_name_scope
    if not tf.executing_eagerly() and _xla.compiles(tf.compat.v1.get_default_graph()):
        raise ConfigError(
            "alltoall in a program that is compiled by XLA: what comes has no fixed shape; pass "
            "jit_compile=False to tf.function or model.compile"
        )
    ranks = _process_sets.ranks_of(process_set)
    value = _with_rows(tensor, "alltoall")
    count = len(_process_sets.members(ranks))
    parts = _parts(value, splits, name or "alltoall", count)
    named = _names([name], 1, "alltoall")
    output, received = _run(_all_to_all, [value, parts], tuple(named), ranks)
    return output if splits is None else (output, received)


def _parts(value: Any, splits: Any, name: str, count: int) -> Any:
    """The splits, as far as they are known before a program runs; what is wrong is an error."""
    rows = value.shape[0]
    if splits is None:
        if rows is not None and rows % count:
            raise ConfigError(
                f"alltoall of '{name}': {rows} rows are not divided by {count} ranks: pass splits"
            )
        each = tf.cast(tf.shape(value)[0] // count, tf.int32)
        return tf.fill([count], each)
    try:
        parts = tf.convert_to_tensor(splits)
        if not parts.dtype.is_integer:
            raise TypeError(f"they are of type {parts.dtype.name}")
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"alltoall of '{name}': splits={splits!r}: whole numbers are wanted, in a list or a "
            "tensor of a whole type"
        ) from error
    if not parts.shape.is_compatible_with([count]):
        raise _wrong_splits(name, f"of shape {parts.shape}", count, rows)
    known = tf.get_static_value(parts)
    if known is not None and rows is not None and (known.min() < 0 or known.sum() != rows):
        raise _wrong_splits(name, known.tolist(), count, rows)
    return tf.cast(parts, tf.int32)


def _wrong_splits(name: str, splits: Any, count: int, rows: int | None) -> ConfigError:
    return ConfigError(
        f"alltoall of '{name}': splits={splits} for {count} ranks and {rows} rows: one number for "
        "each rank, none below 0, and all rows together"
    )


def _all_to_all(inputs: Sequence[Any], names: Sequence[str], ranks: Ranks) -> list[Any]:
    """In a program: the parts that come, and how many rows they have."""
    (name,) = names

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def exchanged(value: Any, parts: Any) -> Any:
        output, received = _swap(value, parts, name, ranks)

        def back(gradient: Any, _: Any = None) -> Any:
            moved = _all_to_all([tf.convert_to_tensor(gradient), received], [f"{name}.grad"], ranks)
            return moved[0], None

        return (output, received), back

    return list(exchanged(*inputs))


def _swap(value: Any, parts: Any, name: str, ranks: Ranks) -> tuple[Any, Any]:
    members = _process_sets.members(ranks)
    own, count = members.index(_native.rank()), len(members)
    is_whole = tf.logical_and(
        tf.reduce_min(parts) >= 0, tf.equal(tf.reduce_sum(parts), tf.shape(value)[0])
    )
    text = str(_wrong_splits(name, "a tensor of others", count, value.shape[0]))
    checked = tf.debugging.Assert(is_whole, [f"byteps.errors.ConfigError: {text}", parts])
    with tf.control_dependencies([] if checked is None else [checked]):
        parts = tf.identity(parts)
    table = tf.one_hot(own, count, on_value=1, off_value=0, dtype=tf.int32)[:, None] * parts
    how = How("sum", priority=_objects.BROADCAST_PRIORITY, ranks=ranks)
    names = [f"{name}.splits", f"{name}.form"]
    told, form = exchange_each([table, _one_row(value)], names, [how] * 2)
    told = _after([form], told)
    received = told[:, own]
    of_row, blocks = _row_bytes(value), tf.split(value, told[own], num=count)
    sent, called, hows, sizes = [], [], [], []
    for place, other in enumerate(members):
        if place == own:
            continue
        self, pair = members[own], tuple(sorted((members[own], other)))
        goes, comes = (tf.cast(rows[place], tf.int64) for rows in (told[own], received))
        sent.append(_padded(_bytes_of(blocks[place]), goes * of_row))
        sent.append(_padded(None, comes * of_row))
        called += [f"{name}.{self} to {other}", f"{name}.{other} to {self}"]
        hows += [_broadcast_from(self, pair), _broadcast_from(other, pair)]
        sizes.append((comes * of_row, comes))
    results = exchange_each(sent, called, hows)
    # What a rank has sent comes back to it: without this, nothing would depend on it.
    received = _after(results[::2], received)
    came = [
        _rows_from(result[:size], value, rows)
        for result, (size, rows) in zip(results[1::2], sizes, strict=True)
    ]
    came.insert(own, blocks[own][: received[own]])
    output = tf.concat(came, 0)
    return tf.ensure_shape(output, [None, *value.shape[1:]]), received


# What they share


def _with_rows(tensor: Any, what: str) -> Any:
    value = tf.convert_to_tensor(tensor)
    if value.shape.rank == 0 or value.dtype in (tf.string, tf.resource, tf.variant):
        raise TensorError(
            f"{what} of a tensor of type {value.dtype.name} and shape {value.shape}: numbers are "
            "wanted, in one dimension at least; tf.reshape(x, [1]) gives a number one"
        )
    if value.shape.rank is None:
        raise TensorError(
            f"{what} of a tensor whose number of dimensions is not known: tell it by "
            "tf.ensure_shape, or by the input_signature of the function"
        )
    return value


def _given(name: Any, count: int) -> list[str | None]:
    """A name for each, or None, of a list or of one that indices are added to."""
    if name is None:
        return [None] * count
    if isinstance(name, str):
        return [f"{name}.{index}" for index in range(count)]
    names = list(name)
    if len(names) != count:
        raise ConfigError(f"{len(names)} names for {count} tensors: give each its own, or one name")
    return names


def _names(name: Any, count: int, what: str) -> list[str]:
    """All with names, of the place in a program; outside, calls follow each other."""
    given = _given(name, count)
    if tf.executing_eagerly():
        lap = _mismatches.get(_registry.job_number(), 0)
        return [one or f"{what}.{index}.{lap}" for index, one in enumerate(given)]
    return [one or place_in_program() for one in given]


def _run(
    function: Callable[[Sequence[Any], Sequence[str], Ranks], list[Any]],
    inputs: Sequence[Any],
    names: tuple[str, ...],
    ranks: Ranks,
) -> list[Any]:
    """The function in the program that is traced, or in one of its own."""
    if not tf.executing_eagerly():
        return function(inputs, names, ranks)
    specs = tuple((one.dtype, tuple(one.shape[1:])) for one in inputs)
    # A rank's place is part of such a program, and may be another in the next job.
    job = _registry.job_number(), _native.rank(), _native.size()
    try:
        with _typed_errors.typed(tf.errors.OpError):
            return list(_program(function, specs, names, ranks, job)(*inputs))
    except MismatchError:
        # A name about which the ranks disagreed is of no use any more, on any of them.
        _mismatches[job[0]] = _mismatches.get(job[0], 0) + 1
        raise


@functools.lru_cache(_PROGRAMS_MAX)
def _program(
    function: Callable[[Sequence[Any], Sequence[str], Ranks], list[Any]],
    specs: tuple[tuple[Any, tuple[int, ...]], ...],
    names: tuple[str, ...],
    ranks: Ranks,
    job: tuple[int, int, int],
) -> Any:
    del job
    signature = [tf.TensorSpec([None, *shape], dtype) for dtype, shape in specs]
    program = tf.function(lambda *inputs: function(inputs, names, ranks), autograph=False)
    return program.get_concrete_function(*signature)


def _bytes_of(value: Any) -> Any:
    sent = ops.sendable(value, None)
    return tf.reshape(tf.bitcast(sent, tf.uint8), [-1])


def _element_bytes(dtype: Any) -> int:
    return 1 if dtype == tf.bool else int(dtype.size)


def _row_bytes(value: Any) -> Any:
    shape = tf.shape(value, tf.int64)[1:]
    return tf.reduce_prod(shape) * _element_bytes(value.dtype)


def _rows_from(sent: Any, value: Any, rows: Any) -> Any:
    """So many rows as those of the value, of their bytes."""
    dtype = value.dtype.base_dtype
    shape = tf.concat([[tf.cast(rows, tf.int64)], tf.shape(value, tf.int64)[1:]], 0)
    if dtype == tf.bool:
        return tf.cast(tf.reshape(sent, shape), tf.bool)
    if dtype.size == 1:
        return tf.bitcast(tf.reshape(sent, shape), dtype)
    return tf.bitcast(tf.reshape(sent, tf.concat([shape, [dtype.size]], 0)), dtype)


def _padded(content: Any, count: Any) -> Any:
    """The bytes, or zeros, in the least size in which so many travel: less than a quarter more."""
    room = _room(count)
    if content is None:
        return tf.zeros([room], tf.uint8)
    return tf.pad(content, [[0, room - count]])


def _room(count: Any) -> Any:
    # All whole numbers, so that ranks on other machines find the same.
    powers = tf.constant([_ROOM_BYTES_MIN << index for index in range(50)], tf.int64)
    above = tf.reduce_sum(tf.cast(powers < count, tf.int32))
    step = powers[above] // (2 * _ROOM_STEPS)
    large = -(-count // step) * step
    small = tf.where(count > 0, tf.cast(_ROOM_BYTES_MIN, tf.int64), tf.zeros([], tf.int64))
    return tf.where(above > 0, large, small)
