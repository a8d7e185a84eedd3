"""What gives all ranks the same start: parameters, optimizer state, objects."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from byteps import _objects, _process_sets, common
from byteps.errors import ConfigError, _mismatch
from byteps.torch import ops

__all__ = ["broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any],
    root_rank: int,
    prefix: str = "Parameter.",
    process_set: Any = None,
) -> None:
    """Overwrites these tensors with those of ``root_rank``, all at once, on all ranks or those of a
    :class:`~byteps.torch.ProcessSet`.

    ``params`` is a model's ``state_dict()``, ``named_parameters()`` or another iterable of (name,
    tensor) pairs, or an iterable of tensors, which are then told apart by their order. Dicts, lists
    and tuples in a dict are searched for tensors. Other values cannot be overwritten and are left
    alone, but a dict that holds nothing else is an error, and so is an optimizer's state, which
    :func:`broadcast_optimizer_state` sends.
    """
    if isinstance(params, Mapping):
        named = _tensors_of(params, prefix)
    elif isinstance(params, torch.optim.Optimizer):
        raise ConfigError(_OPTIMIZER_STATE)
    else:
        named = _pairs(params, prefix)
    ops.broadcast_all_(named, root_rank, _process_sets.ranks_of(process_set))


_OPTIMIZER_STATE = (
    "broadcast_parameters cannot set the options and counters in an optimizer's state: call "
    "broadcast_optimizer_state(optimizer, root_rank)"
)


def _tensors_of(params: Mapping[str, Any], prefix: str) -> list[tuple[str, torch.Tensor]]:
    """The tensors in a dict, at any depth, each by its path."""
    named: list[tuple[str, torch.Tensor]] = []
    others = []

    def search(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            named.append((prefix + name, value))
        elif isinstance(value, Mapping):
            if "state" in value and "param_groups" in value:
                raise ConfigError(_OPTIMIZER_STATE)
            for key, item in value.items():
                search(f"{name}.{key}" if name else str(key), item)
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                search(f"{name}.{index}", item)
        elif value is not None:
            others.append(name)

    search("", params)
    if others and not named:
        raise ConfigError(
            f"broadcast_parameters found no tensor in a dict of {len(others)} other values, such "
            f"as '{others[0]}': pass model.state_dict(), or send objects by broadcast_object"
        )
    return named


def _pairs(params: Iterable[Any], prefix: str) -> list[tuple[str, torch.Tensor]]:
    items = list(params)
    named = []
    for index, one in enumerate(items):
        item = (f"{index}", one) if isinstance(one, torch.Tensor) else one
        if not isinstance(item, tuple) or len(item) != 2 or not isinstance(item[0], str):
            raise ConfigError(
                "broadcast_parameters takes a dict, (name, tensor) pairs or tensors, and found "
                f"{type(item).__name__}: pass model.state_dict() or model.named_parameters()"
            )
        if isinstance(item[1], torch.Tensor):
            named.append((prefix + item[0], item[1]))
        elif item[1] is not None:
            raise ConfigError(f"'{item[0]}' is no tensor but {type(item[1]).__name__}")
    return named


class _TensorSpec(NamedTuple):
    """Stands for a tensor in a structure that is sent without its tensors."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    prefix: str = "Parameter.",
    model: Any = None,
    process_set: Any = None,
) -> None:
    """Gives every rank, or those of a :class:`~byteps.torch.ProcessSet`, the optimizer state of
    ``root_rank``: options, counters and tensors.

    Nothing is stepped for it and no parameter changes. An optimizer of ``root_rank`` that has no
    state yet leaves the others without state too. Tensors arrive bit for bit; all else is sent by
    :func:`broadcast_object`. Of a :func:`~byteps.torch.ServerOptimizer` that has stepped in this
    job, nothing is sent: its state is on the servers. ``model``, by which Horovod makes a state
    that is not there, is not used.
    """
    del model
    if getattr(optimizer, "has_begun", False):
        return  # One state is on the servers, for all.
    is_root = common.rank() == root_rank
    tensors: list[torch.Tensor] = []
    structure = _without_tensors(optimizer.state_dict(), tensors) if is_root else None
    structure = broadcast_object(structure, root_rank, f"{prefix}optimizer_state", process_set)
    if is_root:
        sent = tensors
    else:
        sent = []
        state_dict = _with_tensors(structure, sent, _devices(optimizer), root_rank)
        _check_groups(optimizer, state_dict, root_rank)
    ops.broadcast_all_(
        [(f"{prefix}optimizer_state.{index}", tensor) for index, tensor in enumerate(sent)],
        root_rank,
        _process_sets.ranks_of(process_set),
    )
    if not is_root:
        _load(optimizer, state_dict)


