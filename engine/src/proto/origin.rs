//! Who a message to people is about, and where that runs.

use super::paths::End;
use crate::base::Rank;
use serde::{Deserialize, Serialize};
use std::fmt;

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
