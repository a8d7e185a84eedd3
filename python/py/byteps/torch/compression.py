"""Casts that halve what is sent: chosen per call or per optimizer, undone on arrival."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Compression", "Compressor"]


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

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        smaller, context = self.inner.compress(tensor / self.factor)
        return smaller, context

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        result: torch.Tensor = self.inner.decompress(tensor, ctx) * self.factor
        return result


class Compression:
    """The ways there are. The servers sum in float32 and round once, whichever is chosen."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
