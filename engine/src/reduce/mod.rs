//! The reducer: sums, averages, minima, maxima and products over plain memory, for every data
//! type.
//!
//! Owns the arithmetic of the engine and nothing else: it knows no key, no round and no slot. A
//! server core calls it with the bytes of a contribution and the accumulator that they belong in.
//!
//! Invariant: `scalar` is the specification, and the vector kernels equal it bit for bit (a NaN
//! being equal to any NaN) on every length and every alignment. Which kernels run is chosen once,
//! by what the CPU has.

mod blocks;
mod divisor;
mod half;
mod merge;
mod scalar;
mod slices;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(test)]
mod tests;

pub use half::{BF16, F16};
pub use slices::plain_add;

use crate::base::DType;
use std::fmt;
use std::sync::OnceLock;

/// An instruction set that kernels exist for, narrowest first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Isa {
    /// One element at a time: the specification, on any CPU.
    Scalar,
    /// NEON, in the baseline of AArch64.
    Neon,
    /// AVX2 and F16C.
    Avx2,
    /// AVX-512 F, BW, VL and DQ.
    Avx512,
}

impl Isa {
    /// Every instruction set, narrowest first.
    pub const ALL: [Isa; 4] = [Isa::Scalar, Isa::Neon, Isa::Avx2, Isa::Avx512];

    /// Lower-case name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Neon => "neon",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
        }
    }

    /// The instruction set of this name, as [`Isa::name`] gives it.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Isa> {
        Isa::ALL.into_iter().find(|isa| isa.name() == name)
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

type Accumulate = unsafe fn(acc: *mut u8, src: *const u8, count: usize);
type AddFinish =
    unsafe fn(out: *mut u8, acc: *const u8, src: *const u8, count: usize, divisor: u32);
type Finish = unsafe fn(out: *mut u8, acc: *const u8, count: usize, divisor: u32);

/// The four operations of one data type.
struct Operations {
    store: Accumulate,
    add: Accumulate,
    add_finish: AddFinish,
    finish: Finish,
}

/// One instruction set's operations for every data type.
pub struct Kernels {
    isa: Isa,
    f32: Operations,
    f64: Operations,
    f16: Operations,
    u8: Operations,
    i32: Operations,
    i8: Operations,
    i64: Operations,
    bf16: Operations,
}

/// The widest kernels that this CPU can run. They are chosen at the first call and never change.
#[must_use]
pub fn kernels() -> &'static Kernels {
    static CHOSEN: OnceLock<&'static Kernels> = OnceLock::new();
    CHOSEN.get_or_init(|| {
        let widest = Isa::ALL.into_iter().rev().find_map(Kernels::with_isa);
        widest.unwrap_or(&scalar::KERNELS)
    })
}

/// Pointers may have any alignment; aligned to a register is fastest. A sum wraps for integers.
/// `divisor` 1 asks for the sum; any other divides it: floats truly, integers towards minus
/// infinity. f16 and bf16 are accumulated and divided in f32 and rounded once, to nearest even,
/// with subnormals kept.
impl Kernels {
    /// The instruction set that these use.
    #[must_use]
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// The kernels of one instruction set, for tests and measurements; `None` where this CPU lacks
    /// it.
    #[must_use]
    pub fn with_isa(isa: Isa) -> Option<&'static Kernels> {
        match isa {
            Isa::Scalar => Some(&scalar::KERNELS),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2::detected().then_some(&avx2::KERNELS),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => avx512::detected().then_some(&avx512::KERNELS),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => Some(&neon::KERNELS),
            #[allow(unreachable_patterns, reason = "no architecture has all of them")]
            _ => None,
        }
    }

    /// Starts a sum: each of `count` elements of `src`, widened, goes into `acc`.
    ///
    /// # Safety
    /// `src` is readable for `count` elements of `dtype`, `acc` writable for `count` elements of
    /// `dtype.accumulator()`, nobody else touches either, and they do not overlap.
    pub unsafe fn store(&self, dtype: DType, acc: *mut u8, src: *const u8, count: usize) {
        // SAFETY: The caller keeps the contract above, which is the kernel's. That the CPU has the
        // kernel's instructions is kept by `with_isa`, the only source of these tables.
        unsafe { (self.operations(dtype).store)(acc, src, count) }
    }

    /// Adds `count` elements of `src` to `acc`.
    ///
    /// # Safety
    /// As for [`Kernels::store`], and `acc` holds elements of `dtype.accumulator()`.
    pub unsafe fn add(&self, dtype: DType, acc: *mut u8, src: *const u8, count: usize) {
        // SAFETY: The caller keeps the contract above, which is the kernel's. That the CPU has its
        // instructions is kept by `with_isa`, the only source of these tables.
        unsafe { (self.operations(dtype).add)(acc, src, count) }
    }

    /// Adds the last contribution, divides and rounds: `out` becomes `(acc + src) / divisor`, in
    /// `dtype`.
    ///
    /// `out` may be `acc`. A half type then leaves its result in the first half of the accumulator,
    /// and a caller that works in pieces passes `out + 2 * done` with `acc + 4 * done`: elements
    /// are read and written in rising order, none written before those at its place have been read.
    ///
    /// # Safety
    /// `acc` is readable for `count` elements of `dtype.accumulator()` and `src` for `count`
    /// elements of `dtype`. `out` is writable for `count` elements of `dtype`; it does not overlap
    /// `src`, and where it overlaps `acc` it starts at or before it. Nobody else touches any of
    /// them.
    ///
    /// # Panics
    /// Where `divisor` is 0.
    pub unsafe fn add_finish(
        &self,
        dtype: DType,
        out: *mut u8,
        acc: *const u8,
        src: *const u8,
        count: usize,
        divisor: u32,
    ) {
        assert!(divisor > 0, "a {dtype} average over no contributors");
        // SAFETY: The caller keeps the contract above, which is the kernel's, and the divisor has
        // just been checked. That the CPU has the kernel's instructions is kept by `with_isa`.
        unsafe { (self.operations(dtype).add_finish)(out, acc, src, count, divisor) }
    }

    /// Divides and rounds a sum that is complete: `out` becomes `acc / divisor`, in `dtype`. `out`
    /// may be `acc`, as for [`Kernels::add_finish`].
    ///
    /// # Safety
    /// As for [`Kernels::add_finish`], less `src`.
    ///
    /// # Panics
    /// Where `divisor` is 0.
    pub unsafe fn finish(
        &self,
        dtype: DType,
        out: *mut u8,
        acc: *const u8,
        count: usize,
        divisor: u32,
    ) {
        assert!(divisor > 0, "a {dtype} average over no contributors");
        // SAFETY: The caller keeps the contract above, which is the kernel's, and the divisor has
        // just been checked. That the CPU has the kernel's instructions is kept by `with_isa`.
        unsafe { (self.operations(dtype).finish)(out, acc, count, divisor) }
    }

    fn operations(&self, dtype: DType) -> &Operations {
        match dtype {
            DType::F32 => &self.f32,
            DType::F64 => &self.f64,
            DType::F16 => &self.f16,
            DType::U8 => &self.u8,
            DType::I32 => &self.i32,
            DType::I8 => &self.i8,
            DType::I64 => &self.i64,
            DType::BF16 => &self.bf16,
        }
    }
}

impl fmt::Debug for Kernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernels").field("isa", &self.isa).finish_non_exhaustive()
    }
}
