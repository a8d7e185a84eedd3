//! What each codec's encoding means: oracles that are written without a look at speed, and the
//! properties that callers rest on.

use super::*;
use proptest::prelude::*;

/// All finite values of an 8-bit float, by their codes, from the fields of the format.
fn float_values(mantissa_bits: u32, bias: i32, codes: std::ops::RangeInclusive<u8>) -> Vec<f64> {
    codes
        .map(|code| {
            let (exponent, mantissa) = (i32::from(code) >> mantissa_bits, u32::from(code));
            let fraction = f64::from(mantissa & ((1 << mantissa_bits) - 1))
                / f64::from(1_u32 << mantissa_bits);
            if exponent == 0 {
                fraction * 2_f64.powi(1 - bias)
            } else {
                (1.0 + fraction) * 2_f64.powi(exponent - bias)
            }
        })
        .collect()
}

/// The nearest of rising values; of two equally near, the one of the even code.
fn nearest(values: &[f64], number: f64) -> f64 {
    let sign = number.signum();
    let number = number.abs();
    let better = |best: usize, code: usize| {
        let (left, right) = ((values[best] - number).abs(), (values[code] - number).abs());
        if right < left || right == left && code.is_multiple_of(2) { code } else { best }
    };
    sign * values[(1..values.len()).fold(0, better)]
}

fn check_scaled(codec: Codec, table: &[f64], values: &[f32]) {
    let max = *table.last().expect("a table has values");
    let decoded = round_trip(codec, values);
    for (block, decoded) in values.chunks(128).zip(decoded.chunks(128)) {
        let largest = block.iter().fold(0.0, |largest: f32, value| largest.max(value.abs()));
        #[allow(clippy::cast_possible_truncation, reason = "the tables hold f32")]
        let scale = (largest / max as f32).max(f32::MIN_POSITIVE);
        for (value, decoded) in block.iter().zip(decoded) {
            #[allow(clippy::cast_possible_truncation, reason = "the tables hold f32")]
            let expected = nearest(table, f64::from(value / scale)) as f32 * scale;
            assert_eq!(*decoded, expected, "{codec}: {value} with the scale {scale}");
        }
    }
}

#[test]
fn scaled_codes_are_the_nearest() {
    let e4m3 = float_values(3, 7, 0..=0x7e);
    let e5m2 = float_values(2, 15, 0..=0x7b);
    assert_eq!((e4m3.last(), e5m2.last()), (Some(&448.0), Some(&57344.0)));
    let int8: Vec<f64> = (0..=127).map(f64::from).collect();
    let mut bits = Bits(11);
    for (codec, table) in [
        (Codec::Fp8E4m3 { stochastic: false }, &e4m3),
        (Codec::Fp8E5m2 { stochastic: false }, &e5m2),
        (Codec::Int8 { stochastic: false }, &int8),
    ] {
        for count in [1, 2, 127, 128, 129, 1000] {
            for scale in [1.0, 1e30, 1e-30, 1e-40] {
                let values: Vec<f32> = bits.numbers(count).iter().map(|it| it * scale).collect();
                check_scaled(codec, table, &values);
            }
        }
        // Ties, and all codes: the scale is 1.
        #[allow(clippy::cast_possible_truncation, reason = "the tables hold f32")]
        let exact: Vec<f32> = table.iter().map(|value| *value as f32).collect();
        let largest = exact[exact.len() - 1];
        for pair in exact.windows(2) {
            let middle = f32::midpoint(pair[0], pair[1]);
            check_scaled(codec, table, &[largest, pair[0], middle, -middle, pair[1].next_up()]);
            let kept = [pair[0], -pair[1], largest];
            assert_eq!(round_trip(codec, &kept), kept, "{codec}: codes are exact");
        }
    }
}

#[test]
fn halves_are_rounded_to_nearest_even() {
    let values = Bits(12).numbers(1000);
    let fp16 = values.iter().map(|value| half::f16::from_f32(*value).to_f32());
    assert!(fp16.eq(round_trip(Codec::Fp16, &values)));
    let bf16 = values.iter().map(|value| half::bf16::from_f32(*value).to_f32());
    assert!(bf16.eq(round_trip(Codec::Bf16, &values)));
}

