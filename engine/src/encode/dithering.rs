//! A few levels between 0 and the part's norm, rounded at random so that the mean is the value.
//!
//! The wire holds `step` as an f32, then one code of `W` bits per element, packed as
//! [`packed`] says: the sign in the highest bit, below it the level `q`, where `W` is 1 more than
//! the bits of the number of levels `s`.
//!
//! - Linear: `step = norm / s`. Of `y = |value| / step`, `q` is `floor(y)`, or one more with the
//!   probability `y - floor(y)`. It decodes to `±q * step`.
//! - Natural: `step = norm / 2^(s-1)`. Below 1, `y` becomes 0, or 1 with the probability `y`;
//!   above, with `f` the power of two at or below `y`, it becomes `f`, or `2f` with the probability
//!   `(y - f) / f`. `q` is 0 for 0, else 1 more than the exponent. It decodes to
//!   `±2^(q-1) * step`.
//!
//! `norm` is the largest magnitude or the root of the sum of squares, and `step` at least 2^-126. A
//! part with a NaN, an infinity, or a norm beyond the range of f32 has the step NaN and codes 0:
//! all of it decodes to NaN. A part of zeros decodes to zeros.
//!
//! Sources: linear is QSGD, Alistarh et al., arXiv:1610.02132; natural is Horváth et al., "Natural
//! Compression for Distributed Deep Learning", arXiv:1905.10988; formulas as BytePS has them, whose
//! codes are variable in length.

#![forbid(unsafe_code)]

use super::fold::{INFINITY, Sink, leading_f32, magnitude_max, sum_of_squares};
use super::packed::{self, BLOCK};
use super::random::Stream;
use super::{Norm, Spacing};
use crate::base::word;

const STEP: usize = size_of::<f32>();

/// How many levels, and how they lie.
#[derive(Clone, Copy)]
pub(super) struct Levels {
    /// From 1 to [`levels_max`].
    pub(super) count: u8,
    spacing: Spacing,
}

/// A code has at most 8 bits, of which one is the sign; natural levels below 2^-31 of the norm
/// would be lost in the rounding of a sum.
pub(super) const fn levels_max(spacing: Spacing) -> u8 {
    match spacing {
        Spacing::Linear => 127,
        Spacing::Natural => 32,
    }
}

impl Levels {
    pub(super) fn new(count: u8, spacing: Spacing) -> Levels {
        Levels { count: count.clamp(1, levels_max(spacing)), spacing }
    }

    /// Bits of a code: 2 to 8.
    pub(super) const fn width(self) -> usize {
        1 + (u8::BITS - self.count.leading_zeros()) as usize
    }

    /// Bytes of a part of so many elements.
    pub(super) const fn wire_bytes(self, elements: usize) -> usize {
        STEP + packed::wire_bytes(elements, self.width())
    }
}

/// Calls `$function::<W, …>` for the width at hand.
macro_rules! by_width {
    ($width:expr => $function:ident[$($generic:ty),*]($($argument:expr),*)) => {
        match $width {
            2 => $function::<2, $($generic),*>($($argument),*),
            3 => $function::<3, $($generic),*>($($argument),*),
            4 => $function::<4, $($generic),*>($($argument),*),
            5 => $function::<5, $($generic),*>($($argument),*),
            6 => $function::<6, $($generic),*>($($argument),*),
            7 => $function::<7, $($generic),*>($($argument),*),
            _ => $function::<8, $($generic),*>($($argument),*),
        }
    };
}

/// A spacing, as its arithmetic.
trait Rule {
    /// The level at or below, or the next, of a number of steps that is not negative and at most a
    /// rounding error above the largest level.
    fn level(steps: f32, random: u32) -> u32;
    /// Steps of a level of at most 7 bits.
    fn steps(level: u8) -> f32;
}

struct Linear;
struct Natural;

impl Linear {
    /// Added to a number below 128, it leaves a number whose lowest 15 bits are its fraction.
    const FIXED: f32 = 256.0;
    const FRACTION: u32 = 15;
}

impl Rule for Linear {
    #[inline(always)]
    fn level(steps: f32, random: u32) -> u32 {
        let fixed = (steps + Self::FIXED).to_bits();
        ((fixed + (random >> (32 - Self::FRACTION))) >> Self::FRACTION)
            - (Self::FIXED.to_bits() >> Self::FRACTION)
    }

    #[inline(always)]
    fn steps(level: u8) -> f32 {
        f32::from(level)
    }
}

impl Rule for Natural {
    #[inline(always)]
    fn level(steps: f32, random: u32) -> u32 {
        // The mantissa is the distance from the power of two below; from 0 to 1 there is none, and
        // the number plus 1 has it.
        let is_fraction = steps < 1.0;
        let fixed = if is_fraction { steps + 1.0 } else { steps };
        ((fixed.to_bits() + (random >> 9)) >> 23) - if is_fraction { 127 } else { 126 }
    }

    #[inline(always)]
    fn steps(level: u8) -> f32 {
        let power = f32::from_bits((126 + u32::from(level)) << 23);
        if level == 0 { 0.0 } else { power }
    }
}

