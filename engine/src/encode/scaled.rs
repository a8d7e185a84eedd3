//! Codes of one byte in blocks with a scale of their own: int8 and the two 8-bit floats.
//!
//! The wire holds, for each block of 128 elements (the last may be shorter), the scale as an f32
//! and one byte per element. `scale = max(absmax / MAX, 2^-126)`, where `MAX` is the largest code's
//! value; an element is encoded as `value / scale`, rounded to a code, and decoded as
//! `code * scale`. A block that holds a NaN or an infinity has the scale NaN and codes 0, so that
//! all of it decodes to NaN. A block of zeros has codes 0 and decodes to zeros; the sign of a zero
//! is lost by int8 alone.
//!
//! The 8-bit floats are those of the OCP 8-bit Floating Point Specification (OFP8), revision 1.0:
//! Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433. A scale for each block
//! follows Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", arXiv:1511.04561.
//! Stochastic rounding goes up with the probability of the fraction that is cut off, so that its
//! mean is the value: Gupta et al., "Deep Learning with Limited Numerical Precision",
//! arXiv:1502.02551.

#![forbid(unsafe_code)]

use super::fold::{INFINITY, MAGNITUDE, Sink, leading_f32, magnitude_max};
use super::random::Stream;
use crate::base::word;

/// Elements that share a scale.
const BLOCK: usize = 128;
/// Bytes of a scale.
const SCALE: usize = size_of::<f32>();

/// Bytes of a part of so many elements.
pub(super) const fn wire_bytes(elements: usize) -> usize {
    elements + elements.div_ceil(BLOCK) * SCALE
}

/// One byte per element.
pub(super) trait Code {
    /// The largest value of a code.
    const MAX: f32;
    /// The nearest code; of two equally near, the even one. `scaled` is at most a few units in the
    /// last place above `MAX`.
    fn nearest(scaled: f32) -> u8;
    /// The code below or above, with the probability of the distance from the other.
    fn random(scaled: f32, random: u32) -> u8;
    /// What a code stands for.
    fn value(code: u8) -> f32;
}

/// Whole numbers from -127 to 127 in two's complement.
pub(super) struct Int8;

impl Int8 {
    /// Added to a number between -128 and 128, it leaves the nearest whole number in the lowest
    /// bits.
    const WHOLE: f32 = 12_582_912.0;
    /// Likewise, with 15 bits of fraction.
    const FIXED: f32 = 384.0;
    const FRACTION: u32 = 15;

    /// `-MAX..=MAX`, of a number that may exceed it by a rounding error.
    #[inline(always)]
    fn clamp(scaled: f32) -> f32 {
        let scaled = if scaled > Self::MAX { Self::MAX } else { scaled };
        if scaled < -Self::MAX { -Self::MAX } else { scaled }
    }
}

impl Code for Int8 {
    const MAX: f32 = 127.0;

    #[inline(always)]
    #[allow(clippy::cast_possible_truncation, reason = "the low byte is the number")]
    fn nearest(scaled: f32) -> u8 {
        (Self::clamp(scaled) + Self::WHOLE).to_bits() as u8
    }

    #[inline(always)]
    #[allow(clippy::cast_possible_truncation, reason = "the low byte is the number")]
    fn random(scaled: f32, random: u32) -> u8 {
        let fixed = (Self::clamp(scaled) + Self::FIXED).to_bits();
        // 384 in fixed point is 3 * 2^7 above the bits of 2^8: a multiple of 256 less 128.
        let whole = (fixed + (random >> (32 - Self::FRACTION))) >> Self::FRACTION;
        whole.wrapping_sub(Self::FIXED.to_bits() >> Self::FRACTION) as u8
    }

    #[inline(always)]
    #[allow(clippy::cast_possible_wrap, reason = "two's complement")]
    fn value(code: u8) -> f32 {
        f32::from(code as i8)
    }
}

/// An 8-bit float: a sign, 7 - `MANTISSA` bits of exponent, and `MANTISSA` bits.
pub(super) struct Float<const MANTISSA: u32>;

/// E4M3: bias 7, no infinities, NaN is 0x7f, at most 448.
pub(super) type E4m3 = Float<3>;
/// E5M2: bias 15, infinity is 0x7c, at most 57344.
pub(super) type E5m2 = Float<2>;

impl<const MANTISSA: u32> Float<MANTISSA> {
    /// Mantissa bits that an f32 has and a code lacks.
    const SHIFT: u32 = 23 - MANTISSA;
    /// The difference of the exponents' biases.
    const BIAS: u32 = 127 - ((1 << (6 - MANTISSA)) - 1);
    /// The smallest normal number, as f32.
    const NORMAL_MIN: f32 = f32::from_bits((Self::BIAS + 1) << 23);
    /// Added to a magnitude below `NORMAL_MIN`, it leaves the nearest multiple of the smallest
    /// subnormal number in the lowest bits.
    const WHOLE: f32 = f32::from_bits((Self::BIAS + 1 + Self::SHIFT) << 23);
    /// The largest finite code. Of E4M3, only the code of all ones is no number.
    const CODE_MAX: u32 = if MANTISSA == 3 { 0x7e } else { 0x7b };

