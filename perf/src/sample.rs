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
}
