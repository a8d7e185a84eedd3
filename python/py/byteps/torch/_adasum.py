"""Adasum: sums in which ranks that agree count once, and ranks at right angles count in full.

Maleki et al., "Scaling Distributed Training with Adaptive Summation" (2020): of two vectors

    Adasum(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b

and of more in a binary tree. Servers have no such sum, so ranks halve vectors: at distance 1, 2, 4
and so on each rank gives one half of what it holds to its partner and combines the other halves.
Each element is combined by one rank, and what it depends on is summed once for all, so all ranks
get the same bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from byteps import _process_sets, _registry, common
from byteps.errors import TensorError, UsageError
from byteps.torch import _sending, _tensors, ops

_Vectors = list[torch.Tensor]


def start(
    tensors: Sequence[torch.Tensor],
    names: Sequence[str | None],
    inplace: bool,
    single: bool,
    postscale: float,
    ranks: _sending.Ranks,
    then: Callable[[list[torch.Tensor]], Any] | None,
    sent: Sequence[torch.Tensor],
) -> int:
    """What :func:`ops.push_pull_start` does, for ``sent``, which are the scaled ``tensors``.

    It waits: each level of the tree needs the results of the one below.
    """
    known = [name or f"adasum.{index}" for index, name in enumerate(names)]
    for tensor, name in zip(tensors, known, strict=True):
        if not tensor.dtype.is_floating_point:
            raise TensorError(
                f"Adasum of '{name}': its factors are fractions, so a tensor of floats is wanted, "
                f"not of {tensor.dtype}"
            )
    results = combine(sent, known, ranks)
    outputs = []
    with torch.no_grad():
        for tensor, result in zip(tensors, results, strict=True):
            output = tensor if inplace else torch.empty_like(tensor, requires_grad=False)
            outputs.append(output.copy_(result if postscale == 1.0 else result * postscale))

    def finish(outputs: list[torch.Tensor]) -> Any:
        if then is not None:
            return then(outputs)
        return outputs[0] if single else outputs

    return _registry.start([], outputs, finish)


def combine(
    tensors: Sequence[torch.Tensor], names: Sequence[str], ranks: _sending.Ranks
) -> _Vectors:
    """The Adasum of each tensor over these ranks, in the tensor's shape, in float32 or float64."""
    members = _process_sets.members(ranks)
    place = members.index(common.rank())
    # The largest power of two. The ranks beyond go first, each with one from the front.
    paired = 1 << (len(members).bit_length() - 1)
    vectors = [
        tensor.detach().to("cpu", _working_type(tensor), copy=True).contiguous().view(-1)
        for tensor in tensors
    ]
    if place + paired < len(members) or place >= paired:
        _add_beyond(vectors, names, members, place, paired)
    bounds = [(0, vector.numel()) for vector in vectors]
    present = torch.ones(1, dtype=torch.int32, device="cpu")
    counted = ops.push_pull_start(
        [present], "sum", [f"{names[0]}.ranks"], ops.BROADCAST_PRIORITY, True, True, ranks=ranks
    )
    if place < paired:
        distance = 1
        while distance < paired:
            bounds = _halve(vectors, bounds, names, members, place, distance)
            distance *= 2
    _gather(vectors, names, members, paired, ranks)
    ops.synchronize(counted)
    if present.item() < len(members):
        raise UsageError(
            f"Adasum of '{names[0]}': {len(members) - present.item()} of {len(members)} ranks have "
            "called join() or died, and each has a share in combining: use Average or Sum while "
            "some ranks have no data"
        )
    return [
        vector.view(tensor.shape).to(tensor.device)
        for vector, tensor in zip(vectors, tensors, strict=True)
    ]


