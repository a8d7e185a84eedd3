"""Callbacks for ``model.fit``: a common start, metrics of all ranks, learning rates."""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any

from byteps import _process_sets, _registry, common
from byteps.errors import ConfigError
from byteps.keras import functions
from byteps.keras._which import keras

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Lets all ranks begin with the model and the optimizer of ``root_rank``.

    Before the first batch where the model is built by then, else after it. With a ``process_set``
    its ranks do, which alone use the callback. ``device`` is not used.
    """

    def __init__(self, root_rank: int, device: str = "", process_set: Any = None) -> None:
        super().__init__()
        del device
        self.root_rank, self._process_set = root_rank, process_set
        self.broadcast_done = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Keras calls it before the first batch."""
        del logs
        if self.model.built:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Keras calls it after each batch."""
        del batch, logs
        self._broadcast()

    def _broadcast(self) -> None:
        if not self.broadcast_done:
            functions.broadcast_model(self.model, self.root_rank, self._process_set)
            self.broadcast_done = True


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Averages the metrics of an epoch over all ranks, or those of ``process_set``.

    It stands before the callbacks that read them (``ReduceLROnPlateau``, ``ModelCheckpoint``): they
    are called in the order of the list. ``device`` is not used.
    """

    def __init__(self, device: str = "", process_set: Any = None) -> None:
        super().__init__()
        del device
        self._process_set = process_set

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Keras calls it after each epoch, with the metrics, which are replaced."""
        del epoch
        if not logs:
            return
        names = sorted(logs)
        values = array.array("d", [float(logs[name]) for name in names])
        address = values.buffer_info()[0]
        ranks = _process_sets.ranks_of(self._process_set)
        tensor = _registry.Tensor("keras.metrics", "f64", (len(names),), "average", ranks=ranks)
        send = _registry.Send(tensor, address, address)
        averages = _registry.synchronize(_registry.start([send], values, list))
        logs.update(zip(names, averages, strict=True))


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate to ``initial_lr * multiplier(epoch)`` between two epochs.

    Args:
        multiplier: A number, or a function of the epoch.
        start_epoch: From which epoch on it applies.
        end_epoch: Up to which, without it; None for all.
        staircase: Whether the rate changes at the start of an epoch, or with each batch: then the
            function gets a fraction of epochs.
        momentum_correction: Whether momentum is multiplied by the new rate over the old one for
            the batch in which the rate changes (Goyal et al., "Accurate, Large Minibatch SGD",
            2017). Compiled steps hold it as a constant, so it has an effect with
            ``model.compile(run_eagerly=True)`` alone.
        steps_per_epoch: The batches of an epoch, where Keras does not know them and ``staircase``
            is False.
        initial_lr: The rate; that of the optimizer when training begins, if None.
    """

    def __init__(
        self,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        initial_lr: float | None = None,
    ) -> None:
        super().__init__()
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.staircase, self.momentum_correction = staircase, momentum_correction
        self.steps_per_epoch, self.initial_lr = steps_per_epoch, initial_lr
        self.current_epoch = 0
        self._momentum: float | None = None
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            # A number that does not depend on the epoch, so there is nothing between two of them.
            constant = float(multiplier)
            self.staircase, self.multiplier = True, lambda epoch: constant

    def on_train_begin(self, logs: Any = None) -> None:
        """Keras calls it before the first batch."""
        del logs
        if self.initial_lr is None:
            self.initial_lr = float(self.model.optimizer.learning_rate)
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise ConfigError(
                    f"{type(self).__name__}: Keras does not know how many batches an epoch has: "
                    "pass steps_per_epoch"
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Keras calls it before each epoch."""
        del logs
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Keras calls it before each batch."""
        del logs
        ends = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        if self.current_epoch < self.start_epoch or ends:
            return
        if not self.staircase:
            self._adjust(self.current_epoch + batch / (self.steps_per_epoch or 1))
        elif batch == 0:
            self._adjust(self.current_epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Keras calls it after each batch."""
        del batch, logs
        if self._momentum is not None:
            self.model.optimizer.momentum = self._momentum
            self._momentum = None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Keras calls it after each epoch."""
        del epoch
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        before = float(optimizer.learning_rate)
        after = float(self.initial_lr or 0.0) * self.multiplier(epoch)
        optimizer.learning_rate = after
        momentum = getattr(optimizer, "momentum", None)
        if self.momentum_correction and isinstance(momentum, float) and before > 0:
            self._momentum = momentum
            optimizer.momentum = momentum * after / before


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate over some epochs, from that of one rank to ``initial_lr``.

    ``initial_lr`` is the rate for all ranks together, as a rule ``size()`` times that of one; it
    begins with ``initial_lr / size()`` (Goyal et al., "Accurate, Large Minibatch SGD", 2017).

    Args:
        warmup_epochs: How many epochs it takes.
        momentum_correction, steps_per_epoch, initial_lr: As of
            :class:`LearningRateScheduleCallback`.
        verbose: Whether rank 0 prints a line at the end.
    """

    def __init__(
        self,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
        initial_lr: float | None = None,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # The last batch of an epoch is at its round number.
            reached = epoch + 1.0 / (self.steps_per_epoch or 1)
            size = common.size()
            return 1.0 / size * (reached * (size - 1) / warmup_epochs + 1)

        super().__init__(
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
            initial_lr=initial_lr,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Keras calls it after each epoch."""
        super().on_epoch_end(epoch, logs)
        if self.verbose and self.end_epoch == epoch + 1 and common.rank() == 0:
            rate = float(self.model.optimizer.learning_rate)
            print(f"epoch {epoch + 1}: the learning rate has reached {rate:g}")
