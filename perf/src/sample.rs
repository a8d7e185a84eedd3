//! Times several things in turn, so that what the machine does meanwhile touches all of them.
//!
//! Invariant: every contender is run once before it is timed, once in every round, and in an order
//! that turns with the round.

#![forbid(unsafe_code)]

use std::time::Instant;

/// What one thing gave in each round.
#[derive(Clone, Default, Debug)]
pub struct Series(pub Vec<f64>);

impl Series {
    /// The value in the middle.
    pub fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        if sorted.len().is_multiple_of(2) {
            f64::midpoint(sorted[middle - 1], sorted[middle])
        } else {
            sorted[middle]
        }
    }

    /// The value below which this share of the values lies (nearest rank).
    pub fn quantile(&self, share: f64) -> f64 {
        let mut sorted = self.0.clone();
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

    /// How far apart the rounds were: the distance of the quartiles, over the median.
    pub fn spread(&self) -> f64 {
        (self.quantile(0.75) - self.quantile(0.25)) / self.median()
    }
}

/// Seconds of one call of each contender, by round. A sample makes `repeats` calls.
pub fn interleaved<const N: usize>(
    rounds: usize,
    repeats: usize,
    contenders: [&mut dyn FnMut(); N],
) -> [Series; N] {
    assert!(rounds > 0 && repeats > 0, "a measurement has at least one round and one repeat");
    let mut samples = [const { Series(Vec::new()) }; N];
    for round in 0..rounds {
        for turn in 0..N {
            let index = (round + turn) % N;
            contenders[index]();
            let start = Instant::now();
            for _ in 0..repeats {
                contenders[index]();
            }
            #[allow(clippy::cast_precision_loss, reason = "counts of repeats are small")]
            samples[index].0.push(start.elapsed().as_secs_f64() / repeats as f64);
        }
    }
    samples
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

/// CPUs that this process may use.
pub fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Bytes of this process that are in RAM now; 0 where the kernel does not say.
pub fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = text.split_whitespace().nth(1).and_then(|word| word.parse().ok()).unwrap_or(0);
    pages * rustix::param::page_size() as u64
}

/// Processor time of all threads of this process, the kernel's part included.
pub fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    #[allow(clippy::cast_precision_loss, reason = "seconds of a measurement")]
    let seconds = time.tv_sec as f64 + time.tv_nsec as f64 / 1e9;
    seconds
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(Series(vec![3.0, 1.0, 2.0]).median(), 2.0);
        assert_eq!(Series(vec![4.0, 1.0, 2.0, 3.0]).median(), 2.5);
    }

    #[test]
    fn every_contender_runs_equally_often() {
        let (mut first, mut second) = (0, 0);
        let series = interleaved(3, 2, [&mut || first += 1, &mut || second += 1]);
        assert!(series.iter().all(|one| one.0.len() == 3));
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
        let values = Series(vec![5.0, 1.0, 3.0, 2.0, 4.0]);
        assert_eq!(values.quantile(0.0), 1.0);
        assert_eq!(values.quantile(0.5), 3.0);
        assert_eq!(values.quantile(0.99), 5.0);
        assert_eq!(values.spread(), 2.0 / 3.0);
    }
}
