//! The two indices of a single-producer single-consumer ring in memory shared by two processes.
//!
//! This file owns the indices and their ordering; the slots and what is in them belong to the
//! caller (the shared-memory transport). Indices run freely over 32 bits; the slot of index `i` is
//! `i mod capacity`. Each end writes one index and keeps its own copy, which it never reads back;
//! what it reads of the peer's index is checked, because the peer may be broken or hostile: the
//! invariant is that no answer of either end ever names more slots than there are, whatever the
//! shared memory holds.
//!
//! Every order of their atomics is gone through in a model: `crate::sync` has the command.

use crate::sync::{AtomicU32, Ordering};
use std::ptr::NonNull;

/// One index alone on its pair of cache lines: neighbouring lines are fetched together.
#[repr(C, align(128))]
struct Line {
    index: AtomicU32,
}

/// What lies in the shared memory. All zero is an empty ring, as fresh memory is.
#[repr(C)]
pub struct CursorBlock {
    /// Items published so far; the producer writes it.
    tail: Line,
    /// Items released so far; the consumer writes it.
    head: Line,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<CursorBlock>() == 256 && align_of::<CursorBlock>() == 128);

impl CursorBlock {
    /// Bytes of a block in shared memory.
    pub const BYTES: usize = size_of::<CursorBlock>();
    /// Alignment of a block in shared memory.
    pub const ALIGNMENT: usize = align_of::<CursorBlock>();

    /// An empty block, for rings within a process.
    #[must_use]
    pub fn new() -> CursorBlock {
        CursorBlock {
            tail: Line { index: AtomicU32::new(0) },
            head: Line { index: AtomicU32::new(0) },
        }
    }
}

impl Default for CursorBlock {
    fn default() -> CursorBlock {
        CursorBlock::new()
    }
}

/// The peer's index is impossible: the ring must not be used again, and the peer's lane should be
/// closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "the {peer} of a shared-memory ring of {capacity} slots moved its index to {index}, \
     which is impossible while ours is {own}: its memory is corrupt or hostile; close the lane"
)]
pub struct Corrupt {
    /// Which end wrote it: "producer" or "consumer".
    pub peer: &'static str,
    /// Slots of the ring.
    pub capacity: u32,
    /// The index that the peer wrote.
    pub index: u32,
    /// Our own index.
    pub own: u32,
}

/// The producing end.
pub struct ProducerCursor {
    block: NonNull<CursorBlock>,
    capacity: u32,
    /// Our index: items published so far.
    tail: u32,
    /// The peer's index when we last looked.
    head_seen: u32,
}

/// The consuming end.
pub struct ConsumerCursor {
    block: NonNull<CursorBlock>,
    capacity: u32,
    /// Our index: items released so far.
    head: u32,
    /// The peer's index when we last looked.
    tail_seen: u32,
}

// SAFETY: the block is reached through atomics alone, and the contract of `producer` and `consumer`
// (one cursor for each end, memory mapped as long as it lives) does not name a thread.
unsafe impl Send for ProducerCursor {}
// SAFETY: the block is reached through atomics alone, and the contract of `consumer` does not name
// a thread.
unsafe impl Send for ConsumerCursor {}

fn checked(at: *mut CursorBlock, capacity: u32) -> NonNull<CursorBlock> {
    assert!(
        capacity.is_power_of_two() && capacity <= 1 << 31,
        "a ring's capacity is a power of two of at most 2^31, not {capacity}"
    );
    assert!(at.is_aligned(), "a cursor block is aligned to {} bytes", CursorBlock::ALIGNMENT);
    NonNull::new(at).expect("the caller passes the address of mapped memory, which is not null")
}

/// The producing end of the ring whose indices are at `at`, with `capacity` slots, a power of two.
///
/// # Safety
/// `at` points to a [`CursorBlock`] of zeros (or `CursorBlock::new()`), aligned, that stays mapped
/// and writable as long as the cursor lives. No other producer is made for it, and nothing but
/// cursors writes to it from this process. What another process writes to it is checked here and
/// need not be trusted.
#[must_use]
pub unsafe fn producer(at: *mut CursorBlock, capacity: u32) -> ProducerCursor {
    ProducerCursor { block: checked(at, capacity), capacity, tail: 0, head_seen: 0 }
}

/// The consuming end of the ring whose indices are at `at`, with `capacity` slots, a power of two.
///
/// # Safety
/// As for [`producer`], with "consumer" for "producer". The producer may have published already.
#[must_use]
pub unsafe fn consumer(at: *mut CursorBlock, capacity: u32) -> ConsumerCursor {
    ConsumerCursor { block: checked(at, capacity), capacity, head: 0, tail_seen: 0 }
}

