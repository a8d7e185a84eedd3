//! Reductions of NCCL's data types, in the order of the ranks.

use half::{bf16, f16};

/// Bytes of an element, by `ncclDataType_t`.
pub const SIZES: [usize; 10] = [1, 1, 4, 4, 8, 8, 2, 4, 8, 2];

/// The operations of NCCL that are used: `ncclSum`, `ncclProd`, `ncclMax`, `ncclMin`, `ncclAvg`.
pub const SUM: u32 = 0;
pub const PRODUCT: u32 = 1;
pub const MAX: u32 = 2;
pub const MIN: u32 = 3;
pub const AVERAGE: u32 = 4;

/// Reduces the contributions, all of one length, element by element.
pub fn reduce(dtype: u32, operation: u32, contributions: &[&[u8]]) -> Vec<u8> {
    /// Whole numbers wrap, and their average is a whole number again.
    macro_rules! whole {
        ($type:ty) => {
            elements(contributions, |values: &[[u8; size_of::<$type>()]]| {
                let values = values.iter().map(|bytes| <$type>::from_le_bytes(*bytes));
                let count = contributions.len() as $type;
                let result = values.reduce(|left, right| match operation {
                    PRODUCT => left.wrapping_mul(right),
                    MAX => left.max(right),
                    MIN => left.min(right),
                    _ => left.wrapping_add(right),
                });
                let result = result.unwrap_or_default();
                (if operation == AVERAGE { result / count } else { result }).to_le_bytes()
            })
        };
    }
    /// Halves are reduced in f32 and rounded once, as the engine does.
    macro_rules! float {
        ($type:ty, $wide:ty, $widen:expr, $narrow:expr) => {
            elements(contributions, |values: &[[u8; size_of::<$type>()]]| {
                let values = values.iter().map(|bytes| $widen(<$type>::from_le_bytes(*bytes)));
                let result = values.reduce(|left: $wide, right: $wide| match operation {
                    PRODUCT => left * right,
                    MAX => left.max(right),
                    MIN => left.min(right),
                    _ => left + right,
                });
                let (result, count) = (result.unwrap_or_default(), contributions.len() as $wide);
                $narrow(if operation == AVERAGE { result / count } else { result }).to_le_bytes()
            })
        };
    }
    match dtype {
        0 => whole!(i8),
        1 => whole!(u8),
        2 => whole!(i32),
        3 => whole!(u32),
        4 => whole!(i64),
        5 => whole!(u64),
        6 => float!(f16, f32, f16::to_f32, f16::from_f32),
        7 => float!(f32, f32, f32::from, f32::from),
        8 => float!(f64, f64, f64::from, f64::from),
        9 => float!(bf16, f32, bf16::to_f32, bf16::from_f32),
        _ => unreachable!("the data type was checked when the call was made"),
    }
}

/// Makes one element of the result from those of all ranks, for each.
fn elements<const N: usize>(
    contributions: &[&[u8]],
    combine: impl Fn(&[[u8; N]]) -> [u8; N],
) -> Vec<u8> {
    let mut values = vec![[0; N]; contributions.len()];
    let mut result = Vec::with_capacity(contributions[0].len());
    for at in (0..contributions[0].len()).step_by(N) {
        for (value, bytes) in values.iter_mut().zip(contributions) {
            value.copy_from_slice(&bytes[at..at + N]);
        }
        result.extend_from_slice(&combine(&values));
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_and_averages_of_every_width() {
        let f32s = |values: [f32; 2]| values.map(f32::to_le_bytes).concat();
        let (a, b) = (f32s([1.0, -2.0]), f32s([3.0, 5.0]));
        assert_eq!(reduce(7, SUM, &[&a, &b]), f32s([4.0, 3.0]));
        assert_eq!(reduce(7, AVERAGE, &[&a, &b]), f32s([2.0, 1.5]));
        assert_eq!(reduce(1, SUM, &[&[200], &[100]]), [44]);
        assert_eq!(reduce(7, PRODUCT, &[&a, &b]), f32s([3.0, -10.0]));
        assert_eq!(reduce(7, MAX, &[&a, &b]), f32s([3.0, 5.0]));
        assert_eq!(reduce(1, MIN, &[&[200], &[100]]), [100]);
        let halves = |value: f32| bf16::from_f32(value).to_le_bytes();
        assert_eq!(reduce(9, AVERAGE, &[&halves(1.0), &halves(2.0)]), halves(1.5));
    }
}
