//! Codecs whose arithmetic the GPU does: a part is encoded on its way to the host's memory, and
//! decoded on its way from there, so that what crosses the bus is what crosses the network.
//!
//! Their kernels are in `codecs`, where `compile` makes the PTX that is part of the program; the
//! driver translates it for the GPU when it is loaded. They give the bits that
//! [`bps_engine::encode`] gives on processors (of 16-bit floats, a NaN being equal to any NaN), so
//! ranks with and without them go together.

use super::library::Cuda;
use super::{Device, GpuError, Stream};
use bps_engine::base::{DType, word};
use bps_engine::encode::{Codec, Draw, Norm, Spacing};
use bps_engine::proto::encoding::{Encoding, Momentum};
use cudarc::driver::sys::{CUfunction, CUmodule};
use std::ffi::{CString, c_uint, c_void};

/// Threads of a block: `THREADS` of the source.
const THREADS: u32 = 256;
/// Threads of the one block that has a whole part to itself: `PART_THREADS` of the source.
const PART_THREADS: u32 = 1024;
/// Elements for each thread, where there are enough blocks for all.
const ELEMENTS_OF_THREAD: u32 = 4;
/// Blocks of a launch at most, which is what a part of 1 MiB of f32 asks for: each takes its share
/// in a loop.
const BLOCKS_MAX: u32 = 256;

/// Kernels that are loaded together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Family {
    /// Of codecs that encode each element, or each block of them, by itself.
    Blocks,
    /// Of codecs that look at a whole part first.
    Whole,
}

impl Family {
    /// Which kernels serve an encoding: none if it may leave a part as it is.
    #[must_use]
    pub fn of(encoding: Encoding) -> Option<Family> {
        if encoding.auto {
            return None;
        }
        Some(match encoding.codec {
            Codec::Fp16
            | Codec::Bf16
            | Codec::Fp8E4m3 { .. }
            | Codec::Fp8E5m2 { .. }
            | Codec::Int8 { .. } => Family::Blocks,
            Codec::Onebit { .. }
            | Codec::Topk { .. }
            | Codec::Randomk { .. }
            | Codec::Dithering { .. } => Family::Whole,
        })
    }

    /// The kernels, as text that ends with a zero.
    fn ptx(self) -> &'static str {
        match self {
            Family::Blocks => concat!(include_str!("codecs/blocks.ptx"), "\0"),
            Family::Whole => concat!(include_str!("codecs/whole.ptx"), "\0"),
        }
    }

    /// The blocks and the threads of each with which a codec's kernel is launched.
    fn grid(self, elements: u32) -> Grid {
        match self {
            Family::Blocks => wide_grid(elements),
            Family::Whole => (1, PART_THREADS),
        }
    }
}

/// Blocks, and the threads of each.
type Grid = (c_uint, c_uint);

/// Those of a kernel that takes each element by itself.
fn wide_grid(elements: u32) -> Grid {
    (elements.div_ceil(THREADS * ELEMENTS_OF_THREAD).clamp(1, BLOCKS_MAX), THREADS)
}

/// The kernels of a family in the context of a GPU.
pub struct Kernels {
    device: Device,
    family: Family,
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
    pub fn load(device: &Device, family: Family) -> Result<Kernels, GpuError> {
        let mut module: CUmodule = std::ptr::null_mut();
        let ptx = family.ptx().as_ptr().cast();
        device.with_context(|cuda| {
            // SAFETY: it writes one handle, and reads a text that ends with a zero.
            let code = unsafe { (cuda.call.cuModuleLoadData)(&raw mut module, ptx) };
            cuda.check("cuModuleLoadData", code)
        })?;
        Ok(Kernels { device: device.clone(), family, module })
    }

    /// What encodes elements of this type so, and decodes them: none where these kernels do not
    /// serve that.
    ///
    /// # Errors
    /// [`GpuError::Cuda`].
    pub fn coder(&self, encoding: Encoding, dtype: DType) -> Result<Option<Coder>, GpuError> {
        let Some(element) = element_of(dtype) else { return Ok(None) };
        if Family::of(encoding) != Some(self.family) {
            return Ok(None);
        }
        let (codec, family) = (encoding.codec, self.family);
        let name = name_of(codec);
        let keeping = self.keeping(encoding, element)?;
        // What is kept is of f32, and what is encoded is then what was gathered there.
        let encode = match (encoding.feedback, &keeping) {
            (true, _) => format!("encode_rest_{name}_f32"),
            (false, Some(_)) => format!("encode_{name}_f32"),
            (false, None) => format!("encode_{name}_{element}"),
        };
        let encode = self.function(&encode)?;
        let decode = self.function(&format!("decode_{name}_{element}"))?;
        Ok(Some(Coder { codec, family, dtype, encode, decode, keeping }))
    }