def _working_type(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _add_beyond(
    vectors: _Vectors, names: Sequence[str], members: Sequence[int], place: int, paired: int
) -> None:
    """Combines the vectors of a rank beyond the power of two with those of its partner in front."""
    is_front = place < paired
    front, beyond = (place, place + paired) if is_front else (place - paired, place)
    theirs = [torch.empty_like(vector) for vector in vectors] if is_front else vectors
    pair = members[front], members[beyond]
    _exchange(
        [(one, f"{name}.beyond", pair[1]) for one, name in zip(theirs, names, strict=True)], pair
    )
    if is_front:
        for own, other in zip(vectors, theirs, strict=True):
            own.copy_(_combined(own, other, _products(own, other)))


def _halve(
    vectors: _Vectors,
    bounds: list[tuple[int, int]],
    names: Sequence[str],
    members: Sequence[int],
    place: int,
    distance: int,
) -> list[tuple[int, int]]:
    """Combines what this block of ranks holds with what the next one does; the new bounds."""
    partner = place ^ distance
    pair = tuple(sorted((members[place], members[partner])))
    kept, sends, halves = [], [], []
    for vector, (begin, end), name in zip(vectors, bounds, names, strict=True):
        middle = (begin + end) // 2
        lower, upper = (begin, middle), (middle, end)
        own, given = (upper, lower) if place & distance else (lower, upper)
        theirs = vector.new_empty(own[1] - own[0])
        label = f"{name}.{distance}"
        sends.append((vector[given[0] : given[1]], f"{label}.{members[place]}", members[place]))
        sends.append((theirs, f"{label}.{members[partner]}", members[partner]))
        kept.append(own)
        halves.append(theirs)
    _exchange(sends, pair)
    products = torch.stack(
        [
            _products(vector[begin:end], theirs)
            for vector, (begin, end), theirs in zip(vectors, kept, halves, strict=True)
        ]
    )
    if place & distance:
        # The block of lower numbers comes first, on all ranks of both.
        products = products[:, [1, 0, 2]]
    first = place - place % (2 * distance)
    block = tuple(members[first : first + 2 * distance])
    name = f"{names[0]}.products.{distance}"
    ops.synchronize(
        ops.push_pull_start(
            [products], "sum", [name], ops.BROADCAST_PRIORITY, True, True, ranks=block
        )
    )
    if place & distance:
        products = products[:, [1, 0, 2]]
    for vector, (begin, end), theirs, row in zip(vectors, kept, halves, products, strict=True):
        vector[begin:end] = _combined(vector[begin:end], theirs, row)
    return kept


def _gather(
    vectors: _Vectors,
    names: Sequence[str],
    members: Sequence[int],
    paired: int,
    ranks: _sending.Ranks,
) -> None:
    """Gives all ranks the part of each."""
    sends = []
    for vector, name in zip(vectors, names, strict=True):
        for place in range(paired):
            begin, end, distance = 0, vector.numel(), 1
            while distance < paired:
                middle = (begin + end) // 2
                begin, end = (middle, end) if place & distance else (begin, middle)
                distance *= 2
            sends.append((vector[begin:end], f"{name}.of.{members[place]}", members[place]))
    _exchange(sends, ranks)


def _exchange(sends: Sequence[tuple[torch.Tensor, str, int]], ranks: _sending.Ranks) -> None:
    """Broadcasts each vector from its root among these ranks, and waits."""
    started = [
        _sending.send(
            "Adasum of",
            _tensors.in_place(vector),
            "broadcast",
            f"{name}.adasum",
            ops.BROADCAST_PRIORITY,
            root,
            ranks=ranks,
        )
        for vector, name, root in sends
        if vector.numel()
    ]
    vectors = [vector for vector, _, _ in sends]
    # Of roots that have joined, all ranks are told in the end: one that left here would be missed.
    with contextlib.suppress(UsageError):
        _registry.synchronize(_registry.start(started, vectors, list))


def _products(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The squares of their lengths, and their product."""
    one, other = one.double(), other.double()
    return torch.stack([one.dot(one), other.dot(other), one.dot(other)])


def _combined(one: torch.Tensor, other: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    square, other_square, product = products.tolist()
    factor = 1 - product / (2 * square) if square else 1.0
    other_factor = 1 - product / (2 * other_square) if other_square else 1.0
    return one * factor + other * other_factor
