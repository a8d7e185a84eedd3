//! `bps-perf rings`: the two queues between threads beside each other, between two pinned threads.
//!
//! Invariant: both contenders carry the same items through the same loop to a thread that sends
//! each back over a second queue of the same kind; nothing else runs on the two CPUs.

#![forbid(unsafe_code)]

use crate::arguments::{self, integer, number};
use crate::report::{self, Table};
use crate::{Outcome, sample};
use bps_engine::config::Idle;
use bps_engine::harness::{self, Idler, SPIN_ROOMY};
use bps_engine::ring::{Consumer, Mpsc, Producer, spsc};
use bps_engine::topo::Topology;
use bps_engine::topo::pin::affinity;
use bps_engine::topo::plan::{Near, Request, Side, plan};
use clap::{ArgMatches, Command};
use serde_json::json;
use std::path::Path;

/// Items that fit each queue.
const CAPACITY: usize = 1024;

/// The arguments.
pub fn command() -> Command {
    Command::new("rings")
        .about("Measures the queues between threads: items a second, and a round trip.")
        .arg(number("items", "200000", "Items of one sample"))
        .arg(number("rounds", "11", "Interleaved rounds, of which the median is taken"))
        .arg(arguments::json())
}

/// Measures with one item under way, and with as many as fit.
pub fn run(matches: &ArgMatches) -> Outcome {
    let (items, rounds) = (integer(matches, "items"), integer(matches, "rounds") as usize);
    let cpus = two_cpus()?;
    let title = format!("there and back between CPUs {} and {}, {rounds} rounds", cpus.0, cpus.1);
    let columns = ["under_way", "spsc_ns", "mpsc_ns", "spsc_items_per_us", "mpsc_items_per_us"];
    let table = Table::new(matches, "rings", &title, &columns);
    table.head();
    for window in [1, CAPACITY] {
        let [spsc_seconds, mpsc_seconds] = sample::interleaved(
            rounds,
            1,
            [&mut || exchange([spsc(CAPACITY), spsc(CAPACITY)], cpus, window, items), &mut || {
                exchange([mpsc(), mpsc()], cpus, window, items)
            }],
        );
        let mut fields = report::fields(json!({
            "under_way": window,
            "items": items,
            "rounds": rounds,
        }));
        for (name, seconds) in [("spsc", &spsc_seconds), ("mpsc", &mpsc_seconds)] {
            let nanoseconds = |seconds: &f64| seconds * 1e9 / f64::from(items);
            let each = sample::Series(seconds.0.iter().map(nanoseconds).collect());
            report::cost(&mut fields, &format!("{name}_ns"), &each);
            let rate = f64::from(items) / seconds.median() / 1e6;
            fields.insert(format!("{name}_items_per_us"), rate.into());
        }
        table.row(fields);
    }
    Ok(())
}

/// Two CPUs of different physical cores where there are such.
fn two_cpus() -> Result<(usize, usize), Box<dyn std::error::Error>> {
    let affinity = affinity()?;
    let threads = [Near::Anywhere, Near::Anywhere];
    let request = Request {
        side: Side::First,
        threads: &threads,
        affinity: &affinity,
        others: 0,
        use_isolated: false,
    };
    let plan = plan(&Topology::read(Path::new("/"))?, &request);
    match plan.places.as_slice() {
        [first, second] if !plan.is_crowded => {
            Ok((first.cpu.ok_or("no CPU")?, second.cpu.ok_or("no CPU")?))
        }
        _ => Err("two threads need two CPUs: widen the affinity mask or the quota".into()),
    }
}

/// The writing end of either queue.
trait Push: Send + 'static {
    fn push(&mut self, item: u64) -> bool;
}

/// The reading end of either queue.
trait Pop: Send + 'static {
    fn pop(&mut self) -> Option<u64>;
}

impl Push for Producer<u64> {
    fn push(&mut self, item: u64) -> bool {
        Producer::push(self, item).is_ok()
    }
}

impl Pop for Consumer<u64> {
    fn pop(&mut self) -> Option<u64> {
        Consumer::pop(self)
    }
}

impl Push for Mpsc<u64> {
    fn push(&mut self, item: u64) -> bool {
        Mpsc::push(self, item).is_ok()
    }
}

impl Pop for Mpsc<u64> {
    fn pop(&mut self) -> Option<u64> {
        Mpsc::pop(self)
    }
}

fn mpsc() -> (Mpsc<u64>, Mpsc<u64>) {
    let queue = Mpsc::new(CAPACITY);
    (queue.clone(), queue)
}

/// Sends `items` from a thread on one CPU to a thread on the other and back, at most `window` under
/// way. The calling thread stays unpinned: those that it starts would inherit its one CPU.
fn exchange<A: Push, B: Pop>(
    queues: [(A, B); 2],
    (here, there): (usize, usize),
    window: usize,
    items: u32,
) {
    let [(outward, arriving), (returning, inward)] = queues;
    let items = u64::from(items);
    let threads = [
        harness::spawn("echo", Some(there), move || echo(arriving, returning, items)),
        harness::spawn("send", Some(here), move || send(outward, inward, window as u64, items)),
    ];
    for thread in threads {
        thread.expect("the kernel has a thread for us").join().expect("a panic would have aborted");
    }
}

fn echo(mut arriving: impl Pop, mut returning: impl Push, items: u64) {
    let mut idler = Idler::new(Idle::Busy, SPIN_ROOMY);
    let mut count = 0;
    while count < items {
        let item = arriving.pop();
        if let Some(item) = item {
            // The window is at most the capacity, so there is always room for the way back.
            assert!(returning.push(item), "the way back is full");
            count += 1;
        }
        idler.step(item.is_some());
    }
}

fn send(mut outward: impl Push, mut inward: impl Pop, window: u64, items: u64) {
    let mut idler = Idler::new(Idle::Busy, SPIN_ROOMY);
    let (mut sent, mut received) = (0, 0);
    while received < items {
        let mut progress = false;
        if sent < items && sent - received < window && outward.push(sent) {
            sent += 1;
            progress = true;
        }
        if let Some(item) = inward.pop() {
            assert_eq!(item, received, "a queue keeps the order");
            received += 1;
            progress = true;
        }
        idler.step(progress);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_comes_back() {
        let mask = affinity().unwrap();
        let cpus = (mask[0], *mask.last().unwrap());
        for window in [1, CAPACITY] {
            exchange([spsc(CAPACITY), spsc(CAPACITY)], cpus, window, 500);
            exchange([mpsc(), mpsc()], cpus, window, 500);
        }
    }
}
