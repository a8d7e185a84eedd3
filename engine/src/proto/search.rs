//! Which settings are tried next, from what those before have moved.
//!
//! A descent along one coordinate after the other, in steps of a factor: from the better of where
//! the job began and the default, each setting is raised and then lowered as long as that gains.
//! The rate over either setting rises, is level for a decade or two, and falls; so few points find
//! the level, and where all is level the search stays at the default. `docs/decisions.md` says why
//! it is no Gaussian process.
//!
//! Invariant: what is tried next follows from what was measured alone, and every move raises the
//! rate, so the search ends.

use super::tuning::{Point, Tuning};
use crate::base::word;
use crate::limits::{ALIGNMENT, PART_BYTES_MAX, PART_BYTES_MIN};
use std::collections::BTreeMap;

/// The factor between neighbours.
const STEP: u32 = 4;
/// A neighbour is better if it is faster by this factor: less is noise.
const GAIN: f64 = 1.03;
/// Points that are tried at most.
const TRIALS_MAX: usize = 12;
/// The partition from which most links are full: the default of the settings.
const PARTITION_USUAL: u32 = 256 << 10;
/// The largest `BYTEPS_SCHEDULING_CREDIT`.
const CREDIT_PARTS_MAX: u32 = 65_536;
/// What is in flight can't be overtaken: more than this helps no link that we know.
const CREDIT_BYTES_MAX: u64 = 256 << 20;

/// See the [module](self).
#[derive(Debug)]
pub struct Search {
    tuning: Tuning,
    start: Point,
    /// Where a job begins that sets nothing.
    usual: Point,
    /// What was measured, bytes a second.
    seen: BTreeMap<Point, f64>,
}

/// Which setting, and whether it grows.
const DIRECTIONS: [(bool, bool); 4] = [(true, true), (true, false), (false, true), (false, false)];

impl Search {
    /// From where a job begins; `credit_parts` is the default of its credit.
    #[must_use]
    pub fn new(tuning: Tuning, start: Point, credit_parts: u32) -> Search {
        let partition_bytes =
            if tuning.partition { PARTITION_USUAL } else { start.partition_bytes };
        let credit_parts = if tuning.credit { credit_parts } else { start.credit_parts };
        let usual = Point { partition_bytes, credit_parts };
        Search { tuning, start, usual, seen: BTreeMap::new() }
    }

    /// A point has moved so many bytes a second; 0 if it can't be tried.
    pub fn tell(&mut self, point: Point, bytes_per_second: f64) {
        let rate = if bytes_per_second.is_finite() { bytes_per_second.max(0.0) } else { 0.0 };
        self.seen.insert(point, rate);
    }

    /// How many points were measured.
    #[must_use]
    pub fn trials(&self) -> usize {
        self.seen.len()
    }

    /// The fastest that was measured.
    #[must_use]
    pub fn fastest(&self) -> Option<(Point, f64)> {
        let all = self.seen.iter().map(|(&point, &rate)| (point, rate));
        all.max_by(|one, other| one.1.total_cmp(&other.1))
    }

    /// What is to be tried next, or what the search has come to.
    ///
    /// # Errors
    /// Nothing more is to be tried: the point to stay at.
    pub fn next(&self) -> Result<Point, Point> {
        for point in [self.start, self.usual] {
            if !self.seen.contains_key(&point) {
                return Ok(point);
            }
        }
        let is_usual_better = self.seen[&self.usual] >= self.seen[&self.start];
        let mut best = if is_usual_better { self.usual } else { self.start };
        loop {
            let before = best;
            for direction in DIRECTIONS {
                while let Some(next) = self.neighbour(best, direction) {
                    match self.seen.get(&next) {
                        None if self.seen.len() >= TRIALS_MAX => return Err(best),
                        None => return Ok(next),
                        Some(&rate) if rate > self.seen[&best] * GAIN => best = next,
                        Some(_) => break,
                    }
                }
            }
            if best == before {
                return Err(best);
            }
        }
    }

