//! A reserved range of addresses from which memory is claimed piece by piece.
//!
//! A claim can be given back, and its range is claimed again before more is taken.
//!
//! The invariants: claims never overlap, are aligned to [`ALIGNMENT`] and zero when handed out,
//! have their pages already (so that using them never faults), and stay mapped as long as any of
//! them lives. Pages once taken stay where they are until the arena is gone, also over
//! [`Arena::release_all`], because devices may know them.
//!
//! A forked child does not get the memory: a copy on write would part the parent from what a device
//! writes to.

use super::{Headroom, MemoryError};
use crate::limits::ALIGNMENT;
use crate::trace::log;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{
    Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap, mmap_anonymous, mprotect, munmap,
};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

/// Pages are taken from the kernel in steps of this, a huge page of every architecture that we
/// know.
const STEP_BYTES: usize = 2 << 20;
/// Smallest page of any architecture: touching one byte in each touches every page.
const PAGE_BYTES_MIN: usize = 4096;

/// What an arena shall be.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Options {
    /// Says in errors, logs and /proc/PID/maps what it is for.
    pub name: String,
    /// The NUMA node that its pages should be on; where that is full or may not be asked for,
    /// another.
    pub numa_node: Option<u32>,
    /// Whether other processes shall be able to map it, by [`Arena::memfd`].
    pub shared: bool,
}

/// A range of addresses; see the head of this file.
pub struct Arena {
    map: Arc<Mapping>,
    numa_node: Option<u32>,
    /// End of what is claimed.
    used: usize,
    /// End of what has pages.
    ready: usize,
    /// End of what may hold something else than zeros.
    dirty: usize,
    /// Ranges below `used` that were given back: length by offset. No two touch, and none ends at
    /// `used`.
    free: BTreeMap<usize, usize>,
    /// The same by length and offset.
    free_by_length: BTreeSet<(usize, usize)>,
    /// Bytes in them.
    free_bytes: usize,
}

/// A piece of an arena: aligned, zeroed, its pages present. It stays mapped as long as this value
/// lives, and nobody else has it.
pub struct Claim {
    at: NonNull<u8>,
    length: usize,
    /// Keeps the memory mapped, and the arena from handing it out anew.
    _map: Arc<Mapping>,
}

/// Owns the addresses: unmaps them when the arena and all its claims are gone.
struct Mapping {
    name: String,
    /// What was asked of the kernel, more than is used so that `base` can be aligned.
    outer: NonNull<u8>,
    outer_length: usize,
    base: NonNull<u8>,
    length: usize,
    memfd: Option<OwnedFd>,
    /// The process that mapped it; a forked child has nothing to unmap.
    process: u32,
}

// SAFETY: a mapping is an address range and a file descriptor, neither of which belongs to a
// thread; nothing in it changes after it was made.
unsafe impl Send for Mapping {}
// SAFETY: a shared reference reads fields that nothing changes after the mapping was made.
unsafe impl Sync for Mapping {}
// SAFETY: a claim is the only owner of its range (`Arena::claim` never gives a range twice while
// claims live).
unsafe impl Send for Claim {}
// SAFETY: through a shared claim only its address and length can be read.
unsafe impl Sync for Claim {}

impl Arena {
    /// Reserves addresses for at most `bytes_max`; memory is taken as it is claimed.
    ///
    /// # Errors
    /// [`MemoryError::Kernel`] if the addresses (or the memfd) cannot be had.
    pub fn reserve(bytes_max: usize, options: &Options) -> Result<Arena, MemoryError> {
        let kernel = |step, bytes| {
            move |errno: rustix::io::Errno| MemoryError::Kernel {
                arena: options.name.clone(),
                step,
                bytes,
                source: errno.into(),
            }
        };
        let too_long = kernel("reserving the addresses", bytes_max)(rustix::io::Errno::NOMEM);
        let Some(length) = bytes_max.max(1).checked_next_multiple_of(STEP_BYTES) else {
            return Err(too_long);
        };
        let Some(outer_length) = length.checked_add(STEP_BYTES) else { return Err(too_long) };
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory that exists.
        let outer = unsafe {
            mmap_anonymous(std::ptr::null_mut(), outer_length, ProtFlags::empty(), flags)
        }
        .map_err(kernel("reserving the addresses", outer_length))?;
        let outer = NonNull::new(outer.cast::<u8>())
            .expect("the kernel never maps the address 0 unless told to");
        let skip = outer.as_ptr().align_offset(STEP_BYTES);
        // SAFETY: `skip` is less than STEP_BYTES, by which the mapping is longer than `length`.
        let base = unsafe { outer.add(skip) };
        // From here on the drop of `map` gives the addresses back if a step fails.
        let mut map = Mapping {
            name: options.name.clone(),
            outer,
            outer_length,
            base,
            length,
            memfd: None,
            process: std::process::id(),
        };
        if options.shared {
            map.memfd = Some(map.share().map_err(kernel("making the memfd", length))?);
        }
        map.advise(options.numa_node);
        let map = Arc::new(map);
        Ok(Arena {
            map,
            numa_node: options.numa_node,
            used: 0,
            ready: 0,
            dirty: 0,
            free: BTreeMap::new(),
            free_by_length: BTreeSet::new(),
            free_bytes: 0,
        })
    }

