//! The functions of libcuda.so.1.

use crate::answer::{put, put_text};
use crate::device::{self, INVALID_CONTEXT, INVALID_DEVICE, INVALID_HANDLE, INVALID_VALUE};
use crate::device::{CONTEXT_IS_DESTROYED, NO_DEVICE};
use crate::kernels::{self, Launch};
use crate::settings::{injected, settings};
use crate::{memory, stream};
use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

const SUCCESS: u32 = 0;
const NOT_INITIALIZED: u32 = 3;
const NOT_READY: u32 = 600;
const NOT_SUPPORTED: u32 = 801;

static INITIALIZED: AtomicBool = AtomicBool::new(false);
/// What devices have written may be read once.
static FLUSHED: AtomicBool = AtomicBool::new(false);

fn done(is_done: bool) -> Result<(), u32> {
    if is_done { Ok(()) } else { Err(NOT_READY) }
}

/// What every call needs of the driver, and nobody has while memory is freed: that waits for the
/// GPU.
enum Hold {
    Shared { _guard: RwLockReadGuard<'static, ()> },
    Whole { _guard: RwLockWriteGuard<'static, ()> },
}

impl Hold {
    fn of(call: &str) -> Hold {
        static DRIVER: RwLock<()> = RwLock::new(());
        match call {
            "cuMemFree_v2" => {
                Hold::Whole { _guard: DRIVER.write().unwrap_or_else(PoisonError::into_inner) }
            }
            _ => Hold::Shared { _guard: DRIVER.read().unwrap_or_else(PoisonError::into_inner) },
        }
    }
}

/// Functions that may be told to fail, and that return a code.
macro_rules! cuda {
    ($(fn $name:ident($($argument:ident: $type:ty),*) $body:block)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name($($argument: $type),*) -> c_uint {
            let free = ["cuInit", "cuDriverGetVersion"].contains(&stringify!($name));
            if let Some(code) = injected(stringify!($name)) {
                return code;
            }
            if !free && !INITIALIZED.load(Ordering::Relaxed) {
                return NOT_INITIALIZED;
            }
            let _held = Hold::of(stringify!($name));
            let body = || -> Result<(), u32> { $body };
            body().err().unwrap_or(SUCCESS)
        }
    )*};
}

/// One of `CUstreamBatchMemOpParams`, as far as it is a wait for a word.
#[repr(C)]
#[derive(Clone, Copy)]
struct Wait {
    operation: c_uint,
    address: u64,
    value: u32,
    _upper: u32,
    flags: c_uint,
    _rest: [u64; 2],
}

const _: () = assert!(size_of::<Wait>() == 48, "as large as the union of the header");

impl Wait {
    /// As many as the header lets come at once.
    const MOST: usize = 256;

