//! What a push_pull must give, computed the slow and obvious way: in f64 and i128, element by
//! element.

use bps_engine::base::{DType, Operation, Rank, Reduction};
use half::{bf16, f16};

/// Writes `value`, a small whole number, as an element of this type.
pub fn put(dtype: DType, bytes: &mut [u8], value: i64) {
    match dtype {
        DType::F32 => bytes.copy_from_slice(&(value as f32).to_le_bytes()),
        DType::F64 => bytes.copy_from_slice(&(value as f64).to_le_bytes()),
        DType::F16 => bytes.copy_from_slice(&f16::from_f64(value as f64).to_le_bytes()),
        DType::BF16 => bytes.copy_from_slice(&bf16::from_f64(value as f64).to_le_bytes()),
        DType::U8 | DType::I8 => bytes[0] = value.to_le_bytes()[0],
        DType::I32 => bytes.copy_from_slice(&value.to_le_bytes()[..4]),
        DType::I64 => bytes.copy_from_slice(&value.to_le_bytes()),
    }
}

/// The whole number that a contribution of `rank` has at element `index` in `round`: small enough
/// that every sum of floats is exact, and different for each rank, round, tensor and place.
#[must_use]
pub fn value(dtype: DType, tensor: u64, rank: u32, round: u64, index: usize) -> i64 {
    let mixed = (index as u64)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_add(tensor.wrapping_mul(31) + u64::from(rank) * 7 + round * 13);
    let small = i64::try_from(mixed >> 40 & 0x1f).unwrap_or(0);
    match dtype {
        // The bytes may wrap; that is part of what is tested.
        DType::U8 => small * 8,
        DType::I8 => small * 5 - 60,
        _ => small - 15,
    }
}

/// A rank's contribution.
#[must_use]
pub fn contribution(dtype: DType, tensor: u64, rank: u32, round: u64, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count * dtype.size()];
    for (index, element) in bytes.chunks_exact_mut(dtype.size()).enumerate() {
        put(dtype, element, value(dtype, tensor, rank, round, index));
    }
    bytes
}

fn wrap(dtype: DType, sum: i128) -> i128 {
    let bits = dtype.size() * 8;
    // The remainder, without a division of 128 bits, which took a fifth of jobs over fake GPUs.
    let wrapped = sum & ((1i128 << bits) - 1);
    let negative = dtype != DType::U8 && wrapped >= 1i128 << (bits - 1);
    if negative { wrapped - (1i128 << bits) } else { wrapped }
}

/// What is made of whole numbers before a division, in numbers so wide that nothing is lost.
fn reduced(operation: Operation, values: impl Iterator<Item = i128>) -> i128 {
    let result = values.reduce(|left, right| match operation.reduction() {
        Reduction::Sum => left + right,
        Reduction::Min => left.min(right),
        Reduction::Max => left.max(right),
        Reduction::Product => left.wrapping_mul(right),
    });
    result.expect("a job has ranks")
}

/// The element that all ranks must get. A product of floats is exact only for a few ranks.
fn element(dtype: DType, operation: Operation, values: &[i64], bytes: &mut [u8]) {
    let count = values.len() as i128;
    let sum = reduced(operation, values.iter().map(|&value| i128::from(value)));
    let average = operation == Operation::Average;
    if !dtype.is_float() {
        let stored = values.iter().map(|&value| wrap(dtype, i128::from(value)));
        let sum = wrap(dtype, reduced(operation, stored));
        let result = if average { sum.div_euclid(count) } else { sum };
        return put(dtype, bytes, i64::try_from(result).expect("within 64 bits after wrapping"));
    }
    // The sums are exact in every type, so the order of additions does not matter. An average is
    // divided in the accumulator's type and rounded once to the tensor's.
    let divisor = if average { count } else { 1 };
    match dtype {
        DType::F64 => bytes.copy_from_slice(&(sum as f64 / divisor as f64).to_le_bytes()),
        DType::F32 => bytes.copy_from_slice(&(sum as f32 / divisor as f32).to_le_bytes()),
        DType::F16 => {
            bytes.copy_from_slice(&f16::from_f32(sum as f32 / divisor as f32).to_le_bytes())
        }
        _ => bytes.copy_from_slice(&bf16::from_f32(sum as f32 / divisor as f32).to_le_bytes()),
    }
}

/// The result of one round over `ranks` ranks.
#[must_use]
pub fn result(
    dtype: DType,
    operation: Operation,
    tensor: u64,
    ranks: u32,
    round: u64,
    count: usize,
) -> Vec<u8> {
    result_among(dtype, operation, tensor, 0..ranks, round, count)
}

/// The result of one round over these ranks.
#[must_use]
pub fn result_among(
    dtype: DType,
    operation: Operation,
    tensor: u64,
    ranks: impl Iterator<Item = u32> + Clone,
    round: u64,
    count: usize,
) -> Vec<u8> {
    if let Operation::Broadcast(Rank(root)) = operation {
        return contribution(dtype, tensor, root, round, count);
    }
    let mut bytes = vec![0; count * dtype.size()];
    for (index, out) in bytes.chunks_exact_mut(dtype.size()).enumerate() {
        let values: Vec<i64> =
            ranks.clone().map(|rank| value(dtype, tensor, rank, round, index)).collect();
        element(dtype, operation, &values, out);
    }
    bytes
}
