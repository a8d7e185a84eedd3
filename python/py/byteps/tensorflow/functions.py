"""What gives all ranks the same start: variables and objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from byteps import _joining, _objects, _process_sets
from byteps.errors import ConfigError
from byteps.tensorflow import ops

__all__ = [
    "BroadcastGlobalVariablesHook",
    "allgather_object",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "join",
]


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, scope: str = "", process_set: Any = None
) -> Any:
    """Overwrites variables with those of ``root_rank``, all at once.

    The ranks pass variables of the same types and shapes in the same order: those of a model, of an
    optimizer, or both. In a graph it returns the operation that does so, else None.
    """
    variables = list(variables)
    names = [f"{scope}Parameter.{index}" for index in range(len(variables))]
    values = ops.broadcast_group(variables, root_rank, names, process_set)
    assigned = [variable.assign(value) for variable, value in zip(variables, values, strict=True)]
    return None if tf.executing_eagerly() else tf.group(*assigned)


def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: Any = None
) -> list[Any]:
    """:func:`broadcast_variables` as Horovod calls it: returns the variables, or in a graph their
    values once they are overwritten. ``name`` is what their names begin with."""
    variables = list(variables)
    names = [f"{name or 'broadcast_'}.{index}" for index in range(len(variables))]
    values = ops.broadcast_group(variables, root_rank, names, process_set)
    assigned = [variable.assign(value) for variable, value in zip(variables, values, strict=True)]
    return variables if tf.executing_eagerly() else assigned


def broadcast_global_variables(root_rank: int, process_set: Any = None) -> Any:
    """The operation that overwrites all global variables of a graph with those of ``root_rank``.

    Outside of graphs there are no global variables: a :class:`ConfigError`.
    """
    if tf.executing_eagerly():
        raise ConfigError(
            "broadcast_global_variables: there are no global variables with eager execution; call "
            "broadcast_variables(model.variables + optimizer.variables, root_rank)"
        )
    variables = tf.compat.v1.global_variables()
    return broadcast_variables(variables, root_rank, process_set=process_set)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Lets a session (``tf.compat.v1.train.MonitoredTrainingSession``) begin with the variables of
    ``root_rank``, whether they are new there or from a checkpoint: all ranks, or those of
    ``process_set``, which alone use it. ``device`` is not used."""

    def __init__(self, root_rank: int, device: str = "", process_set: Any = None) -> None:
        super().__init__()
        del device
        self.root_rank, self._process_set = root_rank, process_set
        self._broadcast: Any = None

    def begin(self) -> None:
        """Adds the operation to the graph."""
        graph = tf.compat.v1.get_default_graph()
        if self._broadcast is None or self._broadcast.graph != graph:
            self._broadcast = broadcast_global_variables(self.root_rank, self._process_set)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Runs it."""
        del coord
        session.run(self._broadcast)


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: Any = None
) -> Any:
    """The object of ``root_rank``, as :func:`byteps.torch.broadcast_object` documents it."""
    ranks = _process_sets.ranks_of(process_set)
    return _objects.broadcast_object(obj, root_rank, name or "broadcast_object", ranks)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: Any = None
) -> Callable[[Any], Any]:
    """:func:`broadcast_object` as a function of the object alone. ``session`` is not used: objects
    pass no graph."""
    del session
    return lambda obj: broadcast_object(obj, root_rank, name, process_set)


def allgather_object(obj: Any, name: str | None = None, process_set: Any = None) -> list[Any]:
    """The objects of all ranks, by rank; pickled as by :func:`broadcast_object`."""
    name = name or "allgather_object"
    return [
        broadcast_object(obj, rank, f"{name}.{rank}", process_set)
        for rank in _process_sets.members(_process_sets.ranks_of(process_set))
    ]


def join() -> int:
    """Waits until all ranks have called it, as :func:`byteps.torch.join` does; until then, this
    rank changes no result of the others. Returns the rank that called it last.

    To be called outside of programs, by a rank that has no more data. An allgather gets no rows
    from it, nor does an alltoall. A broadcast from it, and an allgather in a program that XLA
    compiles, are a :class:`byteps.errors.UsageError` on the ranks that call them.
    """
    return _joining.join()
