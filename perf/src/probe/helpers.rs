//! Copies of a tensor into the slots of a lane, by one thread and shared with a helper.

use super::memory::Pages;
use super::{Effort, Probe};
use crate::report::{self, Fields};
use crate::sample;
use bps_engine::mem::{Readable, Writable};
use bps_engine::team::Team;
use serde_json::json;
use std::io;

/// See the [module](self).
pub const PROBE: Probe = Probe {
    name: "helpers",
    asks: "from which size on a helper makes copies between a tensor and slots faster",
    columns: &["size_bytes", "alone_gbps", "helped_gbps", "ratio", "helped_gbps_spread"],
    measure,
};

const SIZES: [usize; 5] = [1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20];
/// Bytes of a slot, and slots of a lane of shared memory.
const SLOT: usize = 256 << 10;
const SLOTS: usize = 8;

fn measure(effort: Effort) -> io::Result<Vec<Fields>> {
    let (team, helpers) = Team::with_helpers(1);
    std::thread::scope(move |scope| {
        for helper in helpers {
            scope.spawn(|| helper.run());
        }
        let sizes = SIZES.into_iter().filter(|&size| size <= effort.bytes.max(SIZES[0]));
        let rows = sizes.map(|size| one(effort, size, &team)).collect();
        // The helper ends with its team.
        drop(team);
        rows
    })
}

fn one(effort: Effort, size: usize, team: &Team) -> io::Result<Fields> {
    let [mut tensor, mut slots] = [Pages::new(size, true)?, Pages::new(SLOT * SLOTS, true)?];
    // SAFETY: both live until this returns, and are used by `pass` alone.
    let (tensor, slots) = unsafe {
        (Readable::of(&tensor.bytes()[..size]), Writable::of(&mut slots.bytes()[..SLOT * SLOTS]))
    };
    let pass = |team: &Team| {
        for piece in 0..size / SLOT {
            let (from, to) =
                (tensor.part(piece * SLOT, SLOT), slots.part(piece % SLOTS * SLOT, SLOT));
            team.share(SLOT, |range| {
                let (from, to) =
                    (from.part(range.start, range.len()), to.part(range.start, range.len()));
                // SAFETY: parts of memory that is apart and lives until `one` returns; no other
                // thread has this range.
                unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), range.len()) };
            });
        }
    };
    let alone = Team::default();
    let repeats = (effort.bytes / size).clamp(1, 1 << 12);
    let [one, two] =
        sample::interleaved(effort.rounds, repeats, [&mut || pass(&alone), &mut || pass(team)]);
    let mut fields =
        report::fields(json!({ "size_bytes": size, "ratio": one.median() / two.median() }));
    #[allow(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
    let gigabytes = size as f64 / 1e9;
    report::rate(&mut fields, "alone_gbps", gigabytes, &one);
    report::rate(&mut fields, "helped_gbps", gigabytes, &two);
    Ok(fields)
}
