//! Elements of other types as f32, and f32 as 16-bit floats on the wire.
//!
//! Invariant: widening f16 and bf16 is exact; all narrowing rounds to nearest even, f64 to f32
//! included. Memory may have any alignment.

use super::fold::Sink;
use super::wide::wide;
use crate::base::DType;
use crate::reduce::{Kernels, kernels};

/// Elements that are widened at once, where what becomes of them is no kernel's: 4 KiB of f32.
const BLOCK: usize = 1024;

/// Reads elements of a float type as f32: f64 is rounded, f16 and bf16 are exact.
///
/// # Panics
/// `dtype` is an integer type, or `src` does not hold just `values.len()` elements.
pub fn widen(dtype: DType, src: &[u8], values: &mut [f32]) {
    widen_with(kernels(), dtype, src, values);
}

/// Writes f32 as elements of a float type: f64 is exact, f16 and bf16 are rounded once, to nearest
/// even.
///
/// # Panics
/// `dtype` is an integer type, or `dst` does not hold just `values.len()` elements.
pub fn narrow(dtype: DType, values: &[f32], dst: &mut [u8]) {
    narrow_with(kernels(), dtype, values, dst);
}

/// [`widen`] from memory that is known by its address alone.
///
/// # Safety
/// `src` is readable for `values.len()` elements of `dtype`, which nobody writes meanwhile.
///
/// # Panics
/// `dtype` is an integer type.
pub unsafe fn load(dtype: DType, src: *const u8, values: &mut [f32]) {
    // SAFETY: The caller vouches for these bytes; those of an empty slice need no memory.
    let src = unsafe { bytes_at(src, values.len() * dtype.size()) };
    widen(dtype, src, values);
}

/// [`narrow`] to memory that is known by its address alone.
///
/// # Safety
/// `dst` is writable for `values.len()` elements of `dtype`, which nobody else touches meanwhile
/// and `values` does not overlap.
///
/// # Panics
/// `dtype` is an integer type.
pub unsafe fn store(dtype: DType, values: &[f32], dst: *mut u8) {
    if values.is_empty() {
        return;
    }
    // SAFETY: The caller vouches for these bytes, and that nobody else touches them.
    let dst = unsafe { std::slice::from_raw_parts_mut(dst, values.len() * dtype.size()) };
    narrow(dtype, values, dst);
}

/// # Safety
/// `src` is readable for `length` bytes, which nobody writes while the slice lives.
unsafe fn bytes_at<'a>(src: *const u8, length: usize) -> &'a [u8] {
    if length == 0 {
        return &[];
    }
    // SAFETY: The caller vouches for the bytes; u8 has no alignment to keep.
    unsafe { std::slice::from_raw_parts(src, length) }
}

fn check(dtype: DType, elements: usize, bytes: usize) {
    assert!(dtype.is_float(), "codecs take floats, not {dtype}");
    assert_eq!(bytes, elements * dtype.size(), "bytes of {elements} elements of {dtype}");
}

/// [`widen`] by kernels of choice.
#[allow(clippy::cast_possible_truncation, reason = "f64 is rounded to f32")]
pub(super) fn widen_with(kernels: &Kernels, dtype: DType, src: &[u8], values: &mut [f32]) {
    check(dtype, values.len(), src.len());
    if dtype == DType::F64 {
        wide!(kernels, {
            for (value, bytes) in values.iter_mut().zip(src.as_chunks().0) {
                *value = f64::from_ne_bytes(*bytes) as f32;
            }
        });
    } else {
        // SAFETY: Both hold as many elements, as has been checked, and the borrows keep others out.
        // The sums of all float types but f64 are f32.
        unsafe { kernels.store(dtype, values.as_mut_ptr().cast(), src.as_ptr(), values.len()) }
    }
}

/// [`narrow`] by kernels of choice.
pub(super) fn narrow_with(kernels: &Kernels, dtype: DType, values: &[f32], dst: &mut [u8]) {
    check(dtype, values.len(), dst.len());
    if dtype == DType::F64 {
        wide!(kernels, {
            for (value, bytes) in values.iter().zip(dst.as_chunks_mut().0) {
                *bytes = f64::from(*value).to_ne_bytes();
            }
        });
    } else {
        // SAFETY: Both hold as many elements, as has been checked, and the borrows keep others out.
        // The sums of all float types but f64 are f32, and the divisor 1 asks for these themselves.
        unsafe { kernels.finish(dtype, dst.as_mut_ptr(), values.as_ptr().cast(), values.len(), 1) }
    }
}

/// Adds elements of a 16-bit float type.
pub(super) fn add_with(kernels: &Kernels, dtype: DType, src: &[u8], sums: &mut [f32]) {
    check(dtype, sums.len(), src.len());
    // SAFETY: Both hold as many elements, as has been checked, and the borrows keep others out. The
    // sums of 16-bit floats are f32.
    unsafe { kernels.add(dtype, sums.as_mut_ptr().cast(), src.as_ptr(), sums.len()) }
}

/// Widens elements of a 16-bit float type, a block at a time, into what a sink makes of them.
pub(super) fn put_with<S: Sink>(kernels: &Kernels, dtype: DType, src: &[u8], values: &mut [f32]) {
    let mut widened = [0.0; BLOCK];
    for (block, src) in values.chunks_mut(BLOCK).zip(src.chunks(BLOCK * dtype.size())) {
        let widened = &mut widened[..block.len()];
        widen_with(kernels, dtype, src, widened);
        wide!(kernels, {
            for (value, decoded) in block.iter_mut().zip(&*widened) {
                S::put(value, *decoded);
            }
        });
    }
}
