//! Memory that the engine reads and writes and does not own: that of callers, and the slots of a
//! GPU's pipeline. Whoever makes one of these values promises what the engine relies on.

use bps_engine::mem::{Readable, Writable};
use bps_engine::transport::rdma::GpuMemory;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

/// Memory of a caller that is pushed: see [`crate::PushPull`].
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    source: Readable,
    target: Writable,
}

impl Memory {
    /// What is pushed, and where the result lands, which may be the same: so many bytes each.
    ///
    /// # Safety
    /// `source` is valid for reads and `target` for reads and writes of `bytes` initialised bytes,
    /// they are the same or apart, and nobody else changes or reads them until the task with which
    /// this is pushed is finished.
    #[must_use]
    pub unsafe fn new(source: *const u8, target: *mut u8, bytes: usize) -> Memory {
        let (from, to) = (source.addr(), target.addr());
        debug_assert!(from == to || from.abs_diff(to) >= bytes, "the same, or apart");
        // SAFETY: the caller's promise. The loop that has the value finishes the task once no
        // transport has anything of it.
        let (source, target) =
            unsafe { (Readable::new(source, bytes), Writable::new(target, bytes)) };
        Memory { source, target }
    }

    /// Of so many bytes that are nowhere, for tests that follow no pointer.
    #[cfg(test)]
    pub(crate) fn nowhere(bytes: usize) -> Memory {
        // SAFETY: the tests' parts are not read or written.
        unsafe { Memory::new(std::ptr::null(), std::ptr::null_mut(), bytes) }
    }

    /// What is pushed.
    #[must_use]
    pub(crate) fn source(&self) -> Readable {
        self.source
    }

    /// Where the result lands.
    #[must_use]
    pub(crate) fn target(&self) -> Writable {
        self.target
    }

    /// A part of the tensor, which begins at this byte of it.
    ///
    /// # Panics
    /// The tensor has not so many bytes.
    #[must_use]
    pub(crate) fn part(&self, offset: usize, bytes: usize) -> Memory {
        let (source, target) = (self.source.part(offset, bytes), self.target.part(offset, bytes));
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
    /// To none: it is one part's for good, see [`Staging`].
    Own,
}

/// A piece of memory that a GPU copies from and to; as large as a part may be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slot {
    number: u32,
    pool: Pool,
    memory: Writable,
    on_gpu: bool,
}

impl Slot {
    /// The slot of this number, `bytes` from `at` on: in the host's memory or, `on_gpu`, in the
    /// GPU's, where no processor can follow the address.
    ///
    /// # Safety
    /// The bytes are initialised and valid for reads and writes until the NIC loop has ended, and
    /// nobody uses them but through this value, which threads hand to each other. No other slot of
    /// the process has this number. Those on the GPU are named to the loop by a [`SlotMemory`].
    #[must_use]
    pub unsafe fn new(
        number: u32,
        pool: Pool,
        (at, bytes): (*mut u8, usize),
        on_gpu: bool,
    ) -> Slot {
        // SAFETY: the caller's promise, and all uses of a slot end with the loop.
        let memory = unsafe { Writable::new(at, bytes) };
        Slot { number, pool, memory, on_gpu }
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
        self.memory.as_ptr()
    }

    /// Its first bytes, for a part of so many.
    ///
    /// # Panics
    /// It has not so many.
    #[must_use]
    pub(crate) fn memory(&self, bytes: usize) -> Writable {
        self.memory.part(0, bytes)
    }

    /// All of it.
    #[must_use]
    pub(crate) fn whole(&self) -> Writable {
        self.memory
    }

    /// Whether it is in the GPU's memory.
    #[must_use]
    pub fn is_on_gpu(&self) -> bool {
        self.on_gpu
    }
}

/// Memory of the host that belongs to one part of a tensor on the GPU: what is sent is copied
/// there, the result lands in the same place or beside it, and a word tells the GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Staging {
    slot: Slot,
    result: Slot,
    gate: NonNull<AtomicU32>,
}

// SAFETY: the gate is only used as an atomic, and valid as long as the slot, by the promise of
// `new`.
unsafe impl Send for Staging {}

