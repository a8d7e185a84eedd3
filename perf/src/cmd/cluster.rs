//! `bps-perf cluster`: push_pull between hosts with shaped links, on one machine.
//!
//! The hosts are network namespaces, and the real programs run there: a scheduler on the first
//! worker's host, servers, and a process for each rank. In the same run and on the same links, in
//! turn, a bare stream in both directions of every link says what the line carries, and with
//! `--peer gloo` torch.distributed does an all-reduce of the same size.
//!
//! Invariant: a round's time is that of its slowest rank, from a barrier of all ranks.

#![forbid(unsafe_code)]

use crate::Outcome;
use crate::arguments::{self, flag, integer, number};
use crate::report::{self, Fields, Table};
use crate::sample::Series;
use crate::script::Script;
use crate::stage::job::{Job, PATIENCE, Plan};
use crate::stage::{Crew, Member, Shape, Stage, parse_rate, stream, unavailable};
use bps_worker::Encoding;
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Rounds that are not timed: they grow windows, buffers and page tables.
const WARM_UP: u32 = 2;
/// Time of one burst of the bare stream, milliseconds.
const BURST_MS: u64 = 1500;
/// Bursts of the bare stream in a run, spread over its rounds.
const BURSTS_MAX: u32 = 5;
/// What is said in the place of an encoding.
const NOT_ENCODED: &str = "none";
/// How long an all-reduce of the peer may take, its start included.
const PEER_PATIENCE: Duration = Duration::from_secs(300);

/// The arguments that say what the links are, for every command with a stage.
pub fn link_arguments(command: Command) -> Command {
    command
        .arg(
            Arg::new("rate")
                .long("rate")
                .help("Rate of each direction of each link: 500mbit, 10gbit")
                .value_parser(parse_rate)
                .default_value("500mbit"),
        )
        .arg(number("queue-ms", "20", "Longest queue in front of a link, milliseconds"))
        .arg(
            Arg::new("congestion")
                .long("congestion")
                .help("Congestion control of all connections (bbr, cubic, ...), not the machine's"),
        )
        .arg(
            Arg::new("sndbuf")
                .long("sndbuf")
                .value_name("BYTES")
                .help("Largest send buffer that the kernel gives a connection by itself")
                .value_parser(value_parser!(u32).range(4096..=1 << 30)),
        )
        .arg(
            Arg::new("as-is")
                .long("as-is")
                .help("Leave tcp_slow_start_after_idle at 1; docs/running.md advises 0")
                .action(ArgAction::SetTrue),
        )
        .arg(
            Arg::new("set")
                .long("set")
                .value_name("NAME=VALUE")
                .help("A further variable of every process of the job; may be repeated")
                .value_parser(parse_variable)
                .action(ArgAction::Append),
        )
        .arg(arguments::json())
}

/// The arguments.
pub fn command() -> Command {
    let command = Command::new("cluster")
        .about(
            "Stages hosts with shaped links on this machine, and measures push_pull between them \
             beside the line, the optimum and a peer.",
        )
        .arg(number("workers", "4", "Hosts with a rank"))
        .arg(
            Arg::new("servers")
                .long("servers")
                .help("Hosts with a server and no rank; 0 needs --colocated")
                .value_parser(value_parser!(u32).range(0..=200))
                .default_value("4"),
        )
        .arg(flag("colocated", "Every worker's host has a server too; parts are placed as `mixed`"))
        .arg(number("cores", "1", "Polling threads of each server"))
        .arg(number("tensors", "1", "Tensors that the size is divided into"))
        .arg(number("rounds", "11", "Timed rounds"))
        .arg(arguments::sizes("size", "64M", "Bytes that each worker pushes in a round"))
        .arg(
            Arg::new("encoding")
                .long("encoding")
                .value_name("TEXT")
                .help(
                    "How tensors are encoded, as docs/compression.md has it, or none; may be \
                     repeated: they take turns",
                )
                .value_parser(parse_encoding)
                .action(ArgAction::Append),
        )
        .arg(
            Arg::new("peer")
                .long("peer")
                .help("What runs in turn with push_pull")
                .value_parser(["gloo"]),
        )
        .arg(
            Arg::new("python")
                .long("python")
                .help("Python that has torch, made by python/environment")
                .default_value(".venv/bin/python")
                .value_parser(value_parser!(PathBuf)),
        );
    link_arguments(command)
}

pub fn parse_variable(text: &str) -> Result<(String, String), String> {
    let pair = text.split_once('=').ok_or_else(|| format!("{text:?}: NAME=VALUE is needed"))?;
    Ok((pair.0.to_string(), pair.1.to_string()))
}

