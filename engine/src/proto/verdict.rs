//! Why a job is over, as the scheduler tells every node: data, from which each node makes the same
//! line for people and its callers read who, what and since when.

use super::messages::Stall;
use super::paths::{End, PathLoss, PathStall};
use super::unformed::Unformed;
use crate::base::{Epoch, Rank};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Why a job is over.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "why", rename_all = "snake_case")]
pub enum OverReason {
    /// All workers left in good order.
    Finished,
    /// A node's connection was lost or its heartbeats stopped.
    Died {
        /// The node.
        who: Origin,
        /// How the scheduler noticed.
        how: Sign,
        /// Rounds it had completed by its last heartbeat.
        rounds: u64,
    },
    /// To the node that `Died` names, if it can still be reached.
    Removed {
        /// As there.
        how: Sign,
    },
    /// A node ended with an error of its own.
    Failed {
        /// The node.
        who: Origin,
        /// Its line.
        message: String,
        /// The round in which it failed, if it was in one.
        #[serde(default)]
        round: Option<RoundOf>,
    },
    /// To whoever is left of an elastic job: the epoch is over, and whoever comes back is in the
    /// next one.
    Reforming {
        /// What ended the epoch.
        reason: Box<OverReason>,
        /// The next one.
        epoch: Epoch,
    },
    /// An elastic job has too few members left to go on.
    TooFew {
        /// What ended the epoch.
        reason: Box<OverReason>,
        /// Who is left, and how many there must be.
        left: String,
    },
    /// A lane broke and both of its ends are well.
    PathLost(PathLoss),
    /// Bytes that one node has sent did not reach another for longer than `BPS_STALL_TIMEOUT`.
    PathStalled {
        /// The oldest first.
        stalls: Vec<PathStall>,
    },
    /// A stall lasted longer than `BPS_STALL_TIMEOUT`.
    Stalled {
        /// The oldest first.
        stalls: Vec<Stall>,
    },
    /// Ranks wait for others that have left the job in good order and will not come.
    Abandoned {
        /// The oldest first.
        stalls: Vec<Stall>,
    },
    /// Nodes did not come in time, or what they were told about the job disagrees.
    NotFormed {
        /// What disagrees, or who is missing.
        cause: Unformed,
    },
}

impl OverReason {
    /// What ended the epoch, without what follows from it.
    #[must_use]
    pub fn cause(&self) -> &OverReason {
        match self {
            OverReason::Reforming { reason, .. } | OverReason::TooFew { reason, .. } => {
                reason.cause()
            }
            reason => reason,
        }
    }
}

/// The epoch goes on without ranks that died.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Shrunk {
    /// All of this epoch, in the order in which they were given up: at most
    /// [`GONE_MAX`](crate::limits::GONE_MAX).
    pub gone: Vec<Rank>,
    /// One line for people: who died last, and who is left.
    pub text: String,
}

/// A party of a job.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Party {
    /// A rank.
    Rank(Rank),
    /// The server with this index.
    Server(u32),
    /// The scheduler.
    Scheduler,
    /// A node that has no place in the job yet, by what it said of itself.
    Unplaced(String),
}

/// The party that a verdict is about, and where it runs.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Origin {
    /// Its place in the job.
    pub party: Party,
    /// Where it runs; `None` for the scheduler, or where that is not known.
    pub place: Option<Place>,
}

/// A process of the job.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Place {
    /// Host name.
    pub host: String,
    /// Process id there.
    pub pid: u32,
}

/// How the scheduler noticed that a node is gone.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sign {
    /// No heartbeat came for so long.
    Silent {
        /// For how long.
        milliseconds: u64,
    },
    /// Its connection ended, or it broke the protocol: what was seen, in one line.
    Seen(String),
}

/// One round of one tensor.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct RoundOf {
    /// Its name.
    pub tensor: String,
    /// Counted from 1.
    pub round: u64,
}

impl Origin {
    /// The scheduler.
    #[must_use]
    pub fn scheduler() -> Origin {
        Origin { party: Party::Scheduler, place: None }
    }
}

impl From<End> for Party {
    fn from(end: End) -> Party {
        match end {
            End::Rank(rank) => Party::Rank(rank),
            End::Server(index) => Party::Server(index),
        }
    }
}

impl fmt::Display for Party {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Party::Rank(rank) => rank.fmt(f),
            Party::Server(index) => write!(f, "server {index}"),
            Party::Scheduler => f.write_str("the scheduler"),
            Party::Unplaced(text) => f.write_str(text),
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            Some(Place { host, pid }) => write!(f, "{} (host {host}, pid {pid})", self.party),
            None => self.party.fmt(f),
        }
    }
}

impl fmt::Display for Sign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Sign::Silent { milliseconds } => {
                write!(f, "no heartbeat for {:.1} s", super::text::seconds(*milliseconds))
            }
            Sign::Seen(text) => f.write_str(text),
        }
    }
}

impl fmt::Display for RoundOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "round {} of `{}`", self.round, super::text::shorten(&self.tensor))
    }
}
