//! Codecs whose arithmetic the GPU does: a part is encoded on its way to the host's memory, and
//! decoded on its way from there, so that what crosses the bus is what crosses the network.
//!
//! Their kernels are `codecs/codecs.cu`, of which `codecs/compile` makes the PTX that is part of
//! the program; the driver translates it for the GPU when it is loaded. They give the bits that
//! [`bps_engine::encode`] gives on processors (of floats, a NaN being equal to any NaN), so ranks
//! with and without them go together.

use super::library::Cuda;
use super::{Device, GpuError, Stream};
use bps_engine::base::{DType, word};
use bps_engine::encode::Codec;
use bps_engine::proto::encoding::Encoding;
use cudarc::driver::sys::{CUfunction, CUmodule};
use std::ffi::{CString, c_uint, c_void};

/// The kernels, as text that ends with a zero.
const PTX: &str = concat!(include_str!("codecs/codecs.ptx"), "\0");
/// Threads of a block: `THREADS` of the source.
const THREADS: u32 = 256;
/// Elements for each thread, where there are enough blocks for all.
const ELEMENTS_OF_THREAD: u32 = 4;
/// Blocks of a launch at most, which is what a part of 1 MiB of f32 asks for: each takes its share
/// in a loop.
const BLOCKS_MAX: u32 = 256;

/// The kernels in the context of a GPU.
pub struct Kernels {
    device: Device,
    module: CUmodule,
}

// SAFETY: a module belongs to a context, which any thread may use, also several at once.
unsafe impl Send for Kernels {}
// SAFETY: a shared reference asks for functions at most, as any number of threads may.
unsafe impl Sync for Kernels {}

impl Kernels {
    /// Translates them for this GPU, which takes a moment when the driver has not done so before.
    ///
    /// # Errors
    /// [`GpuError::Cuda`]: the driver is too old for them, or the GPU.
    pub fn load(device: &Device) -> Result<Kernels, GpuError> {
        let mut module: CUmodule = std::ptr::null_mut();
        device.with_context(|cuda| {
            // SAFETY: it writes one handle, and reads a text that ends with a zero.
            let code =
                unsafe { (cuda.call.cuModuleLoadData)(&raw mut module, PTX.as_ptr().cast()) };
            cuda.check("cuModuleLoadData", code)
        })?;
        Ok(Kernels { device: device.clone(), module })
    }

    /// What encodes elements of this type so, and decodes them: none where kernels do not serve
    /// that.
    ///
    /// # Errors
    /// [`GpuError::Cuda`].
    pub fn coder(&self, encoding: Encoding, dtype: DType) -> Result<Option<Coder>, GpuError> {
        let (Some((codec, is_random)), Some(element)) = (kernel_of(encoding), element_of(dtype))
        else {
            return Ok(None);
        };
        let encode = self.function(&format!("encode_{codec}_{element}"))?;
        let decode = self.function(&format!("decode_{codec}_{element}"))?;
        Ok(Some(Coder { codec: encoding.codec, dtype, is_random, encode, decode }))
    }

    fn function(&self, name: &str) -> Result<CUfunction, GpuError> {
        let name = CString::new(name).expect("names of kernels have no zeros");
        let mut function: CUfunction = std::ptr::null_mut();
        self.device.with_context(|cuda| {
            let get = cuda.call.cuModuleGetFunction;
            // SAFETY: it writes one handle; the module is held by this value.
            let code = unsafe { get(&raw mut function, self.module, name.as_ptr()) };
            cuda.check("cuModuleGetFunction", code)
        })?;
        Ok(function)
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        let _ = self.device.with_context(|cuda| {
            // SAFETY: loaded by `load`. Who drops it has waited for what it has launched.
            cuda.check("cuModuleUnload", unsafe { (cuda.call.cuModuleUnload)(self.module) })
        });
    }
}

/// What kernels are called that serve an encoding, and whether they round at random. They keep
/// nothing between rounds, so feedback and momentum are not for them, nor is what may be left as it
/// is.
fn kernel_of(encoding: Encoding) -> Option<(&'static str, bool)> {
    if encoding.auto || encoding.feedback || encoding.momentum.is_some() {
        return None;
    }
    match encoding.codec {
        Codec::Fp16 => Some(("fp16", false)),
        Codec::Bf16 => Some(("bf16", false)),
        Codec::Fp8E4m3 { stochastic } => Some(("fp8_e4m3", stochastic)),
        Codec::Fp8E5m2 { stochastic } => Some(("fp8_e5m2", stochastic)),
        Codec::Int8 { stochastic } => Some(("int8", stochastic)),
        Codec::Onebit { .. }
        | Codec::Topk { .. }
        | Codec::Randomk { .. }
        | Codec::Dithering { .. } => None,
    }
}

