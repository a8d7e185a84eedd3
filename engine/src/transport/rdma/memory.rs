//! Registered memory: areas of our own that peers write to, and ranges that payloads are sent from
//! where they lie.
//!
//! A registration outlives a free: the pages stay with the device, and what is mapped at the same
//! addresses later is other memory, of which the device knows nothing. So only memory whose life
//! the engine knows is registered (areas, arenas, pools of pinned slots), or all of the process at
//! once where the device follows the page tables itself (paging on demand).
//!
//! Invariant: a device reaches only memory of live regions, and a region's memory outlives it.

use super::RdmaError;
use super::device::{Ports, Rails};
use super::ffi;
use super::rail::Rail;
use crate::limits::ALIGNMENT;
use std::alloc::Layout;
use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A payload of this many bytes or fewer is copied though its memory is registered, unless that is
/// a GPU's: one operation without a second piece is less work for the device, and the memory is
/// free at once.
const COPIED_BYTES_MAX: usize = 1024;
/// Length and rights of a registration of all memory.
const EVERYTHING: usize = usize::MAX;

/// Whether what is called memory of a GPU is the host's.
static IS_EMULATED: AtomicBool = AtomicBool::new(false);

/// From now on this process registers memory of GPUs as memory of the host, which it is in tests:
/// emulated devices know no dma-buf.
///
/// # Safety
/// What is registered as memory of a GPU is mapped, and stays so as long as the registration.
#[doc(hidden)]
pub unsafe fn emulate_gpu_memory() {
    IS_EMULATED.store(true, Ordering::Relaxed);
}

/// Memory that a device reaches, registered with one rail.
pub(super) struct Region {
    rail: Arc<Rail>,
    mr: NonNull<ffi::Mr>,
    /// Allocated here, if so.
    owned: Option<Layout>,
    base: *mut u8,
    bytes: usize,
    /// Whether a processor can't read it.
    is_device: bool,
}

// SAFETY: a region owns its registration (and its memory, if it is its own) and gives out raw
// pointers only.
unsafe impl Send for Region {}

impl Region {
    /// New zeroed memory, which the peer may write to if `remote`.
    pub(super) fn new(rail: &Arc<Rail>, bytes: usize, remote: bool) -> Result<Region, RdmaError> {
        const PAGE_BYTES: usize = 4096;
        const { assert!(PAGE_BYTES.is_multiple_of(ALIGNMENT)) };
        let layout = Layout::from_size_align(bytes.max(1), PAGE_BYTES)
            .map_err(|error| rail.error("allocation", io::Error::other(error)))?;
        // SAFETY: the layout's size is not 0.
        let memory = unsafe { std::alloc::alloc_zeroed(layout) };
        let Some(base) = NonNull::new(memory) else { std::alloc::handle_alloc_error(layout) };
        let access = ffi::ACCESS_LOCAL_WRITE | if remote { ffi::ACCESS_REMOTE_WRITE } else { 0 };
        // SAFETY: the memory was just allocated with this length, and lives until the region ends.
        match unsafe { register(rail, memory, bytes, access) } {
            Ok(mr) => {
                let mut region = Region::of(rail, mr, memory, bytes);
                region.owned = Some(layout);
                Ok(region)
            }
            Err(error) => {
                // SAFETY: allocated above with this layout, and registered with nobody.
                unsafe { std::alloc::dealloc(base.as_ptr(), layout) };
                Err(error)
            }
        }
    }

    fn of(rail: &Arc<Rail>, mr: NonNull<ffi::Mr>, base: *mut u8, bytes: usize) -> Region {
        Region { rail: Arc::clone(rail), mr, owned: None, base, bytes, is_device: false }
    }

    /// Somebody else's memory, for the device to read or, with that access, peers to write to.
    ///
    /// # Safety
    /// The range is mapped, and stays so until the region ends.
    unsafe fn over(
        rail: &Arc<Rail>,
        base: *mut u8,
        bytes: usize,
        access: c_int,
    ) -> Result<Region, RdmaError> {
        // SAFETY: the caller's promise.
        let mr = unsafe { register(rail, base, bytes, access) }?;
        Ok(Region::of(rail, mr, base, bytes))
    }

    /// All memory of the process, for the device to read as the page tables are at that time.
    pub(super) fn everything(rail: &Arc<Rail>) -> Result<Region, RdmaError> {
        rail.can_page().map_err(RdmaError::OnDemand)?;
        let nowhere = std::ptr::null_mut();
        // SAFETY: nothing is pinned by this; what a request names must be mapped at that time.
        let mr = unsafe { register(rail, nowhere, EVERYTHING, ffi::ACCESS_ON_DEMAND) }?;
        Ok(Region::of(rail, mr, nowhere, EVERYTHING))
    }

