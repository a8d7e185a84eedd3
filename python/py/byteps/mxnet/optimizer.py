"""Optimizers and trainers that average gradients over the ranks before each update."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import mxnet as mx
from byteps import _native, _registry
from byteps._objects import check_root
from byteps.errors import ConfigError
from byteps.mxnet import _engine
from byteps.mxnet.compression import Compression
from byteps.mxnet.ops import broadcast_gluon, byteps_push_pull

__all__ = ["DistributedOptimizer", "DistributedTrainer"]


class DistributedOptimizer(mx.optimizer.Optimizer):
    """An optimizer of MXNet's that averages each gradient over the ranks before its update.

    For ``Module.fit`` and for loops of one's own; Gluon's are served by
    :class:`DistributedTrainer`. All that the optimizer has, it has. Names are ``gradient_`` and the
    index with which ``update`` is called, and smaller indices are more urgent.

    Args:
        optimizer: Any optimizer; it averages over the batch of this rank (``rescale_grad``).

    Raises:
        byteps.errors.ConfigError: for what is no optimizer.
    """

    _wrapped: Any

    def __init__(self, optimizer: Any) -> None:
        if not isinstance(optimizer, mx.optimizer.Optimizer):
            raise ConfigError(
                f"DistributedOptimizer wants an optimizer, and this is {optimizer!r}: make one "
                "with mx.optimizer.create"
            )
        if isinstance(optimizer, DistributedOptimizer):
            optimizer = optimizer._wrapped
        # Not the constructor of the base: what it would set is for the wrapped one to have.
        object.__setattr__(self, "_wrapped", optimizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_wrapped"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Trainers and modules set the scale of gradients, names and multipliers.
        setattr(self._wrapped, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return DistributedOptimizer, (self._wrapped,)

    def _average(self, index: Any, grad: Any) -> None:
        indices, grads = (index, grad) if isinstance(index, (list, tuple)) else ([index], [grad])
        for number, array in zip(indices, grads, strict=True):
            byteps_push_pull(array, priority=-number, name=f"gradient_{number}")

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Averages the gradients, then updates the weights; indices may be one or a list."""
        self._average(index, grad)
        self._wrapped.update(index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """The same with weights of float16 that have a master copy of float32."""
        self._average(index, grad)
        self._wrapped.update_multi_precision(index, weight, grad, state)

    def create_state(self, index: Any, weight: Any) -> Any:
        """The wrapped optimizer's."""
        return self._wrapped.create_state(index, weight)

    def create_state_multi_precision(self, index: Any, weight: Any) -> Any:
        """The wrapped optimizer's."""
        return self._wrapped.create_state_multi_precision(index, weight)

    @property
    def learning_rate(self) -> Any:
        """The wrapped optimizer's."""
        return self._wrapped.learning_rate

    def set_learning_rate(self, lr: float) -> None:
        """Sets the wrapped optimizer's."""
        self._wrapped.set_learning_rate(lr)

    def set_lr_mult(self, args_lr_mult: Mapping[Any, float]) -> None:
        """Sets the wrapped optimizer's."""
        self._wrapped.set_lr_mult(args_lr_mult)

    def set_wd_mult(self, args_wd_mult: Mapping[Any, float]) -> None:
        """Sets the wrapped optimizer's."""
        self._wrapped.set_wd_mult(args_wd_mult)


class DistributedTrainer(mx.gluon.Trainer):
    """Gluon's trainer, which averages gradients over the ranks before each update.

    Parameters are broadcast from ``root_rank``; those without a shape in the first forward pass.
    ``step(batch_size)`` takes the batch of this rank. Between ``allreduce_grads()`` and
    ``update()`` the gradients are averages, for clipping, say.

    Args:
        params: As Gluon's.
        optimizer: A name or an optimizer, as Gluon's.
        optimizer_params: As Gluon's.
        root_rank: Whose parameters all ranks begin with.
        compression_params: BytePS's, as :meth:`Compression.from_params` documents them, but for
            ``momentum``; or one of :class:`Compression`. What error feedback has left out is scaled
            when the learning rate changes.

    Raises:
        byteps.errors.ConfigError: for sparse parameters, several devices, or a compression that
            is not known.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: Mapping[str, Any] | None = None,
        root_rank: int = 0,
        compression_params: Any = None,
    ) -> None:
        check_root(root_rank, None)
        if isinstance(optimizer, DistributedOptimizer):
            warnings.warn(
                "DistributedTrainer averages gradients itself: it takes the optimizer that the "
                "DistributedOptimizer wraps",
                stacklevel=2,
            )
            optimizer = optimizer._wrapped
        self._encoding = _encoding_of(compression_params)
        super().__init__(params, optimizer, optimizer_params, kvstore=None)
        if self._contains_sparse_weight or self._contains_sparse_grad:
            raise ConfigError(
                "DistributedTrainer has dense parameters and gradients only: leave out "
                "stype='row_sparse', grad_stype='row_sparse' and sparse_grad=True"
            )
        if len(self._contexts or ()) > 1:
            raise ConfigError(
                f"DistributedTrainer trains on one device, and the parameters are on "
                f"{self._contexts}: start a process for each device"
            )
        # Two trainers of a process have gradients of the same numbers.
        number = _registry.count_up("trainers of MXNet")
        self._prefix = f"trainer_{number}." if number else ""
        self._sent: set[_registry.Tensor] = set()
        self._rate: float | None = None
        params = enumerate(self._params)
        broadcast_gluon(
            [(f"{self._prefix}parameter_{index}", param) for index, param in params], root_rank
        )

    def _allreduce_grads(self) -> None:
        self._follow_rate()
        for index, param in enumerate(self._params):
            if param.grad_req != "null":
                name = f"{self._prefix}gradient_{index}"
                sent = _engine.exchange(
                    param.grad(), name, "average", priority=-index, encoding=self._encoding
                )
                self._sent.add(sent)

    def _follow_rate(self) -> None:
        """What a codec left out of a gradient was to be multiplied by the rate of then."""
        rate = float(self.learning_rate)
        if "+feedback" not in (self._encoding or "") or rate <= 0:
            return
        before, self._rate = self._rate, rate
        encoded = [tensor for tensor in self._sent if tensor.encoding]
        if before not in (None, rate) and encoded:
            # A round that is under way would still add to it.
            mx.nd.waitall()
            _native.scale_residues(_registry.declare(encoded), before / rate)


def _encoding_of(compression: Any) -> str | None:
    if isinstance(compression, Mapping):
        if compression.get("momentum"):
            raise ConfigError(
                "compression_params: the codec's momentum would leave out arrays that are too "
                "small to be encoded; leave 'momentum' to optimizer_params"
            )
        compression = Compression.from_params(compression)
    encoding: str | None = getattr(compression, "encoding", None)
    if compression is not None and encoding is None:
        raise ConfigError(
            f"compression_params={compression!r}: a mapping of BytePS's parameters, or one of "
            "Compression"
        )
    return encoding
