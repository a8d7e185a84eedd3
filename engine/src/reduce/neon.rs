//! 128-bit registers of AArch64, whose every processor has them. Each lane below names the
//! instructions of one data type; the loops are in `blocks`.
//!
//! The compiler makes NEON code of the specification as well, but only where `out` is not `acc`: it
//! cannot know that these loops may read a step before they write it. The last addition of a round
//! is in place, and there the specification runs one element at a time.
//!
//! Invariant: the specification and these lanes run under the same, default, floating-point mode:
//! to nearest even, subnormals kept, IEEE half precision.

use super::blocks::{self, Lane, lane, operations};
use super::divisor::{Floor64, reciprocal32, reciprocal64};
use super::{BF16, F16, Isa, Kernels, Operations};
use std::arch::aarch64::*;
use std::arch::asm;

operations!("neon");

pub(super) static KERNELS: Kernels = Kernels {
    isa: Isa::Neon,
    f32: operations::<F32Lane>(),
    f64: operations::<F64Lane>(),
    f16: operations::<F16Lane>(),
    u8: operations::<U8Lane>(),
    i32: operations::<I32Lane>(),
    i8: operations::<I8Lane>(),
    i64: operations::<I64Lane>(),
    bf16: operations::<BF16Lane>(),
};

lane! {
    F32Lane: f32 as float32x4_t, 4;
    vld1q_f32, vst1q_f32; vld1q_f32, vst1q_f32;
    vaddq_f32; divisor_f32 => float32x4_t, vdivq_f32
}
lane! {
    F64Lane: f64 as float64x2_t, 2;
    vld1q_f64, vst1q_f64; vld1q_f64, vst1q_f64;
    vaddq_f64; divisor_f64 => float64x2_t, vdivq_f64
}
lane! {
    F16Lane: F16 as float32x4_t, 4;
    vld1q_f32, vst1q_f32; widen_f16, narrow_f16;
    vaddq_f32; divisor_f32 => float32x4_t, vdivq_f32
}
lane! {
    BF16Lane: BF16 as float32x4_t, 4;
    vld1q_f32, vst1q_f32; widen_bf16, narrow_bf16;
    vaddq_f32; divisor_f32 => float32x4_t, vdivq_f32
}
lane! {
    U8Lane: u8 as uint8x16_t, 16;
    vld1q_u8, vst1q_u8; vld1q_u8, vst1q_u8;
    vaddq_u8; inverse_f32 => float32x4_t, over_u8
}
lane! {
    I8Lane: i8 as int8x16_t, 16;
    vld1q_s8, vst1q_s8; vld1q_s8, vst1q_s8;
    vaddq_s8; inverse_f32 => float32x4_t, over_i8
}
lane! {
    I32Lane: i32 as int32x4_t, 4;
    vld1q_s32, vst1q_s32; vld1q_s32, vst1q_s32;
    vaddq_s32; inverse_f64 => float64x2_t, over_i32
}
lane! {
    I64Lane: i64 as int64x2_t, 2;
    vld1q_s64, vst1q_s64; vld1q_s64, vst1q_s64;
    vaddq_s64; inverse_i64 => Floor64, over_i64
}

#[inline]
#[target_feature(enable = "neon")]
#[allow(clippy::cast_precision_loss, reason = "as the specification does")]
fn divisor_f32(divisor: u32) -> float32x4_t {
    vdupq_n_f32(divisor as f32)
}

#[inline]
#[target_feature(enable = "neon")]
fn divisor_f64(divisor: u32) -> float64x2_t {
    vdupq_n_f64(f64::from(divisor))
}

#[inline]
#[target_feature(enable = "neon")]
fn inverse_f32(divisor: u32) -> float32x4_t {
    vdupq_n_f32(reciprocal32(divisor))
}

#[inline]
#[target_feature(enable = "neon")]
fn inverse_f64(divisor: u32) -> float64x2_t {
    vdupq_n_f64(reciprocal64(divisor))
}

#[inline]
#[target_feature(enable = "neon")]
fn inverse_i64(divisor: u32) -> Floor64 {
    Floor64::new(divisor)
}

