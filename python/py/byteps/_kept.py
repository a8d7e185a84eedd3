"""What codecs keep on this rank, as the module of every framework but torch hands it out: in arrays
of numpy."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from byteps import _registry
from byteps.errors import ConfigError

__all__ = ["compression_state_dict", "load_compression_state_dict"]


class Owner(Protocol):
    """Who keeps the momentum of its gradients by itself, in front of codecs."""

    def velocities(self) -> dict[str, Any]:
        """Flat arrays of float32, by the names of the gradients."""

    def put_velocity(self, name: str, values: Any) -> bool:
        """Goes on with such an array; false if the name is none of its gradients'."""


#: All that live.
owners: weakref.WeakSet[Any] = weakref.WeakSet()

#: By framework: what waits for the exchanges that a program has called, where the framework runs
#: them later.
drains: dict[str, Callable[[], None]] = {}


def compression_state_dict() -> dict[str, dict[str, Any]]:
    """What codecs keep on this rank from one round to the next, for a checkpoint.

    To be called between two steps. Waits for the end of the last one, also where the framework
    runs it later than it is called. Each rank has its own, and saves its own.

    Returns:
        By name, ``residue`` (what error feedback adds to the next gradient) and ``velocity``
        (Nesterov's momentum): flat arrays of float32 with an element for each of the gradient's,
        or none where nothing is kept.

    Raises:
        HorovodInternalError: the job is over, and the last step may not have ended.
    """
    _drain()
    state: dict[str, dict[str, Any]] = {
        tensor.name: {
            "residue": np.frombuffer(kept.residue, np.float32).copy(),
            "velocity": np.frombuffer(kept.velocity, np.float32).copy(),
        }
        for tensor, kept in _registry.kept().items()
    }
    for owner in list(owners):
        for name, velocity in owner.velocities().items():
            state.setdefault(name, {"residue": np.empty(0, np.float32)})["velocity"] = velocity
    return state


def load_compression_state_dict(state: Mapping[str, Mapping[str, Any]]) -> None:
    """Goes on with what :func:`compression_state_dict` has returned on this rank.

    To be called once the names are declared (the optimizer is distributed, or, where names are
    declared by their first exchange, that was made), with the model and the compression that it
    had. Waits as that function does.

    Raises:
        byteps.errors.ConfigError: for a name that is not declared with a codec that keeps
            something, or another number of elements.
    """
    _drain()
    known = {tensor.name: tensor for tensor in _registry.encoded()}
    what = {}
    for name, kept in state.items():
        velocity, residue = kept["velocity"], kept["residue"]
        if len(velocity) and any(owner.put_velocity(name, velocity) for owner in list(owners)):
            if not len(residue):
                continue
            velocity = velocity[:0]
        tensor = known.get(name)
        if tensor is None:
            raise ConfigError(
                f"'{name}' keeps nothing here: load this once the same model has the same "
                "compression"
            )
        elements = math.prod(tensor.shape)
        both = [np.asarray(values, np.float32).ravel() for values in (residue, velocity)]
        for values in both:
            if values.size not in (0, elements):
                raise ConfigError(
                    f"'{name}' has {elements} elements, and the state is of {values.size}"
                )
        what[tensor] = _registry.Kept(*(values.tobytes() for values in both))
    _registry.keep(what)


def _drain() -> None:
    for drain in list(drains.values()):
        drain()
