"""push_pull, broadcast and allgather of arrays, and of trees of arrays.

A *push_pull* gives every rank the sum, the average, or another reduction (:class:`ReduceOp`), of
what all ranks passed under one name. The arrays of a tree are all under way together, and each has
the tree's name followed by its place in it, as ``jax.tree_util.keystr`` writes that.

All functions work inside ``jax.jit`` and its like as well as outside. Outside, what goes wrong is
raised as a class of :mod:`byteps.errors`; in a program XLA makes it a ``JaxRuntimeError`` with the
same text, of which :func:`typed_errors` makes that class again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from byteps import (
    _backups,
    _native,
    _objects,
    _operations,
    _process_sets,
    _registry,
    _typed_errors,
)
from byteps._codecs import Codec, encoding_for
from byteps._dtypes import DTYPES
from byteps._operations import Adasum, ReduceOp
from byteps.errors import ConfigError, TensorError
from byteps.jax import _arrays, _primitive
from byteps.jax._arrays import How

__all__ = [
    "allgather",
    "broadcast",
    "contributors",
    "declare",
    "poll",
    "push_pull",
    "push_pull_async",
    "synchronize",
    "typed_errors",
    "wait",
]

Tree = TypeVar("Tree")


def _leaves(tree: Any, name: str | None) -> tuple[list[Any], list[str | None], Any]:
    """The arrays in a tree, their names, and the tree's structure."""
    found, structure = jax.tree_util.tree_flatten_with_path(tree)
    arrays = [jnp.asarray(leaf) for _, leaf in found]
    if name is None:
        return arrays, [None] * len(found), structure
    return arrays, [name + jax.tree_util.keystr(path) for path, _ in found], structure


def _operation(average: bool, op: Any) -> str:
    if op == Adasum:
        raise ConfigError("op=Adasum: ranks of byteps.torch compute it, and no JAX program does")
    return _operations.operation_of(average, op)


def _hows(
    arrays: Sequence[Any],
    names: Sequence[str | None],
    operation: str,
    priority: int,
    compression: Any = None,
    process_set: Any = None,
    backup_workers: int | None = 0,
) -> list[How]:
    ranks = _process_sets.ranks_of(process_set)
    backups = _backups.number_of(backup_workers, names)
    hows = []
    for array, name in zip(arrays, names, strict=True):
        is_float = jnp.issubdtype(array.dtype, jnp.floating)
        encoding = encoding_for(compression, is_float, operation)
        hows.append(How(name, operation, 0, priority, encoding, ranks, backups))
    return hows


def push_pull(
    tree: Tree,
    average: bool = True,
    name: str | None = None,
    priority: int = 0,
    op: ReduceOp | None = None,
    compression: Codec | None = None,
    process_set: Any = None,
    backup_workers: int | None = 0,
) -> Tree:
    """The average (or sum) over all ranks of each array in ``tree``, as a tree of the same shape.

    Integers are averaged by floor division. Among arrays that wait, one with a larger ``priority``
    is sent sooner. ``op``, where given, is what is computed, whatever ``average`` says. Averages
    and sums have gradients: the gradient of an average is the average of the ranks' gradients.
    ``compression`` is one of :class:`byteps.jax.Compression`, for averages and sums of floats.
    With a ``process_set``, here and below, a :class:`byteps.jax.ProcessSet`, it is among its ranks,
    which alone make the call, and names are the set's own. A program on a GPU takes none.
    ``backup_workers`` is for how many of the slowest ranks the result does not wait
    (docs/stragglers.md); as ``BPS_BACKUP_WORKERS`` says where it is None. It wants a name.

    Without a ``name`` the order of the calls is what matters; in a program, the order in which
    exchanges were compiled. So give names where ranks may differ in that. In one program each
    name may be under way once at a time.

    Under ``jax.vmap`` the whole batch is exchanged at once, as ``name.batch``; its size is part of
    the shape, on which the ranks have to agree. Where a program runs on several devices, each
    exchanges with the devices of the same number on the other ranks.

    Raises:
        TensorError: An array of a type that is not summed, or on a device that is no CPU.
        MismatchError: The ranks disagree about what a name stands for.
        ConfigError: This rank is not in ``process_set``, or that is not added to this job.
        BytePSError: It has to wait for all ranks, and ``backup_workers`` says otherwise.
    """
    operation = _operation(average, op)
    arrays, names, structure = _leaves(tree, name)
    hows = _hows(arrays, names, operation, priority, compression, process_set, backup_workers)
    results = _primitive.exchange(arrays, hows)
    whole: Tree = structure.unflatten(results)
    return whole


