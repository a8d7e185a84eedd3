"""The GPU of this process, among those that JAX sees.

A process has one: its ranks' places, and how the GPUs of a host add up among themselves, follow
from that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from byteps import _native, _registry
from byteps.errors import ConfigError

#: As JAX calls the devices that CUDA drives.
PLATFORM = "gpu"


def use(device: Any, jointly: bool) -> None:
    """To be called before arrays of this device are declared or sent; opens it, with all ranks if
    ``jointly``, which is how arrays that are on the GPUs of all ranks want it."""
    _registry.use_gpu(device.local_hardware_id, jointly)


def use_in_programs(jointly: bool) -> None:
    """To be called when a program is compiled: it is opened now, or with the job that runs it."""
    try:
        devices = jax.local_devices(backend=PLATFORM)
    except RuntimeError:
        return  # It is compiled for another machine.
    ordinal = _of_programs(devices).local_hardware_id
    _native.xla_gpu(ordinal)
    _registry.send_programs_from(ordinal)
    if _native.is_initialized():
        _registry.use_gpu(ordinal, jointly)


def _of_programs(devices: Sequence[Any]) -> Any:
    """The one for which programs are compiled, which JAX does not say meanwhile."""
    chosen = getattr(jax.config, "jax_default_device", None)
    is_open = [one for one in devices if one.local_hardware_id == _registry.open_gpu()]
    if is_open:
        return is_open[0]
    if len(devices) == 1:
        return devices[0]
    if chosen in devices:
        return chosen
    raise ConfigError(
        f"JAX sees {len(devices)} GPUs in this process, and byteps sends from one: start a process "
        "for each GPU, each with its own in CUDA_VISIBLE_DEVICES, or name this one's by "
        "jax.config.update('jax_default_device', jax.local_devices()[byteps.jax.local_rank()])"
    )
