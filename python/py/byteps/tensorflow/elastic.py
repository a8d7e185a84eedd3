"""Training with TensorFlow that goes on when ranks or servers die, and when new ones come::

    import byteps.tensorflow as bps

    @bps.elastic.run
    def train(state):
        while state.step < 1000:
            step(next(batches))      # with a DistributedGradientTape
            state.step += 1
            if state.step % 10 == 0:
                state.commit()

    train(bps.elastic.TensorFlowState(variables, step=0))

The names are Horovod's. The job is elastic under ``bpslaunch --elastic redo``. The state of a Keras
model is :class:`byteps.keras.elastic.KerasState`, which is ``TensorFlowKerasState`` here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from byteps import common, elastic
from byteps.elastic import HorovodInternalError, HostsUpdatedInterrupt, ObjectState, State
from byteps.errors import ConfigError
from byteps.tensorflow import functions, ops

__all__ = [
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TensorFlowState",
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
    """:func:`run` under Horovod's other name; ``reset`` is not used."""
    del reset
    return run(function)


class TensorFlowState(ObjectState):
    """The state of a training with TensorFlow: variables, and plain values.

    Args:
        variables: Those of a model and of its optimizer; all global ones of a graph, if None.
        session: Of TensorFlow 1, where they are in a graph, which is not finalized yet: the
            default session there, if None.
        values: They become attributes, which are saved and sent too.
    """

    def __init__(
        self, variables: Sequence[Any] | None = None, session: Any = None, **values: Any
    ) -> None:
        super().__init__(functions.broadcast_object, common.rank, **values)
        eager = tf.executing_eagerly()
        self.variables = list(variables or ([] if eager else tf.compat.v1.global_variables()))
        self.session = None if eager else session or tf.compat.v1.get_default_session()
        if not self.variables:
            raise ConfigError(
                "TensorFlowState: no variables were passed, and there is no graph that has some: "
                "pass model.variables + optimizer.variables, once both are built"
            )
        if not eager and self.session is None:
            raise ConfigError("TensorFlowState: variables of a graph need a session: pass session=")
        self._broadcasts: dict[int, Any] = {}
        self.save()

    def save(self) -> None:
        """See :class:`State`."""
        if self.session is None:
            self._arrays = [variable.numpy() for variable in self.variables]
        else:
            self._arrays = self.session.run(self.variables)
        super().save()

    def restore(self) -> None:
        """See :class:`State`."""
        for variable, saved in zip(self.variables, self._arrays, strict=True):
            if self.session is None:
                variable.assign(saved)
            else:
                variable.load(saved, self.session)
        super().restore()

    def send(self, root_rank: int) -> None:
        """See :class:`State`."""
        # Ranks that were there before have declared names with the root of then.
        scope = f"elastic.{root_rank}."
        if self.session is None:
            functions.broadcast_variables(self.variables, root_rank, scope)
        else:
            if root_rank not in self._broadcasts:
                with self.session.graph.as_default():
                    made = functions.broadcast_variables(self.variables, root_rank, scope)
                self._broadcasts[root_rank] = made
            self.session.run(self._broadcasts[root_rank])
        super().send(root_rank)


def __getattr__(name: str) -> Any:
    """Horovod's name of a state that needs Keras, which nothing else here does."""
    if name == "TensorFlowKerasState":
        from byteps.keras.elastic import KerasState

        return KerasState
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
