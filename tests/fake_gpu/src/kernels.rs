//! What the engine's kernels compute, by the processor: its codecs.

use crate::answer::put;
use bps_engine::base::DType;
use bps_engine::encode::{Codec, Draw, Keep, Norm, Spacing, narrow, widen};
use std::ffi::{CStr, c_char, c_void};
use std::sync::{Mutex, PoisonError};

const INVALID_IMAGE: u32 = 200;
const NOT_FOUND: u32 = 500;
const INVALID_VALUE: u32 = 1;
/// Handles of modules and functions are apart from others.
const MODULE: usize = 0x3000_0000;
const FUNCTION: usize = 0x7000_0000;
const HANDLE: usize = 16;

/// The texts that were loaded, and the kernels that were asked for, each once: simulations do so
/// for thousands of jobs.
static MODULES: Mutex<Vec<String>> = Mutex::new(Vec::new());
static KERNELS: Mutex<Vec<Kernel>> = Mutex::new(Vec::new());

/// A kernel of the engine's.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kernel {
    Codec { name: Name, dtype: DType, task: Task },
    Gather(DType),
    Scale,
}

/// What a kernel of a codec does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Task {
    Encode,
    /// Encodes, and leaves what was not sent.
    EncodeRest,
    Decode,
}

/// What a kernel calls its codec.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Name {
    Fp16,
    Bf16,
    Fp8E4m3,
    Fp8E5m2,
    Int8,
    Onebit,
    Topk,
    Randomk,
    Dithering,
}

/// What a kernel is launched with.
#[derive(Clone, Copy)]
pub enum Launch {
    /// One of a codec.
    Codec(Coding),
    /// One that makes of a tensor, and of what is kept, what is to be encoded.
    Gather(Gather),
    /// One that multiplies what is kept.
    Scale {
        /// How many there are.
        elements: usize,
        /// Where.
        values: u64,
        /// By what.
        factor: f32,
    },
}

/// What `gather` is launched with.
#[derive(Clone, Copy)]
pub struct Gather {
    dtype: DType,
    elements: usize,
    factor: f32,
    adds: bool,
    /// Where the elements are.
    pub tensor: u64,
    /// Where the f32 go that are to be encoded.
    pub values: u64,
    /// Where the momentum is; 0 if there is none.
    pub velocity: u64,
}

impl Gather {
    /// Bytes of the elements.
    #[must_use]
    pub fn tensor_bytes(&self) -> usize {
        self.elements * self.dtype.size()
    }

    /// Bytes of the values, and of the velocities if there are some.
    #[must_use]
    pub fn values_bytes(&self) -> usize {
        self.elements * size_of::<f32>()
    }

    /// What the values and the velocities become.
    #[must_use]
    pub fn gather(&self, tensor: &[u8], values: &[u8], velocity: &[u8]) -> (Vec<u8>, Vec<u8>) {
        let (mut given, mut moved) = (vec![0.0; self.elements], floats(velocity));
        widen(self.dtype, tensor, &mut given);
        for (given, velocity) in given.iter_mut().zip(&mut moved) {
            let next = self.factor * *velocity + *given;
            *given += self.factor * next;
            *velocity = if next.is_finite() { next } else { 0.0 };
        }
        if self.adds {
            given.iter_mut().zip(floats(values)).for_each(|(given, kept)| *given += kept);
        }
        (bytes(&given), bytes(&moved))
    }
}

