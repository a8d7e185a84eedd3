//! `bps-perf pushpull`: the whole engine without Python. Scheduler, servers and workers run as
//! threads of this process, over loopback or shared memory, so the figure has every copy, sum and
//! message of a real job on one host.
//!
//! Invariant: the clock runs from a barrier of all ranks until the last tensor of the slowest rank
//! has landed; sizes and numbers of tensors take turns within one job, partitions within one run.

use crate::Outcome;
use crate::arguments::{self, integer, integers, number, numbers, text};
use crate::report::{self, Fields, Table};
use crate::sample::{self, Series};
use crate::watch::{self, Stages, Usage};
use bps_engine::base::{DType, Operation};
use bps_engine::config::{ElasticMode, PayloadChecksum};
use bps_engine::limits::{PART_BYTES_MAX, PART_BYTES_MIN};
use bps_tests::job::{self, JobShape};
use bps_worker::Members;
use bps_worker::{Declaration, PushPull, Worker};
use clap::{ArgMatches, Command};
use serde_json::json;
use std::time::{Duration, Instant};

/// A round that takes longer than this is a hang.
const PATIENCE: Option<Duration> = Some(Duration::from_secs(120));
/// Rounds that warm caches, sockets and page tables.
const WARM_UP: u32 = 2;
/// Jobs of each partition, with and without a timeline, in turn, where there are several.
const PASSES: u32 = 3;

/// The arguments.
pub fn command() -> Command {
    Command::new("pushpull")
        .about(
            "Measures push_pull of a whole job on this machine: algbw is one worker's bytes \
                over the time.",
        )
        .arg(number("workers", "2", "Ranks"))
        .arg(number("servers", "1", "Servers"))
        .arg(number("cores", "1", "Polling threads of each server"))
        .arg(numbers("tensors", "1", "Tensors that the size is divided into"))
        .arg(number("rounds", "20", "Timed rounds of each size, partition and number of tensors"))
        .arg(arguments::sizes("partition", "1M", "Largest part"))
        .arg(arguments::transport())
        .arg(arguments::local_reduce())
        .arg(arguments::driver())
        .arg(arguments::idle())
        .arg(
            arguments::choice("trace", &["off", "on"], "Whether a timeline is recorded, or both")
                .value_name("WORD[,WORD]")
                .value_delimiter(','),
        )
        .arg(
            arguments::choice(
                "checksum",
                &["auto", "off", "on"],
                "Whether payloads carry a CRC-32C (BPS_PAYLOAD_CHECKSUM), or several, in turn",
            )
            .value_name("WORD[,WORD]")
            .value_delimiter(','),
        )
        .arg(
            arguments::choice(
                "encrypt",
                &["off", "on"],
                "Whether TCP lanes are encrypted (BPS_ENCRYPT), or both, in turn",
            )
            .value_name("WORD[,WORD]")
            .value_delimiter(','),
        )
        .arg(
            arguments::choice(
                "elastic",
                &["none", "redo", "shrink"],
                "What the job is ready to do when a member dies, which none does (BPS_ELASTIC), or \
                 several, in turn",
            )
            .value_name("WORD[,WORD]")
            .value_delimiter(','),
        )
        .arg(
            arguments::choice(
                "helpers",
                &["auto", "0", "1", "2", "3"],
                "Helpers of each NIC loop (BPS_NIC_HELPERS), or several numbers, in turn",
            )
            .value_name("WORD[,WORD]")
            .value_delimiter(','),
        )
        .arg(arguments::sizes("size", "64M", "Bytes that each worker pushes in a round"))
        .arg(arguments::json())
}

/// What is measured in turn, as the arguments name it.
#[derive(Clone, Copy)]
struct Variant<'words> {
    partition_bytes: u32,
    trace: &'words str,
    checksum: &'words str,
    encrypt: &'words str,
    elastic: &'words str,
    helpers: &'words str,
}

