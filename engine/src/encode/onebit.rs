//! One bit per element, its sign, and one scale for the part.
//!
//! The wire holds the scale as an f32, then the bits: 1 where `value < 0` (zeros of either sign
//! count as positive), eight to a byte, the first in the lowest bit. An element decodes to `-scale`
//! where its bit is 1, else to `scale`. With scaling, `scale = sum(|value|) / elements`; without,
//! it is 1. A part that holds a NaN or an infinity has the scale NaN, so that all of it decodes to
//! NaN. A part without elements has the scale 0.
//!
//! Sources: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; the scale is that
//! of Karimireddy et al., "Error Feedback Fixes SignSGD", arXiv:1901.09847, and of BytePS.

#![forbid(unsafe_code)]

use super::fold::{INFINITY, Sink, leading_f32, magnitude_max, sum_of_magnitudes};
use super::packed::{self, BLOCK};

const SCALE: usize = size_of::<f32>();

/// Bytes of a part of so many elements.
pub(super) const fn wire_bytes(elements: usize) -> usize {
    SCALE + packed::wire_bytes(elements, 1)
}

/// Encodes a part. `wire` is as long as [`wire_bytes`] says.
#[inline(always)]
pub(super) fn encode(values: &[f32], scaling: bool, wire: &mut [u8]) {
    let (scale_bytes, bits) = wire.split_at_mut(SCALE);
    scale_bytes.copy_from_slice(&scale(values, scaling).to_le_bytes());
    for (block, out) in values.chunks(BLOCK).zip(bits.chunks_mut(BLOCK / 8)) {
        let mut codes = [0; BLOCK];
        if block.len() == BLOCK {
            signs(&block[..BLOCK], &mut codes);
        } else {
            signs(block, &mut codes);
        }
        packed::pack::<1>(&codes, out);
    }
}

#[inline(always)]
fn signs(block: &[f32], codes: &mut [u8; BLOCK]) {
    for (code, value) in codes.iter_mut().zip(block) {
        *code = u8::from(*value < 0.0);
    }
}

#[inline(always)]
#[allow(clippy::cast_precision_loss, reason = "a part has far fewer than 2^53 elements")]
#[allow(clippy::cast_possible_truncation, reason = "a mean of f32 is in the range of f32")]
fn scale(values: &[f32], scaling: bool) -> f32 {
    if values.is_empty() {
        return 0.0;
    }
    if scaling {
        let mean = sum_of_magnitudes(values) / values.len() as f64;
        if mean.is_finite() { mean as f32 } else { f32::NAN }
    } else if magnitude_max(values) < INFINITY {
        1.0
    } else {
        f32::NAN
    }
}

/// Decodes a part.
#[inline(always)]
pub(super) fn decode<S: Sink>(wire: &[u8], values: &mut [f32]) {
    let scale = leading_f32(wire).to_bits();
    let bits = wire.get(SCALE..).unwrap_or_default();
    for (block, bits) in values.chunks_mut(BLOCK).zip(bits.chunks(BLOCK / 8)) {
        let mut codes = [0; BLOCK];
        packed::unpack::<1>(bits, &mut codes);
        if block.len() == BLOCK {
            put::<S>(scale, &codes, &mut block[..BLOCK]);
        } else {
            put::<S>(scale, &codes, block);
        }
    }
}

#[inline(always)]
fn put<S: Sink>(scale: u32, codes: &[u8; BLOCK], block: &mut [f32]) {
    for (value, code) in block.iter_mut().zip(codes) {
        S::put(value, f32::from_bits(scale ^ u32::from(*code) << 31));
    }
}

/// The bits behind the last element's, of a part whose length has been checked.
pub(super) fn padding(wire: &[u8], elements: usize) -> u8 {
    packed::padding(elements, 1, wire.get(SCALE..).unwrap_or_default())
}
