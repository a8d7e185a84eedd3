//! Probes: small experiments on what the kernel and the processor offer, to choose between two ways
//! on this machine's own evidence. Each is a file; none of them uses the engine's data path,
//! but for the helpers that one is about.
//!
//! Invariant: the variants of a probe move the same bytes in rounds that take turns; processor time
//! is that of both ends.

use crate::pair::{self, Cost, Start};
use crate::report::{self, Fields};
use crate::sample::Series;
use std::io::{self, Write};
use std::net::TcpStream;

mod checksum;
mod driver;
mod flows;
mod helpers;
mod hugepages;
mod memory;
mod multishot;
mod registered;
mod ring;
mod scratch;
mod sockbuf;
mod spin;
mod stores;
mod zerocopy;

/// How much is done.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Bytes that a sample moves, about.
    pub bytes: usize,
    /// Samples of each variant.
    pub rounds: usize,
}

/// An experiment.
pub struct Probe {
    /// Its name on the command line.
    pub name: &'static str,
    /// What it asks.
    pub asks: &'static str,
    /// The fields that people see.
    pub columns: &'static [&'static str],
    /// One result a variant.
    pub measure: fn(Effort) -> io::Result<Vec<Fields>>,
}

/// All of them.
pub const PROBES: &[&Probe] = &[
    &checksum::PROBE,
    &driver::PROBE,
    &flows::PROBE,
    &helpers::PROBE,
    &hugepages::PROBE,
    &multishot::PROBE,
    &registered::PROBE,
    &ring::PROBE,
    &scratch::PROBE,
    &sockbuf::PROBE,
    &spin::PROBE,
    &stores::PROBE,
    &zerocopy::PROBE,
];

/// Runs every variant once in each round, in an order that turns, and reports speed and cost under
/// the names `gbps` and `cpu_s_per_gb`. `name` puts down which variant it was, and what else was
/// seen.
fn in_turn<V, E: Default>(
    effort: Effort,
    variants: &[V],
    mut once: impl FnMut(&V, &mut E) -> io::Result<Cost>,
    name: impl Fn(&V, &E) -> Fields,
) -> io::Result<Vec<Fields>> {
    let mut found: Vec<(Series, Series, E)> = variants.iter().map(|_| Default::default()).collect();
    for round in 0..effort.rounds {
        for turn in 0..variants.len() {
            let index = (round + turn) % variants.len();
            let (seconds, cpu, extra) = &mut found[index];
            let cost = once(&variants[index], extra)?;
            seconds.0.push(cost.seconds);
            cpu.0.push(cost.cpu_seconds);
        }
    }
    #[allow(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
    let gigabytes = effort.bytes as f64 / 1e9;
    let report = |(variant, (seconds, cpu, extra)): (&V, &(Series, Series, E))| {
        let mut fields = name(variant, extra);
        report::rate(&mut fields, "gbps", gigabytes, seconds);
        let per_gb = Series(cpu.0.iter().map(|seconds| seconds / gigabytes).collect());
        report::cost(&mut fields, "cpu_s_per_gb", &per_gb);
        fields
    };
    Ok(variants.iter().zip(&found).map(report).collect())
}

/// Moves bytes between two threads over a loopback socket, and returns what it cost.
fn stream(
    sender: impl FnOnce(TcpStream, Start) -> io::Result<Cost> + Send,
    receiver: impl FnOnce(TcpStream, Start) -> io::Result<Cost> + Send,
) -> io::Result<Cost> {
    let (here, there) = pair::sockets()?;
    let (sent, received) =
        pair::run(move |start| sender(here, start), move |start| receiver(there, start))?;
    Ok(crate::bare::later(sent, received))
}

/// Sends so many messages by plain calls.
fn send_plainly(size: usize, count: usize) -> impl FnOnce(TcpStream, Start) -> io::Result<Cost> {
    move |mut socket, start| {
        let message = vec![1; size];
        let clock = start.ready()?;
        (0..count).try_for_each(|_| socket.write_all(&message))?;
        Ok(clock.stop())
    }
}

/// Messages of this size that make up the bytes of a sample, at least one.
fn count(effort: Effort, size: usize) -> usize {
    (effort.bytes / size).max(1)
}
