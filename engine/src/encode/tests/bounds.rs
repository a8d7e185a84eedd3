//! What a peer might send: other lengths, other indices, any bytes. A check refuses what is no
//! encoding, and decoding stays in bounds without one.

use super::*;
use crate::encode::Malformed;
use proptest::prelude::*;

#[test]
fn other_lengths_are_refused() {
    let mut numbers = Bits(51);
    for codec in codecs() {
        for count in [0, 1, 5, 128, 200] {
            let values = numbers.numbers(count);
            let mut wire = encoded(codec, &values);
            let expected = wire.len();
            wire.extend([0; 9]);
            for found in (0..wire.len()).filter(|found| *found != expected) {
                let error = Malformed::Length { codec, elements: count, expected, found };
                assert_eq!(codec.check(count, &wire[..found]), Err(error));
                let mut decoded = vec![1.0; count];
                codec.decode_add(&wire[..found], DRAW, &mut decoded);
                assert_eq!(decoded, vec![1.0; count], "nothing is added");
                codec.decode(&wire[..found], DRAW, &mut decoded);
                assert_eq!(decoded, vec![0.0; count], "nothing is decoded");
            }
        }
    }
}

#[test]
fn forged_indices_are_refused() {
    let codec = Codec::Topk { keep: Keep::Count(3) };
    for elements in [100, 1 << 17] {
        let values = Bits(52).numbers(elements);
        let wire = encoded(codec, &values);
        let width = if elements == 100 { 2 } else { 4 };
        let index = |place: usize| &wire[place * width..][..width];
        let mut repeated = wire.clone();
        repeated[width..2 * width].copy_from_slice(index(0));
        assert!(matches!(codec.check(elements, &repeated), Err(Malformed::Index { place: 1, .. })));
        let mut falling = wire.clone();
        falling[..width].copy_from_slice(index(1));
        falling[width..2 * width].copy_from_slice(index(0));
        assert!(matches!(codec.check(elements, &falling), Err(Malformed::Index { place: 1, .. })));
        let mut beyond = wire.clone();
        beyond[2 * width..3 * width]
            .copy_from_slice(&u32::try_from(elements).expect("small").to_le_bytes()[..width]);
        let error = Malformed::Index { codec, elements, place: 2, index: elements };
        assert_eq!(codec.check(elements, &beyond), Err(error));
        let mut decoded = vec![0.0; elements];
        codec.decode(&beyond, DRAW, &mut decoded);
        assert_eq!(decoded.iter().filter(|value| **value != 0.0).count(), 2, "one is left out");
    }
}

#[test]
fn forged_levels_and_padding_are_refused() {
    let codec = Codec::Dithering { levels: 4, spacing: Spacing::Linear, norm: Norm::Max, seed: 0 };
    let mut wire = encoded(codec, &[0.0; 9]);
    // Element 2 in the low half of byte 1.
    wire[5] = 0x05;
    assert_eq!(codec.check(9, &wire), Err(Malformed::Level { codec, level: 5, levels: 4 }));
    wire[5] = 0x0c;
    assert_eq!(codec.check(9, &wire), Ok(()), "-4 is a level");
    wire[8] = 0x10;
    assert_eq!(codec.check(9, &wire), Err(Malformed::Padding { codec, elements: 9, bits: 1 }));
    let codec = Codec::Onebit { scaling: false };
    let mut wire = encoded(codec, &[0.0; 9]);
    wire[5] = 0b101;
    assert_eq!(codec.check(9, &wire), Err(Malformed::Padding { codec, elements: 9, bits: 2 }));
}

#[test]
fn errors_say_what_and_what_to_do() {
    let codec = Codec::Topk { keep: Keep::Count(3) };
    let error = codec.check(100, &[0; 17]).expect_err("18 bytes");
    assert_eq!(
        error.to_string(),
        "100 elements as topk(k=3) are 18 bytes, not 17: do both ends have the same codec and \
         build?"
    );
}

#[test]
#[should_panic(expected = "20 bytes into 19 of fp16")]
fn memory_that_is_too_short_is_a_bug_of_the_caller() {
    Codec::Fp16.encode(&[0.0; 10], DRAW, &mut [0; 19]);
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 4000,
        failure_persistence: None,
        ..Default::default()
    })]
    #[test]
    fn any_bytes_are_decoded_or_refused(
        codec in proptest::sample::select(codecs()),
        count in 0..400_usize,
        seed in any::<u64>(),
        off in prop_oneof![4 => Just(0), 1 => -20..20_isize],
        draw in any::<(u64, u64)>(),
    ) {
        let draw = Draw { shared: draw.0, own: draw.1 };
        let length = codec.wire_bytes_max(count).saturating_add_signed(off);
        let mut numbers = Bits(seed);
        let wire: Vec<u8> = (0..length).map(|_| (numbers.next() >> 56) as u8).collect();
        for kernels in all_kernels() {
            let verdict = codec.check_with(kernels, count, &wire);
            prop_assert_eq!(verdict, codec.check(count, &wire));
            drop(verdict.map_err(|error| error.to_string()));
            let mut values = vec![f32::INFINITY; count];
            codec.decode_with(kernels, &wire, draw, &mut values);
            let mut sums = vec![0.0; count];
            codec.decode_add_with(kernels, &wire, draw, &mut sums);
            if verdict.is_ok() {
                // Adding to 0 loses the sign of a zero, and nothing else.
                let positive: Vec<f32> = values.iter().map(|value| value + 0.0).collect();
                prop_assert_eq!(bits(&positive), bits(&sums), "{}", codec);
            }
        }
    }
}
