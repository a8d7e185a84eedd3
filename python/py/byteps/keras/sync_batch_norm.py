"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

from typing import Any

from byteps import _process_sets, _registry, common
from byteps._operations import Sum
from byteps.keras import _exchange
from byteps.keras._which import keras

__all__ = ["SyncBatchNormalization"]


@keras.saving.register_keras_serializable("byteps")
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """``keras.layers.BatchNormalization`` with the mean and the variance of all ranks' batches.

    The arguments are those of that layer. Every rank has samples and calls the layer equally often
    in training; batches may differ in size. Each call waits for two sums of one number for each
    channel, and the backward pass for two more. Without training, and on one rank, it is the plain
    layer.

    Args:
        process_set: A :class:`~byteps.common.ProcessSet` of the ranks that share their statistics.
            It is not saved with the model.
    """

    def __init__(self, *arguments: Any, process_set: Any = None, **options: Any) -> None:
        if _exchange.IS_KERAS_2:
            options = {"fused": False} | options  # The fused kernel has moments of its own.
        super().__init__(*arguments, **options)
        self._process_set = process_set
        self._names = f"SyncBatchNormalization.{_registry.count_up('SyncBatchNormalization')}"

    def _moments(self, inputs: Any, *arguments: Any, **options: Any) -> tuple[Any, Any]:
        """What the layer calls for mean and variance: of the whole batch, not of this rank's."""
        mean, variance = super()._moments(inputs, *arguments, **options)
        members = _process_sets.added(self._process_set)
        alone = common.size() == 1 if members is None else not members.included()
        if alone:
            return mean, variance
        # In two steps: a difference of squares would lose the digits of a small variance.
        count = self._samples(inputs, mean, arguments, options)
        counts, means = self._summed({"count": count, "mean": mean * count}, members)
        means = means / counts
        # The variances of the ranks are around means of their own.
        own = (variance + (mean - means) ** 2) * count
        (squares,) = self._summed({"variance": own}, members)
        return means, squares / counts

    def _summed(self, tensors: dict[str, Any], members: Any) -> list[Any]:
        none = _exchange.framework.Compression.none
        names = [f"{self._names}.{name}" for name in tensors]
        return _exchange.reduced(list(tensors.values()), names, none, Sum, members)

    def _samples(self, inputs: Any, mean: Any, arguments: Any, options: Any) -> Any:
        """How many numbers of a channel there are, as a tensor of the type of the mean."""
        if _exchange.IS_KERAS_2:
            import tensorflow as tf

            return tf.cast(tf.size(inputs), mean.dtype) / tf.cast(tf.size(mean), mean.dtype)
        mask = options.get("mask", arguments[0] if arguments else None)
        shape = keras.ops.shape(inputs)
        count = keras.ops.ones((), mean.dtype)
        for axis in self._reduction_axes:
            if mask is None or axis >= len(mask.shape):
                count = count * keras.ops.cast(shape[axis], mean.dtype)
        return count if mask is None else count * keras.ops.sum(keras.ops.cast(mask, mean.dtype))
