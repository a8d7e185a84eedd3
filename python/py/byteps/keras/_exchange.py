"""Exchanges of tensors of the back end that Keras runs on, by the module of that framework."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from byteps import _process_sets
from byteps.errors import ConfigError
from byteps.keras._which import IS_KERAS_2 as IS_KERAS_2
from byteps.keras._which import keras

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


framework = _framework()


def tensor_of(value: Any) -> Any:
    """A tensor of the back end."""
    if IS_KERAS_2:
        import tensorflow as tf

        return tf.convert_to_tensor(value)
    return keras.ops.convert_to_tensor(value)


def value_of(variable: Any) -> Any:
    """The tensor that a variable holds."""
    return variable.value() if IS_KERAS_2 else variable.value


def array_of(variable: Any) -> Any:
    """A copy of what a variable holds, as an array of NumPy."""
    if IS_KERAS_2:
        return variable.numpy()
    # Of a tensor of torch it is no copy.
    return keras.ops.convert_to_numpy(variable.value).copy()


def typed_errors() -> contextlib.AbstractContextManager[None]:
    """Raises what went wrong in a program of the back end as the class of :mod:`byteps.errors` that
    it is."""
    if BACKEND == "torch":
        return contextlib.nullcontext()  # It has no programs that lose it.
    context: contextlib.AbstractContextManager[None] = framework.typed_errors()
    return context


def reduced(
    tensors: Sequence[Any],
    names: Sequence[str | None],
    compression: Any,
    op: Any,
    process_set: Any = None,
    backup_workers: int | None = 0,
) -> list[Any]:
    """These tensors reduced over all ranks, all under way together."""
    how: dict[str, Any] = {
        "compression": compression,
        "op": op,
        "process_set": process_set,
        "backup_workers": backup_workers,
    }
    if BACKEND == "tensorflow":
        results = framework.push_pull_group(tensors, names, **how)
    elif BACKEND == "torch":
        results = framework.push_pull_group(tensors, name=list(names), **how)
    elif None in names:
        results = framework.push_pull(list(tensors), **how)
    else:
        named = dict(zip(names, tensors, strict=True))
        found = framework.push_pull(named, name="keras", **how)
        results = [found[name] for name in names]
    return list(results)


def reduced_gradients(
    gradients: Sequence[Any],
    names: Sequence[str],
    compression: Any,
    op: Any,
    process_set: Any,
    sparse_as_dense: bool,
    predivide_factor: float,
    backup_workers: int | None,
) -> list[Any]:
    """These gradients reduced over all ranks; None where there is none. On a rank that is not in
    the process set they stay as they are."""
    if BACKEND == "tensorflow":
        from byteps.tensorflow import optimizer

        how = optimizer.How(
            *(compression, op, process_set, sparse_as_dense, predivide_factor),
            backup_workers=backup_workers,
        )
        return optimizer.reduced(gradients, names, how)
    results = list(gradients)
    members = _process_sets.added(process_set)
    there = [index for index, one in enumerate(results) if one is not None]
    if not there or (members is not None and not members.included()):
        return results
    sent = [results[index] for index in there]
    if predivide_factor != 1.0:
        sent = [one / predivide_factor for one in sent]
    named = [names[index] for index in there]
    means = reduced(sent, named, compression, op, members, backup_workers)
    for index, mean in zip(there, means, strict=True):
        results[index] = mean * predivide_factor if predivide_factor != 1.0 else mean
    return results


def scaled(gradient: Any, factor: float) -> Any:
    """A gradient, if it is one, times a factor."""
    if gradient is None or factor == 1:
        return gradient
    if BACKEND == "tensorflow":
        from byteps.tensorflow import ops

        return ops.scaled(gradient, factor)
    return gradient * factor


def where_due(
    optimizer: Any, gradients: list[Any], exchanged: Callable[[], list[Any]]
) -> list[Any]:
    """The exchanged sums where an optimizer of Keras 3 is about to apply them. On JAX it does so in
    each step, and drops what comes of it in others than the last."""
    if BACKEND != "jax":
        return exchanged()
    steps = optimizer.gradient_accumulation_steps
    is_last = (optimizer._iterations + 1) % steps == 0
    results: list[Any] = keras.ops.cond(is_last, exchanged, lambda: gradients)
    return results


def broadcast(
    values: Sequence[Any], root_rank: int, names: Sequence[str | None], process_set: Any = None
) -> list[Any]:
    """The tensors of ``root_rank`` in place of these."""
    if BACKEND == "tensorflow":
        results = framework.broadcast_group(values, root_rank, names, process_set)
    elif None in names:
        results = [framework.broadcast(value, root_rank, None, process_set) for value in values]
    elif BACKEND == "torch":
        results = [value.detach().clone() for value in values]
        pairs = list(zip(names, results, strict=True))
        framework.broadcast_parameters(pairs, root_rank, process_set=process_set)
    else:
        named = dict(zip(names, values, strict=True))
        found = framework.broadcast(named, root_rank, "keras", process_set)
        results = [found[name] for name in names]
    return list(results)
