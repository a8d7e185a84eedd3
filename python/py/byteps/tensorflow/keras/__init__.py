"""Training with Keras as TensorFlow has it (``tf.keras``), which is Keras 3 on TensorFlow.

The same as :mod:`byteps.keras`, under BytePS's other name.
"""

from byteps.errors import ConfigError
from byteps.keras import (
    Average,
    Compression,
    DistributedOptimizer,
    ProcessSet,
    ReduceOp,
    Sum,
    add_process_set,
    allreduce,
    barrier,
    broadcast,
    broadcast_global_variables,
    broadcast_model,
    broadcast_object,
    callbacks,
    cross_rank,
    cross_size,
    get_process_set_ids_and_ranks,
    get_pushpull_speed,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    load_model,
    local_rank,
    local_size,
    push_pull,
    rank,
    remove_process_set,
    resume,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
    suspend,
)
from byteps.keras._exchange import BACKEND

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

if BACKEND != "tensorflow":
    raise ConfigError(
        f"byteps.tensorflow.keras: Keras runs on '{BACKEND}': set KERAS_BACKEND=tensorflow, or "
        "import byteps.keras"
    )
