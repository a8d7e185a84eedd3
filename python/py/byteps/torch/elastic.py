"""Training with torch that goes on when ranks or servers die, and when new ones come::

    import byteps.torch as bps

    model, optimizer = ...
    bps.init()
    optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters())

    @bps.elastic.run
    def train(state):
        while state.step < 1000:
            ...                      # forward, backward, optimizer.step()
            state.step += 1
            if state.step % 10 == 0:
                state.commit()

    train(bps.elastic.TorchState(model, optimizer, step=0))

The names are Horovod's. The job is elastic under ``bpslaunch --elastic redo``.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sized
from typing import Any

import torch

from byteps import common
from byteps.elastic import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
    ObjectState,
    State,
    leave,
    on_epoch_end,
    run,
    run_fn,
    settle,
)
from byteps.errors import ConfigError
from byteps.torch import _gradients, functions
from byteps.torch._random import RandomState
from byteps.torch.server_optimizer import OnServers

__all__ = [
    "ElasticSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "RandomState",
    "State",
    "TorchState",
    "leave",
    "run",
    "run_fn",
]

on_epoch_end(_gradients.forget_rounds)


class TorchState(ObjectState):
    """The state of a training with torch.

    ``model`` and ``optimizer`` may be None. Of the ``values``, those that are modules, optimizers
    or samplers, or have ``state_dict()`` and ``load_state_dict()`` (schedulers of the learning
    rate, gradient scalers, :class:`RandomState`), are saved and sent by these; all others are plain
    values, which are pickled.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **values: Any,
    ) -> None:
        holders = {"model": model, "optimizer": optimizer, **values}
        self._holders = {
            name: _handler(name, value) for name, value in holders.items() if _has_state(value)
        }
        vars(self).update(model=model, optimizer=optimizer)
        plain = {name: value for name, value in values.items() if name not in self._holders}
        super().__init__(functions.broadcast_object, common.rank, **plain)
        vars(self).update({name: values[name] for name in self._holders if name in values})
        self.save()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_holders", ()):
            self._holders[name] = _handler(name, value)
            self._holders[name].save()
        super().__setattr__(name, value)

    def save(self) -> None:
        """See :class:`State`. Tensors are copied to where they are, into the copies of before."""
        settle()
        for holder in self._holders.values():
            holder.save()
        super().save()

    def restore(self) -> None:
        """See :class:`State`."""
        for holder in self._holders.values():
            holder.restore()
        super().restore()

    def hand_over(self) -> None:
        """See :class:`State`."""
        for holder in self._holders.values():
            holder.hand_over()

    def send(self, root_rank: int) -> None:
        """See :class:`State`."""
        for holder in self._holders.values():
            holder.send(root_rank)
        super().send(root_rank)

    def reset(self) -> None:
        """See :class:`State`."""
        for holder in self._holders.values():
            holder.reset()


class _Handler:
    """Saves, restores and sends the state of one object.

    Names of tensors have the root in them: ranks that were there before have declared them with the
    root of then, and a newcomer must not disagree with that.
    """

    def __init__(self, name: str, value: Any) -> None:
        self.name = f"elastic.{name}"
        self.value = value
        self.saved: Any = None

    def save(self) -> None:
        self.saved = _copy(self.value.state_dict(), self.saved)

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self.saved))

    def send(self, root_rank: int) -> None:
        name = f"{self.name}.{root_rank}"
        state = functions.broadcast_object(self.value.state_dict(), root_rank, name=name)
        if common.rank() != root_rank:
            self.value.load_state_dict(state)

    def hand_over(self) -> None:
        pass

    def reset(self) -> None:
        pass


class _ModuleHandler(_Handler):
    def restore(self) -> None:
        self.value.load_state_dict(self.saved)  # It copies.

    def send(self, root_rank: int) -> None:
        prefix = f"{self.name}.{root_rank}.Parameter."
        functions.broadcast_parameters(self.value.state_dict(), root_rank, prefix=prefix)


class _OptimizerHandler(_Handler):
    """The momentum that a codec has in the place of the optimizer's goes back with it. It is of
    this rank's own gradients, so it is not sent: who comes later begins without."""

    def __init__(self, name: str, value: Any) -> None:
        super().__init__(name, value)
        self.velocities: dict[int, torch.Tensor] = {}

    def save(self) -> None:
        super().save()
        # None of a copy of a distributed optimizer, and of other ones.
        if (gradients := vars(self.value).get("_byteps")) is not None:
            self.velocities = _copy(gradients.velocities.kept(), self.velocities)

    def restore(self) -> None:
        # Gradients of the step that failed are not to be added to.
        self.value.zero_grad()
        super().restore()
        if (gradients := vars(self.value).get("_byteps")) is not None:
            gradients.velocities.go_back(_copy(self.velocities, None))

    def send(self, root_rank: int) -> None:
        if isinstance(self.value, OnServers):
            # The servers of the former epoch have forgotten what they kept.
            self.value.fall_back(self.saved)
        prefix = f"{self.name}.{root_rank}."
        functions.broadcast_optimizer_state(self.value, root_rank, prefix=prefix)