    fn keeping(&self, encoding: Encoding, element: &str) -> Result<Option<Keeping>, GpuError> {
        let Encoding { feedback, momentum, .. } = encoding;
        if !feedback && momentum.is_none() {
            return Ok(None);
        }
        let gather = self.function(&format!("gather_{element}"))?;
        let scale = self.function("scale")?;
        let momentum = momentum.map(Momentum::factor);
        Ok(Some(Keeping { gather, scale, feedback, momentum }))
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

fn name_of(codec: Codec) -> &'static str {
    match codec {
        Codec::Fp16 => "fp16",
        Codec::Bf16 => "bf16",
        Codec::Fp8E4m3 { .. } => "fp8_e4m3",
        Codec::Fp8E5m2 { .. } => "fp8_e5m2",
        Codec::Int8 { .. } => "int8",
        Codec::Onebit { .. } => "onebit",
        Codec::Topk { .. } => "topk",
        Codec::Randomk { .. } => "randomk",
        Codec::Dithering { .. } => "dithering",
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

/// What a codec tells its kernels beside where the part is: see `ARGUMENTS` of the source.
struct Parameters {
    option: u32,
    count: u32,
    seed: u64,
    draw: u64,
}

impl Parameters {
    fn of(codec: Codec, elements: usize, draw: Draw) -> Parameters {
        let own = Parameters { option: 0, count: 0, seed: 0, draw: draw.own };
        match codec {
            Codec::Fp16 | Codec::Bf16 => own,
            Codec::Fp8E4m3 { stochastic: option }
            | Codec::Fp8E5m2 { stochastic: option }
            | Codec::Int8 { stochastic: option }
            | Codec::Onebit { scaling: option } => Parameters { option: option.into(), ..own },
            Codec::Topk { keep } => Parameters { count: word(keep.of(elements)), ..own },
            Codec::Randomk { keep, seed } => {
                Parameters { count: word(keep.of(elements)), seed, draw: draw.shared, ..own }
            }
            Codec::Dithering { levels, spacing, norm, seed } => {
                let is_natural = u32::from(spacing == Spacing::Natural);
                let is_l2 = u32::from(norm == Norm::L2);
                Parameters { option: is_natural | is_l2 << 1, count: levels.into(), seed, ..own }
            }
        }
    }
}

/// The kernels of one encoding of one type of elements.
#[derive(Clone, Copy)]
pub struct Coder {
    codec: Codec,
    family: Family,
    dtype: DType,
    encode: CUfunction,
    decode: CUfunction,
    keeping: Option<Keeping>,
}

/// What an encoding does that keeps something between rounds, and by which kernels.
#[derive(Clone, Copy)]
struct Keeping {
    gather: CUfunction,
    scale: CUfunction,
    feedback: bool,
    momentum: Option<f32>,
}

/// Where a part keeps what its encoding [keeps](Coder::keeps): an f32 for each element.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeptAt {
    /// What is encoded, and what is left of that then, if that is kept.
    pub values: u64,
    /// Nesterov's momentum; 0 if there is none.
    pub velocity: u64,
}

/// What an encoding keeps between rounds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Keeps {
    /// What is left out of a round: by error feedback.
    pub residue: bool,
    /// Nesterov's momentum.
    pub velocity: bool,
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

    /// What it keeps between rounds, if anything.
    #[must_use]
    pub fn keeps(&self) -> Option<Keeps> {
        let Keeping { feedback: residue, momentum, .. } = self.keeping?;
        Some(Keeps { residue, velocity: momentum.is_some() })
    }

    /// Enqueues the encoding of a part of `bytes` bytes with the random numbers of its round.
    ///
    /// # Errors
    /// [`GpuError::Cuda`]; also for what failed earlier on this GPU.
    ///
    /// # Panics
    /// `kept` is not there though it [keeps](Self::keeps) something, or the other way round.
    ///
    /// # Safety
    /// `source` is memory of the GPU, `bytes` bytes of it, `wire` is pinned memory of the host, as
    /// many as [`wire_bytes`](Self::wire_bytes) says and aligned to four, and `kept` is memory of
    /// the GPU, an f32 for each element in each place. All stay valid until this is done; nobody
    /// writes the source or uses the wire or what is kept meanwhile. The [`Kernels`] are there
    /// until then. The thread has the context.
    pub unsafe fn encode(
        &self,
        stream: &Stream,
        source: u64,
        wire: *mut u8,
        bytes: usize,
        (draw, kept): (Draw, Option<KeptAt>),
    ) -> Result<(), GpuError> {
        let wire = wire.expose_provenance() as u64;
        let mut encoded = source;
        assert_eq!(kept.is_some(), self.keeping.is_some(), "memory for what is kept, and no other");
        if let (Some(kept), Some(keeping)) = (kept, self.keeping) {
            // SAFETY: the caller vouches for the memory.
            unsafe { self.gather(stream, keeping, source, kept, bytes) }?;
            encoded = kept.values;
        }
        // SAFETY: a kernel that encodes; the caller vouches for the memory.
        unsafe { self.launch(stream, self.encode, encoded, wire, bytes, draw) }
    }

    /// Enqueues the sum of a part and what is kept, which is encoded then.
    ///
    /// # Safety
    /// As [`encode`](Self::encode).
    unsafe fn gather(
        &self,
        stream: &Stream,
        keeping: Keeping,
        mut source: u64,
        mut kept: KeptAt,
        bytes: usize,
    ) -> Result<(), GpuError> {
        let mut elements = word(bytes / self.dtype.size());
        let mut factor = keeping.momentum.unwrap_or_default();
        let mut adds = u32::from(keeping.feedback);
        let arguments = [
            (&raw mut elements).cast(),
            (&raw mut source).cast(),
            (&raw mut kept.values).cast(),
            (&raw mut kept.velocity).cast(),
            (&raw mut factor).cast(),
            (&raw mut adds).cast(),
        ];
        // SAFETY: the arguments of `gather`; the caller vouches for the memory.
        unsafe { start(stream, keeping.gather, wide_grid(elements), arguments) }
    }

    /// Enqueues the product of what was left out of so many elements and a factor; nothing if that
    /// is not kept.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    ///
    /// # Safety
    /// As [`encode`](Self::encode).
    pub unsafe fn scale(
        &self,
        stream: &Stream,
        kept: KeptAt,
        elements: usize,
        mut factor: f32,
    ) -> Result<(), GpuError> {
        let Some(keeping) = self.keeping.filter(|keeping| keeping.feedback) else { return Ok(()) };
        let (mut elements, mut values) = (word(elements), kept.values);
        let arguments =
            [(&raw mut elements).cast(), (&raw mut values).cast(), (&raw mut factor).cast()];
        // SAFETY: the arguments of `scale`; the caller vouches for the memory.
        unsafe { start(stream, keeping.scale, wide_grid(elements), arguments) }
    }

    /// Enqueues the decoding of a part of `bytes` bytes that was encoded in the round of this draw.
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
        draw: Draw,
    ) -> Result<(), GpuError> {
        let wire = wire.expose_provenance() as u64;
        // SAFETY: a kernel that decodes; the caller vouches for the memory.
        unsafe { self.launch(stream, self.decode, target, wire, bytes, draw) }
    }

