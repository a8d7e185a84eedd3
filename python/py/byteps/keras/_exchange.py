"""Exchanges of tensors of the back end that Keras runs on, by the module of that framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from byteps.errors import ConfigError

BACKEND: str = keras.backend.backend()


def _framework() -> Any:
    """The module of the back end's framework."""
    if BACKEND == "tensorflow":
        import byteps.tensorflow as framework
    elif BACKEND == "jax":
        import byteps.jax as framework  # type: ignore[no-redef]
    elif BACKEND == "torch":
        import byteps.torch as framework  # type: ignore[no-redef]
    else:
        raise ConfigError(
            f"byteps.keras: Keras runs on '{BACKEND}', which does not train; set KERAS_BACKEND to "
            "tensorflow, jax or torch"
        )
    return framework


if int(keras.__version__.split(".")[0]) < 3:
    raise ConfigError(
        f"byteps.keras needs Keras 3, and this is {keras.__version__}: install a later one"
    )
framework = _framework()


def reduced(
    tensors: Sequence[Any], names: Sequence[str], compression: Any, op: Any, process_set: Any = None
) -> list[Any]:
    """These tensors reduced over all ranks, all under way together."""
    if BACKEND == "tensorflow":
        results = framework.push_pull_group(
            tensors, names, None, compression, op, process_set=process_set
        )
    elif BACKEND == "torch":
        results = framework.push_pull_group(
            tensors, name=list(names), compression=compression, op=op, process_set=process_set
        )
    else:
        if process_set is not None:
            raise ConfigError("process_set: byteps.jax exchanges among all ranks; leave it out")
        named = dict(zip(names, tensors, strict=True))
        found = framework.push_pull(named, name="keras", compression=compression, op=op)
        results = [found[name] for name in names]
    return list(results)


def broadcast(values: Sequence[Any], root_rank: int, names: Sequence[str]) -> list[Any]:
    """The tensors of ``root_rank`` in place of these."""
    if BACKEND == "tensorflow":
        results = framework.broadcast_group(values, root_rank, names)
    elif BACKEND == "torch":
        results = [value.detach().clone() for value in values]
        framework.broadcast_parameters(list(zip(names, results, strict=True)), root_rank)
    else:
        found = framework.broadcast(dict(zip(names, values, strict=True)), root_rank, "keras")
        results = [found[name] for name in names]
    return list(results)
