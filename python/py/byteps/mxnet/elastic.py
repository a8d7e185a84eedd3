"""Training with MXNet that goes on when ranks or servers die, and when new ones come::

    import byteps.mxnet as bps

    trainer = bps.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.05})

    @bps.elastic.run
    def train(state):
        while state.step < 1000:
            ...                      # forward, backward, trainer.step(len(images))
            state.step += 1
            if state.step % 10 == 0:
                state.commit()

    train(bps.elastic.MXNetState(net, trainer, step=0))

The job is elastic under ``bpslaunch --elastic redo``.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

import mxnet as mx
from byteps import _objects, _typed_errors, common, elastic
from byteps.elastic import HorovodInternalError, HostsUpdatedInterrupt, ObjectState, State, leave
from byteps.errors import ConfigError
from byteps.mxnet import _engine, ops
from byteps.mxnet.optimizer import DistributedOptimizer, DistributedTrainer

__all__ = [
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "MXNetState",
    "ObjectState",
    "State",
    "leave",
    "run",
    "run_fn",
]

_Result = TypeVar("_Result")


def _typed(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Raises what went wrong in an operation of MXNet's engine as the class that it is."""

    @functools.wraps(function)
    def typed(*arguments: Any, **options: Any) -> _Result:
        with _typed_errors.typed(mx.MXNetError):
            return function(*arguments, **options)

    return typed


