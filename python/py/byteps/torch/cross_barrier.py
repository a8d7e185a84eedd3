"""Steps that the next forward pass overlaps: each layer waits for its own parameters alone.

::

    import byteps.torch.cross_barrier as bps

    optimizer = bps.CrossBarrier(model, optimizer, model.named_parameters())

It has all names of :mod:`byteps.torch` too.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from byteps import _native
from byteps._backups import Backups
from byteps.errors import ConfigError, UsageError
from byteps.torch import *  # noqa: F403
from byteps.torch import __all__ as _names
from byteps.torch import _gpu, ops
from byteps.torch._batch import Batch
from byteps.torch._compiled import untraced
from byteps.torch._gradients import Gradients
from byteps.torch._pace import Pace, marker
from byteps.torch._sparse_gradients import sparse_parameters
from byteps.torch.compression import Compression
from byteps.torch.optimizer import Distributed, become, checked, complete, next_prefix

__all__ = [*_names, "CrossBarrier"]  # noqa: PLE0604 - all of `_names` are strings.

# Parameters are sorted into so many classes of about equal bytes, from the front layers on. The
# gradients of an earlier class go before those of later ones; those of one class go as they come.
# With a class for each parameter a rank that is a little ahead would send what the others do not
# send yet, and come back later to what they have sent: nothing would be summed for as long.
_CLASSES = 8

# A step of one parameter costs the host nearly what a step of many costs. So a module on a GPU
# waits for its next neighbours' parameters too, which are needed soon anyway: for so many together,
# unless these bytes are reached first, which bounds how much longer the GPU waits for the line.
_TOGETHER = 64
_TOGETHER_BYTES = 5 << 19


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
    overlapping._updates = updates = _Updates(model, overlapping, num_steps)
    overlapping._byteps = _WatchedGradients(
        updates, named, compression, backward_passes_per_step, prefix, backups
    )
    overlapping._byteps.step_with(overlapping)
    overlapping._pace = Pace(marker(param for _, param in named))
    return overlapping


class _Update(NamedTuple):
    """What a parameter still waits for: its averaged gradient, and its group's options then."""

    batch: Batch
    position: int
    options: dict[str, Any]

    @property
    def gradient(self) -> torch.Tensor:
        return self.batch.gradients[self.position]

    @property
    def is_on_gpu(self) -> bool:
        return _gpu.holds(self.batch.sent[self.position])


