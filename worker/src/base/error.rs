//! What can go wrong for a caller of the worker: which rank, server, tensor and round, since when
//! and why, as data. The line for people, with what to do next, is made from that data.

#![forbid(unsafe_code)]

mod details;
mod misfit;
mod over;
mod refusal;
mod start;

pub use details::Details;
pub use misfit::{Misfit, PartMisfit, Unasked};
pub use over::{Corruption, Death, Disagreement, PeerDied, RoundSeen};
pub use refusal::{Closed, Overdue, Refusal};
pub use start::{SettingError, StartError};

use bps_engine::proto::messages::{Mismatch, OverReason};
use std::fmt;
use std::sync::Arc;

/// An error of the worker. Its text is one line for people; [`details`](Error::details) gives its
/// data in one form for all variants.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[allow(clippy::error_impl_error, reason = "it is the one error of this crate")]
pub enum Error {
    /// A setting is missing or impossible.
    #[error(transparent)]
    Config(#[from] SettingError),
    /// The job could not be joined.
    #[error(transparent)]
    Start(#[from] StartError),
    /// Ranks disagree about a tensor.
    #[error("{0}")]
    Mismatch(Arc<Mismatch>),
    /// Ranks have pushed one round for different things.
    #[error(transparent)]
    Disagree(Box<Disagreement>),
    /// A node of the job died, so the job is over.
    #[error(transparent)]
    PeerDied(Box<PeerDied>),
    /// Bytes changed on their way between two nodes, or somebody between them changed them.
    #[error(transparent)]
    Corrupt(Box<Corruption>),
    /// A round waited until the deadline for somebody, or for bytes on a path, so the job is over:
    /// one of [`OverReason::Stalled`], [`OverReason::Abandoned`] and [`OverReason::PathStalled`].
    #[error("{0}")]
    Stalled(Arc<OverReason>),
    /// The call's own deadline passed.
    #[error(transparent)]
    Timeout(#[from] Overdue),
    /// The scheduler, a server or this rank itself refused a request.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// This worker has left the job.
    #[error(transparent)]
    Closed(#[from] Closed),
}

impl From<PeerDied> for Error {
    fn from(died: PeerDied) -> Error {
        Error::PeerDied(Box::new(died))
    }
}

impl From<Corruption> for Error {
    fn from(corruption: Corruption) -> Error {
        Error::Corrupt(Box::new(corruption))
    }
}

/// The error below one of ours, with its type erased. Two are equal if they read the same.
#[derive(Clone, Debug)]
pub struct Source(Arc<dyn std::error::Error + Send + Sync>);

impl Source {
    /// The source of an error.
    pub fn new(error: impl std::error::Error + Send + Sync + 'static) -> Source {
        Source(Arc::new(error))
    }

    /// The error itself, to be downcast.
    #[must_use]
    pub fn get(&self) -> &(dyn std::error::Error + Send + Sync + 'static) {
        &*self.0
    }
}

impl PartialEq for Source {
    fn eq(&self, other: &Source) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.0.to_string() == other.0.to_string()
    }
}

impl Eq for Source {}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Source {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}
