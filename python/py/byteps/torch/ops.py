"""push_pull and broadcast of torch tensors, in all their forms.

A *push_pull* gives every rank the sum, the average, or another reduction (:class:`ReduceOp`), of
what all ranks passed under one name. The ranks may call in any order as long as each name has the
same shape, type and operation everywhere. Without a name the order of the calls is what matters.

The forms without suffix wait and return a new tensor; ``_async`` returns a handle for
:func:`poll`, :func:`wait` and :func:`synchronize`; ``_inplace`` (Horovod's ``_``) writes the result
into the tensor that was passed; ``_group`` (Horovod's ``grouped_``) takes a list.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from byteps import _objects, _process_sets, _registry, common
from byteps._backups import UNNAMED, Backups
from byteps._operations import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    ReduceOp,
    Sum,
    operation_of,
)
from byteps.errors import ConfigError
from byteps.torch import _tensors
from byteps.torch._sending import (
    Ranks,
    contributors,
    poll,
    scaled,
    start,
    synchronize,
    wait,
)
from byteps.torch._tensors import Memory
from byteps.torch.compression import Compression

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "byteps_push_pull",
    "byteps_push_pull_group",
    "byteps_torch_set_num_grads",
    "contributors",
    "declare",
    "poll",
    "push_pull",
    "push_pull_async",
    "push_pull_async_inplace",
    "push_pull_group",
    "push_pull_group_async",
    "push_pull_group_async_inplace",
    "push_pull_group_inplace",
    "push_pull_group_sync_inplace",
    "push_pull_inplace",
    "synchronize",
    "wait",
]


BROADCAST_PRIORITY = _objects.BROADCAST_PRIORITY


def push_pull_start(
    tensors: Sequence[torch.Tensor],
    operation: str,
    names: Sequence[str | None],
    priority: int,
    inplace: bool,
    single: bool,
    prescale: float = 1.0,
    postscale: float = 1.0,
    ranks: Ranks = None,
    then: Callable[[list[torch.Tensor]], Any] | None = None,
    compression: Any = Compression.none,
    backup_workers: int | None = 0,
) -> int:
    backups = Backups.asked(backup_workers).unless(None if all(names) else UNNAMED)
    if operation == "adasum":
        backups = backups.unless("op=Adasum combines the tensors of all ranks")
    memories, sources = [], []
    for tensor, name in zip(tensors, names, strict=True):
        _tensors.check(tensor, "push_pull of", name)
        _tensors.summed_dtype(tensor, "push_pull of", name)
        sent = tensor if prescale == 1.0 else scaled(tensor.detach(), prescale)
        sources.append(sent)
        if operation == "adasum":
            continue
        if not inplace:
            memories.append(_tensors.to_new(sent))
        elif sent is tensor:
            memories.append(_tensors.in_place(tensor))
        else:
            memories.append(_tensors.to_other(sent, tensor))
    if operation == "adasum":
        from byteps.torch import _adasum  # It stands above this module.

        return _adasum.start(tensors, names, inplace, single, postscale, ranks, then, sources)
    return start(
        "push_pull of",
        memories,
        operation,
        names,
        priority,
        in_place=inplace,
        single=single,
        postscale=postscale,
        ranks=ranks,
        then=then,
        compression=compression,
        backups=backups,
    )


def names_of(names: Any, count: int) -> list[str | None]:
    if names is None:
        return [None] * count
    if isinstance(names, str):
        return [f"{names}.{index}" for index in range(count)]
    if len(names) != count:
        raise ConfigError(f"{count} tensors and {len(names)} names: give as many names as tensors")
    return list(names)


class _PushPull(torch.autograd.Function):
    """push_pull as autograd sees it: the gradient of an average is the average of the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        how: tuple[str, int, float, float, Ranks, Any, int | None],
        names: list[str | None],
        *tensors: torch.Tensor,
    ) -> Any:
        operation, priority, prescale, postscale, ranks, compression, backups = how
        ctx.how, ctx.names = how, names
        handle = push_pull_start(
            tensors,
            operation,
            names,
            priority,
            False,
            False,
            prescale,
            postscale,
            ranks,
            compression=compression,
            backup_workers=backups,
        )
        return tuple(synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        operation, priority, prescale, postscale, ranks, compression, backups = ctx.how
        if operation not in ("average", "sum"):
            raise ConfigError(f"a push_pull with the operation {operation} has no gradient here")
        names = [name and f"{name}.backward" for name in ctx.names]
        handle = push_pull_start(
            gradients,
            operation,
            names,
            priority,
            False,
            False,
            postscale,
            prescale,
            ranks,
            compression=compression,
            backup_workers=backups,
        )
        return None, None, *synchronize(handle)


def differentiable(
    tensors: Sequence[torch.Tensor],
    operation: str,
    names: list[str | None],
    priority: int,
    compression: Any,
    prescale: float = 1.0,
    postscale: float = 1.0,
    ranks: Ranks = None,
    backup_workers: int | None = 0,
) -> list[torch.Tensor]:
    for tensor, name in zip(tensors, names, strict=True):
        _tensors.check(tensor, "push_pull of", name)
    if operation not in ("average", "sum") and compression is not Compression.none:
        raise ConfigError(f"compression={compression!r} is for averages and sums, not {operation}")
    smaller = [compression.compress(tensor) for tensor in tensors]
    sent = [tensor for tensor, _ in smaller]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in sent):
        how = operation, priority, prescale, postscale, ranks, compression, backup_workers
        outputs = _PushPull.apply(how, names, *sent)
    else:
        outputs = synchronize(
            push_pull_start(
                sent,
                operation,
                names,
                priority,
                False,
                False,
                prescale,
                postscale,
                ranks,
                compression=compression,
                backup_workers=backup_workers,
            )
        )
    return [
        compression.decompress(output, ctx)
        for output, (_, ctx) in zip(outputs, smaller, strict=True)
    ]


