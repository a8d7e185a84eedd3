//! libcuda, opened once and never closed: its functions that the engine calls, all but one of CUDA
//! 12.0 or older, and what its codes mean.

use super::GpuError;
use super::table::{Symbols, symbol, table, text, why};
use cudarc::driver::sys;
use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUmodule, CUstream,
    CUstreamBatchMemOpParams, CUuuid,
};
use libloading::Library;
use std::ffi::{c_char, c_int, c_uchar, c_uint, c_void};
use std::sync::OnceLock;

/// The name that NVIDIA's driver installs. `libcuda.so` alone may be a stub for linking.
const LIBRARY: &str = "libcuda.so.1";
/// The oldest driver, as `cuDriverGetVersion` numbers them.
const VERSION_MIN: u32 = 12_000;
/// `CUDA_SUCCESS`.
const SUCCESS: c_uint = 0;
/// `CUDA_ERROR_NO_DEVICE`: the driver is there, and no GPU that this process may see.
const NO_DEVICE: c_uint = 100;
/// `CUDA_ERROR_NOT_READY`: what was asked for is not done yet.
const NOT_READY: c_uint = 600;

table! {
    /// Functions of the driver's interface, under their C names.
    struct Functions returns CUresult;
    checked {
        cuInit(c_uint);
        cuDeviceGetCount(*mut c_int);
        cuDeviceGet(*mut CUdevice, c_int);
        cuDeviceGetName(*mut c_char, c_int, CUdevice);
        cuDeviceGetPCIBusId(*mut c_char, c_int, CUdevice);
        cuDeviceGetUuid_v2(*mut CUuuid, CUdevice);
        cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
        cuDevicePrimaryCtxRelease_v2(CUdevice);
        cuCtxSetCurrent(CUcontext);
        cuCtxPushCurrent_v2(CUcontext);
        cuCtxPopCurrent_v2(*mut CUcontext);
        cuCtxGetStreamPriorityRange(*mut c_int, *mut c_int);
        cuStreamCreateWithPriority(*mut CUstream, c_uint, c_int);
        cuStreamDestroy_v2(CUstream);
        cuStreamQuery(CUstream);
        cuStreamWaitEvent(CUstream, CUevent, c_uint);
        cuStreamBatchMemOp_v2(CUstream, c_uint, *mut CUstreamBatchMemOpParams, c_uint);
        cuStreamWriteValue32_v2(CUstream, CUdeviceptr, u32, c_uint);
        cuEventCreate(*mut CUevent, c_uint);
        cuEventRecord(CUevent, CUstream);
        cuEventQuery(CUevent);
        cuEventDestroy_v2(CUevent);
        cuMemAlloc_v2(*mut CUdeviceptr, usize);
        cuMemFree_v2(CUdeviceptr);
        cuMemAllocAsync(*mut CUdeviceptr, usize, CUstream);
        cuMemFreeAsync(CUdeviceptr, CUstream);
        cuMemsetD8Async(CUdeviceptr, c_uchar, usize, CUstream);
        cuMemGetInfo_v2(*mut usize, *mut usize);
        cuMemHostRegister_v2(*mut c_void, usize, c_uint);
        cuMemHostUnregister(*mut c_void);
        cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream);
        cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream);
        cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, usize, CUstream);
        cuModuleLoadData(*mut CUmodule, *const c_void);
        cuModuleUnload(CUmodule);
        cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char);
        cuLaunchKernel(
            CUfunction,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            CUstream,
            *mut *mut c_void,
            *mut *mut c_void,
        );
    }
    unchecked {
        cuGetErrorName: fn(c_uint, *mut *const c_char) -> c_uint;
        cuGetErrorString: fn(c_uint, *mut *const c_char) -> c_uint;
        cuDeviceGetAttribute: fn(*mut c_int, c_uint, CUdevice) -> c_uint;
        cuMemGetHandleForAddressRange: fn(*mut c_void, CUdeviceptr, usize, c_uint, u64) -> c_uint;
        cuFlushGPUDirectRDMAWrites: fn(c_uint, c_uint) -> c_uint;
    }
}

/// `CUmemcpyAttributes` of CUDA 12.8.
#[repr(C)]
pub(crate) struct Attributes {
    order: c_uint,
    /// Hints for managed memory, which none of this is: kinds and numbers.
    locations: [c_int; 4],
    flags: c_uint,
}

impl Attributes {
    /// `CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`: sources are read when the stream comes to the copies.
    pub(crate) const IN_STREAM: Attributes = Attributes { order: 1, locations: [0; 4], flags: 0 };
}

