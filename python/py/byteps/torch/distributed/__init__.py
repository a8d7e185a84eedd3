"""The backend ``byteps`` of ``torch.distributed``::

    import torch.distributed as dist

    dist.init_process_group("byteps")

Nothing of this package has to be imported for that. What goes through the engine and what does not
is in ``docs/torch-distributed.md``.
"""

from __future__ import annotations

from typing import Any

from byteps.torch.distributed._hook import comm_hook

__all__ = ["comm_hook", "create"]


def create(options: Any, backend_options: Any = None) -> Any:
    """What torch calls for a new group of the backend: the group's end in this process."""
    del backend_options
    if getattr(options, "enable_reconfigure", False):  # From torch 2.15 on.
        from byteps.torch.distributed._reconfiguring import create as create_group
    else:
        from byteps.torch.distributed._group import create as create_group
    return create_group(options)
