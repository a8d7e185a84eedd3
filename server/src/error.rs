//! Why a server could not start, or how its job ended, each with what to do next.

#![forbid(unsafe_code)]

use bps_engine::metrics::MetricsError;

/// Why a server could not start, or how its job ended.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// A setting that only shows to be wrong when used.
    #[error("{0}")]
    Config(String),
    /// An address can't be listened on.
    #[error("can't listen on {address}: {error}; {remedy}")]
    Listen {
        /// Which.
        address: String,
        /// What the kernel said.
        error: std::io::Error,
        /// What to do.
        remedy: &'static str,
    },
    /// A thread, descriptor or memory is missing.
    #[error("{0}")]
    Resource(String),
    /// Metrics can't be shown where they should be.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    /// The scheduler can't be reached.
    #[error("{0}")]
    Scheduler(String),
    /// The job ended badly; what happened was said before.
    #[error("the job ended with an error")]
    Job,
    /// A core takes no commands.
    #[error(
        "core {core} has taken no command for {} s: a device or the kernel holds its thread; read \
         the kernel's log, and start this server again",
        waited.as_secs()
    )]
    CoreHangs {
        /// Its index in the server.
        core: u32,
        /// For how long a command was offered to it.
        waited: std::time::Duration,
    },
    /// A thread does not end.
    #[error(transparent)]
    StillRunning(#[from] bps_engine::harness::StillRunning),
    /// A signal ended this server.
    #[error("stopped by {0}")]
    Signal(&'static str),
}

/// Something of the machine is missing.
pub(crate) fn resource(what: &str, error: &dyn std::fmt::Display) -> ServerError {
    ServerError::Resource(format!("cannot allocate {what}: {error}"))
}