def push_pull_async(
    tree: Any,
    average: bool = True,
    name: str | None = None,
    priority: int = 0,
    op: ReduceOp | None = None,
    compression: Codec | None = None,
    process_set: Any = None,
    backup_workers: int | None = 0,
) -> int:
    """:func:`push_pull` that does not wait: a handle for :func:`synchronize`.

    Not for use in programs, in which all push_pulls run beside what does not need their results.
    """
    operation = _operation(average, op)
    arrays, names, structure = _leaves(tree, name)
    for array, one in zip(arrays, names, strict=True):
        if isinstance(array, jax.core.Tracer):
            raise ConfigError(
                "push_pull_async inside jit, grad or another transformation: call push_pull, which "
                "runs there beside what does not need its result"
            )
        _arrays.dtype_of(array, one)
    hows = _hows(arrays, names, operation, priority, compression, process_set, backup_workers)
    return _arrays.start(arrays, hows, structure.unflatten)


def poll(handle: int) -> bool:
    """Whether :func:`synchronize` would return at once."""
    return _registry.poll(handle)


def wait(handle: int, timeout: float | None = None) -> bool:
    """Waits until it is done, at most ``timeout`` seconds; returns whether it is.

    The handle stays valid: :func:`synchronize` fetches the result. What went wrong is raised.
    """
    return _registry.wait(handle, timeout)


def synchronize(handle: int, timeout: float | None = None) -> Any:
    """Waits until it is done and returns its tree of new arrays; then the handle is spent.

    After ``timeout`` seconds it raises :class:`byteps.errors.WaitTimeoutError`, and the handle may
    be waited for again. A handle that was synchronised before gives None.
    """
    return _registry.synchronize(handle, timeout)


def contributors(handle: int) -> list[int] | None:
    """Waits until it is done, and returns the ranks whose arrays are in its result, rising.

    They are all for whom it is, unless some have died in a job that goes on without them
    (``BPS_ELASTIC=shrink``), or were too late (``backup_workers``); every rank is told the same. An
    average is divided by as many as they are. A rank that is in a part of the result alone is not
    among them. To be called before :func:`synchronize`, after which the handle is spent: then it
    gives None.
    """
    return _registry.contributors(handle)


def declare(
    name: str,
    tree: Any = None,
    average: bool = True,
    op: ReduceOp | None = None,
    compression: Codec | None = None,
    process_set: Any = None,
    backup_workers: int | None = 0,
) -> None:
    """Makes the arrays of a tree known before they are first sent, which saves a round trip then.

    ``tree`` is of arrays or of ``jax.ShapeDtypeStruct``. A name alone needs nothing: the order of
    declaration has no meaning.
    """
    operation = _operation(average, op)
    found, _ = jax.tree_util.tree_flatten_with_path(tree)
    names = [name + jax.tree_util.keystr(path) for path, _ in found]
    leaves = [leaf for _, leaf in found]
    hows = _hows(leaves, names, operation, 0, compression, process_set, backup_workers)
    _registry.declare(
        [_arrays.tensor_of(leaf, how) for leaf, how in zip(leaves, hows, strict=True)]
    )


# Broadcast


def broadcast(tree: Tree, root_rank: int, name: str | None = None, process_set: Any = None) -> Tree:
    """The arrays of ``root_rank``, bit for bit, as a tree of the same shape.

    All ranks pass arrays of its shapes and types, which may be any types that JAX has. The root's
    gradient is the average of the ranks' gradients, that of the others is zero; only floating
    point types that can be summed have one. The root of a ``process_set`` is given by its number in
    the job.
    """
    ranks = _process_sets.ranks_of(process_set)
    _objects.check_root(root_rank, ranks)
    arrays, names, structure = _leaves(tree, name)
    sent = [_sendable(array) for array in arrays]
    priority = _objects.BROADCAST_PRIORITY
    hows = [How(one, "broadcast", root_rank, priority, ranks=ranks) for one in names]
    results = _primitive.exchange(sent, hows)
    whole: Tree = structure.unflatten(
        [_restored(result, array) for result, array in zip(results, arrays, strict=True)]
    )
    return whole


