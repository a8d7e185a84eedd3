//! `bps-perf sum`: the reducer beside memcpy and beside a plain loop, on one core.
//!
//! Invariant: a figure is bytes of `src` per second, for every contender, so that they compare; a
//! half type moves twice as many bytes of accumulator beside each, which memcpy does not.

#![forbid(unsafe_code)]

use crate::Outcome;
use crate::arguments::{self, integer, number};
use crate::report::{self, Table};
use crate::sample::{self, Series};
use bps_engine::base::DType;
use bps_engine::reduce::{BF16, F16, Isa, Kernels, kernels, plain_add};
use bps_engine::topo::pin::{affinity, pin_current_thread};
use clap::{Arg, ArgMatches, Command};
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
        .arg(arguments::sizes("size", "1M", "Bytes of one contribution"))
        .arg(
            Arg::new("isa")
                .long("isa")
                .help("Instruction set: scalar, neon, avx2 or avx512 [default: the widest here]")
                .value_parser(parse_isa),
        )
        .arg(number("rounds", "31", "Interleaved rounds, of which the median is taken"))
        .arg(arguments::json())
}

/// Measures every pair of type and size.
pub fn run(matches: &ArgMatches) -> Outcome {
    let kernels = match matches.get_one::<Isa>("isa") {
        None => kernels(),
        Some(isa) => Kernels::with_isa(*isa)
            .ok_or_else(|| format!("--isa {isa}: this CPU lacks it; leave --isa out"))?,
    };
    let rounds = integer(matches, "rounds") as usize;
    let cpu = *affinity()?.last().ok_or("the affinity mask holds no CPU")?;
    let isa = kernels.isa();
    let title = format!("GB/s of contribution on CPU {cpu}, {isa}, {rounds} rounds");
    let columns = [
        "dtype",
        "size_bytes",
        "gbps",
        "average_gbps",
        "plain_gbps",
        "copy_gbps",
        "ratio_to_plain",
        "ratio_to_copy",
        "gbps_spread",
    ];
    // The description of the place comes first: a pinned thread sees one core.
    let table = Table::new(matches, "sum", &title, &columns);
    pin_current_thread(cpu)?;
    table.head();
    for dtype in matches.get_many::<DType>("dtype").expect("has a default") {
        for size in arguments::bytes(matches, "size") {
            let figures = measure(kernels, *dtype, size, rounds);
            #[allow(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
            let gigabytes = figures.size_bytes as f64 / 1e9;
            let ratio = |to: &Series| to.median() / figures.add.median();
            let mut fields = report::fields(json!({
                "dtype": dtype.name(),
                "size_bytes": figures.size_bytes,
                "isa": isa.name(),
                "rounds": rounds,
                "ratio_to_copy": ratio(&figures.copy),
                "ratio_to_plain": ratio(&figures.plain),
            }));
            for (name, seconds) in [
                ("gbps", &figures.add),
                ("average_gbps", &figures.average),
                ("plain_gbps", &figures.plain),
                ("copy_gbps", &figures.copy),
            ] {
                report::rate(&mut fields, name, gigabytes, seconds);
            }
            table.row(fields);
        }
    }
    Ok(())
}

/// Seconds of one pass over `size_bytes` of `src`.
struct Figures {
    size_bytes: usize,
    add: Series,
    average: Series,
    plain: Series,
    copy: Series,
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
    let [add, average, plain, copy] = sample::interleaved(
        rounds,
        repeats,
        [
            &mut || with(&|acc| kernels.add_slice(dtype, acc, black_box(src))),
            &mut || with(&|acc| kernels.add_finish_slice(dtype, acc, black_box(src), 3)),
            &mut || with(&|acc| plain_add(isa, dtype, acc, black_box(src))),
            &mut || with(&|acc| acc[..size_bytes].copy_from_slice(black_box(src))),
        ],
    );
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
            for seconds in [figures.add, figures.average, figures.plain, figures.copy] {
                let median = seconds.median();
                assert!(median > 0.0 && median.is_finite(), "{dtype}: {median}");
            }
        }
    }

    #[test]
    fn the_arguments_are_sound() {
        command().debug_assert();
    }
}
