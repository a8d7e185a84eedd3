"""Learning rates, as error feedback needs them: what a codec left out of a gradient was to be
multiplied by the rate of then, and is by that of now."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from byteps import _native, _registry

if TYPE_CHECKING:
    from byteps.torch._gradients import Gradients


class Rates:
    """The learning rates with which an optimizer's gradients were sent last."""

    def __init__(self) -> None:
        self.optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        # By the place of the group among the optimizer's.
        self._before: dict[int, float] = {}

    def follow(self, gradients: Gradients) -> None:
        """Before a round is sent: where a rate has changed, what was left out is to be worth as
        much as it was. A rate of 0, with which nothing is learned, counts for nothing."""
        optimizer = None if self.optimizer is None else self.optimizer()
        encoding = getattr(gradients.compression, "encoding", None)
        if optimizer is None or encoding is None or "+feedback" not in encoding:
            return
        # The property of a distributed optimizer looks for gradient scalers.
        for place, group in enumerate(vars(optimizer)["param_groups"]):
            rate = float(group.get("lr", 0.0))
            before = self._before.get(place, rate)
            if rate <= 0:
                continue
            self._before[place] = rate
            indices = [gradients.index[p] for p in group["params"] if p in gradients.index]
            if before != rate and indices:
                tensors = [gradients.declared[index] for index in indices]
                _native.scale_residues(_registry.declare(tensors), before / rate)
