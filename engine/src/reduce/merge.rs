//! Reductions of every kind: which loop runs for a sum, a minimum, a maximum and a product.
//!
//! Sums have kernels of their own. The others have one loop for each type, compiled for each
//! instruction set; half types are widened to f32 by the kernels, a block at a time that stays in
//! the nearest cache.
//!
//! Invariant: [`Rule`] is the specification. Every instruction set runs the same loop over it, so
//! results do not depend on the CPU.

use super::{Isa, Kernels};
use crate::base::{DType, Reduction};
use std::mem::MaybeUninit;
use std::ops::Range;

/// Elements of several contributions that are finished before the next ones are begun: 16 KiB of
/// f32.
const BLOCK: usize = 4096;

/// Bytes of a step, for the compiler to make vectors of. A step is read as a whole before its
/// results are written, so `out` may be `acc`, and nothing asks whether the two overlap.
const STEP_BYTES: usize = 256;

type Merge = unsafe fn(out: *mut u8, acc: *const u8, src: *const u8, count: usize);

/// What becomes of two elements.
trait Rule<E> {
    fn merge(left: E, right: E) -> E;
}

struct Least;
struct Greatest;
struct Times;

macro_rules! float {
    ($element:ty) => {
        // A NaN on either side is the result: a contribution that is no number must be seen.
        impl Rule<$element> for Least {
            #[inline(always)]
            fn merge(left: $element, right: $element) -> $element {
                if left < right || left.is_nan() { left } else { right }
            }
        }
        impl Rule<$element> for Greatest {
            #[inline(always)]
            fn merge(left: $element, right: $element) -> $element {
                if left > right || left.is_nan() { left } else { right }
            }
        }
        impl Rule<$element> for Times {
            #[inline(always)]
            fn merge(left: $element, right: $element) -> $element {
                left * right
            }
        }
    };
}

macro_rules! integer {
    ($element:ty) => {
        impl Rule<$element> for Least {
            #[inline(always)]
            fn merge(left: $element, right: $element) -> $element {
                left.min(right)
            }
        }
        impl Rule<$element> for Greatest {
            #[inline(always)]
            fn merge(left: $element, right: $element) -> $element {
                left.max(right)
            }
        }
        impl Rule<$element> for Times {
            #[inline(always)]
            fn merge(left: $element, right: $element) -> $element {
                left.wrapping_mul(right)
            }
        }
    };
}

float!(f32);
float!(f64);
integer!(u8);
integer!(i8);
integer!(i32);
integer!(i64);

/// `out = merge(acc, src)`.
///
/// # Safety
/// `acc` and `src` are readable and `out` is writable for `count` elements. `out` may be `acc`;
/// else no two of them overlap.
#[inline(always)]
unsafe fn merge<E: Copy, R: Rule<E>, const STEP: usize>(
    out: *mut u8,
    acc: *const u8,
    src: *const u8,
    count: usize,
) {
    let (out, acc, src) = (out.cast::<E>(), acc.cast::<E>(), src.cast::<E>());
    let mut done = 0;
    while count - done >= STEP {
        // SAFETY: `done + STEP <= count`, up to which the caller vouches for all three. The results
        // of a step are written after its reads.
        unsafe {
            let mut left = acc.add(done).cast::<[E; STEP]>().read_unaligned();
            let right = src.add(done).cast::<[E; STEP]>().read_unaligned();
            for (left, right) in left.iter_mut().zip(right) {
                *left = R::merge(*left, right);
            }
            out.add(done).cast::<[E; STEP]>().write_unaligned(left);
        }
        done += STEP;
    }
    for index in done..count {
        // SAFETY: `index` is below `count`, for which the caller vouches for all three.
        unsafe {
            let (left, right) = (acc.add(index).read_unaligned(), src.add(index).read_unaligned());
            out.add(index).write_unaligned(R::merge(left, right));
        }
    }
}

/// # Safety
/// That of [`merge`], and the CPU has the features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
unsafe fn merge_avx2<E: Copy, R: Rule<E>, const STEP: usize>(
    out: *mut u8,
    acc: *const u8,
    src: *const u8,
    count: usize,
) {
    // SAFETY: The contract is the caller's.
    unsafe { merge::<E, R, STEP>(out, acc, src, count) }
}

