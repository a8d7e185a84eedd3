//! What a codec asks of a whole part: its largest magnitude and its sums; and what becomes of a
//! decoded element.
//!
//! Invariant: sums have a fixed order of addition, whatever the instruction set: 32 partial sums in
//! f64, element `i` in sum `i % 32`, folded in halves: as many as a warp of a GPU has threads.

#![forbid(unsafe_code)]

/// All bits of an f32 but the sign. As integers they are ordered as the magnitudes are, infinity
/// above every number and NaN above infinity.
pub(super) const MAGNITUDE: u32 = 0x7fff_ffff;
/// The magnitude of an infinity.
pub(super) const INFINITY: u32 = 0x7f80_0000;

const LANES: usize = 32;

/// The bits of the largest magnitude; 0 of an empty slice.
#[inline(always)]
pub(super) fn magnitude_max(values: &[f32]) -> u32 {
    values.iter().map(|value| value.to_bits() & MAGNITUDE).fold(0, u32::max)
}

/// The sum of the magnitudes. It is finite if all values are.
#[inline(always)]
pub(super) fn sum_of_magnitudes(values: &[f32]) -> f64 {
    sum::<false>(values)
}

/// The sum of the squares. It is finite if all values are.
#[inline(always)]
pub(super) fn sum_of_squares(values: &[f32]) -> f64 {
    sum::<true>(values)
}

#[inline(always)]
fn sum<const SQUARES: bool>(values: &[f32]) -> f64 {
    let (chunks, rest) = values.as_chunks::<LANES>();
    let mut lanes = [0_f64; LANES];
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane += term::<SQUARES>(*value);
        }
    }
    for (lane, value) in lanes.iter_mut().zip(rest) {
        *lane += term::<SQUARES>(*value);
    }
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

#[inline(always)]
fn term<const SQUARES: bool>(value: f32) -> f64 {
    let wide = f64::from(value);
    if SQUARES { wide * wide } else { wide.abs() }
}

/// What becomes of an element for which this value was decoded.
pub(super) trait Sink {
    fn put(element: &mut f32, decoded: f32);
}

/// The element becomes what was decoded.
pub(super) struct Set;
/// What was decoded is added.
pub(super) struct Add;
/// What was decoded is subtracted: what was not sent stays. What is not finite does not stay: an
/// overflow has been reported by the bytes sent, and would otherwise never end.
pub(super) struct Rest;

impl Sink for Set {
    #[inline(always)]
    fn put(element: &mut f32, decoded: f32) {
        *element = decoded;
    }
}

impl Sink for Add {
    #[inline(always)]
    fn put(element: &mut f32, decoded: f32) {
        *element += decoded;
    }
}

impl Sink for Rest {
    #[inline(always)]
    fn put(element: &mut f32, decoded: f32) {
        *element = finite_or_zero(*element - decoded);
    }
}

/// Sets what is not finite to 0: what sparse codecs leave where they sent nothing.
#[inline(always)]
pub(super) fn keep_finite(values: &mut [f32]) {
    for value in values {
        *value = finite_or_zero(*value);
    }
}

#[inline(always)]
fn finite_or_zero(value: f32) -> f32 {
    if value.to_bits() & MAGNITUDE < INFINITY { value } else { 0.0 }
}

/// The first 4 bytes as an f32; 0 where there are fewer.
#[inline(always)]
pub(super) fn leading_f32(wire: &[u8]) -> f32 {
    wire.first_chunk().map_or(0.0, |bytes| f32::from_le_bytes(*bytes))
}
