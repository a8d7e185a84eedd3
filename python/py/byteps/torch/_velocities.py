"""Nesterov's momentum in front of codecs, for the gradients of optimizers and modules.

Small tensors are not encoded, nor is what stays on a host. Their gradients are to have the momentum
all the same, since the optimizer has none then: so it is added here, before anything is sent.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from byteps.errors import ConfigError
from byteps.torch import _gpu

if TYPE_CHECKING:
    from byteps.torch._gradients import Gradients

_live: weakref.WeakSet[Velocities] = weakref.WeakSet()


class Velocities:
    """``m = mu m + g`` for each gradient ``g``, of which ``g + mu m`` is sent; in float32."""

    def __init__(self, gradients: Gradients) -> None:
        self._factor: float | None = None
        self._gradients = weakref.ref(gradients)
        self._of: dict[int, torch.Tensor] = {}
        _live.add(self)

    @property
    def factor(self) -> float | None:
        """The momentum; where there is none, nothing is kept."""
        return self._factor

    @factor.setter
    def factor(self, factor: float | None) -> None:
        self._factor = factor
        if factor is None:
            self._of.clear()

    def follow(
        self, indices: Sequence[int], gradients: Sequence[torch.Tensor], stream: int | None
    ) -> None:
        """To be called of dense gradients, which are changed, before they are sent from here or
        from this ``stream`` of their GPU."""
        if self.factor is None:
            return
        factor = self.factor
        with torch.no_grad(), _gpu.on_stream(stream, gradients[0].device):
            for index, gradient in zip(indices, gradients, strict=True):
                if not gradient.dtype.is_floating_point:
                    continue
                velocity = self._of.get(index)
                if velocity is None:
                    velocity = torch.zeros_like(gradient, dtype=torch.float32)
                # The model may have been moved.
                velocity = velocity.to(gradient.device).mul_(factor).add_(gradient)
                gradient.add_(velocity, alpha=factor)
                # What is not finite is told once, and would stay for ever.
                self._of[index] = velocity.nan_to_num_(0.0, 0.0, 0.0)

    def kept(self) -> dict[int, torch.Tensor]:
        """What there is, by the place of the gradient: not to be changed."""
        return self._of

    def go_back(self, kept: dict[int, torch.Tensor]) -> None:
        """Goes on with what :meth:`kept` was before, which is given away."""
        self._of = kept

    def forget(self) -> None:
        """Somebody else sends these gradients from now on."""
        self._of.clear()
        _live.discard(self)


def named() -> dict[str, torch.Tensor]:
    """What there is by the names of the gradients: flat, in the host's memory."""
    found = {}
    for velocities in list(_live):
        gradients = velocities._gradients()
        if gradients is None:
            continue
        for index, velocity in velocities._of.items():
            plain = velocity.detach().to("cpu", copy=True)
            found[gradients.declared[index].name] = plain.contiguous().flatten()
    return found


class Place:
    """Where a velocity of this name belongs."""

    def __init__(self, velocities: Velocities, index: int, param: torch.Tensor) -> None:
        self._velocities, self._index, self._param = velocities, index, param

    def check(self, name: str, velocity: torch.Tensor) -> None:
        """Raises if it is of another size."""
        elements = math.prod(self._param.shape)
        if velocity.numel() != elements:
            raise ConfigError(
                f"'{name}' has {elements} elements, and the state is of {velocity.numel()}"
            )

    def put(self, velocity: torch.Tensor) -> None:
        """Goes on with this one."""
        known = torch.zeros_like(self._param, dtype=torch.float32, requires_grad=False)
        with torch.no_grad():
            known.copy_(velocity.view(self._param.shape))
        self._velocities._of[self._index] = known


def places() -> dict[str, Place]:
    """Where velocities may be put, by the names of the gradients."""
    found = {}
    for velocities in list(_live):
        gradients = velocities._gradients()
        if gradients is None or velocities.factor is None:
            continue
        for index, param in enumerate(gradients.params):
            found[gradients.declared[index].name] = Place(velocities, index, param)
    return found
