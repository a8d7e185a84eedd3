//! "Memory of the GPU", which is memory of the process between guard pages, and which ranges of the
//! host's memory are registered.

use crate::device::INVALID_VALUE;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mmap_anonymous, mprotect, munmap};
use std::collections::BTreeMap;
use std::os::fd::IntoRawFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

const OUT_OF_MEMORY: u32 = 2;
const ALREADY_REGISTERED: u32 = 712;
const NOT_REGISTERED: u32 = 713;
/// Alignment of what `cuMemAlloc` gives.
const ALIGNMENT: usize = 256;
const PAGE: usize = 4096;
/// Memory of each fake GPU.
pub const TOTAL: usize = 16 << 30;

/// What is exported has whole ones of these, and has a second mapping from the start.
const GRANULE: usize = 2 << 20;

/// An allocation. Its address is that of the user's bytes.
struct Allocation {
    /// The mapping with its guards.
    outer: usize,
    length: usize,
    bytes: usize,
    /// The same bytes once more, where the GPU works on what it has exported: the user's mapping is
    /// closed then, so that a processor that reads or writes there ends the process. Devices know
    /// the pages by then.
    again: Option<usize>,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    Exported,
    Closed,
}

static ALLOCATED: Mutex<BTreeMap<usize, Allocation>> = Mutex::new(BTreeMap::new());
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
    let taken: usize = allocated.values().map(|one| one.bytes).sum();
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
        // SAFETY: the page is within the new mapping, and nobody knows it yet.
        unsafe { mprotect(page, PAGE, MprotectFlags::empty()) }.map_err(|_| OUT_OF_MEMORY)?;
    }
    let again = match inner % GRANULE {
        0 => Some(map_twice(outer.wrapping_add(PAGE), inner)?),
        _ => None,
    };
    // What memory of a GPU holds at first is nobody's promise, so it is not zero here.
    // SAFETY: this is the mapping without its guards.
    unsafe { outer.add(PAGE).write_bytes(0xa5, inner) };
    let address = outer.expose_provenance() + PAGE + inner - rounded;
    let (outer, state) = (outer.expose_provenance(), State::Open);
    allocated.insert(address, Allocation { outer, length, bytes: rounded, again, state });
    Ok(address as u64)
}

/// Puts pages there that are mapped at another address as well, and says at which.
fn map_twice(at: *mut u8, bytes: usize) -> Result<usize, u32> {
    let pages = memfd_create("memory of a fake GPU", MemfdFlags::CLOEXEC);
    let pages = pages.map_err(|_| OUT_OF_MEMORY)?;
    ftruncate(&pages, bytes as u64).map_err(|_| OUT_OF_MEMORY)?;
    let map = |at: *mut u8, flags| {
        let read_write = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the first lies within the mapping that `allocate` has just made, the second is
        // where the kernel chooses.
        unsafe { mmap(at.cast(), bytes, read_write, MapFlags::SHARED | flags, &pages, 0) }
    };
    map(at, MapFlags::FIXED).map_err(|_| OUT_OF_MEMORY)?;
    let again = map(std::ptr::null_mut(), MapFlags::empty()).map_err(|_| OUT_OF_MEMORY)?;
    Ok(again.expose_provenance())
}

pub fn free(address: u64) -> Result<(), u32> {
    let taken = locked(&ALLOCATED).remove(&(address as usize)).ok_or(INVALID_VALUE)?;
    let second = taken.again.map(|again| (again, taken.bytes));
    for (start, length) in [(taken.outer, taken.length)].into_iter().chain(second) {
        let start = std::ptr::with_exposed_provenance_mut(start);
        // SAFETY: `allocate` mapped this range, and it was just taken from the list.
        unsafe { munmap(start, length) }.map_err(|_| INVALID_VALUE)?;
    }
    Ok(())
}

