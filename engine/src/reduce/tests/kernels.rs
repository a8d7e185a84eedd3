//! Every call, on every length, alignment, piece and divisor that could matter.

use super::{Bits, Buffer, CALLS, Call, Case, assert_same, every_kernels, oracle};
use crate::base::DType;
use crate::reduce::{Isa, Kernels, kernels, plain_add};
use proptest::prelude::*;

const DIVISORS: [u32; 9] = [1, 2, 3, 7, 8, 100, 255, 4096, u32::MAX];

#[test]
fn every_length_equals_the_specification() {
    let mut bits = Bits(1);
    for dtype in DType::ALL {
        for count in 0..=257 {
            let acc = bits.elements(dtype.accumulator(), count);
            let src = bits.elements(dtype, count);
            for call in CALLS {
                let divisor = DIVISORS[bits.below(DIVISORS.len())];
                let (acc_offset, src_offset) = (bits.below(64), bits.below(64));
                let in_place = bits.below(2) == 0;
                let (acc, src) = (&acc[..], &src[..]);
                let case = Case {
                    acc_offset,
                    src_offset,
                    in_place,
                    ..Case::new(dtype, call, acc, src, divisor)
                };
                case.check_all();
            }
        }
    }
}

#[test]
fn every_alignment_equals_the_specification() {
    let mut bits = Bits(2);
    for dtype in DType::ALL {
        let count = 321 / dtype.size();
        let acc = bits.elements(dtype.accumulator(), count);
        let src = bits.elements(dtype, count);
        for call in CALLS {
            let (acc, src) = (&acc[..], &src[..]);
            let case = Case::new(dtype, call, acc, src, 3);
            let expected = oracle(&case);
            for offsets in 0..64 * 64 {
                let case = Case { acc_offset: offsets / 64, src_offset: offsets % 64, ..case };
                every_kernels().iter().for_each(|kernels| case.check(kernels, &expected));
            }
        }
    }
}

#[test]
fn pieces_in_place_equal_the_whole() {
    let mut bits = Bits(3);
    for dtype in DType::ALL {
        for pieces in [1, 2, 3, 7, 64] {
            let count = 1 + bits.below(3000);
            let acc = bits.elements(dtype.accumulator(), count);
            let src = bits.elements(dtype, count);
            for (call, divisor) in
                [(Call::AddFinish, 1), (Call::AddFinish, 5), (Call::Finish, 1), (Call::Finish, 5)]
            {
                let (acc, src) = (&acc[..], &src[..]);
                let (acc_offset, src_offset) = (bits.below(64), bits.below(64));
                let case = Case {
                    acc_offset,
                    src_offset,
                    pieces,
                    in_place: true,
                    ..Case::new(dtype, call, acc, src, divisor)
                };
                case.check_all();
            }
        }
    }
}

/// Every 8-bit sum over every divisor that could change it, and more.
#[test]
fn every_small_integer_average() {
    let acc: Vec<u8> = (0..=255).collect();
    for dtype in [DType::U8, DType::I8] {
        for divisor in (1..=300).chain([511, 4096, 65_537, 1 << 31, u32::MAX]) {
            let case = Case::new(dtype, Call::Finish, &acc, &acc, divisor);
            case.check_all();
        }
    }
}