    /// Claims `bytes` bytes, rounded up to the alignment, zeroed and with all pages present.
    ///
    /// # Errors
    /// [`MemoryError`]; nothing has changed then.
    pub fn claim(&mut self, bytes: usize) -> Result<Claim, MemoryError> {
        if let Some(start) = self.take_free(bytes) {
            // SAFETY: the range is below `used` and was given back, so it is mapped, writable, and
            // no claim has it.
            let at = unsafe { self.map.base.add(start) };
            // SAFETY: the range was given back whole and is at least `bytes` long, so all of it is
            // mapped, writable, and of no claim.
            unsafe { at.write_bytes(0, bytes) };
            return Ok(Claim { at, length: bytes, _map: Arc::clone(&self.map) });
        }
        let start = self.used;
        let end = bytes
            .checked_next_multiple_of(ALIGNMENT)
            .and_then(|bytes| start.checked_add(bytes))
            .filter(|&end| end <= self.map.length)
            .ok_or_else(|| MemoryError::ArenaFull {
                arena: self.map.name.clone(),
                need: bytes,
                left: self.map.length - start,
                reserved: self.map.length,
            })?;
        self.grow(end)?;
        // SAFETY: `start <= end <= length`, so the address is inside the mapping or just past its
        // end.
        let at = unsafe { self.map.base.add(start) };
        let stale = self.dirty.min(end).saturating_sub(start);
        // SAFETY: the range lies below `ready`, so it is mapped and writable, and above `used`, so
        // no claim has it.
        unsafe { at.write_bytes(0, stale) };
        self.used = end;
        Ok(Claim { at, length: bytes, _map: Arc::clone(&self.map) })
    }

    /// Takes the pages of the next `bytes` bytes that will be claimed, all at once: the headroom is
    /// then checked for all of them, before the first is taken. Ranges that were given back have
    /// their pages already and count as room.
    ///
    /// # Errors
    /// [`MemoryError`]; nothing has changed then.
    pub fn prepare(&mut self, bytes: usize) -> Result<(), MemoryError> {
        let fresh = bytes.saturating_sub(self.free_bytes);
        let left = self.map.length - self.used;
        if fresh > left {
            let (arena, reserved) = (self.map.name.clone(), self.map.length);
            return Err(MemoryError::ArenaFull { arena, need: fresh, left, reserved });
        }
        self.grow(self.used + fresh)
    }

    /// The start of the smallest range that was given back and has room for so many bytes; what is
    /// left of it stays free.
    fn take_free(&mut self, bytes: usize) -> Option<usize> {
        let length = bytes.checked_next_multiple_of(ALIGNMENT).filter(|&length| length > 0)?;
        let &(found, start) = self.free_by_length.range((length, 0)..).next()?;
        self.remove_free(start, found);
        if found > length {
            self.insert_free(start + length, found - length);
        }
        Some(start)
    }

    fn remove_free(&mut self, start: usize, length: usize) {
        self.free.remove(&start);
        self.free_by_length.remove(&(length, start));
        self.free_bytes -= length;
    }

    fn insert_free(&mut self, start: usize, length: usize) {
        self.free.insert(start, length);
        self.free_by_length.insert((length, start));
        self.free_bytes += length;
    }

