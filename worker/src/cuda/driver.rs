//! GPUs, streams and events of CUDA, through the driver's interface.
//!
//! A [`Device`] holds the *primary* context of a GPU, the one that frameworks use too, so
//! addresses, streams and events of a framework are good here and ours are good there. Copies and
//! the calls of NCCL want the calling thread to have called [`Device::make_current`] once; all
//! others put the context in place for themselves and leave the thread as it was.
//!
//! Invariants: a handle is destroyed once, by the value that owns it, and while its context is
//! held; nothing here waits for a GPU but [`Event::wait`], which has a limit, and [`Device::free`].

use super::library::Cuda;
use super::{Awaited, GpuError, error};
use bps_engine::ring::Mpsc;
use bps_engine::topo::Topology;
use cudarc::driver::sys::{CUcontext, CUdevice, CUevent, CUstream, CUuuid};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// `CU_STREAM_NON_BLOCKING`: no waiting for the legacy default stream, which frameworks use.
const NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`: such events cost least.
const DISABLE_TIMING: u32 = 2;
/// How long [`Event::wait`] sleeps between two looks.
const LOOK: Duration = Duration::from_micros(50);

/// How many GPUs this process sees; 0 where CUDA can't be used, which [`available`] explains.
#[must_use]
pub fn count() -> u32 {
    Cuda::load().and_then(count_of).unwrap_or(0)
}

/// Whether this process can use a GPU, and if not, why.
///
/// # Errors
/// [`GpuError::NoDriver`], [`GpuError::DriverTooOld`], [`GpuError::NoDevice`], or what the driver
/// said when it was initialised.
pub fn available() -> Result<(), GpuError> {
    match count_of(Cuda::load()?)? {
        0 => Err(GpuError::NoDevice { ordinal: 0, count: 0 }),
        _ => Ok(()),
    }
}

fn count_of(cuda: &'static Cuda) -> Result<u32, GpuError> {
    let mut count = 0;
    if cuda.has_devices {
        // SAFETY: it writes one number.
        let code = unsafe { (cuda.call.cuDeviceGetCount)(&raw mut count) };
        cuda.check("cuDeviceGetCount", code)?;
    }
    Ok(u32::try_from(count).unwrap_or(0))
}

/// A GPU with its primary context. Clones are the same; the context is released with the last.
#[derive(Clone)]
pub struct Device(Arc<Held>);

struct Held {
    cuda: &'static Cuda,
    ordinal: u32,
    handle: CUdevice,
    context: CUcontext,
    name: String,
    pci_bus_id: String,
    uuid: [u8; 16],
}

// SAFETY: contexts of CUDA may be used by any thread, also by several at once.
unsafe impl Send for Held {}
// SAFETY: a shared reference reads fields that never change, and passes the context to calls of
// CUDA, which several threads may make at once.
unsafe impl Sync for Held {}

impl Device {
    /// Opens the GPU of this number among those that the process sees, from 0.
    ///
    /// # Errors
    /// Those of [`available`]; [`GpuError::NoDevice`]; [`GpuError::Cuda`] if the GPU's context
    /// can't be had.
    pub fn open(ordinal: u32) -> Result<Device, GpuError> {
        Device::open_in(Cuda::load()?, ordinal)
    }

    /// As [`open`](Self::open), with this driver.
    pub(crate) fn open_in(cuda: &'static Cuda, ordinal: u32) -> Result<Device, GpuError> {
        let count = count_of(cuda)?;
        let index = c_int::try_from(ordinal).ok().filter(|_| ordinal < count);
        let Some(index) = index else { return Err(GpuError::NoDevice { ordinal, count }) };
        let mut handle: CUdevice = 0;
        // SAFETY: it writes one handle, which is a number.
        cuda.check("cuDeviceGet", unsafe { (cuda.call.cuDeviceGet)(&raw mut handle, index) })?;
        let name = words(|at, bytes| {
            // SAFETY: it writes at most `bytes` bytes at `at`.
            cuda.check("cuDeviceGetName", unsafe { (cuda.call.cuDeviceGetName)(at, bytes, handle) })
        })?;
        let pci_bus_id = words(|at, bytes| {
            // SAFETY: it writes at most `bytes` bytes at `at`, which `words` has for it.
            let code = unsafe { (cuda.call.cuDeviceGetPCIBusId)(at, bytes, handle) };
            cuda.check("cuDeviceGetPCIBusId", code)
        })?;
        let mut uuid = CUuuid { bytes: [0; 16] };
        // SAFETY: it writes the 16 bytes.
        let code = unsafe { (cuda.call.cuDeviceGetUuid_v2)(&raw mut uuid, handle) };
        cuda.check("cuDeviceGetUuid", code)?;
        let mut context: CUcontext = std::ptr::null_mut();
        // SAFETY: it writes one handle.
        let code = unsafe { (cuda.call.cuDevicePrimaryCtxRetain)(&raw mut context, handle) };
        cuda.check("cuDevicePrimaryCtxRetain", code)?;
        Ok(Device(Arc::new(Held {
            cuda,
            ordinal,
            handle,
            context,
            name,
            // The kernel writes addresses in lower case.
            pci_bus_id: pci_bus_id.to_ascii_lowercase(),
            // C's `char` has a sign on x86-64 and none on AArch64.
            uuid: uuid.bytes.map(|byte| byte.to_ne_bytes()[0]),
        })))
    }

    /// Makes the GPU's context the calling thread's own, which copies and calls of NCCL need.
    ///
    /// # Errors
    /// [`GpuError::Cuda`].
    pub fn make_current(&self) -> Result<(), GpuError> {
        // SAFETY: this value holds the context.
        let code = unsafe { (self.0.cuda.call.cuCtxSetCurrent)(self.0.context) };
        self.0.cuda.check("cuCtxSetCurrent", code)
    }

    /// The number under which it was opened.
    #[must_use]
    pub fn ordinal(&self) -> u32 {
        self.0.ordinal
    }

    /// What the driver calls it: `NVIDIA H100 80GB HBM3`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Its address as the kernel writes it: `0000:1b:00.0`.
    #[must_use]
    pub fn pci_bus_id(&self) -> &str {
        &self.0.pci_bus_id
    }

    /// Its UUID (of the MIG instance, if it is one).
    #[must_use]
    pub fn uuid(&self) -> [u8; 16] {
        self.0.uuid
    }

    /// The driver's version as people write it: `12.4`.
    #[must_use]
    pub fn driver_version(&self) -> String {
        error::cuda_version(self.0.cuda.version)
    }

    /// The NUMA node that it hangs on; unknown in most virtual machines. Reads /sys.
    #[must_use]
    pub fn numa_node(&self) -> Option<u32> {
        let gpus = Topology::read(Path::new("/")).ok()?.gpus;
        gpus.into_iter().find(|gpu| gpu.address == self.0.pci_bus_id)?.node
    }

    /// What the driver says of it under this `CUdevice_attribute`.
    pub(crate) fn attribute(&self, which: u32) -> Result<c_int, GpuError> {
        let (cuda, mut value) = (self.0.cuda, 0);
        let get = cuda.call.cuDeviceGetAttribute;
        // SAFETY: it writes one number.
        cuda.check("cuDeviceGetAttribute", unsafe { get(&raw mut value, which, self.0.handle) })?;
        Ok(value)
    }

    /// Bytes of its memory: free, and in all.
    ///
    /// # Errors
    /// [`GpuError::Cuda`].
    pub fn memory(&self) -> Result<(usize, usize), GpuError> {
        let (mut free, mut total) = (0, 0);
        self.with_context(|cuda| {
            // SAFETY: it writes two numbers.
            let code = unsafe { (cuda.call.cuMemGetInfo_v2)(&raw mut free, &raw mut total) };
            cuda.check("cuMemGetInfo", code)
        })?;
        Ok((free, total))
    }

    /// Takes memory of the GPU: its address. The engine needs some only for slots that RDMA devices
    /// reach.
    ///
    /// # Errors
    /// [`GpuError::Cuda`].
    pub fn alloc(&self, bytes: usize) -> Result<u64, GpuError> {
        let mut address = 0;
        self.with_context(|cuda| {
            // SAFETY: it writes one address.
            let code = unsafe { (cuda.call.cuMemAlloc_v2)(&raw mut address, bytes) };
            cuda.check("cuMemAlloc", code)
        })?;
        Ok(address)
    }

    /// Gives memory of the GPU back.
    ///
    /// # Errors
    /// [`GpuError::Cuda`], if the address is none of [`alloc`](Self::alloc).
    ///
    /// # Safety
    /// Nothing uses the memory any more.
    pub unsafe fn free(&self, address: u64) -> Result<(), GpuError> {
        self.with_context(|cuda| {
            // SAFETY: the driver refuses addresses that it did not give; the caller vouches for the
            // rest.
            cuda.check("cuMemFree", unsafe { (cuda.call.cuMemFree_v2)(address) })
        })
    }

    /// Enqueues a copy within the GPU's memory in a framework's stream.
    ///
    /// # Errors
    /// [`GpuError::Cuda`].
    ///
    /// # Safety
    /// As [`Stream::copy_on_device`]; `stream` is 0 or a stream of this GPU that is not destroyed
    /// during the call.
    pub unsafe fn copy_in(
        &self,
        stream: usize,
        to: u64,
        from: u64,
        bytes: usize,
    ) -> Result<(), GpuError> {
        let stream = std::ptr::with_exposed_provenance_mut(stream);
        self.with_context(|cuda| {
            // SAFETY: the caller vouches for the ranges and the stream.
            let code = unsafe { (cuda.call.cuMemcpyDtoDAsync_v2)(to, from, bytes, stream) };
            cuda.check("cuMemcpyDtoDAsync", code)
        })
    }

    /// Does something with the context in place, and leaves the thread's own as it was: a
    /// framework's thread may have another.
    pub(crate) fn with_context<T>(
        &self,
        action: impl FnOnce(&'static Cuda) -> Result<T, GpuError>,
    ) -> Result<T, GpuError> {
        let cuda = self.0.cuda;
        // SAFETY: this value holds the context.
        let code = unsafe { (cuda.call.cuCtxPushCurrent_v2)(self.0.context) };
        cuda.check("cuCtxPushCurrent", code)?;
        let result = action(cuda);
        let mut popped: CUcontext = std::ptr::null_mut();
        // SAFETY: it writes one handle, of the context that was pushed above.
        let code = unsafe { (cuda.call.cuCtxPopCurrent_v2)(&raw mut popped) };
        result.and_then(|value| cuda.check("cuCtxPopCurrent", code).map(|()| value))
    }

    pub(crate) fn cuda(&self) -> &'static Cuda {
        self.0.cuda
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: `open` retained it, once. A failure at the end of the process harms nobody.
        let _ = unsafe { (self.cuda.call.cuDevicePrimaryCtxRelease_v2)(self.handle) };
    }
}

/// What a function writes as a C string of at most 255 bytes.
fn words(
    write: impl FnOnce(*mut c_char, c_int) -> Result<(), GpuError>,
) -> Result<String, GpuError> {
    let mut bytes = [0u8; 256];
    write(bytes.as_mut_ptr().cast(), 255)?;
    let text = CStr::from_bytes_until_nul(&bytes).expect("the last byte is never written");
    Ok(text.to_string_lossy().into_owned())
}

/// A queue of work on a GPU, of the greatest priority, apart from the frameworks' streams.
pub struct Stream {
    device: Device,
    handle: CUstream,
}

// SAFETY: streams of CUDA may be used by any thread, also by several at once; what they enqueue
// then stands in some order.
unsafe impl Send for Stream {}
// SAFETY: a shared reference enqueues at most, which CUDA orders by itself.
unsafe impl Sync for Stream {}

impl Stream {
    /// Makes one.
    ///
    /// # Errors
    /// [`GpuError::Cuda`].
    pub fn new(device: &Device) -> Result<Stream, GpuError> {
        let mut handle: CUstream = std::ptr::null_mut();
        device.with_context(|cuda| {
            let (mut least, mut greatest) = (0, 0);
            let range = cuda.call.cuCtxGetStreamPriorityRange;
            // SAFETY: it writes two numbers.
            let code = unsafe { range(&raw mut least, &raw mut greatest) };
            cuda.check("cuCtxGetStreamPriorityRange", code)?;
            let create = cuda.call.cuStreamCreateWithPriority;
            // SAFETY: it writes one handle.
            let code = unsafe { create(&raw mut handle, NON_BLOCKING, greatest) };
            cuda.check("cuStreamCreateWithPriority", code)
        })?;
        Ok(Stream { device: device.clone(), handle })
    }

    /// Its `CUstream`, which is also a `cudaStream_t`.
    #[must_use]
    pub fn raw(&self) -> usize {
        self.handle.addr()
    }

    pub(crate) fn handle(&self) -> CUstream {
        self.handle
    }

    /// Its GPU.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Lets what is enqueued from now on wait for the event, as it was recorded last.
    ///
    /// # Errors
    /// [`GpuError::Cuda`].
    pub fn wait(&self, event: &Event) -> Result<(), GpuError> {
        let cuda = self.device.cuda();
        // SAFETY: both handles are held by their values.
        let code = unsafe { (cuda.call.cuStreamWaitEvent)(self.handle, event.handle, 0) };
        cuda.check("cuStreamWaitEvent", code)
    }

    /// Enqueues a copy from the GPU to the host. The thread has the context, see
    /// [`Device::make_current`].
    ///
    /// # Errors
    /// [`GpuError::Cuda`]; also for what failed earlier on this GPU.
    ///
    /// # Safety
    /// Both ranges are of `bytes` bytes, and stay valid until the copy is done. Nobody writes the
    /// source or uses the target meanwhile.
    pub unsafe fn copy_to_host(
        &self,
        host: *mut u8,
        device: u64,
        bytes: usize,
    ) -> Result<(), GpuError> {
        let cuda = self.device.cuda();
        let copy = cuda.call.cuMemcpyDtoHAsync_v2;
        // SAFETY: the caller vouches for the ranges; the stream's handle is held by this value.
        let code = unsafe { copy(host.cast::<c_void>(), device, bytes, self.handle) };
        cuda.check("cuMemcpyDtoHAsync", code)
    }

    /// Enqueues a copy from the host to the GPU. The thread has the context, see
    /// [`Device::make_current`].
    ///
    /// # Errors
    /// As [`copy_to_host`](Self::copy_to_host).
    ///
    /// # Safety
    /// As [`copy_to_host`](Self::copy_to_host).
    pub unsafe fn copy_to_device(
        &self,
        device: u64,
        host: *const u8,
        bytes: usize,
    ) -> Result<(), GpuError> {
        let cuda = self.device.cuda();
        let copy = cuda.call.cuMemcpyHtoDAsync_v2;
        // SAFETY: the caller vouches for the ranges; the stream's handle is held by this value.
        let code = unsafe { copy(device, host.cast::<c_void>(), bytes, self.handle) };
        cuda.check("cuMemcpyHtoDAsync", code)
    }

    /// Enqueues a copy within the GPU's memory. The thread has the context, see
    /// [`Device::make_current`].
    ///
    /// # Errors
    /// As [`copy_to_host`](Self::copy_to_host).
    ///
    /// # Safety
    /// As [`copy_to_host`](Self::copy_to_host); the ranges do not overlap.
    pub unsafe fn copy_on_device(&self, to: u64, from: u64, bytes: usize) -> Result<(), GpuError> {
        let cuda = self.device.cuda();
        let copy = cuda.call.cuMemcpyDtoDAsync_v2;
        // SAFETY: the caller vouches for the ranges; the stream's handle is held by this value.
        let code = unsafe { copy(to, from, bytes, self.handle) };
        cuda.check("cuMemcpyDtoDAsync", code)
    }

    /// Whether all that was enqueued is done.
    ///
    /// # Errors
    /// [`GpuError::Cuda`]; also for what failed earlier on this GPU.
    pub fn is_idle(&self) -> Result<bool, GpuError> {
        let cuda = self.device.cuda();
        // SAFETY: the handle is held by this value.
        cuda.is_done("cuStreamQuery", unsafe { (cuda.call.cuStreamQuery)(self.handle) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _ = self.device.with_context(|cuda| {
            // SAFETY: it was made by `new`; CUDA ends what is enqueued before it frees the stream.
            cuda.check("cuStreamDestroy", unsafe { (cuda.call.cuStreamDestroy_v2)(self.handle) })
        });
    }
}

/// A mark in a stream, by which other streams and the host know how far it has come. It takes no
/// time stamps.
pub struct Event {
    device: Device,
    handle: CUevent,
}

// SAFETY: events of CUDA may be used by any thread, also by several at once.
unsafe impl Send for Event {}
// SAFETY: a shared reference records, waits for or asks after the event, and CUDA takes each of
// these calls from several threads at once.
unsafe impl Sync for Event {}

impl std::fmt::Debug for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Event of GPU {}", self.device.ordinal())
    }
}

impl Event {
    /// Makes one. Until it is recorded it counts as done.
    ///
    /// # Errors
    /// [`GpuError::Cuda`].
    pub fn new(device: &Device) -> Result<Event, GpuError> {
        let mut handle: CUevent = std::ptr::null_mut();
        device.with_context(|cuda| {
            // SAFETY: it writes one handle.
            let code = unsafe { (cuda.call.cuEventCreate)(&raw mut handle, DISABLE_TIMING) };
            cuda.check("cuEventCreate", code)
        })?;
        Ok(Event { device: device.clone(), handle })
    }

    /// Marks the place behind all that is enqueued in the stream now.
    ///
    /// # Errors
    /// [`GpuError::Cuda`].
    pub fn record(&self, stream: &Stream) -> Result<(), GpuError> {
        let cuda = self.device.cuda();
        // SAFETY: both handles are held by their values.
        let code = unsafe { (cuda.call.cuEventRecord)(self.handle, stream.handle) };
        cuda.check("cuEventRecord", code)
    }

    /// As [`record`](Self::record), in a framework's stream, by its `cudaStream_t`; 0 is the
    /// legacy default stream.
    ///
    /// # Errors
    /// [`GpuError::Cuda`].
    ///
    /// # Safety
    /// `stream` is 0 or a stream of this GPU that is not destroyed during the call.
    pub unsafe fn record_raw(&self, stream: usize) -> Result<(), GpuError> {
        let stream = std::ptr::with_exposed_provenance_mut(stream);
        // The stream 0 is that of the current context, and the caller's thread may have none.
        self.device.with_context(|cuda| {
            // SAFETY: the caller vouches for the stream; the event is held by this value.
            let code = unsafe { (cuda.call.cuEventRecord)(self.handle, stream) };
            cuda.check("cuEventRecord", code)
        })
    }

    /// Whether the stream has passed the mark. True before the first mark.
    ///
    /// # Errors
    /// [`GpuError::Cuda`]; also for what failed earlier on this GPU.
    pub fn is_done(&self) -> Result<bool, GpuError> {
        let cuda = self.device.cuda();
        // SAFETY: the handle is held by this value.
        cuda.is_done("cuEventQuery", unsafe { (cuda.call.cuEventQuery)(self.handle) })
    }

    /// Waits on the host until the stream has passed the mark, for `limit` at most. For starts,
    /// ends and tests.
    ///
    /// # Errors
    /// [`GpuError::Timeout`], [`GpuError::Cuda`].
    pub fn wait(&self, limit: Duration) -> Result<(), GpuError> {
        let start = Instant::now();
        while !self.is_done()? {
            if start.elapsed() > limit {
                let awaited = Awaited::Work { ordinal: self.device.ordinal() };
                return Err(GpuError::Timeout { awaited, after: limit });
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Lets what a framework enqueues in its stream from now on wait for the mark.
    ///
    /// # Errors
    /// [`GpuError::Cuda`].
    ///
    /// # Safety
    /// `stream` is 0 or a stream of this GPU that is not destroyed during the call.
    pub unsafe fn make_wait(&self, stream: usize) -> Result<(), GpuError> {
        let stream = std::ptr::with_exposed_provenance_mut(stream);
        self.device.with_context(|cuda| {
            // SAFETY: the caller vouches for the stream; the event is held by this value.
            let code = unsafe { (cuda.call.cuStreamWaitEvent)(stream, self.handle, 0) };
            cuda.check("cuStreamWaitEvent", code)
        })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.device.with_context(|cuda| {
            // SAFETY: it was made by `new`; CUDA keeps what waits for it in order.
            cuda.check("cuEventDestroy", unsafe { (cuda.call.cuEventDestroy_v2)(self.handle) })
        });
    }
}

/// Events that wait for their next use, so that none is made while a job runs. Clones are the same
/// pool; any thread may take and give.
#[derive(Clone)]
pub struct EventPool {
    device: Device,
    free: Mpsc<Event>,
}

impl EventPool {
    /// A pool of `events` events, made now.
    ///
    /// # Errors
    /// [`GpuError::Cuda`].
    pub fn new(device: &Device, events: usize) -> Result<EventPool, GpuError> {
        let free = Mpsc::new(events);
        for _ in 0..events {
            let _ = free.push(Event::new(device)?);
        }
        Ok(EventPool { device: device.clone(), free })
    }

    /// An event that nobody else has, until it is dropped; a new one if all are out.
    ///
    /// # Errors
    /// [`GpuError::Cuda`], if one must be made and can't.
    pub fn take(&self) -> Result<PooledEvent, GpuError> {
        let event = self.free.pop().map_or_else(|| Event::new(&self.device), Ok)?;
        Ok(PooledEvent { event: Some(event), free: self.free.clone() })
    }
}

/// An event that goes back to its pool when it is dropped; if that is full, the event ends. What
/// waits for it by then goes on to wait for the mark that it had when the wait was enqueued.
pub struct PooledEvent {
    /// None only while it is dropped.
    event: Option<Event>,
    free: Mpsc<Event>,
}

impl std::ops::Deref for PooledEvent {
    type Target = Event;

    fn deref(&self) -> &Event {
        self.event.as_ref().expect("it is there until the drop")
    }
}

impl std::fmt::Debug for PooledEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.event.fmt(f)
    }
}

impl Drop for PooledEvent {
    fn drop(&mut self) {
        if let Some(event) = self.event.take() {
            drop(self.free.push(event));
        }
    }
}
