//! `bps-perf pushpull`: the whole engine without Python. Scheduler, servers and workers run as
//! threads of this process, over loopback or shared memory, so the figure has every copy, sum and
//! message of a real job on one host.
//!
//! Invariant: the clock runs from a barrier of all ranks until the last tensor of the slowest rank
//! has landed.

use crate::{Outcome, place, sample};
use bps_engine::base::{DType, Operation};
use bps_engine::config::{Idle, TcpDriver, TransportChoice};
use bps_tests::job::{self, JobShape};
use bps_worker::{Declaration, PushPull, Worker};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use serde_json::json;
use std::time::{Duration, Instant};

/// A round that takes longer than this is a hang.
const PATIENCE: Option<Duration> = Some(Duration::from_secs(120));

fn number(name: &'static str, default: &'static str, help: &'static str) -> Arg {
    Arg::new(name)
        .long(name)
        .help(help)
        .value_parser(value_parser!(u32).range(1..))
        .default_value(default)
}

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
        .arg(number("tensors", "1", "Tensors that the size is divided into"))
        .arg(number("rounds", "20", "Timed rounds"))
        .arg(number("partition", "1048576", "Largest part, bytes"))
        .arg(
            Arg::new("transport")
                .long("transport")
                .help("tcp or shm")
                .value_parser(["tcp", "shm"])
                .default_value("tcp"),
        )
        .arg(
            Arg::new("driver")
                .long("driver")
                .help("How TCP talks to the kernel")
                .value_parser(["auto", "uring", "poll"])
                .default_value("auto"),
        )
        .arg(
            Arg::new("idle")
                .long("idle")
                .help("What polling threads do when there is nothing to do")
                .value_parser(["adaptive", "busy"])
                .default_value("adaptive"),
        )
        .arg(
            Arg::new("size")
                .long("size")
                .value_name("BYTES[,BYTES…]")
                .help("Bytes that each worker pushes in a round; K, M and G are powers of 1024")
                .value_delimiter(',')
                .value_parser(sample::parse_size)
                .default_value("64M"),
        )
        .arg(
            Arg::new("json")
                .long("json")
                .help("Print one JSON object per line")
                .action(ArgAction::SetTrue),
        )
}

/// Measures each size with a job of its own.
pub fn run(matches: &ArgMatches) -> Outcome {
    let get = |name: &str| *matches.get_one::<u32>(name).expect("has a default");
    let text = |name: &str| matches.get_one::<String>(name).expect("has a default").as_str();
    let shape = JobShape {
        workers: get("workers"),
        servers: get("servers"),
        cores: get("cores"),
        partition_bytes: get("partition"),
        transport: if text("transport") == "shm" {
            TransportChoice::Shm
        } else {
            TransportChoice::Tcp
        },
        driver: match text("driver") {
            "uring" => TcpDriver::Uring,
            "poll" => TcpDriver::Poll,
            _ => TcpDriver::Auto,
        },
        idle: if text("idle") == "busy" { Idle::Busy } else { Idle::Adaptive },
        payload_checksum: false,
    };
    let place = place::describe();
    let as_json = matches.get_flag("json");
    let (tensors, rounds) = (get("tensors"), get("rounds"));
    if !as_json {
        println!("{}", place::line(&place));
        println!(
            "{} workers, {} servers × {} cores, {}, {tensors} tensors, {rounds} rounds",
            shape.workers,
            shape.servers,
            shape.cores,
            text("transport")
        );
        println!(
            "{:>11} {:>9} {:>9} {:>9} {:>9} {:>11} {:>9}",
            "bytes", "ms p50", "ms p99", "ms min", "GB/s", "cpu s/GB", "cores"
        );
    }
    for &size in matches.get_many::<usize>("size").expect("has a default") {
        let figures = measure(shape, size, tensors, rounds);
        let ms = |quantile: f64| sample::quantile(&figures.seconds, quantile) * 1e3;
        #[allow(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
        let gigabytes = size as f64 / 1e9;
        let algbw = gigabytes / (ms(0.5) / 1e3);
        let moved = gigabytes * f64::from(rounds) * f64::from(shape.workers);
        let cpu_per_gb = figures.cpu_seconds / moved;
        let cores = figures.cpu_seconds / figures.seconds.iter().sum::<f64>();
        if as_json {
            let mut object = json!({
                "command": "pushpull",
                "workers": shape.workers,
                "servers": shape.servers,
                "cores": shape.cores,
                "transport": text("transport"),
                "driver": text("driver"),
                "idle": text("idle"),
                "partition_bytes": shape.partition_bytes,
                "tensors": tensors,
                "rounds": rounds,
                "size_bytes": size,
                "algbw_gbs": algbw,
                "ms_p50": ms(0.5),
                "ms_p99": ms(0.99),
                "ms_min": ms(0.0),
                "cpu_s_per_gb": cpu_per_gb,
            });
            object["place"] = place.clone();
            println!("{object}");
        } else {
            println!(
                "{size:>11} {:>9.3} {:>9.3} {:>9.3} {algbw:>9.3} {cpu_per_gb:>11.3} {cores:>9.2}",
                ms(0.5),
                ms(0.99),
                ms(0.0)
            );
        }
    }
    Ok(())
}

struct Figures {
    /// Of each round.
    seconds: Vec<f64>,
    /// Of all threads over all rounds.
    cpu_seconds: f64,
}

fn measure(shape: JobShape, size: usize, tensors: u32, rounds: u32) -> Figures {
    let ranks = job::run(shape, move |worker| rank(worker, size, tensors, rounds));
    // The slowest rank of each round counts.
    let slowest = |round| ranks.iter().map(|one: &Figures| one.seconds[round]).fold(0.0, f64::max);
    let seconds = (0..rounds as usize).map(slowest).collect();
    Figures { seconds, cpu_seconds: ranks[0].cpu_seconds }
}

fn rank(worker: &Worker, size: usize, tensors: u32, rounds: u32) -> Figures {
    let count = (size / tensors as usize / 4).max(1);
    let declarations: Vec<Declaration> = (0..tensors)
        .map(|index| Declaration {
            name: format!("tensor.{index}"),
            dtype: DType::F32,
            count: count as u64,
            operation: Operation::Sum,
        })
        .collect();
    let ids = worker.declare(&declarations).expect("declared");
    let mut memory: Vec<Vec<f32>> = ids.iter().map(|_| vec![1.0; count]).collect();
    let items: Vec<PushPull> = ids
        .iter()
        .zip(&mut memory)
        .zip((0..).map(|index: i64| -index))
        .map(|((&tensor, values), priority)| {
            let target = values.as_mut_ptr().cast::<u8>();
            PushPull { tensor, source: target.cast_const(), target, priority }
        })
        .collect();
    let mut seconds = Vec::new();
    let mut cpu_before = 0.0;
    for round in 0..rounds + 2 {
        // Two rounds warm caches, sockets and page tables.
        if round == 2 {
            cpu_before = sample::cpu_seconds();
        }
        worker.barrier(PATIENCE).expect("barrier");
        let start = Instant::now();
        // SAFETY: `memory` lives until all handles are done, and nobody looks at it meanwhile.
        let handles = unsafe { worker.push_pull(&items) }.expect("pushed");
        for handle in &handles {
            assert_eq!(handle.wait(PATIENCE), Ok(true), "a round took too long");
        }
        let elapsed = start.elapsed().as_secs_f64();
        if round >= 2 {
            seconds.push(elapsed);
        }
        for values in &mut memory {
            values.fill(1.0);
        }
    }
    Figures { seconds, cpu_seconds: sample::cpu_seconds() - cpu_before }
}