def _is_key(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def _sendable(array: Any) -> Any:
    """What the engine can send in its place: an array of bytes if need be."""
    if _is_key(array):
        return _sendable(jax.random.key_data(array))
    if str(array.dtype) in DTYPES:
        return array
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint8)[..., None]
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        parts = jnp.stack([array.real, array.imag], axis=-1)
        return jax.lax.bitcast_convert_type(parts, jnp.uint8).reshape(*array.shape, -1)
    if array.dtype.itemsize == 1:
        return jax.lax.bitcast_convert_type(array, jnp.uint8)[..., None]
    return jax.lax.bitcast_convert_type(array, jnp.uint8)


def _restored(sent: Any, array: Any) -> Any:
    """The array that was sent as this, of the type of the other."""
    if _is_key(array):
        data = _restored(sent, jax.eval_shape(jax.random.key_data, array))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    if str(array.dtype) in DTYPES:
        return sent
    if array.dtype == jnp.bool_:
        return sent[..., 0].astype(jnp.bool_)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        part = np.dtype(f"float{array.dtype.itemsize * 4}")
        parts = sent.reshape(*array.shape, 2, part.itemsize)
        parts = jax.lax.bitcast_convert_type(parts, part)
        return jax.lax.complex(parts[..., 0], parts[..., 1])
    if array.dtype.itemsize == 1:
        sent = sent[..., 0]
    return jax.lax.bitcast_convert_type(sent, array.dtype)


# Gathering


def allgather(array: Any, name: str | None = None, process_set: Any = None) -> Any:
    """The arrays of all ranks, one behind the other along dimension 0, in the order of the ranks.

    They have the same type and, but for dimension 0, the same shape; inside a program all of it,
    since programs have fixed shapes. Each rank broadcasts its own.
    """
    array = jnp.asarray(array)
    if array.ndim == 0:
        raise TensorError(f"allgather of '{name}': a scalar has no dimension 0: reshape it to (1,)")
    ranks = _process_sets.ranks_of(process_set)
    members = list(_process_sets.members(ranks))
    own = members.index(_native.rank())
    rows = [array.shape[0]] * len(members)
    if not isinstance(array, jax.core.Tracer):
        base = name or f"allgather {_registry.count_up(('jax.allgather', ranks))}"
        counts = np.zeros(len(members), np.int64)
        counts[own] = array.shape[0]
        rows = _sum_of_counts(counts, f"{base}.rows", ranks)
    parts = [
        array if place == own else jnp.zeros((count, *array.shape[1:]), array.dtype)
        for place, count in enumerate(rows)
    ]
    # A name stands for one shape, and the number of rows may change from call to call.
    hows = [
        How(name and f"{name}.{root}", "broadcast", root, _objects.BROADCAST_PRIORITY, ranks=ranks)
        for root in members
    ]
    results = _primitive.exchange([_sendable(part) for part in parts], hows)
    return jnp.concatenate([_restored(one, array) for one in results])


def _sum_of_counts(
    counts: np.ndarray[Any, Any], name: str, ranks: tuple[int, ...] | None
) -> list[int]:
    """The sum over all ranks, or these, without JAX's own choice of types."""
    total = np.empty_like(counts)
    tensor = _registry.Tensor(name, "i64", counts.shape, "sum", ranks=ranks)
    send = _registry.Send(
        tensor, counts.ctypes.data, total.ctypes.data, _objects.BROADCAST_PRIORITY
    )
    handle = _registry.start([send], (counts, total), lambda memory: memory[1].tolist())
    rows: list[int] = _registry.synchronize(handle)
    return rows


# Errors


def typed_errors() -> contextlib.AbstractContextManager[None]:
    """Raises what went wrong in a program as the class of :mod:`byteps.errors` that it is::

        with bps.typed_errors():
            state = jax.block_until_ready(step(state, batch))

    XLA knows texts alone, so what leaves a program by itself is a ``JaxRuntimeError``.
    """
    # A ValueError comes from programs that end at once.
    return _typed_errors.typed(RuntimeError, ValueError)