    /// Memory of a GPU, for the device to read or, with that access, peers to write to: the first
    /// `bytes` bytes of the dma-buf, which frames name by the GPU's addresses from `base` on.
    ///
    /// # Safety
    /// As [`GpuMemory::register`]; and the memory lives until the region ends.
    unsafe fn of_gpu(
        rail: &Arc<Rail>,
        buffer: BorrowedFd<'_>,
        (base, bytes): (*mut u8, usize),
        access: c_int,
    ) -> Result<Region, RdmaError> {
        if IS_EMULATED.load(Ordering::Relaxed) {
            // SAFETY: the caller keeps the memory until the region ends, and whoever asked for the
            // emulation vouches that it is mapped in this process.
            let mut region = unsafe { Region::over(rail, base, bytes, access) }?;
            region.is_device = true;
            return Ok(region);
        }
        let fail = |source| RdmaError::DmaBuf { port: rail.port().to_string(), source };
        let Some(call) = rail.verbs.reg_dmabuf_mr else {
            return Err(fail(io::Error::other("this release of libibverbs has no such call")));
        };
        let (address, fd) = (base.addr() as u64, buffer.as_raw_fd());
        // SAFETY: the kernel holds the buffer by its descriptor as long as it is registered; the
        // address is a name in requests, which no processor follows.
        let mr = unsafe { call(rail.pd.as_ptr(), 0, bytes, address, fd, access) };
        let mr = NonNull::new(mr).ok_or_else(|| fail(io::Error::last_os_error()))?;
        let mut region = Region::of(rail, mr, base, bytes);
        region.is_device = true;
        Ok(region)
    }

    /// The address of `length` bytes from `offset` on.
    pub(super) fn at(&self, offset: usize, length: usize) -> *mut u8 {
        assert!(offset <= self.bytes && length <= self.bytes - offset, "within the region");
        self.base.wrapping_add(offset)
    }

    /// Whether this range lies within the region.
    fn covers(&self, address: usize, length: usize) -> bool {
        let start = address.checked_sub(self.base.addr());
        start.and_then(|start| start.checked_add(length)).is_some_and(|end| end <= self.bytes)
    }

    pub(super) fn lkey(&self) -> u32 {
        // SAFETY: the registration lives as long as `self`.
        unsafe { self.mr.as_ref() }.lkey
    }

    pub(super) fn rkey(&self) -> u32 {
        // SAFETY: `drop` alone ends the registration, and a region's keys never change.
        unsafe { self.mr.as_ref() }.rkey
    }

    pub(super) fn address(&self) -> u64 {
        self.base.expose_provenance() as u64
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: registered once and no more used by a queue pair, which goes before its regions.
        let status = unsafe { (self.rail.verbs.dereg_mr)(self.mr.as_ptr()) };
        if let (0, Some(layout)) = (status, self.owned) {
            // SAFETY: allocated with this layout, and no device reaches it any more. Where the
            // deregistration failed it is leaked rather than freed under a device's hands.
            unsafe { std::alloc::dealloc(self.base, layout) };
        }
    }
}

/// # Safety
/// The range is mapped and outlives the registration, unless that is on demand.
unsafe fn register(
    rail: &Arc<Rail>,
    base: *mut u8,
    bytes: usize,
    access: c_int,
) -> Result<NonNull<ffi::Mr>, RdmaError> {
    // SAFETY: the caller's promise; the domain is the rail's.
    let mr = unsafe { (rail.verbs.reg_mr)(rail.pd.as_ptr(), base.cast(), bytes, access) };
    NonNull::new(mr).ok_or_else(|| {
        let source = io::Error::last_os_error();
        match source.raw_os_error() {
            Some(libc::ENOMEM | libc::EAGAIN) => {
                RdmaError::locked(bytes, rail.port().to_string(), source)
            }
            _ => rail.error("ibv_reg_mr", source),
        }
    })
}

/// Memory of a GPU, registered with the ports that lanes use.
pub struct GpuMemory {
    // They go before the memory.
    /// By rail.
    pub(super) regions: Vec<Option<Region>>,
    /// Whether peers may write to it where it is granted.
    pub(super) is_for_landing: bool,
    rails: Arc<Rails>,
    memory: Box<dyn Send>,
}

impl GpuMemory {
    /// Registers the first `bytes` bytes of this dma-buf, which frames name by the GPU's addresses
    /// from `base` on: to be sent from, or `is_for_landing`, for peers to write answers to.
    /// `memory` is what must not end before the registration.
    ///
    /// # Errors
    /// A device or its driver can't; what the GPU has passes host memory then.
    ///
    /// # Safety
    /// The dma-buf exports the memory at `base`, of at least so many bytes, and that memory lives
    /// as long as `memory`: devices read it, and write to it, by these addresses.
    pub unsafe fn register(
        ports: &Ports,
        buffer: BorrowedFd<'_>,
        (base, bytes): (*mut u8, usize),
        is_for_landing: bool,
        memory: impl Send + 'static,
    ) -> Result<GpuMemory, RdmaError> {
        let access = ffi::ACCESS_LOCAL_WRITE | ffi::ACCESS_REMOTE_WRITE;
        let access = if is_for_landing { access } else { 0 };
        let rails = Arc::clone(ports.rails());
        let over = |(index, rail)| {
            let is_used = ports.used().contains(&index);
            // SAFETY: the caller's promise; the regions are dropped before `memory`.
            let over = || unsafe { Region::of_gpu(rail, buffer, (base, bytes), access) };
            is_used.then(over).transpose()
        };
        let regions = rails.all().iter().enumerate().map(over).collect::<Result<_, _>>()?;
        Ok(GpuMemory { regions, is_for_landing, rails, memory: Box::new(memory) })
    }
}

