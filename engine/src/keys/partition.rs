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

/// Largest part, not above `partition_bytes`, of a tensor of so many bytes that is to have about
/// `shares` parts, each at most a multiple of `unit` bytes: fewer where a unit holds more. Their
/// number is a multiple of `even`, if there are as many, so that each of so many has as much to do.
///
/// A tensor of at most `whole` bytes is cut by the partition alone, and so is one whose parts would
/// be more than half of that.
#[must_use]
pub fn share_bytes(
    bytes: u64,
    (shares, even): (u64, u64),
    (unit, whole): (usize, usize),
    partition_bytes: u32,
) -> u32 {
    let unit = unit as u64;
    let each_one_unit = shares.max(1) * unit;
    let units = (bytes.saturating_add(each_one_unit / 2) / each_one_unit).max(1);
    if bytes <= whole as u64 || units > u64::from(partition_bytes) / (2 * unit) {
        return partition_bytes;
    }
    let largest = units * unit;
    let fewest = bytes.div_ceil(largest);
    let even = if fewest < even { 1 } else { even.max(1) };
    let count = fewest.next_multiple_of(even);
    let share = |count| bytes.div_ceil(count).next_multiple_of(UNIT);
    // What is a little more than some units travels as so many and a small rest, which is late.
    let has_small_rest = share(count) > unit && (1..unit / 6).contains(&(share(count) % unit));
    let share = share(if has_small_rest { count + even } else { count });
    // It is below the largest here, and that below the partition.
    u32::try_from(share).unwrap_or(u32::MAX).min(partition_bytes)
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

    const UNITS: (usize, usize) = (60 << 10, 64 << 10);

    #[test]
    fn shares_of_known_tensors() {
        let count = |bytes: u64, shares, partition| {
            part_count(bytes, share_bytes(bytes, shares, UNITS, partition))
        };
        // Four servers of one core, four parts for each.
        let usual = |kib: u64| count(kib << 10, (16, 4), 256 << 10);
        assert_eq!([1, 64, 65, 127, 128, 240].map(usual), [1, 1, 2, 3, 3, 4]);
        // As many for each, though fewer would hold it.
        assert_eq!([256, 512, 960, 1 << 10].map(usual), [8, 12, 16, 20]);
        // Parts of up to two units.
        assert_eq!([1536, 2 << 10, 2399].map(usual), [16, 20, 20]);
        // Over eight cores of two servers 64 KiB would be a little more than a unit.
        let eight = |kib: u64| count(kib << 10, (8, 8), 256 << 10);
        assert_eq!([960, 1 << 10, 2 << 10].map(eight), [8, 24, 8]);
        // From here on the partition says it.
        assert_eq!([2400, 3 << 10, 4 << 10, 64 << 10].map(usual), [10, 12, 16, 256]);
        assert_eq!(share_bytes(u64::MAX, (16, 4), UNITS, 256 << 10), 256 << 10);
        assert_eq!(count(1 << 20, (16, 4), 128 << 10), 20);
        assert_eq!([64 << 10, 32 << 10].map(|bytes| count(1 << 20, (16, 4), bytes)), [16, 32]);
        assert_eq!(count(20 << 10, (16, 4), 4096), 5);
        // Nobody to share with.
        assert_eq!(count(200 << 10, (0, 0), 256 << 10), 1);
    }

    proptest! {
        #[test]
        fn shares_keep_their_bounds(
            count in 1u64..20_000_000,
            servers in 1u64..40,
            each in 1u64..6,
            partition_bytes in (64u32..40_000).prop_map(|units| units * 64),
        ) {
            let (unit, (even, shares)) = (UNITS.0 as u64, (servers, servers * each));
            let share = share_bytes(count, (shares, even), UNITS, partition_bytes);
            prop_assert!(share <= partition_bytes);
            let sizes = sizes(count, DType::U8, share);
            let parts = sizes.len() as u64;
            let whole = part_count(count, partition_bytes);
            prop_assert!(parts >= whole, "never coarser than the partition");
            if parts > whole {
                prop_assert!(parts < even || parts.is_multiple_of(even), "{parts} over {even}");
                // Not many more than there should be, nor much smaller than they may be.
                prop_assert!(2 * parts <= 3 * shares + 4 * even, "{parts} for {shares}");
                let largest = ((2 * count + shares * unit) / (2 * shares * unit)).max(1) * unit;
                prop_assert!(sizes.iter().all(|size| u64::from(*size) <= largest), "{sizes:?}");
                let fewest = count.div_ceil(largest);
                prop_assert!(parts < fewest + 2 * even, "{parts} where {fewest} hold it");
            }
        }

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