def _without_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _TensorSpec(tuple(value.shape), value.dtype, value.device.type)
    if isinstance(value, dict):
        return {key: _without_tensors(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_tensors(item, tensors) for item in value)
    return value


def _devices(optimizer: torch.optim.Optimizer) -> dict[str, torch.device]:
    """Where this rank keeps what another has on a device of its own, by kind of device."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {"cpu": torch.device("cpu")} | {param.device.type: param.device for param in params}


def _with_tensors(
    value: Any, tensors: list[torch.Tensor], devices: dict[str, torch.device], root_rank: int
) -> Any:
    if isinstance(value, _TensorSpec):
        if value.device not in devices:
            raise _mismatch(
                f"the optimizer of rank {root_rank} has state on a device of kind "
                f"'{value.device}', and that of rank {common.rank()} has no parameter there: put "
                "the same model on the same kind of device on all ranks",
                (root_rank, common.rank()),
            )
        tensor = torch.empty(value.shape, dtype=value.dtype, device=devices[value.device])
        tensors.append(tensor)
        return tensor
    if isinstance(value, dict):
        return {
            key: _with_tensors(item, tensors, devices, root_rank) for key, item in value.items()
        }
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(item, tensors, devices, root_rank) for item in value)
    return value


def _check_groups(optimizer: torch.optim.Optimizer, state_dict: Any, root_rank: int) -> None:
    own = [len(group["params"]) for group in optimizer.param_groups]
    other = [len(group["params"]) for group in state_dict["param_groups"]]
    if own != other:
        raise _mismatch(
            f"the optimizer of rank {root_rank} has groups of {other} parameters and that of rank "
            f"{common.rank()} of {own}: build the same optimizer on all ranks",
            (root_rank, common.rank()),
        )


def _load(optimizer: torch.optim.Optimizer, state_dict: Any) -> None:
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        optimizer.load_state_dict(state_dict)
        return
    # As load_state_dict does it, but without its casts: state arrives in the type that it had.
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    by_number = dict(zip(numbers, params, strict=True))
    state: Any = defaultdict(dict)
    for number, value in state_dict["state"].items():
        state[by_number.get(number, number)] = value
    for group, other in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        group.update({key: value for key, value in other.items() if key != "params"})
    optimizer.__setstate__({"state": state, "param_groups": optimizer.param_groups})


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: Any = None
) -> Any:
    """The object of ``root_rank``; what the other ranks pass is not looked at.

    It is pickled on the root and unpickled on the others, as in BytePS and Horovod, so its sender
    is trusted as far as running code: a rank of the same job, which proved the job's key if one is
    set. With a key the bytes are authenticated, so that nothing is unpickled that somebody between
    the nodes has written: that is a :class:`CorruptionError`. The engine and the servers only see
    bytes. An object that cannot be pickled is a :class:`TensorError` on every rank.
    With a ``process_set`` it is for the ranks of that :class:`~byteps.torch.ProcessSet`.
    """
    ranks = _process_sets.ranks_of(process_set)
    return _objects.broadcast_object(obj, root_rank, name or "broadcast_object", ranks)
