//! 256-bit registers. Each lane below names the instructions of one data type; the loops are in
//! `blocks`.
//!
//! Invariant: a function here runs only where [`detected`] said yes, which `Kernels::with_isa` sees
//! to.

use super::blocks::{self, Lane, lane, operations};
use super::divisor::{Floor64, reciprocal32, reciprocal64};
use super::{BF16, F16, Isa, Kernels, Operations};
use std::arch::x86_64::*;

/// Round to nearest even.
const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;

/// Whether this CPU, and its operating system, have the instructions.
pub(super) fn detected() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c")
}

operations!("avx2,f16c");

pub(super) static KERNELS: Kernels = Kernels {
    isa: Isa::Avx2,
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
    F32Lane: f32 as __m256, 8;
    _mm256_loadu_ps, _mm256_storeu_ps; _mm256_loadu_ps, _mm256_storeu_ps;
    _mm256_add_ps; divisor_f32 => __m256, _mm256_div_ps
}
lane! {
    F64Lane: f64 as __m256d, 4;
    _mm256_loadu_pd, _mm256_storeu_pd; _mm256_loadu_pd, _mm256_storeu_pd;
    _mm256_add_pd; divisor_f64 => __m256d, _mm256_div_pd
}
lane! {
    F16Lane: F16 as __m256, 8;
    _mm256_loadu_ps, _mm256_storeu_ps; widen_f16, narrow_f16;
    _mm256_add_ps; divisor_f32 => __m256, _mm256_div_ps
}
lane! {
    BF16Lane: BF16 as __m256, 8;
    _mm256_loadu_ps, _mm256_storeu_ps; widen_bf16, narrow_bf16;
    _mm256_add_ps; divisor_f32 => __m256, _mm256_div_ps
}
lane! {
    U8Lane: u8 as __m256i, 32;
    _mm256_loadu_si256, _mm256_storeu_si256; _mm256_loadu_si256, _mm256_storeu_si256;
    _mm256_add_epi8; inverse_f32 => __m256, over_u8
}
lane! {
    I8Lane: i8 as __m256i, 32;
    _mm256_loadu_si256, _mm256_storeu_si256; _mm256_loadu_si256, _mm256_storeu_si256;
    _mm256_add_epi8; inverse_f32 => __m256, over_i8
}
lane! {
    I32Lane: i32 as __m256i, 8;
    _mm256_loadu_si256, _mm256_storeu_si256; _mm256_loadu_si256, _mm256_storeu_si256;
    _mm256_add_epi32; inverse_f64 => __m256d, over_i32
}
lane! {
    I64Lane: i64 as __m256i, 4;
    _mm256_loadu_si256, _mm256_storeu_si256; _mm256_loadu_si256, _mm256_storeu_si256;
    _mm256_add_epi64; inverse_i64 => Floor64, over_i64
}

#[inline]
#[target_feature(enable = "avx")]
#[allow(clippy::cast_precision_loss, reason = "as the specification does")]
fn divisor_f32(divisor: u32) -> __m256 {
    _mm256_set1_ps(divisor as f32)
}

#[inline]
#[target_feature(enable = "avx")]
fn divisor_f64(divisor: u32) -> __m256d {
    _mm256_set1_pd(f64::from(divisor))
}

#[inline]
#[target_feature(enable = "avx")]
fn inverse_f32(divisor: u32) -> __m256 {
    _mm256_set1_ps(reciprocal32(divisor))
}

#[inline]
#[target_feature(enable = "avx")]
fn inverse_f64(divisor: u32) -> __m256d {
    _mm256_set1_pd(reciprocal64(divisor))
}

#[inline]
#[target_feature(enable = "avx")]
fn inverse_i64(divisor: u32) -> Floor64 {
    Floor64::new(divisor)
}

/// # Safety
/// `src` is readable for 8 elements.
#[inline]
#[target_feature(enable = "avx,f16c")]
unsafe fn widen_f16(src: *const __m128i) -> __m256 {
    // SAFETY: 8 elements are 128 bits.
    _mm256_cvtph_ps(unsafe { _mm_loadu_si128(src) })
}

/// # Safety
/// `out` is writable for 8 elements.
#[inline]
#[target_feature(enable = "avx,f16c")]
unsafe fn narrow_f16(out: *mut __m128i, sums: __m256) {
    let halves = _mm256_cvtps_ph::<NEAREST>(sums);
    // SAFETY: 8 elements are 128 bits.
    unsafe { _mm_storeu_si128(out, halves) }
}

/// # Safety
/// `src` is readable for 8 elements.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn widen_bf16(src: *const __m128i) -> __m256 {
    // SAFETY: 8 elements are 128 bits.
    let halves = unsafe { _mm_loadu_si128(src) };
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves)))
}

