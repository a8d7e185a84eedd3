"""How gradients are made smaller on their way: chosen per call or per optimizer, undone on arrival.

There are two ways. A *cast* (:attr:`Compression.fp16`, :attr:`Compression.bf16`) makes a smaller
tensor in the framework, so all that happens to it after that is with fewer bytes: in the memory of
a GPU, between the ranks of a host, on the line. A :class:`Codec` leaves tensors as they are, and
the engine encodes what goes to servers and what comes back from them: on the line alone, and by any
of its codecs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from byteps import _native, _registry
from byteps.errors import ConfigError

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


class Codec(NoneCompressor):
    """A codec of the engine: float gradients are encoded on their way to servers and back.

    Make one with the functions of :class:`Compression`, or from the text by which the engine knows
    it. Sums and averages of float tensors are encoded, all else and tensors below
    ``BYTEPS_MIN_COMPRESS_BYTES`` (64 KiB) travel as they are. Ranks of one host add their gradients
    as they are, and what is encoded is their sum; where all ranks are on one host, nothing is.

    Args:
        encoding: A codec, and what is done in front of it: ``"int8"``,
            ``"topk(k=0.01)+feedback+momentum(0.9)"``; docs/compression.md has all of them.

    Raises:
        byteps.errors.ConfigError: for a text that is none, with what is possible.
    """

    def __init__(self, encoding: str) -> None:
        self.encoding = _native.encoding(encoding)

    def __repr__(self) -> str:
        return f"Codec({self.encoding!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Codec) and other.encoding == self.encoding

    def __hash__(self) -> int:
        return hash(self.encoding)


def encoding_of(compression: Any) -> str | None:
    """How the engine is to encode what this compression leaves."""
    encoding: str | None = getattr(compression, "encoding", None)
    return encoding


def encoding_for(compression: Any, dtype: torch.dtype, operation: str) -> str | None:
    """The same for a tensor that is sent as this type: floats are encoded that are added."""
    is_added = operation in ("average", "sum")
    return encoding_of(compression) if dtype.is_floating_point and is_added else None


def compression_state_dict() -> dict[str, dict[str, torch.Tensor]]:
    """What codecs keep on this rank from one round to the next, for a checkpoint.

    To be called between two steps. Each rank has its own, and saves its own.

    Returns:
        By name, ``residue`` (what error feedback adds to the next gradient) and ``velocity``
        (Nesterov's momentum): flat tensors of float32 with an element for each of the gradient's,
        or none where nothing is kept.
    """
    return {
        tensor.name: {
            "residue": torch.frombuffer(bytearray(kept.residue), dtype=torch.float32).clone()
            if kept.residue
            else torch.empty(0),
            "velocity": torch.frombuffer(bytearray(kept.velocity), dtype=torch.float32).clone()
            if kept.velocity
            else torch.empty(0),
        }
        for tensor, kept in _registry.kept().items()
    }


def load_compression_state_dict(state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Goes on with what :func:`compression_state_dict` has returned on this rank.

    To be called once the optimizer is distributed, with the model and the compression that it had.

    Raises:
        byteps.errors.ConfigError: for a name that is not declared with a codec that keeps
            something, or another number of elements.
    """
    known = {tensor.name: tensor for tensor in _registry.encoded()}
    what = {}
    for name, kept in state.items():
        tensor = known.get(name)
        if tensor is None:
            raise ConfigError(
                f"'{name}' keeps nothing here: load this once the same model has the same "
                "compression"
            )
        elements = math.prod(tensor.shape)
        both = [kept["residue"], kept["velocity"]]
        for values in both:
            if values.numel() not in (0, elements):
                raise ConfigError(
                    f"'{name}' has {elements} elements, and the state is of {values.numel()}"
                )
        what[tensor] = _registry.Kept(*(_bytes(values) for values in both))
    _registry.keep(what)


def _bytes(values: torch.Tensor) -> bytes:
    plain = values.detach().to("cpu", torch.float32).contiguous()
    return plain.numpy().tobytes()


def _text(codec: str, *arguments: str, error_feedback: bool, momentum: float | None) -> str:
    inside = ", ".join(argument for argument in arguments if argument)
    text = f"{codec}({inside})" if inside else codec
    if error_feedback:
        text += "+feedback"
    return text if momentum is None else f"{text}+momentum({momentum})"


class Compression:
    """The ways there are.

    ``none``, ``fp16`` and ``bf16`` are the framework's: the servers sum in float32 and round once,
    whichever is chosen. All others are :class:`Codec` objects, made by calling them. With
    ``error_feedback`` each end adds what a codec has left out of one round to the next one; the
    codecs that leave much out have it unless told otherwise. ``momentum`` is Nesterov's, in front
    of that: leave it out of the optimizer then.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor

    @staticmethod
    def wire_fp16(error_feedback: bool = False, momentum: float | None = None) -> Codec:
        """IEEE half precision on the line alone: half of the bytes."""
        return Codec(_text("fp16", error_feedback=error_feedback, momentum=momentum))

    @staticmethod
    def wire_bf16(error_feedback: bool = False, momentum: float | None = None) -> Codec:
        """bfloat16 on the line alone: half of the bytes, of every magnitude."""
        return Codec(_text("bf16", error_feedback=error_feedback, momentum=momentum))

    @staticmethod
    def fp8_e4m3(
        stochastic: bool = False, error_feedback: bool = False, momentum: float | None = None
    ) -> Codec:
        """Eight bits, three of them of the mantissa, and a scale for each 128 elements."""
        rounding = "stochastic" if stochastic else ""
        return Codec(_text("fp8_e4m3", rounding, error_feedback=error_feedback, momentum=momentum))

    @staticmethod
    def fp8_e5m2(
        stochastic: bool = False, error_feedback: bool = False, momentum: float | None = None
    ) -> Codec:
        """Eight bits, two of them of the mantissa, and a scale for each 128 elements."""
        rounding = "stochastic" if stochastic else ""
        return Codec(_text("fp8_e5m2", rounding, error_feedback=error_feedback, momentum=momentum))

    @staticmethod
    def int8(
        stochastic: bool = False, error_feedback: bool = False, momentum: float | None = None
    ) -> Codec:
        """Whole numbers from -127 to 127, and a scale for each 128 elements."""
        rounding = "stochastic" if stochastic else ""
        return Codec(_text("int8", rounding, error_feedback=error_feedback, momentum=momentum))

    @staticmethod
    def onebit(
        scaling: bool = True, error_feedback: bool = True, momentum: float | None = None
    ) -> Codec:
        """The sign; with ``scaling``, times the mean magnitude of a part, else times 1."""
        scaled = "scaling" if scaling else ""
        return Codec(_text("onebit", scaled, error_feedback=error_feedback, momentum=momentum))

    @staticmethod
    def topk(k: float, error_feedback: bool = True, momentum: float | None = None) -> Codec:
        """The ``k`` elements of each part with the largest magnitudes; below 1, that share."""
        return Codec(_text("topk", f"k={k}", error_feedback=error_feedback, momentum=momentum))

    @staticmethod
    def randomk(
        k: float, seed: int = 0, error_feedback: bool = True, momentum: float | None = None
    ) -> Codec:
        """``k`` elements of each part at random, the same on all ranks; below 1, that share."""
        return Codec(
            _text(
                "randomk",
                f"k={k}",
                f"seed={seed}",
                error_feedback=error_feedback,
                momentum=momentum,
            )
        )

    @staticmethod
    def dithering(
        levels: int = 4,
        partition: str = "linear",
        normalize: str = "max",
        seed: int = 0,
        error_feedback: bool = False,
        momentum: float | None = None,
    ) -> Codec:
        """Rounded at random to one of so many levels of a part's norm, right on average."""
        arguments = f"levels={levels}", partition, normalize, f"seed={seed}"
        return Codec(
            _text("dithering", *arguments, error_feedback=error_feedback, momentum=momentum)
        )

    @staticmethod
    def from_params(params: Mapping[str, Any]) -> Any:
        """What BytePS's ``compression_params`` say, with its names and defaults.

        Args:
            params: ``compressor`` (``onebit``, ``topk``, ``randomk`` or ``dithering``), ``ef``
                (``vanilla``), ``momentum`` (``nesterov``) with ``momentum_mu`` (0.9), ``scaling``,
                ``k``, ``seed``, ``partition``, ``normalize``; with or without BytePS's prefix
                ``byteps_``. ``fp16`` alone is the cast.

        Raises:
            byteps.errors.ConfigError: for a key or a value that is not known.
        """
        return _from_params(dict(params))


_PARAMS = {
    "compressor_type": "compressor",
    "ef_type": "ef",
    "error_feedback_type": "ef",
    "momentum_type": "momentum",
    "compressor_onebit_scaling": "scaling",
    "compressor_k": "k",
    "dithering_partition": "partition",
    "dithering_normalize": "normalize",
}


def _from_params(given: dict[str, Any]) -> Any:
    params: dict[str, Any] = {}
    for name, value in given.items():
        plain = name.removeprefix("byteps_")
        params[_PARAMS.get(plain, plain)] = value
    compressor = params.pop("compressor", None)
    is_half = _is_true(params.pop("fp16", False))
    if compressor is None:
        if params:
            raise ConfigError(
                f"compression_params {given}: without 'compressor' nothing but 'fp16'"
            )
        return Compression.fp16 if is_half else Compression.none
    common: dict[str, Any] = {
        "error_feedback": _one_of(params.pop("ef", None), "ef", "vanilla"),
        "momentum": None,
    }
    if _one_of(params.pop("momentum", None), "momentum", "nesterov"):
        common["momentum"] = float(params.pop("momentum_mu", 0.9))
    take = params.pop
    if compressor == "onebit":
        codec = Compression.onebit(_is_true(take("scaling", False)), **common)
    elif compressor == "topk":
        codec = Compression.topk(_number(take("k", 0.01)), **common)
    elif compressor == "randomk":
        codec = Compression.randomk(_number(take("k", 0.01)), int(take("seed", 0)), **common)
    elif compressor == "dithering":
        levels, seed = int(take("k", 4)), int(take("seed", 0))
        partition, normalize = take("partition", "linear"), take("normalize", "max")
        codec = Compression.dithering(levels, partition, normalize, seed, **common)
    else:
        raise ConfigError(
            f"compressor={compressor!r}: onebit, topk, randomk and dithering are BytePS's; for "
            "others pass one of byteps.torch.Compression"
        )
    if params:
        raise ConfigError(f"compression_params: {compressor} has no {', '.join(sorted(params))}")
    return codec


def _is_true(value: Any) -> bool:
    return value in (True, 1, "1", "true", "True")


def _one_of(value: Any, name: str, known: str) -> bool:
    if value in (None, "", False):
        return False
    if value != known:
        raise ConfigError(f"{name}={value!r}: '{known}' is possible")
    return True


def _number(value: Any) -> float:
    number = float(value)
    return int(number) if number >= 1 else number