/// `scale` of these values.
#[must_use]
pub fn scaled(values: &[u8], factor: f32) -> Vec<u8> {
    bytes(&floats(values).into_iter().map(|value| value * factor).collect::<Vec<f32>>())
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

/// What a kernel of a codec is launched with.
#[derive(Clone, Copy)]
pub struct Coding {
    dtype: DType,
    task: Task,
    codec: Codec,
    elements: usize,
    draw: u64,
    /// Where the elements are or go.
    pub tensor: u64,
    /// Where their encoding goes or is.
    pub wire: u64,
}

impl Name {
    fn of(name: &str) -> Option<Name> {
        Some(match name {
            "fp16" => Name::Fp16,
            "bf16" => Name::Bf16,
            "fp8_e4m3" => Name::Fp8E4m3,
            "fp8_e5m2" => Name::Fp8E5m2,
            "int8" => Name::Int8,
            "onebit" => Name::Onebit,
            "topk" => Name::Topk,
            "randomk" => Name::Randomk,
            "dithering" => Name::Dithering,
            _ => return None,
        })
    }

    /// Whether one block of threads has a part to itself.
    fn is_whole(self) -> bool {
        matches!(self, Name::Onebit | Name::Topk | Name::Randomk | Name::Dithering)
    }

    /// What the arguments of a launch mean.
    ///
    /// # Errors
    /// They mean nothing.
    fn codec(self, option: u32, count: u32, seed: u64) -> Result<Codec, u32> {
        let (is_set, keep) = (option & 1 != 0, Keep::Count(count));
        Ok(match self {
            Name::Fp16 => Codec::Fp16,
            Name::Bf16 => Codec::Bf16,
            Name::Fp8E4m3 => Codec::Fp8E4m3 { stochastic: is_set },
            Name::Fp8E5m2 => Codec::Fp8E5m2 { stochastic: is_set },
            Name::Int8 => Codec::Int8 { stochastic: is_set },
            Name::Onebit => Codec::Onebit { scaling: is_set },
            Name::Topk => Codec::Topk { keep },
            Name::Randomk => Codec::Randomk { keep, seed },
            Name::Dithering => Codec::Dithering {
                levels: u8::try_from(count).map_err(|_| INVALID_VALUE)?,
                spacing: if is_set { Spacing::Natural } else { Spacing::Linear },
                norm: if option & 2 != 0 { Norm::L2 } else { Norm::Max },
                seed,
            },
        })
    }
}

impl Kernel {
    fn of(name: &str) -> Option<Kernel> {
        if name == "scale" {
            return Some(Kernel::Scale);
        }
        let (rest, element) = name.rsplit_once('_')?;
        let dtype = match element {
            "f32" => DType::F32,
            "f16" => DType::F16,
            "bf16" => DType::BF16,
            _ => return None,
        };
        if rest == "gather" {
            return Some(Kernel::Gather(dtype));
        }
        let tasks = [
            ("encode_rest_", Task::EncodeRest),
            ("encode_", Task::Encode),
            ("decode_", Task::Decode),
        ];
        let of_task = |(start, task)| Some((rest.strip_prefix(start)?, task));
        let (codec, task) = tasks.into_iter().find_map(of_task)?;
        Some(Kernel::Codec { name: Name::of(codec)?, dtype, task })
    }

    /// Whether one block of threads has a part to itself.
    fn is_whole(self) -> bool {
        matches!(self, Kernel::Codec { name, .. } if name.is_whole())
    }
}

impl Coding {
    /// Whether the tensor is read and the wire written, or the other way round.
    #[must_use]
    pub fn encodes(&self) -> bool {
        self.task != Task::Decode
    }

    /// Bytes of the elements.
    #[must_use]
    pub fn tensor_bytes(&self) -> usize {
        self.elements * self.dtype.size()
    }

    /// Bytes of their encoding.
    #[must_use]
    pub fn wire_bytes(&self) -> usize {
        self.codec.wire_bytes_max(self.elements)
    }

    fn draw(&self) -> Draw {
        Draw { shared: self.draw, own: self.draw }
    }

    /// Whether what was not sent is left in the tensor's place.
    #[must_use]
    pub fn leaves_rest(&self) -> bool {
        self.task == Task::EncodeRest
    }

    /// The encoding of these elements, and what becomes of them.
    #[must_use]
    pub fn encode(&self, tensor: &[u8]) -> (Vec<u8>, Vec<u8>) {
        let (mut values, mut wire) = (vec![0.0; self.elements], vec![0; self.wire_bytes()]);
        widen(self.dtype, tensor, &mut values);
        if !self.leaves_rest() {
            self.codec.encode(&values, self.draw(), &mut wire);
            return (wire, tensor.to_vec());
        }
        self.codec.encode_rest(&mut values, self.draw(), &mut wire);
        (wire, bytes(&values))
    }

    /// The elements that were encoded so.
    #[must_use]
    pub fn decode(&self, wire: &[u8]) -> Vec<u8> {
        let (mut values, mut tensor) = (vec![0.0; self.elements], vec![0; self.tensor_bytes()]);
        self.codec.decode(wire, self.draw(), &mut values);
        narrow(self.dtype, &values, &mut tensor);
        tensor
    }
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `cuModuleLoadData`.
///
/// # Errors
/// The image is no PTX.
///
/// # Safety
/// It is a C string.
pub unsafe fn load(module: *mut usize, image: *const c_void) -> Result<(), u32> {
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(image.cast()) }.to_str().map_err(|_| INVALID_IMAGE)?;
    if !text.starts_with(".version") {
        return Err(INVALID_IMAGE);
    }
    put(module, MODULE + place_of(&mut locked(&MODULES), text.to_owned()) * HANDLE)
}

/// `cuModuleGetFunction`.
///
/// # Errors
/// The module has no such kernel, or this stand-in does not know it.
///
/// # Safety
/// The name is a C string.
pub unsafe fn get(function: *mut usize, module: usize, name: *const c_char) -> Result<(), u32> {
    // SAFETY: the caller's promise.
    let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| NOT_FOUND)?;
    let index = module.checked_sub(MODULE).ok_or(INVALID_VALUE)? / HANDLE;
    let modules = locked(&MODULES);
    let text = modules.get(index).ok_or(INVALID_VALUE)?;
    if !text.contains(&format!(".entry {name}(")) {
        return Err(NOT_FOUND);
    }
    let kernel = Kernel::of(name).ok_or(NOT_FOUND)?;
    put(function, FUNCTION + place_of(&mut locked(&KERNELS), kernel) * HANDLE)
}

