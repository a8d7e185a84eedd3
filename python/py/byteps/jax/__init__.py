"""Training with JAX::

    import byteps.jax as bps

    bps.init()
    params = bps.broadcast_parameters(params, root_rank=0)
    optimizer = bps.DistributedOptimizer(optax.adam(1e-3))

``push_pull`` and all that is built on it work inside ``jax.jit`` and outside, on CPUs and on NVIDIA
GPUs.
"""

from typing import Any

import jax

from byteps import _kept, common
from byteps._codecs import Codec
from byteps._codecs import Codecs as Compression
from byteps._kept import compression_state_dict, load_compression_state_dict
from byteps._operations import Average, Max, Min, Product, ReduceOp, Sum
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
    live_ranks,
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
from byteps.jax import _arrays, _ffi, elastic
from byteps.jax.functions import (
    allgather_object,
    broadcast_object,
    broadcast_parameters,
    join,
)
from byteps.jax.ops import (
    allgather,
    broadcast,
    contributors,
    declare,
    poll,
    push_pull,
    push_pull_async,
    synchronize,
    typed_errors,
    wait,
)
from byteps.jax.optimizer import DistributedOptimizer, grad, value_and_grad

__all__ = [
    "Average",
    "Codec",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_parameters",
    "compression_state_dict",
    "contributors",
    "cross_rank",
    "cross_size",
    "declare",
    "elastic",
    "get_process_set_ids_and_ranks",
    "get_pushpull_speed",
    "global_process_set",
    "grad",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "live_ranks",
    "load_compression_state_dict",
    "local_rank",
    "local_size",
    "poll",
    "push_pull",
    "push_pull_async",
    "rank",
    "remove_process_set",
    "resume",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "suspend",
    "synchronize",
    "typed_errors",
    "value_and_grad",
    "wait",
]

_kept.drains.update(jax=_arrays.drain)


def init(lazy: Any = True) -> None:
    """Starts the engine of this process and returns when all nodes of the job are there.

    See :func:`byteps.common.init`. Call it before JAX is first used: programs then run on the CPU
    in the order in which they are called, each to its end (``jax_cpu_enable_async_dispatch`` is
    off). By default JAX runs independent programs there side by side, in an order of its own on
    each rank, and two that use one name would be summed in different pairs.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    _ffi.check_version()
    common.init(lazy)
