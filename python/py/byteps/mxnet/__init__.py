"""Training with MXNet, on CPUs::

    import byteps.mxnet as bps

    bps.init()
    trainer = bps.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.05})

Exchanges are operations of MXNet's engine: they return at once, and what uses an array comes behind
its exchange.
"""

from typing import Any

from byteps import _joining, _kept, _mxnet_role, common
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
    rocm_built,
    size,
    start_timeline,
    stop_timeline,
)
from byteps.mxnet import _engine, elastic
from byteps.mxnet.compression import Compression
from byteps.mxnet.gather import (
    allgather,
    allgather_object,
    alltoall,
    broadcast_object,
    grouped_allgather,
    grouped_reducescatter,
    reducescatter,
)
from byteps.mxnet.kvstore import BytePS, Dist_BytePS
from byteps.mxnet.ops import (
    broadcast_parameters,
    byteps_declare_tensor,
    byteps_push_pull,
    declare,
    push_pull,
)
from byteps.mxnet.optimizer import DistributedOptimizer, DistributedTrainer
from byteps.mxnet.reductions import (
    allreduce,
    allreduce_,
    broadcast,
    broadcast_,
    grouped_allreduce,
    grouped_allreduce_,
)

# It has run by now where this process is not a worker: before MXNet is imported.
del _mxnet_role

__all__ = [
    "Adasum",
    "Average",
    "BytePS",
    "Compression",
    "Dist_BytePS",
    "DistributedOptimizer",
    "DistributedTrainer",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_parameters",
    "byteps_declare_tensor",
    "byteps_push_pull",
    "ccl_built",
    "compression_state_dict",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "declare",
    "elastic",
    "get_process_set_ids_and_ranks",
    "get_pushpull_speed",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "live_ranks",
    "load_compression_state_dict",
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
]

_kept.drains.update(mxnet=_engine.drain)


def init(lazy: Any = True, comm: Any = None, process_sets: Any = None) -> None:
    """Starts the engine of this process and returns when all nodes of the job are there.

    See :func:`byteps.common.init`.
    """
    _engine.load()
    common.init(lazy, comm, process_sets)


def shutdown() -> None:
    """Ends the engine of this process, behind all exchanges that have been called.

    An exchange that fails then has its error where its array is waited for.
    """
    _engine.drain()
    common.shutdown()


def join() -> int:
    """Waits until all ranks have called it, as :func:`byteps.torch.join` does; until then, this
    rank changes no result of the others. Returns the rank that called it last.

    It comes behind all exchanges that have been called.
    """
    _engine.drain()
    return _joining.join()


def suspend() -> None:
    """Leaves the job for a while, behind all exchanges that have been called.

    See :func:`byteps.common.suspend`.
    """
    _engine.drain()
    common.suspend()


def resume(num_workers: int, num_servers: int, global_rank: int = -1, context: Any = None) -> None:
    """Comes back after :func:`suspend`. See :func:`byteps.common.resume`."""
    common.resume(num_workers, num_servers, global_rank, context)
