//! What the NIC loop is told and tells: plans, commands, reports, and what others read of it.

use crate::error::Error;
use crate::task::Task;
use bps_engine::base::{DType, Epoch, Key, Operation, Rank};
use bps_engine::trace::counters::{Counter, Counters};
use bps_engine::trace::timeline::Recorder;
use bps_engine::transport::{Cause, LaneId};
use std::sync::Arc;

/// A part of a tensor, with the lane that its core is reached by.
#[derive(Clone, Copy, Debug)]
pub struct PlanPart {
    /// Its id.
    pub key: Key,
    /// First byte within the tensor.
    pub offset: usize,
    /// Its size.
    pub bytes: usize,
    /// The lane to its core.
    pub lane: LaneId,
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
        plan: Box<Plan>,
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
    /// Record a timeline with this from now on; a recorder that is off ends it.
    Trace(Recorder),
    /// This tensor is of no use any more: what is pending of it fails, and so does what comes.
    Poison {
        /// Its name.
        name: String,
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
        /// Index of the server at its other end.
        server: u32,
        /// What was seen.
        cause: Cause,
        /// What was open then, for people.
        round: Option<String>,
    },
    /// A publication that does not fit what was pushed.
    Corrupt {
        /// Index of the server that sent it.
        server: u32,
        /// What does not fit.
        message: String,
    },
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
    /// Whether contributions carry a CRC-32C.
    pub payload_checksum: bool,
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
