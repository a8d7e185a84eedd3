//! The memory that the two ends of a lane share: its layout, its mapping, and the words that are
//! read from it.
//!
//! What the peer writes is read once into a local copy, checked, and used only then. Invariant: an
//! address that leaves this file lies within a mapping, whatever the shared memory holds.

use crate::limits::{ALIGNMENT, HEADER_BYTES, PART_BYTES_MAX};
use crate::ring::cursor::{self, ConsumerCursor, CursorBlock, ProducerCursor};
use crate::sync::{AtomicU32, Ordering};
use crate::transport::Cause;
use crate::transport::interest::Interest;
use crate::wire::RawHeader;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

/// Extents that may be under way in one direction. At least the frames of a lane.
pub(super) const DESCRIPTORS: u32 = 256;
/// Most bytes of slots in one direction.
const AREA_BYTES_MAX: usize = 1 << 30;
const PAGE_BYTES: usize = 4096;
/// What a peer that breaks the rules of the shared memory is closed with.
pub(super) const BROKEN: Cause = Cause::Os(libc::EPROTO);
const FLAG_FIRST: u32 = 1;
const FLAG_ARENA: u32 = 2;

const _: () = assert!(DESCRIPTORS as usize >= crate::limits::LANE_FRAMES_MAX);

/// How much memory a lane shares.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ShmOptions {
    /// Most bytes that one extent of a payload has; a longer payload travels as several, so that
    /// the reader works on one while the next is written. A slot should stay in the cache that both
    /// ends share.
    pub slot_bytes: usize,
    /// Slots in each direction. Two are enough to work at both ends at once; more let more frames
    /// wait.
    pub slots: usize,
}

impl Default for ShmOptions {
    fn default() -> ShmOptions {
        ShmOptions { slot_bytes: 256 << 10, slots: 8 }
    }
}

impl ShmOptions {
    /// Bytes of memory that the two ends of such a lane share.
    #[must_use]
    pub fn lane_bytes(&self) -> u64 {
        let areas = self.slot_bytes.saturating_mul(self.slots).saturating_mul(2);
        areas.saturating_add(Layout::AREAS_AT) as u64
    }
}

/// Where everything lies in a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Layout {
    pub(super) slot_bytes: usize,
    pub(super) area_bytes: usize,
}

impl Layout {
    const CURSORS_AT: usize = 2 * size_of::<EndBlock>();
    const DESCRIPTORS_AT: usize = Self::CURSORS_AT + 2 * CursorBlock::BYTES;
    const AREAS_AT: usize = (Self::DESCRIPTORS_AT
        + 2 * DESCRIPTORS as usize * size_of::<Descriptor>())
    .next_multiple_of(PAGE_BYTES);

    /// The layout for these options, which may come from a peer.
    pub(super) fn new(options: ShmOptions) -> io::Result<Layout> {
        let ShmOptions { slot_bytes, slots } = options;
        let area_bytes = slot_bytes.checked_mul(slots).filter(|bytes| *bytes <= AREA_BYTES_MAX);
        let sound = slot_bytes.is_multiple_of(PAGE_BYTES)
            && (PAGE_BYTES..=PART_BYTES_MAX).contains(&slot_bytes)
            && slots >= 2;
        match area_bytes {
            Some(area_bytes) if sound => Ok(Layout { slot_bytes, area_bytes }),
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "a shared-memory lane cannot have {slots} slots of {slot_bytes} bytes: give at \
                     least 2 of a multiple of {PAGE_BYTES} up to {PART_BYTES_MAX} bytes, together \
                     at most {AREA_BYTES_MAX}"
                ),
            )),
        }
    }

    /// Bytes of the whole segment.
    pub(super) fn bytes(&self) -> usize {
        Self::AREAS_AT + 2 * self.area_bytes
    }
}

/// What one end tells the other outside the rings. Fresh memory (zeros) is an end that is awake and
/// there.
#[repr(C, align(128))]
pub(super) struct EndBlock {
    /// What this end sleeps for: bits of [`WAKE_PUBLISHED`] and [`WAKE_RELEASED`]. Whoever rings
    /// clears it.
    pub(super) interest: Interest,
    /// Not 0 when this end has left the lane.
    pub(super) left: AtomicU32,
    /// Not 0 when payloads that this end posted by reference must not be trusted any more: their
    /// memory has a new use.
    pub(super) revoked: AtomicU32,
}

