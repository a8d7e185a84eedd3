//! Why a server could not start, or how its job ended, each with what to do next.

#![forbid(unsafe_code)]

use bps_engine::control::{DialError, JobKeyError, LinkError};
use bps_engine::host::HostError;
use bps_engine::lane::BuildError;
use bps_engine::mem::MemoryError;
use bps_engine::metrics::MetricsError;
use std::time::Duration;

/// What the kernel, a library or a device said.
type Source = Box<dyn std::error::Error + Send + Sync>;

/// Why a server could not start, or how its job ended.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The job key can't be read.
    #[error(transparent)]
    Key(#[from] JobKeyError),
    /// No address to listen on is known.
    #[error(transparent)]
    Address(HostError),
    /// There are not so many ports.
    #[error("DMLC_PORT={first}: with {cores} cores the last port is over 65535")]
    Ports {
        /// The first core's port.
        first: u16,
        /// The server's cores.
        cores: u32,
    },
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
    /// A thread or a descriptor is missing.
    #[error("cannot allocate {what}: {source}")]
    Resource {
        /// What.
        what: &'static str,
        /// Why.
        source: Source,
    },
    /// There are no addresses for the memory of a core.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A core has no transport.
    #[error(transparent)]
    Transport(#[from] BuildError),
    /// RDMA is demanded, and no device can be used.
    #[error("RDMA is demanded: {0}")]
    Rdma(#[source] Source),
    /// Metrics can't be shown where they should be.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    /// The scheduler can't be reached.
    #[error(transparent)]
    NoScheduler(DialError),
    /// The connection to the scheduler failed before this server was known there.
    #[error(transparent)]
    SchedulerLost(#[from] LinkError),
    /// The scheduler answers and the job does not form.
    #[error(
        "the job did not form within {} s (BPS_START_TIMEOUT), and the scheduler at {scheduler} \
         says nothing: see that it runs",
        waited.as_secs_f64()
    )]
    NotFormed {
        /// The limit that has passed.
        waited: Duration,
        /// The scheduler's address.
        scheduler: String,
    },
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
        waited: Duration,
    },
    /// A thread does not end.
    #[error(transparent)]
    StillRunning(#[from] bps_engine::harness::StillRunning),
    /// A signal ended this server.
    #[error("stopped by {0}")]
    Signal(&'static str),
}

impl ServerError {
    /// The code for the operating system.
    #[must_use]
    pub fn code(&self) -> i32 {
        match self {
            ServerError::Key(_)
            | ServerError::Address(_)
            | ServerError::Ports { .. }
            | ServerError::Metrics(_) => 2,
            ServerError::Signal("SIGTERM") => 143,
            ServerError::Signal(_) => 130,
            _ => 1,
        }
    }
}

/// Something of the machine is missing.
pub(crate) fn resource(
    what: &'static str,
    error: impl std::error::Error + Send + Sync + 'static,
) -> ServerError {
    ServerError::Resource { what, source: Box::new(error) }
}
