"""Training with JAX that goes on when ranks or servers die, and when new ones come::

    import byteps.jax as bps

    @bps.elastic.run
    def train(state):
        while state.step < 1000:
            state.params, state.opt_state = step(state.params, state.opt_state, next(batches))
            state.step += 1
            if state.step % 10 == 0:
                state.commit()

    train(bps.elastic.JaxState(params=params, opt_state=opt_state, step=0))

The job is elastic under ``bpslaunch --elastic redo``. Programs stay compiled: what they exchange by
name belongs to the ranks of the epoch in which they run. Those that gather hold the number of ranks
for which they were traced, and those of a process set its ranks.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from byteps import common, elastic
from byteps.elastic import HorovodInternalError, HostsUpdatedInterrupt, ObjectState, State
from byteps.errors import ConfigError
from byteps.jax import functions, ops

__all__ = [
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "JaxState",
    "ObjectState",
    "State",
    "run",
    "run_fn",
]

_Result = TypeVar("_Result")


def run(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """:func:`byteps.elastic.run` for functions that run programs: what goes wrong in one counts as
    what it is."""

    @functools.wraps(function)
    def typed(*arguments: Any, **options: Any) -> _Result:
        with ops.typed_errors():
            return function(*arguments, **options)

    return elastic.run(typed)


def run_fn(function: Callable[..., _Result], reset: Any = None) -> Callable[..., _Result]:
    """:func:`run` under the name that other frameworks' modules have; ``reset`` is not used."""
    del reset
    return run(function)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array)


def _copy(leaf: Any) -> Any:
    # A program to which an array is donated deletes it, so a second reference would not do.
    return jnp.copy(leaf) if _is_array(leaf) else copy.deepcopy(leaf)


class JaxState(ObjectState):
    """The state of a training with JAX: ``JaxState(params=params, opt_state=opt_state, step=0)``.

    Args:
        values: Trees of arrays, and plain values. They become attributes, to which the training
            assigns what its steps return. Their structure is the same on all ranks, and so are the
            shapes and types of the arrays.

    A commit keeps a copy of each array, of which there is one, where the array is: in the memory of
    the GPU, or of the host.

    Raises:
        ConfigError: no value has an array in it.
    """

    def __init__(self, **values: Any) -> None:
        super().__init__(functions.broadcast_object, common.rank, **values)
        if not any(map(_is_array, jax.tree_util.tree_leaves(values))):
            raise ConfigError(
                "JaxState: no array was passed: pass the trees of the training by name, such as "
                "params=params; ObjectState is for plain values alone"
            )
        self.save()

    def save(self) -> None:
        """See :class:`State`. An attribute that was not given at first is not saved."""
        values = {name: getattr(self, name) for name in self._saved}
        self._saved = jax.tree_util.tree_map(_copy, values)

    def restore(self) -> None:
        """See :class:`State`."""
        vars(self).update(jax.tree_util.tree_map(_copy, self._saved))

    def send(self, root_rank: int) -> None:
        """See :class:`State`."""
        values = {name: getattr(self, name) for name in self._saved}
        leaves, structure = jax.tree_util.tree_flatten(values)
        # Ranks that were there before have declared names with the root of then.
        scope = f"elastic.{root_rank}."
        arrays = {str(at): leaf for at, leaf in enumerate(leaves) if _is_array(leaf)}
        others = [None if _is_array(leaf) else leaf for leaf in leaves]
        others = functions.broadcast_object(others, root_rank, f"{scope}others")
        arrays = functions.broadcast_parameters(arrays, root_rank, scope)
        leaves = [arrays.get(str(at), other) for at, other in enumerate(others)]
        vars(self).update(jax.tree_util.tree_unflatten(structure, leaves))
