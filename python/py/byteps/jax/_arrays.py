"""From a JAX array to an address and back, outside of compiled programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from byteps import _dtypes, _registry
from byteps.errors import TensorError

# XLA uses memory of others as it is where it begins at a multiple of this.
_ALIGNMENT = 64


class How(NamedTuple):
    """What is done with one array of several that are exchanged together."""

    name: str | None
    operation: str
    root: int
    priority: int
    encoding: str | None = None

    def derived(self, suffix: str) -> How:
        """The same under another name, if it has one."""
        return self if self.name is None else self._replace(name=self.name + suffix)


def dtype_of(array: Any, name: str | None) -> str:
    """What the engine calls its type, or the error that says which types can be summed."""
    return _dtypes.summed(str(array.dtype), _label(name))


def _label(name: str | None) -> str:
    return f"'{name}'" if name else "an array without a name"


def tensor_of(array: Any, how: How) -> _registry.Tensor:
    """What the ranks must agree on. ``array`` has ``shape`` and ``dtype``."""
    dtype = dtype_of(array, how.name)
    return _registry.Tensor(
        how.name or "", dtype, tuple(array.shape), how.operation, how.root, encoding=how.encoding
    )


def check_place(array: Any, how: How) -> None:
    """Raises unless the array is in host memory of this process."""
    if not array.is_fully_addressable:
        raise TensorError(
            f"push_pull of {_label(how.name)}: parts of the array are in other processes "
            "(jax.distributed): pass arrays of this process's own devices"
        )
    for device in array.devices():
        if device.platform != "cpu":
            raise TensorError(elsewhere(_label(how.name), device.platform))


def elsewhere(what: str, platform: str) -> str:
    """Why an array on such a device is refused."""
    return (
        f"push_pull of {what}: byteps.jax sends arrays from host memory, and this one is on a "
        f"device of kind '{platform}': set JAX_PLATFORMS=cpu, or move it by "
        "jax.device_put(array, jax.devices('cpu')[0]); byteps.torch sends from GPUs"
    )


def _room(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """An array of any values that XLA can use without a copy."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.empty(count + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    room: np.ndarray[Any, Any] = memory[start : start + count].view(dtype).reshape(shape)
    return room


def start(
    arrays: Sequence[jax.Array],
    hows: Sequence[How],
    then: Callable[[list[jax.Array]], Any],
) -> int:
    """Starts to exchange these arrays; a handle of the registry's, whose result is that of
    ``then`` for the new arrays."""
    chosen = iter(_registry.unnamed(sum(not how.name for how in hows)))
    sends, memory = [], []
    for array, how in zip(arrays, hows, strict=True):
        check_place(array, how)
        named = how if how.name else how._replace(name=next(chosen))
        source = np.ascontiguousarray(np.asarray(array))
        target = _room(array.shape, array.dtype)
        memory.append((array, source, target))
        addresses = source.ctypes.data, target.ctypes.data
        sends.append(_registry.Send(tensor_of(array, named), *addresses, how.priority))

    def finish(memory: Any) -> Any:
        return then([_like(array, target) for array, _, target in memory])

    return _registry.start(sends, memory, finish)


def _like(array: jax.Array, values: np.ndarray[Any, Any]) -> jax.Array:
    """A new array where the other one is: these values, which it uses as they lie if it can."""
    place = array.sharding if getattr(array, "committed", True) else None
    new: jax.Array = jax.device_put(values, place)
    return new


def exchange(arrays: Sequence[jax.Array], hows: Sequence[How]) -> list[jax.Array]:
    """The results of these arrays, once they are there."""
    result: list[jax.Array] = _registry.synchronize(start(arrays, hows, list))
    return result