# BytePS's names


def declare(name: str, tensor: torch.Tensor | None = None, average: bool = True) -> None:
    """Makes a tensor known before it is first sent, which saves a round trip then.

    BytePS numbered names by the order of declaration; here the order does not matter, so a name
    alone (as BytePS has it) needs nothing. With ``tensor``, of which shape and type count, it is
    declared to the job, and a rank that disagrees is told at once.
    """
    if tensor is not None:
        _registry.declare([_tensors.gradient(name, tensor, Compression.none, average)])


def push_pull(
    tensor: torch.Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    process_set: Any = None,
    backup_workers: int | None = 0,
) -> torch.Tensor:
    """The average (or sum) of the tensor over all ranks, as a new tensor; autograd passes through.

    Integers are averaged by floor division. Among tensors that wait, one with a larger ``priority``
    is sent sooner. ``op``, where given, is what is computed, whatever ``average`` says; minima,
    maxima and products have no gradient and take no ``compression``. ``process_set``, here and
    below, is a :class:`~byteps.torch.ProcessSet` of the ranks that take part. ``version`` is not
    used.

    ``backup_workers`` is for how many of the slowest ranks the result does not wait
    (docs/stragglers.md), of sums and averages of floats with a name; as ``BPS_BACKUP_WORKERS`` says
    where it is None. :func:`contributors` tells whose tensors are in it.
    """
    operation = operation_of(average, op)
    ranks = _process_sets.ranks_of(process_set)
    return differentiable(
        [tensor],
        operation,
        [name],
        priority,
        compression,
        ranks=ranks,
        backup_workers=backup_workers,
    )[0]


