//! `bps-perf scaling`: what a server makes of more cores, with enough workers to feed them, and
//! what is full where it makes no more of them.
//!
//! Invariant: the workers, their bytes and the machine are the same for every number of cores, and
//! the numbers take turns; memory's own speed is measured in the same run.

#![forbid(unsafe_code)]

use crate::arguments::{self, integer, numbers, text};
use crate::cmd::pushpull::{Found, Load, measure};
use crate::report::{self, Table};
use crate::{Outcome, sample};
use bps_tests::job::JobShape;
use clap::{Arg, ArgMatches, Command, value_parser};
use serde_json::json;
use std::time::Instant;

/// Bytes that each thread copies from and to: beyond every cache.
const COPY_BYTES: usize = 64 << 20;
/// Copies of each thread.
const COPIES: usize = 4;
/// Times that a payload byte is read or written in memory on its way through a job over TCP: out of
/// the tensor and into the socket's buffer, out of that and into the accumulator (or the scratch
/// that is added), and the same on the way back.
const TOUCHES_TCP: f64 = 8.0;
/// The same over shared memory: into a slot, out of it and onto the sum; and one copy back.
const TOUCHES_SHM: f64 = 6.0;
/// A resource that is used to this share has little left to give.
const FULL: f64 = 0.85;

/// The arguments.
pub fn command() -> Command {
    Command::new("scaling")
        .about("Measures a server on several numbers of cores, and names what is full.")
        .arg(numbers("cores", "1,2,4,8", "Polling threads of the server; the first is the base"))
        .arg(
            Arg::new("workers")
                .long("workers")
                .help("Ranks [default: half as many as CPUs, at most twice the cores]")
                .value_parser(value_parser!(u32).range(1..)),
        )
        .arg(arguments::transport())
        .arg(arguments::driver())
        .arg(arguments::idle())
        .arg(arguments::sizes("size", "64M", "Bytes that each worker pushes in a round"))
        .arg(arguments::number("rounds", "9", "Timed rounds of each number of cores"))
        .arg(arguments::number("passes", "3", "Jobs of each number of cores, in turn"))
        .arg(arguments::json())
}

/// Measures every number of cores in turn.
pub fn run(matches: &ArgMatches) -> Outcome {
    let cores = arguments::integers(matches, "cores");
    let most = cores.iter().copied().max().unwrap_or(1);
    let cpus = u32::try_from(sample::cpus()).unwrap_or(u32::MAX);
    let workers = matches.get_one::<u32>("workers").copied();
    let workers = workers.unwrap_or((cpus / 2).clamp(1, 2 * most));
    let (transport, idle) = (text(matches, "transport"), text(matches, "idle"));
    let (rounds, passes) = (integer(matches, "rounds"), integer(matches, "passes"));
    let size = arguments::bytes(matches, "size")[0];
    let load = Load { size, tensors: 1 };
    let title = format!("{workers} workers of {size} bytes, one server, {transport}, {idle}");
    let columns = [
        "cores",
        "server_gbs",
        "speedup",
        "linear",
        "core_busy",
        "core_busy_mean",
        "nic_busy",
        "cpus_used",
        "memory_share_at_most",
        "full",
    ];
    let mut table = Table::new(matches, "scaling", &title, &columns);
    if most + workers > cpus {
        table.note(format!(
            "{most} cores and the NIC loops of {workers} workers want {} CPUs and this machine has \
             {cpus}: where CPUs are full this says nothing of the server's scaling",
            most + workers
        ));
    }
    let memory = memory_gbs();
    let mut found = vec![Found::default(); cores.len()];
    for pass in 0..passes {
        for (&cores, found) in cores.iter().zip(&mut found) {
            let shape = shape(matches, workers, cores);
            found.add(measure(shape, &[load], ((rounds + pass) / passes).max(1)).remove(0));
        }
    }
    table.head();
    // Every byte that a worker pushes is summed and published once.
    #[allow(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
    let summed = size as f64 * f64::from(workers) / 1e9;
    let (base, first) = (found[0].seconds.median(), cores[0]);
    for (&cores, found) in cores.iter().zip(&found) {
        let stages = found.stages();
        let seconds = &found.seconds;
        let touches = if transport == "shm" { TOUCHES_SHM } else { TOUCHES_TCP };
        let memory_share = summed * touches / seconds.median() / memory;
        let full = if stages.core_mean >= FULL {
            "the server's cores"
        } else if stages.cpus_are_full() {
            "this machine's CPUs"
        } else if memory_share >= FULL {
            "memory, unless caches hold what travels"
        } else if stages.nic >= FULL {
            "a worker's NIC loop"
        } else if stages.core >= FULL {
            "one of the server's cores"
        } else {
            "nothing: hand-offs and the kernel's line"
        };
        let mut fields = found.report(load, &shape(matches, workers, cores));
        report::rate(&mut fields, "server_gbs", summed, seconds);
        fields.extend(report::fields(json!({
            "transport": transport,
            "idle": idle,
            "speedup": base / seconds.median(),
            "linear": base / seconds.median() * f64::from(first) / f64::from(cores),
            "core_busy_mean": stages.core_mean,
            "memory_copy_gbs": memory,
            "memory_share_at_most": memory_share,
            "full": full,
        })));
        table.row(fields);
    }
    Ok(())
}

fn shape(matches: &ArgMatches, workers: u32, cores: u32) -> JobShape {
    JobShape {
        workers,
        cores,
        transport: arguments::transport_of(matches),
        driver: arguments::driver_of(matches),
        idle: arguments::idle_of(matches),
        ..JobShape::default()
    }
}

/// GB/s that all CPUs together read and write when each copies memory that is in no cache.
fn memory_gbs() -> f64 {
    let threads = sample::cpus();
    let barrier = std::sync::Barrier::new(threads + 1);
    let seconds = std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let source = vec![1u8; COPY_BYTES];
                let mut target = source.clone();
                barrier.wait();
                for _ in 0..COPIES {
                    std::hint::black_box(&mut target)
                        .copy_from_slice(std::hint::black_box(&source));
                }
                barrier.wait();
            });
        }
        barrier.wait();
        let start = Instant::now();
        barrier.wait();
        start.elapsed().as_secs_f64()
    });
    #[allow(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
    let moved = (2 * COPY_BYTES * COPIES * threads) as f64;
    moved / seconds / 1e9
}
