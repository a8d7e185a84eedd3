"""How gradients are made smaller on their way: by a cast in TensorFlow, or by the engine's codecs.

A cast makes a smaller tensor, so all that happens to it after that is with fewer bytes. A
:class:`Codec` leaves tensors as they are, and the engine encodes what goes to servers and back.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from byteps import _codecs

__all__ = ["Codec", "Compression", "Compressor"]


class Compressor:
    """How a tensor is made smaller before it is sent. Subclass it for a way of your own."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor to send, and what :meth:`decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The tensor as the caller wants it."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class _CastCompressor(Compressor):
    wire: Any

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        if tensor.dtype.is_floating and tensor.dtype.size > cls.wire.size:
            return tf.cast(tensor, cls.wire), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else tf.cast(tensor, ctx)


class FP16Compressor(_CastCompressor):
    """Sends floats as IEEE half precision; values beyond 65504 become infinite."""

    wire = tf.float16


class BF16Compressor(_CastCompressor):
    """Sends floats as bfloat16: the range of float32 with 8 bits of precision."""

    wire = tf.bfloat16


class Codec(_codecs.Codec, NoneCompressor):
    __doc__ = _codecs.Codec.__doc__


class Compression(_codecs.Codecs):
    """The ways there are.

    ``none``, ``fp16`` and ``bf16`` are TensorFlow's; all others are :class:`Codec` objects, made by
    calling them, which docs/compression.md describes.
    """

    codec = Codec
    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