impl ProducerCursor {
    /// Slots that may be filled now, from [`index`](Self::index) on. Looks at the peer's index only
    /// when those known of are used up; [`refresh`](Self::refresh) always looks.
    ///
    /// # Errors
    /// [`Corrupt`] if the consumer's index is impossible.
    #[inline]
    pub fn free(&mut self) -> Result<u32, Corrupt> {
        let used = self.tail.wrapping_sub(self.head_seen);
        if used < self.capacity { Ok(self.capacity - used) } else { self.refresh() }
    }

    /// Slots that may be filled, with a fresh look at the peer's index.
    ///
    /// # Errors
    /// [`Corrupt`] if the consumer's index is impossible.
    #[inline]
    pub fn refresh(&mut self) -> Result<u32, Corrupt> {
        // Acquire: the pair of the Release in `ConsumerCursor::release`, so that its reads of a
        // slot come before our writes to it.
        let head = self.block().head.index.load(Ordering::Acquire);
        // The consumer's index lies between what it was and ours. Both distances wrap with the
        // indices.
        let used = self.tail.wrapping_sub(head);
        if used > self.tail.wrapping_sub(self.head_seen) {
            return Err(self.corrupt(head));
        }
        self.head_seen = head;
        Ok(self.capacity - used)
    }

    /// The slot of the next item; the one after it is `(index + 1) % capacity`.
    #[inline]
    #[must_use]
    pub fn index(&self) -> u32 {
        self.tail & (self.capacity - 1)
    }

    /// Hands `count` filled slots, from [`index`](Self::index) on, to the consumer in one store.
    ///
    /// # Panics
    /// If these are more than [`free`](Self::free) has said: an error of the caller.
    #[inline]
    pub fn publish(&mut self, count: u32) {
        let free = self.capacity - self.tail.wrapping_sub(self.head_seen);
        assert!(count <= free, "{count} slots are published where {free} are free");
        self.tail = self.tail.wrapping_add(count);
        // Release: what was written to the slots comes before it; its pair is the Acquire in
        // `ConsumerCursor::refresh`.
        self.block().tail.index.store(self.tail, Ordering::Release);
    }

    #[inline]
    fn block(&self) -> &CursorBlock {
        // SAFETY: the maker of this cursor keeps the block mapped as long as it lives (contract of
        // `producer`).
        unsafe { self.block.as_ref() }
    }

    #[cold]
    fn corrupt(&self, index: u32) -> Corrupt {
        Corrupt { peer: "consumer", capacity: self.capacity, index, own: self.tail }
    }
}

impl ConsumerCursor {
    /// Filled slots, from [`index`](Self::index) on. Looks at the peer's index only when those
    /// known of are used up; [`refresh`](Self::refresh) always looks.
    ///
    /// # Errors
    /// [`Corrupt`] if the producer's index is impossible.
    #[inline]
    pub fn ready(&mut self) -> Result<u32, Corrupt> {
        let ready = self.tail_seen.wrapping_sub(self.head);
        if ready > 0 { Ok(ready) } else { self.refresh() }
    }

    /// Filled slots, with a fresh look at the peer's index.
    ///
    /// # Errors
    /// [`Corrupt`] if the producer's index is impossible.
    #[inline]
    pub fn refresh(&mut self) -> Result<u32, Corrupt> {
        // Acquire: the pair of the Release in `ProducerCursor::publish`, so that we see what it
        // wrote to the slots.
        let tail = self.block().tail.index.load(Ordering::Acquire);
        let ready = tail.wrapping_sub(self.head);
        // The producer's index neither goes back nor gets further ahead of ours than the ring is
        // long.
        if ready > self.capacity || ready < self.tail_seen.wrapping_sub(self.head) {
            return Err(self.corrupt(tail));
        }
        self.tail_seen = tail;
        Ok(ready)
    }

    /// The slot of the next item; the one after it is `(index + 1) % capacity`.
    #[inline]
    #[must_use]
    pub fn index(&self) -> u32 {
        self.head & (self.capacity - 1)
    }

    /// Gives `count` slots, from [`index`](Self::index) on, back to the producer in one store.
    ///
    /// # Panics
    /// If these are more than [`ready`](Self::ready) has said: an error of the caller.
    #[inline]
    pub fn release(&mut self, count: u32) {
        let ready = self.tail_seen.wrapping_sub(self.head);
        assert!(count <= ready, "{count} slots are released where {ready} are filled");
        self.head = self.head.wrapping_add(count);
        // Release: our reads of the slots come before it; its pair is the Acquire in
        // `ProducerCursor::refresh`.
        self.block().head.index.store(self.head, Ordering::Release);
    }

    #[inline]
    fn block(&self) -> &CursorBlock {
        // SAFETY: the maker of this cursor keeps the block mapped as long as it lives (contract of
        // `consumer`).
        unsafe { self.block.as_ref() }
    }

    #[cold]
    fn corrupt(&self, index: u32) -> Corrupt {
        Corrupt { peer: "producer", capacity: self.capacity, index, own: self.head }
    }
}

#[cfg(test)]
#[path = "tests/cursor.rs"]
mod tests;
