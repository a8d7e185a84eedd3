"""From a JAX array to an address and back, outside of compiled programs.

JAX runs its own work on streams that it shows to nobody, so the host waits for an array of a GPU
before it is handed over, and for the result before JAX sees it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from byteps import _dtypes, _registry
from byteps._backups import Backups
from byteps.errors import TensorError
from byteps.jax import _gpu

# XLA uses memory of others as it is where it begins at a multiple of this.
_ALIGNMENT = 64


class How(NamedTuple):
    """What is done with one array of several that are exchanged together: on all ranks, or on
    these. ``backups`` is a :func:`byteps._backups.number_of`."""

    name: str | None
    operation: str
    root: int
    priority: int
    encoding: str | None = None
    ranks: tuple[int, ...] | None = None
    backups: int = 0

    def derived(self, suffix: str) -> How:
        """The same under another name, if it has one."""
        return self if self.name is None else self._replace(name=self.name + suffix)


def drain() -> None:
    """Waits for what programs are computing. What failed says so where its array is used."""
    for array in jax.live_arrays():
        # Of any type; and another thread may delete it meanwhile.
        with contextlib.suppress(Exception):
            array.block_until_ready()


def dtype_of(array: Any, name: str | None) -> str:
    """What the engine calls its type, or the error that says which types can be summed."""
    return _dtypes.summed(str(array.dtype), _label(name))


def _label(name: str | None) -> str:
    return f"'{name}'" if name else "an array without a name"


def tensor_of(array: Any, how: How, on_gpu: bool = False) -> _registry.Tensor:
    """What the ranks must agree on. ``array`` has ``shape`` and ``dtype``."""
    dtype = dtype_of(array, how.name)
    tensor = _registry.Tensor(
        how.name or "",
        dtype,
        tuple(array.shape),
        how.operation,
        how.root,
        on_gpu,
        ranks=how.ranks,
        encoding=how.encoding,
    )
    return Backups.of_program(how.backups).over(tensor)


def gpu_of(array: Any, how: How) -> Any:
    """The GPU that the array is on; None if it is in host memory. Raises for what is elsewhere."""
    if not array.is_fully_addressable:
        raise TensorError(
            f"push_pull of {_label(how.name)}: parts of the array are in other processes "
            "(jax.distributed): pass arrays of this process's own devices"
        )
    devices = list(array.devices())
    for device in devices:
        if device.platform not in ("cpu", _gpu.PLATFORM):
            raise TensorError(elsewhere(_label(how.name), device.platform))
    if devices[0].platform == "cpu":
        return None
    if len(devices) > 1:
        raise TensorError(
            f"push_pull of {_label(how.name)}: the array is on {len(devices)} GPUs, and byteps "
            "sends from one in each process: start a process for each GPU, each with its own in "
            "CUDA_VISIBLE_DEVICES"
        )
    return devices[0]


def is_of_host(array: Any, how: How) -> bool:
    """Whether an array on a GPU is one of the host to the job: NCCL does not divide whole numbers
    as everybody else does, and reduces among all of a host."""
    if how.ranks is not None:
        return True
    return how.operation == "average" and not jnp.issubdtype(array.dtype, jnp.floating)


def elsewhere(what: str, platform: str) -> str:
    """Why an array on such a device is refused."""
    return (
        f"push_pull of {what}: byteps.jax sends arrays from host memory and from NVIDIA GPUs, and "
        f"this one is on a device of kind '{platform}': set JAX_PLATFORMS=cpu, or move it by "
        "jax.device_put(array, jax.devices('cpu')[0])"
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
    # All of a call are for the same ranks.
    ranks = hows[0].ranks if hows else None
    chosen = iter(_registry.unnamed(sum(not how.name for how in hows), ranks))
    places = [gpu_of(array, how) for array, how in zip(arrays, hows, strict=True)]
    targets: list[Any] = []
    tensors = []
    for array, how, place in zip(arrays, hows, places, strict=True):
        named = how if how.name else how._replace(name=next(chosen))
        tensors.append(tensor_of(array, named, place is not None and not is_of_host(array, how)))
        if place is None:
            targets.append(_room(array.shape, array.dtype))
        else:
            _gpu.use(place, tensors[-1].device)
            targets.append(jnp.zeros(array.shape, array.dtype, device=place))
    on_gpu = [
        pair for *pair, place in zip(arrays, targets, places, strict=True) if place is not None
    ]
    jax.block_until_ready(on_gpu)
    sends, memory = [], []
    for array, how, tensor, place, target in zip(
        arrays, hows, tensors, places, targets, strict=True
    ):
        source: Any
        if place is None:
            source = np.ascontiguousarray(np.asarray(array))
            addresses = source.ctypes.data, target.ctypes.data
        else:
            source = array
            addresses = array.unsafe_buffer_pointer(), target.unsafe_buffer_pointer()
        memory.append((array, source, target))
        sends.append(_registry.Send(tensor, *addresses, how.priority, place is not None))

    def finish(memory: Any) -> Any:
        return then([_like(array, target) for array, _, target in memory])

    return _registry.start(sends, memory, finish, _default_stream, host_waits=True)


def _default_stream() -> int:
    """Nothing is enqueued there, and nothing is left to wait for."""
    return 0


def _like(array: jax.Array, values: Any) -> jax.Array:
    """A new array where the other one is: these values, which it uses as they lie if it can."""
    if isinstance(values, jax.Array):
        return values
    place = array.sharding if getattr(array, "committed", True) else None
    new: jax.Array = jax.device_put(values, place)
    return new


def exchange(arrays: Sequence[jax.Array], hows: Sequence[How]) -> list[jax.Array]:
    """The results of these arrays, once they are there."""
    result: list[jax.Array] = _registry.synchronize(start(arrays, hows, list))
    return result
