//! The conversions of the half types, as exhaustively as time allows.

#![forbid(unsafe_code)]

use super::{Call, Case, every_kernels};
use crate::base::DType;

/// Every pattern of the half types, widened by every kernel.
#[test]
fn every_half_widens() {
    let src: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let acc = vec![0; src.len() * 2];
    for dtype in [DType::F16, DType::BF16] {
        let case = Case::new(dtype, Call::Store, &acc, &src, 1);
        case.check_all();
    }
}

/// Narrows these by every kernel, and compares with the `half` crate.
fn check_narrowing(dtype: DType, values: &[u32]) {
    let acc: Vec<u8> = values.iter().copied().flat_map(u32::to_le_bytes).collect();
    let src = vec![0; values.len() * 2];
    let case = Case { in_place: true, ..Case::new(dtype, Call::Finish, &acc, &src, 1) };
    let expected: Vec<u8> = values
        .iter()
        .flat_map(|bits| match dtype {
            DType::F16 => half::f16::from_f32(f32::from_bits(*bits)).to_le_bytes(),
            _ => half::bf16::from_f32(f32::from_bits(*bits)).to_le_bytes(),
        })
        .collect();
    every_kernels().iter().for_each(|kernels| case.check(kernels, &expected));
}

/// Every f16 and bf16, the tie above each, and the f32 on both sides of the tie and of the value.
#[test]
fn every_tie_narrows_to_even() {
    for sign in [0, 1 << 31] {
        let around = |value: f32| {
            let bits = value.to_bits();
            [bits.saturating_sub(1) | sign, bits | sign, (bits + 1) | sign]
        };
        let f16: Vec<u32> = (0..0x7c00_u16)
            .flat_map(|bits| {
                let low = half::f16::from_bits(bits).to_f32();
                // Past the largest, the next step is where the exponent would go on.
                let next = half::f16::from_bits(bits + 1).to_f32();
                let high = if next.is_infinite() { 65_536.0 } else { next };
                around(low).into_iter().chain(around(f32::midpoint(low, high)))
            })
            .collect();
        check_narrowing(DType::F16, &f16);
        let bf16: Vec<u32> = (0..=0x7fff_u32)
            .flat_map(|upper| {
                [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff].map(|lower| upper << 16 | lower | sign)
            })
            .collect();
        check_narrowing(DType::BF16, &bf16);
    }
}

/// Every sign, exponent and upper mantissa, with the lower bits that matter: NaN, infinities,
/// overflow, subnormals.
#[test]
fn every_exponent_narrows() {
    for lower in [0, 1, 0xfff, 0x1000, 0x1001, 0x1fff] {
        let values: Vec<u32> = (0..1 << 19).map(|upper: u32| upper << 13 | lower).collect();
        check_narrowing(DType::F16, &values);
        check_narrowing(DType::BF16, &values);
    }
}

/// All 2^32 values of f32; takes minutes without optimisation.
#[test]
#[ignore = "exhaustive: run it in release after a change to narrowing"]
fn every_f32_narrows() {
    for upper in 0..1 << 12_u32 {
        let values: Vec<u32> = (0..1 << 20_u32).map(|lower| upper << 20 | lower).collect();
        check_narrowing(DType::F16, &values);
        check_narrowing(DType::BF16, &values);
    }
}
