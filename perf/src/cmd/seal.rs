//! `bps-perf seal`: records of encrypted lanes, made and opened by one core, beside memcpy.
//!
//! Invariant: as on a lane, plain bytes come from memory that is too large for the caches, are
//! encrypted and decrypted in a buffer that is not, and go to such memory again. `*_cached` does
//! without that memory: what cipher and tag take, and for opening a copy within the cache. A figure
//! is plain bytes per second.

#![forbid(unsafe_code)]

use crate::Outcome;
use crate::arguments::{self, integer, number};
use crate::report::{self, Table};
use crate::sample::{self, Series};
use bps_engine::topo::pin::{affinity, pin_current_thread};
use bps_engine::transport::tcp::sealed::{
    Opener, PLAIN_BYTES_MAX, PREFIX_BYTES, RECORD_BYTES_MAX, SECRET_BYTES, Sealer, TAG_BYTES,
};
use clap::{ArgMatches, Command};
use serde_json::json;
use std::cell::RefCell;
use std::hint::black_box;

/// Plain bytes of a timed sample: more than the caches hold.
const SAMPLE_BYTES: usize = 64 << 20;
/// Plain bytes of records that come over and over: they stay in the cache.
const CAME_BYTES: usize = 256 << 10;
const SECRET: [u8; SECRET_BYTES] = [7; SECRET_BYTES];

/// The arguments.
pub fn command() -> Command {
    Command::new("seal")
        .about("Measures encrypted records: GB/s that one core seals and opens, beside memcpy.")
        .arg(arguments::sizes("size", "32K", "Plain bytes of a record, at most 32K"))
        .arg(number("rounds", "11", "Interleaved rounds, of which the median is taken"))
        .arg(arguments::json())
}

/// Measures every size.
pub fn run(matches: &ArgMatches) -> Outcome {
    let rounds = integer(matches, "rounds") as usize;
    let cpu = *affinity()?.last().ok_or("the affinity mask holds no CPU")?;
    let title = format!("GB/s of plain bytes on CPU {cpu}, {rounds} rounds");
    let columns = [
        "size_bytes",
        "seal_gbps",
        "open_gbps",
        "copy_gbps",
        "seal_cached_gbps",
        "open_cached_gbps",
        "seal_gbps_spread",
        "open_gbps_spread",
    ];
    // The description of the place comes first: a pinned thread sees one core.
    let table = Table::new(matches, "seal", &title, &columns);
    pin_current_thread(cpu)?;
    table.head();
    for size in arguments::bytes(matches, "size") {
        if size > PLAIN_BYTES_MAX {
            return Err(format!("--size {size}: a record has at most {PLAIN_BYTES_MAX}").into());
        }
        let figures = measure(size, SAMPLE_BYTES / size, rounds);
        let mut fields = report::fields(json!({ "size_bytes": size, "rounds": rounds }));
        #[allow(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
        let gigabytes = (size * (SAMPLE_BYTES / size)) as f64 / 1e9;
        for (name, seconds) in [
            ("seal_gbps", &figures.seal),
            ("open_gbps", &figures.open),
            ("copy_gbps", &figures.copy),
            ("seal_cached_gbps", &figures.seal_cached),
            ("open_cached_gbps", &figures.open_cached),
        ] {
            report::rate(&mut fields, name, gigabytes, seconds);
        }
        table.row(fields);
    }
    Ok(())
}

/// Seconds of a pass over all records.
struct Figures {
    seal: Series,
    open: Series,
    copy: Series,
    seal_cached: Series,
    open_cached: Series,
}

fn measure(size: usize, records: usize, rounds: usize) -> Figures {
    let (source, target) = (vec![3; size * records], RefCell::new(vec![0; size * records]));
    let buffer = RefCell::new(vec![0; RECORD_BYTES_MAX]);
    let (mut sealer, mut cached) = (Sealer::new(&SECRET), Sealer::new(&SECRET));
    let (mut came, mut came_cached) = (Came::new(size), Came::new(size));
    let [seal, open, copy, seal_cached, open_cached] = sample::interleaved(
        rounds,
        1,
        [
            &mut || {
                let mut buffer = buffer.borrow_mut();
                for part in source.chunks_exact(size) {
                    buffer[PREFIX_BYTES..][..size].copy_from_slice(part);
                    black_box(sealer.seal(&mut buffer, size)).expect("numbers are left");
                }
            },
            &mut || {
                for part in target.borrow_mut().chunks_exact_mut(size) {
                    part.copy_from_slice(came.open(&mut buffer.borrow_mut()));
                }
            },
            &mut || {
                let mut target = target.borrow_mut();
                for (to, from) in target.chunks_exact_mut(size).zip(source.chunks_exact(size)) {
                    to.copy_from_slice(black_box(from));
                }
            },
            &mut || {
                for _ in 0..records {
                    black_box(cached.seal(&mut buffer.borrow_mut(), size))
                        .expect("numbers are left");
                }
            },
            &mut || {
                for _ in 0..records {
                    black_box(came_cached.open(&mut buffer.borrow_mut()));
                }
            },
        ],
    );
    Figures { seal, open, copy, seal_cached, open_cached }
}

/// Records that have come and are in the cache, over and over.
struct Came {
    records: Vec<Vec<u8>>,
    next: usize,
    opener: Opener,
}

impl Came {
    fn new(size: usize) -> Came {
        let mut sealer = Sealer::new(&SECRET);
        let record = |_| {
            let mut record = vec![3; PREFIX_BYTES + size + TAG_BYTES];
            sealer.seal(&mut record, size).expect("numbers are left");
            record
        };
        let records = (0..(CAME_BYTES / size).max(1)).map(record).collect();
        Came { records, next: 0, opener: Opener::new(&SECRET) }
    }

    /// Opens the next one in `buffer`, where the kernel would have put it.
    fn open<'a>(&mut self, buffer: &'a mut [u8]) -> &'a [u8] {
        if self.next == self.records.len() {
            (self.next, self.opener) = (0, Opener::new(&SECRET));
        }
        let record = &self.records[self.next];
        self.next += 1;
        buffer[..record.len()].copy_from_slice(record);
        self.opener.open(&mut buffer[..record.len()]).expect("it is as it was sealed")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_is_measured() {
        for size in [1, 1000, PLAIN_BYTES_MAX] {
            let figures = measure(size, 3, 1);
            for seconds in [figures.seal, figures.open, figures.copy] {
                let median = seconds.median();
                assert!(median > 0.0 && median.is_finite(), "{size} bytes: {median}");
            }
        }
    }

    #[test]
    fn the_arguments_are_sound() {
        command().debug_assert();
    }
}
