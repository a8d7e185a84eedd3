//! 512-bit registers. Each lane below names the instructions of one data type; the loops are in
//! `blocks`.
//!
//! Invariant: a function here runs only where [`detected`] said yes, which `Kernels::with_isa` sees
//! to.

use super::blocks::{self, Lane, lane, operations};
use super::divisor::{Floor64, reciprocal32, reciprocal64};
use super::{BF16, F16, Isa, Kernels, Operations};
use std::arch::x86_64::*;

/// Round to nearest even, raise nothing.
const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
/// Round towards minus infinity, to a whole number.
const FLOOR: i32 = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;

/// Whether this CPU, and its operating system, have the instructions.
pub(super) fn detected() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
}

operations!("avx512f,avx512bw,avx512vl,avx512dq");

pub(super) static KERNELS: Kernels = Kernels {
    isa: Isa::Avx512,
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
    F32Lane: f32 as __m512, 16;
    _mm512_loadu_ps, _mm512_storeu_ps; _mm512_loadu_ps, _mm512_storeu_ps;
    _mm512_add_ps; divisor_f32 => __m512, _mm512_div_ps
}
lane! {
    F64Lane: f64 as __m512d, 8;
    _mm512_loadu_pd, _mm512_storeu_pd; _mm512_loadu_pd, _mm512_storeu_pd;
    _mm512_add_pd; divisor_f64 => __m512d, _mm512_div_pd
}
lane! {
    F16Lane: F16 as __m512, 16;
    _mm512_loadu_ps, _mm512_storeu_ps; widen_f16, narrow_f16;
    _mm512_add_ps; divisor_f32 => __m512, _mm512_div_ps
}
lane! {
    BF16Lane: BF16 as __m512, 16;
    _mm512_loadu_ps, _mm512_storeu_ps; widen_bf16, narrow_bf16;
    _mm512_add_ps; divisor_f32 => __m512, _mm512_div_ps
}
lane! {
    U8Lane: u8 as __m512i, 64;
    _mm512_loadu_si512, _mm512_storeu_si512; _mm512_loadu_si512, _mm512_storeu_si512;
    _mm512_add_epi8; inverse_f32 => __m512, over_u8
}
lane! {
    I8Lane: i8 as __m512i, 64;
    _mm512_loadu_si512, _mm512_storeu_si512; _mm512_loadu_si512, _mm512_storeu_si512;
    _mm512_add_epi8; inverse_f32 => __m512, over_i8
}
lane! {
    I32Lane: i32 as __m512i, 16;
    _mm512_loadu_si512, _mm512_storeu_si512; _mm512_loadu_si512, _mm512_storeu_si512;
    _mm512_add_epi32; inverse_f64 => __m512d, over_i32
}
lane! {
    I64Lane: i64 as __m512i, 8;
    _mm512_loadu_si512, _mm512_storeu_si512; _mm512_loadu_si512, _mm512_storeu_si512;
    _mm512_add_epi64; inverse_i64 => Floor64, over_i64
}

#[inline]
#[target_feature(enable = "avx512f")]
#[allow(clippy::cast_precision_loss, reason = "as the specification does")]
fn divisor_f32(divisor: u32) -> __m512 {
    _mm512_set1_ps(divisor as f32)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn divisor_f64(divisor: u32) -> __m512d {
    _mm512_set1_pd(f64::from(divisor))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn inverse_f32(divisor: u32) -> __m512 {
    _mm512_set1_ps(reciprocal32(divisor))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn inverse_f64(divisor: u32) -> __m512d {
    _mm512_set1_pd(reciprocal64(divisor))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn inverse_i64(divisor: u32) -> Floor64 {
    Floor64::new(divisor)
}

/// # Safety
/// `src` is readable for 16 elements.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn widen_f16(src: *const __m256i) -> __m512 {
    // SAFETY: 16 elements are 256 bits.
    _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(src) })
}

/// # Safety
/// `out` is writable for 16 elements.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn narrow_f16(out: *mut __m256i, sums: __m512) {
    let halves = _mm512_cvtps_ph::<NEAREST>(sums);
    // SAFETY: 16 elements are 256 bits.
    unsafe { _mm256_storeu_si256(out, halves) }
}