    /// Takes a claim back: its range can be claimed again. Its pages stay.
    ///
    /// # Panics
    /// If it is of another arena.
    pub fn release(&mut self, claim: Claim) {
        assert!(Arc::ptr_eq(&claim._map, &self.map), "a claim went back to another arena");
        let mut start = claim.at.addr().get() - self.map.base.addr().get();
        let mut length = claim.length.next_multiple_of(ALIGNMENT);
        if length == 0 {
            return;
        }
        if let Some((&before, &its_length)) = self.free.range(..start).next_back()
            && before + its_length == start
        {
            self.remove_free(before, its_length);
            (start, length) = (before, its_length + length);
        }
        if let Some(&behind) = self.free.get(&(start + length)) {
            self.remove_free(start + length, behind);
            length += behind;
        }
        if start + length == self.used {
            self.dirty = self.dirty.max(self.used);
            self.used = start;
        } else {
            self.insert_free(start, length);
        }
    }

    /// Makes all memory claimable again; pages stay. For a new epoch.
    ///
    /// # Errors
    /// [`MemoryError::InUse`] while claims are alive; nothing has changed then.
    pub fn release_all(&mut self) -> Result<(), MemoryError> {
        // `get_mut` also makes what other threads did before they dropped their claims happen
        // before this.
        if Arc::get_mut(&mut self.map).is_none() {
            return Err(MemoryError::InUse {
                arena: self.map.name.clone(),
                claims: Arc::strong_count(&self.map) - 1,
            });
        }
        self.dirty = self.dirty.max(self.used);
        self.used = 0;
        self.free.clear();
        self.free_by_length.clear();
        self.free_bytes = 0;
        Ok(())
    }

    /// The memfd behind a shared arena. It is sealed: whoever gets it can neither write, shrink nor
    /// grow it.
    #[must_use]
    pub fn memfd(&self) -> Option<BorrowedFd<'_>> {
        self.map.memfd.as_ref().map(AsFd::as_fd)
    }

    /// The first address; offset 0 of the memfd.
    #[must_use]
    pub fn base(&self) -> *mut u8 {
        self.map.base.as_ptr()
    }

    /// Bytes that can be claimed in all.
    #[must_use]
    pub fn reserved_bytes(&self) -> usize {
        self.map.length
    }

    /// Bytes that are claimed.
    #[must_use]
    pub fn claimed_bytes(&self) -> usize {
        self.used - self.free_bytes
    }

    /// Bytes that have pages: never fewer than are claimed.
    #[must_use]
    pub fn resident_bytes(&self) -> usize {
        self.ready
    }

    /// The NUMA node that was asked for.
    #[must_use]
    pub fn numa_node(&self) -> Option<u32> {
        self.numa_node
    }

    /// Whether this range lies in claimed memory.
    #[must_use]
    pub fn contains(&self, at: *const u8, length: usize) -> bool {
        let start = at.addr().checked_sub(self.map.base.addr().get());
        start.and_then(|start| start.checked_add(length)).is_some_and(|end| end <= self.used)
    }

    /// Where this address is in the memfd, if it is in claimed memory.
    #[must_use]
    pub fn offset_of(&self, at: *const u8) -> Option<usize> {
        let offset = at.addr().checked_sub(self.map.base.addr().get())?;
        (offset < self.used).then_some(offset)
    }

    /// Takes pages so that everything below `end` has some.
    fn grow(&mut self, end: usize) -> Result<(), MemoryError> {
        if end <= self.ready {
            return Ok(());
        }
        // The length is a multiple of the step, so this stays within it.
        let target = end.next_multiple_of(STEP_BYTES);
        let bytes = target - self.ready;
        Headroom::read(Path::new("/")).check(&self.map.name, bytes as u64)?;
        self.map.populate(self.ready, bytes)?;
        self.ready = target;
        Ok(())
    }
}

impl Claim {
    /// The first byte, aligned to [`ALIGNMENT`].
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.at.as_ptr()
    }

    /// Bytes that were asked for.
    #[must_use]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether no bytes were asked for.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }
}

