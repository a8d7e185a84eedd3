//! What the NIC loop is told and tells: plans, commands, reports, and what others read of it.

use super::staged::{Slot, ToPipeline, Word};
use crate::error::Error;
use crate::gpu::Push;
use crate::task::Task;
use bps_engine::base::{DType, Epoch, Key, Operation, Rank};
use bps_engine::proto::messages::StalledKey;
use bps_engine::proto::paths::AwaitedKey;
use bps_engine::trace::counters::{Counter, Counters};
use bps_engine::trace::timeline::Recorder;
use bps_engine::transport::{Cause, LaneId};
use std::sync::Arc;
use std::time::Duration;

/// A part of a tensor, with the lanes that it takes.
#[derive(Clone, Copy, Debug)]
pub struct PlanPart {
    /// Its id.
    pub key: Key,
    /// First byte within the tensor.
    pub offset: usize,
    /// Its size.
    pub bytes: usize,
    /// The lane to the core that sums it over the groups; `None` if this rank's group is the only
    /// one.
    pub core: Option<LaneId>,
    /// The lane to the rank that sums it in the group; `None` if that is this one.
    pub owner: Option<LaneId>,
    /// That rank.
    pub owner_rank: Rank,
    /// Of a tensor on GPUs: the rank to which NCCL reduces it, below this rank's PCIe switch. That
    /// is the owner, where it is below this switch.
    pub holder: Rank,
}

/// All that the loop must know of a tensor before it is pushed.
#[derive(Debug)]
pub struct Plan {
    /// Its name, for messages.
    pub name: String,
    /// Its element type.
    pub dtype: DType,
    /// What a round computes.
    pub operation: Operation,
    /// It lives on GPUs: its parts pass through the slots of a pipeline.
    pub device: bool,
    /// In order of offset, without gaps.
    pub parts: Box<[PlanPart]>,
}

/// Memory of a caller, valid until its task is finished: see [`crate::PushPull`].
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// What is pushed.
    pub source: *const u8,
    /// Where the result lands; may be the source.
    pub target: *mut u8,
}

// SAFETY: the pointers are only followed by the NIC thread, and the caller of `push_pull` promises
// that the memory stays valid and unshared until the task is finished.
unsafe impl Send for Memory {}

/// From the other threads to the loop.
pub enum Command {
    /// A tensor was declared.
    Plan {
        /// Its id: dense, from 0.
        tensor: u32,
        /// Where its parts live.
        plan: Arc<Plan>,
    },
    /// Push this tensor and pull its result.
    Push {
        /// Its id.
        tensor: u32,
        /// Its bytes.
        memory: Memory,
        /// Larger goes sooner.
        priority: i64,
        /// Told when it is over.
        task: Arc<Task>,
    },
    /// A GPU's pipeline is there: what concerns it is to go here from now on.
    OpenPipeline(ToPipeline),
    /// To the pipeline: push this tensor of the GPU and pull its result. It passes here so that it
    /// comes behind the tensor's plan.
    PushGpu {
        /// Its id.
        tensor: u32,
        /// All else.
        push: Box<Push>,
    },
    /// From the pipeline: the next round of a tensor is open, its parts will come one by one.
    Open {
        /// Its id.
        tensor: u32,
        /// Larger goes sooner.
        priority: i64,
    },
    /// From the pipeline: a part of an open round may be sent.
    Part {
        /// The tensor.
        tensor: u32,
        /// The part's place in its plan.
        part: u32,
        /// Where its bytes are; none where the part carries none.
        slot: Option<Slot>,
    },
    /// From the pipeline: it is done with this slot, and a result may land here.
    Land(Slot),
    /// From the pipeline: this is to be said to a rank of the group, or to all.
    Say {
        /// To whom.
        to: Option<Rank>,
        /// What.
        word: Word,
    },
    /// From the pipeline: rounds that wait for ranks of this host; goes into the next
    /// [`Report::Stalled`].
    Stalled {
        /// The oldest first.
        keys: Vec<StalledKey>,
    },
    /// From the pipeline: the GPU can't go on.
    GpuFailed {
        /// Why.
        message: String,
    },
    /// Record a timeline with these from now on; recorders that are off end it.
    Trace {
        /// The loop's own.
        nic: Recorder,
        /// The pipeline's.
        gpu: Recorder,
    },
    /// This name is of no use any more: what is pending of its tensors fails, and so does what
    /// comes, but for rounds on which the ranks had agreed.
    Poison {
        /// The name.
        name: String,
        /// How many rounds of which of its tensors. All rounds of one that is not here.
        agreed: Vec<(u32, u64)>,
        /// Why.
        error: Error,
    },
    /// The job is over for this worker: close all lanes, then fail what is pending.
    Fail {
        /// Why.
        error: Error,
    },
    /// Nothing is pending: say goodbye on all lanes and end.
    Leave,
}

/// From the loop to the control thread.
#[derive(Debug)]
pub enum Report {
    /// A lane closed that should not have.
    Lost {
        /// Who is at its other end.
        peer: Peer,
        /// What was seen.
        cause: Cause,
        /// What was open then, for people.
        round: Option<String>,
    },
    /// A frame that does not fit what was pushed.
    Corrupt {
        /// Who sent it.
        peer: Peer,
        /// What does not fit.
        message: String,
    },
    /// Bytes that a checksum covers changed on their way between this rank and another node.
    Altered {
        /// Who is at the other end.
        peer: Peer,
        /// Whether it was this rank that sent them.
        sent: bool,
        /// What they were.
        what: String,
    },
    /// This rank itself can't go on.
    Failed {
        /// Why.
        message: String,
    },
    /// Parts that were sent to a server and whose results do not come; empty once when none is
    /// awaited for long any more.
    Awaiting {
        /// The oldest first, at most [`PATH_KEYS_MAX`](bps_engine::proto::paths::PATH_KEYS_MAX).
        keys: Vec<AwaitedKey>,
    },
    /// Rounds of parts that this rank owns in its group, that have waited too long for others of
    /// it; empty once when none does any more.
    Stalled {
        /// The oldest first, at most [`STALLS_MAX`](bps_engine::proto::messages::STALLS_MAX).
        keys: Vec<StalledKey>,
    },
}

/// Who is at the other end of a lane.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Peer {
    /// A core of the server with this index.
    Server(u32),
    /// Another rank of this rank's group.
    Rank(Rank),
}

/// What a NIC loop is and whom it talks to.
pub struct NicConfig {
    /// Which rank it serves.
    pub rank: Rank,
    /// Ranks in the job.
    pub size: u32,
    /// The membership.
    pub epoch: Epoch,
    /// Bytes that may be posted to all lanes together and not yet be taken by the kernel.
    pub credit_bytes: usize,
    /// The other ranks of the group that hold the same share of tensors on GPUs, each of the sum of
    /// its PCIe switch; none where the host has one switch.
    pub column: Vec<Rank>,
    /// A round that others of the group have pushed, or not, for longer than this is reported.
    pub stall_report: Duration,
    /// Called with what ended the job, before any caller sees it.
    pub say: fn(&Error),
}

/// What the other threads read of a loop.
#[derive(Default)]
pub struct NicStatistics {
    /// Bytes of finished tensors.
    pub bytes: Counter,
    /// What passes the lanes, and where the loop's time goes.
    pub counters: Arc<Counters>,
}