/// # Safety
/// `src` is readable for 16 elements.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn widen_bf16(src: *const __m256i) -> __m512 {
    // SAFETY: 16 elements are 256 bits.
    let halves = unsafe { _mm256_loadu_si256(src) };
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
}

/// In integers, because the conversion of AVX512_BF16 flushes subnormals.
///
/// # Safety
/// `out` is writable for 16 elements.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn narrow_bf16(out: *mut __m256i, sums: __m512) {
    let bits = _mm512_castps_si512(sums);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    let rounded = _mm512_add_epi32(bits, half);
    let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(sums, sums);
    let quiet = _mm512_set1_epi32(0x0040_0000);
    let rounded = _mm512_mask_or_epi32(rounded, nan, bits, quiet);
    let halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded));
    // SAFETY: 16 elements are 256 bits.
    unsafe { _mm256_storeu_si256(out, halves) }
}

/// 16 whole numbers of at most 8 bits, divided; see `divisor`.
#[inline]
#[target_feature(enable = "avx512f")]
fn over_narrow(whole: __m512i, inverse: __m512) -> __m128i {
    let centered = _mm512_add_ps(_mm512_cvtepi32_ps(whole), _mm512_set1_ps(0.5));
    let floor = _mm512_roundscale_ps::<FLOOR>(_mm512_mul_ps(centered, inverse));
    _mm512_cvtepi32_epi8(_mm512_cvttps_epi32(floor))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn over_u8(sums: __m512i, inverse: __m512) -> __m512i {
    let quarter0 = _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32::<0>(sums));
    let quarter1 = _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32::<1>(sums));
    let quarter2 = _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32::<2>(sums));
    let quarter3 = _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32::<3>(sums));
    over_quarters([quarter0, quarter1, quarter2, quarter3], inverse)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn over_i8(sums: __m512i, inverse: __m512) -> __m512i {
    let quarter0 = _mm512_cvtepi8_epi32(_mm512_extracti32x4_epi32::<0>(sums));
    let quarter1 = _mm512_cvtepi8_epi32(_mm512_extracti32x4_epi32::<1>(sums));
    let quarter2 = _mm512_cvtepi8_epi32(_mm512_extracti32x4_epi32::<2>(sums));
    let quarter3 = _mm512_cvtepi8_epi32(_mm512_extracti32x4_epi32::<3>(sums));
    over_quarters([quarter0, quarter1, quarter2, quarter3], inverse)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn over_quarters(quarters: [__m512i; 4], inverse: __m512) -> __m512i {
    let result = _mm512_castsi128_si512(over_narrow(quarters[0], inverse));
    let result = _mm512_inserti32x4::<1>(result, over_narrow(quarters[1], inverse));
    let result = _mm512_inserti32x4::<2>(result, over_narrow(quarters[2], inverse));
    _mm512_inserti32x4::<3>(result, over_narrow(quarters[3], inverse))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn over_i32(sums: __m512i, inverse: __m512d) -> __m512i {
    let lower = over_i32_half(_mm512_castsi512_si256(sums), inverse);
    let upper = over_i32_half(_mm512_extracti64x4_epi64::<1>(sums), inverse);
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(lower), upper)
}

/// 8 whole numbers of 32 bits, divided; see `divisor`.
#[inline]
#[target_feature(enable = "avx512f")]
fn over_i32_half(whole: __m256i, inverse: __m512d) -> __m256i {
    let centered = _mm512_add_pd(_mm512_cvtepi32_pd(whole), _mm512_set1_pd(0.5));
    let floor = _mm512_roundscale_pd::<FLOOR>(_mm512_mul_pd(centered, inverse));
    _mm512_cvttpd_epi32(floor)
}

/// In general registers: vectors have no product of 128 bits.
#[inline]
#[target_feature(enable = "avx512f")]
fn over_i64(sums: __m512i, divisor: Floor64) -> __m512i {
    let mut whole = [0_i64; 8];
    // SAFETY: The array is as long as a register.
    unsafe { _mm512_storeu_si512(whole.as_mut_ptr().cast(), sums) };
    let whole = whole.map(|value| divisor.divide(value));
    // SAFETY: The mapped array has 8 words of 64 bits too, as many as the register.
    unsafe { _mm512_loadu_si512(whole.as_ptr().cast()) }
}