    /// # Safety
    /// The function is one of this coder's, and what it does with this memory is as its callers
    /// say. The thread has the context.
    unsafe fn launch(
        &self,
        stream: &Stream,
        function: CUfunction,
        mut tensor: u64,
        mut wire: u64,
        bytes: usize,
        draw: Draw,
    ) -> Result<(), GpuError> {
        let elements = bytes / self.dtype.size();
        let mut its = Parameters::of(self.codec, elements, draw);
        let mut elements = word(elements);
        let arguments = [
            (&raw mut elements).cast(),
            (&raw mut tensor).cast(),
            (&raw mut wire).cast(),
            (&raw mut its.option).cast(),
            (&raw mut its.count).cast(),
            (&raw mut its.seed).cast(),
            (&raw mut its.draw).cast(),
        ];
        // SAFETY: the arguments of all codecs' kernels; the caller vouches for the memory.
        unsafe { start(stream, function, self.family.grid(elements), arguments) }
    }
}

/// Launches a kernel.
///
/// # Safety
/// The arguments are the kernel's, in their order and types, and the memory that they name is as
/// the kernel uses it. The thread has the context.
unsafe fn start<const COUNT: usize>(
    stream: &Stream,
    function: CUfunction,
    (blocks, threads): Grid,
    mut arguments: [*mut c_void; COUNT],
) -> Result<(), GpuError> {
    let cuda: &'static Cuda = stream.device().cuda();
    let (arguments, extra) = (arguments.as_mut_ptr(), std::ptr::null_mut());
    let call = cuda.call.cuLaunchKernel;
    // SAFETY: the caller vouches for the arguments, which the driver copies before it returns; the
    // stream is held by its value.
    let code = unsafe {
        call(function, blocks, 1, 1, threads, 1, 1, 0, stream.handle(), arguments, extra)
    };
    cuda.check("cuLaunchKernel", code)
}
