//! `bps-perf sum`: the reducer beside memcpy and beside a plain loop, on one core.
//!
//! Invariant: a figure is bytes of `src` per second, for every contender, so that they compare; a
//! half type moves twice as many bytes of accumulator beside each, which memcpy does not.

use crate::{Outcome, place, sample};
use bps_engine::base::DType;
use bps_engine::reduce::{BF16, F16, Isa, Kernels, kernels, plain_add};
use bps_engine::topo::pin::{affinity, pin_current_thread};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use serde_json::json;
use std::hint::black_box;

/// Bytes of `src` that a timed sample passes over, at least: long beside the clock's reading.
const SAMPLE_BYTES: usize = 8 << 20;

/// The arguments.
pub fn command() -> Command {
    Command::new("sum")
        .about("Measures the reducer: GB/s of contributions added, beside memcpy and a plain loop.")
        .arg(
            Arg::new("dtype")
                .long("dtype")
                .value_name("D[,D…]")
                .help("Element types")
                .value_delimiter(',')
                .value_parser(parse_dtype)
                .default_value("f32"),
        )
        .arg(
            Arg::new("size")
                .long("size")
                .value_name("BYTES[,BYTES…]")
                .help("Bytes of one contribution; K, M and G (or KiB, MiB, GiB) are powers of 1024")
                .value_delimiter(',')
                .value_parser(sample::parse_size)
                .default_value("1M"),
        )
        .arg(
            Arg::new("isa")
                .long("isa")
                .help("Instruction set: scalar, avx2 or avx512 [default: the widest here]")
                .value_parser(parse_isa),
        )
        .arg(
            Arg::new("rounds")
                .long("rounds")
                .help("Interleaved rounds, of which the median is taken")
                .value_parser(value_parser!(u16).range(1..))
                .default_value("31"),
        )
        .arg(
            Arg::new("json")
                .long("json")
                .help("Print one JSON object per line")
                .action(ArgAction::SetTrue),
        )
}

/// Measures every pair of type and size.
pub fn run(matches: &ArgMatches) -> Outcome {
    let kernels = match matches.get_one::<Isa>("isa") {
        None => kernels(),
        Some(isa) => Kernels::with_isa(*isa)
            .ok_or_else(|| format!("--isa {isa}: this CPU lacks it; leave --isa out"))?,
    };
    let rounds = usize::from(*matches.get_one::<u16>("rounds").expect("has a default"));
    // The description comes first: a pinned thread sees one core.
    let place = place::describe();
    let cpu = *affinity()?.last().ok_or("the affinity mask holds no CPU")?;
    pin_current_thread(cpu)?;
    let as_json = matches.get_flag("json");
    if !as_json {
        println!("{}", place::line(&place));
        println!("GB/s of contribution on CPU {cpu}, {}, {rounds} rounds", kernels.isa());
        println!(
            "{:>5} {:>11} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}",
            "dtype", "bytes", "add", "average", "plain", "copy", "/plain", "/copy"
        );
    }
    for dtype in matches.get_many::<DType>("dtype").expect("has a default") {
        for size in matches.get_many::<usize>("size").expect("has a default") {
            let figures = measure(kernels, *dtype, *size, rounds);
            if as_json {
                let mut object = json!({
                    "command": "sum",
                    "dtype": dtype.name(),
                    "size_bytes": figures.size_bytes,
                    "isa": kernels.isa().name(),
                    "rounds": rounds,
                    "gbps": figures.add,
                    "average_gbps": figures.average,
                    "plain_gbps": figures.plain,
                    "copy_gbps": figures.copy,
                    "ratio_to_copy": figures.add / figures.copy,
                    "ratio_to_plain": figures.add / figures.plain,
                });
                object["place"] = place.clone();
                println!("{object}");
            } else {
                let Figures { size_bytes, add, average, plain, copy } = figures;
                println!(
                    "{:>5} {size_bytes:>11} {add:>8.2} {average:>8.2} {plain:>8.2} {copy:>8.2} \
                     {:>8.2} {:>8.2}",
                    dtype.name(),
                    add / plain,
                    add / copy,
                );
            }
        }
    }
    Ok(())
}

/// GB of `src` per second.
struct Figures {
    size_bytes: usize,
    add: f64,
    average: f64,
    plain: f64,
    copy: f64,
}

