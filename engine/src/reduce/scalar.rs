//! The specification: one element at a time, in the order that memory has them.
//!
//! What a sum is, what an average is, and how each is rounded, is said by [`Element`] and nowhere
//! else. Other kernels call these loops for the elements that do not fill a register.

use super::{BF16, F16, Isa, Kernels, Operations};

/// A data type, as its arithmetic.
pub(super) trait Element: Copy {
    /// What sums of this type are kept in.
    type Sum: Copy;
    fn widen(self) -> Self::Sum;
    fn narrow(sum: Self::Sum) -> Self;
    fn plus(left: Self::Sum, right: Self::Sum) -> Self::Sum;
    /// True division for floats, floor division for integers; `divisor` is positive.
    fn over(sum: Self::Sum, divisor: u32) -> Self::Sum;
}

macro_rules! float {
    ($element:ty, $sum:ty, $widen:expr, $narrow:expr) => {
        impl Element for $element {
            type Sum = $sum;
            #[inline(always)]
            fn widen(self) -> $sum {
                $widen(self)
            }
            #[inline(always)]
            fn narrow(sum: $sum) -> $element {
                $narrow(sum)
            }
            #[inline(always)]
            fn plus(left: $sum, right: $sum) -> $sum {
                left + right
            }
            #[inline(always)]
            #[allow(clippy::cast_precision_loss, reason = "jobs have far fewer than 2^24 ranks")]
            #[allow(clippy::cast_lossless, reason = "f32 and f64 share this text")]
            fn over(sum: $sum, divisor: u32) -> $sum {
                sum / divisor as $sum
            }
        }
    };
}

macro_rules! integer {
    ($element:ty) => {
        impl Element for $element {
            type Sum = $element;
            #[inline(always)]
            fn widen(self) -> $element {
                self
            }
            #[inline(always)]
            fn narrow(sum: $element) -> $element {
                sum
            }
            #[inline(always)]
            fn plus(left: $element, right: $element) -> $element {
                left.wrapping_add(right)
            }
            #[inline(always)]
            #[allow(
                clippy::cast_possible_truncation,
                reason = "a quotient is no larger than its dividend"
            )]
            #[allow(clippy::cast_sign_loss, reason = "a u8 divided stays positive")]
            fn over(sum: $element, divisor: u32) -> $element {
                // By a positive divisor, Euclid's quotient is the floor.
                i64::from(sum).div_euclid(i64::from(divisor)) as $element
            }
        }
    };
}

float!(f32, f32, std::convert::identity, std::convert::identity);
float!(f64, f64, std::convert::identity, std::convert::identity);
float!(F16, f32, F16::to_f32, F16::from_f32);
float!(BF16, f32, BF16::to_f32, BF16::from_f32);
integer!(u8);
integer!(i8);
integer!(i32);
integer!(i64);

/// `acc = widen(src)`.
///
/// # Safety
/// That of [`Kernels::store`].
pub(super) unsafe fn store<E: Element>(acc: *mut u8, src: *const u8, count: usize) {
    let (acc, src) = (acc.cast::<E::Sum>(), src.cast::<E>());
    for index in 0..count {
        // SAFETY: `index` is below `count`, for which the caller vouches for both.
        unsafe { acc.add(index).write_unaligned(src.add(index).read_unaligned().widen()) }
    }
}

/// `acc += src`.
///
/// # Safety
/// That of [`Kernels::add`].
pub(super) unsafe fn add<E: Element>(acc: *mut u8, src: *const u8, count: usize) {
    let (acc, src) = (acc.cast::<E::Sum>(), src.cast::<E>());
    for index in 0..count {
        // SAFETY: `index` is below `count`, for which the caller vouches for both.
        unsafe {
            let right = src.add(index).read_unaligned().widen();
            let sum = E::plus(acc.add(index).read_unaligned(), right);
            acc.add(index).write_unaligned(sum);
        }
    }
}

/// `out = narrow((acc + src) / divisor)`.
///
/// # Safety
/// That of [`Kernels::add_finish`].
pub(super) unsafe fn add_finish<E: Element>(
    out: *mut u8,
    acc: *const u8,
    src: *const u8,
    count: usize,
    divisor: u32,
) {
    let (out, acc, src) = (out.cast::<E>(), acc.cast::<E::Sum>(), src.cast::<E>());
    for index in 0..count {
        // SAFETY: `index` is below `count`, for which the caller vouches for all three. An element
        // of `out` ends at or before the end of the same element of `acc`, which has been read by
        // then.
        unsafe {
            let right = src.add(index).read_unaligned().widen();
            let sum = E::plus(acc.add(index).read_unaligned(), right);
            let sum = if divisor == 1 { sum } else { E::over(sum, divisor) };
            out.add(index).write_unaligned(E::narrow(sum));
        }
    }
}

/// `out = narrow(acc / divisor)`.
///
/// # Safety
/// That of [`Kernels::finish`].
pub(super) unsafe fn finish<E: Element>(out: *mut u8, acc: *const u8, count: usize, divisor: u32) {
    let (out, acc) = (out.cast::<E>(), acc.cast::<E::Sum>());
    for index in 0..count {
        // SAFETY: `index` is below `count`, for which the caller vouches for both. An element of
        // `out` ends at or before the end of the same element of `acc`, which was read before.
        unsafe {
            let sum = acc.add(index).read_unaligned();
            let sum = if divisor == 1 { sum } else { E::over(sum, divisor) };
            out.add(index).write_unaligned(E::narrow(sum));
        }
    }
}

const fn operations<E: Element>() -> Operations {
    Operations {
        store: store::<E>,
        add: add::<E>,
        add_finish: add_finish::<E>,
        finish: finish::<E>,
    }
}

pub(super) static KERNELS: Kernels = Kernels {
    isa: Isa::Scalar,
    f32: operations::<f32>(),
    f64: operations::<f64>(),
    f16: operations::<F16>(),
    u8: operations::<u8>(),
    i32: operations::<i32>(),
    i8: operations::<i8>(),
    i64: operations::<i64>(),
    bf16: operations::<BF16>(),
};