class _Hook:
    """A hook of a module that keeps nothing alive. Those of a copy of the module do nothing."""

    def __init__(self, method: Callable[..., Any] | None = None) -> None:
        self.method = None if method is None else weakref.WeakMethod(method)

    @untraced
    def __call__(self, *arguments: Any) -> None:
        method = self.method and self.method()
        if method is not None:
            method(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()


class _Updates:
    """The updates of one optimizer that are still to come, and which module waits for which."""

    def __init__(self, model: torch.nn.Module, optimizer: _Overlapping, num_steps: int) -> None:
        self.model = model
        self.optimizer = weakref.ref(optimizer)
        self.steps_left = num_steps
        self.pending: dict[torch.Tensor, _Update] = {}
        self.hooks: list[Any] = []
        # Whether the next step may overlap, so that it counts which modules run and which
        # parameters are used.
        self.is_watching = True
        # Modules that are asked before they run, what asks them, and its hooks: none while nobody
        # watches, since each costs a forward pass some microseconds. Some are new in this step.
        self.asked: set[torch.nn.Module] = set()
        self.asked_anew: set[torch.nn.Module] = set()
        self.ask = _Hook(self.before)
        self.asking: list[Any] = []
        self.parents: dict[torch.nn.Module, list[torch.nn.Module]] = {}
        # Modules that have run since the last step, and parameters that never had a gradient.
        self.called: set[torch.nn.Module] = set()
        self.never_used: set[torch.Tensor] = set()
        # Parameters that the last backward pass came to without any module having been asked.
        self.unasked: set[torch.Tensor] = set()
        # A module waits for its own parameters, and for others as has been seen: some use the
        # weights of a child without running the child.
        self.needs: dict[torch.nn.Module, list[torch.Tensor]] = {}
        self.needed_by: dict[torch.Tensor, list[torch.nn.Module]] = {}
        self.watch()

    def watch(self) -> None:
        """Watches the modules of the model; those that it watches already are left alone."""
        before_access = _Hook(self.flush_before)
        self._ask(self.model)
        for module in self.model.modules():
            if module in self.needs:
                continue
            own: list[torch.Tensor] = list(module.parameters(recurse=False))
            self.needs[module] = own
            for param in own:
                self.needed_by.setdefault(param, []).append(module)
            self.never_used.update(own)
            for child in module.children():
                self.parents.setdefault(child, []).append(module)
            self.hooks += [
                module.register_state_dict_pre_hook(before_access),
                module.register_load_state_dict_pre_hook(before_access),
            ]
            if own:
                self._ask(module)

    def _ask(self, module: torch.nn.Module) -> None:
        """A module without parameters of its own is asked only if it may use those of others."""
        if module not in self.asked:
            self.asked.add(module)
            self.asked_anew.add(module)
            if self.is_watching:
                self._ask_with_hook(module)

    def _ask_with_hook(self, module: torch.nn.Module) -> None:
        # Before hooks of others, which may make a weight from parameters.
        self.asking.append(module.register_forward_pre_hook(self.ask, prepend=True))

    def watch_steps(self, is_watching: bool) -> None:
        """Whether modules are asked, and parameters seen, from now on.

        `torch.compile` does not look whether hooks have come or gone since it compiled a module.
        So after a while without, the modules may run and not be asked: one step that is whole has
        to show who is, before any that overlaps.
        """
        if is_watching == self.is_watching:
            return
        self.is_watching = is_watching
        if is_watching:
            for module in self.asked:
                self._ask_with_hook(module)
        else:
            self._ask_nobody()

    def _ask_nobody(self) -> None:
        for hook in self.asking:
            hook.remove()
        self.asking.clear()

    def release(self) -> None:
        """Brings all up to date and stops watching."""
        self.flush()
        self._ask_nobody()
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    def before(self, module: torch.nn.Module, _: Any = None) -> None:
        """A module is about to run."""
        if not self.is_watching:
            return
        self.called.add(module)
        if not self.pending:
            return
        due = [param for param in self.needs.get(module, ()) if param in self.pending]
        # Nobody knows which module would need these, so the first one waits for them.
        due += [param for param in self.never_used if param in self.pending]
        if due:
            self.apply(due)

    def flush_before(self, *_: Any) -> None:
        """Somebody is about to read or load the parameters."""
        self.flush()

    def flush(self) -> None:
        """Waits for all updates that are still to come."""
        if self.pending:
            self.apply(list(self.pending))

    def apply(self, due: list[torch.Tensor]) -> None:
        """Waits for the gradients of these parameters and steps them.

        Some others go along, from the front on, and so does what has come meanwhile: a step of many
        parameters costs little more than a step of one.
        """
        optimizer = self.optimizer()
        if optimizer is None:
            return
        taken = self._with_neighbours(due)
        updates = taken.values()
        on_gpu = [update for update in updates if update.is_on_gpu]
        if on_gpu:
            wanted = [(update.batch.native, update.position) for update in on_gpu]
            _native.enqueue_results_of_batches(wanted)
        for update in updates:
            update.batch.native.wait(update.position)
        for param, update in self.pending.items():
            if param in taken:
                continue
            if not update.batch.native.poll(update.position):
                break
            taken[param] = update
        positions: dict[Batch, list[int]] = {}
        for update in taken.values():
            positions.setdefault(update.batch, []).append(update.position)
        for batch, some in positions.items():
            optimizer._byteps.finish(batch, some)
        optimizer._step_only(taken)
        for param in taken:
            del self.pending[param]
        optimizer._byteps.hooks.is_guarded = bool(self.pending)

    def _with_neighbours(self, due: list[torch.Tensor]) -> dict[torch.Tensor, _Update]:
        """The updates of these parameters, and of some that are needed next.

        Of the latter only what a GPU waits for: where the host does, it goes no further than it
        must, since other ranks may wait for what it does in between.
        """
        taken = {param: self.pending[param] for param in due}
        size = sum(param.nbytes for param in due)
        for param, update in self.pending.items():
            if len(taken) >= _TOGETHER or size + param.nbytes > _TOGETHER_BYTES:
                break
            if not update.is_on_gpu:
                continue
            if param not in taken:
                taken[param] = update
                size += param.nbytes
        return taken

    def take(self, optimizer: _Overlapping) -> None:
        """Makes updates of the gradients that are under way."""
        gradients = optimizer._byteps
        if gradients.changed() is not None:
            gradients.finish_round()  # Raises it when nothing is under way any more.
        options = {}
        for group in optimizer.param_groups:
            # A scheduler changes the numbers of the group, or the values of its tensors.
            then = {
                key: value.clone() if isinstance(value, torch.Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
            options.update(dict.fromkeys(group["params"], then))
        places = [
            (index, batch, position)
            for batch in gradients.batches
            for position, index in enumerate(batch.indices)
        ]
        # Those of the front layers first.
        for index, batch, position in sorted(places, key=operator.itemgetter(0)):
            param = gradients.params[index]
            if param in options:
                self.pending[param] = _Update(batch, position, options[param])
                param.grad = None
            else:
                # A parameter that was taken out of the optimizer is averaged and left as it is.
                batch.native.wait(position)
                gradients.finish(batch, [position])
        gradients.end_round()
        gradients.stepped()
        # A backward pass that comes to one of these is an error.
        gradients.hooks.is_guarded = bool(self.pending)
        homeless = [
            param
            for param in self.pending
            if param in self.unasked or not self.needed_by.get(param)
        ]
        self._begin_step()
        if homeless:
            self.apply(homeless)
        self.steps_left -= 1
        if self.steps_left <= 0:
            self.flush()

    def taken_whole(self, optimizer: _Overlapping) -> None:
        """A step has updated all parameters at once: its gradients belong to it as well."""
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = None
        self._begin_step()
        self.steps_left -= 1

    def forget(self) -> None:
        """The gradients of these updates will not come: their job is over."""
        self.pending.clear()
        self._begin_step()

    def _begin_step(self) -> None:
        self.called.clear()
        self.unasked.clear()
        self.asked_anew.clear()

    def check_up_to_date(self, param: torch.Tensor, names: dict[torch.Tensor, str]) -> None:
        """A backward pass has come to this parameter: was its last update there before?"""
        if param in self.pending:
            raise UsageError(
                f"'{names[param]}' was used while its update was still to come: the module that "
                "owns it did not run, and nothing has shown before who would use it; call "
                "optimizer.flush() before the forward pass"
            )

    def used(self, param: torch.Tensor) -> None:
        """A backward pass has come to this parameter."""
        self.never_used.discard(param)
        users = self.needed_by.get(param, [])
        if not users or any(module in self.called for module in users):
            return
        if self._ask_above(users):
            # The next backward pass will tell which of them runs.
            self.unasked.add(param)
            return
        # Used by a module above, as the projection in MultiheadAttention is: from now on that one
        # waits for it.
        above = self._called_above(users)
        self.needed_by[param] = above
        for module in above:
            self.needs[module].append(param)

    def _ask_above(self, modules: Iterable[torch.nn.Module]) -> bool:
        """Asks all modules above these from now on; whether some were not in this pass."""
        above = list(modules)
        seen: set[torch.nn.Module] = set()
        while above:
            for parent in self.parents.get(above.pop(), ()):
                if parent not in seen:
                    seen.add(parent)
                    above.append(parent)
                    self._ask(parent)
        return not seen.isdisjoint(self.asked_anew)

    def _called_above(self, modules: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
        """The nearest modules above these that have run; none if the model itself has not."""
        found: list[torch.nn.Module] = []
        seen: set[torch.nn.Module] = set()
        above = list(modules)
        while above:
            module = above.pop()
            for parent in self.parents.get(module, ()):
                if parent in seen:
                    continue
                seen.add(parent)
                (found if parent in self.called else above).append(parent)
        return found


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
        updates: _Updates,
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
    _updates: _Updates | None = None
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

    def _step_only(self, updates: dict[torch.Tensor, _Update]) -> None:
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
