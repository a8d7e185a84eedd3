"""Training with TensorFlow::

    import byteps.tensorflow as bps

    bps.init()
    tape = bps.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))

``push_pull`` and all that is built on it work inside ``tf.function`` and outside, and in graphs of
TensorFlow 1, on CPUs. For Keras there is :mod:`byteps.tensorflow.keras`.
"""

from typing import Any

from byteps._kept import compression_state_dict, load_compression_state_dict
from byteps._operations import Adasum, Average, Max, Min, Product, ReduceOp, Sum
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
    init,
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
from byteps.tensorflow import elastic
from byteps.tensorflow.compression import Codec, Compression, Compressor
from byteps.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
    join,
)
from byteps.tensorflow.gather import (
    allgather,
    alltoall,
    grouped_allgather,
    grouped_reducescatter,
    reducescatter,
)
from byteps.tensorflow.ops import (
    allreduce,
    broadcast,
    broadcast_group,
    grouped_allreduce,
    push_pull,
    push_pull_group,
    typed_errors,
)
from byteps.tensorflow.optimizer import (
    DistributedGradientTape,
    DistributedOptimizer,
    PartialDistributedGradientTape,
)
from byteps.tensorflow.places import (
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from byteps.tensorflow.sparse import sparse_push_pull, sparse_push_pull_group

__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Codec",
    "Compression",
    "Compressor",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_group",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
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
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "live_ranks",
    "load_compression_state_dict",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "push_pull",
    "push_pull_group",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "resume",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "sparse_push_pull",
    "sparse_push_pull_group",
    "start_timeline",
    "stop_timeline",
    "suspend",
    "typed_errors",
]


def __getattr__(name: str) -> Any:
    """The layer that needs Keras, which nothing else here does."""
    if name == "SyncBatchNormalization":
        from byteps.keras import SyncBatchNormalization

        return SyncBatchNormalization
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
