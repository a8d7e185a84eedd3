"""MXNet's stores of several workers, over this engine::

    from bytescheduler.mxnet.kvstore import ScheduledKVStore

    kv = ScheduledKVStore(mx.kvstore.create("dist_sync"))

From the import on, ``dist_sync`` and ``dist_device_sync`` are the ranks of the job, and no store of
MXNet's servers; :mod:`bytescheduler.__main__` imports this before the program can make one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from byteps import common
from byteps.errors import ConfigError, UsageError
from byteps.mxnet import _engine
from byteps.mxnet.kvstore import Dist_BytePS
from byteps.mxnet.ops import broadcast_arrays

import mxnet as mx

__all__ = ["ScheduledKVStore"]


class _DistSync(Dist_BytePS):
    """The ranks of the job, by the name of MXNet's store that waits for all of them."""

    @property
    def type(self) -> str:
        """MXNet's modules divide by the batch of all ranks where it says ``_sync``."""
        return "dist_sync"


class _DistDeviceSync(Dist_BytePS):
    """The same by the name of the store that adds on devices."""

    @property
    def type(self) -> str:
        """As of ``dist_sync``."""
        return "dist_device_sync"


_STORES = {
    "dist": _DistSync,
    "dist_sync": _DistSync,
    "dist_sync_device": _DistDeviceSync,
    "dist_device_sync": _DistDeviceSync,
}
mx.kvstore.KVStoreBase.kv_registry.update(_STORES)


class ScheduledKVStore(mx.kvstore.KVStoreBase):
    """A store that begins to exchange what is pushed at once, and delays only what pulls it.

    Pushes and pulls are operations of MXNet's engine: they return at once, and a layer's forward
    pass waits for its own weights alone. Of what is ready the larger priority goes first.

    A store with an optimizer keeps the weights, and each rank updates its own copy of them with the
    sum over all ranks, where MXNet's servers would: all ranks have the same bits. One without keeps
    the last sum of each key.

    Args:
        kvstore: What ``mx.kvstore.create("dist_sync")`` returns once this module is imported, or
            ``create("dist_byteps")``.

    Raises:
        byteps.errors.ConfigError: for a store of MXNet's own.
    """

    def __init__(self, kvstore: Any) -> None:
        if isinstance(kvstore, ScheduledKVStore):
            kvstore = kvstore._ranks
        if not isinstance(kvstore, Dist_BytePS):
            kind = getattr(kvstore, "type", type(kvstore).__name__)
            raise ConfigError(
                f"ScheduledKVStore takes the ranks of this job, and '{kind}' is a store of MXNet's "
                "own: start the program with 'python -m bytescheduler', or import "
                "bytescheduler.mxnet.kvstore before mx.kvstore.create('dist_sync')"
            )
        self._ranks: Dist_BytePS = kvstore
        self._values: dict[Any, Any] = {}
        self._sums: dict[Any, Any] = {}
        self._updater: Any = None

    @property
    def type(self) -> str:
        """The name of the store that it was made of."""
        return str(self._ranks.type)

    @property
    def rank(self) -> int:
        """The number of this process in the job."""
        return common.rank()

    @property
    def num_workers(self) -> int:
        """The processes of the job."""
        return common.size()

    @staticmethod
    def is_capable(capability: str) -> bool:
        """It can update weights."""
        if capability.lower() == mx.kvstore.KVStoreBase.OPTIMIZER:
            return True
        raise ValueError(f"unknown capability {capability!r}: MXNet knows 'optimizer'")

    def init(self, key: Any, value: Any) -> None:
        """Gives a key, or each of a list, the value that rank 0 has; waits for it."""
        named = []
        for one, values in _pairs(key, value):
            if one in self._values:
                raise UsageError(f"key {one!r} was initialized before: push to it")
            self._values[one] = values[0].copy()
            named.append((f"scheduled.{one}", self._values[one]))
        broadcast_arrays(named, 0)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """:meth:`init`, then :meth:`pull` into ``out``."""
        self.init(key, value)
        self.pull(key, out, priority)

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Sums ``value`` over all ranks, for a key or each of a list; returns at once.

        Of a list of arrays for a key, which are those of several devices of this process, the sum
        is summed. ``value`` may be overwritten as soon as this has returned.
        """
        for one, values in _pairs(key, value):
            if one not in self._values:
                raise UsageError(f"key {one!r} has no value yet: call init({one!r}, value) before")
            total = self._sums.get(one)
            if total is None:
                total = self._sums[one] = mx.nd.empty(
                    values[0].shape, ctx=mx.cpu(), dtype=values[0].dtype
                )
            values[0].copyto(total)
            for other in values[1:]:
                total += other.as_in_context(total.context)
            _engine.exchange(total, f"kvstore.{one}", "sum", priority=priority)
            if self._updater is None:
                total.copyto(self._values[one])
            else:
                self._updater(one, total, self._values[one])

    def pull(
        self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True
    ) -> None:
        """Copies the value of a key, or of each of a list, into ``out``; returns at once."""
        del priority, ignore_sparse
        for one, outs in _pairs(key, out):
            if one not in self._values:
                raise UsageError(f"key {one!r} has no value yet: call init({one!r}, value) before")
            for target in outs:
                self._values[one].copyto(target)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """:meth:`push`, then :meth:`pull` into ``out``, or into ``value``."""
        self.push(key, value, priority)
        self.pull(key, value if out is None else out, priority)

    def row_sparse_pull(self, *_: Any, **__: Any) -> NoReturn:
        """Refuses: values are dense."""
        raise ConfigError(
            "ScheduledKVStore has dense values only: leave out stype='row_sparse' and "
            "sparse_grad=True"
        )

    def set_optimizer(self, optimizer: Any) -> None:
        """Lets this optimizer of MXNet's update values with what is pushed."""
        self._updater = mx.optimizer.get_updater(optimizer)

    def set_gradient_compression(self, compression_params: Any) -> NoReturn:
        """Refuses: a store has MXNet's own parameters of compression, which are others."""
        self._ranks.set_gradient_compression(compression_params)
        raise AssertionError("the store refuses it")

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Writes the optimizer's state, which is the same on all ranks, to a file."""
        Path(fname).write_bytes(self._known_updater().get_states(dump_optimizer))

    def load_optimizer_states(self, fname: str) -> None:
        """Reads what :meth:`save_optimizer_states` has written; all ranks must."""
        self._known_updater().set_states(Path(fname).read_bytes())

    def _known_updater(self) -> Any:
        if self._updater is None:
            raise UsageError("the store has no optimizer: call set_optimizer before")
        return self._updater


def _pairs(keys: Any, values: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Each key with its arrays, of one key or of a list of keys."""
    if not isinstance(keys, (list, tuple)):
        keys, values = [keys], [values]
    for key, value in zip(keys, values, strict=True):
        yield key, list(value) if isinstance(value, (list, tuple)) else [value]
