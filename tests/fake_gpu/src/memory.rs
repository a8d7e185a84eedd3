//! "Memory of the GPU", which is memory of the process between guard pages, and which ranges of the
//! host's memory are registered.

use crate::device::INVALID_VALUE;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

const OUT_OF_MEMORY: u32 = 2;
const ALREADY_REGISTERED: u32 = 712;
const NOT_REGISTERED: u32 = 713;
/// Alignment of what `cuMemAlloc` gives.
const ALIGNMENT: usize = 256;
const PAGE: usize = 4096;
/// Memory of each fake GPU.
pub const TOTAL: usize = 16 << 30;

/// What an allocation was mapped as: address and length, guards included, and its own length.
static ALLOCATED: Mutex<BTreeMap<usize, (usize, usize, usize)>> = Mutex::new(BTreeMap::new());
/// Length of each registered range, by address.
static REGISTERED: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Memory that ends at a page which nobody may touch, and begins not far behind another.
pub fn allocate(bytes: usize) -> Result<u64, u32> {
    if bytes == 0 {
        return Err(INVALID_VALUE);
    }
    let mut allocated = locked(&ALLOCATED);
    let taken: usize = allocated.values().map(|(_, _, bytes)| bytes).sum();
    let rounded = bytes.checked_next_multiple_of(ALIGNMENT).ok_or(OUT_OF_MEMORY)?;
    if rounded > TOTAL - taken {
        return Err(OUT_OF_MEMORY);
    }
    let inner = rounded.next_multiple_of(PAGE);
    let length = inner + 2 * PAGE;
    let (read_write, private) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: a new mapping at an address of the kernel's choice touches no memory that exists.
    let outer = unsafe { mmap_anonymous(std::ptr::null_mut(), length, read_write, private) };
    let outer = outer.map_err(|_| OUT_OF_MEMORY)?.cast::<u8>();
    for guard in [0, PAGE + inner] {
        // SAFETY: the page is the first or last of the mapping just made.
        let page = unsafe { outer.add(guard) }.cast();
        // SAFETY: as above; nobody knows the page yet.
        unsafe { mprotect(page, PAGE, MprotectFlags::empty()) }.map_err(|_| OUT_OF_MEMORY)?;
    }
    // What memory of a GPU holds at first is nobody's promise, so it is not zero here.
    // SAFETY: this is the mapping without its guards.
    unsafe { outer.add(PAGE).write_bytes(0xa5, inner) };
    let address = outer.expose_provenance() + PAGE + inner - rounded;
    allocated.insert(address, (outer.expose_provenance(), length, rounded));
    Ok(address as u64)
}

pub fn free(address: u64) -> Result<(), u32> {
    let taken = locked(&ALLOCATED).remove(&(address as usize));
    let (outer, length, _) = taken.ok_or(INVALID_VALUE)?;
    let outer = std::ptr::with_exposed_provenance_mut(outer);
    // SAFETY: `allocate` mapped this range, and it was just taken from the list.
    unsafe { munmap(outer, length) }.map_err(|_| INVALID_VALUE)
}

/// Whether this range lies in one allocation.
pub fn holds(address: u64, bytes: usize) -> bool {
    let (address, allocated) = (address as usize, locked(&ALLOCATED));
    let before = allocated.range(..=address).next_back();
    before.is_some_and(|(start, (_, _, length))| {
        address.checked_add(bytes).is_some_and(|end| end <= start + length)
    })
}

/// A descriptor that stands for memory, and is good for nothing else.
pub fn export() -> Option<i32> {
    let name = "memory of a fake GPU";
    let made = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).ok()?;
    Some(std::os::fd::IntoRawFd::into_raw_fd(made))
}

/// Bytes that are not allocated.
pub fn free_bytes() -> usize {
    TOTAL - locked(&ALLOCATED).values().map(|(_, _, bytes)| bytes).sum::<usize>()
}

pub fn register(address: usize, bytes: usize) -> Result<(), u32> {
    let end = address.checked_add(bytes).filter(|_| address != 0 && bytes > 0);
    let end = end.ok_or(INVALID_VALUE)?;
    let mut registered = locked(&REGISTERED);
    let before = registered.range(..end).next_back();
    if before.is_some_and(|(start, length)| start + length > address) {
        return Err(ALREADY_REGISTERED);
    }
    registered.insert(address, bytes);
    Ok(())
}

pub fn unregister(address: usize) -> Result<(), u32> {
    locked(&REGISTERED).remove(&address).map(|_| ()).ok_or(NOT_REGISTERED)
}

/// Whether this range is registered as a whole.
pub fn is_registered(address: usize, bytes: usize) -> bool {
    let registered = locked(&REGISTERED);
    let before = registered.range(..=address).next_back();
    before.is_some_and(|(start, length)| start + length >= address + bytes)
}

/// Writes a word, after all that this thread has written: a host that sees it sees the rest.
pub fn write_word(address: usize, value: u32) {
    let word = std::ptr::with_exposed_provenance_mut(address);
    // SAFETY: the address is aligned, and the user of CUDA vouches that it is good until the write
    // is done and that others use it by atomic operations alone.
    unsafe { AtomicU32::from_ptr(word) }.store(value, Ordering::Release);
}

/// Copies `bytes` bytes, wherever they are.
pub fn copy(to: usize, from: usize, bytes: usize) {
    let to: *mut u8 = std::ptr::with_exposed_provenance_mut(to);
    // SAFETY: who enqueued the copy promised that both ranges are there until it is done.
    unsafe { std::ptr::copy(std::ptr::with_exposed_provenance(from), to, bytes) };
}
