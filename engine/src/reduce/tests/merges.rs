//! Minima, maxima and products: every length and alignment, against the oracle; NaN and zeros.

use super::{Bits, Call, Case, every_kernels};
use crate::base::{DType, Reduction};
use proptest::prelude::*;

const REDUCTIONS: [Reduction; 3] = [Reduction::Min, Reduction::Max, Reduction::Product];

#[test]
fn every_length_equals_the_oracle() {
    let mut bits = Bits(11);
    for (dtype, reduction) in pairs() {
        for count in (0..=257).chain([4095, 4096, 4097, 9001]) {
            let acc = bits.elements(dtype.accumulator(), count);
            let src = bits.elements(dtype, count);
            for call in [Call::Add, Call::AddFinish] {
                let case = Case {
                    reduction,
                    acc_offset: bits.below(64),
                    src_offset: bits.below(64),
                    in_place: bits.below(2) == 0,
                    ..Case::new(dtype, call, &acc, &src, 1)
                };
                case.check_all();
            }
        }
    }
}

#[test]
fn a_nan_on_either_side_is_the_result() {
    for reduction in REDUCTIONS {
        for kernels in every_kernels() {
            let left = [f32::NAN, 1.0, f32::NAN, f32::NEG_INFINITY].repeat(20);
            let right = [1.0, f32::NAN, f32::NAN, f32::INFINITY].repeat(20);
            let bytes = |values: &[f32]| -> Vec<u8> {
                values.iter().flat_map(|value| value.to_le_bytes()).collect()
            };
            let (mut acc, src) = (bytes(&left), bytes(&right));
            // SAFETY: both hold 80 elements, and are apart.
            unsafe { kernels.reduce(reduction, DType::F32, acc.as_mut_ptr(), src.as_ptr(), 80) };
            let results = acc.chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
            for (index, result) in results.enumerate() {
                assert_eq!(result.is_nan(), index % 4 != 3, "{reduction} {index}: {result}");
            }
        }
    }
}

#[test]
#[should_panic(expected = "is not divided")]
fn a_minimum_has_no_average() {
    let mut acc = [0; 4];
    let kernels = every_kernels()[0];
    let out = acc.as_mut_ptr();
    // SAFETY: it panics before memory is touched, of which there is one element.
    unsafe { kernels.reduce_finish(Reduction::Min, DType::F32, out, out, [0; 4].as_ptr(), 1, 2) };
}

fn pairs() -> impl Iterator<Item = (DType, Reduction)> {
    DType::ALL.into_iter().flat_map(|dtype| REDUCTIONS.map(|reduction| (dtype, reduction)))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]
    #[test]
    fn pieces_in_place_equal_the_whole(seed in any::<u64>(), count in 1..6000_usize,
                                       pieces in 1..9_usize, offset in 0..64_usize) {
        let mut bits = Bits(seed);
        for (dtype, reduction) in pairs() {
            let acc = bits.elements(dtype.accumulator(), count);
            let src = bits.elements(dtype, count);
            let case = Case {
                reduction,
                acc_offset: offset,
                src_offset: offset / 3,
                pieces,
                in_place: true,
                ..Case::new(dtype, Call::AddFinish, &acc, &src, 1)
            };
            case.check_all();
        }
    }
}