/// The place of this item, which is put behind the others if it is new.
fn place_of<T: PartialEq>(items: &mut Vec<T>, item: T) -> usize {
    let known = items.iter().position(|one| *one == item);
    known.unwrap_or_else(|| {
        items.push(item);
        items.len() - 1
    })
}

/// What `cuLaunchKernel` is called with.
///
/// # Errors
/// No such kernel, or other threads than it is written for.
///
/// # Safety
/// The arguments are those of the kernel.
pub unsafe fn launch(
    function: usize,
    grid: [u32; 3],
    block: [u32; 3],
    arguments: *mut *mut c_void,
) -> Result<Launch, u32> {
    let index = function.checked_sub(FUNCTION).ok_or(INVALID_VALUE)? / HANDLE;
    let kernel = *locked(&KERNELS).get(index).ok_or(INVALID_VALUE)?;
    let threads = if kernel.is_whole() { 1024 } else { 256 };
    let is_right = if kernel.is_whole() { grid[0] == 1 } else { grid[0] > 0 };
    if !is_right || grid[1..] != [1, 1] || block != [threads, 1, 1] {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's promise; all kernels have this argument first.
    let elements = unsafe { argument::<u32>(arguments, 0) } as usize;
    match kernel {
        // SAFETY: the caller's promise.
        Kernel::Codec { name, dtype, task } => unsafe {
            let tensor = argument(arguments, 1);
            let wire = argument(arguments, 2);
            let codec =
                name.codec(argument(arguments, 3), argument(arguments, 4), argument(arguments, 5))?;
            let draw = argument(arguments, 6);
            Ok(Launch::Codec(Coding { dtype, task, codec, elements, draw, tensor, wire }))
        },
        // SAFETY: the caller's promise.
        Kernel::Gather(dtype) => unsafe {
            let (tensor, values) = (argument(arguments, 1), argument(arguments, 2));
            let (velocity, factor) = (argument(arguments, 3), argument(arguments, 4));
            let adds = argument::<u32>(arguments, 5) != 0;
            Ok(Launch::Gather(Gather { dtype, elements, factor, adds, tensor, values, velocity }))
        },
        // SAFETY: the caller's promise.
        Kernel::Scale => unsafe {
            let (values, factor) = (argument(arguments, 1), argument(arguments, 2));
            Ok(Launch::Scale { elements, values, factor })
        },
    }
}

/// # Safety
/// There are as many arguments, and this one is a `T`.
unsafe fn argument<T: Copy>(arguments: *mut *mut c_void, index: usize) -> T {
    // SAFETY: the caller's promise.
    unsafe { (*arguments.add(index)).cast::<T>().read_unaligned() }
}
