//! What can go wrong for a caller of the worker, each with what, who and what to do next.

/// An error of the worker. Its text is one line for people.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[allow(clippy::error_impl_error, reason = "it is the one error of this crate")]
pub enum Error {
    /// A setting is missing or impossible.
    #[error("{0}")]
    Config(String),
    /// The job could not be joined.
    #[error("{0}")]
    Start(String),
    /// Ranks disagree about a tensor.
    #[error("{0}")]
    Mismatch(String),
    /// A node of the job died, so the job is over.
    #[error("{0}")]
    PeerDied(String),
    /// Bytes changed on their way between two nodes, or somebody between them changed them.
    #[error("{0}")]
    Corrupt(String),
    /// A round waited for somebody until the deadline, so the job is over.
    #[error("{0}")]
    Stalled(String),
    /// The call's own deadline passed.
    #[error("{0}")]
    Timeout(String),
    /// The scheduler or a server refused a request.
    #[error("{0}")]
    Refused(String),
    /// This worker has left the job.
    #[error("{0}")]
    Closed(String),
}
