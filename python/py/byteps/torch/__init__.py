"""Training with torch::

    import byteps.torch as bps

    bps.init()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters())

BytePS's names and Horovod's both work; :mod:`byteps.torch.parallel` has
``DistributedDataParallel``.
"""

from byteps import _autoload
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
from byteps.errors import HorovodInternalError, HostsUpdatedInterrupt
from byteps.torch.allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from byteps.torch.compression import (
    Codec,
    Compression,
    compression_state_dict,
    load_compression_state_dict,
)
from byteps.torch.distributed import comm_hook
from byteps.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from byteps.torch.gather import (
    allgather,
    allgather_async,
    allgather_object,
    grouped_allgather,
    grouped_allgather_async,
)
from byteps.torch.joining import join
from byteps.torch.local_sgd import LocalSGD
from byteps.torch.ops import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    ReduceOp,
    Sum,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    byteps_push_pull,
    byteps_push_pull_group,
    byteps_torch_set_num_grads,
    contributors,
    declare,
    poll,
    push_pull,
    push_pull_async,
    push_pull_async_inplace,
    push_pull_group,
    push_pull_group_async,
    push_pull_group_async_inplace,
    push_pull_group_inplace,
    push_pull_group_sync_inplace,
    push_pull_inplace,
    synchronize,
    wait,
)
from byteps.torch.optimizer import DistributedOptimizer
from byteps.torch.scatter import (
    alltoall,
    alltoall_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from byteps.torch.server_optimizer import (
    ServerOptimizer,
    load_server_state_dict,
    server_state_dict,
)
from byteps.torch.sparse import sparse_allreduce, sparse_allreduce_async
from byteps.torch.sync_batch_norm import SyncBatchNorm

from byteps.torch import elastic  # isort: skip

__all__ = [
    "Adasum",
    "Average",
    "Codec",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "LocalSGD",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "ServerOptimizer",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "byteps_push_pull",
    "byteps_push_pull_group",
    "byteps_torch_set_num_grads",
    "ccl_built",
    "comm_hook",
    "compression_state_dict",
    "contributors",
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
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "live_ranks",
    "load_compression_state_dict",
    "load_server_state_dict",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "push_pull",
    "push_pull_async",
    "push_pull_async_inplace",
    "push_pull_group",
    "push_pull_group_async",
    "push_pull_group_async_inplace",
    "push_pull_group_inplace",
    "push_pull_group_sync_inplace",
    "push_pull_inplace",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "resume",
    "rocm_built",
    "server_state_dict",
    "shutdown",
    "size",
    "sparse_allreduce",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "suspend",
    "synchronize",
    "wait",
]

# Where torch was told not to look for backends, this is what makes ours known.
_autoload.register()
