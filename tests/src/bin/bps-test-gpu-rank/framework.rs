//! What a framework does with a GPU, as far as these tests need it.

use crate::{LIMIT, gpu};
use bps_worker::Error;
use bps_worker::cuda::{Device, Event, GpuError, Pinned, Stream};
use std::cell::Cell;

/// Pinned memory of the host for all buffers of a rank.
const PINNED_BYTES: usize = 40 << 20;

/// The framework's side of a GPU.
pub struct Framework {
    pub device: Device,
    pub stream: Stream,
    /// Never freed: a rank that ends early may have copies under way.
    pub pinned: &'static Pinned,
    /// Bytes of it that buffers have.
    pub taken: Cell<usize>,
}

impl Framework {
    pub fn new() -> Result<Framework, GpuError> {
        let device = Device::open(0)?;
        device.make_current()?;
        let (stream, pinned) = (Stream::new(&device)?, Pinned::new(&device, PINNED_BYTES, None)?);
        let pinned = Box::leak(Box::new(pinned));
        Ok(Framework { device, stream, pinned, taken: Cell::new(0) })
    }

    /// A new buffer.
    pub fn buffer(&self, bytes: usize) -> Result<Buffer, Error> {
        let at = self.taken.get();
        self.taken.set(at + bytes.next_multiple_of(64));
        assert!(self.taken.get() <= self.pinned.len(), "PINNED_BYTES are too few");
        let address = self.device.alloc(bytes.max(1)).map_err(gpu)?;
        Ok(Buffer { address, pinned: self.pinned.as_ptr().wrapping_add(at), bytes })
    }

    /// Waits until the framework's stream has done all that is enqueued.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        let event = Event::new(&self.device)?;
        event.record(&self.stream)?;
        event.wait(LIMIT)
    }
}

/// Memory of the GPU, and as much of the host to fill and to read it. It is never freed either.
pub struct Buffer {
    pub address: u64,
    pub pinned: *mut u8,
    pub bytes: usize,
}

impl Buffer {
    /// Enqueues that the GPU's memory becomes this.
    pub fn fill(&self, stream: &Stream, content: &[u8]) -> Result<(), GpuError> {
        assert_eq!(content.len(), self.bytes);
        let at = self.pinned;
        // SAFETY: the pinned memory is of that size, and the stream is done with what it was used
        // for before.
        unsafe { std::ptr::copy_nonoverlapping(content.as_ptr(), at, self.bytes) };
        // SAFETY: both live to the end of the process, and nobody changes them before the stream
        // has passed.
        unsafe { stream.copy_to_device(self.address, at, self.bytes) }
    }

    /// Enqueues that the host gets the GPU's memory.
    pub fn fetch(&self, stream: &Stream) -> Result<(), GpuError> {
        // SAFETY: both live to the end of the process, and the host reads the pinned memory only
        // once the stream has passed.
        unsafe { stream.copy_to_host(self.pinned, self.address, self.bytes) }
    }

    pub fn fetched(&self) -> &[u8] {
        // SAFETY: the stream has passed the copy, so nobody writes here.
        unsafe { std::slice::from_raw_parts(self.pinned, self.bytes) }
    }
}
