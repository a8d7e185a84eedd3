//! CRC-32C: ours beside the crate `crc32c`, which has the processor's own instruction and no more,
//! and beside memcpy. The sizes are a header, a piece that has just landed, a part, and what no
//! cache holds.

#![forbid(unsafe_code)]

use super::{Effort, Probe};
use crate::report::{self, Fields};
use crate::sample;
use serde_json::json;
use std::hint::black_box;
use std::io;

pub const PROBE: Probe = Probe {
    name: "checksum",
    asks: "what a CRC-32C of a payload costs beside copying it",
    columns: &["size_bytes", "gbps", "instruction_gbps", "copy_gbps", "ratio_to_instruction"],
    measure,
};

const SIZES: [usize; 4] = [60, 256 << 10, 4 << 20, 64 << 20];

fn measure(effort: Effort) -> io::Result<Vec<Fields>> {
    Ok(SIZES.iter().map(|&size| of_size(effort, size)).collect())
}

#[allow(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
fn of_size(effort: Effort, size: usize) -> Fields {
    let pattern = |at: usize| u8::try_from(at * 7 % 251).expect("below 251");
    let bytes: Vec<u8> = (0..size).map(pattern).collect();
    let mut copy = vec![0; size];
    let repeats = super::count(effort, size);
    let [ours, instruction, copied] = sample::interleaved(
        effort.rounds,
        repeats,
        [
            &mut || {
                black_box(bps_engine::wire::crc32c(black_box(&bytes)));
            },
            &mut || {
                black_box(crc32c::crc32c(black_box(&bytes)));
            },
            &mut || black_box(&mut copy).copy_from_slice(black_box(&bytes)),
        ],
    );
    let mut fields = report::fields(json!({
        "size_bytes": size,
        "ratio_to_instruction": instruction.median() / ours.median(),
    }));
    for (name, seconds) in
        [("gbps", &ours), ("instruction_gbps", &instruction), ("copy_gbps", &copied)]
    {
        report::rate(&mut fields, name, size as f64 / 1e9, seconds);
    }
    fields
}
