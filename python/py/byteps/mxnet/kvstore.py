"""The ranks as a key-value store: ``mx.kv.create('byteps')``, ``Trainer(kvstore='dist_byteps')``.

It sums, as MXNet's own stores do: ``step`` takes the batch of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import mxnet as mx
from byteps import common, elastic
from byteps.errors import ConfigError
from byteps.mxnet import _engine
from byteps.mxnet.ops import broadcast_arrays

__all__ = ["BytePS", "Dist_BytePS"]


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


@mx.kvstore.KVStoreBase.register
class Dist_BytePS(mx.kvstore.KVStoreBase):
    """A store that sums over the ranks. It keeps no values, and runs no optimizer.

    Making one starts the engine, unless it runs.
    """

    def __init__(self) -> None:
        common.init()

    @property
    def type(self) -> str:
        """Its name; trainers take a name with ``dist`` for ranks of a job."""
        return "dist_byteps"

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
        """It has no optimizer."""
        if capability.lower() == mx.kvstore.KVStoreBase.OPTIMIZER:
            return False
        raise ValueError(f"unknown capability {capability!r}: MXNet knows 'optimizer'")

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Writes the value of rank 0 to ``out`` on all ranks, and waits for it."""
        del priority
        source, targets = _as_list(value)[0], _as_list(out)
        if targets[0] is not source:
            source.copyto(targets[0])
        # Who joins an elastic job gets them with its state: the others would not answer here.
        if not elastic.awaits_state():
            broadcast_arrays([(f"kvstore.{key}.start", targets[0])], 0)
        for target in targets[1:]:
            targets[0].copyto(target)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Sums ``value`` over all ranks into ``out``, or in place; returns at once.

        Of a list of arrays, which are those of several devices of this process, the sum is summed.
        """
        values = _as_list(value)
        targets = values if out is None else _as_list(out)
        total = values[0]
        for other in values[1:]:
            total = total + other.as_in_context(total.context)
        if total is not targets[0]:
            total.copyto(targets[0])
        _engine.exchange(targets[0], f"kvstore.{key}", "sum", priority=priority)
        for target in targets[1:]:
            targets[0].copyto(target)

    def set_optimizer(self, optimizer: Any) -> NoReturn:
        """Refuses: weights are updated by the workers."""
        raise ConfigError(
            f"{self.type} updates no weights: leave out update_on_kvstore, or set it to False"
        )

    def set_gradient_compression(self, compression_params: Any) -> NoReturn:
        """Refuses: a trainer has MXNet's own parameters of compression, which are others."""
        raise ConfigError(
            f"{self.type} takes no compression_params: use byteps.mxnet.DistributedTrainer, which "
            "takes BytePS's"
        )


@mx.kvstore.KVStoreBase.register
class BytePS(Dist_BytePS):
    """The same by the name ``byteps``, for ``mx.kv.create``."""


def _refuse(name: str) -> Callable[[], NoReturn]:
    def create() -> NoReturn:
        raise ConfigError(
            f"kvstore '{name}' is MXNet's own parameter server, which would wait for a scheduler "
            "of MXNet's that this job does not have: use 'dist_byteps', or do not import "
            "byteps.mxnet"
        )

    return create


for _name in ("dist", "dist_sync", "dist_async", "dist_sync_device", "dist_device_sync"):
    mx.kvstore.KVStoreBase.kv_registry[_name] = _refuse(_name)


def _refuse_silence(create: Callable[..., Any]) -> Callable[..., Any]:
    """MXNet 1.9.1 drops a store on one device unless its name has ``dist`` in it, and trains each
    rank by itself, without a word."""

    def create_kvstore(kvstore: Any, *rest: Any) -> Any:
        if isinstance(kvstore, str) and kvstore.lower() == "byteps":
            raise ConfigError(
                "kvstore='byteps': MXNet would leave it out, and train each rank by itself; say "
                "kvstore='dist_byteps', or pass mx.kv.create('byteps')"
            )
        return create(kvstore, *rest)

    return create_kvstore


for _module in (mx.model, mx.gluon.trainer, mx.module.module):
    _module._create_kvstore = _refuse_silence(_module._create_kvstore)