impl Variant<'_> {
    fn all(matches: &ArgMatches) -> Result<Vec<Variant<'_>>, String> {
        let words = |name| matches.get_many::<String>(name).expect("has a default");
        let mut all = Vec::new();
        for partition_bytes in partitions(matches)? {
            for trace in words("trace") {
                for checksum in words("checksum") {
                    for encrypt in words("encrypt") {
                        for elastic in words("elastic") {
                            all.extend(words("helpers").map(|helpers| Variant {
                                partition_bytes,
                                trace,
                                checksum,
                                encrypt,
                                elastic,
                                helpers,
                            }));
                        }
                    }
                }
            }
        }
        Ok(all)
    }

    fn shape(self, base: JobShape, trace_folder: &'static str) -> JobShape {
        let payload_checksum = match self.checksum {
            "off" => PayloadChecksum::Never,
            "on" => PayloadChecksum::Always,
            _ => PayloadChecksum::Auto,
        };
        JobShape {
            nic_helpers: self.helpers.parse().ok(),
            partition_bytes: self.partition_bytes,
            trace: (self.trace == "on").then_some((1, u32::MAX)),
            payload_checksum,
            encrypt: self.encrypt == "on",
            elastic: match self.elastic {
                "redo" => ElasticMode::Redo,
                "shrink" => ElasticMode::Shrink,
                _ => ElasticMode::None,
            },
            trace_folder,
            ..base
        }
    }

    fn report(self, fields: &mut Fields) {
        fields.insert("partition_bytes".into(), self.partition_bytes.into());
        fields.insert("trace".into(), self.trace.into());
        fields.insert("checksum".into(), self.checksum.into());
        fields.insert("encrypt".into(), self.encrypt.into());
        fields.insert("elastic".into(), self.elastic.into());
        fields.insert("helpers".into(), self.helpers.into());
    }
}

/// The job that the arguments speak of; its partition is the first one.
pub fn shape(matches: &ArgMatches) -> Result<JobShape, String> {
    let partitions = partitions(matches)?;
    Ok(JobShape {
        workers: integer(matches, "workers"),
        servers: integer(matches, "servers"),
        cores: integer(matches, "cores"),
        partition_bytes: partitions[0],
        transport: arguments::transport_of(matches),
        driver: arguments::driver_of(matches),
        idle: arguments::idle_of(matches),
        hosts: arguments::hosts_of(matches),
        ..JobShape::default()
    })
}

fn partitions(matches: &ArgMatches) -> Result<Vec<u32>, String> {
    let check = |bytes: usize| {
        let fits = (PART_BYTES_MIN..=PART_BYTES_MAX).contains(&bytes);
        let range = format!("from {PART_BYTES_MIN} to {PART_BYTES_MAX} bytes");
        let number = u32::try_from(bytes).ok().filter(|_| fits);
        number.ok_or_else(|| format!("--partition {bytes}: a part has {range}"))
    };
    arguments::bytes(matches, "partition").into_iter().map(check).collect()
}

