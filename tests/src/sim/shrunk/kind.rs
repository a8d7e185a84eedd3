//! What ranks contribute, so that a result shows whose contributions are in it.

use bps_engine::base::{DType, Rank};
use std::collections::BTreeSet;

/// Divisible by every number of ranks that there may be, and below a digit's end when divided.
const UNIT: i64 = 12;

/// Ranks that have a digit.
pub(super) const RANKS_MAX: u32 = 4;

/// A type and an operation that loses nothing of such digits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Sum,
    Average,
    FloatAverage,
    HalfSum,
    HalfAverage,
    EncodedSum,
    Broadcast,
}

impl Kind {
    pub(super) const ALL: [Kind; 7] = [
        Kind::Sum,
        Kind::Average,
        Kind::FloatAverage,
        Kind::HalfSum,
        Kind::HalfAverage,
        Kind::EncodedSum,
        Kind::Broadcast,
    ];

    pub(super) fn dtype(self) -> DType {
        match self {
            Kind::Sum | Kind::Average | Kind::Broadcast => DType::I64,
            Kind::FloatAverage | Kind::EncodedSum => DType::F32,
            Kind::HalfSum | Kind::HalfAverage => DType::F16,
        }
    }

    /// Bits of a rank's digit.
    fn bits(self) -> u32 {
        match self {
            Kind::HalfSum => 2,
            Kind::HalfAverage => 0,
            _ => 4,
        }
    }

    pub(super) fn averages(self) -> bool {
        matches!(self, Kind::Average | Kind::FloatAverage | Kind::HalfAverage)
    }

    /// What a rank contributes to each element.
    pub(super) fn contribution(self, rank: u32) -> i64 {
        match self {
            // The average of equal numbers is the number, if the divisor is right.
            Kind::HalfAverage => UNIT,
            _ if self.averages() => UNIT << (self.bits() * rank),
            _ => 1 << (self.bits() * rank),
        }
    }

    /// Who is in an element of a result; every rank that may be where that can't be seen.
    ///
    /// # Panics
    /// A contribution is in it in part, or the divisor is not how many they are.
    pub(super) fn contributors(self, value: i64, seen: &str) -> Option<BTreeSet<Rank>> {
        if self == Kind::HalfAverage {
            assert_eq!(value, UNIT, "{seen}");
            return None;
        }
        let mask = (1 << self.bits()) - 1;
        let digit = |rank: &u32| value >> (self.bits() * rank) & mask;
        let all: BTreeSet<Rank> =
            (0..RANKS_MAX).filter(|rank| digit(rank) != 0).map(Rank).collect();
        let count = i64::try_from(all.len()).expect("few");
        let expected = if self.averages() { UNIT / count.max(1) } else { 1 };
        let sum: i64 = all.iter().map(|rank| expected << (self.bits() * rank.0)).sum();
        assert_eq!(value, sum, "{seen}: {all:?} and no others, once each");
        Some(all)
    }

    pub(super) fn to_bytes(self, value: i64, count: usize) -> Vec<u8> {
        #[allow(clippy::cast_precision_loss, reason = "a few small numbers")]
        let one = match self.dtype() {
            DType::I64 => value.to_le_bytes().to_vec(),
            DType::F32 => (value as f32).to_le_bytes().to_vec(),
            _ => half(value).to_le_bytes().to_vec(),
        };
        one.repeat(count)
    }

    pub(super) fn values(self, bytes: &[u8]) -> Vec<i64> {
        let size = self.dtype().size();
        #[allow(clippy::cast_possible_truncation, reason = "a few small numbers")]
        let value = |one: &[u8]| match self.dtype() {
            DType::I64 => i64::from_le_bytes(one.try_into().expect("eight bytes")),
            DType::F32 => f32::from_le_bytes(one.try_into().expect("four bytes")).round() as i64,
            _ => whole(u16::from_le_bytes(one.try_into().expect("two bytes"))),
        };
        bytes.chunks_exact(size).map(value).collect()
    }
}

/// The f16 of a whole number below 2048.
fn half(value: i64) -> u16 {
    let value = u16::try_from(value).expect("small");
    if value == 0 {
        return 0;
    }
    let exponent = value.ilog2();
    let fraction = (value << (10 - exponent)) & 0x3ff;
    (u16::try_from(exponent).expect("at most 10") + 15) << 10 | fraction
}

fn whole(half: u16) -> i64 {
    if half == 0 {
        return 0;
    }
    let exponent = i32::from(half >> 10 & 0x1f) - 15;
    let mantissa = i64::from(half & 0x3ff | 0x400);
    assert!((0..=10).contains(&exponent) && half >> 15 == 0, "{half:#x} is no such number");
    mantissa >> (10 - exponent)
}
