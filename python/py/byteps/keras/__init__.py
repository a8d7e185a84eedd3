"""Training with Keras 3 on TensorFlow, JAX or torch, or with Keras 2 of TensorFlow 2.15::

import byteps.keras as bps

bps.init()
model.compile(bps.DistributedOptimizer(keras.optimizers.Adam(1e-3)), "mse")
model.fit(data, callbacks=[bps.callbacks.BroadcastGlobalVariablesCallback(0)])
"""

from typing import Any

from byteps import _objects
from byteps._kept import compression_state_dict, load_compression_state_dict
from byteps._operations import Adasum, Average, ReduceOp, Sum
from byteps.common import (
    ProcessSet,
    add_process_set,
    barrier,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    get_process_set_ids_and_ranks,
    get_pushpull_speed,
    global_process_set,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    is_initialized,
    live_ranks,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    resume,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
    suspend,
)
from byteps.keras import callbacks, elastic
from byteps.keras._exchange import framework, typed_errors
from byteps.keras.functions import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_model,
    join,
    push_pull,
    reducescatter,
)
from byteps.keras.optimizer import (
    Compression,
    DistributedOptimizer,
    PartialDistributedOptimizer,
    load_model,
)
from byteps.keras.sync_batch_norm import SyncBatchNormalization

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "ReduceOp",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_model",
    "broadcast_object",
    "callbacks",
    "ccl_built",
    "compression_state_dict",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "get_process_set_ids_and_ranks",
    "get_pushpull_speed",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "live_ranks",
    "load_compression_state_dict",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "push_pull",
    "rank",
    "reducescatter",
    "remove_process_set",
    "resume",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "suspend",
    "typed_errors",
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