/// An encoding, in its canonical text; or none.
fn parse_encoding(text: &str) -> Result<String, String> {
    if text == NOT_ENCODED {
        return Ok(text.to_string());
    }
    let encoding: Result<Encoding, _> = text.parse();
    encoding.map(|encoding| encoding.to_string()).map_err(|error| error.to_string())
}

/// What [`link_arguments`] say.
pub fn shape(matches: &ArgMatches) -> Shape {
    Shape {
        rate_bits: *matches.get_one("rate").expect("has a default"),
        queue_ms: *matches.get_one("queue-ms").expect("has a default"),
        congestion: matches.get_one("congestion").cloned(),
        sndbuf_bytes: matches.get_one("sndbuf").copied(),
        as_is: matches.get_flag("as-is"),
    }
}

/// The variables that `--set` gives.
pub fn variables(matches: &ArgMatches) -> Vec<(String, String)> {
    matches.get_many("set").map(|all| all.cloned().collect()).unwrap_or_default()
}

/// Measures each size with a job of its own.
pub fn run(matches: &ArgMatches) -> Outcome {
    let get = |name: &str| integer(matches, name);
    let plan = Plan {
        workers: get("workers"),
        ranks_per_host: 1,
        extra_servers: get("servers"),
        colocated: matches.get_flag("colocated"),
        cores: get("cores"),
        patience: PATIENCE,
        variables: variables(matches),
    };
    if plan.servers() == 0 {
        return Err("no server: give --servers, or --colocated".into());
    }
    if plan.workers == 1 && plan.colocated || plan.hosts() == 1 {
        return Err("one worker beside its own server uses no link: give --workers 2".into());
    }
    if let Some(why) = unavailable() {
        println!("skipped: {why}");
        return Ok(());
    }
    let shape = shape(matches);
    let mut table = Table::new(matches, "cluster", &describe(&plan, &shape), COLUMNS);
    let python = matches.get_one::<PathBuf>("python").expect("has a default");
    let peer = matches.contains_id("peer").then(|| usable(python)).transpose();
    let peer = peer.unwrap_or_else(|why| {
        table.note(format!("skipped: the peer gloo: {why}"));
        None
    });
    let stage = Stage::new(plan.hosts(), &shape)?;
    table.head();
    let encodings = matches.get_many::<String>("encoding").into_iter().flatten().cloned();
    let mut encodings: Vec<String> = encodings.collect();
    if encodings.is_empty() {
        encodings.push(NOT_ENCODED.to_string());
    }
    for size in arguments::bytes(matches, "size") {
        let (tensors, rounds) = (get("tensors"), get("rounds"));
        let work = Work { size, tensors, rounds, encodings: &encodings, python: peer };
        let figures = measure(&stage, &plan, &work)?;
        for (number, encoding) in encodings.iter().enumerate() {
            let mut fields = report(&figures, number, size, plan.optimum());
            fields.extend(report::fields(json!({
                "workers": plan.workers, "servers": plan.extra_servers,
                "colocated": plan.colocated, "cores": plan.cores, "tensors": work.tensors,
                "rounds": work.rounds, "encoding": encoding,
            })));
            fields.extend(link_fields(&shape, &plan));
            table.row(fields);
        }
    }
    Ok(())
}

/// What people see of a result.
const COLUMNS: &[&str] = &[
    "size_bytes",
    "encoding",
    "algbw_gbs",
    "speed_to_first",
    "ms_p50",
    "ms_p99",
    "line_gbs",
    "fraction_of_line",
    "fraction_of_optimum",
    "peer_algbw_gbs",
    "ratio",
];

/// What the links were, for every command with a stage.
pub fn link_fields(shape: &Shape, plan: &Plan) -> Fields {
    let set = plan.variables.iter().map(|(name, value)| format!("{name}={value}"));
    report::fields(json!({
        "rate_bits": shape.rate_bits, "queue_ms": shape.queue_ms,
        "congestion": shape.congestion, "sndbuf_bytes": shape.sndbuf_bytes,
        "as_is": shape.as_is,
        "set": set.collect::<Vec<_>>(),
    }))
}

/// What is run on a stage.
struct Work<'run> {
    size: usize,
    tensors: u32,
    rounds: u32,
    /// How they are encoded, in turn.
    encodings: &'run [String],
    /// The peer's Python, if there is a peer.
    python: Option<&'run Path>,
}

/// Seconds of each round, and bytes a second of each link in each burst.
struct Figures {
    /// By encoding.
    ours: Vec<Vec<f64>>,
    peer: Vec<f64>,
    line: Vec<f64>,
}