/// What payloads are sent from and answers written to in place, for each rail of a thread.
pub(super) struct InPlace {
    rails: Vec<Vec<Region>>,
    /// What peers may write to where it is granted.
    landing: Vec<Vec<Region>>,
    /// Where each range that was registered in steps begins, and how far it has come.
    ranges: Vec<(usize, usize)>,
    /// What regions are of that must not end before them.
    memory: Vec<Box<dyn Send>>,
}

impl InPlace {
    /// Nothing or, where paging on demand is wanted, all memory over those rails that can.
    pub(super) fn new(rails: &Rails) -> InPlace {
        let known = |rail| if rails.on_demand { Region::everything(rail).ok() } else { None };
        let landing = rails.all().iter().map(|_| Vec::new()).collect();
        let rails = rails.all().iter().map(|rail| known(rail).into_iter().collect()).collect();
        InPlace { rails, landing, ranges: Vec::new(), memory: Vec::new() }
    }

    /// Registers what of the first `bytes` bytes from `base` on no earlier call has.
    ///
    /// # Safety
    /// The range is mapped, and stays so as long as this.
    pub(super) unsafe fn add(
        &mut self,
        rails: &Rails,
        base: NonNull<u8>,
        bytes: usize,
    ) -> Result<(), RdmaError> {
        let address = base.addr().get();
        let known = self.ranges.iter().position(|(start, _)| *start == address);
        let known = known.unwrap_or_else(|| {
            self.ranges.push((address, 0));
            self.ranges.len() - 1
        });
        let done = self.ranges[known].1;
        if bytes <= done {
            return Ok(());
        }
        // A failure is not tried again: the limit that it met would be met by each call.
        self.ranges[known].1 = bytes;
        let from = base.as_ptr().wrapping_add(done);
        for (rail, regions) in rails.all().iter().zip(&mut self.rails) {
            // SAFETY: within the caller's range.
            regions.push(unsafe { Region::over(rail, from, bytes - done, 0) }?);
        }
        Ok(())
    }

    /// Registers memory that peers may write to where it is granted, with all rails or none.
    ///
    /// # Safety
    /// The range is mapped, and stays so as long as this. Nobody reads or writes what is granted.
    pub(super) unsafe fn add_landing(
        &mut self,
        rails: &Rails,
        base: NonNull<u8>,
        bytes: usize,
    ) -> Result<(), RdmaError> {
        let access = ffi::ACCESS_LOCAL_WRITE | ffi::ACCESS_REMOTE_WRITE;
        // SAFETY: the caller's promise.
        let over = |rail| unsafe { Region::over(rail, base.as_ptr(), bytes, access) };
        let regions = rails.all().iter().map(over).collect::<Result<Vec<_>, _>>()?;
        for (known, region) in self.landing.iter_mut().zip(regions) {
            known.push(region);
        }
        Ok(())
    }

    /// Forgets all registrations. No queue pair may be left that uses them.
    pub(super) fn clear(&mut self) {
        self.rails.iter_mut().chain(&mut self.landing).for_each(Vec::clear);
        self.ranges.clear();
        self.memory.clear();
    }

    /// The key by which a peer writes an answer to this memory over this rail, if it may and the
    /// answer is long enough to go by itself.
    pub(super) fn landing_key(&self, rail: usize, address: usize, length: usize) -> Option<u32> {
        let covers = |region: &&Region| region.covers(address, length);
        let region = self.landing.get(rail)?.iter().find(covers)?;
        (length > COPIED_BYTES_MAX).then(|| region.rkey())
    }

    /// Takes memory of a GPU that is registered with these rails.
    pub(super) fn add_gpu(&mut self, rails: &Arc<Rails>, memory: GpuMemory) {
        assert!(Arc::ptr_eq(rails, &memory.rails), "it is registered with other rails");
        let known = if memory.is_for_landing { &mut self.landing } else { &mut self.rails };
        for (known, region) in known.iter_mut().zip(memory.regions) {
            known.extend(region);
        }
        self.memory.push(memory.memory);
    }

    /// The key by which a payload is sent from where it lies over this rail, if it is to be.
    pub(super) fn key(&self, rail: usize, address: usize, length: usize) -> Option<u32> {
        let covers = |region: &&Region| region.covers(address, length);
        // The latest is the closest: one of all memory comes first.
        let region = self.rails.get(rail)?.iter().rev().find(covers)?;
        (region.is_device || length > COPIED_BYTES_MAX).then(|| region.lkey())
    }
}