def push_pull_async(
    tensor: torch.Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    op: ReduceOp | None = None,
    process_set: Any = None,
    backup_workers: int | None = 0,
) -> int:
    """:func:`push_pull` that does not wait. Leave the tensor unchanged until it is done."""
    operation, ranks = operation_of(average, op), _process_sets.ranks_of(process_set)
    return push_pull_start(
        [tensor],
        operation,
        [name],
        priority,
        False,
        True,
        ranks=ranks,
        backup_workers=backup_workers,
    )


def push_pull_inplace(
    tensor: torch.Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    op: ReduceOp | None = None,
    process_set: Any = None,
    backup_workers: int | None = 0,
) -> torch.Tensor:
    """:func:`push_pull` into the tensor itself."""
    synchronize(
        push_pull_async_inplace(
            tensor, average, name, version, priority, op, process_set, backup_workers
        )
    )
    return tensor


def push_pull_async_inplace(
    tensor: torch.Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    op: ReduceOp | None = None,
    process_set: Any = None,
    backup_workers: int | None = 0,
) -> int:
    """:func:`push_pull` into the tensor itself, without waiting."""
    operation, ranks = operation_of(average, op), _process_sets.ranks_of(process_set)
    return push_pull_start(
        [tensor],
        operation,
        [name],
        priority,
        True,
        True,
        ranks=ranks,
        backup_workers=backup_workers,
    )


byteps_push_pull = push_pull_async_inplace


def push_pull_group(
    tensors: Sequence[torch.Tensor],
    average: bool = True,
    name: Any = None,
    version: int = 0,
    priority: int = 0,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    process_set: Any = None,
    backup_workers: int | None = 0,
) -> list[torch.Tensor]:
    """:func:`push_pull` of several tensors at once.

    ``name`` is a list of names, or one that the tensors' indices are added to.
    """
    names, ranks = names_of(name, len(tensors)), _process_sets.ranks_of(process_set)
    operation = operation_of(average, op)
    return differentiable(
        *(tensors, operation, names, priority, compression),
        ranks=ranks,
        backup_workers=backup_workers,
    )


def push_pull_group_async(
    tensors: Sequence[torch.Tensor],
    average: bool = True,
    name: Any = None,
    version: int = 0,
    priority: int = 0,
    op: ReduceOp | None = None,
    process_set: Any = None,
) -> int:
    """:func:`push_pull_group` that does not wait: one handle for all."""
    names, operation = names_of(name, len(tensors)), operation_of(average, op)
    ranks = _process_sets.ranks_of(process_set)
    return push_pull_start(tensors, operation, names, priority, False, False, ranks=ranks)


def push_pull_group_inplace(
    tensors: Sequence[torch.Tensor],
    average: bool = True,
    name: Any = None,
    version: int = 0,
    priority: int = 0,
    op: ReduceOp | None = None,
    process_set: Any = None,
) -> list[torch.Tensor]:
    """:func:`push_pull_group` into the tensors themselves."""
    synchronize(
        push_pull_group_async_inplace(tensors, average, name, version, priority, op, process_set)
    )
    return list(tensors)


def push_pull_group_async_inplace(
    tensors: Sequence[torch.Tensor],
    average: bool = True,
    name: Any = None,
    version: int = 0,
    priority: int = 0,
    op: ReduceOp | None = None,
    process_set: Any = None,
) -> int:
    """:func:`push_pull_group` into the tensors themselves, without waiting."""
    names, operation = names_of(name, len(tensors)), operation_of(average, op)
    ranks = _process_sets.ranks_of(process_set)
    return push_pull_start(tensors, operation, names, priority, True, False, ranks=ranks)


_group_lock = threading.Lock()
_group_size = _group_count = 0


def byteps_torch_set_num_grads(num_grads: int) -> None:
    """After how many calls :func:`push_pull_group_sync_inplace` begins to count anew."""
    global _group_size, _group_count
    with _group_lock:
        _group_size, _group_count = num_grads, 0


