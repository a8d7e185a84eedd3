"""An optimizer whose gradients are averaged over all ranks, each as soon as it is there."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, TypeVar, cast

import torch

from byteps import _native, _process_sets, _registry
from byteps._backups import Backups
from byteps.errors import ConfigError, UsageError
from byteps.torch import _recoding, ops
from byteps.torch._gradients import Gradients
from byteps.torch._stored import StoredParameters
from byteps.torch.compression import Compression, Predivided

__all__ = ["DistributedOptimizer"]

_Kind = TypeVar("_Kind", bound="Distributed")
_Step = TypeVar("_Step", bound=Callable[..., Any])

# How far up the stack a gradient scaler is looked for.
_WRAPPERS_MAX = 8


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: ops.ReduceOp = ops.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = None,
    async_: bool | None = None,
    staleness: int | None = None,
    backup_workers: int | None = None,
) -> torch.optim.Optimizer:
    """Makes ``step()`` use gradients averaged over all ranks.

    The optimizer itself is changed and returned: its class becomes a subclass, of the same name,
    of the class that it had, so whatever refers to it (a learning-rate scheduler, a gradient
    scaler) goes on to work.

    During ``backward()`` gradients are sent when they are complete, and ``backward()`` returns when
    all are averaged: clip them, log them, or unscale them before ``step()`` as in training on one
    device. A parameter without gradient on this rank is sent as zeros (or as the gradient that it
    has). A rank that skips ``backward()`` does the same in ``step()``. All ranks must create their
    optimizers in the same order, and run the same backward passes before each step.

    Args:
        optimizer: Any torch optimizer.
        named_parameters: ``model.named_parameters()``; the names appear in messages. Without it the
            parameters are numbered.
        compression: :class:`~byteps.torch.Compression` for what is sent.
        backward_passes_per_step: How often ``backward()`` adds to a gradient before it is sent.
            Averages are right without it, too, but each pass then sends all gradients.
        op: :data:`~byteps.torch.Average`, :data:`~byteps.torch.Sum` or
            :data:`~byteps.torch.Adasum`. With the last, as in Horovod, nothing is sent during
            ``backward()``: the optimizer steps with the gradients of this rank, and what all ranks'
            steps have changed is combined then. All ranks must step, so it takes no gradient scaler
            of float16, which skips steps of single ranks.
        gradient_predivide_factor: Gradients are divided by it before they are sent, and averages
            multiplied by it: for sums that would leave the range of what ``compression`` sends.
        num_groups, groups: For Horovod's callers, which choose what is sent together; not used:
            gradients are sent in batches as they come.
        process_set: A :class:`~byteps.torch.ProcessSet` of the ranks that average among themselves.
            On a rank that is none of them the optimizer steps with the gradients that it has.
        sparse_as_dense: Send sparse gradients (of embeddings) as dense ones. Without it they stay
            sparse: ranks gather each other's rows when the pass is over, uncompressed, and the
            gradient is coalesced then. A rank without rows, or without a gradient, adds none. Where
            another rank has a dense gradient of the parameter, all send dense ones.
        async_: Train asynchronously (docs/async.md): ``step()`` steps with the gradients of this
            rank, adds what that has changed to the parameters on the servers, and gives this rank
            those parameters, without waiting for other ranks. The first ``step()`` begins with the
            parameters of rank 0, or of the first rank of the process set. ``op`` has no meaning
            then, and ``compression`` is refused. As ``BYTEPS_ENABLE_ASYNC`` says where it is None.
        staleness: How many steps a rank may be ahead of the slowest in asynchronous training: its
            ``step()`` waits beyond that. As ``BPS_STALENESS`` says where it is None.
        backup_workers: For how many of the slowest ranks no average waits (docs/stragglers.md): it
            is then that of the others, the same on all ranks. Gradients are in memory of the host
            and dense, and ranks do not compare how often they have called ``backward()``. As
            ``BPS_BACKUP_WORKERS`` says where it is None, for what may be so; 0 waits for all.
    """
    known = _process_sets.added(process_set)
    _check_groups(num_groups, groups)
    is_async = _native.enables_async() if async_ is None else async_
    if staleness is not None and (staleness < 0 or not is_async):
        raise ConfigError(
            f"staleness={staleness} with async_={is_async}: a bound of 0 or more, for asynchronous "
            "training; pass async_=True, or set BYTEPS_ENABLE_ASYNC=1"
        )
    if gradient_predivide_factor != 1.0:
        if op != ops.Average or not gradient_predivide_factor > 0:
            raise ConfigError(
                f"gradient_predivide_factor={gradient_predivide_factor} with op={op!r}: it is a "
                "positive number, and for averages"
            )
        compression = Predivided(compression, gradient_predivide_factor)
    named = checked(optimizer, named_parameters, backward_passes_per_step)
    backups = Backups.asked(backup_workers).unless(_needs_all(op, is_async))
    prefix = next_prefix() if known is None else next_prefix(known.process_set_id)
    if is_async:
        if op == ops.Adasum:
            raise ConfigError(
                "op=Adasum combines the steps of all ranks, and asynchronous training waits for "
                "none: pass async_=False"
            )
        return _asynchronous(optimizer, named, compression, prefix, known, staleness)
    if op == ops.Adasum:
        return _combining(optimizer, named, compression, prefix, known)
    distributed = become(Distributed, optimizer)
    distributed._byteps = Gradients(
        named,
        compression,
        backward_passes_per_step,
        op,
        sparse_as_dense,
        prefix,
        known,
        backups=backups,
    )
    distributed._byteps.step_with(distributed)
    return distributed


def _needs_all(op: ops.ReduceOp, is_async: bool) -> str | None:
    """Why an optimizer waits for all ranks, if it does, or for none."""
    if is_async:
        return "asynchronous training waits for no rank anyway"
    return "op=Adasum combines the steps of all ranks" if op == ops.Adasum else None


def _combining(
    optimizer: torch.optim.Optimizer,
    named: list[tuple[str, torch.Tensor]],
    compression: Any,
    prefix: str,
    process_set: _process_sets.ProcessSet | None,
) -> torch.optim.Optimizer:
    """The optimizer with Adasum."""
    if compression is not Compression.none:
        raise ConfigError(f"compression={compression!r} is for averages and sums, not Adasum")
    combining = become(_Combining, optimizer)
    # It watches no gradients.
    combining._byteps = Gradients((), compression, 1, ops.Average, False, prefix, process_set)
    combining._names = {param: f"{prefix}{name}" for name, param in named}
    return combining


def _asynchronous(
    optimizer: torch.optim.Optimizer,
    named: list[tuple[str, torch.Tensor]],
    compression: Any,
    prefix: str,
    process_set: _process_sets.ProcessSet | None,
    staleness: int | None,
) -> torch.optim.Optimizer:
    """The optimizer with parameters on the servers."""
    if compression is not Compression.none:
        raise ConfigError(
            f"compression={compression!r}: changes of parameters are not compressed; leave it out, "
            "or pass async_=False"
        )
    distributed = become(_Asynchronous, optimizer)
    # It watches no gradients.
    gradients = Gradients((), compression, 1, ops.Average, False, prefix, process_set)
    gradients.should_synchronize = False
    distributed._byteps = gradients
    distributed._named = [(_stored_name(prefix, name), param) for name, param in named]
    # A rank that is none of the set trains alone.
    ranks = gradients.ranks if gradients.size > 1 else None
    distributed._stored = StoredParameters(staleness, ranks)
    return distributed


def _stored_name(prefix: str, name: str) -> str:
    return f"AsyncParam.{prefix.removeprefix('Gradient.')}{name}"


def _check_groups(num_groups: int, groups: Any) -> None:
    """Raises where Horovod would: no parameter may be in two groups."""
    if num_groups < 0:
        raise ConfigError(f"num_groups={num_groups}: 0 or more")
    if groups is None or isinstance(groups, int):
        return
    if not (isinstance(groups, list) and all(isinstance(group, list) for group in groups)):
        raise ConfigError(f"groups={groups!r}: a number, or lists of parameters")
    params = [id(param) for group in groups for param in group]
    if len(set(params)) < len(params):
        raise ConfigError("groups: a parameter stands in two of them, or twice in one")


def next_prefix(process_set: int | None = None) -> str:
    """What the names of the next optimizer's gradients begin with, among these ranks."""
    number = _registry.count_up(("DistributedOptimizer", process_set))
    return f"Gradient.{number}." if number else "Gradient."