/// Encodes a part. `wire` is as long as [`Levels::wire_bytes`] says.
#[inline(always)]
pub(super) fn encode(values: &[f32], levels: Levels, norm: Norm, stream: Stream, wire: &mut [u8]) {
    let (step_bytes, codes) = wire.split_at_mut(STEP);
    let step = step(values, levels, norm);
    step_bytes.copy_from_slice(&step.to_le_bytes());
    if step.is_nan() {
        codes.fill(0);
        return;
    }
    let width = levels.width();
    let most = u32::from(levels.count);
    match levels.spacing {
        Spacing::Linear => {
            by_width!(width => encode_codes[Linear](values, step, most, stream, codes));
        }
        Spacing::Natural => {
            by_width!(width => encode_codes[Natural](values, step, most, stream, codes));
        }
    }
}

#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "what is beyond f32 becomes infinite")]
fn step(values: &[f32], levels: Levels, norm: Norm) -> f32 {
    let norm = match norm {
        Norm::Max => f32::from_bits(magnitude_max(values)),
        Norm::L2 => sum_of_squares(values).sqrt() as f32,
    };
    let steps = match levels.spacing {
        Spacing::Linear => Linear::steps(levels.count),
        Spacing::Natural => Natural::steps(levels.count),
    };
    if norm.to_bits() < INFINITY { (norm / steps).max(f32::MIN_POSITIVE) } else { f32::NAN }
}

#[inline(always)]
fn encode_codes<const W: usize, R: Rule>(
    values: &[f32],
    step: f32,
    most: u32,
    stream: Stream,
    wire: &mut [u8],
) {
    let mut first = 0;
    for (block, out) in values.chunks(BLOCK).zip(wire.chunks_mut(BLOCK / 8 * W)) {
        let mut codes = [0; BLOCK];
        if block.len() == BLOCK {
            encode_block::<W, R>(&block[..BLOCK], first, step, most, stream, &mut codes);
        } else {
            encode_block::<W, R>(block, first, step, most, stream, &mut codes);
        }
        packed::pack::<W>(&codes, out);
        first += word(BLOCK);
    }
}

#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "a level has at most 7 bits")]
fn encode_block<const W: usize, R: Rule>(
    block: &[f32],
    first: u32,
    step: f32,
    most: u32,
    stream: Stream,
    codes: &mut [u8; BLOCK],
) {
    let mut index = first;
    for (code, value) in codes.iter_mut().zip(block) {
        let level = R::level(value.abs() / step, stream.at(index));
        let level = if level > most { most } else { level };
        let sign = value.to_bits() >> 31 << (W - 1);
        *code = (sign | level) as u8;
        index = index.wrapping_add(1);
    }
}

/// Decodes a part.
#[inline(always)]
pub(super) fn decode<S: Sink>(wire: &[u8], levels: Levels, values: &mut [f32]) {
    let step = leading_f32(wire);
    let codes = wire.get(STEP..).unwrap_or_default();
    match levels.spacing {
        Spacing::Linear => {
            by_width!(levels.width() => decode_codes[Linear, S](codes, step, values));
        }
        Spacing::Natural => {
            by_width!(levels.width() => decode_codes[Natural, S](codes, step, values));
        }
    }
}

#[inline(always)]
fn decode_codes<const W: usize, R: Rule, S: Sink>(wire: &[u8], step: f32, values: &mut [f32]) {
    for (block, wire) in values.chunks_mut(BLOCK).zip(wire.chunks(BLOCK / 8 * W)) {
        let mut codes = [0; BLOCK];
        packed::unpack::<W>(wire, &mut codes);
        if block.len() == BLOCK {
            decode_block::<W, R, S>(&codes, step, &mut block[..BLOCK]);
        } else {
            decode_block::<W, R, S>(&codes, step, block);
        }
    }
}

#[inline(always)]
fn decode_block<const W: usize, R: Rule, S: Sink>(
    codes: &[u8; BLOCK],
    step: f32,
    block: &mut [f32],
) {
    for (value, code) in block.iter_mut().zip(codes) {
        let level = code & ((1 << (W - 1)) - 1);
        let sign = u32::from(code >> (W - 1)) << 31;
        S::put(value, f32::from_bits((R::steps(level) * step).to_bits() ^ sign));
    }
}

/// The largest level of a part's codes, of which the length has been checked.
#[inline(always)]
pub(super) fn level_max(wire: &[u8], levels: Levels) -> u8 {
    let codes = wire.get(STEP..).unwrap_or_default();
    by_width!(levels.width() => level_max_of[](codes))
}

#[inline(always)]
fn level_max_of<const W: usize>(wire: &[u8]) -> u8 {
    let mut largest = 0;
    for wire in wire.chunks(BLOCK / 8 * W) {
        let mut codes = [0; BLOCK];
        packed::unpack::<W>(wire, &mut codes);
        for code in codes {
            let level = code & ((1 << (W - 1)) - 1);
            largest = if level > largest { level } else { largest };
        }
    }
    largest
}

/// The bits behind the last code, of a part whose length has been checked.
pub(super) fn padding(wire: &[u8], elements: usize, levels: Levels) -> u8 {
    packed::padding(elements, levels.width(), wire.get(STEP..).unwrap_or_default())
}
