//! `bps-perf codecs`: what one core encodes and decodes of a gradient, beside memcpy.
//!
//! Invariant: a figure is bytes of f32 per second, for every contender, so that they compare. The
//! gradient and the sums are too large for the caches and are passed over a part at a time, as a
//! job does it; what is encoded goes to memory that is not read again meanwhile.

mod gpu;

use crate::Outcome;
use crate::arguments::{self, integer, number};
use crate::report::{self, Table};
use crate::sample::{self, Series};
use bps_engine::encode::{Codec, Draw};
use bps_engine::reduce::{Isa, Kernels, kernels};
use bps_engine::topo::pin::{affinity, pin_current_thread};
use clap::{Arg, ArgAction, ArgMatches, Command};
use serde_json::json;
use std::cell::RefCell;
use std::hint::black_box;

/// Bytes of f32 of a timed sample: more than the caches hold.
const SAMPLE_BYTES: usize = 64 << 20;
/// One of each kind, as people would use it.
const CODECS: [&str; 16] = [
    "fp16",
    "bf16",
    "fp8_e4m3",
    "fp8_e4m3(stochastic)",
    "fp8_e5m2",
    "fp8_e5m2(stochastic)",
    "int8",
    "int8(stochastic)",
    "onebit",
    "onebit(scaling)",
    "topk(k=0.01)",
    "randomk(k=0.01)",
    "dithering(levels=7)",
    "dithering(levels=127)",
    "dithering(levels=7,l2)",
    "dithering(levels=7,natural)",
];

/// The arguments.
pub fn command() -> Command {
    Command::new("codecs")
        .about("Measures codecs: GB/s of f32 that one core encodes and decodes, beside memcpy.")
        .arg(
            Arg::new("codec")
                .long("codec")
                .value_name("CODEC")
                .help("A codec, such as int8 or topk(k=0.01); may be given several times")
                .action(ArgAction::Append)
                .value_parser(|text: &str| text.parse::<Codec>())
                .default_values(CODECS)
                .hide_default_value(true),
        )
        .arg(arguments::sizes("size", "256K", "Bytes of a part's f32, at most 64M"))
        .arg(
            Arg::new("isa")
                .long("isa")
                .help("Instruction set: scalar, neon, avx2 or avx512 [default: the widest here]")
                .value_parser(|text: &str| {
                    Isa::from_name(text).ok_or("use scalar, neon, avx2 or avx512".to_owned())
                }),
        )
        .arg(
            Arg::new("gpu")
                .long("gpu")
                .value_name("NUMBER")
                .help("What this GPU encodes and decodes, where it has kernels for the codec")
                .value_parser(clap::value_parser!(u32)),
        )
        .arg(number("rounds", "11", "Interleaved rounds, of which the median is taken"))
        .arg(arguments::json())
}

/// Measures every pair of codec and size.
pub fn run(matches: &ArgMatches) -> Outcome {
    if let Some(ordinal) = matches.get_one::<u32>("gpu") {
        return gpu::run(matches, *ordinal);
    }
    let kernels = match matches.get_one::<Isa>("isa") {
        None => kernels(),
        Some(isa) => Kernels::with_isa(*isa)
            .ok_or_else(|| format!("--isa {isa}: this CPU lacks it; leave --isa out"))?,
    };
    let rounds = integer(matches, "rounds") as usize;
    let cpu = *affinity()?.last().ok_or("the affinity mask holds no CPU")?;
    let isa = kernels.isa();
    let title = format!("GB/s of f32 on CPU {cpu}, {isa}, {rounds} rounds");
    let columns = [
        "codec",
        "size_bytes",
        "bytes_each",
        "copy_gbps",
        "encode_gbps",
        "encode_rest_gbps",
        "decode_gbps",
        "decode_add_gbps",
        "encode_to_copy",
        "decode_add_to_copy",
    ];
    // The description of the place comes first: a pinned thread sees one core.
    let table = Table::new(matches, "codecs", &title, &columns);
    pin_current_thread(cpu)?;
    table.head();
    for codec in matches.get_many::<Codec>("codec").expect("has a default") {
        for size in arguments::bytes(matches, "size") {
            let part = size / size_of::<f32>();
            if part == 0 || size > SAMPLE_BYTES {
                return Err(format!("--size {size}: a part has from 4 to {SAMPLE_BYTES}").into());
            }
            let parts = SAMPLE_BYTES / size;
            let figures = measure(kernels, *codec, part, parts, rounds);
            #[allow(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
            let (gigabytes, bytes_each) = (
                (part * parts * size_of::<f32>()) as f64 / 1e9,
                codec.wire_bytes_max(part) as f64 / part as f64,
            );
            let ratio = |to: &Series| figures.copy.median() / to.median();
            let mut fields = report::fields(json!({
                "codec": codec.to_string(),
                "size_bytes": size,
                "bytes_each": bytes_each,
                "isa": isa.name(),
                "rounds": rounds,
                "encode_to_copy": ratio(&figures.encode),
                "encode_rest_to_copy": ratio(&figures.encode_rest),
                "decode_to_copy": ratio(&figures.decode),
                "decode_add_to_copy": ratio(&figures.decode_add),
            }));
            for (name, seconds) in [
                ("copy_gbps", &figures.copy),
                ("encode_gbps", &figures.encode),
                ("encode_rest_gbps", &figures.encode_rest),
                ("decode_gbps", &figures.decode),
                ("decode_add_gbps", &figures.decode_add),
            ] {
                report::rate(&mut fields, name, gigabytes, seconds);
            }
            table.row(fields);
        }
    }
    Ok(())
}

