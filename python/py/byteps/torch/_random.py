"""Where generators of random numbers are, as part of the state of a training."""

from __future__ import annotations

import importlib
import random
import sys
from typing import Any

import torch

from byteps.errors import ConfigError

# Not that of all of NumPy, which torch imports: who has drawn from it has imported this.
_NUMPY = "numpy.random"


class RandomState:
    """Where generators of random numbers are, as part of a
    :class:`~byteps.torch.elastic.TorchState`.

    They are those of Python, of torch on the CPU and, if this process has begun to use CUDA, on all
    of its GPUs, the global one of NumPy if ``numpy.random`` is imported, and these ``generators``.

    All ranks go on with the numbers of the one whose state they get, from the first
    :meth:`~byteps.elastic.State.sync` on: what they were seeded with by rank is lost then, and they
    draw the same numbers. With ``per_rank`` each keeps a stream of its own: it goes back to this
    rank's last commit, and is not sent, so a rank that comes later goes on with what it has seeded.

    GPUs are counted from the selected one on (``torch.cuda.set_device``), and behind the last comes
    the first: what a rank drew on the GPU that it selected, the others go on with on theirs. So
    select it before the state is made, and the same one from then on. Where there are fewer GPUs
    than in the state, the last ones of that are left out; where there are more, theirs stay as they
    are; and so do all of a process that has not begun to use CUDA.

    Args:
        generators: Those of ``torch.Generator``, ``numpy.random.Generator``,
            ``numpy.random.RandomState`` or ``random.Random`` that the program has made; as many on
            all ranks, and in the same order.
        per_rank: Whether each rank draws numbers of its own.

    Raises:
        ConfigError: for what is no generator.
    """

    def __init__(self, *generators: Any, per_rank: bool = False) -> None:
        for place, generator in enumerate(generators):
            if not _is_generator(generator):
                raise ConfigError(
                    f"RandomState: argument {place} is a {type(generator).__name__}: pass "
                    "generators of torch, NumPy or Python, and seeds to these"
                )
        self.generators = generators
        self.per_rank = per_rank

    def state_dict(self) -> dict[str, Any]:
        """Where the generators are."""
        state: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "generators": [_state_of(generator) for generator in self.generators],
        }
        if torch.cuda.is_initialized():
            state["cuda"] = [torch.cuda.get_rng_state(device) for device in _devices()]
        if _NUMPY in sys.modules:
            state["numpy"] = sys.modules[_NUMPY].get_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets them there.

        Raises:
            ConfigError: The state is of another number of ``generators``.
        """
        states = state["generators"]
        if len(states) != len(self.generators):
            raise ConfigError(
                f"RandomState: the state is of {len(states)} generators of the program, and here "
                f"it has {len(self.generators)}: all ranks pass the same ones, in the same order"
            )
        for generator, one in zip(self.generators, states, strict=True):
            _set(generator, one)
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        if "cuda" in state and torch.cuda.is_initialized():
            for device, one in zip(_devices(), state["cuda"], strict=False):
                torch.cuda.set_rng_state(one, device)
        if "numpy" in state:
            # This rank may be about to draw its first number.
            importlib.import_module(_NUMPY).set_state(state["numpy"])


def _devices() -> list[int]:
    """The GPUs of this process, from the selected one on."""
    count, selected = torch.cuda.device_count(), torch.cuda.current_device()
    return [(selected + place) % count for place in range(count)]


def _is_generator(value: Any) -> bool:
    # Who has made one of NumPy has imported that.
    numpy = sys.modules.get(_NUMPY)
    of_numpy = (numpy.Generator, numpy.RandomState) if numpy else ()
    return isinstance(value, (torch.Generator, random.Random, *of_numpy))


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state()


def _set(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
