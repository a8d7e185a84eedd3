//! `bps-perf tune`: a job that finds its own settings from bad ones, beside the best of a grid,
//! between hosts with shaped links.
//!
//! The grid is jobs that are told their settings, one after the other on the same links. A tuned
//! job does its rounds and is then measured as those are, and behind it the best of the grid once
//! more: the fastest of many medians is partly the luckiest. All sums are held against their
//! values.
//!
//! Invariant: as in `cluster`, a round's time is that of its slowest rank, from a barrier of all.

#![forbid(unsafe_code)]

use super::cluster::{link_arguments, link_fields, shape, variables};
use crate::Outcome;
use crate::arguments::{self, integer, number, numbers};
use crate::report::{self, Fields, Table};
use crate::sample::Series;
use crate::stage::job::{Job, PATIENCE, Plan};
use crate::stage::{Stage, unavailable};
use clap::{ArgMatches, Command};
use serde_json::json;
use std::path::{Path, PathBuf};

/// Rounds that are not timed: they grow windows, buffers and page tables.
const WARM_UP: u32 = 2;
/// First rounds of a tuned job, which say how bad its start is.
const FIRST: usize = 3;

/// The arguments.
pub fn command() -> Command {
    let command = Command::new("tune")
        .about(
            "Stages hosts with shaped links on this machine, and lets jobs find their partition \
             and credit from bad starts, beside the best of a grid of settings.",
        )
        .arg(number("workers", "2", "Hosts with a rank"))
        .arg(number("servers", "2", "Hosts with a server and no rank"))
        .arg(number("tensors", "4", "Tensors that the size is divided into"))
        .arg(number("rounds", "60", "Rounds that a job has to find its settings"))
        .arg(number("timed", "7", "Timed rounds, of each point of the grid and of a tuned job"))
        .arg(arguments::sizes("size", "16M", "Bytes that each worker pushes in a round"))
        .arg(arguments::sizes(
            "starts",
            "4K,64M",
            "Partitions from which jobs begin, with a credit of 1",
        ))
        .arg(arguments::sizes("partitions", "16K,64K,256K,1M,4M,64M", "Partitions of the grid"))
        .arg(numbers("credits", "1,4,16", "Credits of the grid"));
    link_arguments(command)
}

/// What people see of a result.
const COLUMNS: &[&str] = &[
    "partition_bytes",
    "found_partition",
    "found_credit",
    "found_after",
    "start_gbs",
    "tuned_gbs",
    "best_partition",
    "best_credit",
    "best_gbs",
    "share_of_best",
];

/// Measures each size and start.
pub fn run(matches: &ArgMatches) -> Outcome {
    let get = |name: &str| integer(matches, name);
    if let Some(why) = unavailable() {
        println!("skipped: {why}");
        return Ok(());
    }
    let plan = Plan {
        workers: get("workers"),
        ranks_per_host: 1,
        extra_servers: get("servers"),
        colocated: false,
        cores: 1,
        patience: PATIENCE,
        variables: variables(matches),
    };
    let shape = shape(matches);
    #[allow(clippy::cast_precision_loss, reason = "rates are far below 2^53")]
    let megabits = shape.rate_bits as f64 / 1e6;
    let title = format!(
        "{} worker hosts, {} server hosts; {megabits} Mbit/s each way",
        plan.workers, plan.extra_servers
    );
    let table = Table::new(matches, "tune", &title, COLUMNS);
    let stage = Stage::new(plan.hosts(), &shape)?;
    table.head();
    for size in arguments::bytes(matches, "size") {
        let work = Work { stage: &stage, plan: &plan, size, tensors: get("tensors") };
        let best = work.grid(
            &arguments::bytes(matches, "partitions"),
            &arguments::integers(matches, "credits"),
            get("timed"),
        )?;
        for start in arguments::bytes(matches, "starts") {
            let tuned = work.tune(start, get("rounds"), get("timed"))?;
            let again = work.point(best.partition, best.credit, get("timed"))?;
            let mut fields = report(&tuned, &again, size);
            fields.insert("best_first_gbs".to_owned(), best.gigabytes(size).into());
            fields.insert("partition_bytes".to_owned(), start.into());
            fields.insert("rounds".to_owned(), get("rounds").into());
            fields.extend(link_fields(&shape, &plan));
            table.row(fields);
        }
    }
    Ok(())
}

/// What is run, and where.
struct Work<'run> {
    stage: &'run Stage,
    plan: &'run Plan,
    size: usize,
    tensors: u32,
}

/// A point of the grid, and its seconds.
struct Best {
    partition: usize,
    credit: u32,
    seconds: Series,
}

