"""Training with Keras that goes on when ranks or servers die, and when new ones come::

    import byteps.keras as bps

    @bps.elastic.run
    def train(state):
        model.fit(
            features, labels, epochs=epochs - state.epoch, callbacks=[
                bps.elastic.UpdateEpochStateCallback(state),
                bps.elastic.CommitStateCallback(state, batches_per_commit=10),
            ],
        )

    train(bps.elastic.KerasState(model, epoch=0))

The names are Horovod's. The job is elastic under ``bpslaunch --elastic redo``. A callback is called
in the order of the list: :class:`CommitStateCallback` is the last, so that it saves what the others
have set.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from byteps import _objects, common, elastic
from byteps.elastic import HorovodInternalError, HostsUpdatedInterrupt, ObjectState, State
from byteps.keras import _exchange, functions
from byteps.keras._which import keras

__all__ = [
    "CommitStateCallback",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "KerasState",
    "ObjectState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]

_Result = TypeVar("_Result")


def run(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """:func:`byteps.elastic.run` for functions that run programs of Keras's back end: what goes
    wrong in one counts as what it is."""

    @functools.wraps(function)
    def typed(*arguments: Any, **options: Any) -> _Result:
        with _exchange.typed_errors():
            return function(*arguments, **options)

    return elastic.run(typed)


class KerasState(ObjectState):
    """The state of a training with Keras: a model, its optimizer, and plain values.

    The model is built. ``optimizer`` is that of the model, if None; ``backend`` is there for
    Horovod's callers. The ``values`` become attributes, which are saved and sent too.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **values: Any
    ) -> None:
        del backend
        send = functools.partial(_objects.broadcast_object, ranks=None)
        super().__init__(send, common.rank, **values)
        self.model = model
        self.optimizer = optimizer or getattr(model, "optimizer", None)
        self._variables = functions.variables_of(model, self.optimizer)
        self.save()

    def save(self) -> None:
        """See :class:`State`."""
        if _exchange.BACKEND == "jax":
            self.model.jax_state_sync()  # During an epoch the variables are with the trainer.
        self._arrays = [_exchange.array_of(variable) for variable in self._variables]
        super().save()

    def restore(self) -> None:
        """See :class:`State`."""
        if _exchange.BACKEND == "jax":
            self.model._jax_state_synced = True  # What the trainer has of the step that failed.
        for variable, saved in zip(self._variables, self._arrays, strict=True):
            variable.assign(saved)
        super().restore()

    def send(self, root_rank: int) -> None:
        """See :class:`State`."""
        # Ranks that were there before have declared names with the root of then.
        functions.broadcast_variables(self._variables, root_rank, f"elastic.{root_rank}.")
        super().send(root_rank)


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Commits the state after each ``batches_per_commit`` batches, and after each epoch."""

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state, self.batches_per_commit = state, batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        """Keras calls it before the first batch: from here on all ranks count alike."""
        del logs
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Keras calls it after each batch."""
        del batch, logs
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.batches_remaining = self.batches_per_commit
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keras calls it after each epoch."""
        del epoch, logs
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps the number of the last batch of an epoch in ``state.batch``: 0 after each epoch."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Keras calls it after each batch."""
        del logs
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keras calls it after each epoch."""
        del epoch, logs
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps in ``state.epoch`` how many epochs are over, in this call of ``fit`` and before."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        """Keras calls it before the first batch."""
        del logs
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keras calls it after each epoch."""
        del logs
        self.state.epoch = self.initial_epoch + epoch + 1
