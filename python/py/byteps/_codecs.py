"""The codecs of the engine, as all frameworks name them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from byteps import _native
from byteps.errors import ConfigError


class Codec:
    """A codec of the engine: float gradients are encoded on their way to servers and back.

    Make one with the functions of ``Compression``, or from the text by which the engine knows it.
    Sums and averages of float tensors are encoded, all else and tensors below
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


_MOMENTUM = re.compile(r"\+momentum\(([^)]*)\)")


def without_momentum(compression: Any) -> tuple[Any, float | None]:
    """The same without momentum, and the factor of that, which is None where there is none."""
    found = _MOMENTUM.search(encoding_of(compression) or "")
    if found is None or not isinstance(compression, Codec):
        return compression, None
    return type(compression)(_MOMENTUM.sub("", compression.encoding)), float(found[1])


def encoding_for(compression: Any, is_float: bool, operation: str) -> str | None:
    """The same for a tensor of this kind: floats are encoded that are added."""
    return encoding_of(compression) if is_float and operation in ("average", "sum") else None


def _text(codec: str, *arguments: str, error_feedback: bool, momentum: float | None) -> str:
    inside = ", ".join(argument for argument in arguments if argument)
    text = f"{codec}({inside})" if inside else codec
    if error_feedback:
        text += "+feedback"
    return text if momentum is None else f"{text}+momentum({momentum})"


