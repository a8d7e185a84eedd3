//! The reducer on slices, without `unsafe`, for measurements and for whoever is not on the data
//! path; and the loop that anyone would write, which the kernels are measured against.
//!
//! Invariant: lengths are checked before a byte is touched.

use super::scalar::Element;
use super::{BF16, F16, Isa, Kernels};
use crate::base::DType;

impl Kernels {
    /// Adds the elements of `src` to those of `acc`.
    ///
    /// # Panics
    /// Where the two do not hold the same number of elements.
    pub fn add_slice(&self, dtype: DType, acc: &mut [u8], src: &[u8]) {
        let count = matching_count(dtype, acc, src);
        // SAFETY: Both hold `count` elements, as has just been checked, and the borrows say that
        // nobody else uses them and that they do not overlap.
        unsafe { self.add(dtype, acc.as_mut_ptr(), src.as_ptr(), count) }
    }

    /// Adds the elements of `src`, divides and rounds. The results are at the front of `acc`.
    ///
    /// # Panics
    /// Where the two do not hold the same number of elements, or `divisor` is 0.
    pub fn add_finish_slice(&self, dtype: DType, acc: &mut [u8], src: &[u8], divisor: u32) {
        let count = matching_count(dtype, acc, src);
        let acc = acc.as_mut_ptr();
        // SAFETY: Both hold `count` elements, as has just been checked, and the borrows say that
        // nobody else uses them and that they do not overlap; `out` is the accumulator itself.
        unsafe { self.add_finish(dtype, acc, acc, src.as_ptr(), count, divisor) }
    }
}

fn matching_count(dtype: DType, acc: &[u8], src: &[u8]) -> usize {
    let count = src.len() / dtype.size();
    assert_eq!(src.len(), count * dtype.size(), "a part of a {dtype} at the end");
    assert_eq!(acc.len(), count * dtype.accumulator().size(), "an accumulator for {count} {dtype}");
    count
}

/// What the compiler makes of the loop that anyone would write, allowed the same instructions as
/// the kernels of `isa`: a peer to measure against, and never used to sum.
///
/// # Panics
/// Where the two do not hold the same number of elements, are not aligned to their types, or this
/// CPU lacks `isa`.
pub fn plain_add(isa: Isa, dtype: DType, acc: &mut [u8], src: &[u8]) {
    matching_count(dtype, acc, src);
    assert!(Kernels::with_isa(isa).is_some(), "this CPU has no {isa}");
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `with_isa` has just said that the CPU has these instructions.
        Isa::Avx2 => unsafe { plain_avx2(dtype, acc, src) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `with_isa` gives kernels of AVX-512 only where the CPU has it.
        Isa::Avx512 => unsafe { plain_avx512(dtype, acc, src) },
        _ => plain(dtype, acc, src),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
fn plain_avx2(dtype: DType, acc: &mut [u8], src: &[u8]) {
    plain(dtype, acc, src);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn plain_avx512(dtype: DType, acc: &mut [u8], src: &[u8]) {
    plain(dtype, acc, src);
}

#[inline(always)]
fn plain(dtype: DType, acc: &mut [u8], src: &[u8]) {
    match dtype {
        DType::F32 => plain_loop::<f32>(acc, src),
        DType::F64 => plain_loop::<f64>(acc, src),
        DType::F16 => plain_loop::<F16>(acc, src),
        DType::U8 => plain_loop::<u8>(acc, src),
        DType::I32 => plain_loop::<i32>(acc, src),
        DType::I8 => plain_loop::<i8>(acc, src),
        DType::I64 => plain_loop::<i64>(acc, src),
        DType::BF16 => plain_loop::<BF16>(acc, src),
    }
}

#[inline(always)]
fn plain_loop<E: Element>(acc: &mut [u8], src: &[u8]) {
    // SAFETY: Every pattern of bits is a value of these types: numbers, and integers in a wrapper.
    let ((before, acc, after), (ahead, src, behind)) =
        unsafe { (acc.align_to_mut::<E::Sum>(), src.align_to::<E>()) };
    let unaligned = before.len() + after.len() + ahead.len() + behind.len();
    assert_eq!(unaligned, 0, "the plain loop takes aligned memory");
    for (sum, element) in acc.iter_mut().zip(src) {
        *sum = E::plus(*sum, element.widen());
    }
}
