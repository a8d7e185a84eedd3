"""A strategy of ``tf.distribute`` whose gradients all ranks average::

    from byteps.tensorflow.distribute import MirroredStrategy

    strategy = MirroredStrategy()
    with strategy.scope():
        model = make_model()
        model.compile(tf.keras.optimizers.SGD(0.01), "mse")
    model.fit(images, labels, callbacks=[bps.callbacks.BroadcastGlobalVariablesCallback(0)])

Each rank has a strategy over devices of its own, among which TensorFlow adds up gradients. Between
ranks they are averaged, all of a step together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from byteps import common
from byteps.errors import ConfigError
from byteps.tensorflow.compression import Compression
from byteps.tensorflow.ops import push_pull_group

__all__ = ["CrossDeviceOps", "MirroredStrategy"]


def _first(value: Any) -> Any:
    """What the first device has of what all have alike."""
    return value.values[0] if isinstance(value, tf.distribute.DistributedValues) else value


class CrossDeviceOps(tf.distribute.ReductionToOneDevice):  # type: ignore[misc]
    """Gradients are reduced on one device of the process, and then averaged over the ranks.

    What strategies reduce in batches are gradients. ``strategy.reduce``, metrics and the statistics
    of batch normalization are of this rank alone, as they are without a strategy.

    Args:
        compression: One of :class:`byteps.tensorflow.Compression`.
        process_set: A :class:`~byteps.common.ProcessSet` of the ranks that average among
            themselves. On a rank that is none of them gradients are those of its own devices.
    """

    def __init__(self, compression: Any = Compression.none, process_set: Any = None) -> None:
        super().__init__()
        self._compression, self._process_set = compression, process_set

    def batch_reduce(
        self, reduce_op: Any, value_destination_pairs: Any, options: Any = None
    ) -> list[Any]:
        """TensorFlow calls it with the gradients of a step.

        The reduction among devices is ``reduce_op``, a sum most often, since losses are divided by
        their number before. Between ranks it is an average, whatever it is.
        """
        pairs = list(value_destination_pairs)
        own = list(super().batch_reduce(reduce_op, pairs, options))
        ranks = self._process_set
        if common.size() == 1 or (ranks is not None and not ranks.included()):
            return own
        means = push_pull_group(
            [_first(one) for one in own], compression=self._compression, process_set=ranks
        )
        return [
            self.broadcast(mean, destination)
            for mean, (_, destination) in zip(means, pairs, strict=True)
        ]


class MirroredStrategy(tf.distribute.MirroredStrategy):  # type: ignore[misc]
    """``tf.distribute.MirroredStrategy`` over devices of this process, and over all ranks.

    ``num_replicas_in_sync`` counts the devices of this process. So a loss is divided by the batch
    of this rank, as without a strategy, and a data set that is distributed is this rank's own.

    Args:
        devices: Devices of this process; all GPUs that it sees, or else the CPU, by default. Give
            each process its own GPUs by ``CUDA_VISIBLE_DEVICES``.
        cross_device_ops: A :class:`CrossDeviceOps`, where compression or a process set is wanted.

    Raises:
        ConfigError: ``cross_device_ops`` would not leave the process.
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:
        if cross_device_ops is None:
            cross_device_ops = CrossDeviceOps()
        if not isinstance(cross_device_ops, CrossDeviceOps):
            raise ConfigError(
                f"cross_device_ops={type(cross_device_ops).__name__}: it reduces within a process "
                "alone, so ranks would train apart; leave it out, or pass a "
                "byteps.tensorflow.distribute.CrossDeviceOps"
            )
        super().__init__(devices, cross_device_ops)
