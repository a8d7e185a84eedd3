"""The sparse gradients of one optimizer or module: gathered when a backward pass is over.

Dense gradients are sent as they come, each under its own name. How many rows a sparse one has is
known in the pass alone, so sparse ones are held back until its end and travel together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from byteps.errors import TensorError
from byteps.torch import ops, sparse

if TYPE_CHECKING:
    from byteps.torch._gradients import Gradients


class SparseGradients:
    """Which gradients are sparse, and those of the current round, by index in the owner.

    Ranks must take the same way for a parameter: also one that has no gradient in a pass, and so
    does not see that the others' are sparse. A rank that meets its first sparse gradient of a
    parameter says so at the end of the round, and then all ranks :meth:`settle` which are.
    """

    def __init__(self, as_dense: bool, known: Mapping[torch.Tensor, int] | None = None) -> None:
        self._all_dense = as_dense
        self._declared = dict(known or {})
        # Whose gradients are sparse on all ranks, and how many of their dimensions are; and whose
        # are sparse here and dense on other ranks.
        self.known: dict[torch.Tensor, int] = dict(self._declared)
        self._dense: set[torch.Tensor] = set()
        # Of this round: None where there is none on this rank.
        self.held: dict[int, torch.Tensor | None] = {}
        # Gradients that were sent as zeros, for want of any.
        self.zeros: set[int] = set()

    def forget(self) -> None:
        """The job is over: the next one's ranks may know less."""
        self.known = dict(self._declared)
        self._dense.clear()

    def end_round(self) -> None:
        """Is ready for the next round."""
        self.held.clear()
        self.zeros.clear()

    def take(
        self, owner: Gradients, indices: list[int], gradients: list[torch.Tensor]
    ) -> tuple[list[int], list[torch.Tensor]]:
        """Holds the sparse ones back; the others are to be sent."""
        rest: tuple[list[int], list[torch.Tensor]] = [], []
        for index, gradient in zip(indices, gradients, strict=True):
            param, sent = owner.params[index], gradient
            if param in self.known or gradient.layout is not torch.strided:
                if not self._all_dense and param not in self._dense:
                    self._hold(owner, index, gradient)
                    continue
                if gradient.layout is not torch.strided:
                    param.grad = sent = gradient.to_dense()
            rest[0].append(index)
            rest[1].append(sent)
        return rest

    def _hold(self, owner: Gradients, index: int, gradient: torch.Tensor) -> None:
        param = owner.params[index]
        if param not in self.known:
            if not owner.counts_rounds:
                raise TensorError(
                    f"the gradient of '{owner.names[param]}' is sparse: {owner.sparse_remedy}"
                )
            sparse.check(gradient, owner.names[param])
        # That of a single rank is its own average.
        if owner.size > 1:
            self.held[index] = gradient

    def hold_none(self, owner: Gradients, index: int, gradient: torch.Tensor | None) -> bool:
        """Whether a gradient that no pass has completed goes with the sparse ones."""
        if owner.params[index] not in self.known:
            if gradient is None:
                self.zeros.add(index)
            return False
        if owner.size > 1:
            self.held[index] = gradient
        return True

    def is_news(self, owner: Gradients) -> bool:
        """Whether the other ranks may not know that one of these is sparse."""
        return any(owner.params[index] not in self.known for index in self.held)

    def settle(self, owner: Gradients) -> None:
        """All ranks agree whose gradients are sparse, as one of them has asked for.

        Where another rank has a dense gradient, all are dense from now on. Where it has sent zeros,
        they get their counterparts, and nobody looks at their sum.
        """
        dims, ways = 0, 1
        told = torch.zeros(2, len(owner.params), dtype=torch.int32, device="cpu")
        told[ways] = 2
        for index in self.zeros:
            told[ways, index] = 1
        for index, gradient in self.held.items():
            told[ways, index] = 0
            if gradient is not None:
                told[dims, index] = gradient.sparse_dim() if gradient.is_sparse else 1
        ops.push_pull_inplace(
            told, name=f"{owner.prefix}sparse", op=ops.Max, process_set=owner.process_set
        )
        for index, (dimensions, way) in enumerate(told.t().tolist()):
            param = owner.params[index]
            if not dimensions or param in self.known:
                continue
            gradient = self.held.get(index)
            if way < 2:
                if index not in self.held:
                    self.held[index] = None
                elif way == 1:
                    owner.send_zeros([index])
                self.known[param] = dimensions
            elif gradient is not None:
                self._dense.add(param)
                del self.held[index]
                owner.send([index])

    def changed(self, owner: Gradients) -> list[torch.Tensor]:
        """The parameters whose gradients have been replaced since they were held back."""
        return [
            owner.params[index]
            for index, gradient in self.held.items()
            if gradient is not owner.params[index].grad
        ]

    def start(self, owner: Gradients) -> int | None:
        """Starts to gather; waits for the numbers of rows."""
        if not self.held:
            return None
        params = [owner.params[index] for index in sorted(self.held)]
        gradients = [
            as_sparse(self.held[index], param, self.known[param])
            for index, param in zip(sorted(self.held), params, strict=True)
        ]
        names = [owner.names[param] for param in params]
        return sparse.start(gradients, names, owner.average, owner.ranks)

    def finish(self, owner: Gradients, handle: int | None, wanted: bool) -> None:
        """Waits for what was started, and puts it into the gradients if they are wanted."""
        if handle is None:
            return
        for index, result in zip(sorted(self.held), ops.synchronize(handle), strict=True):
            if wanted:
                owner.params[index].grad = result


def sparse_parameters(module: torch.nn.Module) -> dict[torch.Tensor, int]:
    """The parameters whose layers make sparse gradients, and how many of their dimensions are."""
    return {
        layer.weight: 1
        for layer in module.modules()
        if isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and layer.sparse
    }


def as_sparse(gradient: torch.Tensor | None, param: torch.Tensor, dimensions: int) -> torch.Tensor:
    """The gradient with so many sparse dimensions; without elements where there is none."""
    if gradient is None:
        return torch.sparse_coo_tensor(
            torch.empty(dimensions, 0, dtype=torch.int64, device=param.device),
            param.new_empty((0, *param.shape[dimensions:])),
            param.shape,
            check_invariants=False,
            is_coalesced=True,
        )
    if gradient.is_sparse and gradient.sparse_dim() == dimensions:
        return gradient
    return gradient.to_dense().to_sparse(dimensions)