/// Ring when there is a new extent.
pub(super) const WAKE_PUBLISHED: u32 = 1;
/// Ring when an extent was given back.
pub(super) const WAKE_RELEASED: u32 = 2;

/// One extent as it lies in shared memory: atomics, so that a peer that writes at any moment is no
/// data race.
#[repr(C, align(128))]
struct Descriptor {
    header: [AtomicU32; HEADER_BYTES / 4],
    flags: AtomicU32,
    length: AtomicU32,
    total: AtomicU32,
    offset_low: AtomicU32,
    offset_high: AtomicU32,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Descriptor>() == 128 && size_of::<EndBlock>() == 128);
const _: () = assert!(Layout::DESCRIPTORS_AT.is_multiple_of(128));

/// A run of payload bytes: all of a frame's payload or, in a slot, a part of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    /// Whether a frame begins here, with this header and so many bytes of payload in all.
    pub(super) first: Option<(RawHeader, usize)>,
    /// Whether the bytes are in the sender's arena, not in a slot.
    pub(super) in_arena: bool,
    pub(super) offset: usize,
    pub(super) length: usize,
}

impl Extent {
    /// Whether it may be the next of a payload of which `left` bytes are missing. Only the last
    /// one may be odd.
    pub(super) fn check(&self, left: usize) -> Result<(), Cause> {
        let is_last = self.length == left;
        let is_inner = self.length > 0
            && self.length < left
            && self.length.is_multiple_of(ALIGNMENT)
            && !self.in_arena;
        if left <= PART_BYTES_MAX && (is_last || is_inner) { Ok(()) } else { Err(BROKEN) }
    }
}

