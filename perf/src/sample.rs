//! Times several things in turn, so that what the machine does meanwhile touches all of them.
//!
//! Invariant: every contender is run once before it is timed, once in every round, and in an order
//! that turns with the round; its figure is the median over the rounds.

use std::time::Instant;

/// Median seconds of one call of each contender. A sample makes `repeats` calls.
pub fn interleaved<const N: usize>(
    rounds: usize,
    repeats: usize,
    contenders: [&mut dyn FnMut(); N],
) -> [f64; N] {
    assert!(rounds > 0 && repeats > 0, "a measurement has at least one round and one repeat");
    let mut samples = [const { Vec::new() }; N];
    for round in 0..rounds {
        for turn in 0..N {
            let index = (round + turn) % N;
            contenders[index]();
            let start = Instant::now();
            for _ in 0..repeats {
                contenders[index]();
            }
            samples[index].push(start.elapsed().as_secs_f64());
        }
    }
    #[allow(clippy::cast_precision_loss, reason = "counts of repeats are small")]
    samples.map(|mut seconds| median(&mut seconds) / repeats as f64)
}

/// Largest size that is measured.
const SIZE_BYTES_MAX: usize = 1 << 32;

/// Bytes, as people write them.
pub fn parse_size(text: &str) -> Result<usize, String> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let scale: usize = match &text[digits.len()..] {
        "" | "B" => 1,
        "K" | "KiB" => 1 << 10,
        "M" | "MiB" => 1 << 20,
        "G" | "GiB" => 1 << 30,
        unit => return Err(format!("unknown unit {unit:?}: use K, M or G")),
    };
    let number: usize = digits.parse().map_err(|error| format!("{digits:?}: {error}"))?;
    let size = number.checked_mul(scale).filter(|size| (1..=SIZE_BYTES_MAX).contains(size));
    size.ok_or_else(|| format!("from 1 byte to {SIZE_BYTES_MAX}"))
}

/// The value below which this share of the values lies (nearest rank).
pub fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    #[allow(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "an index into a short list, not negative"
    )]
    let index = (share * sorted.len() as f64).ceil() as usize;
    sorted[index.clamp(1, sorted.len()) - 1]
}

/// Processor time of all threads of this process, the kernel's part included.
pub fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    #[allow(clippy::cast_precision_loss, reason = "seconds of a measurement")]
    let seconds = time.tv_sec as f64 + time.tv_nsec as f64 / 1e9;
    seconds
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len().is_multiple_of(2) {
        f64::midpoint(values[middle - 1], values[middle])
    } else {
        values[middle]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut [4.0, 1.0, 2.0, 3.0]), 2.5);
    }

    #[test]
    fn every_contender_runs_equally_often() {
        let (mut first, mut second) = (0, 0);
        interleaved(3, 2, [&mut || first += 1, &mut || second += 1]);
        assert_eq!((first, second), (9, 9));
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!(parse_size("64K"), Ok(65_536));
        assert_eq!(parse_size("1MiB"), Ok(1 << 20));
        assert_eq!(parse_size("1000"), Ok(1000));
        for wrong in ["", "0", "1T", "x", "-1", "9999999999G", "1.5M"] {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn quantiles_are_values_that_were_seen() {
        let values = [5.0, 1.0, 3.0, 2.0, 4.0];
        assert_eq!(quantile(&values, 0.0), 1.0);
        assert_eq!(quantile(&values, 0.5), 3.0);
        assert_eq!(quantile(&values, 0.99), 5.0);
    }
}
