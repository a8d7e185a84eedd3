//! Memory that the engine reads and writes and does not own: that of callers, and the slots of a
//! GPU's pipeline. Whoever makes one of these values promises what the engine relies on.

use bps_engine::transport::rdma::GpuMemory;
use std::ptr::NonNull;

/// Memory of a caller that is pushed: see [`crate::PushPull`].
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    source: *const u8,
    target: *mut u8,
}

// SAFETY: the pointers are only followed by the thread of the NIC loop, and what `Memory::new`
// asks of its caller does not depend on the thread.
unsafe impl Send for Memory {}

impl Memory {
    /// What is pushed, and where the result lands, which may be the same.
    ///
    /// # Safety
    /// `source` is valid for reads and `target` for reads and writes of as many bytes as the tensor
    /// was declared with, they are the same or apart, and nobody else changes or reads them until
    /// the task with which this is pushed is finished.
    #[must_use]
    pub unsafe fn new(source: *const u8, target: *mut u8) -> Memory {
        Memory { source, target }
    }

    /// Of nothing, for tests that follow no pointer.
    #[cfg(test)]
    pub(crate) fn none() -> Memory {
        Memory { source: std::ptr::null(), target: std::ptr::null_mut() }
    }

    /// What is pushed.
    #[must_use]
    pub fn source(&self) -> *const u8 {
        self.source
    }

    /// Where the result lands.
    #[must_use]
    pub fn target(&self) -> *mut u8 {
        self.target
    }

    /// The same, from this byte of the tensor on.
    #[must_use]
    pub(crate) fn from(&self, offset: usize) -> Memory {
        let (source, target) = (self.source.wrapping_add(offset), self.target.wrapping_add(offset));
        Memory { source, target }
    }
}

/// What a slot is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pool {
    /// To be sent from.
    Sends,
    /// For results of servers.
    Results,
    /// For results that other ranks of the host publish.
    Publications,
    /// In the GPU's memory, for results that devices of servers write there.
    Answers,
}

/// A piece of memory that a GPU copies from and to; as large as a part may be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slot {
    number: u32,
    pool: Pool,
    at: *mut u8,
    on_gpu: bool,
}

// SAFETY: who holds the value may use the memory, by the promise of `Slot::new`, and it is handed
// from one thread to the other through queues.
unsafe impl Send for Slot {}

impl Slot {
    /// The slot of this number, which begins at `at`: in the host's memory or, `on_gpu`, in the
    /// GPU's, where no processor can follow the address.
    ///
    /// # Safety
    /// As many bytes as the largest part has are valid there for reads and writes until the NIC
    /// loop has ended, and nobody uses them but through this value. No other slot of the process
    /// has this number.
    #[must_use]
    pub unsafe fn new(number: u32, pool: Pool, at: *mut u8, on_gpu: bool) -> Slot {
        Slot { number, pool, at, on_gpu }
    }

    /// Its number among all slots of the process.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// To which it goes back.
    #[must_use]
    pub fn pool(&self) -> Pool {
        self.pool
    }

    /// Its first byte.
    #[must_use]
    pub fn at(&self) -> *mut u8 {
        self.at
    }

    /// Whether it is in the GPU's memory.
    #[must_use]
    pub fn is_on_gpu(&self) -> bool {
        self.on_gpu
    }
}

/// Where the slots are that RDMA devices are to reach.
#[derive(Default)]
pub struct SlotMemory {
    /// First byte and bytes of those to send from, in the host's memory.
    pub to_send: Option<(NonNull<u8>, usize)>,
    /// The same of those to land in what servers send.
    pub to_land: Option<(NonNull<u8>, usize)>,
    /// To send from, in the GPU's memory.
    pub gpu_to_send: Option<GpuMemory>,
    /// To land in, in the GPU's memory.
    pub gpu_to_land: Option<GpuMemory>,
}

// SAFETY: addresses, of which what holds for slots holds, and registrations, which any thread may
// have.
unsafe impl Send for SlotMemory {}
