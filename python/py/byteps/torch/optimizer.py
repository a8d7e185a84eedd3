"""An optimizer whose gradients are averaged over all ranks, each as soon as it is there."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from byteps import _registry, common
from byteps.errors import ConfigError, TensorError, UsageError
from byteps.torch import _tensors, ops
from byteps.torch.allreduce import averages
from byteps.torch.compression import Compression

__all__ = ["DistributedOptimizer"]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: ops.ReduceOp = ops.Average,
    sparse_as_dense: bool = False,
) -> torch.optim.Optimizer:
    """Makes ``step()`` use gradients averaged over all ranks.

    The optimizer itself is changed and returned: its class becomes a subclass, of the same name,
    of the class that it had, so whatever refers to it (a learning-rate scheduler, a gradient
    scaler) goes on to work.

    During ``backward()`` each gradient is sent as soon as it is complete, those of the front layers
    before others that wait; ``step()`` waits for what is missing. A parameter without gradient on
    this rank is sent as zeros (or as the gradient that it has), so no rank waits for another in
    vain. All ranks must create their optimizers in the same order.

    Args:
        optimizer: Any torch optimizer.
        named_parameters: ``model.named_parameters()``; the names appear in messages. Without it the
            parameters are numbered.
        compression: :class:`~byteps.torch.Compression` for what is sent.
        backward_passes_per_step: How often ``backward()`` adds to a gradient before it goes.
        op: :data:`~byteps.torch.Average` or :data:`~byteps.torch.Sum`.
        sparse_as_dense: Send sparse gradients (of embeddings) as dense ones. Without it they are
            an error.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"a torch optimizer is wanted, not {type(optimizer).__name__}")
    if backward_passes_per_step < 1:
        raise ConfigError(f"backward_passes_per_step={backward_passes_per_step}: 1 or more")
    named = _checked_names(optimizer, named_parameters)
    if isinstance(optimizer, _Distributed):
        optimizer._byteps.close()
    else:
        base = type(optimizer)
        optimizer.__class__ = type(base.__name__, (_Distributed, base), {"__doc__": base.__doc__})
    # A learning-rate scheduler made before has put a `step` of its own over that of the class.
    optimizer.__dict__.pop("step", None)
    optimizer._byteps = _Gradients(
        named, compression, backward_passes_per_step, op, sparse_as_dense
    )
    return optimizer


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


