//! The control plane's messages: between each node (worker process or server) and the scheduler.
//!
//! On the wire a message is a little-endian `u32` length and that many bytes of JSON: there are few
//! of them, they are read by people when something goes wrong, and no message is parsed before its
//! sender is authenticated.
//!
//! What messages are made of is in files beside this one, which knows them all and which none of
//! them knows.

pub use super::declaration::{
    Assignment, Declaration, Frameworks, KeySpec, Mismatch, Part, Replacement, RetiredKey,
    Superseded,
};
use super::late::{CaughtUp, Late, LateKeys};
use super::moving::{MovingOrder, MovingReport};
pub use super::origin::{Origin, Party, Place};
use super::paths::{AwaitedKey, End, KeyState, LaneFault, PathStall};
pub use super::planning::{Planning, switch_width};
use super::resume::{self, AdoptedKey, KnownTensor, Resume};
pub use super::roster::{Neighbour, Node, Peer, Register, Roster, ServerPeer};
pub use super::stall::{STALLS_MAX, STALLS_SHOWN_MAX, Stall, StalledKey};
pub use super::statistics::{LinkStatistics, LoopStatistics, Statistics};
pub use super::times::{ClockAnswer, Timeline};
use super::tuning::{TuneOrder, TuneReport};
use super::uneven::{UnevenOrder, UnevenReport};
use super::unserved::Unserved;
pub use super::verdict::{OverReason, RoundOf, Shrunk, Sign};
use crate::base::{Epoch, Key};
use serde::{Deserialize, Serialize};

/// From a node to the scheduler.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum NodeMessage {
    /// The first message: who this is.
    Register(Register),
    /// The same of a member of a job whose scheduler is lost, to the next one.
    Resume(Box<Resume>),
    /// Behind `Resume`: tensors that this rank may push, or keys that this server has adopted.
    Known {
        /// In rising order, as many as one answer to a declaration has at most.
        tensors: Vec<KnownTensor>,
        /// In rising order.
        #[serde(default)]
        adopted: Vec<AdoptedKey>,
    },
    /// To a scheduler that was silent: the node follows one of a later term.
    Deposed {
        /// The other's.
        term: u32,
    },
    /// From a server to a scheduler that was silent for too long: it has asked another one whether
    /// that leads the job, or (`false`) the other one does not. Until it has an answer it heeds
    /// neither, so no epoch may count on it.
    Asks {
        /// Whether an answer is due.
        another: bool,
    },
    /// The first message of a further connection: the node of this session lives, though nothing
    /// is heard on its own connection. Answered by `Heartbeat`.
    Alive {
        /// From `Register`.
        session: u64,
    },
    /// Every `BPS_HEARTBEAT_INTERVAL`: still here, and how far. Answered by `Heartbeat`.
    Heartbeat {
        /// Rounds completed (worker) or published (server) so far, over all keys.
        rounds: u64,
    },
    /// With each heartbeat of a running job: what the node has counted.
    Statistics(Statistics),
    /// A worker names tensors; answered by `Declared` or `Refused` with the same request number.
    Declare {
        /// Chosen by the sender.
        request: u64,
        /// What it will push.
        tensors: Vec<Declaration>,
    },
    /// A worker gives names that it has declared before another meaning; answered as `Declare`.
    Redeclare {
        /// Chosen by the sender.
        request: u64,
        /// What it will push from now on.
        tensors: Vec<Replacement>,
    },
    /// A worker has pushed a tensor more often than the rank that was first to replace it.
    Overrun {
        /// From `Superseded`.
        tensor: u32,
    },
    /// A server has made room for the keys of `Install` with this request number.
    Installed {
        /// From `Install`.
        request: u64,
    },
    /// A server has forgotten all keys and closed all lanes, as `Reset` asked: what it says from
    /// now on is of that epoch.
    ResetDone {
        /// From `Reset`.
        epoch: Epoch,
    },
    /// A worker waits until all ranks of the job do.
    Barrier {
        /// Chosen by the sender.
        request: u64,
    },
    /// Open rounds that have waited longer than the stall-report time, as a server sees them, or a
    /// worker those that it sums for its group; sent again each second while they wait, and once
    /// empty when none does any more.
    Stalled {
        /// At most [`STALLS_SHOWN_MAX`], the oldest first.
        keys: Vec<StalledKey>,
        /// All keys that wait for the same ranks, within the bounds of
        /// [`LateCollector`](super::late::LateCollector).
        #[serde(default)]
        late: Vec<LateKeys>,
    },
    /// A lane closed that should not have.
    LaneLost {
        /// Who is at its other end.
        to: End,
        /// What was seen.
        fault: LaneFault,
    },
    /// Results that a worker waits for though its parts were sent; sent again each second while
    /// they are awaited, and once empty when none is any more.
    Awaiting {
        /// At most [`PATH_KEYS_MAX`](super::paths::PATH_KEYS_MAX), the oldest first.
        keys: Vec<AwaitedKey>,
    },
    /// A server's answer to `Inquire`.
    KeyStates {
        /// Of the keys that it has.
        keys: Vec<KeyState>,
    },
    /// Asks for the scheduler's clock; answered at once by `Clock`.
    Clock {
        /// This node's monotonic clock, nanoseconds; comes back in the answer.
        sent_ns: u64,
    },
    /// A worker starts a timeline, or ends its own (`None`).
    Timeline {
        /// What it records.
        timeline: Option<Timeline>,
    },
    /// A worker on who has run out of data.
    Uneven(UnevenReport),
    /// A worker of a job that tunes itself.
    Tune(TuneReport),
    /// Of a job that goes on without a server that is lost.
    Moving(MovingReport),
    /// The node ends because of an error of its own; everyone is told.
    Failed {
        /// One line: what, where, what to do.
        message: String,
        /// The round in which it happened, if it was in one.
        #[serde(default)]
        round: Option<RoundOf>,
    },
    /// The node ends in good order. The connection closes after it.
    Leave {
        /// The worker will be back by `resume`, perhaps among other workers: servers and scheduler
        /// stay.
        suspend: bool,
    },
}

