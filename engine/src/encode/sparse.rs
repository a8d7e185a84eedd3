//! A few elements of a part, exactly, and nothing of the others: those of the largest magnitude, or
//! ones drawn at random.
//!
//! `topk`: the wire holds the indices of the `k` elements in rising order (16 bits each where the
//! part has at most 65536 elements, else 32), then their values as f32. Of equal magnitudes the
//! earlier is kept; a NaN is larger than an infinity, and that than any number. Sources: Aji and
//! Heafield, "Sparse Communication for Distributed Gradient Descent", arXiv:1704.05021; ties as in
//! BytePS.
//!
//! `randomk`: the part is cut into `k` strata of nearly equal length, and one element of each is
//! drawn from the seed and [`Draw::shared`](super::Draw); the wire holds their values as f32.
//! Indices follow from the draw at every end. Values are not rescaled by `elements / k`, as in
//! BytePS: error feedback sends the rest later. A part that holds a NaN or an infinity sends NaN in
//! place of every value. Source: Stich et al., "Sparsified SGD with Memory", arXiv:1809.07599.
//!
//! An element that is not sent decodes to 0. With error feedback it stays in the rest, unless it is
//! not finite.

#![forbid(unsafe_code)]

use super::fold::{INFINITY, MAGNITUDE, Sink, magnitude_max};
use super::random::Stream;

const VALUE: usize = size_of::<f32>();
/// Elements that are looked at together, to pass over them if none is wanted.
const CHUNK: usize = 16;

/// Bytes of an index into a part of so many elements.
pub(super) const fn index_bytes(elements: usize) -> usize {
    if elements <= 1 << 16 { 2 } else { 4 }
}

/// Encodes the `count` elements of the largest magnitude. `wire` has room for exactly these.
#[inline(always)]
pub(super) fn encode_topk(values: &[f32], count: usize, wire: &mut [u8]) {
    let width = index_bytes(values.len());
    let (indices, sent) = wire.split_at_mut(count * width);
    if width == 2 {
        collect::<2>(values, count, indices, sent);
    } else {
        collect::<4>(values, count, indices, sent);
    }
}

#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "a part has fewer than 2^32 elements")]
fn collect<const W: usize>(values: &[f32], count: usize, indices: &mut [u8], sent: &mut [u8]) {
    let (least, mut ties) = threshold(values, count);
    let mut slots = indices.chunks_exact_mut(W).zip(sent.chunks_exact_mut(VALUE));
    let mut first = 0_usize;
    for chunk in values.chunks(CHUNK) {
        if reaches(chunk, least) {
            for (offset, value) in chunk.iter().enumerate() {
                let magnitude = value.to_bits() & MAGNITUDE;
                let is_tie = magnitude == least && ties > 0;
                if magnitude > least || is_tie {
                    ties -= usize::from(is_tie);
                    let Some((index, out)) = slots.next() else { return };
                    index.copy_from_slice(&((first + offset) as u32).to_le_bytes()[..W]);
                    out.copy_from_slice(&value.to_le_bytes());
                }
            }
        }
        first += CHUNK;
    }
}

#[inline(always)]
fn reaches(chunk: &[f32], least: u32) -> bool {
    if let Some(chunk) = chunk.first_chunk::<CHUNK>() {
        let reach = |value: &f32| u32::from(value.to_bits() & MAGNITUDE >= least);
        chunk.iter().map(reach).fold(0, std::ops::BitOr::bitor) != 0
    } else {
        true
    }
}

/// The magnitude of the `count`-th largest element, and how many of just this magnitude are among
/// the `count` largest. Found digit by digit from the highest: 11, 10 and 10 bits.
#[inline(always)]
fn threshold(values: &[f32], count: usize) -> (u32, usize) {
    let mut wanted = count;
    let mut bins = [[0_u32; 2048]; 2];
    // Two tables, because neighbours often fall into one bin, which waits for the write before.
    for pair in values.chunks(2) {
        for (bins, value) in bins.iter_mut().zip(pair) {
            bins[((value.to_bits() & MAGNITUDE) >> 20) as usize] += 1;
        }
    }
    let [mut bins, second] = bins;
    for (bin, other) in bins.iter_mut().zip(second) {
        *bin += other;
    }
    let (mut prefix, mut held) = highest(&bins, &mut wanted);
    for shift in [10, 0] {
        if held == wanted {
            // All of these are wanted: lower digits do not matter.
            return (prefix << (shift + 10), wanted);
        }
        bins.fill(0);
        for chunk in values.chunks(CHUNK) {
            if holds(chunk, prefix, shift + 10) {
                for value in chunk {
                    let magnitude = value.to_bits() & MAGNITUDE;
                    if magnitude >> (shift + 10) == prefix {
                        bins[(magnitude >> shift & 0x3ff) as usize] += 1;
                    }
                }
            }
        }
        let (digit, of_digit) = highest(&bins, &mut wanted);
        (prefix, held) = (prefix << 10 | digit, of_digit);
    }
    (prefix, wanted)
}