impl Best {
    /// What a rank moves in a second, of a tensor of so many bytes.
    fn gigabytes(&self, size: usize) -> f64 {
        #[allow(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
        let bytes = size as f64;
        bytes / 1e9 / self.seconds.median()
    }
}

/// A tuned job.
struct Tuned {
    /// Seconds of its first rounds, and of those after the last in which it had to find settings.
    first: Series,
    seconds: Series,
    /// The round after which it had come to these settings, if it had.
    found: Option<(u32, String)>,
}

impl Work<'_> {
    /// A job with these variables as well.
    fn start(&self, further: &[(&str, String)]) -> Result<Job, String> {
        let mut plan = self.plan.clone();
        plan.variables
            .extend(further.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
        let arguments = ["stage-rank".to_string(), self.size.to_string(), self.tensors.to_string()];
        Job::start(self.stage, &plan, &arguments)
    }

    fn grid(&self, partitions: &[usize], credits: &[u32], timed: u32) -> Result<Best, String> {
        let mut best: Option<Best> = None;
        for (&partition, &credit) in
            partitions.iter().flat_map(|one| credits.iter().map(move |credit| (one, credit)))
        {
            let point = self.point(partition, credit, timed)?;
            let median = point.seconds.median();
            if best.as_ref().is_none_or(|best| median < best.seconds.median()) {
                best = Some(point);
            }
        }
        best.ok_or_else(|| "the grid has no point".to_string())
    }

    /// A job that is told its settings.
    fn point(&self, partition: usize, credit: u32, timed: u32) -> Result<Best, String> {
        let mut job = self.start(&[
            ("BYTEPS_PARTITION_BYTES", partition.to_string()),
            ("BYTEPS_SCHEDULING_CREDIT", credit.to_string()),
        ])?;
        rounds(&mut job, WARM_UP)?;
        let seconds = rounds(&mut job, timed)?;
        job.end()?;
        Ok(Best { partition, credit, seconds })
    }

    fn tune(&self, start: usize, count: u32, timed: u32) -> Result<Tuned, String> {
        let file = File::new();
        let mut job = self.start(&[
            ("BYTEPS_PARTITION_BYTES", start.to_string()),
            ("BYTEPS_SCHEDULING_CREDIT", "1".to_string()),
            ("BPS_TUNE_CREDIT", "1".to_string()),
            ("BPS_TUNE_PARTITION", "1".to_string()),
            ("BPS_TUNE_FILE", file.0.display().to_string()),
        ])?;
        let (mut first, mut found) = (Series::default(), None);
        for round in 1..=count {
            first.0.extend(rounds(&mut job, 1)?.0);
            if found.is_none() && file.0.exists() {
                found = Some(round);
            }
        }
        let seconds = rounds(&mut job, timed)?;
        job.end()?;
        let text = std::fs::read_to_string(&file.0).unwrap_or_default();
        first.0.truncate(FIRST);
        Ok(Tuned { first, seconds, found: found.map(|round| (round, text)) })
    }
}

/// Where the scheduler writes what a job has found; removed when dropped.
struct File(PathBuf);

impl File {
    fn new() -> File {
        let file = File(std::env::temp_dir().join(format!("bps-tuned-{}", std::process::id())));
        remove(&file.0);
        file
    }
}

impl Drop for File {
    fn drop(&mut self) {
        remove(&self.0);
    }
}

fn remove(path: &Path) {
    // It need not be there.
    let _ = std::fs::remove_file(path);
}

fn rounds(job: &mut Job, count: u32) -> Result<Series, String> {
    (0..count).map(|_| job.ranks.slowest("0")).collect::<Result<_, _>>().map(Series)
}

fn report(tuned: &Tuned, best: &Best, size: usize) -> Fields {
    #[allow(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
    let gigabytes = size as f64 / 1e9;
    let setting = |name: &str| {
        let (_, text) = tuned.found.as_ref()?;
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='))?;
        line.parse::<u64>().ok()
    };
    let mut fields = report::fields(json!({
        "size_bytes": size,
        "found_partition": setting("BYTEPS_PARTITION_BYTES"),
        "found_credit": setting("BYTEPS_SCHEDULING_CREDIT"),
        "found_after": tuned.found.as_ref().map(|(round, _)| round),
        "start_gbs": gigabytes / tuned.first.median(),
        "best_partition": best.partition,
        "best_credit": best.credit,
        "share_of_best": best.seconds.median() / tuned.seconds.median(),
    }));
    report::rate(&mut fields, "tuned_gbs", gigabytes, &tuned.seconds);
    report::rate(&mut fields, "best_gbs", gigabytes, &best.seconds);
    fields
}
