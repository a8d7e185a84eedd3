//! How long a waiting thread should spin before it sleeps: a ping-pong whose first thread thinks
//! between two trips, as a training step does, and what a trip takes and costs.

#![forbid(unsafe_code)]

use super::{Effort, Probe};
use crate::bare::Socket;
use crate::pair;
use crate::report::{self, Fields};
use crate::sample::{self, Series};
use bps_engine::config::Idle;
use bps_engine::harness::Idler;
use serde_json::json;
use std::io;
use std::time::{Duration, Instant};

/// See the [module](self).
pub const PROBE: Probe = Probe {
    name: "spin",
    asks: "what spinning before sleep saves in latency, and what it costs in processor time",
    columns: &["think_us", "spin_us", "p50_us", "p99_us", "cpu_us_per_trip"],
    measure,
};

const SPINS_US: [u64; 5] = [0, 5, 20, 50, 200];
const THINKS_US: [u64; 3] = [0, 30, 300];
const MESSAGE_BYTES: usize = 4 << 10;
/// Bytes of the effort for which one trip is made.
const BYTES_PER_TRIP: usize = 256 << 10;

fn measure(effort: Effort) -> io::Result<Vec<Fields>> {
    let trips = (effort.bytes / BYTES_PER_TRIP).max(20);
    let mut rows = Vec::new();
    for think in THINKS_US {
        let mut found = vec![(Series::default(), 0.0); SPINS_US.len()];
        for _ in 0..effort.rounds {
            for (spin, (all, cpu)) in SPINS_US.iter().zip(&mut found) {
                let (seconds, used) = once(trips, Duration::from_micros(*spin), think)?;
                all.0.extend(seconds.iter().map(|seconds| seconds * 1e6));
                *cpu += used * 1e6;
            }
        }
        for (spin, (all, cpu)) in SPINS_US.iter().zip(&found) {
            #[allow(clippy::cast_precision_loss, reason = "counts of trips are small")]
            let each = cpu / all.0.len() as f64;
            rows.push(report::fields(json!({
                "think_us": think,
                "spin_us": spin,
                "p50_us": all.median(),
                "p99_us": all.quantile(0.99),
                "spread": all.spread(),
                "cpu_us_per_trip": each,
            })));
        }
    }
    Ok(rows)
}

/// Seconds of each trip without the thinking, and the processor time of both threads in all.
fn once(trips: usize, spin: Duration, think: u64) -> io::Result<(Vec<f64>, f64)> {
    let (here, there) = pair::sockets()?;
    let socket = move |stream| Socket::with(stream, Idler::new(Idle::Adaptive, spin));
    let (seconds, ()) = pair::run(
        move |start| {
            let (mut socket, mut bytes) = (socket(here)?, vec![1; MESSAGE_BYTES]);
            start.ready()?;
            let cpu = sample::cpu_seconds();
            let trip = |_| {
                // Asleep, because a thread that computes would be counted as one that spins.
                if think > 0 {
                    std::thread::sleep(Duration::from_micros(think));
                }
                let begin = Instant::now();
                socket.send(&bytes)?;
                socket.receive(&mut bytes)?;
                Ok(begin.elapsed().as_secs_f64())
            };
            let seconds = (0..trips).map(trip).collect::<io::Result<Vec<f64>>>()?;
            Ok((seconds, sample::cpu_seconds() - cpu))
        },
        move |start| {
            let (mut socket, mut bytes) = (socket(there)?, vec![1; MESSAGE_BYTES]);
            start.ready()?;
            (0..trips).try_for_each(|_| {
                socket.receive(&mut bytes)?;
                socket.send(&bytes)
            })
        },
    )?;
    Ok(seconds)
}
