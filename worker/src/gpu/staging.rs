//! Memory of the host for tensors that have some of their own: pinned in large pieces as tensors
//! are declared, up to a limit.

use crate::cuda::{Device, GpuError, Pinned};
use crate::rounds::{Plan, Pool, Slot, Staging};
use bps_engine::base::word;
use std::ptr::NonNull;

/// What is pinned at once, at least: each time costs some milliseconds.
const PIECE_BYTES: usize = 32 << 20;
/// Parts and their words begin at lines of the processor's cache.
const LINE: usize = 64;

/// See the [module](self).
pub(crate) struct StagingMemory {
    device: Device,
    numa_node: Option<u32>,
    /// What may still be pinned.
    left: usize,
    /// Results land apart from what is sent.
    keeps: bool,
    pieces: Vec<Pinned>,
    /// What of the last piece is nobody's.
    free: (*mut u8, usize),
    /// The number of the next slot.
    number: u32,
}

// SAFETY: `free` points into the last piece, which is held here, and may be used on any thread.
unsafe impl Send for StagingMemory {}

impl StagingMemory {
    /// At most so many bytes, of which nothing is taken yet; whether a part keeps what it sends and
    /// what has come apart, in twice the room. Slots are numbered from `number` on.
    pub(crate) fn new(
        device: &Device,
        numa_node: Option<u32>,
        (bytes, keeps): (usize, bool),
        number: u32,
    ) -> StagingMemory {
        let free = (std::ptr::null_mut(), 0);
        StagingMemory {
            device: device.clone(),
            numa_node,
            left: bytes,
            keeps,
            pieces: Vec::new(),
            free,
            number,
        }
    }

    /// Memory for each part of a tensor; none if there is not so much left.
    ///
    /// # Errors
    /// The kernel or the driver has none.
    pub(crate) fn take(&mut self, plan: &Plan) -> Result<Option<Vec<Staging>>, GpuError> {
        let (slots, numbers) = if self.keeps { (2, 2) } else { (1, 1) };
        let room = |bytes: usize| slots * bytes.next_multiple_of(LINE) + LINE;
        let bytes: usize = plan.parts.iter().map(|part| room(part.bytes)).sum();
        if bytes > self.free.1 {
            let piece = bytes.max(PIECE_BYTES).min(self.left);
            if bytes > piece {
                return Ok(None);
            }
            let pinned = Pinned::new(&self.device, piece, self.numa_node)?;
            self.left -= piece;
            self.free = (pinned.as_ptr(), pinned.len());
            self.pieces.push(pinned);
        }
        let stagings = plan.parts.iter().map(|part| {
            let (at, left) = self.free;
            let taken = room(part.bytes);
            self.free = (at.wrapping_add(taken), left - taken);
            let number = self.number;
            self.number += numbers;
            let gate = at.wrapping_add(taken - LINE).cast();
            let gate = NonNull::new(gate).expect("pinned memory is somewhere");
            let slot = |number, at| {
                // SAFETY: the bytes are this part's alone, of a piece that the pipeline holds until
                // the NIC loop has ended, in the first half of its room or in the second, and
                // numbers count up.
                unsafe { Slot::new(number, Pool::Own, (at, part.bytes), false) }
            };
            let apart = at.wrapping_add(part.bytes.next_multiple_of(LINE));
            let result = self.keeps.then(|| slot(number + 1, apart));
            // SAFETY: behind the slots, in the same piece, which was zeroed; it begins a line.
            unsafe { Staging::new(slot(number, at), result, gate) }
        });
        Ok(Some(stagings.collect()))
    }

    /// Nothing more is pinned.
    pub(crate) fn close(&mut self) {
        self.left = 0;
    }

    /// Something on the GPU may use it yet: it stays for the life of the process.
    pub(crate) fn leak(&mut self) {
        std::mem::forget(std::mem::take(&mut self.pieces));
    }

    /// Pieces that were pinned, and their bytes.
    pub(crate) fn pinned(&self) -> (u32, usize) {
        (word(self.pieces.len()), self.pieces.iter().map(Pinned::len).sum())
    }
}