    /// `CU_STREAM_MEM_OP_WAIT_VALUE_32` for at least the value, which is all that is asked for.
    fn is_for_a_word(&self) -> bool {
        (self.operation, self.flags) == (1, 0)
            && self.address != 0
            && self.address.is_multiple_of(4)
    }
}

cuda! {
    fn cuInit(flags: c_uint) {
        match (flags, settings().visible.len()) {
            (0, 0) => Err(NO_DEVICE),
            (0, _) => {
                INITIALIZED.store(true, Ordering::Relaxed);
                Ok(())
            }
            _ => Err(INVALID_VALUE),
        }
    }
    fn cuDriverGetVersion(version: *mut c_int) {
        put(version, settings().cuda_version)
    }
    fn cuDeviceGetCount(count: *mut c_int) {
        put(count, settings().visible.len() as c_int)
    }
    fn cuDeviceGet(handle: *mut c_int, ordinal: c_int) {
        device::physical(ordinal)?;
        put(handle, ordinal)
    }
    fn cuDeviceGetName(name: *mut c_char, length: c_int, device: c_int) {
        device::physical(device)?;
        put_text(name, length, "Fake GPU")
    }
    fn cuDeviceGetPCIBusId(address: *mut c_char, length: c_int, device: c_int) {
        let text = format!("0000:{:02X}:00.0", 0x1b + device::physical(device)?);
        put_text(address, length, &text)
    }
    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) {
        let mut bytes = *b"fake gpu, no. \0\0";
        bytes[15] = device::physical(device)? as u8;
        put(uuid, bytes)
    }
    fn cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) {
        put(context, device::retain(device)?)
    }
    fn cuDevicePrimaryCtxRelease_v2(device: c_int) {
        device::release(device)
    }
    fn cuCtxSetCurrent(context: usize) {
        device::set(context)
    }
    fn cuCtxGetCurrent(context: *mut usize) {
        put(context, device::get())
    }
    fn cuCtxPushCurrent_v2(context: usize) {
        device::push(context)
    }
    fn cuCtxPopCurrent_v2(context: *mut usize) {
        put(context, device::pop()?)
    }
    fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) {
        device::current()?;
        put(least, 0)?;
        put(greatest, -5)
    }
    fn cuStreamCreateWithPriority(handle: *mut usize, _flags: c_uint, _priority: c_int) {
        put(handle, stream::create_stream()?)
    }
    fn cuStreamDestroy_v2(handle: usize) {
        stream::destroy_stream(handle)
    }
    fn cuStreamQuery(handle: usize) {
        done(stream::stream(handle)?.is_idle())
    }
    fn cuStreamSynchronize(handle: usize) {
        stream::stream(handle)?.drain();
        Ok(())
    }
    fn cuStreamWaitEvent(handle: usize, event: usize, _flags: c_uint) {
        stream::event(event)?.hold(&*stream::stream(handle)?);
        Ok(())
    }
    fn cuEventCreate(handle: *mut usize, _flags: c_uint) {
        put(handle, stream::create_event()?)
    }
    fn cuEventRecord(event: usize, handle: usize) {
        stream::event(event)?.record(&*stream::stream(handle)?);
        Ok(())
    }
    fn cuEventQuery(event: usize) {
        done(stream::event(event)?.is_done())
    }
    fn cuEventDestroy_v2(event: usize) {
        stream::destroy_event(event)
    }
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) {
        device::current()?;
        put(address, memory::allocate(bytes)?)
    }
    fn cuMemFree_v2(address: u64) {
        // Nobody else may use the driver meanwhile, as with NVIDIA's.
        stream::drain_all(device::current()?);
        memory::free(address)
    }
    fn cuMemAllocAsync(address: *mut u64, bytes: usize, handle: usize) {
        device::current()?;
        stream::stream(handle)?;
        put(address, memory::allocate(bytes)?)
    }
    fn cuMemFreeAsync(address: u64, handle: usize) {
        device::current()?;
        if !memory::holds(address, 1) {
            return Err(INVALID_VALUE);
        }
        stream::stream(handle)?.push(Box::new(move || {
            // It holds this address, and who frees it twice frees another's.
            let _ = memory::free(address);
        }));
        Ok(())
    }
    fn cuMemsetD8Async(address: u64, value: c_uchar, bytes: usize, handle: usize) {
        device::current()?;
        if !memory::holds(address, bytes) {
            return Err(INVALID_VALUE);
        }
        let set = move || memory::write(address as usize, &vec![value; bytes]);
        stream::stream(handle)?.push(Box::new(set));
        Ok(())
    }
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        device::current()?;
        put(free, memory::free_bytes())?;
        put(total, memory::TOTAL)
    }
    fn cuMemHostRegister_v2(address: *mut c_void, bytes: usize, _flags: c_uint) {
        device::current()?;
        memory::register(address.expose_provenance(), bytes)
    }
    fn cuMemHostUnregister(address: *mut c_void) {
        device::current()?;
        memory::unregister(address.addr())
    }
    fn cuMemcpyDtoHAsync_v2(host: *mut c_void, address: u64, bytes: usize, handle: usize) {
        let host = host.expose_provenance();
        enqueue_copy(host, address as usize, bytes, Some(host), handle)
    }
    fn cuMemcpyHtoDAsync_v2(address: u64, host: *const c_void, bytes: usize, handle: usize) {
        let host = host.expose_provenance();
        enqueue_copy(address as usize, host, bytes, Some(host), handle)
    }
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, handle: usize) {
        enqueue_copy(to as usize, from as usize, bytes, None, handle)
    }
    fn cuStreamWriteValue32_v2(handle: usize, address: u64, value: u32, flags: c_uint) {
        let device = device::current()?;
        let stream = stream::stream(handle)?;
        if stream.device != device || address == 0 || !address.is_multiple_of(4) || flags != 0 {
            return Err(INVALID_VALUE);
        }
        stream.push(Box::new(move || memory::write_word(address as usize, value)));
        Ok(())
    }
    fn cuStreamBatchMemOp_v2(handle: usize, count: c_uint, waits: *const Wait, _flags: c_uint) {
        let device = device::current()?;
        let stream = stream::stream(handle)?;
        if stream.device != device || waits.is_null() || count as usize > Wait::MOST {
            return Err(INVALID_VALUE);
        }
        // SAFETY: an array of so many, by the header.
        let waits = unsafe { std::slice::from_raw_parts(waits, count as usize) };
        if !waits.iter().all(Wait::is_for_a_word) {
            return Err(INVALID_VALUE);
        }
        for &Wait { address, value, .. } in waits {
            stream.push(Box::new(move || memory::await_word(address as usize, value)));
        }
        Ok(())
    }
    fn cuModuleLoadData(module: *mut usize, image: *const c_void) {
        device::current()?;
        // SAFETY: PTX is a C string, and the engine has nothing else.
        unsafe { kernels::load(module, image) }
    }
    fn cuModuleUnload(_module: usize) {
        device::current().map(drop)
    }
    fn cuModuleGetFunction(function: *mut usize, module: usize, name: *const c_char) {
        device::current()?;
        // SAFETY: names are C strings.
        unsafe { kernels::get(function, module, name) }
    }
    fn cuLaunchKernel(
        function: usize, x: c_uint, y: c_uint, z: c_uint, threads_x: c_uint, threads_y: c_uint,
        threads_z: c_uint, _shared: c_uint, handle: usize, arguments: *mut *mut c_void,
        _extra: *mut *mut c_void
    ) {
        let (grid, block) = ([x, y, z], [threads_x, threads_y, threads_z]);
        // SAFETY: who launches a kernel gives the arguments that it has.
        enqueue_kernel(unsafe { kernels::launch(function, grid, block, arguments) }?, handle)
    }
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: c_int) {
        device::physical(device)?;
        let kind = settings().dma_buf;
        put(value, match attribute {
            // CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS, by the host.
            117 => c_int::from(kind == 2),
            // CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING, for the GPU itself or not.
            118 => if kind == 1 { 100 } else { 0 },
            // CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED.
            124 => c_int::from(kind > 0),
            _ => return Err(INVALID_VALUE),
        })
    }
    fn cuMemGetHandleForAddressRange(
        handle: *mut c_int, address: u64, bytes: usize, kind: c_uint, flags: u64
    ) {
        device::current()?;
        let whole = address.is_multiple_of(4096) && bytes.is_multiple_of(4096);
        // CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD.
        if (kind, flags) != (1, 0) || !whole || !memory::holds(address, bytes) {
            return Err(INVALID_VALUE);
        }
        if settings().dma_buf == 0 {
            return Err(NOT_SUPPORTED);
        }
        put(handle, memory::export(address)?)
    }
    fn cuFlushGPUDirectRDMAWrites(target: c_uint, scope: c_uint) {
        device::current()?;
        match (target, scope, settings().dma_buf) {
            (0, 100 | 200, 2) => {
                FLUSHED.store(true, Ordering::Release);
                Ok(())
            }
            (0, 100 | 200, _) => Err(NOT_SUPPORTED),
            _ => Err(INVALID_VALUE),
        }
    }
    fn cuGetErrorName(code: c_uint, name: *mut *const c_char) {
        put(name, known(code).ok_or(INVALID_VALUE)?.0.as_ptr())
    }
    fn cuGetErrorString(code: c_uint, text: *mut *const c_char) {
        put(text, known(code).ok_or(INVALID_VALUE)?.1.as_ptr())
    }
}