/// Mapped memory. Unmapped when dropped.
pub(super) struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread, and is reached through its owner
// alone.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Maps the first `bytes` of a file that cannot shrink, which the caller has made sure of.
    pub(super) fn new(file: BorrowedFd<'_>, bytes: usize, write: bool) -> io::Result<Mapping> {
        let (access, flags) = if write {
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::POPULATE)
        } else {
            (ProtFlags::READ, MapFlags::SHARED)
        };
        // SAFETY: a new mapping where the kernel likes touches no memory that is in use.
        let base = unsafe { mmap(std::ptr::null_mut(), bytes, access, flags, file, 0) }?;
        let base = NonNull::new(base.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { base, bytes })
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The address of `length` bytes from `offset` on.
    pub(super) fn at(&self, offset: usize, length: usize) -> *mut u8 {
        assert!(offset <= self.bytes && length <= self.bytes - offset, "within the mapping");
        self.base.as_ptr().wrapping_add(offset)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new` with this length; what pointed into it is gone with
        // its owner.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// A lane's shared memory as one of its ends sees it. End 0 made it.
pub(super) struct Segment {
    memory: Mapping,
    layout: Layout,
    end: usize,
}

impl Segment {
    /// `memory` has the layout's size.
    pub(super) fn new(memory: Mapping, layout: Layout, end: usize) -> Segment {
        assert!(memory.bytes() == layout.bytes() && end < 2, "the mapping is the layout's");
        Segment { memory, layout, end }
    }

    pub(super) fn layout(&self) -> Layout {
        self.layout
    }

    /// The cursors of the direction that this end sends in, and of the other. Called once per
    /// segment.
    pub(super) fn cursors(&self) -> (ProducerCursor, ConsumerCursor) {
        let block = |direction: usize| -> *mut CursorBlock {
            let offset = Layout::CURSORS_AT + direction * CursorBlock::BYTES;
            self.memory.at(offset, CursorBlock::BYTES).cast()
        };
        // SAFETY: the block is aligned by the layout, was zero when the segment was made, and lives
        // as long as the mapping, which the lane keeps until after the cursor. Each end makes one
        // cursor of each kind.
        let producer = unsafe { cursor::producer(block(self.end), DESCRIPTORS) };
        // SAFETY: the block of the other direction is aligned, zeroed and mapped as long as the
        // first, and this end makes its only consumer.
        let consumer = unsafe { cursor::consumer(block(1 - self.end), DESCRIPTORS) };
        (producer, consumer)
    }

    /// All words outside the slots, for tests that spoil them.
    #[cfg(test)]
    pub(super) fn words(&self) -> &[AtomicU32] {
        let at = self.memory.at(0, Layout::AREAS_AT).cast::<AtomicU32>();
        // SAFETY: in the mapping, aligned to a page, and reached as atomics by everybody.
        unsafe { std::slice::from_raw_parts(at, Layout::AREAS_AT / size_of::<AtomicU32>()) }
    }

    fn end_block(&self, end: usize) -> &EndBlock {
        let at = self.memory.at(end * size_of::<EndBlock>(), size_of::<EndBlock>());
        // SAFETY: in the mapping, aligned by the layout, made of atomics only, and alive as long as
        // `self`.
        unsafe { &*at.cast::<EndBlock>() }
    }

    /// What this end tells.
    pub(super) fn ours(&self) -> &EndBlock {
        self.end_block(self.end)
    }

    /// What the peer tells.
    pub(super) fn theirs(&self) -> &EndBlock {
        self.end_block(1 - self.end)
    }

    fn descriptor(&self, direction: usize, index: u32) -> &Descriptor {
        let number = direction * DESCRIPTORS as usize + (index % DESCRIPTORS) as usize;
        let offset = Layout::DESCRIPTORS_AT + number * size_of::<Descriptor>();
        let at = self.memory.at(offset, size_of::<Descriptor>());
        // SAFETY: in the mapping, aligned by the layout, made of atomics only, and alive as long as
        // `self`.
        unsafe { &*at.cast::<Descriptor>() }
    }

    /// Where the descriptor of an extent to the peer lies, and its size.
    pub(super) fn place(&self, index: u32) -> (*const u8, usize) {
        let at = std::ptr::from_ref(self.descriptor(self.end, index));
        (at.cast(), size_of::<Descriptor>())
    }

    /// Describes an extent to the peer; the producer's `publish` follows.
    pub(super) fn write(&self, index: u32, extent: &Extent) {
        let at = self.descriptor(self.end, index);
        let mut flags = 0;
        if let Some((header, total)) = &extent.first {
            flags |= FLAG_FIRST;
            for (word, bytes) in at.header.iter().zip(header.as_chunks::<4>().0) {
                word.store(u32::from_ne_bytes(*bytes), Ordering::Relaxed);
            }
            at.total.store(low(*total), Ordering::Relaxed);
        }
        if extent.in_arena {
            flags |= FLAG_ARENA;
        }
        at.flags.store(flags, Ordering::Relaxed);
        at.length.store(low(extent.length), Ordering::Relaxed);
        at.offset_low.store(low(extent.offset), Ordering::Relaxed);
        at.offset_high.store(low(extent.offset >> 32), Ordering::Relaxed);
    }

    /// What the peer describes, each word read once. `None` if it lies outside its area, or the
    /// arena of this length.
    pub(super) fn read(&self, index: u32, arena_bytes: usize) -> Option<Extent> {
        let at = self.descriptor(1 - self.end, index);
        let flags = at.flags.load(Ordering::Relaxed);
        let in_arena = flags & FLAG_ARENA != 0;
        let length = at.length.load(Ordering::Relaxed) as usize;
        let high = u64::from(at.offset_high.load(Ordering::Relaxed)) << 32;
        let offset =
            usize::try_from(high | u64::from(at.offset_low.load(Ordering::Relaxed))).ok()?;
        let bytes = if in_arena { arena_bytes } else { self.layout.area_bytes };
        let aligned = in_arena || offset.is_multiple_of(ALIGNMENT);
        if offset > bytes || length > bytes - offset || !aligned {
            return None;
        }
        let first = (flags & FLAG_FIRST != 0).then(|| {
            let mut header = [0; HEADER_BYTES];
            for (word, bytes) in at.header.iter().zip(header.as_chunks_mut::<4>().0) {
                *bytes = word.load(Ordering::Relaxed).to_ne_bytes();
            }
            (header, at.total.load(Ordering::Relaxed) as usize)
        });
        Some(Extent { first, in_arena, offset, length })
    }

    /// Bytes of the area that this end writes its payloads to.
    pub(super) fn outgoing(&self, offset: usize, length: usize) -> *mut u8 {
        self.area(self.end, offset, length)
    }

    /// Bytes of the area that the peer writes its payloads to.
    pub(super) fn incoming(&self, offset: usize, length: usize) -> *const u8 {
        self.area(1 - self.end, offset, length)
    }

    fn area(&self, direction: usize, offset: usize, length: usize) -> *mut u8 {
        let bytes = self.layout.area_bytes;
        assert!(offset <= bytes && length <= bytes - offset, "within the area");
        self.memory.at(Layout::AREAS_AT + direction * bytes + offset, length)
    }
}

#[allow(clippy::cast_possible_truncation, reason = "the caller wants the low half")]
fn low(value: usize) -> u32 {
    value as u32
}
