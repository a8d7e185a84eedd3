//! Adding pieces that pass through a scratch which stays in the cache, beside pieces that each land
//! in a slot of their own, spread over memory. A copy stands for the kernel, which writes a piece
//! to where it lands.

#![forbid(unsafe_code)]

use super::{Effort, Probe};
use crate::report;
use crate::sample;
use bps_engine::base::DType;
use bps_engine::reduce::kernels;
use serde_json::json;
use std::cell::RefCell;
use std::hint::black_box;
use std::io;

/// See the [module](self).
pub const PROBE: Probe = Probe {
    name: "scratch",
    asks: "what it is worth to add from a scratch that stays in the cache",
    columns: &["piece_bytes", "scratch_gbps", "slots_gbps", "ratio", "scratch_gbps_spread"],
    measure,
};

const PIECES: [usize; 6] = [16 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20, 4 << 20];
/// Memory that the slots are spread over, at most: more than any cache.
const SPREAD_BYTES: usize = 256 << 20;

fn measure(effort: Effort) -> io::Result<Vec<report::Fields>> {
    let spread = effort.bytes.clamp(PIECES[5], SPREAD_BYTES) / PIECES[5] * PIECES[5];
    // Bytes that come, where they are added, and where they land before: all out of the cache.
    let [source, accumulator, slots] = [1, 2, 3].map(|_| vec![0u8; spread]);
    let (accumulator, slots) = (RefCell::new(accumulator), RefCell::new(slots));
    let pass = |piece: usize, is_scratch: bool| {
        let (mut accumulator, mut slots) = (accumulator.borrow_mut(), slots.borrow_mut());
        for at in (0..spread).step_by(piece) {
            let slot = if is_scratch { &mut slots[..piece] } else { &mut slots[at..][..piece] };
            slot.copy_from_slice(&source[at..][..piece]);
            kernels().add_slice(DType::F32, &mut accumulator[at..][..piece], black_box(slot));
        }
    };
    let mut rows = Vec::new();
    for piece in PIECES {
        let [scratch, slots] = sample::interleaved(
            effort.rounds,
            1,
            [&mut || pass(piece, true), &mut || pass(piece, false)],
        );
        #[allow(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
        let gigabytes = spread as f64 / 1e9;
        let ratio = slots.median() / scratch.median();
        let mut fields = report::fields(json!({ "piece_bytes": piece, "ratio": ratio }));
        report::rate(&mut fields, "scratch_gbps", gigabytes, &scratch);
        report::rate(&mut fields, "slots_gbps", gigabytes, &slots);
        rows.push(fields);
    }
    Ok(rows)
}
