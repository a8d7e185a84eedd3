//! Hints about cache lines that another core has: asked for early, they come while something else
//! is done. A hint changes nothing but time, so it may name any address.

use crate::limits::ALIGNMENT;

/// Asks for the lines of `length` bytes at `at`, to read them.
#[inline]
pub fn fetch(at: *const u8, length: usize) {
    for offset in (0..length).step_by(ALIGNMENT) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: a prefetch is allowed at any address, mapped or not, and changes nothing.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(offset).cast()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (at, offset);
    }
}

/// Asks for the lines of `length` bytes at `at`, to write them: other cores lose their copies.
#[inline]
pub fn fetch_to_write(at: *const u8, length: usize) {
    for offset in (0..length).step_by(ALIGNMENT) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch is allowed at any address, mapped or not, and changes no value; no
        // flag or stack is touched. Processors that do not know it take it for nothing.
        unsafe {
            std::arch::asm!(
                "prefetchw [{}]",
                in(reg) at.wrapping_add(offset),
                options(nostack, preserves_flags, readonly)
            );
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (at, offset);
    }
}