/// # Safety
/// That of [`merge`], and the CPU has the features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn merge_avx512<E: Copy, R: Rule<E>, const STEP: usize>(
    out: *mut u8,
    acc: *const u8,
    src: *const u8,
    count: usize,
) {
    // SAFETY: The contract is the caller's.
    unsafe { merge::<E, R, STEP>(out, acc, src, count) }
}

fn merge_of<E: Copy, const STEP: usize>(isa: Isa, reduction: Reduction) -> Merge
where
    Least: Rule<E>,
    Greatest: Rule<E>,
    Times: Rule<E>,
{
    match reduction {
        Reduction::Min => compiled::<E, Least, STEP>(isa),
        Reduction::Max => compiled::<E, Greatest, STEP>(isa),
        Reduction::Product => compiled::<E, Times, STEP>(isa),
        Reduction::Sum => unreachable!("sums have kernels of their own"),
    }
}

fn compiled<E: Copy, R: Rule<E>, const STEP: usize>(isa: Isa) -> Merge {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => merge_avx2::<E, R, STEP>,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => merge_avx512::<E, R, STEP>,
        _ => merge::<E, R, STEP>,
    }
}

/// Minimum and maximum give NaN where a contribution has it, and either zero where contributions
/// have both. A product of half types is kept in f32 and rounded once, that of integers wraps.
impl Kernels {
    /// The loop for elements of this type, or of its accumulator.
    fn merge(&self, reduction: Reduction, dtype: DType) -> Merge {
        let isa = self.isa();
        match dtype {
            DType::F32 | DType::F16 | DType::BF16 => {
                merge_of::<f32, { STEP_BYTES / 4 }>(isa, reduction)
            }
            DType::F64 => merge_of::<f64, { STEP_BYTES / 8 }>(isa, reduction),
            DType::U8 => merge_of::<u8, STEP_BYTES>(isa, reduction),
            DType::I8 => merge_of::<i8, STEP_BYTES>(isa, reduction),
            DType::I32 => merge_of::<i32, { STEP_BYTES / 4 }>(isa, reduction),
            DType::I64 => merge_of::<i64, { STEP_BYTES / 8 }>(isa, reduction),
        }
    }

    /// Reduces `count` elements of `src` into `acc`, which [`Kernels::store`] has begun.
    ///
    /// # Safety
    /// That of [`Kernels::add`].
    pub unsafe fn reduce(
        &self,
        reduction: Reduction,
        dtype: DType,
        acc: *mut u8,
        src: *const u8,
        count: usize,
    ) {
        if reduction == Reduction::Sum {
            // SAFETY: The contract is the caller's.
            return unsafe { self.add(dtype, acc, src, count) };
        }
        let merge = self.merge(reduction, dtype);
        if dtype.accumulator() == dtype {
            // SAFETY: The contract is the caller's. The CPU has the loop's instructions, since it
            // has those of `self`.
            return unsafe { merge(acc, acc, src, count) };
        }
        // SAFETY: The contract is the caller's; the blocks lie one behind the other within the
        // `count` elements, and a block of `widened` is nobody else's.
        unsafe {
            self.widened(dtype, src, count, |block, done, length| {
                let acc = acc.add(done * DType::F32.size());
                merge(acc, acc, block, length);
            });
        }
    }

    /// Reduces the last contribution, divides (sums alone) and rounds: `out` becomes the result in
    /// `dtype`. `out` may be `acc`, as for [`Kernels::add_finish`].
    ///
    /// # Safety
    /// That of [`Kernels::add_finish`].
    ///
    /// # Panics
    /// Where `divisor` is 0, or is not 1 and the reduction no sum.
    #[allow(clippy::too_many_arguments, reason = "three ranges of memory and what to do")]
    pub unsafe fn reduce_finish(
        &self,
        reduction: Reduction,
        dtype: DType,
        out: *mut u8,
        acc: *const u8,
        src: *const u8,
        count: usize,
        divisor: u32,
    ) {
        if reduction == Reduction::Sum {
            // SAFETY: The contract is the caller's.
            return unsafe { self.add_finish(dtype, out, acc, src, count, divisor) };
        }
        assert!(divisor == 1, "a {dtype} {reduction} is not divided");
        let merge = self.merge(reduction, dtype);
        if dtype.accumulator() == dtype {
            // SAFETY: The contract is the caller's; where element and accumulator are one type,
            // `out` is `acc` or apart from it. The CPU has the instructions of `self`.
            return unsafe { merge(out, acc, src, count) };
        }
        // SAFETY: The contract is the caller's; the blocks lie one behind the other within the
        // `count` elements, and a block of `widened` is nobody else's. A block's results are
        // written when its accumulator has been read, and end at or before the end of that.
        unsafe {
            self.widened(dtype, src, count, |block, done, length| {
                merge(block, acc.add(done * DType::F32.size()), block, length);
                self.finish(dtype, out.add(done * dtype.size()), block, length, 1);
            });
        }
    }

