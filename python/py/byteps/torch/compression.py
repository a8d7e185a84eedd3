"""How gradients are made smaller on their way: chosen per call or per optimizer, undone on arrival.

There are two ways. A *cast* (:attr:`Compression.fp16`, :attr:`Compression.bf16`) makes a smaller
tensor in the framework, so all that happens to it after that is with fewer bytes: in the memory of
a GPU, between the ranks of a host, on the line. A :class:`Codec` leaves tensors as they are, and
the engine encodes what goes to servers and what comes back from them: on the line alone, and by any
of its codecs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from byteps import _codecs, _kept
from byteps._codecs import encoding_of
from byteps.torch import _velocities

__all__ = [
    "Codec",
    "Compression",
    "Compressor",
    "compression_state_dict",
    "load_compression_state_dict",
]


class Compressor:
    """How a tensor is made smaller before it is sent. Subclass it for a way of your own."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor to send, and what :meth:`decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor as the caller wants it."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class _CastCompressor(Compressor):
    wire: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize > cls.wire.itemsize:
            return tensor.to(cls.wire), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_CastCompressor):
    """Sends floats as IEEE half precision; values beyond 65504 become infinite."""

    wire = torch.float16


class BF16Compressor(_CastCompressor):
    """Sends floats as bfloat16: the range of float32 with 8 bits of precision."""

    wire = torch.bfloat16


class Predivided:
    """Divides by a factor before the average and multiplies by it after, around another way."""

    def __init__(self, inner: Any, factor: float) -> None:
        self.inner, self.factor = inner, factor
        self.encoding = encoding_of(inner)

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        smaller, context = self.inner.compress(tensor / self.factor)
        return smaller, context

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        result: torch.Tensor = self.inner.decompress(tensor, ctx) * self.factor
        return result


def without_momentum(compression: Any) -> tuple[Any, float | None]:
    """The same without momentum, and the factor of that, which is None where there is none."""
    if isinstance(compression, Predivided):
        inner, momentum = without_momentum(compression.inner)
        return Predivided(inner, compression.factor), momentum
    return _codecs.without_momentum(compression)


class Codec(_codecs.Codec, NoneCompressor):
    __doc__ = _codecs.Codec.__doc__


def compression_state_dict() -> dict[str, dict[str, torch.Tensor]]:
    """What codecs keep on this rank from one round to the next, for a checkpoint.

    To be called between two steps. Each rank has its own, and saves its own.

    Returns:
        By name, ``residue`` (what error feedback adds to the next gradient) and ``velocity``
        (Nesterov's momentum): flat tensors of float32 with an element for each of the gradient's,
        or none where nothing is kept.
    """
    state = {
        name: {which: torch.from_numpy(values) for which, values in kept.items()}
        for name, kept in _kept.compression_state_dict().items()
    }
    for name, velocity in _velocities.named().items():
        state.setdefault(name, {"residue": torch.empty(0)})["velocity"] = velocity
    return state


def load_compression_state_dict(state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Goes on with what :func:`compression_state_dict` has returned on this rank.

    To be called once the optimizer is distributed, with the model and the compression that it had.

    Raises:
        byteps.errors.ConfigError: for a name that is not declared with a codec that keeps
            something, or another number of elements.
    """
    places, engines, moving = _velocities.places(), {}, []
    for name, kept in state.items():
        plain = {which: _plain(values) for which, values in kept.items()}
        if name in places and kept["velocity"].numel():
            places[name].check(name, kept["velocity"])
            moving.append((places[name], kept["velocity"]))
            plain["velocity"] = plain["velocity"][:0]
            if not plain["residue"].size:
                continue
        engines[name] = plain
    _kept.load_compression_state_dict(engines)
    for place, velocity in moving:
        place.put(velocity)


def _plain(values: torch.Tensor) -> Any:
    return values.detach().to("cpu", torch.float32).contiguous().numpy()


class Compression(_codecs.Codecs):
    """The ways there are.

    ``none``, ``fp16`` and ``bf16`` are the framework's: the servers sum in float32 and round once,
    whichever is chosen. All others are :class:`Codec` objects, made by calling them. With
    ``error_feedback`` each end adds what a codec has left out of one round to the next one; the
    codecs that leave much out have it unless told otherwise. ``momentum`` is Nesterov's, in front
    of that: leave it out of the optimizer then.
    """

    codec = Codec
    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
