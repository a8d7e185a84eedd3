//! Calls that were refused, took too long, or came too late.

use super::Source;
use crate::cuda::GpuError;
use bps_engine::harness::{PATIENCE, StillRunning};
use bps_engine::optimize::{Act, Optimizer};
use bps_engine::proto::unserved::Unserved;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// The call's own deadline passed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Overdue {
    /// The scheduler did not answer a declaration.
    #[error(
        "declare: the scheduler answers heartbeats, but not this, for {:.0} s: read its log",
        waited.as_secs_f64()
    )]
    Declare {
        /// For how long this rank waited.
        waited: Duration,
    },
    /// The scheduler did not say whether the root of a broadcast has joined.
    #[error(
        "broadcast: the scheduler answers heartbeats, but not whether the root has called join(), \
         for {:.0} s: read its log",
        waited.as_secs_f64()
    )]
    Root {
        /// For how long this rank waited.
        waited: Duration,
    },
    /// A thread of this process takes nothing any more.
    #[error(
        "the thread that {task} has taken nothing for {} s: a device or the kernel holds it; read \
         the kernel's log, and end this process",
        waited.as_secs()
    )]
    HandOver {
        /// What the thread does.
        task: &'static str,
        /// For how long it was offered something.
        waited: Duration,
    },
    /// A thread of this process does not end. It may still use the memory of what was pushed.
    #[error(transparent)]
    Ending(StillRunning),
    /// The scheduler did not say which ranks have died that a result lacks.
    #[error(
        "contributors: the result lacks ranks that have died, and the scheduler has not said \
         which, for {:.0} s: read its log",
        waited.as_secs_f64()
    )]
    Gone {
        /// For how long this rank waited.
        waited: Duration,
    },
    /// Ranks are missing at a barrier.
    #[error("barrier: not all ranks came within {:.1} s", waited.as_secs_f64())]
    Barrier {
        /// For how long this rank waited.
        waited: Duration,
    },
}

impl Overdue {
    /// The loop of the lanes takes no commands.
    pub(crate) const LANES: Overdue =
        Overdue::HandOver { task: "drives the lanes", waited: PATIENCE };
    /// The thread of the GPU takes nothing.
    pub(crate) const GPU: Overdue = Overdue::of_gpu(PATIENCE);

    /// The thread of the GPU does nothing more, after so long.
    pub(crate) const fn of_gpu(waited: Duration) -> Overdue {
        Overdue::HandOver { task: "drives the GPU", waited }
    }
}

/// A request that is not served.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Refusal {
    /// The scheduler says why.
    #[error("{0}")]
    Scheduler(Arc<Unserved>),
    /// What a tensor is to keep is not of its size.
    #[error("tensor `{tensor}` has {elements} elements, and is to keep something of {given}")]
    Kept {
        /// The tensor's name.
        tensor: String,
        /// How many it has.
        elements: u64,
        /// How many were given.
        given: usize,
    },
    /// The scheduler has not answered every declaration of a request.
    #[error("the scheduler has answered {answered} of {asked} declarations")]
    Answers {
        /// Declarations in the request.
        asked: usize,
        /// Tensors in the answer.
        answered: usize,
    },
    /// The scheduler's plan of a tensor does not fit the tensor or this rank's lanes.
    #[error("the scheduler's plan for `{tensor}` {what}")]
    Plan {
        /// The tensor's name.
        tensor: String,
        /// What does not fit.
        what: &'static str,
    },
    /// A second call of `join` before all ranks have joined.
    #[error(
        "join: this rank has joined already, by a call that has not returned: call it once, when \
         the rank has no more data"
    )]
    JoinedTwice,
    /// No tensor has this id.
    #[error("tensor id {id} was not declared")]
    UnknownId {
        /// The id.
        id: u32,
    },
    /// The name stands for nothing, or for something else by now.
    #[error("`{tensor}` was not declared, or otherwise meanwhile")]
    Undeclared {
        /// The tensor's name.
        tensor: String,
    },
    /// A tensor of the GPU was pushed as one of the host.
    #[error("`{tensor}` was declared as a tensor of the GPU: push it as one")]
    OfGpu {
        /// The tensor's name.
        tensor: String,
    },
    /// NCCL rounds such averages towards zero, and everybody else down.
    #[error("`{tensor}`: an average of whole numbers goes through memory of the host")]
    WholeAverage {
        /// The tensor's name.
        tensor: String,
    },
    /// The tensor's parts do not fit into the slots of this rank.
    #[error(
        "`{tensor}` is cut into parts of {bytes} bytes, and this rank's slots hold {slot_bytes}: \
         give all ranks the same BYTEPS_PARTITION_BYTES"
    )]
    PartsTooLarge {
        /// The tensor's name.
        tensor: String,
        /// Bytes of a part.
        bytes: usize,
        /// Bytes of a slot.
        slot_bytes: usize,
    },
    /// A tensor was pushed for what its optimizer does not do, or it has none.
    #[error("`{tensor}` is pushed for {act}, and {}", why_not(optimizer.as_ref()))]
    Act {
        /// The tensor's name.
        tensor: String,
        /// For what.
        act: Act,
        /// Its optimizer.
        optimizer: Option<Optimizer>,
    },
    /// A tensor of a GPU is pushed, and none is open.
    #[error("no GPU is open: call open_gpu first")]
    NoGpu,
    /// CUDA or NCCL says why.
    #[error(transparent)]
    Gpu(GpuError),
    /// This rank itself can't go on.
    #[error(transparent)]
    Own(Source),
    /// A timeline is being written.
    #[error("a timeline is being written to {} already: stop it first", path.display())]
    TimelineOpen {
        /// Its file.
        path: PathBuf,
    },
    /// A timeline can't be written.
    #[error(transparent)]
    Timeline(Source),
}

fn why_not(optimizer: Option<&Optimizer>) -> String {
    optimizer.map_or_else(
        || "was declared without an optimizer: declare it with one, or push_pull it".to_owned(),
        |optimizer| format!("is stepped by {optimizer}: update it, by a step or of a slot it has"),
    )
}

/// This worker has left the job.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Closed {
    /// It was shut down.
    #[error("this worker has shut down")]
    Left,
    /// It was shut down, and is asked for something new.
    #[error("this worker has shut down: call init() first")]
    Reused,
    /// It was shut down before its work was over.
    #[error("shutdown was called while a push_pull was under way: synchronize it first")]
    UnderWay,
    /// All workers have.
    #[error("all workers have finished")]
    Finished,
}
