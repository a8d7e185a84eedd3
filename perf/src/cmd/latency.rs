//! `bps-perf latency`: one push_pull of 4 KiB through a server core and back, as its caller sees
//! it, beside a bare ping-pong of the same bytes between two threads that wait in the same way.
//!
//! Invariant: a round is a job of its own and, when it has ended, a ping-pong of its own: polling
//! threads of the one never take CPUs from the other.

use crate::arguments::{self, integer, number, text};
use crate::cmd::pushpull::crowded;
use crate::report::{self, Table};
use crate::sample::Series;
use crate::{Outcome, bare};
use bps_engine::base::{DType, Operation};
use bps_engine::config::TransportChoice;
use bps_engine::limits::HEADER_BYTES;
use bps_tests::job::{self, JobShape};
use bps_worker::Members;
use bps_worker::{Declaration, PushPull, Worker};
use clap::{ArgMatches, Command};
use serde_json::json;
use std::time::{Duration, Instant};

/// A push_pull that takes longer than this is a hang.
const PATIENCE: Option<Duration> = Some(Duration::from_secs(60));
/// Threads that wait for work: the caller, the NIC loop, the server core.
const THREADS: u32 = 3;

/// The arguments.
pub fn command() -> Command {
    Command::new("latency")
        .about(
            "Measures a push_pull of 4 KiB, 1 worker and 1 server core, beside a bare ping-pong.",
        )
        .arg(arguments::transport())
        .arg(arguments::driver())
        .arg(arguments::idle())
        .arg(number("size", "4096", "Bytes of the tensor"))
        .arg(number("samples", "4000", "Timed push_pulls, and ping-pongs, of a round"))
        .arg(number("rounds", "5", "Rounds of both, in turn"))
        .arg(arguments::json())
}

/// Measures both in turn.
pub fn run(matches: &ArgMatches) -> Outcome {
    let (transport, idle) = (text(matches, "transport"), text(matches, "idle"));
    let (size, samples) = (integer(matches, "size") as usize, integer(matches, "samples"));
    let rounds = integer(matches, "rounds");
    let title = format!("push_pull of {size} bytes over {transport}, {idle}, {rounds} rounds");
    let columns = ["p50_us", "p99_us", "bare_p50_us", "bare_p99_us", "ratio", "spread"];
    let mut table = Table::new(matches, "latency", &title, &columns);
    crowded(&mut table, THREADS, idle == "busy");
    let shape = JobShape {
        workers: 1,
        transport: arguments::transport_of(matches),
        driver: arguments::driver_of(matches),
        idle: arguments::idle_of(matches),
        ..JobShape::default()
    };
    let (mut all, mut bare, mut medians) = <(Series, Series, Series)>::default();
    for _ in 0..rounds {
        let mut ranks = job::run(shape, move |worker| push_pulls(worker, size, samples));
        let seconds = Series(ranks.remove(0));
        medians.0.push(seconds.median());
        all.0.extend(seconds.0);
        let (bytes, trips) = (size + HEADER_BYTES, samples as usize);
        bare.0.extend(match shape.transport {
            TransportChoice::Shm => bare::memory_trips(bytes, trips, shape.idle)?,
            _ => bare::socket_trips(bytes, trips, shape.idle)?,
        });
    }
    table.head();
    table.row(report::fields(json!({
        "transport": transport,
        "driver": text(matches, "driver"),
        "idle": idle,
        "size_bytes": size,
        "samples": all.0.len(),
        "rounds": rounds,
        "p50_us": all.median() * 1e6,
        "p99_us": all.quantile(0.99) * 1e6,
        "bare_p50_us": bare.median() * 1e6,
        "bare_p99_us": bare.quantile(0.99) * 1e6,
        "ratio": all.median() / bare.median(),
        "spread": medians.spread(),
    })));
    Ok(())
}

/// Seconds of each of so many push_pulls, after a tenth as many that are not timed.
fn push_pulls(worker: &Worker, size: usize, samples: u32) -> Vec<f64> {
    let mut values = vec![1u8; size];
    let declaration = Declaration {
        name: "latency".into(),
        dtype: DType::U8,
        shape: (size as u64).into(),
        operation: Operation::Sum,
        device: false,
        members: Members::ALL,
        receiver: None,
        encoding: None,
        store: None,
    };
    let tensor = worker.declare(&[declaration]).expect("declared")[0];
    let target = values.as_mut_ptr();
    let item = PushPull { tensor, source: target.cast_const(), target, priority: 0 };
    let one = |_| {
        let begin = Instant::now();
        // SAFETY: `values` outlives the handle, which is waited for before anything else happens.
        let handles = unsafe { worker.push_pull(&[item]) }.expect("pushed");
        assert_eq!(handles[0].wait(PATIENCE), Ok(true), "a push_pull took too long");
        begin.elapsed().as_secs_f64()
    };
    let _ = (0..samples / 10).map(one).sum::<f64>();
    (0..samples).map(one).collect()
}