/// Measures every size with every number of tensors and every partition.
pub fn run(matches: &ArgMatches) -> Outcome {
    let base = shape(matches)?;
    let idle = text(matches, "idle");
    let transport = match base.hosts {
        [] => text(matches, "transport"),
        _ => "local reduction",
    };
    let rounds = integer(matches, "rounds");
    let title = format!(
        "{} workers, {} servers × {} cores, {transport}, {idle}, {rounds} rounds",
        base.workers, base.servers, base.cores
    );
    let columns = [
        "size_bytes",
        "tensors",
        "partition_bytes",
        "trace",
        "checksum",
        "encrypt",
        "elastic",
        "helpers",
        "algbw_gbs",
        "speed_to_first",
        "ms_p50",
        "ms_p99",
        "ms_spread",
        "cpu_s_per_gb",
        "nic_busy",
        "core_busy",
        "cpus_used",
        "bottleneck",
    ];
    let mut table = Table::new(matches, "pushpull", &title, &columns);
    let polling = base.workers + base.servers * base.cores;
    crowded(&mut table, polling, idle == "busy");
    table.head();
    let loads: Vec<Load> = arguments::bytes(matches, "size")
        .into_iter()
        .flat_map(|size| {
            integers(matches, "tensors").into_iter().map(move |tensors| Load { size, tensors })
        })
        .collect();
    let variants = Variant::all(matches)?;
    let folder = trace_folder();
    let passes = if variants.len() == 1 { 1 } else { PASSES.min(rounds) };
    let mut found = vec![vec![Found::default(); loads.len()]; variants.len()];
    for pass in 0..passes {
        for (variant, found) in variants.iter().zip(&mut found) {
            let rounds = (rounds + pass) / passes;
            let shape = variant.shape(base, folder);
            for (all, new) in found.iter_mut().zip(measure(shape, &loads, rounds)) {
                all.add(new);
            }
        }
    }
    // It is there only where a timeline was recorded.
    let _ = std::fs::remove_dir_all(folder);
    for (variant, of_loads) in variants.iter().zip(&found) {
        let first = of_loads[0].seconds.median();
        for ((load, found), rival) in loads.iter().zip(of_loads).zip(&found[0]) {
            let mut fields = found.report(*load, &base);
            variant.report(&mut fields);
            fields.insert("transport".into(), transport.into());
            fields.insert("driver".into(), text(matches, "driver").into());
            fields.insert("idle".into(), idle.into());
            fields.insert("ratio_to_first".into(), (found.seconds.median() / first).into());
            let speed = rival.seconds.median() / found.seconds.median();
            fields.insert("speed_to_first".into(), speed.into());
            table.row(fields);
        }
    }
    Ok(())
}

/// Where timelines go. The text lives as long as the process, as shapes of jobs are copied.
fn trace_folder() -> &'static str {
    let folder = std::env::temp_dir().join(format!("bps-perf-{}", std::process::id()));
    folder.to_string_lossy().into_owned().leak()
}

/// Says so where threads that never sleep have to share CPUs.
pub fn crowded(table: &mut Table, polling: u32, is_busy: bool) {
    let cpus = sample::cpus();
    if is_busy && polling as usize > cpus {
        table.note(format!(
            "{polling} threads poll without sleeping and share {cpus} CPUs: they take turns, which \
             no machine that is meant for this policy makes them do"
        ));
    }
}

/// What a round pushes.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Bytes of all tensors of a rank.
    pub size: usize,
    /// How many tensors.
    pub tensors: u32,
}

/// What the rounds of one load found.
#[derive(Clone, Default, Debug)]
pub struct Found {
    /// Of each round, on its slowest rank.
    pub seconds: Series,
    /// Of all threads over all rounds.
    cpu_seconds: f64,
    /// What the polling threads did, by job.
    jobs: Vec<Usage>,
}

impl Found {
    /// Adds what another job found.
    pub fn add(&mut self, other: Found) {
        self.seconds.0.extend(other.seconds.0);
        self.cpu_seconds += other.cpu_seconds;
        self.jobs.extend(other.jobs);
    }

    /// What the stages of the engine did.
    pub fn stages(&self) -> Stages {
        Stages::of(&self.jobs)
    }

    /// The fields that are about speed and about what held it up.
    pub fn report(&self, load: Load, shape: &JobShape) -> Fields {
        #[allow(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
        let (gigabytes, rounds) = (load.size as f64 / 1e9, self.seconds.0.len() as f64);
        let moved = gigabytes * rounds * f64::from(shape.workers);
        let mut fields = report::fields(json!({
            "workers": shape.workers,
            "servers": shape.servers,
            "cores": shape.cores,
            "size_bytes": load.size,
            "tensors": load.tensors,
            "rounds": rounds,
            "ms_p50": self.seconds.median() * 1e3,
            "ms_p99": self.seconds.quantile(0.99) * 1e3,
            "ms_min": self.seconds.quantile(0.0) * 1e3,
            "ms_spread": self.seconds.spread(),
            "cpu_s_per_gb": self.cpu_seconds / moved,
        }));
        report::rate(&mut fields, "algbw_gbs", gigabytes, &self.seconds);
        self.stages().report(&mut fields);
        fields
    }
}