class Codecs:
    """The codecs by name.

    With ``error_feedback`` each end adds what a codec has left out of one round to the next one;
    the codecs that leave much out have it unless told otherwise. ``momentum`` is Nesterov's, in
    front of that: leave it out of the optimizer then.
    """

    #: What a framework calls a codec.
    codec: type[Codec] = Codec
    #: No compression, and a cast to half precision, of frameworks that have one.
    none: Any = None
    fp16: Any = None

    @classmethod
    def auto(cls, codec: Any = "int8") -> Any:
        """As far as it saves time: as they are, in bfloat16, or by this codec.

        Each process measures how fast its line and the codec are, and chooses for each part of a
        tensor anew every few rounds; all ranks get the same result. Nothing is kept between rounds,
        so only codecs that need no error feedback can be named. On a line that is faster than
        processors encode, nothing is encoded.

        Args:
            codec: The strongest that may be used, as its text or as what one of these returns:
                ``fp16``, ``bf16``, ``fp8_e4m3``, ``fp8_e5m2``, ``int8`` or ``dithering``.

        Raises:
            byteps.errors.ConfigError: for one that leaves too much out, or with error feedback or
                momentum.
        """
        return cls.codec(f"auto({encoding_of(codec) or codec})")

    @classmethod
    def wire_fp16(cls, error_feedback: bool = False, momentum: float | None = None) -> Any:
        """IEEE half precision on the line alone: half of the bytes."""
        return cls.codec(_text("fp16", error_feedback=error_feedback, momentum=momentum))

    @classmethod
    def wire_bf16(cls, error_feedback: bool = False, momentum: float | None = None) -> Any:
        """bfloat16 on the line alone: half of the bytes, of every magnitude."""
        return cls.codec(_text("bf16", error_feedback=error_feedback, momentum=momentum))

    @classmethod
    def fp8_e4m3(
        cls, stochastic: bool = False, error_feedback: bool = False, momentum: float | None = None
    ) -> Any:
        """Eight bits, three of them of the mantissa, and a scale for each 128 elements."""
        rounding = "stochastic" if stochastic else ""
        return cls.codec(
            _text("fp8_e4m3", rounding, error_feedback=error_feedback, momentum=momentum)
        )

    @classmethod
    def fp8_e5m2(
        cls, stochastic: bool = False, error_feedback: bool = False, momentum: float | None = None
    ) -> Any:
        """Eight bits, two of them of the mantissa, and a scale for each 128 elements."""
        rounding = "stochastic" if stochastic else ""
        return cls.codec(
            _text("fp8_e5m2", rounding, error_feedback=error_feedback, momentum=momentum)
        )

    @classmethod
    def int8(
        cls, stochastic: bool = False, error_feedback: bool = False, momentum: float | None = None
    ) -> Any:
        """Whole numbers from -127 to 127, and a scale for each 128 elements."""
        rounding = "stochastic" if stochastic else ""
        return cls.codec(_text("int8", rounding, error_feedback=error_feedback, momentum=momentum))

    @classmethod
    def onebit(
        cls, scaling: bool = True, error_feedback: bool = True, momentum: float | None = None
    ) -> Any:
        """The sign; with ``scaling``, times the mean magnitude of a part, else times 1."""
        scaled = "scaling" if scaling else ""
        return cls.codec(_text("onebit", scaled, error_feedback=error_feedback, momentum=momentum))

    @classmethod
    def topk(cls, k: float, error_feedback: bool = True, momentum: float | None = None) -> Any:
        """The ``k`` elements of each part with the largest magnitudes; below 1, that share."""
        return cls.codec(_text("topk", f"k={k}", error_feedback=error_feedback, momentum=momentum))

    @classmethod
    def randomk(
        cls, k: float, seed: int = 0, error_feedback: bool = True, momentum: float | None = None
    ) -> Any:
        """``k`` elements of each part at random, the same on all ranks; below 1, that share."""
        return cls.codec(
            _text(
                "randomk",
                f"k={k}",
                f"seed={seed}",
                error_feedback=error_feedback,
                momentum=momentum,
            )
        )

    @classmethod
    def dithering(
        cls,
        levels: int = 4,
        partition: str = "linear",
        normalize: str = "max",
        seed: int = 0,
        error_feedback: bool = False,
        momentum: float | None = None,
    ) -> Any:
        """Rounded at random to one of so many levels of a part's norm, right on average."""
        arguments = f"levels={levels}", partition, normalize, f"seed={seed}"
        return cls.codec(
            _text("dithering", *arguments, error_feedback=error_feedback, momentum=momentum)
        )

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Any:
        """What BytePS's ``compression_params`` say, with its names and defaults.

        Args:
            params: ``compressor`` (``onebit``, ``topk``, ``randomk`` or ``dithering``), ``ef``
                (``vanilla``), ``momentum`` (``nesterov``) with ``momentum_mu`` (0.9), ``scaling``,
                ``k``, ``seed``, ``partition``, ``normalize``; with or without BytePS's prefix
                ``byteps_``. ``fp16`` alone is the cast.

        Raises:
            byteps.errors.ConfigError: for a key or a value that is not known.
        """
        return _from_params(cls, dict(params))


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


def _from_params(codecs: type[Codecs], given: dict[str, Any]) -> Any:
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
        if is_half and codecs.fp16 is None:
            raise ConfigError("compression_params: there is no cast to fp16 here, but wire_fp16()")
        return codecs.fp16 if is_half else codecs.none
    common: dict[str, Any] = {
        "error_feedback": _one_of(params.pop("ef", None), "ef", "vanilla"),
        "momentum": None,
    }
    if _one_of(params.pop("momentum", None), "momentum", "nesterov"):
        common["momentum"] = float(params.pop("momentum_mu", 0.9))
    take = params.pop
    if compressor == "onebit":
        codec = codecs.onebit(_is_true(take("scaling", False)), **common)
    elif compressor == "topk":
        codec = codecs.topk(_number(take("k", 0.01)), **common)
    elif compressor == "randomk":
        codec = codecs.randomk(_number(take("k", 0.01)), int(take("seed", 0)), **common)
    elif compressor == "dithering":
        levels, seed = int(take("k", 4)), int(take("seed", 0))
        partition, normalize = take("partition", "linear"), take("normalize", "max")
        codec = codecs.dithering(levels, partition, normalize, seed, **common)
    else:
        raise ConfigError(
            f"compressor={compressor!r}: onebit, topk, randomk and dithering are BytePS's; for "
            "others pass one of Compression"
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