class _Gradients:
    """The gradients of one optimizer: which are under way, and which are still to come."""

    def __init__(
        self,
        named: list[tuple[str, torch.Tensor]],
        compression: Any,
        passes: int,
        op: ops.ReduceOp,
        sparse_as_dense: bool,
    ) -> None:
        number = _registry.count_up("DistributedOptimizer")
        self.prefix = f"Gradient.{number}." if number else "Gradient."
        self.compression = compression
        self.passes = passes
        self.average = averages(None, op)
        self.sparse_as_dense = sparse_as_dense
        self.should_synchronize = True
        self.synchronized = False
        self.closed = False
        self.names: dict[torch.Tensor, str] = {}
        self.priorities: dict[torch.Tensor, int] = {}
        self.passes_left: dict[torch.Tensor, int] = {}
        self.under_way: dict[torch.Tensor, tuple[int, torch.Tensor, Any]] = {}
        self.hooks: list[Any] = []
        self.adopt(named)

    def adopt(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Declares these parameters in one go and watches their gradients."""
        new = []
        for name, param in named:
            if param in self.names:
                continue
            # The front layers are needed first in the next pass: larger is sooner.
            self.priorities[param] = -len(self.names)
            self.names[param] = self.prefix + name
            if param.requires_grad:
                new.append(param)
        _registry.declare([self._declaration(param) for param in new])
        for param in new:
            self._watch(param)

    def _declaration(self, param: torch.Tensor) -> _registry.Tensor:
        name = self.names[param]
        _tensors.check(param, "parameter", name)
        sent, _ = self.compression.compress(torch.empty(1, dtype=param.dtype))
        dtype = _tensors.summed_dtype(sent, "parameter", name)
        operation = "average" if self.average else "sum"
        return _registry.Tensor(name, dtype, param.numel(), operation)

    def _watch(self, param: torch.Tensor) -> None:
        earlier = getattr(param, "_byteps_gradients", lambda: None)()
        if earlier is not None and earlier is not self:
            earlier.close()
        param._byteps_gradients = weakref.ref(self)
        self.passes_left[param] = self.passes
        myself = weakref.ref(self)

        def hook(param: torch.Tensor) -> None:
            gradients = myself()
            if gradients is not None:
                gradients.ready(param)

        self.hooks.append(param.register_post_accumulate_grad_hook(hook))

    def close(self) -> None:
        """Stops watching: another optimizer has taken over the parameters."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        self.closed = True

    def ready(self, param: torch.Tensor) -> None:
        """A backward pass has added to this gradient."""
        self.synchronized = False
        left = self.passes_left[param] - 1
        if left < 0 or param in self.under_way:
            raise UsageError(
                f"backward() has added to the gradient of '{self.names[param]}' more often than "
                f"backward_passes_per_step={self.passes} since the last step() or synchronize(): "
                "call step(), or raise backward_passes_per_step"
            )
        self.passes_left[param] = left
        if left == 0:
            self.send(param)

    def send(self, param: torch.Tensor) -> None:
        """Starts the push_pull of a gradient, in its own memory where nothing compresses it."""
        name = self.names[param]
        gradient = param.grad
        if gradient.layout != torch.strided:
            if not self.sparse_as_dense:
                raise TensorError(
                    f"the gradient of '{name}' is sparse: pass sparse_as_dense=True, or make the "
                    "embedding with sparse=False"
                )
            gradient = param.grad = gradient.to_dense()
        sent, context = self.compression.compress(gradient)
        handle = ops.push_pull_async_inplace(
            sent, self.average, name, priority=self.priorities[param]
        )
        self.under_way[param] = handle, sent, context

    def synchronize(self) -> None:
        """Waits until every gradient is the average of all ranks' gradients."""
        if self.closed:
            raise UsageError(
                "a later DistributedOptimizer has taken over the parameters of this one: use that"
            )
        self._watch_thawed()
        alone = common.size() == 1
        for param in self.passes_left:
            if param in self.under_way or not param.requires_grad:
                continue
            if param.grad is None:
                if alone:
                    continue
                param.grad = torch.zeros_like(param)
            self.send(param)
        self.drain()
        self.synchronized = True

    def drain(self) -> None:
        """Waits for what is under way, and is ready for the next pass."""
        for param in list(self.under_way):
            handle, sent, context = self.under_way[param]
            # Removed only when done: an interrupted wait can be taken up again.
            ops.synchronize(handle)
            del self.under_way[param]
            if sent is not param.grad:
                with torch.no_grad():
                    param.grad.copy_(self.compression.decompress(sent, context))
        for param in self.passes_left:
            self.passes_left[param] = self.passes

    def _watch_thawed(self) -> None:
        thawed = [p for p in self.names if p.requires_grad and p not in self.passes_left]
        if thawed:
            _registry.declare([self._declaration(param) for param in thawed])
            for param in thawed:
                self._watch(param)


class _Distributed(torch.optim.Optimizer):
    """What a distributed optimizer does differently; the user's own class follows in its order."""

    _byteps: _Gradients

    def __init__(self) -> None:
        raise ConfigError("make it with DistributedOptimizer(optimizer)")

    def synchronize(self) -> None:
        """Waits until all gradients are averaged, to look at them or clip them before the step::

        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
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
        if gradients.under_way:
            raise UsageError(
                "set_backward_passes_per_step() between backward() and step(): call it after step()"
            )
        gradients.passes = passes
        for param in gradients.passes_left:
            gradients.passes_left[param] = passes

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Waits for the averaged gradients, then steps.

        A ``closure`` may be evaluated several times: its gradients are averaged each time, and for
        LBFGS, which decides by it, its loss too.
        """
        gradients = self._byteps
        self._opt_called = True  # For learning-rate schedulers, which look at it.
        if closure is not None:
            gradients.drain()
            loss = super().step(self._synchronizing(closure), *args, **kwargs)
            gradients.synchronized = False
            return loss
        if gradients.should_synchronize:
            if not gradients.synchronized:
                gradients.synchronize()
        elif gradients.under_way:
            warnings.warn(
                "step() within skip_synchronize() while gradients are under way: call "
                "synchronize() before",
                stacklevel=2,
            )
            gradients.drain()
        gradients.synchronized = False
        return super().step(*args, **kwargs)

    # Optimizer.__setstate__ and schedulers would wrap it otherwise: hooks of the step would run
    # twice, and a scheduler made before DistributedOptimizer would warn.
    step.hooked = True
    step._wrapped_by_lr_sched = True

    def _synchronizing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def synchronizing() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._byteps.synchronize()
            if isinstance(self, torch.optim.LBFGS):
                name = f"{self._byteps.prefix}loss"
                value = torch.as_tensor(loss, dtype=torch.float64).detach().clone()
                loss = ops.push_pull_inplace(value, average=True, name=name)
            return loss

        return synchronizing

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clears the gradients; an error while they are under way."""
        if self._byteps.under_way:
            raise UsageError(
                "zero_grad() after backward() and before step() or synchronize(): the gradients "
                "are being averaged; call step() first"
            )
        super().zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, whose gradients are averaged too; all ranks must do it."""
        super().add_param_group(param_group)
        gradients = getattr(self, "_byteps", None)
        if gradients is not None:
            start = len(gradients.names)
            gradients.adopt(
                (f"push_pull.noname.{start + index}", param)
                for index, param in enumerate(self.param_groups[-1]["params"])
            )