fn measure(stage: &Stage, plan: &Plan, work: &Work<'_>) -> Result<Figures, String> {
    let mut arguments = vec!["stage-rank".to_string(), work.size.to_string()];
    arguments.push(work.tensors.to_string());
    arguments.extend(work.encodings.iter().cloned());
    let mut job = Job::start(stage, plan, &arguments)?;
    let mut line = stream::crew(stage)?;
    let mut peer =
        work.python.map(|python| gloo(stage, plan.workers, work.size, python)).transpose()?;
    let ours = vec![Vec::new(); work.encodings.len()];
    let mut figures = Figures { ours, peer: Vec::new(), line: Vec::new() };
    let between = work.rounds.div_ceil(BURSTS_MAX);
    for round in 0..WARM_UP + work.rounds {
        let timed = round >= WARM_UP;
        if timed && (round - WARM_UP).is_multiple_of(between) {
            figures.line.extend(line.work(&BURST_MS.to_string())?.into_iter().flatten());
        }
        for (number, ours) in figures.ours.iter_mut().enumerate() {
            let seconds = job.ranks.slowest(&number.to_string())?;
            if timed {
                ours.push(seconds);
            }
        }
        let theirs = peer.as_mut().map(|crew| crew.slowest("round")).transpose()?;
        if timed {
            figures.peer.extend(theirs);
        }
    }
    peer.map_or(Ok(()), Crew::end)?;
    line.end()?;
    job.end()?;
    Ok(figures)
}

/// Whether a Python can run the peer.
fn usable(python: &Path) -> Result<&Path, String> {
    let output = std::process::Command::new(python)
        .args(["-c", "import torch.distributed as dist; assert dist.is_gloo_available()"])
        .output()
        .map_err(|error| format!("{}: {error}; run python/environment", python.display()))?;
    if output.status.success() {
        return Ok(python);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.lines().last().unwrap_or_default();
    Err(format!("{}: {last}; run python/environment", python.display()))
}

/// torch.distributed's gloo on the workers' hosts.
fn gloo(stage: &Stage, workers: u32, size: usize, python: &Path) -> Result<Crew, String> {
    let script = Script::new("gloo_rank.py", include_str!("../../gloo_rank.py"))?;
    let master = Stage::address(0).to_string();
    let start = |rank: u32| {
        let mut command = stage.command(rank, python);
        command.arg(script.path()).args([rank.to_string(), workers.to_string(), master.clone()]);
        // Else gloo asks the resolver for the machine's name, which no staged host knows.
        command.arg(size.to_string()).env("GLOO_SOCKET_IFNAME", "eth0");
        Member::start(format!("rank {rank} of gloo"), command)
    };
    Crew::new((0..workers).map(start).collect::<Result<_, _>>()?, PEER_PATIENCE)
}

fn report(figures: &Figures, number: usize, size: usize, optimum: f64) -> Fields {
    #[allow(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
    let gigabytes = size as f64 / 1e9;
    let (ours, line) = (Series(figures.ours[number].clone()), Series(figures.line.clone()));
    let first = Series(figures.ours[0].clone());
    let mut all = report::fields(json!({
        "size_bytes": size,
        "ms_p50": ours.median() * 1e3,
        "ms_p99": ours.quantile(0.99) * 1e3,
        "line_gbs": line.median() / 1e9,
        "line_min_gbs": line.quantile(0.0) / 1e9,
        "speed_to_first": first.median() / ours.median(),
    }));
    report::rate(&mut all, "algbw_gbs", gigabytes, &ours);
    let fraction = gigabytes / ours.median() / (line.median() / 1e9);
    all.insert("fraction_of_line".to_owned(), fraction.into());
    all.insert("fraction_of_optimum".to_owned(), (fraction * optimum).into());
    if !figures.peer.is_empty() {
        let peer = Series(figures.peer.clone());
        all.insert("peer_ms_p50".to_owned(), (peer.median() * 1e3).into());
        all.insert("ratio".to_owned(), (peer.median() / ours.median()).into());
        report::rate(&mut all, "peer_algbw_gbs", gigabytes, &peer);
    }
    all
}

fn describe(plan: &Plan, shape: &Shape) -> String {
    #[allow(clippy::cast_precision_loss, reason = "rates are far below 2^53")]
    let megabits = shape.rate_bits as f64 / 1e6;
    let (workers, servers, cores) = (plan.workers, plan.extra_servers, plan.cores);
    let beside = if plan.colocated { "with a server each" } else { "without servers" };
    format!(
        "{workers} worker hosts {beside}, {servers} server hosts; {cores} cores a server; \
         {megabits} Mbit/s each way"
    )
}
