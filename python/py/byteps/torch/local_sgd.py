"""Local SGD and DiLoCo: ranks train by themselves, and combine what came of it now and then."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from byteps import _process_sets, _registry, common
from byteps.errors import BytePSError, ConfigError
from byteps.torch import ops
from byteps.torch.functions import broadcast_optimizer_state, broadcast_parameters

__all__ = ["LocalSGD"]

Outer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


@dataclass
class _Sent:
    """The outer gradients of a fragment that are being averaged, or are averages without a
    ``handle``; and the inner step after which the outer one is taken."""

    fragment: int
    gradients: list[torch.Tensor]
    handle: int | None
    due: int

    def wait(self) -> list[torch.Tensor]:
        if self.handle is not None:
            handle, self.handle = self.handle, None
            ops.synchronize(handle)
        return self.gradients


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

    With k ``fragments`` every k-th parameter belongs to one, and they take their outer steps in
    turn, one after each ``every / k`` inner steps: as much is sent, and never all at once
    (Streaming DiLoCo, Douillard et al. 2025, arXiv 2501.18512). With a ``delay`` the ranks train on
    for so many inner steps while the outer gradient is averaged, and then take its outer step.

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
        fragments: How many take turns; ``every`` is a multiple of it.
        delay: Inner steps from sending an outer gradient to the outer step, below
            ``every / fragments``.
        keep: Share of its own parameter with which a rank goes on behind an outer step, from 0 to
            below 1: ``p = keep * p + (1 - keep) * t``. With 0 what a rank has learned during the
            delay counts for nothing; Streaming DiLoCo takes 0.5.

    Raises:
        ConfigError: ``every`` is below 1 or no multiple of ``fragments``, there are more of these
            than parameters that require gradients, or ``delay`` or ``keep`` is out of range.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int,
        outer: Outer | None = None,
        process_set: Any = None,
        fragments: int = 1,
        delay: int = 0,
        keep: float = 0.0,
    ) -> None:
        named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        if every < 1 or not 1 <= fragments <= len(named) or every % fragments:
            raise ConfigError(
                f"every={every} and fragments={fragments} of {len(named)} parameters that require "
                "gradients: a fragment has one at least, and every is a multiple of fragments"
            )
        if not 0 <= delay < every // fragments or not 0 <= keep < 1:
            raise ConfigError(
                f"delay={delay} and keep={keep}: an outer step is taken before the next one is "
                f"sent, so the delay is below {every // fragments}, and keep is from 0 to below 1"
            )
        self.optimizer = optimizer
        self.every = every
        self.delay = delay
        self.keep = keep
        self.steps = 0
        self._sent: _Sent | None = None
        self._process_set = _process_sets.added(process_set)
        number = _registry.count_up(("LocalSGD", self._process_set))
        self._names = [f"LocalSGD.{number}.{name}" for name, _ in named]
        self._params = [param for _, param in named]
        self._common = [param.detach().clone().requires_grad_() for param in self._params]
        self._fragments = [range(first, len(named), fragments) for first in range(fragments)]
        #: One for each fragment.
        self.outers = [
            (outer or _averaging)([self._common[index] for index in fragment])
            for fragment in self._fragments
        ]
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
        if self._sent is not None and self.steps >= self._sent.due:
            self._finish(self.keep)
        turn, left = divmod(self.steps, self.every // len(self._fragments))
        if left == 0:
            self._send((turn - 1) % len(self._fragments))
            if self.delay == 0:
                self._finish(self.keep)
        return loss

    def synchronize(self) -> None:
        """Takes an outer step of all fragments now, after which the ranks have the same parameters.
        All ranks do, as after the last inner steps of a training."""
        if self._sent is not None:
            self._finish(self.keep)
        for number in range(len(self._fragments)):
            self._send(number)
            self._finish(keep=0.0)

    def _send(self, number: int) -> None:
        """Begins to average the outer gradients of one fragment."""
        fragment = self._fragments[number]
        with torch.no_grad():
            gradients = [self._common[index] - self._params[index] for index in fragment]
        handle = None
        if self._ranks > 1:
            names = [self._names[index] for index in fragment]
            handle = ops.push_pull_group_async_inplace(
                gradients, name=names, op=ops.Average, process_set=self._process_set
            )
        self._sent = _Sent(number, gradients, handle, self.steps + self.delay)

    def _finish(self, keep: float) -> None:
        """The outer step of the fragment that was sent."""
        sent, self._sent = self._sent, None
        assert sent is not None
        fragment, outer = self._fragments[sent.fragment], self.outers[sent.fragment]
        for index, gradient in zip(fragment, sent.wait(), strict=True):
            self._common[index].grad = gradient
        outer.step()
        outer.zero_grad()
        with torch.no_grad():
            for index in fragment:
                param, start = self._params[index], self._common[index]
                if keep == 0:
                    param.copy_(start)
                else:
                    param.lerp_(start, 1 - keep)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clears the gradients of the inner steps."""
        self.optimizer.zero_grad(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """The common parameters, the outer optimizers' states, how many inner steps there were, and
        the average that an outer step is due with, for which it waits: what a checkpoint needs
        beside the model and the inner optimizer."""
        start = [param.detach().clone() for param in self._common]
        states = [outer.state_dict() for outer in self.outers]
        state = {"common": start, "outers": states, "steps": self.steps}
        if self._sent is not None:
            averages = [gradient.clone() for gradient in self._sent.wait()]
            state["sent"] = (self._sent.fragment, averages, self._sent.due)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a :meth:`state_dict` of as many fragments; all ranks load the same one."""
        with torch.no_grad():
            for param, start in zip(self._common, state["common"], strict=True):
                param.copy_(start)
        for outer, known in zip(self.outers, state["outers"], strict=True):
            outer.load_state_dict(known)
        self.steps = state["steps"]
        self._drop_sent()
        if "sent" in state:
            number, averages, due = state["sent"]
            starts = [self._common[index] for index in self._fragments[number]]
            own = [
                torch.empty_like(start).copy_(average)
                for start, average in zip(starts, averages, strict=True)
            ]
            self._sent = _Sent(number, own, None, due)
        self._job = _registry.job_number()

    def _drop_sent(self) -> None:
        """Nothing becomes of what was sent in another job, or before a checkpoint was loaded."""
        sent, self._sent = self._sent, None
        if sent is not None:
            with contextlib.suppress(BytePSError):
                sent.wait()

    def _begin(self) -> None:
        self._drop_sent()
        if self._ranks > 1:
            known = self._process_set
            root = 0 if known is None else known.ranks[0]
            named = list(zip(self._names, self._params, strict=True))
            broadcast_parameters(named, root, process_set=known)
            for number, outer in enumerate(self.outers):
                prefix = f"{self._names[number]}.outer."
                broadcast_optimizer_state(outer, root, prefix, process_set=known)
            steps = torch.tensor(self.steps)
            steps = ops.broadcast(steps, root, f"{self._names[0]}.steps", process_set=known)
            self.steps = int(steps.item())
        with torch.no_grad():
            for start, param in zip(self._common, self._params, strict=True):
                start.copy_(param)
        self._job = _registry.job_number()


def _averaging(params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)