def checked(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Any]] | None,
    backward_passes_per_step: int,
) -> list[tuple[str, torch.Tensor]]:
    """A name for each parameter of the optimizer; raises if an argument cannot be."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"a torch optimizer is wanted, not {type(optimizer).__name__}")
    if backward_passes_per_step < 1:
        raise ConfigError(f"backward_passes_per_step={backward_passes_per_step}: 1 or more")
    return _checked_names(optimizer, named_parameters)


def become(distributed: type[_Kind], optimizer: torch.optim.Optimizer) -> _Kind:
    """Makes the optimizer one of this kind, over the class that the user gave it."""
    base = type(optimizer)
    if isinstance(optimizer, Distributed):
        optimizer.release()
        base = _base_of(optimizer)
    optimizer.__class__ = _class_over(distributed, base)
    # A learning-rate scheduler made before has put a `step` of its own over that of the class.
    optimizer.__dict__.pop("step", None)
    return cast("_Kind", optimizer)


def _class_over(distributed: type[_Kind], base: type) -> type[_Kind]:
    return type(base.__name__, (distributed, base), {"__doc__": base.__doc__})


def _base_of(optimizer: Distributed) -> type:
    """The class that the user gave it."""
    order = type(optimizer).__mro__
    return order[order.index(Distributed) + 1]


def _new_copy(distributed: type[_Kind], base: type) -> _Kind:
    """What a copy, or a pickled optimizer, begins with."""
    kind = _class_over(distributed, base)
    return kind.__new__(kind)


class _Gradients:
    """The attribute that only the optimizer has that was made distributed, and no copy of it.

    A copy has parameters of its own, and only the user knows whether the other ranks have a copy,
    too. So it does not average by itself, and does not train without averaging either.
    """

    def __get__(self, optimizer: Distributed | None, _: type) -> Gradients:
        raise UsageError(
            "this optimizer is a copy of a distributed one, or was loaded from a file, and "
            "averages nothing yet: pass it to DistributedOptimizer or CrossBarrier again, on all "
            "ranks"
        )


def _checked_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Any]] | None
) -> list[tuple[str, torch.Tensor]]:
    """A name for each parameter of the optimizer, in the order of the names given."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if named_parameters is None:
        return [(f"push_pull.noname.{index}", param) for index, param in enumerate(params)]
    named = list(named_parameters)
    if any(not isinstance(item, tuple) or len(item) != 2 for item in named):
        raise ConfigError(
            "named_parameters should be (name, parameter) pairs: pass model.named_parameters()"
        )
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"names of parameters must differ; more than once: {', '.join(twice)}")
    known = {id(param): name for name, param in named}
    for index, param in enumerate(params):
        if id(param) not in known:
            raise ConfigError(
                f"parameter {index} of the optimizer, of shape {tuple(param.shape)}, is not in "
                "named_parameters: pass the names of all its parameters, or of none"
            )
    wanted = {id(param) for param in params}
    return [(name, param) for name, param in named if id(param) in wanted]


