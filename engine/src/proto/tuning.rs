//! What scheduler and workers say to each other while a job finds its own settings: how large parts
//! are, and how many of them may be in flight.
//!
//! The scheduler tries one [`Point`] after the other ([`search`](super::search)), the first rank
//! tells how fast steps are with it. A credit is each worker's own and changes at once. Parts are
//! everybody's: before tensors are cut anew, every rank *holds* their next rounds and tells how
//! many it has begun, and the largest of these numbers is the last round with the old parts. So a
//! round has one cut on all ranks and servers, and none is lost or done twice. A job that does not
//! tune sends none of this.

use super::declaration::{Assignment, Declaration};
use super::uneven::Pushes;
use crate::base::word;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Fewest parts in flight if `BYTEPS_SCHEDULING_CREDIT` does not say.
const CREDIT_PARTS_MIN: u32 = 4;

/// What a job finds by itself. The same on all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Tuning {
    /// `BPS_TUNE_CREDIT`.
    pub credit: bool,
    /// `BPS_TUNE_PARTITION`.
    pub partition: bool,
    /// `BYTEPS_SCHEDULING_CREDIT`, from which it begins.
    pub credit_parts: u32,
}

impl Tuning {
    /// A job that is told all of its settings.
    pub const OFF: Tuning = Tuning { credit: false, partition: false, credit_parts: 0 };

    /// Whether nothing is tuned.
    #[must_use]
    pub fn is_off(&self) -> bool {
        !self.credit && !self.partition
    }
}

/// Parts that a worker with so many lanes to servers may have in flight, where the setting is
/// `parts`: 0 is one for each lane, so that every server has something to do.
#[must_use]
pub fn credit_parts(parts: u32, lanes: usize) -> u32 {
    if parts == 0 { word(lanes).max(CREDIT_PARTS_MIN) } else { parts }
}

/// Settings that can be tried.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Point {
    /// `BYTEPS_PARTITION_BYTES`.
    pub partition_bytes: u32,
    /// `BYTEPS_SCHEDULING_CREDIT`.
    pub credit_parts: u32,
}

impl Point {
    /// Bytes that a worker may have in flight.
    #[must_use]
    pub fn credit_bytes(&self) -> u64 {
        u64::from(self.partition_bytes) * u64::from(self.credit_parts)
    }
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Point { partition_bytes, credit_parts } = self;
        write!(
            f,
            "BYTEPS_PARTITION_BYTES={partition_bytes} BYTEPS_SCHEDULING_CREDIT={credit_parts}"
        )
    }
}

/// From a worker.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum TuneReport {
    /// From the first rank: how fast steps were.
    Paced {
        /// From `Apply`, or 0 for the settings with which the job began.
        trial: u32,
        /// Bytes of parts whose rounds ended, by the median step.
        bytes_per_second: f64,
    },
    /// Answer to `Recut`: it begins no further round of these tensors before `Apply`.
    Held {
        /// From `Recut`.
        trial: u32,
        /// How many rounds it has begun of each, in rising order of their numbers. One that it
        /// does not know is not here.
        rounds: Vec<Pushes>,
    },
}

/// From the scheduler to a worker.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum TuneOrder {
    /// Make room for further parts of these, and begin no further round of them. Answered by
    /// `Held`.
    Recut {
        /// To be returned.
        trial: u32,
        /// Servers know the parts.
        tensors: Vec<Recut>,
    },
    /// To all ranks: from now on this holds.
    Apply {
        /// Its number.
        trial: u32,
        /// Bytes that a worker may have in flight.
        credit_bytes: u64,
        /// The last round of each tensor with its old parts. Other tensors keep theirs.
        rounds: Vec<Pushes>,
    },
}

/// A tensor, and its parts to come.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Recut {
    /// What it is.
    pub said: Declaration,
    /// Which it is, and where its parts will live.
    pub assignment: Assignment,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_credit_that_is_not_set_keeps_every_lane_busy() {
        assert_eq!(
            [(0, 1), (0, 9), (1, 9)].map(|(set, lanes)| credit_parts(set, lanes)),
            [4, 9, 1]
        );
        let point = Point { partition_bytes: 1 << 20, credit_parts: 1 << 14 };
        assert_eq!(point.credit_bytes(), 1 << 34);
        let text = "BYTEPS_PARTITION_BYTES=1048576 BYTEPS_SCHEDULING_CREDIT=16384";
        assert_eq!(point.to_string(), text);
    }
}