/// Encodes a part of this number.
type Encode<'a> = dyn Fn(usize, &[f32], &mut [u8]) + 'a;
/// Decodes a part of this number.
type Decode<'a> = dyn Fn(usize, &[u8], &mut [f32]) + 'a;

/// Seconds of a pass over all parts.
struct Figures {
    copy: Series,
    encode: Series,
    encode_rest: Series,
    decode: Series,
    decode_add: Series,
}

fn measure(kernels: &Kernels, codec: Codec, part: usize, parts: usize, rounds: usize) -> Figures {
    let gradient = gradient(part * parts);
    let sums = RefCell::new(vec![0.0_f32; part * parts]);
    let length = codec.wire_bytes_max(part);
    let wires = RefCell::new(vec![0_u8; length * parts]);
    let kept = RefCell::new(vec![0.0_f32; part]);
    let draw = |number: usize| Draw { shared: number as u64, own: number as u64 };
    // What is decoded stays as it is; what is encoded goes elsewhere.
    let mut arrived = vec![0_u8; length * parts];
    for (number, part) in gradient.chunks_exact(part).enumerate() {
        let wire = &mut arrived[number * length..][..length];
        codec.encode_with(kernels, part, draw(number), wire);
    }
    let encode = |work: &Encode| {
        let mut wires = wires.borrow_mut();
        for (number, part) in gradient.chunks_exact(part).enumerate() {
            work(number, black_box(part), &mut wires[number * length..][..length]);
        }
    };
    let decode = |work: &Decode| {
        let mut sums = sums.borrow_mut();
        for (number, part) in sums.chunks_exact_mut(part).enumerate() {
            work(number, black_box(&arrived[number * length..][..length]), part);
        }
    };
    let [copy, encode, encode_rest, decode, decode_add] = sample::interleaved(
        rounds,
        1,
        [
            &mut || {
                let mut sums = sums.borrow_mut();
                for (to, from) in sums.chunks_exact_mut(part).zip(gradient.chunks_exact(part)) {
                    to.copy_from_slice(black_box(from));
                }
            },
            &mut || {
                encode(&|number, part, wire| {
                    codec.encode_with(kernels, part, draw(number), wire);
                });
            },
            &mut || {
                // The part is copied first, since encoding leaves the rest in its place.
                encode(&|number, part, wire| {
                    let mut kept = kept.borrow_mut();
                    kept.copy_from_slice(part);
                    codec.encode_rest_with(kernels, &mut kept, draw(number), wire);
                });
            },
            &mut || {
                decode(&|number, wire, part| {
                    codec.decode_with(kernels, wire, draw(number), part);
                });
            },
            &mut || {
                decode(&|number, wire, part| {
                    codec.decode_add_with(kernels, wire, draw(number), part);
                });
            },
        ],
    );
    Figures { copy, encode, encode_rest, decode, decode_add }
}

/// Numbers of both signs that lie about 0 as a gradient's do: each is the sum of four.
#[allow(clippy::cast_precision_loss, reason = "numbers of 16 bits")]
fn gradient(elements: usize) -> Vec<f32> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let number = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let quarters = (0..4).map(|quarter| (state >> (16 * quarter) & 0xffff) as f32);
        (quarters.sum::<f32>() / 65_536.0 - 2.0) / 128.0
    };
    (0..elements).map(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_codec_is_measured() {
        for text in CODECS {
            let codec = text.parse().expect("a codec");
            let figures = measure(kernels(), codec, 1000, 3, 1);
            for seconds in [figures.copy, figures.encode, figures.encode_rest, figures.decode] {
                let median = seconds.median();
                assert!(median > 0.0 && median.is_finite(), "{codec}: {median}");
            }
        }
    }

    #[test]
    fn a_gradient_lies_about_zero() {
        let gradient = gradient(10_000);
        let mean: f32 = gradient.iter().sum::<f32>() / 10_000.0;
        assert!(mean.abs() < 1e-3 && gradient.iter().all(|value| value.abs() < 1.0), "{mean}");
    }

    #[test]
    fn the_arguments_are_sound() {
        command().debug_assert();
    }
}