/// # Safety
/// `out` is writable for 8 elements.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn narrow_bf16(out: *mut __m128i, sums: __m256) {
    let bits = _mm256_castps_si256(sums);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    let rounded = _mm256_add_epi32(bits, half);
    let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(sums, sums));
    let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
    let words = _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan));
    let upper = _mm256_extracti128_si256::<1>(words);
    let halves = _mm_packus_epi32(_mm256_castsi256_si128(words), upper);
    // SAFETY: 8 elements are 128 bits.
    unsafe { _mm_storeu_si128(out, halves) }
}

/// 8 whole numbers of at most 8 bits, divided; see `divisor`.
#[inline]
#[target_feature(enable = "avx2")]
fn over_narrow(whole: __m256i, inverse: __m256) -> __m256i {
    let centered = _mm256_add_ps(_mm256_cvtepi32_ps(whole), _mm256_set1_ps(0.5));
    _mm256_cvttps_epi32(_mm256_floor_ps(_mm256_mul_ps(centered, inverse)))
}

#[inline]
#[target_feature(enable = "avx2")]
fn over_u8(sums: __m256i, inverse: __m256) -> __m256i {
    let lower = _mm256_castsi256_si128(sums);
    let upper = _mm256_extracti128_si256::<1>(sums);
    let quarter0 = over_narrow(_mm256_cvtepu8_epi32(lower), inverse);
    let quarter1 = over_narrow(_mm256_cvtepu8_epi32(_mm_srli_si128::<8>(lower)), inverse);
    let quarter2 = over_narrow(_mm256_cvtepu8_epi32(upper), inverse);
    let quarter3 = over_narrow(_mm256_cvtepu8_epi32(_mm_srli_si128::<8>(upper)), inverse);
    let first = _mm256_packus_epi32(quarter0, quarter1);
    let second = _mm256_packus_epi32(quarter2, quarter3);
    unpack_order(_mm256_packus_epi16(first, second))
}

#[inline]
#[target_feature(enable = "avx2")]
fn over_i8(sums: __m256i, inverse: __m256) -> __m256i {
    let lower = _mm256_castsi256_si128(sums);
    let upper = _mm256_extracti128_si256::<1>(sums);
    let quarter0 = over_narrow(_mm256_cvtepi8_epi32(lower), inverse);
    let quarter1 = over_narrow(_mm256_cvtepi8_epi32(_mm_srli_si128::<8>(lower)), inverse);
    let quarter2 = over_narrow(_mm256_cvtepi8_epi32(upper), inverse);
    let quarter3 = over_narrow(_mm256_cvtepi8_epi32(_mm_srli_si128::<8>(upper)), inverse);
    let first = _mm256_packs_epi32(quarter0, quarter1);
    let second = _mm256_packs_epi32(quarter2, quarter3);
    unpack_order(_mm256_packs_epi16(first, second))
}

/// The packing instructions work on each 128-bit half alone and leave the groups of four bytes as
/// 0 2 4 6 | 1 3 5 7.
#[inline]
#[target_feature(enable = "avx2")]
fn unpack_order(groups: __m256i) -> __m256i {
    _mm256_permutevar8x32_epi32(groups, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
}

#[inline]
#[target_feature(enable = "avx2")]
fn over_i32(sums: __m256i, inverse: __m256d) -> __m256i {
    let lower = over_i32_half(_mm256_castsi256_si128(sums), inverse);
    let upper = over_i32_half(_mm256_extracti128_si256::<1>(sums), inverse);
    _mm256_set_m128i(upper, lower)
}

/// 4 whole numbers of 32 bits, divided; see `divisor`.
#[inline]
#[target_feature(enable = "avx")]
fn over_i32_half(whole: __m128i, inverse: __m256d) -> __m128i {
    let centered = _mm256_add_pd(_mm256_cvtepi32_pd(whole), _mm256_set1_pd(0.5));
    _mm256_cvttpd_epi32(_mm256_floor_pd(_mm256_mul_pd(centered, inverse)))
}

/// In general registers: vectors have no product of 128 bits.
#[inline]
#[target_feature(enable = "avx")]
fn over_i64(sums: __m256i, divisor: Floor64) -> __m256i {
    let mut whole = [0_i64; 4];
    // SAFETY: The array is as long as a register.
    unsafe { _mm256_storeu_si256(whole.as_mut_ptr().cast(), sums) };
    let whole = whole.map(|value| divisor.divide(value));
    // SAFETY: The mapped array has 4 words of 64 bits too, as many as the register.
    unsafe { _mm256_loadu_si256(whole.as_ptr().cast()) }
}
