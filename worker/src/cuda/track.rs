//! A stream whose progress the host reads from memory, without asking the driver.
//!
//! Behind what it enqueues, the stream writes a rising number into pinned memory. The driver's own
//! ways to ask, `cuEventQuery` and its like, take locks that the framework's threads need for every
//! kernel that they launch; a word of memory takes none.

use super::library::Cuda;
use super::{Device, Event, GpuError, Pinned, Stream};
use std::sync::atomic::{AtomicU32, Ordering};

/// `CU_STREAM_WAIT_VALUE_GEQ`.
const AT_LEAST: u32 = 0;
/// Bytes between the words of two tracks: a cache line each.
pub(crate) const WORD_BYTES: usize = 64;

/// See the [module](self). Used by one thread.
pub(crate) struct Track {
    stream: Stream,
    progress: Progress,
    issued: u32,
}

/// How far a track is, for any thread.
#[derive(Clone, Copy, Debug)]
pub struct Progress(*const AtomicU32);

// SAFETY: the word is only read here, and atomically; the GPU writes it. Whoever has made the value
// vouches that it stays.
unsafe impl Send for Progress {}
// SAFETY: any number of threads may read an atomic word at once.
unsafe impl Sync for Progress {}

impl Progress {
    /// How far the track is that writes this word.
    ///
    /// # Safety
    /// `word` is valid for as long as this value, or a copy of it, is used, and nobody writes it
    /// but atomically.
    #[must_use]
    pub unsafe fn of(word: *const AtomicU32) -> Progress {
        Progress(word)
    }

    /// How far the stream is. If it has waited for another, that one, read after this, is beyond
    /// what was waited for.
    #[must_use]
    pub fn passed(self) -> Passed {
        // SAFETY: the promise of `of`.
        Passed(unsafe { &*self.0 }.load(Ordering::Acquire))
    }
}

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
        // SAFETY: the memory outlives the track, by the caller's promise.
        let progress = unsafe { Progress::of(word) };
        Ok(Track { stream: Stream::new(device)?, progress, issued: 0 })
    }

    /// How far it is, for other threads: as long as its memory is there.
    pub(crate) fn progress(&self) -> Progress {
        self.progress
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
        unsafe { self.stream.write(self.progress.0.expose_provenance() as u64, self.issued) }?;
        Ok(self.issued)
    }

    /// What the next mark will be: for work that is enqueued now and marked together with more.
    pub(crate) fn next_mark(&self) -> u32 {
        self.issued.wrapping_add(1)
    }

    /// How far the stream is. If it has waited for another, that one, read after this, is beyond
    /// what was waited for.
    pub(crate) fn passed(&self) -> Passed {
        self.progress.passed()
    }
}

/// How far a stream was.
#[derive(Clone, Copy)]
pub struct Passed(u32);

impl Passed {
    /// Whether the stream has passed a mark: then all before it is done, and what it has written to
    /// the host can be read.
    #[must_use]
    pub fn has(self, mark: u32) -> bool {
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

    /// Lets what is enqueued from now on wait until a word is `value`, or beyond it: the difference
    /// of both is compared, so words may wrap around.
    ///
    /// # Errors
    /// [`GpuError::Cuda`].
    ///
    /// # Safety
    /// `address` is that of four aligned bytes of pinned memory, valid until the wait is over.
    pub(crate) unsafe fn wait_for_word(&self, address: u64, value: u32) -> Result<(), GpuError> {
        let cuda: &'static Cuda = self.device().cuda();
        let wait = cuda.call.cuStreamWaitValue32_v2;
        // SAFETY: the caller vouches for the address; the stream's handle is held by this value.
        let code = unsafe { wait(self.handle(), address, value, AT_LEAST) };
        cuda.check("cuStreamWaitValue32", code)
    }
}
