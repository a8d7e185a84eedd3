//! Several contributions added in one pass, against the single operations one after the other.

use super::{Buffer, every_kernels};
use crate::base::{DType, Reduction};

/// What `reduce_all` must give: the first widened, the others added, one rounding.
fn expected(
    reduction: Reduction,
    dtype: DType,
    all: &[Vec<u8>],
    count: usize,
    divisor: u32,
) -> Vec<u8> {
    let kernels = super::Kernels::with_isa(super::Isa::Scalar).unwrap();
    let mut acc = vec![0u8; count * dtype.accumulator().size()];
    let mut out = vec![0u8; count * dtype.size()];
    // SAFETY: each buffer holds `count` elements of its type, and they are apart.
    unsafe {
        kernels.store(dtype, acc.as_mut_ptr(), all[0].as_ptr(), count);
        for source in &all[1..] {
            kernels.reduce(reduction, dtype, acc.as_mut_ptr(), source.as_ptr(), count);
        }
        kernels.finish(dtype, out.as_mut_ptr(), acc.as_ptr(), count, divisor);
    }
    out
}

const CASES: [(Reduction, u32); 5] = [
    (Reduction::Sum, 1),
    (Reduction::Sum, 6),
    (Reduction::Min, 1),
    (Reduction::Max, 1),
    (Reduction::Product, 1),
];

#[test]
fn all_at_once_equals_one_after_the_other() {
    for kernels in every_kernels() {
        for dtype in DType::ALL {
            for (contributions, count) in [(2, 1), (2, 5000), (3, 257), (4, 9001), (9, 4096)] {
                let bytes = count * dtype.size();
                let small = |seed: usize| {
                    // Small whole numbers of every type, so that no sum is a NaN.
                    let element = |index: usize| {
                        let mut bytes = vec![0; dtype.size()];
                        let value = (index * 7 + seed * 13) % 23;
                        match dtype {
                            DType::F32 => {
                                bytes.copy_from_slice(&(value as f32 / 3.0).to_le_bytes())
                            }
                            DType::F64 => {
                                bytes.copy_from_slice(&(value as f64 / 3.0).to_le_bytes())
                            }
                            DType::F16 => bytes.copy_from_slice(
                                &half::f16::from_f32(value as f32 / 3.0).to_le_bytes(),
                            ),
                            DType::BF16 => bytes.copy_from_slice(
                                &half::bf16::from_f32(value as f32 / 3.0).to_le_bytes(),
                            ),
                            _ => bytes[0] = u8::try_from(value).unwrap(),
                        }
                        bytes
                    };
                    (0..count).flat_map(element).collect::<Vec<u8>>()
                };
                let all: Vec<Vec<u8>> = (0..contributions).map(small).collect();
                for (reduction, divisor) in CASES {
                    let wanted = expected(reduction, dtype, &all, count, divisor);
                    // At once, or in two ranges, the last one first; the first may be empty.
                    let third = Some(count / 3);
                    let ways = [(false, None), (true, None), (false, Some(0)), (true, third)];
                    for (in_place, cut) in ways {
                        let mut first = Buffer::new(&all[0], 8);
                        let mut out = Buffer::new(&vec![0; bytes], 0);
                        let others: Vec<*const u8> =
                            all[1..].iter().map(|source| source.as_ptr()).collect();
                        let target = if in_place { first.pointer() } else { out.pointer() };
                        // SAFETY: all buffers hold `count` elements, and are the same or apart.
                        unsafe {
                            let own = first.pointer().cast_const();
                            if let Some(cut) = cut {
                                for range in [cut..count, 0..cut] {
                                    kernels.reduce_range(
                                        reduction, dtype, target, own, &others, range, divisor,
                                    );
                                }
                            } else {
                                kernels.reduce_all(
                                    reduction, dtype, target, own, &others, count, divisor,
                                );
                            }
                        }
                        let got = if in_place { first.content() } else { out.content() };
                        let isa = kernels.isa();
                        let case = (reduction, dtype, contributions, count, divisor, in_place, cut);
                        assert!(*got == wanted, "{isa}: {case:?}");
                    }
                }
            }
        }
    }
}
