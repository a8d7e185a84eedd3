//! A stream whose progress the host reads from memory, without asking the driver.
//!
//! Behind what it enqueues, the stream writes a rising number into pinned memory. The driver's own
//! ways to ask, `cuEventQuery` and its like, take locks that the framework's threads need for every
//! kernel that they launch; a word of memory takes none.
//!
//! For the same reason copies are gathered, and go to the driver [`together`](super::together).

use super::library::Cuda;
use super::together::{Copy, OF_CALL};
use super::{Device, Event, GpuError, Pinned, Stream};
use std::sync::atomic::{AtomicU32, Ordering};

/// Bytes between the words of two tracks: a cache line each.
pub const WORD_BYTES: usize = 64;

/// A stream with a word of memory that says how far it is, and what is to be enqueued there
/// together. Used by one thread, which has the context
/// ([`Device::make_current`]).
pub struct Track {
    stream: Stream,
    progress: Progress,
    issued: u32,
    /// Copies that are still to be enqueued.
    gathered: Vec<Copy>,
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
    /// # Errors
    /// [`GpuError::Cuda`].
    ///
    /// # Panics
    /// The memory ends before the word.
    ///
    /// # Safety
    /// `memory` outlives the track, is zero there, and nobody else uses the word.
    pub unsafe fn new(device: &Device, memory: &Pinned, index: usize) -> Result<Track, GpuError> {
        assert!((index + 1) * WORD_BYTES <= memory.len(), "the memory has room for the words");
        let word = memory.as_ptr().wrapping_add(index * WORD_BYTES).cast_const().cast();
        // SAFETY: the memory outlives the track, by the caller's promise.
        let progress = unsafe { Progress::of(word) };
        let gathered = Vec::with_capacity(OF_CALL);
        Ok(Track { stream: Stream::new(device)?, progress, issued: 0, gathered })
    }

    /// How far it is, for other threads: as long as its memory is there.
    pub(crate) fn progress(&self) -> Progress {
        self.progress
    }

    /// What is enqueued there comes before the copies that are gathered now.
    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Gathers a copy to the host. It is enqueued before the next wait, mark or event of this
    /// track, at the latest, and with others in any order.
    ///
    /// # Errors
    /// As [`enqueue`](Self::enqueue).
    ///
    /// # Safety
    /// As [`Stream::copy_to_host`]. No other copy that is gathered has bytes in common with it.
    pub(crate) unsafe fn copy_to_host(
        &mut self,
        host: *mut u8,
        device: u64,
        bytes: usize,
    ) -> Result<(), GpuError> {
        let to = host.expose_provenance() as u64;
        self.gather(Copy { to, from: device, bytes, is_to_host: true })
    }

    /// Gathers a copy to the GPU, as [`copy_to_host`](Self::copy_to_host) one to the host.
    ///
    /// # Errors
    /// As [`enqueue`](Self::enqueue).
    ///
    /// # Safety
    /// As [`copy_to_host`](Self::copy_to_host).
    pub unsafe fn copy_to_device(
        &mut self,
        device: u64,
        host: *const u8,
        bytes: usize,
    ) -> Result<(), GpuError> {
        let from = host.expose_provenance() as u64;
        self.gather(Copy { to: device, from, bytes, is_to_host: false })
    }

    fn gather(&mut self, copy: Copy) -> Result<(), GpuError> {
        self.gathered.push(copy);
        if self.gathered.len() < OF_CALL { Ok(()) } else { self.enqueue() }
    }

    /// Enqueues what is gathered.
    ///
    /// # Errors
    /// [`GpuError::Cuda`]; also for what failed earlier on this GPU.
    pub fn enqueue(&mut self) -> Result<(), GpuError> {
        // SAFETY: who gathered them has promised it.
        let enqueued = unsafe { self.stream.copy_all(&self.gathered) };
        self.gathered.clear();
        enqueued
    }

    /// Lets what is enqueued from now on wait for the event.
    pub(crate) fn wait(&mut self, event: &Event) -> Result<(), GpuError> {
        self.enqueue()?;
        self.stream.wait(event)
    }

    /// Lets what is enqueued from now on wait until each of these words, at these addresses, is its
    /// value, or beyond it: words may wrap around.
    ///
    /// # Errors
    /// As [`enqueue`](Self::enqueue).
    ///
    /// # Safety
    /// Each address is that of four aligned bytes of pinned memory, valid until the wait is over.
    pub unsafe fn wait_for_words(&mut self, words: &[(u64, u32)]) -> Result<(), GpuError> {
        self.enqueue()?;
        // SAFETY: the caller's promise.
        unsafe { self.stream.wait_for_words(words) }
    }

    /// Records an event behind all that is enqueued or gathered now.
    pub(crate) fn record(&mut self, event: &Event) -> Result<(), GpuError> {
        self.enqueue()?;
        event.record(&self.stream)
    }

    /// Marks the place behind all that is enqueued or gathered now.
    ///
    /// # Errors
    /// As [`enqueue`](Self::enqueue).
    pub fn mark(&mut self) -> Result<u32, GpuError> {
        self.enqueue()?;
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
    #[must_use]
    pub fn passed(&self) -> Passed {
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
}
