"""Local SGD and DiLoCo: ranks train by themselves, and combine what came of it now and then."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from byteps import _process_sets, _registry, common
from byteps.errors import ConfigError
from byteps.torch import ops
from byteps.torch.functions import broadcast_optimizer_state, broadcast_parameters

__all__ = ["LocalSGD"]

Outer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


class LocalSGD:
    """Steps with an optimizer of this rank, and every so many steps with one for all.

    After ``every`` steps each rank has moved from the common parameters ``t`` to its own ``p``. The
    ranks average ``t - p``, the *outer gradient*, and each lets the outer optimizer step from ``t``
    with that average. So all have the same parameters again, which only then cross the network.
    This is DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1), where the outer optimizer
    is SGD with Nesterov's momentum. Without an outer optimizer the parameters are averaged, which
    is local SGD (Stich 2018, arXiv 1805.09767); SGD with a learning rate of 1 does the same.

    The first step begins with the parameters of rank 0, or of the first rank of the process set, on
    all ranks. So does the first step after a suspend, or in the next epoch of an elastic job, and
    the outer optimizer goes on with what that rank's remembers. Buffers, such as the means of batch
    normalisation, stay those of each rank.

    Each rank keeps the common parameters, and the outer optimizer's state, beside its own: on the
    devices of the parameters. All ranks must take as many steps.

    Args:
        model: Its parameters that require gradients are trained.
        optimizer: The inner optimizer, for this rank's own steps; schedulers of learning rates go
            on working with it.
        every: Inner steps to each outer step, 1 or more.
        outer: Makes the outer optimizer for the parameters that it is given:
            ``lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)``. None
            averages parameters.
        process_set: The ranks that train together; all where it is None.

    Raises:
        ConfigError: ``every`` is below 1, or no parameter requires gradients.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int,
        outer: Outer | None = None,
        process_set: Any = None,
    ) -> None:
        named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        if every < 1 or not named:
            raise ConfigError(
                f"every={every} with {len(named)} parameters that require gradients: 1 or more of "
                "both"
            )
        self.optimizer = optimizer
        self.every = every
        self.steps = 0
        self._process_set = _process_sets.added(process_set)
        number = _registry.count_up(("LocalSGD", self._process_set))
        self._names = [f"LocalSGD.{number}.{name}" for name, _ in named]
        self._params = [param for _, param in named]
        self._common = [param.detach().clone().requires_grad_() for param in self._params]
        self.outer = (outer or _averaging)(self._common)
        self._job: int | None = None

    @property
    def _ranks(self) -> int:
        known = self._process_set
        return common.size() if known is None else len(known.ranks) if known.included() else 1

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Takes an inner step, and the outer one when it is time; what the inner one returns."""
        if self._job != _registry.job_number():
            self._begin()
        step = self.optimizer.step
        loss = step(*args, **kwargs) if closure is None else step(closure, *args, **kwargs)
        self.steps += 1
        if self.steps % self.every == 0:
            self.synchronize()
        return loss

    def synchronize(self) -> None:
        """Takes an outer step now. All ranks do, as after the last inner steps of a training."""
        gradients = []
        for start, param in zip(self._common, self._params, strict=True):
            start.grad = start.detach() - param.detach()
            gradients.append(start.grad)
        if self._ranks > 1:
            ops.push_pull_group_inplace(
                gradients, name=self._names, op=ops.Average, process_set=self._process_set
            )
        self.outer.step()
        self.outer.zero_grad()
        self._show()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clears the gradients of the inner steps."""
        self.optimizer.zero_grad(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """The common parameters, the outer optimizer's state, and how many inner steps there were:
        what a checkpoint needs beside the model and the inner optimizer."""
        start = [param.detach().clone() for param in self._common]
        return {"common": start, "outer": self.outer.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a :meth:`state_dict`; all ranks load the same one."""
        with torch.no_grad():
            for param, start in zip(self._common, state["common"], strict=True):
                param.copy_(start)
        self.outer.load_state_dict(state["outer"])
        self.steps = state["steps"]
        self._job = _registry.job_number()

    def _begin(self) -> None:
        if self._ranks > 1:
            known = self._process_set
            root = 0 if known is None else known.ranks[0]
            named = list(zip(self._names, self._params, strict=True))
            broadcast_parameters(named, root, process_set=known)
            broadcast_optimizer_state(self.outer, root, process_set=known)
            steps = torch.tensor(self.steps)
            steps = ops.broadcast(steps, root, f"{self._names[0]}.steps", process_set=known)
            self.steps = int(steps.item())
        with torch.no_grad():
            for start, param in zip(self._common, self._params, strict=True):
                start.copy_(param)
        self._job = _registry.job_number()

    def _show(self) -> None:
        with torch.no_grad():
            for param, start in zip(self._params, self._common, strict=True):
                param.copy_(start)


def _averaging(params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)