/// The allocation that has this address, with its own.
fn of(
    allocated: &mut BTreeMap<usize, Allocation>,
    address: usize,
) -> Option<(usize, &mut Allocation)> {
    let (start, one) = allocated.range_mut(..=address).next_back()?;
    (address < start + one.bytes).then_some((*start, one))
}

/// Whether this range lies in one allocation.
pub fn holds(address: u64, bytes: usize) -> bool {
    let (address, mut allocated) = (address as usize, locked(&ALLOCATED));
    of(&mut allocated, address).is_some_and(|(start, one)| {
        address.checked_add(bytes).is_some_and(|end| end <= start + one.bytes)
    })
}

/// Whether this address is of exported memory.
pub fn is_exported(address: u64) -> bool {
    let found = of(&mut locked(&ALLOCATED), address as usize).map(|(_, one)| one.state);
    found.is_some_and(|state| state != State::Open)
}

/// A descriptor that stands for an allocation, and is good for nothing else.
pub fn export(address: u64) -> Result<i32, u32> {
    let mut allocated = locked(&ALLOCATED);
    let (_, one) = of(&mut allocated, address as usize).ok_or(INVALID_VALUE)?;
    one.again.ok_or(INVALID_VALUE)?;
    let made = memfd_create("export of a fake GPU", MemfdFlags::CLOEXEC);
    one.state = State::Exported;
    Ok(made.map_err(|_| OUT_OF_MEMORY)?.into_raw_fd())
}

/// Where the GPU works on this address. The first time that it does so on exported memory, the
/// user's mapping is closed.
fn inside(address: usize) -> usize {
    let mut allocated = locked(&ALLOCATED);
    let Some((start, one)) = of(&mut allocated, address) else { return address };
    let Some(again) = one.again.filter(|_| one.state != State::Open) else { return address };
    if one.state == State::Exported {
        let at = std::ptr::with_exposed_provenance_mut(start);
        // SAFETY: the range is this allocation's own, and who uses it from now on is to fail.
        let closed = unsafe { mprotect(at, one.bytes, MprotectFlags::empty()) };
        closed.expect("exported memory begins at a page");
        one.state = State::Closed;
    }
    again + (address - start)
}

/// Bytes that are not allocated.
pub fn free_bytes() -> usize {
    TOTAL - locked(&ALLOCATED).values().map(|one| one.bytes).sum::<usize>()
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

/// Waits until a word is `value` or beyond, and sees all that was written before it.
pub fn await_word(address: usize, value: u32) {
    let word = std::ptr::with_exposed_provenance_mut(address);
    // SAFETY: the address is aligned, and the user of CUDA vouches that it is good until the wait
    // is over and that others use it by atomic operations alone.
    let word = unsafe { AtomicU32::from_ptr(word) };
    while word.load(Ordering::Acquire).wrapping_sub(value).cast_signed() < 0 {
        std::thread::sleep(Duration::from_micros(20));
    }
}

/// These bytes, wherever they are.
pub fn read(from: usize, bytes: usize) -> Vec<u8> {
    let from: *const u8 = std::ptr::with_exposed_provenance(inside(from));
    // SAFETY: who launched the kernel promised that they are there until it is done.
    unsafe { std::slice::from_raw_parts(from, bytes) }.to_vec()
}

/// Writes bytes, wherever they go.
pub fn write(to: usize, bytes: &[u8]) {
    let to: *mut u8 = std::ptr::with_exposed_provenance_mut(inside(to));
    // SAFETY: who launched the kernel promised that there is room until it is done.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
}

/// Copies `bytes` bytes, wherever they are.
pub fn copy(to: usize, from: usize, bytes: usize) {
    let to: *mut u8 = std::ptr::with_exposed_provenance_mut(inside(to));
    let from: *const u8 = std::ptr::with_exposed_provenance(inside(from));
    // SAFETY: who enqueued the copy promised that both ranges are there until it is done.
    unsafe { std::ptr::copy(from, to, bytes) };
}
