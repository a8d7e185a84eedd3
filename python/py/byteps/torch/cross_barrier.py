"""Steps that the next forward pass overlaps: each layer waits for its own parameters alone.

::

    import byteps.torch.cross_barrier as bps

    optimizer = bps.CrossBarrier(model, optimizer, model.named_parameters())

It has all names of :mod:`byteps.torch` too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from byteps._backups import Backups
from byteps.errors import ConfigError, UsageError
from byteps.torch import *  # noqa: F403
from byteps.torch import __all__ as _names
from byteps.torch import ops
from byteps.torch._gradients import Gradients
from byteps.torch._pace import Pace, marker
from byteps.torch._sparse_gradients import sparse_parameters
from byteps.torch._updates import Update, Updates
from byteps.torch.compression import Compression
from byteps.torch.optimizer import Distributed, become, checked, complete, next_prefix

__all__ = [*_names, "CrossBarrier"]  # noqa: PLE0604 - all of `_names` are strings.

# Parameters are sorted into so many classes of about equal bytes, from the front layers on. The
# gradients of an earlier class go before those of later ones; those of one class go as they come.
# With a class for each parameter a rank that is a little ahead would send what the others do not
# send yet, and come back later to what they have sent: nothing would be summed for as long.
_CLASSES = 8


def CrossBarrier(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    num_steps: int = 10**6,
    *,
    backup_workers: int | None = None,
) -> torch.optim.Optimizer:
    """:func:`~byteps.torch.DistributedOptimizer` whose ``step()`` does not wait.

    ``step()`` leaves the gradients on their way and returns. In the next forward pass each module
    waits, before it runs, for the gradients of its own parameters, and the optimizer steps these;
    the front layers, which are needed first, are sent before others. So the network and the forward
    pass work at the same time. The parameters come out as with ``DistributedOptimizer``, bit for
    bit.

    Steps by parts cost the host more than whole ones. So some of the first steps are whole, and
    where these are the faster ones (many small parameters on a fast line), further ones are, too:
    each rank finds that out by itself, and again from time to time.

    The options that count for a step (the learning rate) are those at ``step()``. Gradients belong
    to the step that took them: ``param.grad`` is None after it, with or without ``zero_grad()``.
    ``state_dict()`` and ``load_state_dict()``, of the model and of the optimizer, wait for what is
    still to come. Code that looks at parameters in another way (copies the model, walks through
    ``model.parameters()``) calls ``optimizer.flush()`` before.

    These take a step as a whole, without overlap: a closure, ``optimizer.synchronize()`` before the
    step (to clip gradients), a gradient scaler, and hooks of the step.

    Args:
        model: What the optimizer trains; its modules are watched.
        optimizer: Any torch optimizer that updates each parameter by itself: so not LBFGS.
        named_parameters: ``model.named_parameters()``, which is also the default.
        compression: :class:`~byteps.torch.Compression` for what is sent.
        backward_passes_per_step: How often ``backward()`` adds to a gradient before it goes.
        num_steps: From this step on, ``step()`` waits, so that the end of the training is there
            when it returns.
        backup_workers: For how many of the slowest ranks no average waits, as with
            ``DistributedOptimizer`` (docs/stragglers.md).
    """
    return overlap(
        model,
        optimizer,
        named_parameters,
        compression,
        backward_passes_per_step,
        num_steps,
        backup_workers=backup_workers,
    )


def overlap(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    num_steps: int = 10**6,
    prefix: str | None = None,
    backup_workers: int | None = None,
) -> torch.optim.Optimizer:
    """:func:`CrossBarrier`, with what the names of gradients begin with: by it, it takes over those
    that another optimizer has declared."""
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"a torch module is wanted, not {type(model).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "LBFGS updates all parameters at once, so no layer can go ahead of the others: use "
            "DistributedOptimizer"
        )
    if num_steps < 1:
        raise ConfigError(f"num_steps={num_steps}: 1 or more")
    if named_parameters is None and isinstance(optimizer, torch.optim.Optimizer):
        known = dict.fromkeys(model.parameters())
        if all(param in known for group in optimizer.param_groups for param in group["params"]):
            named_parameters = model.named_parameters()
    named = checked(optimizer, named_parameters, backward_passes_per_step)
    sparse = sparse_parameters(model)
    for name, param in named:
        if param in sparse and param.requires_grad:
            raise ConfigError(f"'{name}' has sparse gradients: {_WatchedGradients.sparse_remedy}")
    backups = Backups.asked(backup_workers)
    prefix = next_prefix() if prefix is None else prefix
    overlapping = become(_Overlapping, optimizer)
    overlapping._updates = updates = Updates(model, overlapping, num_steps)
    overlapping._byteps = _WatchedGradients(
        updates, named, compression, backward_passes_per_step, prefix, backups
    )
    overlapping._byteps.step_with(overlapping)
    overlapping._pace = Pace(marker(param for _, param in named))
    return overlapping


class _WatchedGradients(Gradients):
    """Gradients that tell which parameters a forward pass has used."""

    # A second round before the step is an error already.
    counts_rounds = False
    sparse_remedy = (
        "CrossBarrier averages dense ones alone, so make the embedding with sparse=False, or use "
        "DistributedOptimizer"
    )

    def __init__(
        self,
        updates: Updates,
        named: Iterable[tuple[str, torch.Tensor]],
        compression: Any,
        passes: int,
        prefix: str,
        backups: Backups,
    ) -> None:
        self.updates = updates
        self.classes: dict[torch.Tensor, int] = {}
        super().__init__(named, compression, passes, ops.Average, False, prefix, backups=backups)

    def arrange(self) -> None:
        total = sum(param.nbytes for param in self.names)
        before = 0
        for param in self.names:
            # Where its middle lies.
            middle = before + param.nbytes / 2
            self.classes[param] = int(_CLASSES * middle / total) if total else 0
            before += param.nbytes

    def priority_of(self, param: torch.Tensor) -> int:
        return -self.classes[param]

    def forget_round(self) -> None:
        self.updates.forget()
        super().forget_round()

    def send_at_end(self) -> None:
        # Other ranks may need the last ones while this one does something else before its step.
        self.pause()

    def wait_at_end(self) -> None:
        """The next forward pass does."""

    def pause(self) -> bool:
        self._leave_pass()
        self.flush()
        return False

    def added_again(self, index: int) -> None:
        self.updates.check_up_to_date(self.params[index], self.names)
        super().added_again(index)

    def flush(self) -> None:
        if self.updates.is_watching:
            for index in self.hooks.queued():
                self.updates.used(self.params[index])
        super().flush()


class _Overlapping(Distributed):
    """What an optimizer does differently whose steps overlap the next forward pass."""

    _byteps: _WatchedGradients
    # A copy has none of these.
    _updates: Updates | None = None
    _pace: Pace

    def release(self) -> None:
        if self._updates is not None:
            self._updates.release()
        super().release()

    def flush(self) -> None:
        """Waits until every parameter is as the steps taken so far make it."""
        if self._updates is not None:
            self._updates.flush()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        self.flush()
        return super().__reduce_ex__(protocol)

    def synchronize(self) -> None:
        """Waits until all gradients are averaged; the next step then goes without overlap."""
        self.flush()
        super().synchronize()

    @complete
    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Leaves the gradients on their way: the next forward pass takes the step."""
        self._opt_called = True  # For learning-rate schedulers, which look at it.
        self.flush()
        gradients = self._byteps
        whole = closure is not None or args or kwargs or gradients.synchronized
        if whole or not gradients.should_synchronize or self._has_hooks():
            self._pace.interrupt()
            if self._updates is not None:
                self._updates.watch_steps(self._pace.may_overlap)
            return super().step(closure, *args, **kwargs)
        overlaps = self._pace.advance()
        gradients.send_rest()
        assert self._updates is not None, "a copy has no gradients, and raises above"
        if overlaps:
            self._updates.take(self)
        else:
            super().step()
            self._updates.taken_whole(self)
        # The next forward pass asks for what this step has left, and shows who would be asked
        # behind a step that overlaps.
        self._updates.watch_steps(overlaps or self._pace.may_overlap)
        return None

    def _has_hooks(self) -> bool:
        """Whether someone looks at the optimizer before or after each step."""
        module = sys.modules[torch.optim.Optimizer.__module__]
        everyones = (getattr(module, f"_global_optimizer_{w}_hooks", None) for w in ("pre", "post"))
        return any((self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks, *everyones))

    def _step_only(self, updates: dict[torch.Tensor, Update]) -> None:
        """The step of the user's optimizer, with these parameters and the options of then."""
        groups: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        for param, (_, _, options) in updates.items():
            _, group = groups.setdefault(id(options), (options, {**options, "params": []}))
            group["params"].append(param)
        method: Any = super(Distributed, self).step
        step = method.__func__
        # Without what torch wraps around it: it has no hooks to call, and one record is enough.
        step = step.__wrapped__ if getattr(step, "hooked", False) else step
        own_groups, own_gradients = self.param_groups, [param.grad for param in updates]
        kind = next(iter(updates)).device.type
        try:
            self.param_groups = [group for _, group in groups.values()]
            for param, update in updates.items():
                param.grad = update.gradient
            # A forward pass may run with any of these on; a step does not.
            with torch.inference_mode(False), torch.autocast(kind, enabled=False), torch.no_grad():
                step(self)
        finally:
            self.param_groups = own_groups
            for param, gradient in zip(updates, own_gradients, strict=True):
                param.grad = gradient
        for options, group in groups.values():
            changed = [key for key in group if group[key] is not options.get(key)]
            if changed != ["params"]:
                raise UsageError(
                    f"{type(self).__name__} keeps state in its groups of parameters "
                    f"({', '.join(key for key in changed if key != 'params')}), so it does not "
                    "update each parameter by itself: use DistributedOptimizer"
                )

    def state_dict(self) -> dict[str, Any]:
        """The state after all steps taken so far."""
        self.flush()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replaces the state; the steps taken so far come first."""
        self.flush()
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, whose gradients are averaged too; all ranks must do it."""
        self.flush()
        if self._updates is not None:
            self._updates.watch()
        super().add_param_group(param_group)
