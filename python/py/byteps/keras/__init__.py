"""Training with Keras 3 on TensorFlow, JAX or torch, or with Keras 2 of TensorFlow 2.15::

import byteps.keras as bps

bps.init()
model.compile(bps.DistributedOptimizer(keras.optimizers.Adam(1e-3)), "mse")
model.fit(data, callbacks=[bps.callbacks.BroadcastGlobalVariablesCallback(0)])
"""

from typing import Any

from byteps import _objects
from byteps._operations import Average, ReduceOp, Sum
from byteps.common import (
    ProcessSet,
    add_process_set,
    barrier,
    cross_rank,
    cross_size,
    get_process_set_ids_and_ranks,
    get_pushpull_speed,
    global_process_set,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    resume,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
    suspend,
)
from byteps.keras import callbacks
from byteps.keras._exchange import framework
from byteps.keras.functions import (
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_model,
    push_pull,
)
from byteps.keras.optimizer import Compression, DistributedOptimizer, load_model

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "ProcessSet",
    "ReduceOp",
    "Sum",
    "add_process_set",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_model",
    "broadcast_object",
    "callbacks",
    "cross_rank",
    "cross_size",
    "get_process_set_ids_and_ranks",
    "get_pushpull_speed",
    "global_process_set",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "push_pull",
    "rank",
    "remove_process_set",
    "resume",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "suspend",
]


def init(lazy: Any = True) -> None:
    """Starts the engine of this process and returns when all nodes of the job are there.

    See ``init`` of the module of the back end: :mod:`byteps.tensorflow`, :mod:`byteps.jax` or
    :mod:`byteps.torch`. To be called before Keras computes anything.
    """
    framework.init(lazy)


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None) -> Any:
    """The object of ``root_rank``, as :func:`byteps.torch.broadcast_object` documents it."""
    return _objects.broadcast_object(obj, root_rank, name or "broadcast_object", None)