def push_pull_group_sync_inplace(
    tensor: torch.Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    op: ReduceOp | None = None,
    process_set: Any = None,
) -> tuple[int, int]:
    """:func:`push_pull_async_inplace` that counts its calls: the handle, and which call it was.

    Callers of BytePS wait for all handles of a step when the count is that of
    :func:`byteps_torch_set_num_grads`.
    """
    global _group_count
    handle = push_pull_async_inplace(tensor, average, name, version, priority, op, process_set)
    with _group_lock:
        _group_count += 1
        count = _group_count
        if count == _group_size:
            _group_count = 0
    return handle, count


byteps_push_pull_group = push_pull_group_sync_inplace


# Broadcast


def broadcast_all_(
    named: Sequence[tuple[str, torch.Tensor]], root_rank: int, ranks: Ranks = None
) -> None:
    """Overwrites these tensors with those of ``root_rank``, all at once.

    A name may come again for a tensor of another type or size, as those of a second model do.
    """
    for name, tensor in named:
        _tensors.check(tensor, "broadcast of", name)
    memories = [_tensors.in_place(tensor) for _, tensor in named]
    names = [name for name, _ in named]
    synchronize(
        _broadcast_start(
            memories, root_rank, names, in_place=True, single=False, settle=True, ranks=ranks
        )
    )


def _broadcast_start(
    memories: Sequence[Memory],
    root_rank: int,
    names: Sequence[str | None],
    *,
    in_place: bool,
    single: bool = True,
    settle: bool = False,
    ranks: Ranks = None,
) -> int:
    _objects.check_root(root_rank, ranks)
    return start(
        "broadcast of",
        memories,
        "broadcast",
        names,
        BROADCAST_PRIORITY,
        root_rank,
        in_place=in_place,
        single=single,
        settle=settle,
        ranks=ranks,
    )


class _Broadcast(torch.autograd.Function):
    """broadcast as autograd sees it: the root gets the average of the ranks' gradients, as in
    Horovod, so that a loss averaged over the ranks has the right gradient; others get zeros."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: Any
    ) -> torch.Tensor:
        ctx.root_rank, ctx.name, ctx.process_set = root_rank, name, process_set
        result: torch.Tensor = synchronize(broadcast_async(tensor, root_rank, name, process_set))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        name = ctx.name and f"{ctx.name}.backward"
        mean = synchronize(push_pull_async(gradient, name=name, process_set=ctx.process_set))
        own = mean if common.rank() == ctx.root_rank else torch.zeros_like(mean)
        return own, None, None, None


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None
) -> torch.Tensor:
    """The tensor of ``root_rank``, bit for bit, as a new tensor; autograd passes through: the root
    gets the average of the ranks' gradients.

    All ranks pass a tensor of its shape and type, which may be any type that torch has.
    ``process_set``, here and below, is a :class:`~byteps.torch.ProcessSet` of the ranks that take
    part; the root's number is that in the job.
    """
    _process_sets.ranks_of(process_set)
    _tensors.check(tensor, "broadcast of", name)
    result: torch.Tensor
    if torch.is_grad_enabled() and tensor.requires_grad:
        result = _Broadcast.apply(tensor, root_rank, name, process_set)
    else:
        result = synchronize(broadcast_async(tensor, root_rank, name, process_set))
    return result


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None
) -> int:
    """:func:`broadcast` that does not wait."""
    ranks = _process_sets.ranks_of(process_set)
    _tensors.check(tensor, "broadcast of", name)
    memory = _tensors.to_new(tensor)
    return _broadcast_start([memory], root_rank, [name], in_place=False, ranks=ranks)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None
) -> torch.Tensor:
    """:func:`broadcast` into the tensor itself."""
    synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return tensor


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None
) -> int:
    """:func:`broadcast` into the tensor itself, without waiting."""
    ranks = _process_sets.ranks_of(process_set)
    _tensors.check(tensor, "broadcast of", name)
    memory = _tensors.in_place(tensor)
    return _broadcast_start([memory], root_rank, [name], in_place=True, ranks=ranks)