/// What a rank saw of a round.
struct Round {
    seconds: f64,
    /// The process's processor time when it began and when it was over.
    cpu: (f64, f64),
    /// On rank 0: the threads before and after.
    looks: Option<(watch::Look, watch::Look)>,
}

/// Runs one job, in which the loads take turns.
pub fn measure(shape: JobShape, loads: &[Load], rounds: u32) -> Vec<Found> {
    let plan = loads.to_vec();
    let ranks = job::run(shape, move |worker| rank(worker, &plan, rounds));
    let per_load = |load: usize| {
        let (mut found, mut usage) = (Found::default(), Usage::default());
        for round in (0..rounds as usize).map(|round| round * loads.len() + load) {
            let all = || ranks.iter().map(|rank: &Vec<Round>| &rank[round]);
            let seconds = all().map(|one| one.seconds).fold(0.0, f64::max);
            let begin = all().map(|one| one.cpu.0).fold(f64::INFINITY, f64::min);
            let cpu = all().map(|one| one.cpu.1).fold(0.0, f64::max) - begin;
            found.seconds.0.push(seconds);
            found.cpu_seconds += cpu;
            if let Some((before, after)) = &ranks[0][round].looks {
                usage.add(before, after, seconds, cpu);
            }
        }
        found.jobs.push(usage);
        found
    };
    (0..loads.len()).map(per_load).collect()
}

/// The tensors of a load, on one rank.
struct Tensors {
    memory: Vec<Vec<f32>>,
    items: Vec<PushPull>,
}

impl Tensors {
    fn declare(worker: &Worker, load: Load, number: usize) -> Tensors {
        let count = (load.size / load.tensors as usize / 4).max(1);
        let declarations: Vec<Declaration> = (0..load.tensors)
            .map(|index| Declaration {
                name: format!("load.{number}.{index}"),
                dtype: DType::F32,
                shape: (count as u64).into(),
                operation: Operation::Sum,
                device: false,
                members: Members::ALL,
                receiver: None,
                encoding: None,
                store: None,
            })
            .collect();
        let ids = worker.declare(&declarations).expect("declared");
        let mut memory: Vec<Vec<f32>> = ids.iter().map(|_| vec![1.0; count]).collect();
        let item = |((&tensor, values), priority): ((_, &mut Vec<f32>), i64)| {
            let target = values.as_mut_ptr().cast::<u8>();
            PushPull { tensor, source: target.cast_const(), target, priority }
        };
        let priorities = (0..).map(|index: i64| -index);
        let items = ids.iter().zip(&mut memory).zip(priorities).map(item).collect();
        Tensors { memory, items }
    }
}

fn rank(worker: &Worker, loads: &[Load], rounds: u32) -> Vec<Round> {
    let declare = |(number, load): (usize, &Load)| Tensors::declare(worker, *load, number);
    let mut tensors: Vec<Tensors> = loads.iter().enumerate().map(declare).collect();
    let mut seen = Vec::new();
    for round in 0..rounds + WARM_UP {
        for load in &mut tensors {
            let before = (worker.rank() == 0).then(watch::look);
            worker.barrier(PATIENCE).expect("barrier");
            let (start, cpu) = (Instant::now(), sample::cpu_seconds());
            // SAFETY: `memory` lives until all handles are done, and nobody looks at it meanwhile.
            let handles = unsafe { worker.push_pull(&load.items) }.expect("pushed");
            for handle in &handles {
                assert_eq!(handle.wait(PATIENCE), Ok(true), "a round took too long");
            }
            let seconds = start.elapsed().as_secs_f64();
            let cpu = (cpu, sample::cpu_seconds());
            // The loops have told all that they did, and nobody does anything else yet.
            worker.barrier(PATIENCE).expect("barrier");
            let looks = before.map(|before| (before, watch::look()));
            if round >= WARM_UP {
                seen.push(Round { seconds, cpu, looks });
            }
            for values in &mut load.memory {
                values.fill(1.0);
            }
        }
    }
    seen
}
