//! Encodings as a peer might send them: whatever is decoded stays in bounds, what a check lets pass
//! is added as it is decoded, and what was encoded passes.
//!
//! The input is: which codec, its parameter, and its text if it is none of the common ones; how
//! many elements; the draw; whether the bytes are cut or filled up to the right length; the bytes.

#![no_main]

use bps_engine::encode::{Codec, Draw, Keep, Norm, Spacing};
use libfuzzer_sys::fuzz_target;

/// Elements of a part at most: beyond 2^16, indices are wider.
const ELEMENTS_MAX: usize = (1 << 16) + 300;

fn codec(which: u8, parameter: u32, text: &str) -> Option<Codec> {
    let flag = parameter & 1 == 1;
    let [levels, ..] = parameter.to_le_bytes();
    let (keep, seed) = (Keep::Count(parameter), u64::from(parameter));
    let norm = if flag { Norm::L2 } else { Norm::Max };
    Some(match which % 11 {
        0 => Codec::Fp16,
        1 => Codec::Bf16,
        2 => Codec::Fp8E4m3 { stochastic: flag },
        3 => Codec::Fp8E5m2 { stochastic: flag },
        4 => Codec::Int8 { stochastic: flag },
        5 => Codec::Onebit { scaling: flag },
        6 => Codec::Topk { keep },
        7 => Codec::Randomk { keep, seed },
        8 => Codec::Dithering { levels, spacing: Spacing::Linear, norm, seed },
        9 => Codec::Dithering { levels, spacing: Spacing::Natural, norm, seed },
        _ => match text.parse() {
            Ok(codec) => {
                let codec: Codec = codec;
                assert_eq!(codec.to_string().parse(), Ok(codec));
                codec
            }
            Err(error) => {
                drop(error.to_string());
                return None;
            }
        },
    })
}

fn same(left: f32, right: f32) -> bool {
    left == right || left.is_nan() && right.is_nan()
}

fuzz_target!(|input: (u8, u32, String, u32, u64, u64, bool, Vec<u8>)| {
    let (which, parameter, text, elements, shared, own, fitted, mut wire) = input;
    let Some(codec) = codec(which, parameter, &text) else { return };
    let elements = elements as usize % ELEMENTS_MAX;
    let draw = Draw { shared, own };
    if fitted {
        wire.resize(codec.wire_bytes_max(elements), 0);
    }
    let verdict = codec.check(elements, &wire);
    drop(verdict.map_err(|error| error.to_string()));
    let (mut values, mut sums) = (vec![1.0; elements], vec![0.0; elements]);
    codec.decode(&wire, draw, &mut values);
    codec.decode_add(&wire, draw, &mut sums);
    if verdict.is_ok() {
        assert!(values.iter().zip(&sums).all(|(value, sum)| same(*value, *sum)));
    }
    let mut again = vec![0; codec.wire_bytes_max(elements)];
    let length = codec.encode_rest(&mut values, draw, &mut again);
    assert_eq!(codec.check(elements, &again[..length]), Ok(()));
    assert!(values.iter().all(|value| value.is_finite()), "what is not finite does not stay");
});