fn measure(kernels: &Kernels, dtype: DType, size: usize, rounds: usize) -> Figures {
    let count = (size / dtype.size()).max(1);
    let size_bytes = count * dtype.size();
    let acc_bytes = count * dtype.accumulator().size();
    let repeats = SAMPLE_BYTES.div_ceil(size_bytes);
    let mut src = Memory::new(size_bytes);
    fill(dtype, src.bytes());
    let src = &*src.bytes();
    // The four use one accumulator in turn, so that none finds it in a warmer cache; `copy` writes
    // to as much of it as it reads. Sums grow too little to leave the ordinary numbers.
    let memory = std::cell::RefCell::new(Memory::new(acc_bytes));
    let with = |work: &dyn Fn(&mut [u8])| work(black_box(memory.borrow_mut().bytes()));
    let isa = kernels.isa();
    let seconds = sample::interleaved(
        rounds,
        repeats,
        [
            &mut || with(&|acc| kernels.add_slice(dtype, acc, black_box(src))),
            &mut || with(&|acc| kernels.add_finish_slice(dtype, acc, black_box(src), 3)),
            &mut || with(&|acc| plain_add(isa, dtype, acc, black_box(src))),
            &mut || with(&|acc| acc[..size_bytes].copy_from_slice(black_box(src))),
        ],
    );
    #[allow(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
    let [add, average, plain, copy] = seconds.map(|seconds| size_bytes as f64 / seconds / 1e9);
    Figures { size_bytes, add, average, plain, copy }
}

/// Ordinary numbers, small and of both signs.
#[allow(clippy::cast_precision_loss, reason = "the numbers are small")]
#[allow(clippy::cast_possible_truncation, reason = "the numbers are small")]
fn fill(dtype: DType, bytes: &mut [u8]) {
    for (index, element) in bytes.chunks_exact_mut(dtype.size()).enumerate() {
        let whole = i8::try_from(index * 7 % 200).unwrap_or(-60);
        let number = f32::from(whole) / 128.0 + 1.0 / 1024.0;
        match dtype {
            DType::F32 => element.copy_from_slice(&number.to_le_bytes()),
            DType::F64 => element.copy_from_slice(&f64::from(number).to_le_bytes()),
            DType::F16 => element.copy_from_slice(&narrow(dtype, number)),
            DType::BF16 => element.copy_from_slice(&narrow(dtype, number)),
            DType::U8 | DType::I8 => element.copy_from_slice(&whole.to_le_bytes()),
            DType::I32 => element.copy_from_slice(&i32::from(whole).to_le_bytes()),
            DType::I64 => element.copy_from_slice(&i64::from(whole).to_le_bytes()),
        }
    }
}

fn narrow(dtype: DType, number: f32) -> [u8; 2] {
    if dtype == DType::F16 {
        F16::from_f32(number).0.to_le_bytes()
    } else {
        BF16::from_f32(number).0.to_le_bytes()
    }
}

/// Zeroed memory that begins at a cache line.
struct Memory {
    bytes: Vec<u8>,
    start: usize,
    length: usize,
}

impl Memory {
    fn new(length: usize) -> Memory {
        const LINE: usize = bps_engine::limits::ALIGNMENT;
        let bytes = vec![0; length + LINE];
        let start = bytes.as_ptr().align_offset(LINE);
        Memory { bytes, start, length }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..][..self.length]
    }
}

fn parse_dtype(text: &str) -> Result<DType, String> {
    DType::from_name(text).ok_or_else(|| {
        format!("no such type; there are {}", DType::ALL.map(DType::name).join(", "))
    })
}

fn parse_isa(text: &str) -> Result<Isa, String> {
    Isa::from_name(text).ok_or_else(|| {
        format!("no such instruction set; there are {}", Isa::ALL.map(Isa::name).join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_is_measured() {
        for dtype in DType::ALL {
            let figures = measure(kernels(), dtype, 1001, 1);
            assert_eq!(figures.size_bytes, 1001 / dtype.size() * dtype.size());
            for rate in [figures.add, figures.average, figures.plain, figures.copy] {
                assert!(rate > 0.0 && rate.is_finite(), "{dtype}: {rate}");
            }
        }
    }

    #[test]
    fn the_arguments_are_sound() {
        command().debug_assert();
    }
}