class _RandomHandler(_Handler):
    def send(self, root_rank: int) -> None:
        if not self.value.per_rank:
            super().send(root_rank)


class _SamplerHandler(_Handler):
    """Every rank has processed other samples: all of them count."""

    def send(self, root_rank: int) -> None:
        processed = self._processed()
        name = f"{self.name}.epoch.{root_rank}"
        epoch = functions.broadcast_object(self.value.epoch, root_rank, name=name)
        self.value.load_state_dict({"epoch": epoch, "processed_indices": processed})

    def hand_over(self) -> None:
        state = {"epoch": self.value.epoch, "processed_indices": self._processed()}
        self.value.load_state_dict(state)
        self.save()

    def _processed(self) -> list[int]:
        """Those of all ranks."""
        processed: set[int] = set()
        for rank in range(common.size()):
            own = self.value.state_dict()["processed_indices"]
            processed |= set(functions.broadcast_object(own, rank, name=f"{self.name}.{rank}"))
        return sorted(processed)

    def reset(self) -> None:
        self.value.reset()


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def _handler(name: str, value: Any) -> _Handler:
    if not _has_state(value):
        raise ConfigError(
            f"state.{name} = {type(value).__name__}: what replaces an object with a state must "
            "have state_dict() and load_state_dict(), too"
        )
    if isinstance(value, torch.nn.Module):
        return _ModuleHandler(name, value)
    if isinstance(value, torch.optim.Optimizer):
        return _OptimizerHandler(name, value)
    if isinstance(value, ElasticSampler):
        return _SamplerHandler(name, value)
    if isinstance(value, RandomState):
        return _RandomHandler(name, value)
    return _Handler(name, value)


def _copy(value: Any, into: Any) -> Any:
    """A copy of a state, in the memory of an earlier copy where that fits."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        fits = (
            isinstance(into, torch.Tensor)
            and (into.shape, into.dtype) == (value.shape, value.dtype)
            and into.device == value.device
            and into.layout is value.layout is torch.strided
        )
        return into.copy_(value) if fits else value.clone()
    if isinstance(value, dict):
        known = into if isinstance(into, dict) else {}
        copies = {key: _copy(item, known.get(key)) for key, item in value.items()}
        made = copy.copy(value)  # An OrderedDict stays one, with its metadata.
        made.update(copies)
        return made
    if type(value) in (list, tuple):
        fits = type(into) is type(value) and len(into) == len(value)
        olds = into if fits else [None] * len(value)
        return type(value)(_copy(item, old) for item, old in zip(value, olds, strict=True))
    return copy.deepcopy(value)


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Divides what is left of a dataset's epoch among the ranks, and again when they change.

    Call :meth:`record_batch` after each batch, and :meth:`set_epoch` at the end of each epoch. As
    part of a :class:`TorchState` it forgets what was processed since the last commit if that is
    taken back.

    Args:
        dataset: Anything with a length.
        shuffle: Whether the order is random; the same on all ranks, and another in each epoch.
        seed: Of that order.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.remaining_indices: list[int] = []
        self.rank, self.num_replicas = 0, 1
        self._own: list[int] = []
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch: nothing of it is processed yet."""
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """The batch of this number, of so many samples on this rank, is processed."""
        self.record_indices(self._own[batch_idx * batch_size : (batch_idx + 1) * batch_size])

    def record_indices(self, indices: list[int]) -> None:
        """These samples are processed."""
        self.processed_indices.update(indices)

    def reset(self) -> None:
        """Divides what is left among the ranks that there are now."""
        if common.is_initialized():
            self.rank, self.num_replicas = common.rank(), common.size()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = [index for index in order if index not in self.processed_indices]
        left = list(self.remaining_indices)
        while left and len(left) % self.num_replicas:
            # All ranks make as many steps: the first samples come twice.
            left += self.remaining_indices[: -len(left) % self.num_replicas]
        self._own = left[self.rank :: self.num_replicas]

    def state_dict(self) -> dict[str, Any]:
        """What is processed, of which epoch."""
        return {"epoch": self.epoch, "processed_indices": sorted(self.processed_indices)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes that over."""
        self.epoch = state_dict["epoch"]
        self.processed_indices = set(state_dict["processed_indices"])
        self.reset()

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._own))

    def __len__(self) -> int:
        return len(self._own)