/// # Safety
/// `src` is readable for 4 elements.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn widen_f16(src: *const u16) -> float32x4_t {
    // SAFETY: 4 elements are 64 bits.
    let halves = unsafe { vld1_u16(src) };
    let wide: float32x4_t;
    // SAFETY: The conversion works on registers alone. It is written as assembly because its
    // intrinsic needs a half-precision type that the oldest supported compiler lacks.
    unsafe {
        asm!(
            "fcvtl {wide:v}.4s, {halves:v}.4h",
            wide = lateout(vreg) wide,
            halves = in(vreg) halves,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    wide
}

/// # Safety
/// `out` is writable for 4 elements.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn narrow_f16(out: *mut u16, sums: float32x4_t) {
    let halves: uint16x4_t;
    // SAFETY: The conversion works on registers alone. It is assembly for the same want of an
    // intrinsic as that of `widen_f16`.
    unsafe {
        asm!(
            "fcvtn {halves:v}.4h, {sums:v}.4s",
            halves = lateout(vreg) halves,
            sums = in(vreg) sums,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    // SAFETY: 4 elements are 64 bits.
    unsafe { vst1_u16(out, halves) }
}

/// # Safety
/// `src` is readable for 4 elements.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn widen_bf16(src: *const u16) -> float32x4_t {
    // SAFETY: 4 elements are 64 bits.
    let halves = unsafe { vld1_u16(src) };
    vreinterpretq_f32_u32(vshll_n_u16::<16>(halves))
}

/// # Safety
/// `out` is writable for 4 elements.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn narrow_bf16(out: *mut u16, sums: float32x4_t) {
    let bits = vreinterpretq_u32_f32(sums);
    let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
    let rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    let number = vceqq_f32(sums, sums);
    let quiet = vorrq_u32(bits, vdupq_n_u32(0x0040_0000));
    let halves = vshrn_n_u32::<16>(vbslq_u32(number, rounded, quiet));
    // SAFETY: 4 elements are 64 bits.
    unsafe { vst1_u16(out, halves) }
}

/// 8 whole numbers of at most 8 bits, divided; see `divisor`.
#[inline]
#[target_feature(enable = "neon")]
fn over_narrow(whole: int16x8_t, inverse: float32x4_t) -> int16x8_t {
    let lower = over_quarter(vmovl_s16(vget_low_s16(whole)), inverse);
    let upper = over_quarter(vmovl_high_s16(whole), inverse);
    vcombine_s16(vmovn_s32(lower), vmovn_s32(upper))
}

#[inline]
#[target_feature(enable = "neon")]
fn over_quarter(whole: int32x4_t, inverse: float32x4_t) -> int32x4_t {
    let centered = vaddq_f32(vcvtq_f32_s32(whole), vdupq_n_f32(0.5));
    vcvtmq_s32_f32(vmulq_f32(centered, inverse))
}

#[inline]
#[target_feature(enable = "neon")]
fn over_u8(sums: uint8x16_t, inverse: float32x4_t) -> uint8x16_t {
    let lower = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(sums)));
    let upper = vreinterpretq_s16_u16(vmovl_high_u8(sums));
    let lower = vreinterpretq_u16_s16(over_narrow(lower, inverse));
    let upper = vreinterpretq_u16_s16(over_narrow(upper, inverse));
    vcombine_u8(vmovn_u16(lower), vmovn_u16(upper))
}

#[inline]
#[target_feature(enable = "neon")]
fn over_i8(sums: int8x16_t, inverse: float32x4_t) -> int8x16_t {
    let lower = over_narrow(vmovl_s8(vget_low_s8(sums)), inverse);
    let upper = over_narrow(vmovl_high_s8(sums), inverse);
    vcombine_s8(vmovn_s16(lower), vmovn_s16(upper))
}

#[inline]
#[target_feature(enable = "neon")]
fn over_i32(sums: int32x4_t, inverse: float64x2_t) -> int32x4_t {
    let lower = over_i32_half(vmovl_s32(vget_low_s32(sums)), inverse);
    let upper = over_i32_half(vmovl_high_s32(sums), inverse);
    vcombine_s32(vmovn_s64(lower), vmovn_s64(upper))
}

/// 2 whole numbers of 32 bits, divided; see `divisor`.
#[inline]
#[target_feature(enable = "neon")]
fn over_i32_half(whole: int64x2_t, inverse: float64x2_t) -> int64x2_t {
    let centered = vaddq_f64(vcvtq_f64_s64(whole), vdupq_n_f64(0.5));
    vcvtmq_s64_f64(vmulq_f64(centered, inverse))
}

/// In general registers: vectors have no product of 128 bits.
#[inline]
#[target_feature(enable = "neon")]
fn over_i64(sums: int64x2_t, divisor: Floor64) -> int64x2_t {
    let lower = divisor.divide(vgetq_lane_s64::<0>(sums));
    let upper = divisor.divide(vgetq_lane_s64::<1>(sums));
    vcombine_s64(vdup_n_s64(lower), vdup_n_s64(upper))
}
