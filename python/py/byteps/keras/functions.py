"""push_pull and broadcast of the tensors of Keras's back end, and of models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from byteps import _process_sets, common
from byteps._operations import Average, ReduceOp, Sum
from byteps.errors import ConfigError, TensorError
from byteps.keras import _exchange

__all__ = [
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_model",
    "join",
    "push_pull",
    "reducescatter",
]


def push_pull(
    value: Any,
    name: str | None = None,
    average: bool = True,
    process_set: Any = None,
    backup_workers: int | None = 0,
) -> Any:
    """The average or sum over all ranks, or those of the set, of a tensor, as one of the back end.

    Without a ``name``, what the framework's own push_pull says of names holds. ``backup_workers``
    is for how many of the slowest ranks the result does not wait (docs/stragglers.md), of a tensor
    with a name; as ``BPS_BACKUP_WORKERS`` says where it is None.
    """
    none = _exchange.framework.Compression.none
    sent, op = [_exchange.tensor_of(value)], Average if average else Sum
    return _exchange.reduced(sent, [name], none, op, process_set, backup_workers)[0]


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool = True,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: Any = None,
    process_set: Any = None,
) -> Any:
    """:func:`push_pull` as Horovod calls it: multiplied by one factor before, by one after it."""
    tensor = _exchange.tensor_of(value)
    if prescale_factor != 1.0:
        tensor = tensor * prescale_factor
    if compression is None:
        compression = _exchange.framework.Compression.none
    op = (Average if average else Sum) if op is None else op
    (result,) = _exchange.reduced([tensor], [name], compression, op, process_set)
    return result if postscale_factor == 1.0 else result * postscale_factor


def allgather(value: Any, name: str | None = None, process_set: Any = None) -> Any:
    """The tensors of all ranks, one behind the other along dimension 0, as one of the back end."""
    tensor = _exchange.tensor_of(value)
    return _exchange.framework.allgather(tensor, name=name, process_set=process_set)


def reducescatter(
    value: Any, name: str | None = None, op: ReduceOp = Average, process_set: Any = None
) -> Any:
    """This rank's rows, along dimension 0, of the tensors of all ranks reduced by ``op``, as one of
    the back end. Rows are dealt out evenly; the first ranks have one more where need be."""
    tensor = _exchange.tensor_of(value)
    whole = allreduce(tensor, name, op=op, process_set=process_set)
    if len(whole.shape) == 0:
        raise TensorError("reducescatter of a number: a tensor of one dimension at least is wanted")
    members = _process_sets.members(_process_sets.ranks_of(process_set))
    place = members.index(common.rank())
    least, more = divmod(int(whole.shape[0]), len(members))
    begin = least * place + min(more, place)
    return whole[begin : begin + least + (place < more)]


def join() -> int:
    """Waits until all ranks have called it, as :func:`byteps.torch.join` does; until then, this
    rank changes no result of the others. Returns the rank that called it last."""
    return int(_exchange.framework.join())


def broadcast(value: Any, root_rank: int, name: str | None = None, process_set: Any = None) -> Any:
    """The tensor of ``root_rank``, as one of the back end."""
    tensor = _exchange.tensor_of(value)
    return _exchange.broadcast([tensor], root_rank, [name], process_set)[0]


def broadcast_global_variables(root_rank: int) -> None:
    """Raises: Keras knows no global variables."""
    raise ConfigError(
        f"broadcast_global_variables({root_rank}): Keras has no global variables; pass "
        "BroadcastGlobalVariablesCallback to fit, or call broadcast_model(model, root_rank)"
    )


def broadcast_model(model: Any, root_rank: int, process_set: Any = None) -> None:
    """Overwrites the variables of a model, and of its optimizer if it has one, with those of
    ``root_rank``. The model is built."""
    variables = variables_of(model, getattr(model, "optimizer", None))
    broadcast_variables(variables, root_rank, "Parameter.", process_set)


def variables_of(model: Any, optimizer: Any) -> list[Any]:
    """All variables of a model, which is built, and of an optimizer of it, if there is one."""
    if not model.built:
        raise ConfigError(
            f"the model '{model.name}' is not built, so it has no variables yet: call "
            "model.build(input_shape), or the model with data, on all ranks"
        )
    variables = list(model.variables)
    if optimizer is not None:
        # A model counts the variables of its optimizer as its own in some releases.
        known = {id(variable) for variable in variables}
        state = _variables_of(optimizer, model.trainable_variables)
        variables += [one for one in state if id(one) not in known]
    return variables


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, prefix: str, process_set: Any = None
) -> None:
    """Overwrites variables, which the ranks have in the same order, with those of ``root_rank``."""
    names = [f"{prefix}{index}" for index in range(len(variables))]
    values = [_exchange.value_of(variable) for variable in variables]
    sent = _exchange.broadcast(values, root_rank, names, process_set)
    for variable, value in zip(variables, sent, strict=True):
        variable.assign(value)


def _variables_of(optimizer: Any, trainable: Any) -> Any:
    """What the optimizer keeps for these variables, made now if it was not yet."""
    if hasattr(optimizer, "_create_all_weights"):  # One of Keras 2's older ones.
        optimizer._create_all_weights(trainable)
        return optimizer.variables()
    # Of Keras 2 no optimizer says whether it is built, and all may be built again.
    if not getattr(optimizer, "built", False):
        optimizer.build(trainable)
    return optimizer.variables