fn element_of(dtype: DType) -> Option<&'static str> {
    match dtype {
        DType::F32 => Some("f32"),
        DType::F16 => Some("f16"),
        DType::BF16 => Some("bf16"),
        _ => None,
    }
}

/// The kernels of one encoding of one type of elements.
#[derive(Clone, Copy)]
pub struct Coder {
    codec: Codec,
    dtype: DType,
    is_random: bool,
    encode: CUfunction,
    decode: CUfunction,
}

// SAFETY: handles of functions, which any thread may launch.
unsafe impl Send for Coder {}

impl Coder {
    /// Bytes to which a part of so many is encoded, if it takes no more room so: kernels write
    /// where the part would have gone.
    #[must_use]
    pub fn wire_bytes(&self, bytes: usize) -> Option<usize> {
        let encoded = self.codec.wire_bytes_max(bytes / self.dtype.size());
        (encoded <= bytes).then_some(encoded)
    }

    /// Enqueues the encoding of a part of `bytes` bytes; `draw` is that of the sender, see
    /// [`Draw::own`](bps_engine::encode::Draw).
    ///
    /// # Errors
    /// [`GpuError::Cuda`]; also for what failed earlier on this GPU.
    ///
    /// # Safety
    /// `source` is memory of the GPU, `bytes` bytes of it, `wire` is pinned memory of the host, as
    /// many as [`wire_bytes`](Self::wire_bytes) says and aligned to four. Both stay valid until
    /// this is done; nobody writes the source or uses the wire meanwhile. The [`Kernels`] are
    /// there until then. The thread has the context.
    pub unsafe fn encode(
        &self,
        stream: &Stream,
        source: u64,
        wire: *mut u8,
        bytes: usize,
        draw: u64,
    ) -> Result<(), GpuError> {
        let mut elements = word(bytes / self.dtype.size());
        let (mut source, mut wire) = (source, wire.expose_provenance() as u64);
        let (mut is_random, mut draw) = (u32::from(self.is_random), draw);
        let mut arguments: [*mut c_void; 5] = [
            (&raw mut elements).cast(),
            (&raw mut source).cast(),
            (&raw mut wire).cast(),
            (&raw mut is_random).cast(),
            (&raw mut draw).cast(),
        ];
        // SAFETY: the arguments are those of the kernels that encode; the caller vouches for the
        // memory.
        unsafe { launch(stream, self.encode, elements, &mut arguments) }
    }

    /// Enqueues the decoding of a part of `bytes` bytes.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    ///
    /// # Safety
    /// As [`encode`](Self::encode), with the target in place of the source, which this writes.
    pub unsafe fn decode(
        &self,
        stream: &Stream,
        wire: *const u8,
        target: u64,
        bytes: usize,
    ) -> Result<(), GpuError> {
        let mut elements = word(bytes / self.dtype.size());
        let (mut wire, mut target) = (wire.expose_provenance() as u64, target);
        let mut arguments: [*mut c_void; 3] =
            [(&raw mut elements).cast(), (&raw mut wire).cast(), (&raw mut target).cast()];
        // SAFETY: the arguments are those of the kernels that decode; the caller vouches for the
        // memory.
        unsafe { launch(stream, self.decode, elements, &mut arguments) }
    }
}

/// # Safety
/// The arguments are those of the function, in their order and types, and what they say of memory
/// holds until it is done. The thread has the context.
unsafe fn launch(
    stream: &Stream,
    function: CUfunction,
    elements: u32,
    arguments: &mut [*mut c_void],
) -> Result<(), GpuError> {
    let cuda: &'static Cuda = stream.device().cuda();
    let blocks: c_uint = elements.div_ceil(THREADS * ELEMENTS_OF_THREAD).clamp(1, BLOCKS_MAX);
    let (arguments, extra) = (arguments.as_mut_ptr(), std::ptr::null_mut());
    let call = cuda.call.cuLaunchKernel;
    // SAFETY: the driver copies the arguments before it returns, and the caller vouches for them;
    // the stream is held by its value.
    let code = unsafe {
        call(function, blocks, 1, 1, THREADS, 1, 1, 0, stream.handle(), arguments, extra)
    };
    cuda.check("cuLaunchKernel", code)
}
