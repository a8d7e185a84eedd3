//! Accumulating into memory of 4 KiB pages beside memory of 2 MiB pages.

#![forbid(unsafe_code)]

use super::memory::Pages;
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
    name: "hugepages",
    asks: "whether sums are faster in memory of huge pages",
    columns: &["size_bytes", "small_gbps", "huge_gbps", "ratio", "huge_share", "huge_gbps_spread"],
    measure,
};

const SIZES: [usize; 4] = [1 << 20, 8 << 20, 64 << 20, 256 << 20];

fn measure(effort: Effort) -> io::Result<Vec<report::Fields>> {
    let mut rows = Vec::new();
    for size in SIZES.into_iter().filter(|&size| size <= effort.bytes.max(SIZES[0])) {
        let memory = RefCell::new([Pages::new(size, false)?, Pages::new(size, true)?]);
        let share = ratio(memory.borrow()[1].huge_bytes().min(size), size);
        let source = vec![0u8; size];
        let repeats = (effort.bytes / size).clamp(1, 64);
        let pass = |which: usize| {
            let target = &mut memory.borrow_mut()[which];
            kernels().add_slice(DType::F32, black_box(target.bytes()), black_box(&source));
        };
        let [small, huge] =
            sample::interleaved(effort.rounds, repeats, [&mut || pass(0), &mut || pass(1)]);
        let mut fields = report::fields(json!({
            "size_bytes": size,
            "ratio": small.median() / huge.median(),
            "huge_share": share,
        }));
        let gigabytes = ratio(size, 1_000_000_000);
        report::rate(&mut fields, "small_gbps", gigabytes, &small);
        report::rate(&mut fields, "huge_gbps", gigabytes, &huge);
        rows.push(fields);
    }
    Ok(rows)
}

#[allow(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
fn ratio(part: usize, whole: usize) -> f64 {
    part as f64 / whole as f64
}
