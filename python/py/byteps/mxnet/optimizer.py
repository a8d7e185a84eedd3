"""Optimizers and trainers that average gradients over the ranks before each update."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

import mxnet as mx
from byteps import _kept, _native, _process_sets, _registry, elastic
from byteps._backups import Backups
from byteps._codecs import without_momentum
from byteps._objects import check_root
from byteps.errors import ConfigError
from byteps.mxnet import _engine, ops, reductions
from byteps.mxnet.compression import Compression
from byteps.mxnet.ops import broadcast_gluon

__all__ = ["DistributedOptimizer", "DistributedTrainer"]


class _How(NamedTuple):
    """What is done with gradients beside averaging them."""

    factor: float
    process_set: Any
    backup_workers: int | None

    def takes_part(self) -> bool:
        """Whether this rank is one of those whose gradients are averaged."""
        members = _process_sets.added(self.process_set)
        return members is None or bool(members.included())

    def ranks(self) -> ops.Ranks:
        """Those ranks, of which this is one."""
        return _process_sets.ranks_of(self.process_set)

    def backups(self) -> Backups:
        """For how many of them no average waits."""
        return Backups.asked(self.backup_workers)


def _how(factor: float, num_groups: int, process_set: Any, backup_workers: int | None) -> _How:
    if not factor > 0:
        raise ConfigError(f"gradient_predivide_factor={factor}: a number above 0 is wanted")
    if num_groups < 0:
        raise ConfigError(f"num_groups={num_groups}: 0 or more")
    if backup_workers is not None:
        Backups.asked(backup_workers)
    _process_sets.added(process_set)
    return _How(factor, process_set, backup_workers)


class DistributedOptimizer(mx.optimizer.Optimizer):
    """An optimizer of MXNet's that averages each gradient over the ranks before its update.

    For ``Module.fit`` and for loops of one's own; Gluon's are served by
    :class:`DistributedTrainer`. All that the optimizer has, it has. Names are ``gradient_`` and the
    index with which ``update`` is called, and smaller indices are more urgent.

    Args:
        optimizer: Any optimizer; it averages over the batch of this rank (``rescale_grad``).
        gradient_predivide_factor: What gradients are divided by before they are averaged, and
            multiplied by after it, so that sums of float16 stay small.
        num_groups: There for Horovod's callers, which choose what is sent together; not used.
        process_set: A :class:`~byteps.common.ProcessSet` of the ranks whose gradients are averaged;
            on others they stay as they are.
        backup_workers: For how many of the slowest ranks no average waits (docs/stragglers.md): it
            is then of the others, and the ranks that are late get the same. As
            ``BPS_BACKUP_WORKERS`` says where it is None, for what may be so; 0 waits for all.

    Raises:
        byteps.errors.ConfigError: for what is no optimizer, or options that are none.
    """

    _wrapped: Any
    _how: _How

    def __init__(
        self,
        optimizer: Any,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        process_set: Any = None,
        backup_workers: int | None = None,
    ) -> None:
        if not isinstance(optimizer, mx.optimizer.Optimizer):
            raise ConfigError(
                f"DistributedOptimizer wants an optimizer, and this is {optimizer!r}: make one "
                "with mx.optimizer.create"
            )
        if isinstance(optimizer, DistributedOptimizer):
            optimizer = optimizer._wrapped
        # Not the constructor of the base: what it would set is for the wrapped one to have.
        object.__setattr__(self, "_wrapped", optimizer)
        how = _how(gradient_predivide_factor, num_groups, process_set, backup_workers)
        object.__setattr__(self, "_how", how)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_wrapped"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Trainers and modules set the scale of gradients, names and multipliers.
        setattr(self._wrapped, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        factor, process_set, backup_workers = self._how
        return DistributedOptimizer, (self._wrapped, factor, 0, process_set, backup_workers)

    def _average(self, index: Any, grad: Any) -> None:
        if not self._how.takes_part():
            return
        ranks, factor, backups = self._how.ranks(), self._how.factor, self._how.backups()
        indices, grads = (index, grad) if isinstance(index, (list, tuple)) else ([index], [grad])
        for number, array in zip(indices, grads, strict=True):
            name = f"gradient_{number}"
            reductions.scale(array, 1 / factor)
            _engine.exchange(
                *(array, name, "average", 0, -number, ops.encoding_of(name)),
                ranks=ranks,
                backups=backups,
            )
            reductions.scale(array, factor)

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
        compression_params: BytePS's, as :meth:`Compression.from_params` documents them; or one of
            :class:`Compression`. What error feedback has left out is scaled when the learning rate
            changes. ``momentum`` takes the place of the optimizer's, of which it has the factor.
        compression: The same under Horovod's name.
        gradient_predivide_factor, num_groups: As for :class:`DistributedOptimizer`.
        prefix: What the names of its gradients and parameters begin with. Without it trainers are
            numbered, and have names of their own anyway.
        process_set: A :class:`~byteps.common.ProcessSet` of the ranks that train together, from the
            parameters of ``root_rank`` or, where that is none of them, of the first. Others train
            by themselves.
        backup_workers: As for :class:`DistributedOptimizer`; none where a codec has a momentum.

    Raises:
        byteps.errors.ConfigError: for sparse parameters, several devices, or options that are not
            known.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: Mapping[str, Any] | None = None,
        root_rank: int = 0,
        compression_params: Any = None,
        compression: Any = None,
        gradient_predivide_factor: float = 1.0,
        prefix: str | None = None,
        num_groups: int = 0,
        process_set: Any = None,
        backup_workers: int | None = None,
    ) -> None:
        if not isinstance(root_rank, int):
            raise ConfigError(
                f"root_rank={root_rank!r}: a number is wanted; Horovod's arguments from "
                "'compression' on are given by name here"
            )
        if compression is not None and compression_params is not None:
            raise ConfigError("give compression or compression_params, not both")
        self._how = _how(gradient_predivide_factor, num_groups, process_set, backup_workers)
        check_root(root_rank, None)
        if isinstance(optimizer, DistributedOptimizer):
            warnings.warn(
                "DistributedTrainer averages gradients itself: it takes the optimizer that the "
                "DistributedOptimizer wraps",
                stacklevel=2,
            )
            optimizer = optimizer._wrapped
        way, self._momentum = _momentum_apart(
            compression if compression_params is None else compression_params, optimizer_params
        )
        self._encoding = _encoding_of(way)
        if self._momentum is not None:
            _check_without_momentum(optimizer)
            given = (optimizer_params or {}).items()
            optimizer_params = {name: value for name, value in given if name != "momentum"}
        self._velocities: dict[int, Any] = {}
        _kept.owners.add(self)
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
        if prefix is None:
            # Two trainers of a process have gradients of the same numbers.
            number = _registry.count_up("trainers of MXNet")
            prefix = f"trainer_{number}." if number else ""
        self._prefix = prefix
        self._sent: set[_registry.Tensor] = set()
        self._rate: float | None = None
        # Who joins an elastic job gets them with its state: the others would not answer here.
        if not self._how.takes_part() or elastic.awaits_state():
            return
        ranks = self._how.ranks()
        root = root_rank if ranks is None or root_rank in ranks else ranks[0]
        params = enumerate(self._params)
        broadcast_gluon(
            [(f"{prefix}parameter_{index}", param) for index, param in params], root, ranks
        )

    def _allreduce_grads(self) -> None:
        if not self._how.takes_part():
            return
        ranks, factor, backups = self._how.ranks(), self._how.factor, self._backups()
        self._follow_rate()
        for index, param in enumerate(self._params):
            if param.grad_req != "null":
                grad, name = param.grad(), self._name_of(index)
                self._add_momentum(index, grad)
                reductions.scale(grad, 1 / factor)
                sent = _engine.exchange(
                    *(grad, name, "average", 0, -index, self._encoding),
                    ranks=ranks,
                    backups=backups,
                )
                reductions.scale(grad, factor)
                self._sent.add(sent)

    def _backups(self) -> Backups:
        why = "what the codec's momentum keeps would be wrong without a contribution"
        return self._how.backups().unless(None if self._momentum is None else why)

    def _add_momentum(self, index: int, grad: Any) -> None:
        """Nesterov's, in front of the codec, also of arrays that are too small to be encoded."""
        if self._momentum is None:
            return
        plain = grad.astype("float32")
        before = self._velocities.get(index)
        now = plain if before is None else self._momentum * before + plain
        grad += (self._momentum * now).astype(grad.dtype)
        # What is not finite is told once, and would stay for ever.
        self._velocities[index] = mx.nd.where(
            mx.nd.abs(now) < float("inf"), now, mx.nd.zeros_like(now)
        )

    def velocities(self) -> dict[str, Any]:
        """What momentum the codec has, by the names of the gradients."""
        kept = self._velocities.items()
        return {self._name_of(index): one.asnumpy().ravel() for index, one in kept}

    def put_velocity(self, name: str, values: Any) -> bool:
        """Goes on with what :meth:`velocities` has told of one, if it is one of this trainer's."""
        names = {} if self._momentum is None else dict(enumerate(self._params))
        for index, param in names.items():
            if self._name_of(index) == name:
                if np.size(values) != np.prod(param.shape):
                    elements = np.prod(param.shape)
                    raise ConfigError(
                        f"'{name}' has {elements} elements, and the state is of {np.size(values)}"
                    )
                self._velocities[index] = mx.nd.array(values).reshape(param.shape)
                return True
        return False

    def _name_of(self, index: int) -> str:
        return f"{self._prefix}gradient_{index}"

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


def _momentum_apart(compression: Any, optimizer_params: Any) -> tuple[Any, float | None]:
    """The same without momentum, and its factor: as BytePS has it, the optimizer's if that has one.

    It is the trainer's own business, since small arrays are not encoded and are to have it too.
    """
    if isinstance(compression, Mapping):
        compression = Compression.from_params(compression)
    compression, momentum = without_momentum(compression)
    if momentum is None:
        return compression, None
    return compression, float((optimizer_params or {}).get("momentum", momentum))


def _check_without_momentum(optimizer: Any) -> None:
    """Raises for an optimizer that has a momentum which nobody can take away from it."""
    if getattr(optimizer, "momentum", 0.0):
        raise ConfigError(
            f"the codec has a momentum, and so has the optimizer ({optimizer.momentum}): make it "
            "with momentum=0.0, or leave 'momentum' out of compression_params"
        )


def _encoding_of(compression: Any) -> str | None:
    encoding: str | None = getattr(compression, "encoding", None)
    if compression is not None and encoding is None:
        raise ConfigError(
            f"compression_params={compression!r}: a mapping of BytePS's parameters, or one of "
            "Compression"
        )
    return encoding