/// A copy in a stream. As in CUDA, one from or to memory of the host that is not registered is
/// over when the call returns.
fn enqueue_copy(
    to: usize,
    from: usize,
    bytes: usize,
    host: Option<usize>,
    handle: usize,
) -> Result<(), u32> {
    let device = device::current()?;
    let stream = stream::stream(handle)?;
    let pageable = host.is_some_and(|host| !memory::is_registered(host, bytes));
    let is_host = host.is_none_or(|host| !memory::holds(host as u64, 1));
    let is_known = stream.device == device && to != 0 && from != 0 && is_host;
    if !is_known || pageable && settings().pinned_only {
        return Err(INVALID_VALUE);
    }
    // What a device has written can only be read behind a flush, if that is how this GPU is.
    let is_out_of_order = settings().dma_buf == 2 && memory::is_exported(from as u64);
    if is_out_of_order && !FLUSHED.swap(false, Ordering::AcqRel) {
        return Err(INVALID_VALUE);
    }
    stream.push(Box::new(move || memory::copy(to, from, bytes)));
    if pageable {
        stream.drain();
    }
    Ok(())
}

/// A kernel in a stream. What it has in the host's memory must be registered.
fn enqueue_kernel(launch: Launch, handle: usize) -> Result<(), u32> {
    let device = device::current()?;
    let stream = stream::stream(handle)?;
    let is_memory = |at: u64, bytes: usize| bytes == 0 || memory::holds(at, bytes);
    let is_right = stream.device == device
        && match launch {
            Launch::Codec(of) => {
                let (tensor, wire) = (of.tensor as usize, of.wire as usize);
                tensor != 0
                    && wire.is_multiple_of(4)
                    && memory::is_registered(wire, of.wire_bytes())
            }
            Launch::Gather(of) => {
                let has_velocity = of.velocity != 0;
                of.tensor != 0
                    && is_memory(of.values, of.values_bytes())
                    && (!has_velocity || is_memory(of.velocity, of.values_bytes()))
            }
            Launch::Scale { values, elements, .. } => is_memory(values, elements * 4),
        };
    if !is_right {
        return Err(INVALID_VALUE);
    }
    stream.push(Box::new(move || run_kernel(launch)));
    Ok(())
}

