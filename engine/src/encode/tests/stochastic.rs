//! Rounding at random has the value as its mean, and does not repeat.

use super::*;

const ROUNDS: u64 = 4000;

/// The mean of what was decoded over many rounds, and the variance of one round, by element.
fn moments(codec: Codec, values: &[f32]) -> Vec<(f64, f64)> {
    let mut sums = vec![(0.0_f64, 0.0_f64); values.len()];
    let mut wire = vec![0; codec.wire_bytes_max(values.len())];
    let mut decoded = vec![0.0; values.len()];
    for own in 0..ROUNDS {
        codec.encode(values, Draw { shared: 1, own }, &mut wire);
        codec.decode(&wire, Draw { shared: 1, own: 0 }, &mut decoded);
        for (sum, decoded) in sums.iter_mut().zip(&decoded) {
            sum.0 += f64::from(*decoded);
            sum.1 += f64::from(*decoded) * f64::from(*decoded);
        }
    }
    let rounds = ROUNDS as f64;
    sums.into_iter()
        .map(|(sum, squares)| (sum / rounds, squares / rounds - (sum / rounds).powi(2)))
        .collect()
}

#[test]
fn the_mean_of_many_rounds_is_the_value() {
    // Large enough that each level is reached often: else the variance is not seen.
    let far = |value: f32| value.signum() * (0.1 + 0.9 * value.abs());
    let values: Vec<f32> = Bits(41).numbers(200).into_iter().map(far).collect();
    let stochastic = |codec: &Codec| match codec {
        Codec::Fp8E4m3 { stochastic }
        | Codec::Fp8E5m2 { stochastic }
        | Codec::Int8 { stochastic } => *stochastic,
        Codec::Dithering { .. } => true,
        _ => false,
    };
    for codec in codecs().into_iter().filter(stochastic) {
        let mut normal = 0.0;
        for (value, (mean, variance)) in values.iter().zip(moments(codec, &values)) {
            let error = mean - f64::from(*value);
            let deviation = (variance.max(0.0) / ROUNDS as f64).sqrt();
            // 200 elements of 40 codecs: beyond 5 deviations there should be none.
            let bound = 5.5 * deviation + 1e-5 * f64::from(value.abs()) + 1e-6;
            assert!(error.abs() <= bound, "{codec}: {value} has the mean {mean} +- {deviation}");
            normal += error / (deviation + 1e-6 * f64::from(value.abs()));
        }
        // A bias too small for one element would add up over all.
        let all = normal / (values.len() as f64).sqrt();
        assert!(all.abs() < 5.0, "{codec}: the elements are off by {all} deviations together");
    }
}

#[test]
fn elements_and_rounds_differ() {
    let values = vec![0.5_f32; 512];
    let codec = Codec::Dithering { levels: 1, spacing: Spacing::Linear, norm: Norm::L2, seed: 0 };
    let mut values_one = values.clone();
    values_one[0] = 1.0;
    let int8 = Codec::Int8 { stochastic: true };
    for (codec, values) in [(codec, &values), (int8, &values_one)] {
        let mut wires = Vec::new();
        for own in 0..8 {
            let mut wire = vec![0; codec.wire_bytes_max(values.len())];
            codec.encode(values, Draw { shared: 0, own }, &mut wire);
            assert!(!wires.contains(&wire), "{codec}: round {own} repeats");
            wires.push(wire);
        }
    }
    // Neighbours go up independently of each other: a quarter of the pairs both do.
    let mut wire = vec![0; int8.wire_bytes_max(1 << 16)];
    let mut many = vec![63.5_f32; 1 << 16];
    for block in many.chunks_mut(128) {
        block[0] = 127.0;
    }
    int8.encode(&many, DRAW, &mut wire);
    let mut both = 0_u32;
    let mut pairs = 0_u32;
    for block in wire.chunks(132) {
        for pair in block[5..].windows(2) {
            pairs += 1;
            both += u32::from(pair == [64, 64]);
        }
    }
    let share = f64::from(both) / f64::from(pairs);
    assert!((share - 0.25).abs() < 0.01, "{share} of pairs of neighbours both go up");
}
