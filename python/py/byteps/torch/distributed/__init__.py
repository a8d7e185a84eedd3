"""The backend ``byteps`` of ``torch.distributed``::

    import torch.distributed as dist

    dist.init_process_group("byteps")

Nothing of this package has to be imported for that. What goes through the engine and what does not
is in ``docs/torch-distributed.md``.
"""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from byteps.torch.distributed._hook import comm_hook

__all__ = ["comm_hook", "create", "process_group"]


def create(options: Any, backend_options: Any = None) -> Any:
    """What torch calls for a new group of the backend: the group's end in this process."""
    del backend_options
    if getattr(options, "enable_reconfigure", False):  # From torch 2.15 on.
        from byteps.torch.distributed._reconfiguring import create as create_group
    else:
        from byteps.torch.distributed._group import create as create_group
    return create_group(options)


def process_group(
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta = timedelta(minutes=30),
    name: str = "byteps",
) -> Any:
    """A group that ``torch.distributed`` knows nothing of, for libraries that make their own.

    The ranks meet in ``store``. Its ``abort()``, or ``shutdown()``, leaves the job, whether that is
    over or not, so that another group of other ranks can be made.
    """
    options = SimpleNamespace(
        store=store,
        group_rank=rank,
        group_size=size,
        timeout=timeout,
        group_id=name,
        global_ranks_in_group=[],
    )
    end = create(options)
    if isinstance(end, dist.ProcessGroup):  # As it is below torch 2.15.
        return end
    group = dist.ProcessGroup(store, rank, size)
    kind = dist.ProcessGroup.BackendType.CUSTOM
    group._set_default_backend(kind)
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        group._register_backend(torch.device(device), kind, end)
    return group
