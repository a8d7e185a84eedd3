"""What each codec makes of a part, by numpy: its formula as it was published, and where.

Written for clarity, from the papers and the formats' definitions, and not from the engine's code.
A part here is a whole flat array of float32. Codecs that round at random have two values for each
element, and the probability of the upper one.
"""

from __future__ import annotations

import numpy as np

BLOCK = 128
SMALLEST = np.float32(2.0**-126)


def by_half(values):
    """IEEE 754-2008, binary16: rounded to nearest, ties to even."""
    return values.astype(np.float16).astype(np.float32)


def by_bfloat(values):
    """bfloat16: the upper half of a float32, rounded to nearest, ties to even; Wang and Kanwar,
    "BFloat16: The secret to high performance on Cloud TPUs", 2019. Of finite numbers."""
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = bits + 0x7FFF + (bits >> 16 & 1)
    return (rounded & 0xFFFF0000).astype(np.uint32).view(np.float32)


def float_codes(mantissa, bias, largest):
    """The magnitudes of an 8-bit float of OFP8 1.0 (Micikevicius et al., "FP8 Formats for Deep
    Learning", arXiv:2209.05433), rising, so that the even ones among them end in a 0 bit."""
    values = []
    for code in range(128):
        exponent, fraction = code >> mantissa, (code % (1 << mantissa)) / (1 << mantissa)
        value = (
            fraction * 2.0 ** (1 - bias)
            if exponent == 0
            else (1 + fraction) * 2.0 ** (exponent - bias)
        )
        if value <= largest:
            values.append(value)
    return np.array(values)


E4M3 = float_codes(3, 7, 448)
E5M2 = float_codes(2, 15, 57344)
INT8 = np.arange(128.0)


def in_blocks(values, codes):
    """Each element over the scale of its block of 128, and these scales, as one for each element:
    ``scale = max(|block|) / max(codes)`` (Dettmers, "8-Bit Approximations for Parallelism in Deep
    Learning", arXiv:1511.04561)."""
    blocks = np.arange(len(values)) // BLOCK
    largest = np.zeros(blocks[-1] + 1, np.float32)
    np.maximum.at(largest, blocks, np.abs(values))
    scales = np.maximum(largest / np.float32(codes[-1]), SMALLEST)[blocks]
    return values / scales, scales


def neighbours(magnitudes, codes):
    """The codes at or below and at or above, and how far it is on the way from one to the other."""
    at = np.clip(np.searchsorted(codes, magnitudes, side="right") - 1, 0, len(codes) - 2)
    below, above = codes[at], codes[at + 1]
    return at, below, above, np.clip((magnitudes - below) / (above - below), 0, 1)


def to_nearest(codes):
    """To the nearest code of a block's, of two equally near to the even one."""

    def rounded(values):
        scaled, scales = in_blocks(values, codes)
        at, below, above, way = neighbours(np.abs(scaled).astype(np.float64), codes)
        up = (way > 0.5) | ((way == 0.5) & (at % 2 == 1))
        magnitudes = np.where(up, above, below).astype(np.float32)
        return np.copysign(magnitudes, values) * scales

    return rounded


def at_random(codes):
    """To the code below or above in magnitude, the latter with the probability of the way to it, so
    that the mean is the value (Gupta et al., "Deep Learning with Limited Numerical Precision",
    arXiv:1502.02551)."""

    def between(values):
        scaled, scales = in_blocks(values, codes)
        _, below, above, way = neighbours(np.abs(scaled).astype(np.float64), codes)
        signed = np.copysign(scales.astype(np.float64), values)
        return below * signed, above * signed, way

    return between


def linear(levels):
    """QSGD (Alistarh et al., arXiv:1610.02132), with the largest magnitude for the norm: levels
    ``q norm / s`` for ``q`` from 0 to ``s``."""
    return lambda values: _dithered(values, np.arange(levels + 1.0) / levels)


def natural(levels):
    """Natural dithering (Horváth et al., "Natural Compression for Distributed Deep Learning",
    arXiv:1905.10988): 0, and powers of two below the norm."""
    powers = 2.0 ** (np.arange(levels) - (levels - 1))
    return lambda values: _dithered(values, np.concatenate([[0.0], powers]))


def _dithered(values, codes):
    norm = np.abs(values).max().astype(np.float64)
    _, below, above, way = neighbours(np.abs(values) / norm, codes)
    return np.copysign(below * norm, values), np.copysign(above * norm, values), way


def by_sign(values):
    """1-bit SGD (Seide et al. 2014, "1-bit stochastic gradient descent and its application to
    data-parallel distributed training of speech DNNs"), as signSGD has it (Bernstein et al.,
    arXiv:1802.04434); what is not negative is 1."""
    return np.where(np.signbit(values), -1, 1).astype(np.float32)


def by_scaled_sign(values):
    """``sign(x) |x|_1 / n``: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient
    Compression Schemes", arXiv:1901.09847."""
    return by_sign(values) * np.abs(values).mean(dtype=np.float64).astype(np.float32)


def by_size(share):
    """The largest magnitudes (Aji and Heafield, "Sparse Communication for Distributed Gradient
    Descent", arXiv:1704.05021), of equal ones the earlier."""

    def sparse(values):
        result = np.zeros_like(values)
        kept = np.argsort(-np.abs(values), kind="stable")[: int(len(values) * share)]
        result[kept] = values[kept]
        return result

    return sparse
