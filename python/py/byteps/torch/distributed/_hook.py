"""DDP's gradients through the engine, while all else stays with DDP's own group."""

# DDP compares the annotations of a hook with types, so they must not be text.

import threading
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket

from byteps import _native, common
from byteps.errors import ConfigError
from byteps.torch import _gpu, _tensors
from byteps.torch.distributed._futures import Line, future_of
from byteps.torch.distributed._keys import Keys, Kind
from byteps.torch.distributed._works import Flight, Operation

__all__ = ["comm_hook"]

_lock = threading.Lock()
_keys: Keys | None = None
_flight = Flight()
_line = Line()


def comm_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook for ``DistributedDataParallel``::

        bps.init()
        dist.init_process_group("gloo")  # or nccl
        model = DistributedDataParallel(model)
        model.register_comm_hook(None, bps.comm_hook)

    Gradients are averaged over all ranks of the job; DDP's own group does the rest: checks, buffers
    and what the program calls itself. ``state`` is the process group of the model, or None for the
    default group; it must have the ranks of the job, else :class:`ConfigError` is raised.

    Returns a future of the bucket's tensor (its shape and type), which holds the average. Buckets
    of types that servers do not sum are a :class:`~byteps.errors.TensorError`.
    """
    buffer = bucket.buffer()
    if state is not None and state.size() != common.size():
        raise ConfigError(
            f"comm_hook: the model's process group has {state.size()} ranks and the job of byteps "
            f"{common.size()}: both must have all ranks"
        )
    stream = _gpu.open_for([buffer])
    dtype = _tensors.summed_dtype(buffer, "DDP's bucket", str(bucket.index()))
    kind = Kind("average", dtype, _gpu.holds(buffer))
    pieces = _current_keys().of(kind, buffer.numel())
    address = buffer.data_ptr()
    # No bucket goes before others: DDP's step waits for all of them, and where later ones overtook,
    # ranks that are a little apart would not send the same gradients.
    items = [(tensor, address + offset, address + offset, 0) for tensor, offset in pieces]
    batch = _native.start_batch(items, stream and stream())
    device = buffer.device if stream else None
    operation = Operation("DDP's comm_hook", batch, buffer, (buffer,), (), device, None, _line)
    _flight.add(operation)
    return future_of(operation)


def _current_keys() -> Keys:
    global _keys
    with _lock:
        if _keys is None or not _keys.is_of_this_job():
            _keys = Keys("comm_hook")
        return _keys
