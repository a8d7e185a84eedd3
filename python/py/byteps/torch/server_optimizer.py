"""An optimizer that steps on the servers: ranks push gradients and get parameters."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from byteps import _native, _process_sets, _registry
from byteps._registry import Act, Send
from byteps.errors import ConfigError, UsageError
from byteps.torch import functions, ops
from byteps.torch._gradients import Gradients
from byteps.torch.compression import Compression
from byteps.torch.optimizer import (
    Distributed,
    asked_by_a_scaler,
    become,
    checked,
    complete,
    next_prefix,
)

__all__ = ["ServerOptimizer", "load_server_state_dict", "server_state_dict"]

# How the parameters themselves are called among what servers keep.
MASTER = "master"
_WIRES = {"f32": None, "bf16": "bf16", "fp16": "fp16"}
# What torch's optimizers have that those of servers do not, unless it is this.
_FIXED = {"amsgrad": False, "maximize": False, "differentiable": False, "capturable": False}


def ServerOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    wire: str = "f32",
    overlap: bool = False,
    process_set: Any = None,
) -> torch.optim.Optimizer:
    """Makes ``step()`` push gradients to the servers, which step, and get the new parameters.

    The optimizer itself is changed and returned, as :func:`~byteps.torch.DistributedOptimizer`
    does. It keeps its ``param_groups``, whose learning rates may change from step to step (by a
    scheduler), and no state: moments and parameters in float32 are on the servers, each part on the
    core that averages it. All ranks call ``step()`` as often, at the same learning rates.

    The first ``step()`` begins with the parameters of rank 0, or of the first of the process set,
    on all ranks; so does the first one after a suspend, or in the next epoch of an elastic job,
    with what rank 0 has loaded of a state. Gradients leave in ``step()``: clip them before, or run
    several backward passes. A parameter without a gradient on this rank counts as one of zeros.

    Args:
        optimizer: A ``torch.optim.SGD``, ``Adam`` or ``AdamW``, without ``amsgrad``, ``maximize``,
            ``capturable`` and ``differentiable``. Other options than the learning rate are fixed
            from the first step on.
        named_parameters: ``model.named_parameters()``; the names appear in messages, and in
            :func:`server_state_dict`. Without it the parameters are numbered.
        wire: ``"f32"``, ``"bf16"`` or ``"fp16"``: as what gradients go to the servers and
            parameters come back. Ranks of a host add up gradients in float32 first, and servers
            compute and keep all in float32 whatever this is.
        overlap: Let each gradient leave as soon as ``backward()`` has completed it, at the learning
            rate of then. There is one backward pass to each step then, and gradients that are
            changed after it have left already.
        process_set: A :class:`~byteps.torch.ProcessSet` of the ranks that train together. A rank
            that is none of them steps by itself.

    Raises:
        ConfigError: The optimizer, its options or the types of its parameters are others.
    """
    known = _process_sets.added(process_set)
    if wire not in _WIRES:
        raise ConfigError(f"wire={wire!r}: one of {', '.join(_WIRES)}")
    named = checked(optimizer, named_parameters, 1)
    for group in optimizer.param_groups:
        _text_of(optimizer, group)
    for name, param in named:
        if param.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ConfigError(
                f"parameter '{name}' is of {param.dtype}, and servers step in float32: use it for "
                "parameters of float32, bfloat16 or float16"
            )
    prefix = next_prefix() if known is None else next_prefix(known.process_set_id)
    distributed = become(OnServers, optimizer)
    # It watches no gradients.
    gradients = Gradients((), Compression.none, 1, ops.Average, False, prefix, known)
    gradients.should_synchronize = False
    distributed._byteps = gradients
    distributed._names = {param: name for name, param in named}
    distributed._prefix = f"ServerParam.{prefix.removeprefix('Gradient.')}"
    distributed._encoding = _WIRES[wire]
    distributed._params, distributed._loaded, distributed._job = {}, {}, None
    distributed._rates, distributed._under_way, distributed._hooks = {}, {}, []
    distributed._overlaps = overlap and gradients.size > 1
    distributed._watch(distributed._names)
    return distributed


def server_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """What the servers keep for each parameter, by its name: the steps taken (``"step"``), the
    parameter in float32 (``"master"``), and the moments by torch's names for them.

    All ranks call it together, between steps, and get the same, whole and on the CPU, whatever the
    number of servers. Before the first step of a job, and where a process steps by itself, it is
    what is here of a state, if anything, and nobody is asked.
    """
    return _on_servers(optimizer).server_state()


def load_server_state_dict(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Mapping[str, Any]]
) -> None:
    """Lets the servers go on from a :func:`server_state_dict`, at the next ``step()``; parameters
    are what it says at once.

    All ranks call it together; what rank 0, or the first of the process set, loads is what counts
    for the servers. The job may have another number of servers and ranks than the one that made it.
    What is missing of a parameter begins anew: a master with the parameter, moments with zeros.
    """
    _on_servers(optimizer).load_server_state(state)


def _on_servers(optimizer: torch.optim.Optimizer) -> OnServers:
    if not isinstance(optimizer, OnServers):
        raise UsageError(
            f"{type(optimizer).__name__} keeps its state in this process: pass an optimizer that "
            "ServerOptimizer has made, or use its state_dict()"
        )
    return optimizer


def _text_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> tuple[str, list[str]]:
    """What servers do with the parameters of a group, and torch's names for what they keep beside
    them."""
    for option, value in _FIXED.items():
        if group.get(option, value) != value:
            raise ConfigError(f"{option}={group[option]!r}: servers have no such optimizer")
    decay = float(group["weight_decay"]) if "weight_decay" in group else 0.0
    if isinstance(optimizer, torch.optim.SGD):
        momentum, dampening = float(group["momentum"]), float(group["dampening"])
        nesterov = ",nesterov" if group["nesterov"] else ""
        text = f"sgd(momentum={momentum!r},dampening={dampening!r},weight_decay={decay!r}{nesterov}"
        kept = ["momentum_buffer"]
    elif isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        is_decoupled = isinstance(optimizer, torch.optim.AdamW)
        is_decoupled = bool(group.get("decoupled_weight_decay", is_decoupled))
        beta1, beta2 = map(float, group["betas"])
        text = f"{'adamw' if is_decoupled else 'adam'}(beta1={beta1!r},beta2={beta2!r}"
        text += f",eps={float(group['eps'])!r},weight_decay={decay!r}"
        kept = ["exp_avg", "exp_avg_sq"]
    else:
        raise ConfigError(
            f"servers step as torch.optim.SGD, Adam and AdamW do, not as {type(optimizer).__name__}"
        )
    written, slots = _native.optimizer(f"{text})")
    return written, kept[: slots - 1]


class _Param:
    """A parameter whose value is on the servers."""

    __slots__ = ("kept", "param", "steps", "tensor", "value")

    def __init__(self, param: torch.Tensor, tensor: _registry.Tensor, kept: list[str]) -> None:
        self.param = param
        self.tensor = tensor
        # Names of slots, from 1 on.
        self.kept = kept
        self.steps = 0
        # What travels: a gradient there, the parameter back.
        self.value = torch.empty(param.shape, dtype=torch.float32, device="cpu")

    def put(self, value: torch.Tensor | None) -> None:
        """What is to be sent; nothing that would change what the others send if it is None."""
        if value is None:
            self.value.fill_(-0.0)
        else:
            self.value.copy_(value.to_dense() if value.is_sparse else value)

    def show(self) -> None:
        """Gives the parameter the value."""
        with torch.no_grad():
            self.param.copy_(self.value)


class OnServers(Distributed):
    """An optimizer that steps on the servers."""

    averages_gradients = False
    _names: dict[torch.Tensor, str]
    _prefix: str
    _encoding: str | None
    # Those that servers have, in the job of this number; none has begun if that is None.
    _params: dict[torch.Tensor, _Param]
    _job: int | None
    # With what parameters are to begin, by name.
    _loaded: dict[str, dict[str, Any]]
    _overlaps: bool
    # The options of their groups, of those that servers have.
    _rates: dict[torch.Tensor, dict[str, Any]]
    # Gradients that have left, and at which learning rate.
    _under_way: dict[torch.Tensor, tuple[int, float]]
    _hooks: list[Any]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The options of each group of parameters. An error where a gradient scaler comes for them,
        which would skip steps of single ranks."""
        if "_byteps" in self.__dict__ and asked_by_a_scaler():
            raise UsageError(
                "a gradient scaler skips steps of single ranks, and servers step for all of them: "
                "train in bfloat16 or float32 without one"
            )
        groups: list[dict[str, Any]] = self.__dict__.get("param_groups", [])
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    def synchronize(self) -> None:
        """Does nothing: gradients stay those of this rank until ``step()``."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """An error: there is no step without the other ranks."""
        raise UsageError("skip_synchronize() of a ServerOptimizer: the servers step for all ranks")
        yield

    @property
    def has_begun(self) -> bool:
        """Whether servers of this job have the parameters."""
        return self._byteps.size > 1 and self._job == _registry.job_number()

    @complete
    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Pushes the gradients, lets the servers step, and gets the parameters."""
        self._opt_called = True  # For learning-rate schedulers, which look at it.
        if self._byteps.size == 1:
            step = super(Distributed, self).step
            return step(*args, **kwargs) if closure is None else step(closure, *args, **kwargs)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._begin()
        handles = []
        for group in self.param_groups:
            rate, params = float(group["lr"]), []
            for param in group["params"]:
                if param in self._under_way:
                    handle, left_at = self._under_way[param]
                    handles.append(handle)
                    if left_at != rate:
                        raise UsageError(
                            f"'{self._names[param]}' has left at learning rate {left_at}, and "
                            f"step() comes at {rate}: change it between step() and backward(), or "
                            "pass overlap=False"
                        )
                elif param.requires_grad:
                    params.append(self._params[param])
            for one in params:
                one.put(torch.zeros(()) if one.param.grad is None else one.param.grad.detach())
            if params:
                handles.append(_start(params, Act("step", rate=rate)))
        self._under_way.clear()
        for handle in handles:
            _registry.synchronize(handle)
        for one in self._params.values():
            one.steps += one.param.requires_grad
        return loss

    def release(self) -> None:
        """Watches no gradients any more: the optimizer is made distributed again."""
        for hook in self.__dict__.get("_hooks", ()):
            hook.remove()
        super().release()

    def _watch(self, params: Iterable[torch.Tensor]) -> None:
        if self._overlaps:
            some = [param for param in params if param.is_leaf]
            self._hooks += [param.register_post_accumulate_grad_hook(self._send) for param in some]

    def _send(self, param: torch.Tensor) -> None:
        """A backward pass has completed this gradient. Before the first step in a job it stays."""
        if not self.has_begun or param not in self._params:
            return
        if param in self._under_way:
            raise UsageError(
                f"the gradient of '{self._names[param]}' has left, and a second backward() adds to "
                "it before step(): pass overlap=False to run several"
            )
        one, rate = self._params[param], float(self._rates[param]["lr"])
        assert param.grad is not None
        one.put(param.grad.detach())
        self._under_way[param] = _start([one], Act("step", rate=rate)), rate

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, which the servers get too; all ranks must do it."""
        super(Distributed, self).add_param_group(param_group)
        names = self.__dict__.get("_names")
        if names is not None:
            for param in self.param_groups[-1]["params"]:
                names[param] = f"push_pull.noname.{len(names)}"
            self._watch(self.param_groups[-1]["params"])

    def _begin(self) -> None:
        """Gives the servers those parameters that they do not have: of the root, with what it has
        loaded for them. In a job that has formed again, they have none."""
        if not self.has_begun:
            self._params.clear()
            self._under_way.clear()
        new = []
        for group in self.param_groups:
            text, kept = _text_of(self, group)
            for param in group["params"]:
                if not param.requires_grad:
                    continue
                self._rates[param] = group
                if param not in self._params:
                    new.append(_Param(param, self._declared(param, text), kept))
                elif self._params[param].tensor.store != text:
                    raise ConfigError(
                        f"the options of '{self._names[param]}' have become {text} from "
                        f"{self._params[param].tensor.store}: only learning rates may change. Load "
                        "a state_dict() to begin again with others"
                    )
        if new:
            self._set(new)
        self._params.update((one.param, one) for one in new)
        self._job = _registry.job_number()

    def _declared(self, param: torch.Tensor, text: str) -> _registry.Tensor:
        name = f"{self._prefix}{self._names[param]}"
        tensor = _registry.Tensor(
            name,
            "f32",
            tuple(param.shape),
            ranks=self._byteps.ranks,
            encoding=self._encoding,
            store=text,
        )
        # With other options it is another tensor, on all ranks.
        return _registry.settled(tensor)

    def _set(self, new: Sequence[_Param]) -> None:
        process_set, ranks = self._byteps.process_set, self._byteps.ranks
        root = ranks[0] if ranks else 0
        is_root = _native.rank() == root
        known = self._kept_here()
        own = [known.get(self._names[one.param], {}) for one in new]
        steps = [int(state.get("step", 0)) for state in own]
        number = _registry.count_up((self._prefix, "begin"))
        steps = functions.broadcast_object(
            steps, root, f"{self._prefix}begin.{number}", process_set
        )
        for one, taken in zip(new, steps, strict=True):
            one.steps = taken
        masters = [
            state.get(MASTER, one.param.detach()) if is_root else None
            for one, state in zip(new, own, strict=True)
        ]
        _exchange_by_steps(new, masters, 0)
        for slot in range(1, 3):
            behind = [
                (one, state)
                for one, state in zip(new, own, strict=True)
                if one.steps > 0 and len(one.kept) >= slot
            ]
            values = [
                state.get(one.kept[slot - 1], torch.zeros(())) if is_root else None
                for one, state in behind
            ]
            _exchange_by_steps([one for one, _ in behind], values, slot)
        for one in new:
            self._loaded.pop(self._names[one.param], None)
            self.state.pop(one.param, None)

    def _kept_here(self) -> dict[str, dict[str, Any]]:
        """What the servers do not have: what was loaded, or is left of steps that this process took
        by itself."""
        own = {
            self._names[param]: _counted(state)
            for param, state in self.state.items()
            if param in self._names
        }
        return own | self._loaded

    def fall_back(self, state_dict: dict[str, Any] | None) -> None:
        """Moments and steps of an earlier :meth:`state_dict`, where the job has formed again and
        nothing was loaded since; the parameters stay those of now."""
        if state_dict is None or self.has_begun or self._byteps.size == 1 or self._kept_here():
            return
        loaded = self._by_name(state_dict)
        for kept in loaded.values():
            kept.pop(MASTER, None)
        self._loaded = loaded

    def server_state(self) -> dict[str, dict[str, Any]]:
        """See :func:`server_state_dict`."""
        if not self.has_begun:
            return copy.deepcopy(self._kept_here())
        state: dict[str, dict[str, Any]] = {}
        params = list(self._params.values())
        for one in params:
            state[self._names[one.param]] = {"step": one.steps}
        for slot in range(3):
            some = [one for one in params if len(one.kept) >= slot]
            for one in some:
                one.put(torch.zeros(()))
            if some:
                _registry.synchronize(_start(some, Act("get", slot=slot), _keep))
            for one in some:
                name = one.kept[slot - 1] if slot else MASTER
                state[self._names[one.param]][name] = one.value.clone()
        return state

    def load_server_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """See :func:`load_server_state_dict`."""
        by_name = {name: param for param, name in self._names.items()}
        unknown = sorted(set(state) - set(by_name))
        if unknown:
            raise ConfigError(
                f"the state has '{unknown[0]}', which no parameter of this optimizer is called: "
                "pass the same named_parameters"
            )
        for name, kept in state.items():
            for what, value in kept.items():
                if what != "step" and tuple(value.shape) != tuple(by_name[name].shape):
                    raise ConfigError(
                        f"the state of '{name}' has a {what} of shape {tuple(value.shape)}, and "
                        f"the parameter is of shape {tuple(by_name[name].shape)}"
                    )
        self.state.clear()
        self._loaded = {name: copy.deepcopy(dict(kept)) for name, kept in state.items()}
        for name, kept in self._loaded.items():
            if MASTER in kept:
                with torch.no_grad():
                    by_name[name].copy_(kept[MASTER])
        self._job = None

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with what the servers keep, and the parameters in float32 as ``"master"``.
        All ranks call it together, as :func:`server_state_dict`."""
        if self._byteps.size == 1:
            return super().state_dict()
        kept = self.server_state()
        params = [param for group in self.param_groups for param in group["params"]]
        state = {}
        for number, param in enumerate(params):
            known = kept.get(self._names[param])
            if known is not None:
                state[number] = {**known, "step": torch.tensor(float(known.get("step", 0)))}
        return {"state": state, "param_groups": super().state_dict()["param_groups"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a :meth:`state_dict`, or that of the torch optimizer; the servers do at the
        next ``step()``, with what the root has loaded."""
        if self._byteps.size == 1:
            return super().load_state_dict(state_dict)
        # Without the casts to the types of parameters: state is kept in float32.
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self.load_server_state(self._by_name(state_dict))
        return None

    def _by_name(self, state_dict: dict[str, Any]) -> dict[str, dict[str, Any]]:
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        names = {number: self._names[param] for number, param in zip(numbers, params, strict=True)}
        return {names[number]: _counted(kept) for number, kept in state_dict["state"].items()}


def _counted(kept: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a parameter as servers keep it, of one as torch does, whose SGD counts no
    steps."""
    known = {name: value for name, value in kept.items() if value is not None}
    known["step"] = int(known.get("step", 1))
    return known


def _start(params: Sequence[_Param], act: Act, finish: Callable[[Any], None] | None = None) -> int:
    addresses = [(one.tensor, one.value.data_ptr()) for one in params]
    sends = [Send(tensor, address, address) for tensor, address in addresses]
    return _registry.start(sends, list(params), finish or _show, act=act)


def _exchange_by_steps(
    params: Sequence[_Param], values: Sequence[torch.Tensor | None], slot: int
) -> None:
    """Sets a slot of these parameters. Those behind equally many steps go together."""
    for one, value in zip(params, values, strict=True):
        one.put(value)
    for steps in dict.fromkeys(one.steps for one in params):
        some = [one for one in params if one.steps == steps]
        act = Act("set", slot=slot, steps=steps)
        _registry.synchronize(_start(some, act, None if slot == 0 else _keep))


def _show(params: Sequence[_Param]) -> None:
    for one in params:
        one.show()


def _keep(_: Sequence[_Param]) -> None:
    """What has come stays where it is."""