fn run_kernel(launch: Launch) {
    match launch {
        Launch::Codec(of) if of.encodes() => {
            let (tensor, bytes) = (of.tensor as usize, of.tensor_bytes());
            let (wire, rest) = of.encode(&memory::read(tensor, bytes));
            memory::write(of.wire as usize, &wire);
            if of.leaves_rest() {
                memory::write(tensor, &rest);
            }
        }
        Launch::Codec(of) => {
            let elements = of.decode(&memory::read(of.wire as usize, of.wire_bytes()));
            memory::write(of.tensor as usize, &elements);
        }
        Launch::Gather(of) => {
            let read = |at: u64, bytes| memory::read(at as usize, bytes);
            let bytes = of.values_bytes();
            let velocity = if of.velocity == 0 { Vec::new() } else { read(of.velocity, bytes) };
            let tensor = read(of.tensor, of.tensor_bytes());
            let (values, velocity) = of.gather(&tensor, &read(of.values, bytes), &velocity);
            memory::write(of.values as usize, &values);
            if of.velocity != 0 {
                memory::write(of.velocity as usize, &velocity);
            }
        }
        Launch::Scale { elements, values, factor } => {
            let at = values as usize;
            memory::write(at, &kernels::scaled(&memory::read(at, elements * 4), factor));
        }
    }
}

/// Name and text of a code.
fn known(code: u32) -> Option<(&'static CStr, &'static CStr)> {
    Some(match code {
        INVALID_VALUE => (c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
        2 => (c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
        NOT_INITIALIZED => (c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error"),
        NO_DEVICE => (c"CUDA_ERROR_NO_DEVICE", c"no CUDA-capable device is detected"),
        INVALID_DEVICE => (c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
        INVALID_CONTEXT => (c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
        INVALID_HANDLE => (c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
        NOT_READY => (c"CUDA_ERROR_NOT_READY", c"device not ready"),
        CONTEXT_IS_DESTROYED => (c"CUDA_ERROR_CONTEXT_IS_DESTROYED", c"context is destroyed"),
        NOT_SUPPORTED => (c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
        999 => (c"CUDA_ERROR_UNKNOWN", c"unknown error"),
        _ => return None,
    })
}
