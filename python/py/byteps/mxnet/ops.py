"""push_pull and broadcast, as operations of MXNet's engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mxnet as mx
from byteps import _process_sets, _registry
from byteps._backups import UNNAMED, Backups
from byteps._objects import BROADCAST_PRIORITY, check_root
from byteps.mxnet import _engine
from byteps.mxnet.compression import Compression

__all__ = [
    "broadcast_parameters",
    "byteps_declare_tensor",
    "byteps_push_pull",
    "declare",
    "push_pull",
]

Ranks = tuple[int, ...] | None

#: How names are encoded, as they were declared.
_encodings: dict[str, str | None] = {}


def byteps_declare_tensor(name: str, **kwargs: Any) -> None:
    """Says how a name is encoded from now on. Other names need no declaration.

    Args:
        name: As for :func:`byteps_push_pull`.
        kwargs: BytePS's parameters of compression, with or without the prefix ``byteps_``:
            see :meth:`Compression.from_params`. None for an array that travels as it is.

    Raises:
        byteps.errors.ConfigError: for a parameter that is not known.
    """
    codec = Compression.from_params(kwargs)
    _encodings[name] = None if codec is None else codec.encoding


declare = byteps_declare_tensor


def byteps_push_pull(
    tensor: Any,
    version: int = 0,
    priority: int = 0,
    name: str | bytes | None = None,
    is_average: bool = True,
    backup_workers: int | None = 0,
) -> None:
    """Replaces an array by its average, or its sum, over all ranks. Returns at once.

    What uses the array from now on comes behind the exchange, by MXNet's own order. Any number of
    exchanges may be under way; those of one name follow one another.

    Args:
        tensor: A dense array in host memory, of float16, float32, float64, uint8, int8, int32 or
            int64, of any shape. An array in a layout of MXNet's own, as weights and results of
            convolutions may have, is an ``MXNetError`` for whoever waits for it: exchange a copy.
        version: There for BytePS's callers; it has no effect.
        priority: Of two arrays that are ready, the one with the larger number goes first.
        name: The same on all ranks. Arrays without a name are matched by the order of the calls.
        is_average: Whether to divide the sum by the number of ranks.
        backup_workers: For how many of the slowest ranks the result does not wait
            (docs/stragglers.md), of an array with a name; as ``BPS_BACKUP_WORKERS`` says where it
            is None.

    Raises:
        byteps.errors.BytePSError: where it has to wait for all ranks, and ``backup_workers`` says
            otherwise.
        byteps.errors.TensorError: for an array that cannot be exchanged.
        byteps.errors.MismatchError: where another rank has another type or shape by this name; on
            the rank that comes first, an ``MXNetError`` for whoever waits for the array.
    """
    del version
    backups = Backups.asked(backup_workers).unless(UNNAMED if name is None else None)
    text = name_of(name)
    _engine.exchange(
        *(tensor, text, "average" if is_average else "sum"),
        priority=priority,
        encoding=encoding_of(text),
        backups=backups,
    )


push_pull = byteps_push_pull


def name_of(name: str | bytes | None, ranks: Ranks = None) -> str:
    """The name, as text, or one that follows from the order of the calls."""
    if name is None:
        # Apart from those of other frameworks, whose names change their meaning when the last
        # operation is over: here it may not have begun.
        return f"mxnet.{_registry.unnamed(1, ranks)[0]}"
    return name.decode() if isinstance(name, bytes) else name


def encoding_of(name: str) -> str | None:
    """How this name was declared to be encoded."""
    return _encodings.get(name)


def broadcast_arrays(named: list[tuple[str, Any]], root_rank: int, ranks: Ranks = None) -> None:
    """Overwrites these arrays with those of the root, and waits for them.

    Through copies: an array that was used by then may be in a layout of MXNet's own.
    """
    check_root(root_rank, ranks)
    copies = []
    for name, array in named:
        _engine.dtype_of(array, name)
        copy = mx.nd.array(array.asnumpy(), ctx=mx.cpu(), dtype=array.dtype)
        _engine.exchange(
            *(copy, name, "broadcast", root_rank, BROADCAST_PRIORITY), ranks=ranks, settles=True
        )
        copies.append(copy)
    for (_, array), copy in zip(named, copies, strict=True):
        copy.copyto(array)
        array.wait_to_read()


def broadcast_gluon(named: list[tuple[str, Any]], root_rank: int, ranks: Ranks = None) -> None:
    """Overwrites Gluon's parameters with those of the root: now, or when they get their shape."""
    ready: list[tuple[str, Any]] = []
    for name, param in named:
        if param._deferred_init:
            _broadcast_when_initialised(param, name, root_rank, ranks)
        else:
            ready += _of_each_device(name, param)
    broadcast_arrays(ready, root_rank, ranks)


def _of_each_device(name: str, param: Any) -> list[tuple[str, Any]]:
    return [
        (f"{name}@{place}" if place else name, it) for place, it in enumerate(param.list_data())
    ]


def _broadcast_when_initialised(param: Any, name: str, root_rank: int, ranks: Ranks) -> None:
    """The first forward pass gives it a shape and values, and is to compute with the root's."""
    initialise = param._init_impl

    def then_broadcast(*arguments: Any) -> None:
        # A trainer may wait for it besides whoever has broadcast it before.
        vars(param).pop("_init_impl", None)
        initialise(*arguments)
        broadcast_arrays(_of_each_device(name, param), root_rank, ranks)

    param._init_impl = then_broadcast


def broadcast_parameters(
    params: Mapping[str, Any],
    root_rank: int = 0,
    prefix: str | None = None,
    process_set: Any = None,
) -> None:
    """Overwrites parameters with those of one rank, and returns when they are there.

    Gluon's parameters that have no shape yet are overwritten when they get it: in the first forward
    pass, before it uses them.

    Args:
        params: Arrays, or Gluon's parameters, by name, as ``collect_params()`` and
            ``Module.get_params()`` give them. They are matched in the order of their names, so
            prefixes that Gluon numbers may differ between ranks.
        root_rank: Whose they are.
        prefix: What their names in the job begin with. Models whose shapes differ need none.
        process_set: A :class:`~byteps.common.ProcessSet` of the ranks that take part.

    Raises:
        byteps.errors.ConfigError: for a root that is none of the ranks.
        byteps.errors.TensorError: for what cannot be exchanged.
        mxnet.MXNetError: where the exchange fails.
    """
    ranks = _process_sets.ranks_of(process_set)
    check_root(root_rank, ranks)
    arrays: list[tuple[str, Any]] = []
    of_gluon: list[tuple[str, Any]] = []
    for index, name in enumerate(sorted(params)):
        value = params[name]
        kind = of_gluon if isinstance(value, mx.gluon.Parameter) else arrays
        kind.append((f"{prefix or ''}parameter_{index}", value))
    broadcast_arrays(arrays, root_rank, ranks)
    broadcast_gluon(of_gluon, root_rank, ranks)
