//! Floor division by one divisor, many times, without a division instruction.
//!
//! Integer averages divide every element by the same small number, and a 64-bit division costs more
//! than all the rest of the loop. Two exact replacements are used by the vector kernels, each
//! proved here:
//!
//! - [`Floor64`] for i64: multiply by a rounded-up reciprocal, keep the upper half of the product,
//!   shift.
//! - For 8 and 32 bits, `floor((a + 0.5) / d)` in a float wide enough: since `a` is whole, this
//!   quotient is at least `0.5 / d` away from any whole number, on the side of the wanted one.
//!   [`reciprocal32`] (for 8-bit `a`, computed in f32) and [`reciprocal64`] (for 32-bit `a`,
//!   computed in f64) are wrong by at most 2 roundings and the product by one more, together under
//!   `|a + 0.5| / d * 2^-22` and `|a + 0.5| / d * 2^-51`: less than `2^-13 / d` and `2^-19 / d`, so
//!   the floor is right for every `a` and `d`.

#![forbid(unsafe_code)]

/// Divides i64 by a fixed positive number, towards minus infinity.
#[derive(Clone, Copy, Debug)]
pub(super) struct Floor64 {
    magic: u64,
    shift: u32,
}

impl Floor64 {
    /// Prepares divisions by `divisor`, which is positive.
    ///
    /// With `l = ceil(log2 d)` and `m = floor(2^(63+l) / d) + 1`, we have `2^(63+l) < m*d <=
    /// 2^(63+l) + 2^l`, and so `floor(n*m / 2^(63+l)) = floor(n/d)` for all `0 <= n < 2^63`. `m`
    /// fits 64 bits: `d > 2^(l-1)`, and `d` has 32 bits only.
    pub(super) fn new(divisor: u32) -> Floor64 {
        assert!(divisor > 0, "division by zero");
        let shift = u64::from(divisor).next_power_of_two().trailing_zeros();
        let magic = (1_u128 << (63 + shift)) / u128::from(divisor) + 1;
        let magic = u64::try_from(magic).expect("a divisor of 32 bits leaves room in 64");
        Floor64 { magic, shift }
    }

    /// `value / divisor`, rounded towards minus infinity.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation, reason = "the upper half of 128 bits is 64 bits")]
    #[allow(clippy::cast_sign_loss, reason = "the value has been made non-negative")]
    #[allow(clippy::cast_possible_wrap, reason = "a quotient of 63 bits stays one")]
    pub(super) fn divide(self, value: i64) -> i64 {
        // For negative a, floor(a/d) = !floor(!a/d), and !a is not negative.
        let sign = value >> 63;
        let doubled = ((value ^ sign) as u64) << 1;
        let upper = ((u128::from(doubled) * u128::from(self.magic)) >> 64) as u64;
        ((upper >> self.shift) as i64) ^ sign
    }
}

/// `1 / divisor` for 8-bit dividends; see the module.
#[allow(clippy::cast_precision_loss, reason = "counted in the module's bound")]
pub(super) fn reciprocal32(divisor: u32) -> f32 {
    1.0 / divisor as f32
}

/// `1 / divisor` for 32-bit dividends; see the module.
pub(super) fn reciprocal64(divisor: u32) -> f64 {
    1.0 / f64::from(divisor)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn floor64_at_the_edges() {
        let near = |x: i64| (-3..=3).map(move |step: i64| x.saturating_add(step));
        let divisors = [1, 2, 3, 5, 7, 10, 255, 256, 257, 4096, 1 << 31, (1 << 31) + 1, u32::MAX];
        for divisor in divisors {
            let d = i64::from(divisor);
            let floor = Floor64::new(divisor);
            for multiple in [0, 1, -1, i64::MAX / d, i64::MIN / d, (1 << 40) / d, 1 << 30] {
                for value in near(multiple.saturating_mul(d)) {
                    assert_eq!(floor.divide(value), value.div_euclid(d), "{value} / {d}");
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]
        #[test]
        fn floor64_is_floor(divisor in 1..=u32::MAX, shift in 0..64_u32, bits in any::<i64>()) {
            let value = bits >> shift;
            let expected = value.div_euclid(i64::from(divisor));
            prop_assert_eq!(Floor64::new(divisor).divide(value), expected);
        }

        #[test]
        fn floor64_by_small(divisor in 1..=4096_u32, value in any::<i64>()) {
            let expected = value.div_euclid(i64::from(divisor));
            prop_assert_eq!(Floor64::new(divisor).divide(value), expected);
        }
    }
}
