//! Memory of its own pages, small or huge.

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::io;

/// Bytes of a huge page.
pub const HUGE_BYTES: usize = 2 << 20;

/// Zeroed pages.
pub struct Pages {
    base: *mut u8,
    length: usize,
    start: usize,
    used: usize,
}

// SAFETY: the pages belong to this value alone, as those of a `Vec` do.
unsafe impl Send for Pages {}

impl Pages {
    /// Maps so many bytes, from a multiple of a huge page on, and touches all of them.
    ///
    /// # Errors
    /// The kernel has no memory, or knows no huge pages.
    pub fn new(bytes: usize, is_huge: bool) -> io::Result<Pages> {
        let length = bytes.next_multiple_of(HUGE_BYTES) + HUGE_BYTES;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let none = std::ptr::null_mut();
        // SAFETY: a new mapping that overlaps nothing.
        let base = unsafe { mmap_anonymous(none, length, protection, MapFlags::PRIVATE)? };
        let start = base.cast::<u8>().align_offset(HUGE_BYTES);
        let mut pages = Pages { base: base.cast(), length, start, used: bytes };
        let advice = if is_huge { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage };
        // SAFETY: the advice is about the mapping that was just made.
        match unsafe { madvise(base, length, advice) } {
            Err(error) if is_huge => {
                return Err(io::Error::new(
                    io::ErrorKind::Unsupported,
                    format!("skipped: no huge pages here: {error}"),
                ));
            }
            // A kernel without huge pages has nothing to be told.
            _ => {}
        }
        pages.bytes().fill(0);
        Ok(pages)
    }

    /// Where they begin.
    pub fn pointer(&self) -> *mut u8 {
        self.base.wrapping_add(self.start)
    }

    /// All of them.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping holds so many bytes from there on, and `self` is borrowed.
        unsafe { std::slice::from_raw_parts_mut(self.pointer(), self.used) }
    }

    /// Bytes of it that the kernel backs with huge pages.
    pub fn huge_bytes(&self) -> usize {
        let text = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
        let (from, to) = (self.base as usize, self.base as usize + self.length);
        let (mut inside, mut sum) = (false, 0);
        for line in text.lines() {
            let range = line.split(' ').next().and_then(|word| word.split_once('-'));
            let ends = range.map(|(low, high)| {
                (usize::from_str_radix(low, 16), usize::from_str_radix(high, 16))
            });
            if let Some((Ok(low), Ok(high))) = ends {
                inside = low < to && high > from;
            } else if inside && let Some(rest) = line.strip_prefix("AnonHugePages:") {
                let kib = rest.trim().trim_end_matches(" kB").parse::<usize>().unwrap_or(0);
                sum += kib * 1024;
            }
        }
        sum
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nobody borrows it any more. A failure would leak it.
        let _ = unsafe { munmap(self.base.cast(), self.length) };
    }
}
