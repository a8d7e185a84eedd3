//! What the machine has done to the job, and what is to be done for it.

use super::{Neighbour, NodeId, OverReason, Point, Roster, SchedulerMessage};
use std::sync::Arc;

/// How the job ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Exit {
    /// All workers left in good order.
    Finished,
    /// A node died or failed, a stall lasted too long, or the scheduler was stopped.
    Failed,
    /// Nodes did not come in time, or were told different things about the job.
    NotFormed,
}

impl Exit {
    /// The exit code of the scheduler program.
    #[must_use]
    pub const fn code(self) -> i32 {
        match self {
            Exit::Finished => 0,
            Exit::Failed => 1,
            Exit::NotFormed => 3,
        }
    }
}

/// What is to be done.
#[derive(Clone, PartialEq, Debug)]
#[allow(clippy::large_enum_variant, reason = "nearly all outputs are messages")]
pub enum Output {
    /// Send a message.
    Send(NodeId, SchedulerMessage),
    /// Close a connection once all that was sent before has gone out.
    Close(NodeId),
    /// Tell people.
    Log(String),
    /// These settings were found, to be written down for the next job.
    Tuned(Point),
    /// The job is over; nothing follows.
    Done(Exit),
}

/// An output that may still have to be made: all rosters at once would be as many copies as there
/// are nodes.
pub(super) enum Queued {
    Ready(Output),
    Roster(NodeId, u32, Vec<Neighbour>, Arc<Roster>),
}

/// What nodes that come too late are told.
pub(super) struct Refusal {
    pub(super) reason: OverReason,
    /// Nodes that have been told.
    pub(super) told: usize,
    /// Nodes of the job, if that is known.
    pub(super) nodes: Option<usize>,
}