#[test]
fn onebit_is_sign_and_mean() {
    let values = [1.0, -2.0, 0.0, -0.0, 3.0, -6.0];
    let decoded = round_trip(Codec::Onebit { scaling: true }, &values);
    assert_eq!(decoded, [2.0, -2.0, 2.0, 2.0, 2.0, -2.0]);
    let decoded = round_trip(Codec::Onebit { scaling: false }, &values);
    assert_eq!(decoded, [1.0, -1.0, 1.0, 1.0, 1.0, -1.0]);
    let wire = encoded(Codec::Onebit { scaling: true }, &values);
    assert_eq!(wire, [0, 0, 0, 0x40, 0b10_0010]);
    // A sum of f32 would overflow.
    let decoded = round_trip(Codec::Onebit { scaling: true }, &[f32::MAX, f32::MAX, -f32::MAX]);
    assert_eq!(decoded, [f32::MAX, f32::MAX, -f32::MAX]);
}

/// The `count` largest, by sorting.
fn largest(values: &[f32], count: usize) -> Vec<f32> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by_key(|index| std::cmp::Reverse(values[*index].to_bits() & 0x7fff_ffff));
    let mut kept = vec![0.0; values.len()];
    for index in order.into_iter().take(count) {
        kept[index] = values[index];
    }
    kept
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 1000,
        failure_persistence: None,
        ..Default::default()
    })]
    #[test]
    fn topk_keeps_the_largest(
        count in 1..900_usize,
        keep in 1..1000_u32,
        seed in any::<u64>(),
        kind in 0..3,
    ) {
        let mut numbers = Bits(seed);
        let values = match kind {
            0 => numbers.any(count),
            1 => numbers.numbers(count),
            // Many ties.
            _ => numbers.numbers(count).iter().map(|value| (value * 4.0).round()).collect(),
        };
        let decoded = round_trip(Codec::Topk { keep: Keep::Count(keep) }, &values);
        prop_assert_eq!(bits(&decoded), bits(&largest(&values, keep as usize)));
    }

    #[test]
    fn the_rest_is_what_was_not_sent(
        codec in proptest::sample::select(codecs()),
        count in 0..600_usize,
        seed in any::<u64>(),
    ) {
        let values = Bits(seed).any(count);
        let mut rest = values.clone();
        let mut wire = vec![0; codec.wire_bytes_max(count)];
        codec.encode_rest(&mut rest, DRAW, &mut wire);
        let decoded = decoded(codec, &wire, count);
        for ((value, decoded), rest) in values.iter().zip(decoded).zip(rest) {
            let expected = value - decoded;
            let expected = if expected.is_finite() { expected } else { 0.0 };
            prop_assert_eq!(rest, expected, "{}: {} decoded as {}", codec, value, decoded);
        }
    }

    #[test]
    fn what_is_not_finite_is_seen(
        codec in proptest::sample::select(codecs()),
        count in 1..600_usize,
        seed in any::<u64>(),
        place in any::<prop::sample::Index>(),
        bad in prop::sample::select(vec![f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY]),
    ) {
        let mut values = Bits(seed).numbers(count);
        let place = place.index(count);
        values[place] = bad;
        let decoded = round_trip(codec, &values);
        prop_assert!(decoded.iter().any(|value| !value.is_finite()), "{}: {:?}", codec, decoded);
        if !matches!(codec, Codec::Randomk { .. }) {
            prop_assert!(!decoded[place].is_finite(), "{}: {}", codec, decoded[place]);
        }
        // And it does not come again.
        codec.encode_rest(&mut values, DRAW, &mut vec![0; codec.wire_bytes_max(count)]);
        prop_assert!(values.iter().all(|value| value.is_finite()), "{}: {:?}", codec, values);
    }
}

#[test]
fn zeros_stay_zeros() {
    for codec in codecs() {
        if codec == (Codec::Onebit { scaling: false }) {
            continue;
        }
        for count in [0, 1, 128, 300] {
            let decoded = round_trip(codec, &vec![0.0; count]);
            assert!(decoded.iter().all(|value| *value == 0.0), "{codec}: {decoded:?}");
        }
    }
}

#[test]
fn one_element_survives() {
    for codec in codecs() {
        let tolerance = match codec {
            Codec::Onebit { scaling: false } => continue,
            Codec::Bf16 => 1.0 / 256.0,
            Codec::Fp16 => 1.0 / 2048.0,
            _ => 1e-6,
        };
        for value in [0.3, -0.3] {
            let decoded = round_trip(codec, &[value])[0];
            assert!((decoded - value).abs() <= tolerance * value.abs(), "{codec}: {decoded}");
        }
    }
}

