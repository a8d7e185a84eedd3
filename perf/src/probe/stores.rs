//! Copying, adding and landing with stores that go past the cache beside ordinary stores.

use super::{Effort, Probe};
use crate::report::Fields;
use std::io;

/// See the [module](self).
pub const PROBE: Probe = Probe {
    name: "stores",
    asks: "from which size on stores past the cache pay, for copies, sums and results that land",
    columns: &["work", "size_bytes", "ordinary_gbps", "past_gbps", "ratio", "past_gbps_spread"],
    measure,
};

#[cfg(not(target_arch = "x86_64"))]
fn measure(_: Effort) -> io::Result<Vec<Fields>> {
    let why = "skipped: stores past the cache are measured on x86-64";
    Err(io::Error::new(io::ErrorKind::Unsupported, why))
}

#[cfg(target_arch = "x86_64")]
fn measure(effort: Effort) -> io::Result<Vec<Fields>> {
    if std::arch::is_x86_feature_detected!("avx") {
        avx::measure(effort)
    } else {
        let why = "skipped: this processor has no AVX";
        Err(io::Error::new(io::ErrorKind::Unsupported, why))
    }
}

#[cfg(target_arch = "x86_64")]
mod avx {
    use super::super::Effort;
    use super::super::memory::Pages;
    use crate::report::{self, Fields};
    use crate::sample;
    use serde_json::json;
    use std::arch::x86_64::{
        _mm_sfence, _mm256_add_ps, _mm256_load_ps, _mm256_store_ps, _mm256_stream_ps,
    };
    use std::hint::black_box;
    use std::io;

    const SIZES: [usize; 6] = [64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20];
    const LANES: usize = 8;
    /// Bytes of a slot, and slots of a lane of shared memory.
    const SLOT: usize = 256 << 10;
    const SLOTS: usize = 8;

    /// What is done to each vector.
    #[derive(Clone, Copy, PartialEq, Eq)]
    enum Work {
        Copy,
        Add,
        /// What a rank does with the share of its tensor that another one sums: it is copied into
        /// slots, and soon after results out of them to the same place.
        Land,
    }

    pub fn measure(effort: Effort) -> io::Result<Vec<Fields>> {
        let mut rows = Vec::new();
        for work in [Work::Copy, Work::Add, Work::Land] {
            for size in SIZES.into_iter().filter(|&size| size <= effort.bytes.max(SIZES[0])) {
                rows.push(one(effort, work, size)?);
            }
        }
        Ok(rows)
    }

    fn one(effort: Effort, work: Work, size: usize) -> io::Result<Fields> {
        let [mut source, mut target] = [Pages::new(size, true)?, Pages::new(size, true)?];
        let mut slots = Pages::new(SLOT * SLOTS, true)?;
        let slots = slots.bytes().as_mut_ptr().cast::<f32>();
        let (source, target) = (source.bytes().as_ptr(), target.bytes().as_mut_ptr());
        let repeats = (effort.bytes / size).clamp(1, 1 << 14);
        let pass = |is_past: bool| {
            let (source, target) = (black_box(source.cast::<f32>()), target.cast::<f32>());
            // SAFETY: both hold `size` bytes, and the slots their own, aligned to a huge page, and
            // live until this returns; AVX was found before.
            unsafe {
                match (work, is_past) {
                    (Work::Copy, false) => pass::<false, false>(source, target, size / 4),
                    (Work::Copy, true) => pass::<false, true>(source, target, size / 4),
                    (Work::Add, false) => pass::<true, false>(source, target, size / 4),
                    (Work::Add, true) => pass::<true, true>(source, target, size / 4),
                    (Work::Land, false) => land::<false>(slots, target, size),
                    (Work::Land, true) => land::<true>(slots, target, size),
                }
            }
        };
        let [ordinary, past] =
            sample::interleaved(effort.rounds, repeats, [&mut || pass(false), &mut || pass(true)]);
        let mut fields = report::fields(json!({
            "work": match work {
                Work::Copy => "copy",
                Work::Add => "add",
                Work::Land => "land",
            },
            "size_bytes": size,
            "ratio": ordinary.median() / past.median(),
        }));
        #[allow(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
        let gigabytes = size as f64 / 1e9;
        report::rate(&mut fields, "ordinary_gbps", gigabytes, &ordinary);
        report::rate(&mut fields, "past_gbps", gigabytes, &past);
        Ok(fields)
    }

    /// # Safety
    /// The processor has AVX; both pointers are aligned to 32 bytes, `slots` is valid for the bytes
    /// of all slots and `tensor` for `bytes`, a multiple of 64 KiB, and they do not overlap.
    #[target_feature(enable = "avx")]
    unsafe fn land<const PAST: bool>(slots: *mut f32, tensor: *mut f32, bytes: usize) {
        let length = SLOT.min(bytes);
        let pieces = bytes / length;
        let place = |piece: usize| {
            let (slot, at) = (piece % SLOTS * SLOT, piece * length);
            (slots.wrapping_byte_add(slot), tensor.wrapping_byte_add(at))
        };
        for piece in 0..pieces + SLOTS {
            // The slot's last contribution has become a result, which lands.
            if let Some(before) = piece.checked_sub(SLOTS) {
                let (slot, at) = place(before);
                // SAFETY: a slot, and a piece below `pieces`, both of `length` bytes.
                unsafe { pass::<false, PAST>(slot, at, length / 4) };
            }
            if piece < pieces {
                let (slot, at) = place(piece);
                // SAFETY: the same, the other way.
                unsafe { pass::<false, false>(at, slot, length / 4) };
            }
        }
    }

    /// # Safety
    /// The processor has AVX; both pointers are aligned to 32 bytes and valid for `count` floats, a
    /// multiple of eight, and do not overlap.
    #[target_feature(enable = "avx")]
    unsafe fn pass<const ADD: bool, const PAST: bool>(
        source: *const f32,
        target: *mut f32,
        count: usize,
    ) {
        for at in (0..count).step_by(LANES) {
            // SAFETY: `at` and the seven floats after it lie within `count`, as the caller
            // promises.
            unsafe {
                let (from, to) = (source.add(at), target.add(at));
                let mut vector = _mm256_load_ps(from);
                if ADD {
                    vector = _mm256_add_ps(vector, _mm256_load_ps(to));
                }
                if PAST {
                    _mm256_stream_ps(to, vector);
                } else {
                    _mm256_store_ps(to, vector);
                }
            }
        }
        if PAST {
            _mm_sfence();
        }
    }
}
