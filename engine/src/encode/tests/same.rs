//! Every instruction set gives the bits of the scalar code, on every length and alignment, and
//! writes nothing beyond what it says.

use super::*;
use crate::base::DType;
use crate::encode::elements::{narrow_with, widen_with};
use crate::encode::{load, narrow, store, widen};
use proptest::prelude::*;

const GUARD: u8 = 0xa5;

/// All that one instruction set makes of these values.
#[derive(PartialEq, Debug)]
struct Outcome {
    wire: Vec<u8>,
    rest: Vec<u32>,
    decoded: Vec<u32>,
    sums: Vec<u32>,
}

fn outcome(kernels: &Kernels, codec: Codec, values: &[f32], offset: usize) -> Outcome {
    let room = codec.wire_bytes_max(values.len());
    let mut memory = vec![GUARD; offset + room + 64];
    let length = codec.encode_with(kernels, values, DRAW, &mut memory[offset..]);
    assert_eq!(length, room, "{codec}: lengths follow from the elements");
    let is_guard = |bytes: &[u8]| bytes.iter().all(|byte| *byte == GUARD);
    assert!(is_guard(&memory[..offset]) && is_guard(&memory[offset + room..]), "{codec}");
    let mut again = vec![0; room];
    let mut rest = values.to_vec();
    codec.encode_rest_with(kernels, &mut rest, DRAW, &mut again);
    let wire = &memory[offset..][..room];
    assert_eq!(wire, again, "{codec}: encode_rest sends what encode sends");
    assert_eq!(codec.check_with(kernels, values.len(), wire), Ok(()), "{codec} of {values:?}");
    // A receiver does not know what the sender drew for itself.
    let draw = Draw { own: 0, ..DRAW };
    let mut decoded = vec![7.0; values.len()];
    codec.decode_with(kernels, wire, draw, &mut decoded);
    let mut sums = values.to_vec();
    codec.decode_add_with(kernels, wire, draw, &mut sums);
    for ((sum, value), decoded) in sums.iter().zip(values).zip(&decoded) {
        let expected = value + decoded;
        assert!(*sum == expected || sum.is_nan() && expected.is_nan(), "{codec}: {sum} {expected}");
    }
    // A NaN of 16 bits equals any other.
    let is_half = matches!(codec, Codec::Fp16 | Codec::Bf16);
    let again = if is_half { Vec::new() } else { again };
    Outcome { wire: again, rest: bits(&rest), decoded: bits(&decoded), sums: bits(&sums) }
}

fn check_same(codec: Codec, values: &[f32], offset: usize) {
    let mut outcomes =
        all_kernels().into_iter().map(|kernels| (kernels, outcome(kernels, codec, values, offset)));
    let (_, specification) = outcomes.next().expect("scalar code is always there");
    for (kernels, outcome) in outcomes {
        let count = values.len();
        assert_eq!(outcome, specification, "{codec}, {count} elements, {}", kernels.isa());
    }
}

#[test]
fn every_length_is_the_same() {
    let mut bits = Bits(1);
    for codec in codecs() {
        for count in 0..300 {
            check_same(codec, &bits.numbers(count), count % 5);
        }
    }
}

#[test]
fn parts_of_a_partition_are_the_same() {
    let mut bits = Bits(2);
    for codec in codecs() {
        // The second has indices of 32 bits.
        for count in [(1 << 16) - 3, (1 << 16) + 3] {
            check_same(codec, &bits.numbers(count), 1);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 3000,
        failure_persistence: None,
        ..Default::default()
    })]
    #[test]
    fn any_values_are_the_same(
        codec in proptest::sample::select(codecs()),
        count in 0..600_usize,
        seed in any::<u64>(),
        offset in 0..64_usize,
    ) {
        check_same(codec, &Bits(seed).any(count), offset);
    }
}

const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

#[test]
fn elements_of_every_float_type_are_read_and_written() {
    for dtype in FLOATS {
        for count in 0..200 {
            let mut bits = Bits(count as u64);
            let values = bits.any(count);
            // Of a type's own values, nothing is lost on the way.
            let mut own = vec![0; count * dtype.size() + 3];
            let own = &mut own[count % 4..][..count * dtype.size()];
            narrow(dtype, &values, own);
            let mut specification: Option<(Vec<u32>, Vec<u8>)> = None;
            for kernels in all_kernels() {
                let mut read = vec![0.0; count];
                widen_with(kernels, dtype, own, &mut read);
                let mut written = vec![0; own.len()];
                narrow_with(kernels, dtype, &read, &mut written);
                let mut again = vec![0.0; count];
                widen(dtype, &written, &mut again);
                assert_eq!(super::bits(&again), super::bits(&read), "{dtype} {count}");
                let made = (super::bits(&read), written);
                let specification = specification.get_or_insert_with(|| made.clone());
                assert_eq!(made.0, specification.0, "{dtype} {count} {}", kernels.isa());
            }
        }
    }
}

#[test]
fn elements_at_an_address_are_those_of_the_slice() {
    let mut bits = Bits(5);
    for dtype in FLOATS {
        for count in [0, 1, 37] {
            let values = bits.numbers(count);
            let mut slice = vec![0; count * dtype.size()];
            narrow(dtype, &values, &mut slice);
            let mut memory = vec![GUARD; 1 + slice.len() + 1];
            let mut read = vec![0.0; count];
            // SAFETY: Behind the first byte of `memory` there is room for the elements, and nobody
            // else has it.
            unsafe {
                store(dtype, &values, memory.as_mut_ptr().add(1));
                load(dtype, memory.as_ptr().add(1), &mut read);
            }
            assert_eq!(&memory[1..=slice.len()], slice);
            assert_eq!((memory[0], memory[slice.len() + 1]), (GUARD, GUARD));
            let mut widened = vec![0.0; count];
            widen(dtype, &slice, &mut widened);
            assert_eq!(read, widened);
        }
    }
}

#[test]
fn wide_floats_are_rounded() {
    let numbers = [1.0 + f64::EPSILON, 1e300, -1e-300, 0.1];
    let bytes: Vec<u8> = numbers.into_iter().flat_map(f64::to_ne_bytes).collect();
    let mut values = [0.0; 4];
    widen(DType::F64, &bytes, &mut values);
    assert_eq!(values, [1.0, f32::INFINITY, -0.0, 0.1]);
}

#[test]
#[should_panic(expected = "codecs take floats, not i32")]
fn integers_have_no_codec() {
    widen(DType::I32, &[0; 4], &mut [0.0]);
}