impl Mapping {
    /// Puts a sealed memfd where the reserved addresses are.
    fn share(&self) -> rustix::io::Result<OwnedFd> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        // Hardened kernels want to hear that it is not code; kernels before 6.3 do not know the
        // word.
        let memfd = memfd_create(&self.name, flags | MemfdFlags::NOEXEC_SEAL)
            .or_else(|_| memfd_create(&self.name, flags))?;
        ftruncate(&memfd, self.length as u64)?;
        // A peer that could shrink the file could end this process by SIGBUS.
        fcntl_add_seals(&memfd, SealFlags::SHRINK | SealFlags::GROW)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: the range was reserved by `Arena::reserve` a moment ago and nobody knows it yet,
        // so replacing what is mapped there takes nobody's memory away.
        unsafe { mmap(self.at(0), self.length, access, flags, &memfd, 0) }?;
        // This mapping is the last that can be written: whoever is given the memfd can only read.
        fcntl_add_seals(&memfd, SealFlags::FUTURE_WRITE | SealFlags::SEAL)?;
        Ok(memfd)
    }

    /// Says to the kernel what the memory is for. None of it must succeed.
    fn advise(&self, numa_node: Option<u32>) {
        // SAFETY: advice about huge pages does not change what the memory holds.
        let _ = unsafe { madvise(self.at(0), self.length, Advice::LinuxHugepage) };
        // SAFETY: a forked child that lacks the memory cannot use it: the arena belongs to the
        // parent's threads.
        let _ = unsafe { madvise(self.at(0), self.length, Advice::LinuxDontFork) };
        if let Some(node) = numa_node
            && let Err(error) = self.prefer_node(node)
        {
            log::info!("arena {}: its memory is not bound to NUMA node {node}: {error}", self.name);
        }
    }

    fn prefer_node(&self, node: u32) -> std::io::Result<()> {
        const MPOL_PREFERRED: libc::c_int = 1;
        const NODES_MAX: usize = 1024;
        let mut mask = [0u64; NODES_MAX / 64];
        let word = mask
            .get_mut(node as usize / 64)
            .ok_or_else(|| std::io::Error::from(std::io::ErrorKind::InvalidInput))?;
        *word |= 1 << (node % 64);
        // SAFETY: the range is our own mapping, the mask is as long as we say (in bits, plus the
        // one that the kernel takes off), and a policy changes only where pages to come are placed.
        let result = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.at(0),
                self.length,
                MPOL_PREFERRED,
                mask.as_ptr(),
                NODES_MAX + 1,
                0,
            )
        };
        if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    }

    /// Makes `[from, from + bytes)` usable and gives it pages.
    fn populate(&self, from: usize, bytes: usize) -> Result<(), MemoryError> {
        let error = |step, errno: rustix::io::Errno| MemoryError::Kernel {
            arena: self.name.clone(),
            step,
            bytes,
            source: errno.into(),
        };
        if self.memfd.is_none() {
            let access = MprotectFlags::READ | MprotectFlags::WRITE;
            // SAFETY: the range is ours and unclaimed, and more access takes nothing from anybody.
            unsafe { mprotect(self.at(from), bytes, access) }
                .map_err(|errno| error("making memory writable", errno))?;
        }
        // SAFETY: populating changes no contents, and the range is ours.
        match unsafe { madvise(self.at(from), bytes, Advice::LinuxPopulateWrite) } {
            Ok(()) => Ok(()),
            // Kernels before 5.14 do not know the advice: touch the pages by hand.
            Err(rustix::io::Errno::INVAL) => {
                for offset in (from..from + bytes).step_by(PAGE_BYTES_MIN) {
                    // SAFETY: the byte lies in the range just made writable, which no claim has
                    // yet; fresh pages are zero, so that writing zero changes nothing.
                    unsafe { self.at(offset).cast::<u8>().write_volatile(0) };
                }
                Ok(())
            }
            Err(errno) => Err(error("taking pages", errno)),
        }
    }

    fn at(&self, offset: usize) -> *mut c_void {
        debug_assert!(offset <= self.length);
        // SAFETY: callers pass offsets of at most `length`, so the address is inside the mapping or
        // just past its end.
        unsafe { self.base.add(offset) }.as_ptr().cast()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // A forked child has inherited this value but not the memory; others may live at these
        // addresses there.
        if self.process != std::process::id() {
            return;
        }
        // SAFETY: the arena and every claim hold an Arc of this mapping, so nobody uses the range
        // any more.
        let result = unsafe { munmap(self.outer.as_ptr().cast(), self.outer_length) };
        debug_assert!(result.is_ok(), "unmapping our own range: {result:?}");
    }
}

#[cfg(test)]
#[path = "tests/arena.rs"]
mod tests;