impl Staging {
    /// A slot of its own, where results land, and the word for its part. Results land in the slot,
    /// or apart where what was sent and what has come are kept for another server.
    ///
    /// # Safety
    /// `gate` is aligned, zero, and valid for atomic reads and writes for as long as `slot` is
    /// valid; nobody writes it but through this value and its copies.
    #[must_use]
    pub unsafe fn new(slot: Slot, result: Option<Slot>, gate: NonNull<AtomicU32>) -> Staging {
        let result = result.unwrap_or(slot);
        assert!(slot.pool == Pool::Own && result.pool == Pool::Own, "they are one part's for good");
        assert!(slot.memory.len() == result.memory.len(), "a result is as long as its part");
        assert!(!slot.on_gpu && !result.on_gpu, "processors read and spoil it");
        assert!(gate.is_aligned(), "it is read as an atomic");
        Staging { slot, result, gate }
    }

    /// Where the part's bytes are that are to be sent.
    #[must_use]
    pub fn slot(&self) -> Slot {
        self.slot
    }

    /// Where its results land.
    #[must_use]
    pub fn result(&self) -> Slot {
        self.result
    }

    /// Whether that is apart.
    #[must_use]
    pub(crate) fn keeps(&self) -> bool {
        self.result != self.slot
    }

    /// The address of its word, and what that is, or is beyond, once the result of this round is
    /// there.
    #[must_use]
    pub(crate) fn gate(&self, round: u64) -> (u64, u32) {
        (self.gate.as_ptr().expose_provenance() as u64, gate_of(round))
    }

    /// Tells the GPU that the result of this round is there.
    pub fn open(&self, round: u64) {
        debug_assert!(!self.is_past(round), "the GPU has gone on, and reads what it waited for");
        self.word().store(gate_of(round), Ordering::Release);
    }

    /// Whether the GPU was told of the result of this round.
    pub(crate) fn is_open(&self, round: u64) -> bool {
        self.word().load(Ordering::Relaxed) == gate_of(round)
    }

    /// Whether the GPU was told of the result of a later round.
    fn is_past(&self, round: u64) -> bool {
        let ahead = self.word().load(Ordering::Relaxed).wrapping_sub(gate_of(round));
        (1..=u32::MAX / 2).contains(&ahead)
    }

    /// Nobody will write results any more: the GPU waits for none of the rounds to come.
    pub(crate) fn open_for_good(&self, round: u64) {
        // Words are compared by their difference, of which half of all numbers are not negative.
        self.word().store(gate_of(round).wrapping_add(u32::MAX / 4), Ordering::Release);
    }

    /// What stands for a result that does not come: all bits are set, so that every number of a
    /// float is NaN, and nobody takes it for an average. Then tells the GPU as [`open`](Self::open)
    /// does.
    ///
    /// # Safety
    /// The caller has both slots, and no transport does.
    pub(crate) unsafe fn spoil(&self, round: u64) {
        let memory = self.result.memory;
        // SAFETY: valid for writes, by the promise of `Slot::new`; the caller has it.
        unsafe { memory.as_ptr().write_bytes(u8::MAX, memory.len()) };
        self.open(round);
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: the promise of `new`.
        unsafe { self.gate.as_ref() }
    }
}

/// What a word is once the result of this round is there.
fn gate_of(round: u64) -> u32 {
    // The low bits: rounds that are compared are close to each other.
    u32::try_from(round & u64::from(u32::MAX)).expect("so many bits")
}

/// Where the slots are that RDMA devices are to reach.
#[derive(Default)]
pub struct SlotMemory {
    /// To send from, in the GPU's memory.
    pub gpu_to_send: Option<GpuMemory>,
    /// To land in, in the GPU's memory.
    pub gpu_to_land: Option<GpuMemory>,
    to_send: Option<(NonNull<u8>, usize)>,
    to_land: Option<(NonNull<u8>, usize)>,
}

// SAFETY: addresses, to which the promise of `in_host` applies on every thread, and registrations,
// which any thread may have.
unsafe impl Send for SlotMemory {}

impl SlotMemory {
    /// First byte and bytes of the slots in the host's memory: those to send from, and those where
    /// land what servers send.
    ///
    /// # Safety
    /// The ranges are mapped until the NIC loop has ended.
    #[must_use]
    pub unsafe fn in_host(
        to_send: Option<(NonNull<u8>, usize)>,
        to_land: Option<(NonNull<u8>, usize)>,
    ) -> SlotMemory {
        SlotMemory { to_send, to_land, ..SlotMemory::default() }
    }

    /// Those to send from, in the host's memory, which are mapped until the loop has ended.
    #[must_use]
    pub(crate) fn to_send(&self) -> Option<(NonNull<u8>, usize)> {
        self.to_send
    }

    /// The same of those to land in.
    #[must_use]
    pub(crate) fn to_land(&self) -> Option<(NonNull<u8>, usize)> {
        self.to_land
    }
}
