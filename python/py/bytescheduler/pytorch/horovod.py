"""Steps that the next forward pass overlaps, by ByteScheduler's names::

    import bytescheduler.pytorch.horovod as bsc

    bsc.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    optimizer = bsc.ScheduledOptimizer(model, optimizer, num_steps)

It has all names of :mod:`byteps.torch` too.
"""

from __future__ import annotations

import torch
from byteps.errors import ConfigError
from byteps.torch import *  # noqa: F403
from byteps.torch import __all__ as _names
from byteps.torch.cross_barrier import overlap
from byteps.torch.optimizer import Distributed

__all__ = [*_names, "ScheduledOptimizer"]  # noqa: PLE0604 - all of `_names` are strings.


def ScheduledOptimizer(
    model: torch.nn.Module, hvd_opt: torch.optim.Optimizer, num_steps: int = 10**6
) -> torch.optim.Optimizer:
    """The optimizer as a :func:`~byteps.torch.cross_barrier.CrossBarrier`.

    Where ByteScheduler knew SGD and Adam, it takes any optimizer that updates parameter by
    parameter, and keeps what was said to ``DistributedOptimizer``: the names of the parameters,
    ``compression`` and ``backward_passes_per_step``.

    Args:
        model: What the optimizer trains; its modules are watched.
        hvd_opt: What ``DistributedOptimizer`` of ``byteps.torch``, or of ``horovod.torch`` as
            ``python -m bytescheduler`` answers it, has returned; or any torch optimizer.
        num_steps: From this step on, ``step()`` waits, so that the end of the training is there
            when it returns.

    Raises:
        byteps.errors.ConfigError: for an optimizer that the installed Horovod has wrapped, that
            sums, combines by Adasum, trains asynchronously or has a process set, and for what
            ``CrossBarrier`` does not take.
    """
    if any(f"{kind.__module__}.".startswith("horovod.") for kind in type(hvd_opt).__mro__):
        raise ConfigError(
            "the optimizer was wrapped by the Horovod that is installed, which would send its "
            "gradients a second time: start the program with 'python -m bytescheduler', or change "
            "its import to 'import byteps.torch as hvd'"
        )
    if not isinstance(hvd_opt, Distributed):
        return overlap(model, hvd_opt, num_steps=num_steps)
    gradients = hvd_opt._byteps
    is_average = hvd_opt.averages_gradients and gradients.average
    if not is_average or gradients.process_set is not None:
        raise ConfigError(
            "ScheduledOptimizer averages gradients over all ranks: call DistributedOptimizer "
            "without op, async_ and process_set"
        )
    prefix = gradients.prefix
    named = [(name.removeprefix(prefix), param) for param, name in gradients.names.items()]
    return overlap(
        model, hvd_opt, named, gradients.compression, gradients.passes, num_steps, prefix
    )
