//! Where a tensor is cut into parts.
//!
//! Invariant: the parts cover the tensor in order without gaps; each is at most a partition; every
//! cut is at a multiple of [`ALIGNMENT`], and so of the element size; sizes differ by less than two
//! alignments, so that no core gets a crumb while another gets a whole partition.

use crate::base::DType;
use crate::limits::{ALIGNMENT, PART_BYTES_MAX, PART_BYTES_MIN};

const UNIT: u64 = ALIGNMENT as u64;

// Every element size divides the unit of cutting.
const _: () = assert!(ALIGNMENT.is_multiple_of(8) && PART_BYTES_MIN >= ALIGNMENT);

/// Bytes of a tensor, or `None` if there are more than a part's offset can say.
#[must_use]
pub fn tensor_bytes(count: u64, dtype: DType) -> Option<u64> {
    count.checked_mul(dtype.size() as u64).filter(|bytes| *bytes <= u64::MAX - UNIT)
}

/// How many parts a tensor of so many bytes has.
#[must_use]
pub fn part_count(bytes: u64, partition_bytes: u32) -> u64 {
    bytes.div_ceil(whole_units(partition_bytes) * UNIT)
}

/// Offset and size in bytes of each part of a tensor, in order. A tensor without elements has none.
///
/// `partition_bytes` outside of the limits is taken as the nearest limit.
///
/// # Panics
/// If [`tensor_bytes`] says that the tensor is too large.
pub fn parts(
    count: u64,
    dtype: DType,
    partition_bytes: u32,
) -> impl Iterator<Item = (u64, u32)> + Clone {
    let bytes = tensor_bytes(count, dtype).expect("the size of a tensor is checked at declare");
    let parts = part_count(bytes, partition_bytes);
    let units = bytes.div_ceil(UNIT);
    // The first `longer` parts have one unit more than the others; only the last can end within a
    // unit.
    let (each, longer) = (units / parts.max(1), units % parts.max(1));
    (0..parts).map(move |index| {
        let start = (index * each + index.min(longer)) * UNIT;
        let end = start + (each + u64::from(index < longer)) * UNIT;
        let size = end.min(bytes) - start;
        (start, u32::try_from(size).expect("a part is at most PART_BYTES_MAX"))
    })
}

/// The whole units in a partition.
fn whole_units(partition_bytes: u32) -> u64 {
    (partition_bytes as usize).clamp(PART_BYTES_MIN, PART_BYTES_MAX) as u64 / UNIT
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sizes(count: u64, dtype: DType, partition_bytes: u32) -> Vec<u32> {
        parts(count, dtype, partition_bytes).map(|(_, bytes)| bytes).collect()
    }

    #[test]
    fn known_answers() {
        assert!(sizes(0, DType::F32, 4096).is_empty());
        assert_eq!(sizes(1, DType::U8, 4096), [1]);
        assert_eq!(sizes(1024, DType::F32, 4096), [4096]);
        assert_eq!(sizes(1025, DType::F32, 4096), [2112, 1988]);
        assert_eq!(sizes(3000, DType::F32, 4096), [4032, 4032, 3936]);
        let one: Vec<(u64, u32)> = parts(1 << 20, DType::F32, 1 << 20).collect();
        assert_eq!(one, [(0, 1 << 20), (1 << 20, 1 << 20), (2 << 20, 1 << 20), (3 << 20, 1 << 20)]);
        assert_eq!(part_count(u64::MAX - UNIT, 4096), (u64::MAX - UNIT).div_ceil(4096));
        assert_eq!(tensor_bytes(u64::MAX / 2, DType::F32), None);
    }

    proptest! {
        #[test]
        fn parts_cover_the_tensor_in_even_pieces(
            count in 0u64..3_000_000,
            dtype in proptest::sample::select(DType::ALL.to_vec()),
            partition_bytes in 0u32..2_000_000,
        ) {
            let bytes = tensor_bytes(count, dtype).unwrap();
            let limit = partition_bytes.clamp(4096, 64 << 20);
            let mut next = 0;
            let (mut least, mut most) = (u32::MAX, 0);
            for (offset, size) in parts(count, dtype, partition_bytes) {
                prop_assert_eq!(offset, next);
                prop_assert!(size > 0 && size <= limit);
                prop_assert!(offset % UNIT == 0 && (size as usize).is_multiple_of(dtype.size()));
                next = offset + u64::from(size);
                least = least.min(size);
                most = most.max(size);
            }
            prop_assert_eq!(next, bytes);
            prop_assert!(bytes == 0 || u64::from(most - least) < 2 * UNIT);
        }
    }
}
