//! A stream whose progress the host reads from memory, without asking the driver.
//!
//! Behind what it enqueues, the stream writes a rising number into pinned memory. The driver's own
//! ways to ask, `cuEventQuery` and its like, take locks that the framework's threads need for every
//! kernel that they launch; a word of memory takes none.

use super::library::Cuda;
use super::{Device, Event, GpuError, Pinned, Stream};
use std::sync::atomic::{AtomicU32, Ordering};

/// Bytes between the words of two tracks: a cache line each.
pub(crate) const WORD_BYTES: usize = 64;

/// See the [module](self). Used by one thread.
pub(crate) struct Track {
    stream: Stream,
    word: *const AtomicU32,
    issued: u32,
}

// SAFETY: the word is in pinned memory that outlives the track, and is only read here; the GPU
// writes it.
unsafe impl Send for Track {}

impl Track {
    /// A track with a stream of its own and the word number `index` of this memory.
    ///
    /// # Safety
    /// `memory` outlives the track, is zero there, and nobody else uses the word.
    pub(crate) unsafe fn new(
        device: &Device,
        memory: &Pinned,
        index: usize,
    ) -> Result<Track, GpuError> {
        assert!((index + 1) * WORD_BYTES <= memory.len(), "the memory has room for the words");
        let word = memory.as_ptr().wrapping_add(index * WORD_BYTES).cast_const().cast();
        Ok(Track { stream: Stream::new(device)?, word, issued: 0 })
    }

    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Lets what is enqueued from now on wait for the event.
    pub(crate) fn wait(&self, event: &Event) -> Result<(), GpuError> {
        self.stream.wait(event)
    }

    /// Marks the place behind all that is enqueued now.
    pub(crate) fn mark(&mut self) -> Result<u32, GpuError> {
        self.issued = self.issued.wrapping_add(1);
        // SAFETY: the word is pinned memory, which has one address on the host and on the GPU.
        unsafe { self.stream.write(self.word.expose_provenance() as u64, self.issued) }?;
        Ok(self.issued)
    }

    /// What the next mark will be: for work that is enqueued now and marked together with more.
    pub(crate) fn next_mark(&self) -> u32 {
        self.issued.wrapping_add(1)
    }

    /// How far the stream is. If it has waited for another, that one, read after this, is beyond
    /// what was waited for.
    pub(crate) fn passed(&self) -> Passed {
        // SAFETY: the memory outlives the track, by the promise of `new`.
        Passed(unsafe { &*self.word }.load(Ordering::Acquire))
    }
}

/// How far a stream was.
#[derive(Clone, Copy)]
pub(crate) struct Passed(u32);

impl Passed {
    /// Whether the stream has passed a mark: then all before it is done, and what it has written to
    /// the host can be read.
    pub(crate) fn has(self, mark: u32) -> bool {
        // Marks wrap around; fewer than half of all numbers are ever ahead.
        self.0.wrapping_sub(mark) < u32::MAX / 2
    }
}

impl Stream {
    /// Enqueues a write of a word, after all that was enqueued before is done and visible.
    ///
    /// # Errors
    /// [`GpuError::Cuda`].
    ///
    /// # Safety
    /// `address` is that of four aligned bytes of the GPU's or of pinned memory, valid until the
    /// write is done.
    unsafe fn write(&self, address: u64, value: u32) -> Result<(), GpuError> {
        let cuda: &'static Cuda = self.device().cuda();
        // SAFETY: the caller vouches for the address; the stream's handle is held by this value.
        let code = unsafe { (cuda.call.cuStreamWriteValue32_v2)(self.handle(), address, value, 0) };
        cuda.check("cuStreamWriteValue32", code)
    }
}