#[test]
fn magnitudes_at_the_ends_of_the_range_survive() {
    for codec in codecs() {
        let tolerance = match codec {
            // 1e38 is beyond the range of the one and the scale of the other.
            Codec::Fp16 | Codec::Onebit { scaling: false } => continue,
            // Either element may be the one that is sent, and the other is 0.
            Codec::Topk { .. } | Codec::Randomk { .. } => 1.0,
            Codec::Dithering { norm: Norm::L2, .. } => 1.0,
            // Where scales end, values fall between codes: half a step of the mantissa.
            Codec::Fp8E4m3 { .. } => 0.125,
            Codec::Fp8E5m2 { .. } => 0.25,
            _ => 0.01,
        };
        for value in [1e38_f32, 1e-27, 1e-36, f32::MIN_POSITIVE] {
            // Levels are 2^-126 apart at least.
            if value < 1e-27 && matches!(codec, Codec::Dithering { .. }) {
                continue;
            }
            let decoded = round_trip(codec, &[value, value])[0];
            let off = (decoded - value).abs() / value;
            assert!(off <= tolerance, "{codec}: {value} decoded as {decoded}");
        }
    }
}

#[test]
fn what_is_sent_and_the_rest_are_the_sum() {
    let (count, rounds) = (1000, 200);
    for codec in codecs() {
        // The error of these does not shrink with the gradient: feedback is not made for them.
        let one_level = matches!(codec, Codec::Dithering { norm: Norm::L2, .. });
        if codec == (Codec::Onebit { scaling: false }) || one_level {
            continue;
        }
        let mut numbers = Bits(21);
        let (mut rest, mut sent) = (vec![0.0_f32; count], vec![0.0_f64; count]);
        let mut total = vec![0.0_f64; count];
        let mut wire = vec![0; codec.wire_bytes_max(count)];
        for round in 0..rounds {
            for ((rest, total), number) in
                rest.iter_mut().zip(&mut total).zip(numbers.numbers(count))
            {
                *rest += number;
                *total += f64::from(number);
            }
            let draw = Draw { shared: round, own: round + 1000 };
            let length = codec.encode_rest(&mut rest, draw, &mut wire);
            let mut decoded = vec![0.0; count];
            codec.decode(&wire[..length], draw, &mut decoded);
            for (sent, decoded) in sent.iter_mut().zip(decoded) {
                *sent += f64::from(decoded);
            }
        }
        for ((sent, rest), total) in sent.iter().zip(&rest).zip(&total) {
            let off = (sent + f64::from(*rest) - total).abs();
            assert!(off < 1e-2, "{codec}: {sent} sent, {rest} left of {total}");
        }
    }
}

#[test]
fn randomk_draws_alike_from_alike() {
    let values = Bits(31).numbers(1000);
    let keep = Keep::Count(50);
    let codec = Codec::Randomk { keep, seed: 5 };
    let wire = encoded(codec, &values);
    let places = |codec: Codec, shared| {
        let mut decoded = vec![0.0; 1000];
        codec.decode(&wire, Draw { shared, own: 0 }, &mut decoded);
        decoded.iter().map(|value| *value != 0.0).collect::<Vec<bool>>()
    };
    let here = places(codec, DRAW.shared);
    assert_eq!(here.iter().filter(|is_drawn| **is_drawn).count(), 50, "no element twice");
    assert!(here.chunks(20).all(|stratum| stratum.iter().filter(|it| **it).count() == 1));
    assert_ne!(here, places(codec, DRAW.shared + 1), "rounds differ");
    assert_ne!(here, places(Codec::Randomk { keep, seed: 6 }, DRAW.shared), "seeds differ");
}

#[test]
fn a_share_of_a_part_is_at_least_one_and_at_most_all() {
    assert_eq!(Keep::PerMillion(10_000).of(65_536), 655);
    assert_eq!(Keep::PerMillion(1_000_000).of(4_000_000_000), 4_000_000_000);
    assert_eq!(Keep::PerMillion(1).of(10), 1);
    assert_eq!((Keep::Count(0).of(5), Keep::Count(9).of(5), Keep::Count(9).of(0)), (1, 5, 0));
}

#[test]
fn an_encoding_has_the_bytes_that_the_documents_say() {
    let bytes = |text: &str| text.parse::<Codec>().expect("a codec").wire_bytes_max(65_536);
    assert_eq!((bytes("fp16"), bytes("bf16")), (131_072, 131_072));
    assert_eq!((bytes("fp8_e4m3"), bytes("int8")), (65_536 + 2048, 65_536 + 2048));
    assert_eq!(bytes("onebit"), 8192 + 4);
    assert_eq!((bytes("topk(k=0.01)"), bytes("randomk(k=0.01)")), (655 * 6, 655 * 4));
    assert_eq!("topk(k=10)".parse::<Codec>().expect("a codec").wire_bytes_max(65_537), 80);
    assert_eq!((bytes("dithering(levels=1)"), bytes("dithering(levels=7)")), (16_388, 32_772));
    assert_eq!(bytes("dithering(levels=127)"), 65_540);
}
