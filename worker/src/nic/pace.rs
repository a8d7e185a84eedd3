//! How fast steps are, for a job that tunes itself.
//!
//! The engine is not told where a step begins. It is over when a tensor ends a further round: in a
//! step each tensor has one. What is told is the median of a few, so that a step in which the
//! machine did something else does not count. What was under way when other settings came is left
//! out, and so is the step that began with it.

#![forbid(unsafe_code)]

use crate::rounds::PartOf;
use bps_engine::proto::tuning::TuneReport;
use std::time::Duration;

/// Steps that are left out, beside the one that was under way.
const LEFT_OUT: u32 = 1;
/// Fewest steps that are measured.
const STEPS_MIN: usize = 3;
/// Most steps that are measured: steps so short are many in little time.
const STEPS_MAX: usize = 25;
/// Shortest time over which steps are measured, if they are not that many.
const TIME_MIN: Duration = Duration::from_millis(50);

/// See the [module](self).
#[derive(Default)]
pub(super) struct Pace {
    trial: u32,
    /// Steps since then, the one under way included.
    steps: u32,
    /// By tensor: the step in which it last ended a round.
    ended: Vec<u32>,
    /// When the step under way began: with the end of the one before.
    began: Duration,
    bytes: u64,
    /// Bytes a second of the steps that count.
    rates: Vec<f64>,
    measured: Duration,
    has_told: bool,
}

impl Pace {
    /// These settings hold from now on.
    pub(super) fn begin(&mut self, trial: u32) {
        self.ended.fill(0);
        self.rates.clear();
        (self.trial, self.steps, self.bytes) = (trial, 0, 0);
        (self.measured, self.has_told) = (Duration::ZERO, false);
    }

    /// A round of a part of so many bytes has ended. Returns what is to be told, once.
    pub(super) fn ended(&mut self, of: PartOf, bytes: usize, now: Duration) -> Option<TuneReport> {
        if self.has_told {
            return None;
        }
        let mut told = None;
        if of.index == 0 {
            let tensor = of.tensor as usize;
            if self.ended.len() <= tensor {
                self.ended.resize(tensor + 1, 0);
            }
            if self.steps == 0 || self.ended[tensor] == self.steps {
                told = self.step(now);
            }
            debug_assert!(self.ended[tensor] <= self.steps, "no tensor is ahead of the step");
            self.ended[tensor] = self.steps;
        }
        self.bytes += bytes as u64;
        told
    }

    /// A step is over, and the next one begins.
    fn step(&mut self, now: Duration) -> Option<TuneReport> {
        let took = now.saturating_sub(self.began);
        if self.steps > LEFT_OUT && !took.is_zero() {
            #[allow(clippy::cast_precision_loss, reason = "far below 2^53")]
            let bytes = self.bytes as f64;
            self.rates.push(bytes / took.as_secs_f64());
            self.measured += took;
        }
        self.steps += 1;
        (self.began, self.bytes) = (now, 0);
        let count = self.rates.len();
        if count < STEPS_MIN || count < STEPS_MAX && self.measured < TIME_MIN {
            return None;
        }
        assert!(count <= STEPS_MAX && count < self.steps as usize, "a rate is of one step");
        self.has_told = true;
        self.rates.sort_by(f64::total_cmp);
        Some(TuneReport::Paced { trial: self.trial, bytes_per_second: self.rates[count / 2] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ends a round of three tensors, the second of which has two parts of 50 bytes.
    fn step(pace: &mut Pace, at_ms: u64, took_ms: u64) -> Option<TuneReport> {
        let mut told = None;
        for (number, (tensor, index)) in (0..).zip([(7, 0), (2, 1), (2, 0), (4, 0)]) {
            let now = Duration::from_millis(at_ms + took_ms * number / 4);
            told = told.or(pace.ended(PartOf { tensor, index }, 50, now));
        }
        told
    }

    #[test]
    fn the_median_of_whole_steps_is_told_once() {
        let mut pace = Pace::default();
        let (mut at, mut told) = (0, Vec::new());
        // One step in between is ten times as long.
        for took in [5, 20, 20, 200, 20, 20, 20, 20, 20] {
            told.extend(step(&mut pace, at, took));
            at += took;
        }
        let paced = |trial, bytes_per_second| TuneReport::Paced { trial, bytes_per_second };
        assert_eq!(told, [paced(0, 10_000.0)]);
        pace.begin(3);
        let mut steps = 0;
        let found = loop {
            steps += 1;
            if let Some(told) = step(&mut pace, at, 40) {
                break told;
            }
            at += 40;
        };
        assert_eq!((found, steps), (paced(3, 5_000.0), 5));
    }

    #[test]
    fn short_steps_are_many() {
        let mut pace = Pace::default();
        let steps = (0..).position(|at| step(&mut pace, at, 1).is_some());
        assert_eq!(steps, Some(STEPS_MAX + LEFT_OUT as usize));
    }
}
