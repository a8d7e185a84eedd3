"""Updates of parameters that the next forward pass makes, and which module waits for which."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch

from byteps import _native
from byteps.errors import UsageError
from byteps.torch import _gpu
from byteps.torch._batch import Batch
from byteps.torch._compiled import untraced
from byteps.torch._gradients import Gradients

# A step of one parameter costs the host nearly what a step of many costs. So a module on a GPU
# waits for its next neighbours' parameters too, which are needed soon anyway: for so many together,
# unless these bytes are reached first, which bounds how much longer the GPU waits for the line.
_TOGETHER = 64
_TOGETHER_BYTES = 5 << 19


class Update(NamedTuple):
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


class Overlapping(Protocol):
    """The optimizer whose updates these are."""

    param_groups: list[dict[str, Any]]

    @property
    def _byteps(self) -> Gradients:
        """What it averages."""

    def _step_only(self, updates: dict[torch.Tensor, Update]) -> None:
        """Its step, with these parameters alone and their options of then."""


class Hook:
    """A hook of a module that keeps nothing alive. Those of a copy of the module do nothing."""

    def __init__(self, method: Callable[..., Any] | None = None) -> None:
        self.method = None if method is None else weakref.WeakMethod(method)

    @untraced
    def __call__(self, *arguments: Any) -> None:
        method = self.method and self.method()
        if method is not None:
            method(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, ()


class Updates:
    """The updates of one optimizer that are still to come, and which module waits for which."""

    def __init__(self, model: torch.nn.Module, optimizer: Overlapping, num_steps: int) -> None:
        self.model = model
        self.optimizer = weakref.ref(optimizer)
        self.steps_left = num_steps
        self.pending: dict[torch.Tensor, Update] = {}
        self.hooks: list[Any] = []
        # Whether the last step overlaps, or the next one may, so that it counts which modules run
        # and which parameters are used.
        self.is_watching = True
        # Modules that are asked before they run, what asks them, and its hooks: none while nobody
        # watches, since each costs a forward pass some microseconds. Some are new in this step.
        self.asked: set[torch.nn.Module] = set()
        self.asked_anew: set[torch.nn.Module] = set()
        self.ask = Hook(self.before)
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
        before_access = Hook(self.flush_before)
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
        So after a while without, the modules may run and not be asked: a pass has to show who is,
        before a step that overlaps.
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

    def _with_neighbours(self, due: list[torch.Tensor]) -> dict[torch.Tensor, Update]:
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

    def take(self, optimizer: Overlapping) -> None:
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
                self.pending[param] = Update(batch, position, options[param])
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

    def taken_whole(self, optimizer: Overlapping) -> None:
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
