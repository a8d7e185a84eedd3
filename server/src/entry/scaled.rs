//! Sums of f16 that a group has divided by a power of two, so that they did not overflow on their
//! way: they are scaled back as they are added, in f32.

use bps_engine::base::DType;
use bps_engine::reduce::Kernels;

/// Elements of f16 that are widened and scaled at once: 4 KiB of f32, on the stack.
const SCALED: usize = 1024;

/// Adds `scale` times each of `count` f16 to `sums`, or starts the sums with them.
///
/// # Safety
/// `data` is valid for `count` f16, `sums` for as many f32 that nobody else touches, and they are
/// apart.
pub(super) unsafe fn add_scaled(
    kernels: &Kernels,
    sums: *mut u8,
    data: *const u8,
    count: usize,
    scale: u32,
    first: bool,
) {
    #[allow(clippy::cast_precision_loss, reason = "a power of two")]
    let scale = scale as f32;
    let mut wide = [0f32; SCALED];
    let (half, size) = (DType::F16.size(), DType::F32.size());
    let mut done = 0;
    while done < count {
        let length = SCALED.min(count - done);
        let block = wide.as_mut_ptr().cast::<u8>();
        // SAFETY: `done + length <= count`, for which the caller vouches for both; the block is
        // ours, and holds at least `length` elements.
        unsafe { kernels.store(DType::F16, block, data.add(done * half), length) };
        for value in &mut wide[..length] {
            *value *= scale;
        }
        // SAFETY: `done + length <= count` sums are the caller's to change, and the block, which is
        // ours, holds `length` elements.
        unsafe {
            let sums = sums.add(done * size);
            if first {
                kernels.store(DType::F32, sums, block, length);
            } else {
                kernels.add(DType::F32, sums, block, length);
            }
        }
        done += length;
    }
}