impl NodeMessage {
    /// The node ends for this reason, which concerns no round.
    #[must_use]
    pub fn failed(message: impl Into<String>) -> NodeMessage {
        NodeMessage::Failed { message: message.into(), round: None }
    }

    /// All messages of a node that resumes: `Resume`, and the tensors that a rank knows or the keys
    /// that a server has adopted, in pieces that fit.
    #[must_use]
    pub fn resuming(
        resume: Resume,
        known: impl Iterator<Item = KnownTensor>,
        adopted: &[AdoptedKey],
    ) -> Vec<NodeMessage> {
        let tensors = resume::pieces(known).into_iter();
        let tensors = tensors.map(|tensors| NodeMessage::Known { tensors, adopted: Vec::new() });
        let adopted = resume::adopted_pieces(adopted);
        let adopted = adopted.map(|adopted| NodeMessage::Known { tensors: Vec::new(), adopted });
        let first = NodeMessage::Resume(Box::new(resume));
        std::iter::once(first).chain(tensors).chain(adopted).collect()
    }
}

/// From the scheduler to a node.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum SchedulerMessage {
    /// Answer to `Heartbeat` and `Alive`, at once: the scheduler lives too.
    Heartbeat,
    /// Not all nodes are there yet. One line for people: `waiting for server 1 of 2, worker rank 3
    /// of 4 (12 s)`.
    Waiting {
        /// The line.
        text: String,
    },
    /// All nodes are there. Sent to each with its own place in it.
    Roster(Roster),
    /// To a node that has sent `Resume`: all are there again, or given up, and the scheduler leads
    /// the job. What had no answer is to be sent again now.
    Resumed {
        /// Its term.
        term: u32,
    },
    /// Answer to `Declare`: in the same order.
    Declared {
        /// From `Declare`.
        request: u64,
        /// Where the parts live.
        tensors: Vec<Assignment>,
    },
    /// Answer to a `Declare` that cannot be served.
    Refused {
        /// From `Declare`.
        request: u64,
        /// Why, and what to do.
        cause: Unserved,
    },
    /// Two ranks disagree about a tensor: to every worker, at once. The name is of no use from
    /// then on, but for rounds on which the ranks had agreed. The `Declare` that disagreed is
    /// answered by `Refused` behind it, as is every later one of that name.
    Mismatch(Mismatch),
    /// To a worker: other ranks have replaced these tensors, by declaring their names anew. It must
    /// not push them more often than they did.
    Superseded {
        /// Tensors that this worker has not replaced yet.
        tensors: Vec<Superseded>,
    },
    /// To a server: keys that will come.
    Install {
        /// To be returned in `Installed`.
        request: u64,
        /// All of this server.
        keys: Vec<KeySpec>,
    },
    /// To a server: keys whose memory it may take back once they have had their last round.
    Retire {
        /// All of this server.
        keys: Vec<RetiredKey>,
    },
    /// Answer to `Barrier`: all ranks are there.
    BarrierDone {
        /// From `Barrier`.
        request: u64,
    },
    /// Ranks that rounds wait for, to every node.
    Stall {
        /// Those that are late and that it is time to tell of.
        late: Vec<Late>,
        /// Those that were told of and have caught up.
        over: Option<CaughtUp>,
    },
    /// Bytes that one node has sent and another does not get, to every node.
    PathStall {
        /// The oldest first; empty when the stall is over.
        stalls: Vec<PathStall>,
    },
    /// To a server: how far is it with these keys? Answered by `KeyStates`.
    Inquire {
        /// At most [`PATH_KEYS_MAX`](super::paths::PATH_KEYS_MAX).
        keys: Vec<Key>,
    },
    /// Answer to `Clock`.
    Clock(ClockAnswer),
    /// To a server: the first worker has started a timeline, or the last has ended its own
    /// (`None`).
    Timeline {
        /// What the first one records.
        timeline: Option<Timeline>,
    },
    /// To a worker of an elastic job: so many nodes wait to be let in. They are once every rank
    /// has left with `suspend` and come back.
    Newcomers {
        /// Workers and servers.
        count: u32,
    },
    /// To a server: an epoch is over; forget all keys, expect the workers of the next one. Answered
    /// by `ResetDone`.
    Reset {
        /// The next epoch.
        epoch: Epoch,
    },
    /// The job goes on without these ranks, to every node.
    Shrunk(Shrunk),
    /// To a worker: on who has run out of data.
    Uneven(UnevenOrder),
    /// To a worker of a job that tunes itself.
    Tune(TuneOrder),
    /// On servers that are lost, and keys that move to others.
    Moving(MovingOrder),
    /// The job is over. Nothing follows.
    Over {
        /// Why.
        reason: OverReason,
    },
}
