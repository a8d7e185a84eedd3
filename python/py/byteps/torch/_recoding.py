"""Other codecs for the gradients of an optimizer or module that trains already."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from byteps import _process_sets, _registry, common
from byteps._codecs import encoding_of
from byteps._registry import Kept
from byteps.errors import UsageError, _mismatch
from byteps.torch import _tensors, gather
from byteps.torch.compression import without_momentum

if TYPE_CHECKING:
    from byteps.torch._gradients import Gradients


def set_compression(gradients: Gradients, compression: Any) -> None:
    """Sends gradients by this ``compression`` from now on. What error feedback has kept by the one
    before is sent with the next gradients, if it is used again; momentum goes on."""
    gradients.check_open()
    if gradients.is_under_way:
        raise UsageError(
            "set_compression() while gradients are being averaged: call it between step() and the "
            "next backward(), on all ranks"
        )
    _check_agreement(gradients, compression)
    sent_by, _ = without_momentum(compression)
    before, after = gradients.declared, []
    for param, old in zip(gradients.params, before, strict=True):
        name, average, ranks = gradients.names[param], gradients.average, gradients.ranks
        new = _tensors.gradient(name, param, sent_by, average, ranks, gradients.backups)
        # Of another model's gradients the name may have been taken.
        after.append(new._replace(name=old.name))
    known = _registry.kept()
    numbers = _registry.declare(after)
    pairs = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    _registry.keep(
        {
            new: Kept(known[old].residue, b"")
            for old, new in pairs
            if old in known and _has_feedback(old) and _has_feedback(new)
        }
    )
    gradients.compress_by(compression)
    for index, (tensor, number) in enumerate(zip(after, numbers, strict=True)):
        gradients.declare_as(index, tensor, number)


def _check_agreement(gradients: Gradients, compression: Any) -> None:
    """Raises on all ranks, before anything has changed, if they do not say the same: a rank that
    went on would wait for tensors that are alike in both, and that the others do not send."""
    known = gradients.process_set
    if gradients.size == 1:
        return
    own = encoding_of(compression) or getattr(compression, "__name__", type(compression).__name__)
    of_all = gather.allgather_object(own, f"{gradients.prefix}compression", known)
    ranks = _process_sets.members(_process_sets.ranks_of(known))
    for rank, other in zip(ranks, of_all, strict=True):
        if other != of_all[0]:
            raise _mismatch(
                f"set_compression: rank {ranks[0]} goes on with {of_all[0]}, and rank {rank} with "
                f"{other}; rank {common.rank()} has changed nothing: call it alike on all ranks",
                (ranks[0], rank),
            )


def _has_feedback(tensor: _registry.Tensor) -> bool:
    return "+feedback" in (tensor.encoding or "")
