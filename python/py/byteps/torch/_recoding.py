"""Other codecs for the gradients of an optimizer or module that trains already."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from byteps import _registry
from byteps._registry import Kept
from byteps.errors import UsageError
from byteps.torch import _tensors
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
    sent_by, _ = without_momentum(compression)
    before, after = gradients.declared, []
    for param, old in zip(gradients.params, before, strict=True):
        name, average, ranks = gradients.names[param], gradients.average, gradients.ranks
        new = _tensors.gradient(name, param, sent_by, average, ranks, gradients.backups)
        # Of another model's gradients the name may have been taken.
        after.append(new._replace(name=old.name))
    known = _registry.kept()
    # Ranks that disagree find out here, before anything has changed.
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


def _has_feedback(tensor: _registry.Tensor) -> bool:
    return "+feedback" in (tensor.encoding or "")