/// Sums that are just at, before and after a multiple of the divisor.
#[test]
fn integer_averages_near_multiples() {
    let mut bits = Bits(4);
    for divisor in (1..=130).chain([255, 1000, 4095, 4096, 65_537, 1 << 31, u32::MAX]) {
        let d = i64::from(divisor);
        let mut acc32 = vec![i32::MIN, i32::MIN + 1, i32::MAX, i32::MAX - 1, 0, -1, 1];
        let mut acc64 = vec![i64::MIN, i64::MIN + 1, i64::MAX, i64::MAX - 1, 0, -1, 1];
        for step in [-1, 0, 1] {
            for _ in 0..50 {
                #[allow(clippy::cast_possible_wrap, reason = "any bits will do")]
                let value = bits.next() as i64;
                let multiple = (value >> 32) / d * d + step;
                acc32.extend(i32::try_from(multiple));
                acc64.push((value / d * d).saturating_add(step));
            }
        }
        let acc32: Vec<u8> = acc32.into_iter().flat_map(i32::to_le_bytes).collect();
        let acc64: Vec<u8> = acc64.into_iter().flat_map(i64::to_le_bytes).collect();
        for (dtype, acc) in [(DType::I32, acc32), (DType::I64, acc64)] {
            let case = Case::new(dtype, Call::Finish, &acc, &acc, divisor);
            case.check_all();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 2000,
        failure_persistence: None,
        ..Default::default()
    })]
    #[test]
    fn any_call_equals_the_specification(
        dtype in proptest::sample::select(&DType::ALL[..]),
        call in proptest::sample::select(&CALLS[..]),
        count in 0..600_usize,
        seed in any::<u64>(),
        divisor in prop_oneof![Just(1), 1..5000_u32, any::<u32>().prop_map(|bits| bits.max(1))],
        (acc_offset, src_offset) in (0..64_usize, 0..64_usize),
        pieces in 1..6_usize,
        in_place in any::<bool>(),
    ) {
        let mut bits = Bits(seed);
        let acc = bits.elements(dtype.accumulator(), count);
        let src = bits.elements(dtype, count);
        let (acc, src) = (&acc[..], &src[..]);
        let case = Case::new(dtype, call, acc, src, divisor);
        let case = Case { acc_offset, src_offset, pieces, in_place, ..case };
        case.check_all();
    }
}

#[test]
fn the_widest_is_chosen_once() {
    let widest = Isa::ALL.into_iter().filter(|isa| Kernels::with_isa(*isa).is_some()).max();
    assert_eq!(Some(kernels().isa()), widest);
    assert!(std::ptr::eq(kernels(), kernels()));
    for isa in Isa::ALL {
        assert_eq!(Isa::from_name(&isa.to_string()), Some(isa));
        assert!(Kernels::with_isa(isa).is_none_or(|kernels| kernels.isa() == isa));
    }
}

#[test]
#[should_panic(expected = "over no contributors")]
fn an_average_over_nobody_panics() {
    // SAFETY: No element is touched.
    unsafe {
        let nothing = std::ptr::NonNull::dangling().as_ptr();
        kernels().finish(DType::F32, nothing, nothing, 0, 0);
    }
}

/// The safe calls and the plain loop, on memory as aligned as the plain loop wants it.
#[test]
fn slices_equal_the_specification() {
    let mut bits = Bits(5);
    for dtype in DType::ALL {
        let acc = bits.elements(dtype.accumulator(), 100);
        let src = bits.elements(dtype, 100);
        let sum = oracle(&Case::new(dtype, Call::Add, &acc, &src, 1));
        let average = oracle(&Case::new(dtype, Call::AddFinish, &acc, &src, 3));
        for kernels in every_kernels() {
            let (mut left, mut right) = (Buffer::new(&acc, 0), Buffer::new(&src, 0));
            kernels.add_slice(dtype, left.content_mut(), right.content_mut());
            assert_same(dtype.accumulator(), left.content(), &sum, &kernels);
            let mut left = Buffer::new(&acc, 0);
            plain_add(kernels.isa(), dtype, left.content_mut(), right.content_mut());
            assert_same(dtype.accumulator(), left.content(), &sum, &"plain");
            let mut left = Buffer::new(&acc, 0);
            kernels.add_finish_slice(dtype, left.content_mut(), right.content_mut(), 3);
            assert_same(dtype, &left.content()[..average.len()], &average, &kernels);
        }
    }
}

#[test]
#[should_panic(expected = "an accumulator for 4 bf16")]
fn a_short_accumulator_panics() {
    kernels().add_slice(DType::BF16, &mut [0; 12], &[0; 8]);
}
