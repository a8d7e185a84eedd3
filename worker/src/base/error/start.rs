//! Why a worker could not join a job, or not with these settings.

use super::Source;
use crate::cuda::{GpuError, nccl_version};
use bps_engine::base::{CoreId, Rank};
use bps_engine::proto::messages::{Origin, OverReason};
use bps_engine::proto::pulse::SchedulerSilent;
use std::sync::Arc;
use std::time::Duration;

/// A setting is missing or impossible.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SettingError {
    /// A setting cannot be read, or has an impossible value.
    #[error(transparent)]
    Invalid(Source),
    /// This rank demands RDMA, and a server has none.
    #[error(
        "RDMA is demanded (BPS_TRANSPORT=rdma or DMLC_ENABLE_RDMA=1), but {core} on host {host} \
         has none: its own log says why; set it there as well, or use auto here"
    )]
    NoRdma {
        /// The core of the server.
        core: CoreId,
        /// The server's host.
        host: String,
    },
    /// This rank demands shared memory, and a server does not offer it here.
    #[error(
        "BPS_TRANSPORT=shm, but {core} is on host {host}, not on this one, or offers no shared \
         memory; use auto or tcp"
    )]
    NoSharedMemory {
        /// The core of the server.
        core: CoreId,
        /// The server's host.
        host: String,
    },
    /// A tensor is on another GPU than the one that this process has opened.
    #[error(
        "this process uses GPU {open}, and a tensor is on GPU {asked}: a process has one GPU; \
         start one process for each"
    )]
    SecondGpu {
        /// The GPU that is open.
        open: u32,
        /// The tensor's.
        asked: u32,
    },
    /// Two ranks of a host have different numbers of NCCL's rings.
    #[error(
        "{} and {} are on one host and have BYTEPS_NCCL_NUM_RINGS={} and {}: set the same on all \
         ranks of a host",
        ranks[0], ranks[1], rings[0], rings[1]
    )]
    RingsDiffer {
        /// The ranks.
        ranks: [Rank; 2],
        /// What each has.
        rings: [u32; 2],
    },
}

/// Why the job could not be joined.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum StartError {
    /// This machine lacks something: a thread, a descriptor, memory, a device.
    #[error("{what}: {source}")]
    Resource {
        /// What could not be had or set up.
        what: &'static str,
        /// What the kernel or the device says.
        source: Source,
    },
    /// A thread of this process ended before its work was done; it has said why.
    #[error("the thread that {task} has ended early")]
    ThreadEnded {
        /// What it was to do.
        task: &'static str,
    },
    /// A thread of this process does not say whether it could start.
    #[error(
        "the thread that {task} has not started within {} s: a device or the kernel holds it; read \
         the kernel's log",
        waited.as_secs()
    )]
    ThreadSilent {
        /// What it is to do.
        task: &'static str,
        /// For how long this was waited for.
        waited: Duration,
    },
    /// The other ranks of this host have no socket to connect to.
    #[error(
        "can't listen for the other ranks of this host on a unix socket: {source}; \
         BPS_LOCAL_REDUCE=0 on every worker does without"
    )]
    Listen {
        /// What the kernel says.
        source: Source,
    },
    /// Nobody answered at the scheduler's address, or not a scheduler of this job.
    #[error(transparent)]
    NoScheduler(Source),
    /// The connection to the scheduler failed before the job had formed.
    #[error("the scheduler was lost while the job formed: {source}")]
    SchedulerLost {
        /// How.
        source: Source,
    },
    /// The scheduler stopped answering before the job had formed.
    #[error(transparent)]
    SchedulerSilent(SchedulerSilent),
    /// The scheduler answers and the job does not form.
    #[error(
        "the job did not form within {} s (BPS_START_TIMEOUT): the scheduler at {scheduler} says \
         nothing",
        waited.as_secs()
    )]
    NoRoster {
        /// The limit that has passed.
        waited: Duration,
        /// The scheduler's address.
        scheduler: String,
    },
    /// The scheduler ended the job before it had formed, or did not take this worker.
    #[error("{0}")]
    NotFormed(Arc<OverReason>),
    /// A rank of this host can't be reached.
    #[error(
        "{peer} is on this host but can't be reached for local reduction: {source}; \
         BPS_LOCAL_REDUCE=0 on every worker does without"
    )]
    Neighbour {
        /// The rank.
        peer: Origin,
        /// Why.
        source: Source,
    },
    /// A core of a server can't be reached.
    #[error("{core} (host {host}, pid {pid}) is in the job but can't be reached: {source}")]
    Core {
        /// The core.
        core: CoreId,
        /// The server's host.
        host: String,
        /// The server's process.
        pid: u32,
        /// Why.
        source: Source,
    },
    /// The transport does not take a lane that is connected.
    #[error("the lane to {peer} can't be set up: {source}")]
    Lane {
        /// Who is at its other end.
        peer: Origin,
        /// Why.
        source: Source,
    },
    /// This rank can't use its GPU.
    #[error(transparent)]
    Gpu(GpuError),
    /// Another rank can't use its GPU.
    #[error("{rank} can't use its GPU: {text}")]
    GpuElsewhere {
        /// The rank.
        rank: Rank,
        /// The line of its own error: ranks tell each other of their GPUs in rows of bytes, where
        /// one that failed has only room for text.
        text: String,
    },
    /// Two ranks of a host use one GPU.
    #[error(
        "{} and {} are on one host and use the same GPU: give each rank its own, as by \
         torch.cuda.set_device(bps.local_rank())",
        ranks[0], ranks[1]
    )]
    SameGpu {
        /// The ranks.
        ranks: [Rank; 2],
    },
    /// Two ranks of a host have different releases of NCCL.
    #[error(
        "{} and {} are on one host and have NCCL {} and {}: give all ranks of a host the same",
        ranks[0], ranks[1], nccl_version(versions[0]), nccl_version(versions[1])
    )]
    NcclDiffers {
        /// The ranks.
        ranks: [Rank; 2],
        /// What `ncclGetVersion` says on each.
        versions: [u32; 2],
    },
}

impl StartError {
    /// This machine lacks something.
    pub(crate) fn resource(
        what: &'static str,
        error: impl std::error::Error + Send + Sync + 'static,
    ) -> StartError {
        StartError::Resource { what, source: Source::new(error) }
    }
}

impl StartError {
    /// Whether only the scheduler is lost, or not there.
    #[must_use]
    pub fn is_of_scheduler(&self) -> bool {
        matches!(
            self,
            StartError::NoScheduler(_)
                | StartError::SchedulerLost { .. }
                | StartError::SchedulerSilent(_)
        )
    }
}