def run(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """:func:`byteps.elastic.run` for functions that call MXNet, whose engine runs behind them: it
    waits for what they have called, and what goes wrong there counts as what it is."""

    @_typed
    @functools.wraps(function)
    def complete(*arguments: Any, **options: Any) -> _Result:
        result = function(*arguments, **options)
        mx.nd.waitall()
        return result

    return elastic.run(complete)


def run_fn(function: Callable[..., _Result], reset: Any = None) -> Callable[..., _Result]:
    """:func:`run` under the name that other frameworks' modules have; ``reset`` is not used."""
    del reset
    return run(function)


class MXNetState(ObjectState):
    """The state of a training: parameters, what their optimizer keeps, and plain values.

    What a trainer of Gluon's or a ``Module`` keeps is its optimizer, with the learning rate and the
    count of updates, and what that has for each parameter. The momentum that a codec has in the
    place of the optimizer's goes back with it; it is of this rank's own gradients, so it is not
    sent. MXNet's generators of random numbers hand out no state.

    Args:
        params: A block, or what its ``collect_params()`` gives. Each has a value: it is given its
            size (``in_units``, ``in_channels``), or the network has run once. Or a ``Module`` that
            has its parameters, and its optimizer without a key-value store.
        trainer: Gluon's, or a :class:`~byteps.mxnet.DistributedTrainer`; one with a key-value store
            begins to use it. None if there is none, as with a ``Module``, which is its own.
        values: They become attributes, which are saved and sent too.

    A commit waits for all that MXNet's engine has to do, and keeps a copy of each array.

    Raises:
        ConfigError: for parameters without a value, sparse ones, what is no trainer, or a Module
            that cannot be trained so.
    """

    def __init__(self, params: Any, trainer: Any = None, **values: Any) -> None:
        send = functools.partial(_objects.broadcast_object, ranks=None)
        super().__init__(send, common.rank, **values)
        self.params, self.trainer = params, trainer
        self._held: _OfModule | _OfGluon
        if isinstance(params, mx.mod.BaseModule):
            self._held = _OfModule(params, trainer)
        else:
            self._held = _OfGluon(params, trainer)
        self.save()

    @_typed
    def save(self) -> None:
        """See :class:`State`. An attribute that was not given at first is not saved."""
        mx.nd.waitall()  # What has failed has left other values.
        self._arrays = self._held.copies()
        if (keeper := self._held.keeper) is not None:
            self._kept = _kept_by(keeper)
        super().save()

    def restore(self) -> None:
        """See :class:`State`."""
        # MXNet hands on an error with each array that it has spoiled until somebody is told.
        _engine.drain()
        self._held.put(self._arrays)
        self._held.zero_gradients()  # Those of the step that failed are not to be added to.
        if (keeper := self._held.keeper) is not None:
            _put_back(keeper, self._kept)
        super().restore()

    @_typed
    def check_host_updates(self) -> None:
        """See :class:`State`."""
        mx.nd.waitall()  # All ranks may leave this epoch, and each with all that it has called.
        super().check_host_updates()

    @_typed
    def send(self, root_rank: int) -> None:
        """See :class:`State`."""
        # Ranks that were there before have declared names with the root of then.
        scope = f"elastic.{root_rank}."
        arrays = self._held.copies()
        ops.broadcast_arrays(
            [(f"{scope}parameter_{at}", array) for at, array in enumerate(arrays)], root_rank
        )
        self._held.put(arrays)
        if (keeper := self._held.keeper) is not None:
            _send(keeper, root_rank, scope)
        super().send(root_rank)


class _OfGluon:
    """Parameters of Gluon's, and the trainer that keeps something for them."""

    def __init__(self, params: Any, trainer: Any) -> None:
        self._parameters = _parameters_of(params)
        self.keeper = trainer
        if trainer is not None:
            _begin(trainer)

    def copies(self) -> list[Any]:
        return [param.list_data()[0].copy() for param in self._parameters]

    def put(self, arrays: list[Any]) -> None:
        for param, array in zip(self._parameters, arrays, strict=True):
            param.set_data(array)

    def zero_gradients(self) -> None:
        for param in self._parameters:
            param.zero_grad()


class _OfModule:
    """The parameters and auxiliary states of a Module, which keeps something for them itself."""

    def __init__(self, module: Any, trainer: Any) -> None:
        if trainer is not None:
            raise ConfigError(f"MXNetState: a Module has no trainer, but {trainer!r} was given")
        if not isinstance(module, mx.mod.Module):
            raise ConfigError(
                f"MXNetState: of MXNet's modules, Module alone has a state, and this is {module!r}"
            )
        if not (module.binded and module.params_initialized and module.optimizer_initialized):
            raise ConfigError(
                "MXNetState: call the module's bind(), init_params() and init_optimizer() before"
            )
        if module._updater is None:
            raise ConfigError(
                "MXNetState: the module's optimizer runs in a key-value store: pass kvstore=None "
                "to init_optimizer(), and a DistributedOptimizer"
            )
        self._module = self.keeper = module

    def _both(self) -> tuple[dict[str, Any], dict[str, Any]]:
        # BatchNorm's statistics are handed out as they are before the step that is under way.
        mx.nd.waitall()
        arguments, auxiliary = self._module.get_params()
        return arguments, auxiliary

    def copies(self) -> list[Any]:
        return [some[name].copy() for some in self._both() for name in sorted(some)]

    def put(self, arrays: list[Any]) -> None:
        left = iter(arrays)
        arguments, auxiliary = [{name: next(left) for name in sorted(it)} for it in self._both()]
        self._module.set_params(arguments, auxiliary, force_init=True)

    def zero_gradients(self) -> None:
        for of_devices in self._module._exec_group.grad_arrays:
            for gradient in of_devices:
                if gradient is not None:
                    gradient[:] = 0


def _parameters_of(params: Any) -> list[Any]:
    """In the order of their names, so prefixes that Gluon numbers may differ between ranks."""
    if isinstance(params, mx.gluon.Block):
        params = params.collect_params()
    try:
        found = [params[name] for name in sorted(params.keys())]
    except (AttributeError, TypeError):
        found = []
    if not found or not all(isinstance(one, mx.gluon.Parameter) for one in found):
        raise ConfigError(
            "MXNetState: pass a block of Gluon's with parameters, or its collect_params(), and "
            f"not {params!r}; ObjectState is for plain values alone"
        )
    for param in found:
        if param._stype != "default":
            raise ConfigError(
                f"MXNetState: '{param.name}' is stored as {param._stype}: leave out stype"
            )
        if param._data is None:
            raise ConfigError(
                f"MXNetState: '{param.name}' has no value yet, which the others may have to send: "
                "initialize it, and give its size (in_units, in_channels) or run the network once"
            )
    return found


# What a trainer keeps, or a Module


class _Kept(NamedTuple):
    """Copies of what the optimizer has for each parameter, of itself, and a codec's momentum."""

    states: dict[Any, Any]
    optimizer: dict[str, Any]
    velocities: dict[int, Any]


class _Leaf(NamedTuple):
    """Stands for an array."""

    shape: tuple[int, ...]
    dtype: str


@_typed
def _begin(trainer: Any) -> None:
    if not isinstance(trainer, mx.gluon.Trainer):
        raise ConfigError(f"MXNetState: trainer is {trainer!r}, and not one of Gluon's")
    if not trainer._kv_initialized:
        trainer._init_kvstore()
    if trainer._params_to_init:
        trainer._init_params()


def _optimizer_of(trainer: Any) -> dict[str, Any]:
    """What its optimizer has; but not the parameters themselves."""
    optimizer = trainer._optimizer
    if isinstance(optimizer, DistributedOptimizer):
        optimizer = optimizer._wrapped
    own: dict[str, Any] = vars(optimizer)
    return own


def _described(trainer: Any) -> dict[str, Any]:
    # In one piece: some of it stands there by two names.
    return {name: it for name, it in _optimizer_of(trainer).items() if name != "param_dict"}


def _updaters_of(trainer: Any) -> list[Any]:
    """A trainer has one for each device, a module one for all."""
    if isinstance(trainer, mx.mod.Module):
        return [trainer._updater]
    updaters: list[Any] = trainer._updaters
    return updaters


def _kept_by(trainer: Any) -> _Kept:
    is_ours = isinstance(trainer, DistributedTrainer)
    return _Kept(
        _each(_updaters_of(trainer)[0].states, _copied),
        copy.deepcopy(_described(trainer)),
        _each(trainer._velocities, _copied) if is_ours else {},
    )


def _put_back(trainer: Any, kept: _Kept) -> None:
    _set(trainer, _each(kept.states, _copied), copy.deepcopy(kept.optimizer))
    if isinstance(trainer, DistributedTrainer):
        trainer._velocities = _each(kept.velocities, _copied)


def _set(trainer: Any, states: dict[Any, Any], optimizer: dict[str, Any]) -> None:
    for place, updater in enumerate(_updaters_of(trainer)):
        updater.states = states if place == 0 else _each(states, _copied)
        # It moves them to where the weights are when it uses them.
        updater.states_synced = dict.fromkeys(states, False)
    # The optimizer stays the object that the program may have.
    _optimizer_of(trainer).update(optimizer)


def _send(trainer: Any, root: int, scope: str) -> None:
    """What it has for each parameter begins to be there with the first step."""
    states, told = _updaters_of(trainer)[0].states, None
    if common.rank() == root:
        told = _each(states, _leaf_of), _described(trainer)
    told = _objects.broadcast_object(told, root, f"{scope}trainer", None)
    if common.rank() != root:
        states = _each(told[0], _room)
        _set(trainer, states, told[1])
    leaves: list[Any] = []
    _each(states, leaves.append)
    named = [(f"{scope}state_{at}", leaf) for at, leaf in enumerate(leaves)]
    ops.broadcast_arrays(named, root)


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same with each array, or what stands for one, changed."""
    if isinstance(value, (mx.nd.NDArray, _Leaf)):
        return change(value)
    if isinstance(value, dict):
        return {key: _each(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_each(item, change) for item in value)
    return copy.deepcopy(value)


def _copied(array: Any) -> Any:
    return array.copy()


def _leaf_of(array: Any) -> _Leaf:
    return _Leaf(array.shape, np.dtype(array.dtype).name)


def _room(leaf: _Leaf) -> Any:
    return mx.nd.empty(leaf.shape, ctx=mx.cpu(), dtype=leaf.dtype)