#[inline(always)]
fn holds(chunk: &[f32], prefix: u32, shift: u32) -> bool {
    if let Some(chunk) = chunk.first_chunk::<CHUNK>() {
        let hold = |value: &f32| u32::from((value.to_bits() & MAGNITUDE) >> shift == prefix);
        chunk.iter().map(hold).fold(0, std::ops::BitOr::bitor) != 0
    } else {
        true
    }
}

/// The bin of the `wanted`-th largest, and how many it holds; `wanted` becomes how many are wanted
/// of it.
#[inline(always)]
#[allow(clippy::cast_possible_truncation, reason = "a table of 2048")]
fn highest(bins: &[u32; 2048], wanted: &mut usize) -> (u32, usize) {
    for (bin, held) in bins.iter().enumerate().rev() {
        let held = *held as usize;
        if held >= *wanted {
            return (bin as u32, held);
        }
        *wanted -= held;
    }
    (0, 0)
}

/// Decodes what [`encode_topk`] made. Elements that were not sent are left alone, as are indices
/// beyond the part, which a check finds.
#[inline(always)]
pub(super) fn decode_topk<S: Sink>(wire: &[u8], count: usize, values: &mut [f32]) {
    let width = index_bytes(values.len());
    let (indices, sent) = wire.split_at(wire.len().min(count * width));
    for (index, sent) in indices.chunks_exact(width).zip(sent.chunks_exact(VALUE)) {
        if let Some(value) = values.get_mut(read_index(index)) {
            S::put(value, read_value(sent));
        }
    }
}

/// The indices that are sent, of a part of so many elements.
pub(super) fn indices(
    wire: &[u8],
    elements: usize,
    count: usize,
) -> impl Iterator<Item = usize> + '_ {
    let width = index_bytes(elements);
    wire[..wire.len().min(count * width)].chunks_exact(width).map(read_index)
}

#[inline(always)]
fn read_index(bytes: &[u8]) -> usize {
    bytes.iter().rev().fold(0, |index, byte| index << 8 | usize::from(*byte))
}

#[inline(always)]
fn read_value(bytes: &[u8]) -> f32 {
    bytes.first_chunk().map_or(0.0, |bytes| f32::from_le_bytes(*bytes))
}

/// One index of each of `count` strata of a part, in rising order.
#[derive(Clone, Copy)]
pub(super) struct Strata {
    elements: u64,
    count: usize,
    /// Length of a stratum, with 32 bits of fraction; at least 1.
    length: u64,
    stream: Stream,
}

impl Strata {
    /// `count` is at most `elements`, which are fewer than 2^32.
    pub(super) fn new(elements: usize, count: usize, stream: Stream) -> Strata {
        let (elements, strata) = (elements as u64, count as u64);
        Strata { elements, count, length: (elements << 32) / strata.max(1), stream }
    }

    #[inline(always)]
    #[allow(clippy::cast_possible_truncation, reason = "a part has fewer than 2^32 elements")]
    fn index(&self, stratum: usize) -> usize {
        let start = self.start(stratum);
        let last = stratum + 1 == self.count;
        let end = if last { self.elements } else { self.start(stratum + 1) };
        let random = u64::from(self.stream.at(stratum as u32));
        (start + (((end - start) * random) >> 32)) as usize
    }

    #[inline(always)]
    fn start(&self, stratum: usize) -> u64 {
        // Exact to the stratum, since `length` is below 2^64 / count.
        (stratum as u64).wrapping_mul(self.length) >> 32
    }
}

/// Encodes one element of each stratum. `wire` has room for exactly these.
#[inline(always)]
pub(super) fn encode_randomk(values: &[f32], strata: Strata, wire: &mut [u8]) {
    let is_finite = magnitude_max(values) < INFINITY;
    for (stratum, out) in wire.chunks_exact_mut(VALUE).enumerate() {
        let value = values.get(strata.index(stratum)).copied().filter(|_| is_finite);
        out.copy_from_slice(&value.unwrap_or(f32::NAN).to_le_bytes());
    }
}

/// Decodes what [`encode_randomk`] made. Elements that were not sent are left alone.
#[inline(always)]
pub(super) fn decode_randomk<S: Sink>(wire: &[u8], strata: Strata, values: &mut [f32]) {
    for (stratum, sent) in wire.chunks_exact(VALUE).take(strata.count).enumerate() {
        if let Some(value) = values.get_mut(strata.index(stratum)) {
            S::put(value, read_value(sent));
        }
    }
}
