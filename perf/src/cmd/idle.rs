//! `bps-perf idle`: what an engine costs that has nothing to do, and whether it keeps more memory
//! the longer it works.
//!
//! Invariant: the job is whole (scheduler, server, ranks) and formed, and nobody calls it while its
//! processor time is taken; memory is counted at rest, after rounds that warmed everything up.

use crate::arguments::{self, integer, number, text};
use crate::report::{self, Table};
use crate::{Outcome, sample};
use bps_engine::base::{DType, Operation};
use bps_tests::job::{self, JobShape};
use bps_worker::Members;
use bps_worker::{Declaration, PushPull, Worker};
use clap::{ArgMatches, Command};
use serde_json::json;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A round that takes longer than this is a hang.
const PATIENCE: Option<Duration> = Some(Duration::from_secs(60));
/// How often memory is looked at over the rounds.
const LOOKS: u32 = 10;

/// The arguments.
pub fn command() -> Command {
    Command::new("idle")
        .about("Measures an idle engine: shares of one CPU by thread, and memory over many rounds.")
        .arg(arguments::transport())
        .arg(arguments::driver())
        .arg(arguments::idle())
        .arg(number("workers", "2", "Ranks"))
        .arg(number("seconds", "10", "How long nothing happens"))
        .arg(number("rounds", "10000", "Rounds over which memory must stay as it is"))
        .arg(number("size", "65536", "Bytes of a round"))
        .arg(arguments::json())
}

/// What rank 0 saw.
struct Seen {
    seconds: f64,
    /// Processor seconds by the name of a thread.
    threads: BTreeMap<String, f64>,
    /// Bytes in memory, from the first look to the last.
    resident: Vec<u64>,
}

/// Measures both.
pub fn run(matches: &ArgMatches) -> Outcome {
    let (transport, idle) = (text(matches, "transport"), text(matches, "idle"));
    let shape = JobShape {
        workers: integer(matches, "workers"),
        transport: arguments::transport_of(matches),
        driver: arguments::driver_of(matches),
        idle: arguments::idle_of(matches),
        ..JobShape::default()
    };
    let rest = Duration::from_secs(integer(matches, "seconds").into());
    let (rounds, size) = (integer(matches, "rounds"), integer(matches, "size") as usize);
    let title = format!(
        "{} ranks, one server core, {transport}, {idle}; {rest:?} at rest, then {rounds} rounds of \
         {size} bytes",
        shape.workers
    );
    let columns = ["thread", "cpu_percent", "growth_kib", "noise_kib", "resident_mib"];
    let table = Table::new(matches, "idle", &title, &columns);
    let mut ranks = job::run(shape, move |worker| rank(worker, rest, rounds, size));
    let seen = ranks.remove(0);
    table.head();
    let share = |seconds: f64| 100.0 * seconds / seen.seconds;
    for (name, &seconds) in &seen.threads {
        let row = json!({ "thread": name, "cpu_percent": share(seconds) });
        table.row(report::fields(row));
    }
    let kib = |bytes: u64| i64::try_from(bytes / 1024).unwrap_or(i64::MAX);
    // The first half settles: allocators keep what they were once given. The second half shows.
    let (settling, settled) = seen.resident.split_at(seen.resident.len() / 2);
    let (first, last) = (settled[0], settled[settled.len() - 1]);
    // The very first rounds touch what all later ones use.
    let noise = settling[1..].windows(2).map(|two| two[1].abs_diff(two[0])).max().unwrap_or(0);
    let growth = kib(last) - kib(first);
    table.row(report::fields(json!({
        "thread": "all",
        "transport": transport,
        "idle": idle,
        "workers": shape.workers,
        "seconds": seen.seconds,
        "rounds": rounds,
        "cpu_percent": share(seen.threads.values().sum()),
        "resident_mib": kib(last) / 1024,
        "growth_kib": growth,
        "noise_kib": kib(noise).max(kib(PAGES_OF_NOISE)),
        "growth_over_noise": growth - kib(noise).max(kib(PAGES_OF_NOISE)),
        "resident_kib": seen.resident.iter().map(|&bytes| kib(bytes)).collect::<Vec<_>>(),
    })));
    Ok(())
}

/// What a process of this many threads may touch for the first time at any moment: stacks, buffers
/// of the allocator.
const PAGES_OF_NOISE: u64 = 128 << 10;

fn rank(worker: &Worker, rest: Duration, rounds: u32, size: usize) -> Seen {
    let mut values = vec![1.0f32; (size / 4).max(1)];
    let declaration = Declaration {
        name: "idle".into(),
        dtype: DType::F32,
        shape: (values.len() as u64).into(),
        operation: Operation::Sum,
        device: false,
        members: Members::ALL,
        receiver: None,
        encoding: None,
        store: None,
    };
    let tensor = worker.declare(&[declaration]).expect("declared")[0];
    let target = values.as_mut_ptr().cast::<u8>();
    let item = PushPull { tensor, source: target.cast_const(), target, priority: 0 };
    let round = || {
        // SAFETY: `values` outlives the handle, which is waited for before anything else happens.
        let handles = unsafe { worker.push_pull(&[item]) }.expect("pushed");
        assert_eq!(handles[0].wait(PATIENCE), Ok(true), "a round took too long");
    };
    round();
    worker.barrier(PATIENCE).expect("barrier");
    let (before, start) = (threads(), Instant::now());
    std::thread::sleep(rest);
    let (seconds, after) = (start.elapsed().as_secs_f64(), threads());
    worker.barrier(PATIENCE).expect("barrier");
    let mut resident = Vec::new();
    for _ in 0..LOOKS {
        (0..rounds.div_ceil(LOOKS)).for_each(|_| round());
        worker.barrier(PATIENCE).expect("barrier");
        resident.push(sample::resident_bytes());
    }
    let mut used = BTreeMap::<String, f64>::new();
    for (id, (name, now)) in after {
        let then = before.get(&id).map_or(0.0, |&(_, seconds)| seconds);
        *used.entry(name).or_default() += now - then;
    }
    Seen { seconds, threads: used, resident }
}

/// Name and processor seconds of every thread of this process, by id.
fn threads() -> BTreeMap<String, (String, f64)> {
    let Ok(entries) = std::fs::read_dir("/proc/self/task") else { return BTreeMap::new() };
    let one = |entry: std::fs::DirEntry| {
        let name = std::fs::read_to_string(entry.path().join("comm")).ok()?;
        let text = std::fs::read_to_string(entry.path().join("schedstat")).ok()?;
        let nanoseconds: f64 = text.split_whitespace().next()?.parse().ok()?;
        let id = entry.file_name().to_string_lossy().into_owned();
        Some((id, (name.trim().to_owned(), nanoseconds / 1e9)))
    };
    entries.flatten().filter_map(one).collect()
}
