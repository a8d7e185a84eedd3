//! Random numbers that follow from a seed and a position, so that any element's number can be
//! computed alone, in any order and in vectors.
//!
//! Invariant: the same seed and index give the same number on every machine. Nothing here is
//! secret or fit for cryptography.

#![forbid(unsafe_code)]

/// A sequence of 32-bit numbers with random access.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stream {
    first: u32,
    second: u32,
}

impl Stream {
    /// The sequence of these two seeds.
    #[allow(clippy::cast_possible_truncation, reason = "the two halves of a word")]
    pub(super) fn new(seed: u64, draw: u64) -> Stream {
        let word = mix(seed ^ mix(draw));
        Stream { first: word as u32, second: (word >> 32) as u32 }
    }

    /// The number at this index. The steps are those of `lowbias32` by Chris Wellons (Hash
    /// Prospector, 2018), with half of the seed before each multiplication.
    #[inline(always)]
    pub(super) fn at(self, index: u32) -> u32 {
        let word = index ^ self.first;
        let word = (word ^ word >> 16).wrapping_mul(0x7feb_352d);
        let word = (word ^ word >> 15 ^ self.second).wrapping_mul(0x846c_a68b);
        word ^ word >> 16
    }
}

/// A bijection in which each bit of the result depends on all of the argument: the output function
/// of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
fn mix(word: u64) -> u64 {
    let word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}
