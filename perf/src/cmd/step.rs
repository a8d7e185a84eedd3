//! `bps-perf step`: optimizers of servers beside memcpy, on one core.
//!
//! Invariant: a figure is bytes of f32 parameters per second, for every contender, so that they
//! compare; a step also reads the sum, and reads and writes what the optimizer keeps.

#![forbid(unsafe_code)]

use crate::Outcome;
use crate::arguments::{self, integer, number};
use crate::report::{self, Table};
use crate::sample::{self, Series};
use bps_engine::optimize::{Number, Optimizer, Slots};
use bps_engine::reduce::{Kernels, kernels};
use bps_engine::topo::pin::{affinity, pin_current_thread};
use clap::{Arg, ArgMatches, Command};
use serde_json::json;
use std::cell::RefCell;
use std::hint::black_box;

/// Bytes of parameters that a timed sample passes over, at least: long beside the clock's reading.
const SAMPLE_BYTES: usize = 8 << 20;

/// The arguments.
pub fn command() -> Command {
    Command::new("step")
        .about("Measures optimizers of servers: GB/s of parameters stepped, beside memcpy.")
        .arg(
            Arg::new("optimizer")
                .long("optimizer")
                .value_name("O")
                .help("An optimizer, as adamw(weight_decay=0.01); may stand several times")
                .action(clap::ArgAction::Append)
                .value_parser(|text: &str| text.parse::<Optimizer>())
                .default_values(["sgd", "sgd(momentum=0.9)", "adamw(weight_decay=0.01)"]),
        )
        .arg(arguments::sizes("size", "4M", "Bytes of parameters"))
        .arg(number("rounds", "31", "Interleaved rounds, of which the median is taken"))
        .arg(arguments::json())
}

/// Measures every pair of optimizer and size.
pub fn run(matches: &ArgMatches) -> Outcome {
    let kernels = kernels();
    let rounds = integer(matches, "rounds") as usize;
    let cpu = *affinity()?.last().ok_or("the affinity mask holds no CPU")?;
    let isa = kernels.isa();
    let title = format!("GB/s of parameters on CPU {cpu}, {isa}, {rounds} rounds");
    let columns = [
        "optimizer",
        "size_bytes",
        "gbps",
        "copy_gbps",
        "ratio_to_copy",
        "moved_gbps",
        "gbps_spread",
    ];
    // The description of the place comes first: a pinned thread sees one core.
    let table = Table::new(matches, "step", &title, &columns);
    pin_current_thread(cpu)?;
    table.head();
    for optimizer in matches.get_many::<Optimizer>("optimizer").expect("has a default") {
        for size in arguments::bytes(matches, "size") {
            let (step, copy) = measure(kernels, optimizer, size / size_of::<f32>(), rounds);
            #[allow(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
            let gigabytes = size as f64 / 1e9;
            // The sum is read, and each slot read and written.
            #[allow(clippy::cast_precision_loss, reason = "three at most")]
            let passes = 1.0 + 2.0 * optimizer.slots() as f64;
            let mut fields = report::fields(json!({
                "optimizer": optimizer.to_string(),
                "size_bytes": size,
                "isa": isa.name(),
                "rounds": rounds,
                "ratio_to_copy": copy.median() / step.median(),
            }));
            report::rate(&mut fields, "gbps", gigabytes, &step);
            report::rate(&mut fields, "moved_gbps", passes * gigabytes, &step);
            report::rate(&mut fields, "copy_gbps", gigabytes, &copy);
            table.row(fields);
        }
    }
    Ok(())
}

/// Seconds of a step of so many parameters, and of copying them.
fn measure(
    kernels: &Kernels,
    optimizer: &Optimizer,
    count: usize,
    rounds: usize,
) -> (Series, Series) {
    let repeats = SAMPLE_BYTES.div_ceil((count * size_of::<f32>()).max(1));
    let sums: Vec<f32> = (0u8..251).cycle().take(count).map(|at| f32::from(at) - 125.0).collect();
    let zeros = || vec![0.0f32; count];
    let slots = RefCell::new([zeros(), zeros(), zeros()]);
    let rate = Number::new(1e-3).expect("a rate");
    let [step, copy] = sample::interleaved(
        rounds,
        repeats,
        [
            &mut || {
                let [master, first, second] = &mut *slots.borrow_mut();
                let slots = Slots { master, first, second };
                optimizer.step(kernels, (rate, 100), (black_box(&sums), 0.5), slots);
            },
            &mut || slots.borrow_mut()[0].copy_from_slice(black_box(&sums)),
        ],
    );
    (step, copy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_optimizer_is_measured() {
        for text in ["sgd", "sgd(momentum=0.9)", "adam"] {
            let (step, copy) = measure(kernels(), &text.parse().unwrap(), 1001, 1);
            assert!([step, copy].iter().all(|seconds| seconds.median() > 0.0), "{text}");
        }
    }

    #[test]
    fn the_arguments_are_sound() {
        command().debug_assert();
    }
}
