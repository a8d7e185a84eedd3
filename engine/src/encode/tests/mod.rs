//! Each codec against an oracle of its own, every instruction set against the scalar one, and what
//! a hostile peer might send.

use super::{Codec, Draw, Keep, Norm, Spacing};
use crate::reduce::{Isa, Kernels};

mod bounds;
mod meaning;
mod same;
mod stochastic;
mod text;

const DRAW: Draw = Draw { shared: 0x1234_5678_9abc_def0, own: 0x0fed_cba9_8765_4321 };

/// One of each kind, with parameters that make a difference.
fn codecs() -> Vec<Codec> {
    let mut codecs = vec![Codec::Fp16, Codec::Bf16];
    for flag in [false, true] {
        codecs.extend([
            Codec::Fp8E4m3 { stochastic: flag },
            Codec::Fp8E5m2 { stochastic: flag },
            Codec::Int8 { stochastic: flag },
            Codec::Onebit { scaling: flag },
        ]);
    }
    for keep in [Keep::Count(1), Keep::Count(40), Keep::PerMillion(100_000), Keep::Count(u32::MAX)]
    {
        codecs.extend([Codec::Topk { keep }, Codec::Randomk { keep, seed: 7 }]);
    }
    for levels in [1, 2, 4, 9, 20, 40, 100, 127] {
        for (spacing, norm) in [
            (Spacing::Linear, Norm::Max),
            (Spacing::Linear, Norm::L2),
            (Spacing::Natural, Norm::Max),
            (Spacing::Natural, Norm::L2),
        ] {
            codecs.push(Codec::Dithering { levels, spacing, norm, seed: 3 });
        }
    }
    codecs
}

/// The instruction sets of this CPU.
fn all_kernels() -> Vec<&'static Kernels> {
    Isa::ALL.into_iter().filter_map(Kernels::with_isa).collect()
}

/// Numbers for tests: xorshift64*.
struct Bits(u64);

impl Bits {
    fn next(&mut self) -> u64 {
        self.0 = (self.0 | 1).wrapping_mul(0x2545_f491_4f6c_dd1d);
        self.0 ^= self.0 >> 29;
        self.0
    }

    /// Between -1 and 1, most of them small.
    fn number(&mut self) -> f32 {
        let fraction = |bits: u64| (bits >> 40) as f32 / (1_u64 << 24) as f32;
        let (size, sign) = (fraction(self.next()), fraction(self.next()) - 0.5);
        size * size * size * sign.signum()
    }

    fn numbers(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.number()).collect()
    }

    /// Any bits, and often the special ones.
    fn any(&mut self, count: usize) -> Vec<f32> {
        let special =
            [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, f32::MIN_POSITIVE];
        let element = |_| match self.next() >> 60 {
            0 => special[(self.next() >> 32) as usize % special.len()],
            1..8 => self.number(),
            _ => f32::from_bits((self.next() >> 32) as u32),
        };
        (0..count).map(element).collect()
    }
}

fn encoded(codec: Codec, values: &[f32]) -> Vec<u8> {
    let mut wire = vec![0; codec.wire_bytes_max(values.len())];
    let length = codec.encode(values, DRAW, &mut wire);
    wire.truncate(length);
    assert_eq!(codec.check(values.len(), &wire), Ok(()), "{codec} of {values:?}");
    wire
}

fn decoded(codec: Codec, wire: &[u8], elements: usize) -> Vec<f32> {
    let mut values = vec![f32::NAN; elements];
    codec.decode(wire, DRAW, &mut values);
    values
}

fn round_trip(codec: Codec, values: &[f32]) -> Vec<f32> {
    decoded(codec, &encoded(codec, values), values.len())
}

/// Bits, with all NaNs made one.
fn bits(values: &[f32]) -> Vec<u32> {
    let nan = f32::NAN.to_bits();
    values.iter().map(|value| if value.is_nan() { nan } else { value.to_bits() }).collect()
}
