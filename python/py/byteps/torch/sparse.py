"""Sums and averages of sparse tensors, which are gathered: no rank sends the rows that it lacks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from byteps import _process_sets
from byteps._operations import Average, ReduceOp, Sum
from byteps.errors import ConfigError, TensorError
from byteps.torch import _sending, gather, ops

__all__ = ["SparseHandle", "sparse_allreduce", "sparse_allreduce_async"]

# The tensors that stand for a sparse one on its way: indices, values, and one without elements
# whose shape is that of the sparse one, so that ranks compare it.
_PARTS = 3


class SparseHandle(int):
    """A handle as all calls return it, which can also be called, as Horovod's can."""

    def __call__(self) -> torch.Tensor:
        """The result, as :func:`~byteps.torch.synchronize` returns it."""
        result: torch.Tensor = ops.synchronize(self)
        return result


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: Any = None,
) -> SparseHandle:
    """Starts to sum, or average, a sparse tensor over all ranks.

    Ranks may have different numbers of elements, or none; the shape, the number of sparse
    dimensions and the type must agree, else it is a :class:`byteps.errors.MismatchError` on all
    ranks. The call waits for the numbers of elements, and not for the elements. Each rank sends
    its own coalesced elements once and receives those of the others.

    Args:
        tensor: A ``torch.sparse_coo`` tensor, coalesced or not; it is not changed.
        name: As for :func:`~byteps.torch.push_pull`.
        op: :data:`~byteps.torch.Average` or :data:`~byteps.torch.Sum`. Averages of integers are
            rounded down.
        process_set: A :class:`~byteps.torch.ProcessSet` of the ranks that take part.

    Returns:
        A handle for :func:`~byteps.torch.synchronize`, ``wait`` and ``poll``. Calling it returns
        the result, too: a new, coalesced tensor with the same bits on all ranks.
    """
    if op not in (Average, Sum):
        raise ConfigError(f"op={op!r}: sparse tensors are averaged or summed")
    ranks = _process_sets.ranks_of(process_set)
    check(tensor, name)
    then = _first if op == Sum else _first_mean
    return SparseHandle(_begin([tensor], [name], ranks, then))


def sparse_allreduce(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: Any = None,
) -> torch.Tensor:
    """:func:`sparse_allreduce_async` that waits, and returns the result."""
    return sparse_allreduce_async(tensor, name, op, process_set)()


def check(tensor: Any, name: str | None) -> None:
    """Raises if it is not a sparse tensor in the layout that can be sent."""
    label = f"sparse_allreduce of '{name}'" if name else "sparse_allreduce"
    if not isinstance(tensor, torch.Tensor):
        raise TensorError(f"{label}: a torch tensor is wanted, not {type(tensor).__name__}")
    if tensor.layout is not torch.sparse_coo:
        raise TensorError(
            f"{label}: a tensor of layout torch.sparse_coo is wanted, not {tensor.layout}: "
            "convert it with to_sparse(), or pass a dense tensor to allreduce"
        )


def start(
    tensors: Sequence[torch.Tensor], names: Sequence[str], average: bool, ranks: _sending.Ranks
) -> int:
    """:func:`sparse_allreduce_async` of several tensors, which were checked: one handle for all."""
    return _begin(tensors, names, ranks, _means if average else _sums)


def _begin(
    tensors: Sequence[torch.Tensor],
    names: Sequence[str | None],
    ranks: _sending.Ranks,
    then: Callable[[list[list[torch.Tensor]]], Any],
) -> int:
    parts: list[torch.Tensor] = []
    labels = []
    for tensor, name in zip(tensors, names, strict=True):
        own = tensor.detach().coalesce()
        parts += [
            own.indices().t(),
            own.values(),
            own.values().new_empty((0, *own.shape)),
        ]
        label = name or "sparse_allreduce"
        labels += [f"{label}.indices", f"{label}.values", f"{label}.shape"]
    return gather.begin(parts, labels, ranks, then, "sparse_allreduce")[0]


def _sums(gathered: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """The sums of what :func:`_begin` has gathered."""
    return [_reduced(gathered[at : at + _PARTS], 1) for at in range(0, len(gathered), _PARTS)]


def _means(gathered: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    count = len(gathered[0])
    return [_reduced(gathered[at : at + _PARTS], count) for at in range(0, len(gathered), _PARTS)]


def _first(gathered: list[list[torch.Tensor]]) -> torch.Tensor:
    return _sums(gathered)[0]


def _first_mean(gathered: list[list[torch.Tensor]]) -> torch.Tensor:
    return _means(gathered)[0]


def _reduced(parts: list[list[torch.Tensor]], divisor: int) -> torch.Tensor:
    """The sum of one tensor, of which these are the parts by rank, divided.

    Half types are added in float32 and rounded once, as the servers do it.
    """
    dtype = parts[1][0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    tensors = [
        torch.sparse_coo_tensor(
            index.t(), value.to(wide), shape.shape[1:], check_invariants=True, is_coalesced=True
        )
        for index, value, shape in zip(*parts, strict=True)
    ]
    # Coalescing adds what stands at one index in an order that depends on the processor. Of a pair
    # each index has two elements at most, whose order has no effect: all ranks get the same bits.
    while len(tensors) > 1:
        pairs = itertools.zip_longest(tensors[::2], tensors[1::2])
        tensors = [one if other is None else (one + other).coalesce() for one, other in pairs]
    values = tensors[0].values()
    if divisor != 1:
        is_integer = not (values.is_floating_point() or values.is_complex())
        values = torch.div(values, divisor, rounding_mode="floor" if is_integer else None)
    return torch.sparse_coo_tensor(
        tensors[0].indices(),
        values.to(dtype),
        tensors[0].shape,
        check_invariants=False,
        is_coalesced=True,
    )