    /// A step from a point, unless it leaves what is allowed. The credit is in parts, so that it
    /// grows and shrinks with them.
    fn neighbour(&self, from: Point, (of_partition, grows): (bool, bool)) -> Option<Point> {
        let is_tuned = if of_partition { self.tuning.partition } else { self.tuning.credit };
        let step = |value: u32| if grows { value.checked_mul(STEP) } else { Some(value / STEP) };
        let mut to = from;
        if of_partition {
            let bytes =
                step(from.partition_bytes)?.clamp(word(PART_BYTES_MIN), word(PART_BYTES_MAX));
            to.partition_bytes = bytes - bytes % word(ALIGNMENT);
        } else {
            to.credit_parts = step(from.credit_parts)?.clamp(1, CREDIT_PARTS_MAX);
        }
        let fits = !grows || to.credit_bytes() <= CREDIT_BYTES_MAX;
        (is_tuned && to != from && fits).then_some(to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: Tuning = Tuning { credit: true, partition: true, credit_parts: 1 };

    /// A link of so many bytes a second and its delay, a cost for each part at both ends, and 16
    /// MiB of tensor: a part is under way for its own time and the delay, a credit's worth of them
    /// at once, and the first and the last part have the way to themselves.
    struct Curve {
        line: f64,
        delay: f64,
        part: f64,
    }

    const BYTES: f64 = 16e6;

    impl Curve {
        fn rate(&self, point: Point) -> f64 {
            let part = f64::from(point.partition_bytes).min(BYTES);
            let each = part / self.line + self.part;
            let window = f64::from(point.credit_parts) * each;
            let waits = (each + self.delay).max(window) / window;
            let time = BYTES / part * each * waits + self.delay + part / self.line;
            // An endless credit overflows the queue of a link.
            let lost = 1.0 + point.credit_bytes() as f64 / 1e9;
            BYTES / (time * lost)
        }

        fn best(&self) -> f64 {
            let partitions = (12..=26).map(|bits| 1u32 << bits);
            let points = partitions.flat_map(|partition_bytes| {
                let credits = [1, 2, 4, 8, 16, 64];
                credits.map(|credit_parts| Point { partition_bytes, credit_parts })
            });
            points.map(|point| self.rate(point)).fold(0.0, f64::max)
        }
    }

    /// The links of the issue: 100 Mbit/s, 1 and 10 Gbit/s; and 100 Gbit/s.
    const CURVES: [Curve; 4] = [
        Curve { line: 12.5e6, delay: 2e-3, part: 15e-6 },
        Curve { line: 125e6, delay: 300e-6, part: 15e-6 },
        Curve { line: 1.25e9, delay: 100e-6, part: 15e-6 },
        Curve { line: 12.5e9, delay: 30e-6, part: 5e-6 },
    ];

    /// Between -1 and 1, the same in every run.
    fn noise(state: &mut u64) -> f64 {
        *state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        f64::from(word(usize::try_from(*state >> 40).unwrap())) / f64::from(1 << 23) - 1.0
    }

    /// Where a search ends, and how many points it took.
    fn found(
        curve: &Curve,
        tuning: Tuning,
        start: Point,
        spread: f64,
        seed: u64,
    ) -> (Point, usize) {
        let (mut search, mut state) = (Search::new(tuning, start, 4), seed);
        loop {
            match search.next() {
                Ok(point) => {
                    assert!(!search.seen.contains_key(&point), "{point} is tried twice");
                    let rate = curve.rate(point) * (1.0 + spread * noise(&mut state));
                    search.tell(point, rate);
                }
                Err(point) => return (point, search.trials()),
            }
        }
    }

    #[test]
    fn bad_starts_come_within_a_twentieth_of_the_best_of_a_grid() {
        for (which, curve) in CURVES.iter().enumerate() {
            for partition_bytes in [4 << 10, 64 << 20] {
                let start = Point { partition_bytes, credit_parts: 1 };
                assert!(curve.rate(start) < 0.9 * curve.best(), "{which}: {start} is no bad start");
                let (point, trials) = found(curve, BOTH, start, 0.0, 1);
                let share = curve.rate(point) / curve.best();
                assert!(share >= 0.95, "{which}: {start} -> {point}: {share:.3}");
                // Five rounds of each are 60 in all.
                assert!(trials <= TRIALS_MAX, "{which}: {trials} trials");
            }
        }
    }

    #[test]
    fn noise_of_a_hundredth_does_not_lead_it_astray() {
        let mut shares = Vec::new();
        for (curve, seed) in CURVES.iter().flat_map(|one| (1..=50).map(move |seed| (one, seed))) {
            let start = Point { partition_bytes: 4 << 10, credit_parts: 1 };
            let (point, _) = found(curve, BOTH, start, 0.01, seed);
            shares.push(curve.rate(point) / curve.best());
        }
        shares.sort_by(f64::total_cmp);
        assert!(shares[shares.len() / 20] >= 0.95, "a twentieth is below {}", shares[10]);
        assert!(shares[0] >= 0.9, "the worst: {}", shares[0]);
    }

    #[test]
    fn what_is_not_tuned_stays() {
        let curve = &CURVES[1];
        let start = Point { partition_bytes: 64 << 10, credit_parts: 1 };
        let (point, _) = found(curve, Tuning { partition: false, ..BOTH }, start, 0.0, 1);
        assert_eq!(point.partition_bytes, start.partition_bytes);
        assert!(point.credit_parts > 1 && curve.rate(point) > curve.rate(start));
        let (point, _) = found(curve, Tuning { credit: false, ..BOTH }, start, 0.0, 1);
        assert_eq!(point.credit_parts, 1);
        assert!(curve.rate(point) >= curve.rate(start));
    }

    #[test]
    fn where_all_is_level_it_stays_at_the_default_and_what_is_refused_is_left() {
        let mut search = Search::new(BOTH, Point { partition_bytes: 4096, credit_parts: 1 }, 4);
        let (mut trials, usual) = (0, search.usual);
        let end = loop {
            match search.next() {
                Ok(point) => search.tell(point, if point == search.start { f64::NAN } else { 5e9 }),
                Err(end) => break end,
            }
            trials += 1;
        };
        assert_eq!((end, trials), (usual, 6));
    }
}