    #[inline(always)]
    #[allow(clippy::cast_possible_truncation, reason = "a code has 8 bits")]
    fn signed(scaled: f32, code: u32) -> u8 {
        let code = if code > Self::CODE_MAX { Self::CODE_MAX } else { code };
        (scaled.to_bits() >> 24 & 0x80 | code) as u8
    }
}

impl<const MANTISSA: u32> Code for Float<MANTISSA> {
    const MAX: f32 = if MANTISSA == 3 { 448.0 } else { 57344.0 };

    #[inline(always)]
    fn nearest(scaled: f32) -> u8 {
        let magnitude = scaled.abs();
        let bits = magnitude.to_bits();
        let odd = bits >> Self::SHIFT & 1;
        let normal = (bits + (1 << (Self::SHIFT - 1)) - 1 + odd) >> Self::SHIFT;
        let normal = normal.wrapping_sub(Self::BIAS << MANTISSA);
        let subnormal = (magnitude + Self::WHOLE).to_bits().wrapping_sub(Self::WHOLE.to_bits());
        Self::signed(scaled, if magnitude < Self::NORMAL_MIN { subnormal } else { normal })
    }

    #[inline(always)]
    fn random(scaled: f32, random: u32) -> u8 {
        let magnitude = scaled.abs();
        let is_normal = magnitude >= Self::NORMAL_MIN;
        // A subnormal number plus the smallest normal one is a number whose steps are as wide.
        let fixed = if is_normal { magnitude } else { magnitude + Self::NORMAL_MIN };
        let code = (fixed.to_bits() + (random >> (32 - Self::SHIFT))) >> Self::SHIFT;
        let bias = if is_normal { Self::BIAS } else { Self::BIAS + 1 };
        Self::signed(scaled, code - (bias << MANTISSA))
    }

    #[inline(always)]
    fn value(code: u8) -> f32 {
        let magnitude = u32::from(code) & 0x7f;
        let shifted = magnitude << Self::SHIFT;
        let normal = shifted + (Self::BIAS << 23);
        let one_above = f32::from_bits(shifted + ((Self::BIAS + 1) << 23));
        let subnormal = (one_above - Self::NORMAL_MIN).to_bits();
        let bits = if magnitude < 1 << MANTISSA { subnormal } else { normal };
        let bits = if magnitude > Self::CODE_MAX { shifted | INFINITY } else { bits };
        f32::from_bits(bits | (u32::from(code) & 0x80) << 24)
    }
}

/// Encodes a part. `wire` is as long as [`wire_bytes`] says.
#[inline(always)]
pub(super) fn encode<C: Code>(values: &[f32], random: Option<Stream>, wire: &mut [u8]) {
    match random {
        None => blocks(values, wire, |_, scaled| C::nearest(scaled), C::MAX),
        Some(stream) => {
            let code = |index, scaled| C::random(scaled, stream.at(index));
            blocks(values, wire, code, C::MAX);
        }
    }
}

#[inline(always)]
fn blocks(values: &[f32], wire: &mut [u8], code: impl Fn(u32, f32) -> u8, max: f32) {
    let mut first = 0;
    for (block, out) in values.chunks(BLOCK).zip(wire.chunks_mut(SCALE + BLOCK)) {
        if block.len() == BLOCK {
            // The same, with a length that the compiler knows.
            encode_block(&block[..BLOCK], first, &mut out[..SCALE + BLOCK], &code, max);
        } else {
            encode_block(block, first, out, &code, max);
        }
        first += word(BLOCK);
    }
}

#[inline(always)]
fn encode_block(
    block: &[f32],
    first: u32,
    out: &mut [u8],
    code: &impl Fn(u32, f32) -> u8,
    max: f32,
) {
    let (scale_bytes, codes) = out.split_at_mut(SCALE);
    let largest = magnitude_max(block);
    if largest & MAGNITUDE >= INFINITY {
        scale_bytes.copy_from_slice(&f32::NAN.to_le_bytes());
        codes.fill(0);
        return;
    }
    let scale = (f32::from_bits(largest) / max).max(f32::MIN_POSITIVE);
    scale_bytes.copy_from_slice(&scale.to_le_bytes());
    let mut index = first;
    for (out, value) in codes.iter_mut().zip(block) {
        *out = code(index, value / scale);
        index = index.wrapping_add(1);
    }
}

/// Decodes a part.
#[inline(always)]
pub(super) fn decode<C: Code, S: Sink>(wire: &[u8], values: &mut [f32]) {
    for (block, wire) in values.chunks_mut(BLOCK).zip(wire.chunks(SCALE + BLOCK)) {
        if block.len() == BLOCK && wire.len() == SCALE + BLOCK {
            decode_block::<C, S>(&wire[..SCALE + BLOCK], &mut block[..BLOCK]);
        } else {
            decode_block::<C, S>(wire, block);
        }
    }
}

#[inline(always)]
fn decode_block<C: Code, S: Sink>(wire: &[u8], block: &mut [f32]) {
    let scale = leading_f32(wire);
    for (value, code) in block.iter_mut().zip(wire.iter().skip(SCALE)) {
        S::put(value, C::value(*code) * scale);
    }
}
