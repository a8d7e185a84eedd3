//! What nodes tell each other of time: the clock that they compare theirs with, and which rounds
//! they record.

use serde::{Deserialize, Serialize};

/// What a timeline records, and where.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Timeline {
    /// Folder of its files.
    pub folder: String,
    /// First round of each key in it.
    pub first_round: u64,
    /// Last round of each key in it.
    pub last_round: u64,
}

/// What the scheduler's clock said.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ClockAnswer {
    /// From the question.
    pub sent_ns: u64,
    /// The scheduler's monotonic clock, nanoseconds.
    pub now_ns: u64,
    /// What has to be added to it for nanoseconds since 1970; the same in every answer of a job.
    pub to_unix_ns: u64,
    /// Nodes with the same text have the same monotonic clock as the scheduler.
    pub domain: String,
}