def asked_by_a_scaler() -> bool:
    """Whether the caller's caller, perhaps through wrappers of an optimizer, unscales gradients."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_WRAPPERS_MAX):
        if frame is None:
            break
        if frame.f_code.co_name == "_unscale_grads_":
            return True
        frame = frame.f_back
    return False


def complete(step: _Step) -> _Step:
    """Decorates a step that torch wraps in nothing more.

    Optimizer.__setstate__ and schedulers would wrap it otherwise: hooks of the step would run
    twice, and a scheduler made before DistributedOptimizer would warn.
    """
    vars(step).update(hooked=True, _wrapped_by_lr_sched=True)
    return step


class Distributed(torch.optim.Optimizer):
    """What a distributed optimizer does differently; the user's own class follows in its order."""

    _byteps: Any = _Gradients()
    # Whether steps take gradients that all ranks have averaged or summed.
    averages_gradients = True

    def __init__(self) -> None:
        raise ConfigError("make it with DistributedOptimizer(optimizer)")

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        kind = type(self).__mro__[1]
        return _new_copy, (kind, _base_of(self)), self.__getstate__()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The options of each group of parameters.

        A gradient scaler (``torch.amp.GradScaler``) comes here, and nowhere else, before it
        unscales the gradients and looks for infinite ones. They are averaged first: so all ranks
        find the same, and skip the same steps.
        """
        gradients = self.__dict__.get("_byteps")
        if gradients is not None and not gradients.synchronized and gradients.should_synchronize:
            if asked_by_a_scaler():
                gradients.synchronize()
        groups = self.__dict__.get("param_groups")
        return super().param_groups if groups is None else groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    def release(self) -> None:
        """Stops averaging: the optimizer is made distributed again."""
        if "_byteps" in self.__dict__:
            self._byteps.close()

    def synchronize(self) -> None:
        """Averages all gradients now; does nothing where ``backward()`` has done so.

        It is needed before gradients are changed where ``backward()`` leaves them to ``step()``:
        after fewer passes than ``backward_passes_per_step``, and with ``CrossBarrier``.
        """
        self._byteps.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """``step()`` within it takes the gradients as they are."""
        self._byteps.should_synchronize = False
        try:
            yield
        finally:
            self._byteps.should_synchronize = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """How often ``backward()`` adds to each gradient before it is sent, from now on."""
        if passes < 1:
            raise ConfigError(f"backward_passes_per_step={passes}: 1 or more")
        gradients = self._byteps
        if gradients.is_under_way:
            raise UsageError(
                "set_backward_passes_per_step() between backward() and step(): call it after step()"
            )
        gradients.set_passes(passes)

    def set_compression(self, compression: Any) -> None:
        """How gradients are compressed from now on; to be called on all ranks after as many steps.

        A training whose first steps are sent whole, or nearly so, may go on with a codec that
        leaves much out: docs/compression.md says what that gains.

        Args:
            compression: :class:`~byteps.torch.Compression` for what is sent. Momentum goes on with
                what it has summed, and error feedback, if both have it, with what it has kept.

        Raises:
            byteps.errors.UsageError: between ``backward()`` and ``step()``.
            byteps.errors.MismatchError: if another rank has said something else.
        """
        if not self.averages_gradients:
            raise ConfigError("set_compression: this optimizer averages no gradients")
        _recoding.set_compression(self._byteps, compression)

    @complete
    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Waits for the averaged gradients, then steps.

        A ``closure`` may be evaluated several times: its gradients are averaged each time, and for
        LBFGS, which decides by it, its loss too.
        """
        gradients = self._byteps
        self._opt_called = True  # For learning-rate schedulers, which look at it.
        if closure is not None:
            if gradients.is_under_way:
                gradients.synchronize()
            loss = super().step(self._synchronizing(closure), *args, **kwargs)
            gradients.stepped()
            return loss
        if gradients.should_synchronize:
            gradients.synchronize()
        elif gradients.is_under_way:
            warnings.warn(
                "step() within skip_synchronize() while gradients are under way: call "
                "synchronize() before",
                stacklevel=2,
            )
            gradients.synchronize()
        gradients.stepped()
        return super().step(*args, **kwargs)

    def _synchronizing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def synchronizing() -> Any:
            gradients = self._byteps
            gradients.synchronized = False
            with torch.enable_grad():
                loss = closure()
            gradients.synchronize()
            if isinstance(self, torch.optim.LBFGS):
                name = f"{gradients.prefix}loss"
                value = torch.as_tensor(loss, dtype=torch.float64).detach().clone()
                loss = ops.push_pull_inplace(value, average=True, name=name)
            return loss

        return synchronizing

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clears the gradients."""
        gradients = self.__dict__.get("_byteps")
        if gradients is not None:
            gradients.clear()
        super().zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, whose gradients are averaged too; all ranks must do it."""
        super().add_param_group(param_group)
        gradients = self.__dict__.get("_byteps")
        if gradients is not None:
            start = len(gradients.names)
            gradients.adopt(
                (f"push_pull.noname.{start + index}", param)
                for index, param in enumerate(self.param_groups[-1]["params"])
            )


