//! Pinned memory of the host that is lent for a while, piece by piece.

use crate::cuda::{Device, GpuError, Pinned};
use bps_engine::trace::log;
use std::collections::BTreeMap;
use std::ptr::NonNull;

/// What is pinned at once, at least: each time costs some milliseconds.
const PIECE_BYTES: usize = 32 << 20;
/// Buffers are multiples of it.
const GRAIN: usize = 4 << 10;

/// A piece of pinned memory, to be [given back](Buffers::give).
pub(super) struct Buffer {
    at: NonNull<u8>,
    bytes: usize,
}

// SAFETY: an address, of memory that whoever holds this has to themselves.
unsafe impl Send for Buffer {}

impl Buffer {
    /// Its first byte.
    pub(super) fn at(&self) -> *mut u8 {
        self.at.as_ptr()
    }
}

/// See the [module](self). What was pinned stays so: as much as was lent at once.
pub(super) struct Buffers {
    device: Device,
    numa_node: Option<u32>,
    pieces: Vec<Pinned>,
    /// What of the last piece was never lent.
    rest: Option<Buffer>,
    /// By size.
    free: BTreeMap<usize, Vec<Buffer>>,
}

impl Buffers {
    /// None yet; they will be on this NUMA node.
    pub(super) fn new(device: &Device, numa_node: Option<u32>) -> Buffers {
        let (pieces, rest, free) = (Vec::new(), None, BTreeMap::new());
        Buffers { device: device.clone(), numa_node, pieces, rest, free }
    }

    /// A buffer of so many bytes or some more, of any content.
    ///
    /// # Errors
    /// The kernel or the driver has no memory.
    pub(super) fn take(&mut self, bytes: usize) -> Result<Buffer, GpuError> {
        let bytes = bytes.max(1).next_multiple_of(GRAIN);
        // One that is much larger is left to those who need it.
        let mut fitting = self.free.range_mut(bytes..=2 * bytes);
        if let Some(buffer) = fitting.find_map(|(_, buffers)| buffers.pop()) {
            return Ok(buffer);
        }
        let has_room = |rest: &Buffer| rest.bytes >= bytes;
        let rest = match self.rest.take() {
            Some(rest) if has_room(&rest) => rest,
            rest => {
                rest.into_iter().for_each(|rest| self.give(rest));
                self.pin(bytes.max(PIECE_BYTES))?
            }
        };
        let (own, left) = (Buffer { at: rest.at, bytes }, rest.bytes - bytes);
        if left > 0 {
            // SAFETY: both parts are of the rest, which nobody else has.
            let at = unsafe { rest.at.add(bytes) };
            self.rest = Some(Buffer { at, bytes: left });
        }
        Ok(own)
    }

    fn pin(&mut self, bytes: usize) -> Result<Buffer, GpuError> {
        let pinned = Pinned::new(&self.device, bytes, self.numa_node)?;
        let at = NonNull::new(pinned.as_ptr()).expect("pinned memory is somewhere");
        let bytes = pinned.len() / GRAIN * GRAIN;
        self.pieces.push(pinned);
        let all: usize = self.pieces.iter().map(Pinned::len).sum();
        log::debug!("{} MiB pinned for tensors of the host that are on the GPU", all >> 20);
        Ok(Buffer { at, bytes })
    }

    /// Nobody uses it any more.
    pub(super) fn give(&mut self, buffer: Buffer) {
        self.free.entry(buffer.bytes).or_default().push(buffer);
    }

    /// Something on the GPU may use some of them yet: they stay for the life of the process.
    pub(super) fn leak(&mut self) {
        std::mem::forget(std::mem::take(&mut self.pieces));
    }
}
