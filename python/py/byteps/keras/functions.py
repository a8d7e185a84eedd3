"""push_pull and broadcast of the tensors of Keras's back end, and of models."""

from __future__ import annotations

from typing import Any

from byteps._operations import Average, Sum
from byteps.errors import ConfigError
from byteps.keras import _exchange

__all__ = ["allreduce", "broadcast", "broadcast_global_variables", "broadcast_model", "push_pull"]


def push_pull(value: Any, name: str, average: bool = True, process_set: Any = None) -> Any:
    """The average or sum over all ranks, or those of the set, of a tensor, as one of the back
    end."""
    none = _exchange.framework.Compression.none
    tensor = _exchange.tensor_of(value)
    op = Average if average else Sum
    return _exchange.reduced([tensor], [name], none, op, process_set)[0]


#: As Horovod calls it.
allreduce = push_pull


def broadcast(value: Any, root_rank: int, name: str, process_set: Any = None) -> Any:
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
    if not model.built:
        raise ConfigError(
            f"broadcast_model: '{model.name}' is not built, so it has no variables yet: call "
            "model.build(input_shape), or the model with data, on all ranks"
        )
    variables = list(model.variables)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        # A model counts the variables of its optimizer as its own in some releases.
        known = {id(variable) for variable in variables}
        state = _variables_of(optimizer, model.trainable_variables)
        variables += [one for one in state if id(one) not in known]
    names = [f"Parameter.{index}" for index in range(len(variables))]
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