class _Combining(Distributed):
    """An optimizer whose steps are combined by Adasum, as those of Horovod's are.

    Each rank steps with its own gradients. What the step has changed, not the gradient, is what
    ranks combine: so the factors hold for what optimizers such as Adam make of gradients, too.
    """

    averages_gradients = False
    _names: dict[torch.Tensor, str]

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """An error: there is no step without the other ranks."""
        raise UsageError("skip_synchronize() with op=Adasum: each step is combined with the others")
        yield

    @complete
    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Steps with this rank's gradients, and combines the changes of all ranks."""
        gradients = self._byteps
        self._opt_called = True  # For learning-rate schedulers, which look at it.
        params = [param for param in self._names if param.requires_grad]
        before = [param.detach().clone() for param in params]
        user_step = super(Distributed, self).step
        loss = (
            user_step(*args, **kwargs) if closure is None else user_step(closure, *args, **kwargs)
        )
        if gradients.size > 1:
            changes = [param.detach() - start for param, start in zip(params, before, strict=True)]
            names = [self._names[param] for param in params]
            ops.push_pull_group_inplace(
                changes, name=names, op=ops.Adasum, process_set=gradients.process_set
            )
            with torch.no_grad():
                for param, start, change in zip(params, before, changes, strict=True):
                    param.copy_(start + change)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, whose changes are combined too; all ranks must do it."""
        super(Distributed, self).add_param_group(param_group)
        names = self.__dict__.get("_names")
        if names is not None:
            for param in self.param_groups[-1]["params"]:
                names[param] = f"{self._byteps.prefix}push_pull.noname.{len(names)}"


class _Asynchronous(Distributed):
    """An optimizer whose parameters are on the servers, as BytePS's are with BYTEPS_ENABLE_ASYNC.

    Each rank steps with its own gradients, whenever it has some.
    """

    averages_gradients = False
    _named: list[tuple[str, torch.Tensor]]
    _stored: StoredParameters

    def synchronize(self) -> None:
        """Does nothing: gradients stay those of this rank."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """An error: there is nothing to skip."""
        raise UsageError(
            "skip_synchronize() in asynchronous training: gradients are those of this rank anyway"
        )
        yield

    @complete
    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Steps with this rank's gradients, and takes the parameters that all steps have made."""
        self._opt_called = True  # For learning-rate schedulers, which look at it.
        shares = self._byteps.size > 1
        named = [(name, param) for name, param in self._named if param.requires_grad]
        if shares:
            self._stored.join(named)
        user_step = super(Distributed, self).step
        loss = (
            user_step(*args, **kwargs) if closure is None else user_step(closure, *args, **kwargs)
        )
        if shares:
            self._stored.push(named)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, which the servers get too; all ranks must do it."""
        super(Distributed, self).add_param_group(param_group)
        named = self.__dict__.get("_named")
        if named is not None:
            for param in self.param_groups[-1]["params"]:
                number = f"push_pull.noname.{len(named)}"
                named.append((_stored_name(self._byteps.prefix, number), param))
