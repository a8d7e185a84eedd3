//! The 16-bit floats and their conversions, one element at a time: the specification of widening
//! and narrowing.
//!
//! Invariant: widening is exact; narrowing rounds once, to nearest even, keeps subnormals,
//! overflows to infinity, and makes a quiet NaN of any NaN. Nothing here depends on the CPU having
//! half-precision instructions.

#![forbid(unsafe_code)]

/// IEEE 754 binary16, as its bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub struct F16(pub u16);

/// bfloat16 (the upper half of a binary32), as its bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub struct BF16(pub u16);

/// The bits of an infinite f32; larger magnitudes are NaN.
const F32_INFINITY: u32 = 0x7f80_0000;
/// Makes an f32 NaN quiet.
const F32_QUIET: u32 = 0x0040_0000;
/// The bits of an infinite f16.
const F16_INFINITY: u32 = 0x7c00;
/// The f32 halfway between the largest f16 and the next step: from here on, to nearest even is
/// infinity.
const F16_OVERFLOW: u32 = 0x477f_f000;
/// The f32 that is the smallest normal f16: 2^-14.
const F16_NORMAL_MIN: u32 = 0x3880_0000;
/// Mantissa bits that an f16 lacks.
const F16_SHIFT: u32 = 13;
/// 2^112: the difference of the two exponent biases (127 and 15).
const BIAS_SCALE: f32 = f32::from_bits((127 + 112) << 23);

impl F16 {
    /// The same number as f32.
    #[inline]
    #[must_use]
    pub fn to_f32(self) -> f32 {
        let sign = (u32::from(self.0) & 0x8000) << 16;
        let magnitude = u32::from(self.0) & 0x7fff;
        // Read as an f32, the shifted bits are too small by the difference of the biases; the
        // multiplication mends that exactly, for subnormals too.
        let shifted = magnitude << F16_SHIFT;
        let bits = if magnitude < F16_INFINITY {
            (f32::from_bits(shifted) * BIAS_SCALE).to_bits()
        } else if magnitude == F16_INFINITY {
            F32_INFINITY
        } else {
            shifted | F32_INFINITY | F32_QUIET
        };
        f32::from_bits(sign | bits)
    }

    /// The nearest f16; of two equally near, the even one.
    #[inline]
    #[must_use]
    pub fn from_f32(value: f32) -> F16 {
        let bits = value.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        let rounded = if magnitude > F32_INFINITY {
            0x7e00
        } else if magnitude >= F16_OVERFLOW {
            F16_INFINITY
        } else if magnitude >= F16_NORMAL_MIN {
            // Just under half a step, and one more if the last kept bit is odd: carries exactly
            // when it should.
            let odd = (magnitude >> F16_SHIFT) & 1;
            ((magnitude + 0xfff + odd) >> F16_SHIFT) - (112 << 10)
        } else {
            // The step of f32 in [0.5, 1) is 2^-24, that of a subnormal f16: the addition rounds as
            // we need, and the low bits of its result count those steps.
            (f32::from_bits(magnitude) + 0.5).to_bits() - 0.5_f32.to_bits()
        };
        F16(low_half((bits >> 16) & 0x8000 | rounded))
    }
}

impl BF16 {
    /// The same number as f32.
    #[inline]
    #[must_use]
    pub fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }

    /// The nearest bf16; of two equally near, the even one.
    #[inline]
    #[must_use]
    pub fn from_f32(value: f32) -> BF16 {
        let bits = value.to_bits();
        if bits & 0x7fff_ffff > F32_INFINITY {
            // Rounding could carry a NaN's mantissa over into the sign, and truncating could leave
            // an infinity.
            return BF16(low_half((bits | F32_QUIET) >> 16));
        }
        let odd = (bits >> 16) & 1;
        BF16(low_half((bits + 0x7fff + odd) >> 16))
    }
}

#[inline]
#[allow(clippy::cast_possible_truncation, reason = "the callers have cleared the upper half")]
fn low_half(bits: u32) -> u16 {
    bits as u16
}