    /// Hands `each` the elements of a half type as f32: a block of them, how many came before it,
    /// and its length.
    ///
    /// # Safety
    /// `src` is readable for `count` elements of `dtype`.
    unsafe fn widened(
        &self,
        dtype: DType,
        src: *const u8,
        count: usize,
        mut each: impl FnMut(*mut u8, usize, usize),
    ) {
        let mut block = MaybeUninit::<[f32; BLOCK]>::uninit();
        let block: *mut u8 = block.as_mut_ptr().cast();
        for done in (0..count).step_by(BLOCK) {
            let length = BLOCK.min(count - done);
            // SAFETY: `done + length <= count`, and the block is this function's own.
            unsafe { self.store(dtype, block, src.add(done * dtype.size()), length) };
            each(block, done, length);
        }
    }

    /// Reduces all contributions in one pass over memory: `out` becomes what `first` and `others`
    /// reduce to, over `divisor`, in `dtype`. Half types are reduced in f32, a block at a time that
    /// stays in the nearest cache, and rounded once. The order is that of `others`.
    ///
    /// # Safety
    /// `first` and each of `others` are readable and `out` is writable for `count` elements of
    /// `dtype`. `out` may be `first`; else no two of them overlap. Nobody else touches them.
    ///
    /// # Panics
    /// Where `divisor` is 0, or is not 1 and the reduction no sum, or `others` is empty.
    #[allow(clippy::too_many_arguments, reason = "contributions, a result and what to do")]
    pub unsafe fn reduce_all(
        &self,
        reduction: Reduction,
        dtype: DType,
        out: *mut u8,
        first: *const u8,
        others: &[*const u8],
        count: usize,
        divisor: u32,
    ) {
        // SAFETY: the contract is the caller's.
        unsafe {
            self.reduce_range(reduction, dtype, out, first, others, 0..count, divisor);
        }
    }

    /// As [`Kernels::reduce_all`], of the elements from the range's start to its end alone.
    ///
    /// # Safety
    /// That of [`Kernels::reduce_all`] with the range's end as `count`; but what lies outside of
    /// the range others may use.
    ///
    /// # Panics
    /// As [`Kernels::reduce_all`].
    #[allow(clippy::too_many_arguments, reason = "contributions, a result and what to do")]
    pub unsafe fn reduce_range(
        &self,
        reduction: Reduction,
        dtype: DType,
        out: *mut u8,
        first: *const u8,
        others: &[*const u8],
        range: Range<usize>,
        divisor: u32,
    ) {
        assert!(divisor > 0 && !others.is_empty(), "a {dtype} {reduction} of one, or over nobody");
        let [inner @ .., last] = others else { return };
        let size = dtype.size();
        let mut sums = MaybeUninit::<[f32; BLOCK]>::uninit();
        let sums: *mut u8 = sums.as_mut_ptr().cast();
        let is_wide = dtype.accumulator() == dtype;
        // With two contributions no element is touched twice, so there is nothing to keep in cache.
        let block = if is_wide && inner.is_empty() { range.len() } else { BLOCK };
        let mut done = range.start;
        while done < range.end {
            let length = block.min(range.end - done);
            let at = done * size;
            // SAFETY: `done + length <= range.end`, so every address stays in what the caller
            // vouches for. `acc` is the block's own memory, `first`, or `out` once that has been
            // written; each kernel's operands overlap only where both are the same address.
            unsafe {
                let out = out.add(at);
                let mut acc = first.add(at);
                if !is_wide {
                    self.store(dtype, sums, acc, length);
                    acc = sums.cast_const();
                }
                for source in inner {
                    if is_wide {
                        self.reduce_finish(reduction, dtype, out, acc, source.add(at), length, 1);
                        acc = out.cast_const();
                    } else {
                        self.reduce(reduction, dtype, sums, source.add(at), length);
                    }
                }
                self.reduce_finish(reduction, dtype, out, acc, last.add(at), length, divisor);
            }
            done += length;
        }
    }
}