/// `cuMemcpyBatchAsync` as it came with CUDA 12.8, and as later drivers have it under this name.
pub(crate) type CopyBatch = unsafe extern "C" fn(
    *mut CUdeviceptr,
    *mut CUdeviceptr,
    *mut usize,
    usize,
    *mut Attributes,
    *mut usize,
    usize,
    *mut usize,
    CUstream,
) -> c_uint;

/// The driver, initialised.
pub(crate) struct Cuda {
    /// Its functions.
    pub(crate) call: Functions,
    /// Enqueues many copies at once; since CUDA 12.8.
    pub(crate) copy_batch: Option<CopyBatch>,
    /// Its version, 1000 × major + 10 × minor.
    pub(crate) version: u32,
    /// Whether there is any GPU; without one nothing else can be asked.
    pub(crate) has_devices: bool,
}

impl Cuda {
    /// The driver, opened by the first call; what that found holds for the life of the process.
    pub(crate) fn load() -> Result<&'static Cuda, GpuError> {
        static LOADED: OnceLock<Result<Cuda, GpuError>> = OnceLock::new();
        LOADED.get_or_init(Cuda::open).as_ref().map_err(GpuError::clone)
    }

    fn open() -> Result<Cuda, GpuError> {
        // SAFETY: the library's constructors are NVIDIA's own, and run as in any CUDA program.
        let library = unsafe { Library::new(LIBRARY) };
        let library = library.map_err(|error| GpuError::NoDriver { why: why(&error) })?;
        let cuda = Cuda::of(&library)?;
        // The driver keeps threads of its own: its code must stay mapped.
        std::mem::forget(library);
        Ok(cuda)
    }

    /// The driver whose functions these are; they stay for the life of the process, unless this
    /// fails.
    pub(crate) fn of(library: &dyn Symbols) -> Result<Cuda, GpuError> {
        // The version comes first: an old driver lacks some functions of the table, and must not be
        // told to be damaged.
        // SAFETY: the type is that of the header; the caller keeps the library.
        let get_version: unsafe extern "C" fn(*mut c_int) -> c_uint =
            unsafe { symbol(library, LIBRARY, "cuDriverGetVersion") }?;
        let mut version = 0;
        // SAFETY: it writes one number, and needs no initialised driver.
        let code = unsafe { get_version(&raw mut version) };
        let version = if code == SUCCESS { u32::try_from(version).unwrap_or(0) } else { 0 };
        if version < VERSION_MIN {
            return Err(GpuError::DriverTooOld { found: version, needed: VERSION_MIN });
        }
        let call = Functions::fill(library, LIBRARY)?;
        // SAFETY: the type is that of the header; the caller keeps the library.
        let copy_batch = unsafe { symbol(library, LIBRARY, "cuMemcpyBatchAsync") }.ok();
        // SAFETY: 0 is the only value of the flags.
        let code = unsafe { (call.cuInit)(0) };
        let cuda = Cuda { call, copy_batch, version, has_devices: code != NO_DEVICE };
        if cuda.has_devices {
            cuda.check("cuInit", code)?;
        }
        Ok(cuda)
    }

    /// A code as a result.
    pub(crate) fn check(&self, call: &'static str, code: c_uint) -> Result<(), GpuError> {
        if code == SUCCESS { Ok(()) } else { Err(self.error(call, code)) }
    }

    /// A code that may say "not yet" as a result: whether it is done.
    pub(crate) fn is_done(&self, call: &'static str, code: c_uint) -> Result<bool, GpuError> {
        match code {
            SUCCESS => Ok(true),
            NOT_READY => Ok(false),
            code => Err(self.error(call, code)),
        }
    }

    #[cold]
    fn error(&self, call: &'static str, code: c_uint) -> GpuError {
        let said = |function: unsafe extern "C" fn(c_uint, *mut *const c_char) -> c_uint| {
            let mut at: *const c_char = std::ptr::null();
            // SAFETY: it writes one pointer, to a string of the library or null.
            let code = unsafe { function(code, &raw mut at) };
            // SAFETY: strings of the library are never changed; without success there is none.
            if code == SUCCESS { unsafe { text(at) } } else { String::new() }
        };
        let parts = [said(self.call.cuGetErrorName), said(self.call.cuGetErrorString)];
        let parts: Vec<&str> = parts.iter().map(String::as_str).filter(|p| !p.is_empty()).collect();
        let text =
            if parts.is_empty() { "an error unknown to it".into() } else { parts.join(", ") };
        GpuError::Cuda { call, code, text }
    }
}
