"""What gives all ranks the same start: parameters, optimizer state, objects."""

from __future__ import annotations

from typing import Any, TypeVar

from byteps import _joining, _objects, _process_sets
from byteps.jax import ops

__all__ = ["allgather_object", "broadcast_object", "broadcast_parameters", "join"]

Tree = TypeVar("Tree")


def broadcast_parameters(
    tree: Tree, root_rank: int = 0, prefix: str = "Parameter.", process_set: Any = None
) -> Tree:
    """The arrays of ``root_rank``, all at once, as a tree of the same shape.

    ``tree`` may hold whatever a training state is made of: parameters, an optimizer's state,
    counters, random keys. Arrays do not change in JAX, so the result is what to go on with::

        state = bps.broadcast_parameters(state, root_rank=0)

    With a ``process_set`` it is for the ranks of that :class:`~byteps.jax.ProcessSet`, as below.
    """
    return ops.broadcast(tree, root_rank, prefix, process_set)


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: Any = None
) -> Any:
    """The object of ``root_rank``; what the other ranks pass is not looked at.

    It is pickled on the root and unpickled on the others, so its sender is trusted as far as
    running code: a rank of the same job, which proved the job's key if one is set. With a key the
    bytes are authenticated: altered ones are a :class:`~byteps.errors.CorruptionError`. An object
    that cannot be pickled is a :class:`~byteps.errors.TensorError` on every rank.
    """
    ranks = _process_sets.ranks_of(process_set)
    return _objects.broadcast_object(obj, root_rank, name or "broadcast_object", ranks)


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

    To be called outside of programs, by a rank that has no more data, for arrays in host memory. A
    broadcast from it, and an allgather in a program, are a :class:`byteps.errors.UsageError` on the
    ranks that call them.
    """
    return _joining.join()
