"""What the gradients of a batch are, from when they are handed over until they are averaged."""

from __future__ import annotations

from typing import Any

import torch

from byteps import _native


class Batch:
    """Gradients that were handed over together, kept until the engine is done with them.

    ``sent`` is what travels in their place, ``contexts`` what the compression needs to undo it, and
    ``stream`` where on a GPU they were complete.
    """

    __slots__ = ("contexts", "gradients", "indices", "left", "native", "sent", "stream")

    def __init__(
        self,
        indices: list[int],
        gradients: list[torch.Tensor],
        sent: list[torch.Tensor],
        contexts: list[Any] | None,
    ) -> None:
        self.indices = indices
        self.gradients = gradients
        self.sent = sent
        self.contexts = contexts
        self.left = len(indices)
        # From the moment that it is handed over.
        self.native: _native.Batch
        self.stream: int | None = None
