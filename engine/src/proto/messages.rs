//! The control plane's messages: between each node (worker process or server) and the scheduler.
//!
//! On the wire a message is a little-endian `u32` length and that many bytes of JSON: there are few
//! of them, they are read by people when something goes wrong, and no message is parsed before its
//! sender is authenticated.

use super::encoding::Encoding;
use super::late::{CaughtUp, Late, LateKeys};
use super::members::Members;
use super::moving::{MovingOrder, MovingReport};
use super::paths::{AwaitedKey, End, KeyState, LaneFault, PathStall};
pub use super::planning::{Planning, switch_width};
use super::resume::{KnownTensor, Resume};
use super::shape::TensorShape;
pub use super::statistics::{LinkStatistics, LoopStatistics, Statistics};
use super::store::Store;
pub use super::times::{ClockAnswer, Timeline};
use super::tuning::{TuneOrder, TuneReport};
use super::uneven::{UnevenOrder, UnevenReport};
use super::unserved::Unserved;
pub use super::verdict::{Origin, OverReason, Party, Place, RoundOf, Shrunk, Sign};
use crate::base::{CoreId, DType, Epoch, Key, Operation, Rank};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

/// From a node to the scheduler.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum NodeMessage {
    /// The first message: who this is.
    Register(Register),
    /// The same of a member of a job whose scheduler is lost, to the next one.
    Resume(Box<Resume>),
    /// Behind `Resume`: tensors that this rank may push.
    Known {
        /// In rising order, as many as one answer to a declaration has at most.
        tensors: Vec<KnownTensor>,
    },
    /// To a scheduler that was silent: the node follows one of a later term.
    Deposed {
        /// The other's.
        term: u32,
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
}

/// Stalled keys that a node counts at most in one look.
pub const STALLS_MAX: usize = 4096;
/// Stalled keys that one report describes, and stalled tensors that one message names, at most.
pub const STALLS_SHOWN_MAX: usize = 16;

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

/// Who a node is and what it was told about the job.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Register {
    /// Worker or server.
    pub node: Node,
    /// Host name, for messages.
    pub host: String,
    /// Boot id of the host and its network namespace, for finding out who shares memory with whom.
    pub host_id: String,
    /// Process id, for messages.
    pub pid: u32,
    /// Chosen at random: who says it on another connection is this node.
    #[serde(default)]
    pub session: u64,
    /// The session that this worker had in the epoch before, if it comes back to an elastic job.
    #[serde(default)]
    pub former: Option<u64>,
    /// Release of this package; all nodes must have the same.
    pub release: String,
    /// `DMLC_NUM_WORKER` here and at the scheduler; 0 of a rank that joins an elastic job.
    pub num_workers: u32,
    /// `DMLC_NUM_SERVER` as this node has it; must equal the scheduler's.
    pub num_servers: u32,
    /// `BPS_ENCRYPT` as this node has it; must equal the scheduler's.
    #[serde(default)]
    pub encrypt: bool,
}

/// What a worker process or a server says of itself.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "role", rename_all = "snake_case")]
pub enum Node {
    /// One rank.
    Worker {
        /// `DMLC_WORKER_ID`: index of the host.
        worker_id: u32,
        /// Index of the process on its host.
        local_rank: u32,
        /// Processes on its host.
        local_size: u32,
        /// `BYTEPS_GLOBAL_RANK`; else rank = worker_id × local_size + local_rank.
        global_rank: Option<u32>,
        /// Abstract Unix socket for the other ranks of its host, if it reduces among them.
        local: Option<String>,
        /// How tensors are to be cut and placed; must be the same on all ranks.
        planning: Planning,
    },
    /// One server process.
    Server {
        /// Where each of its cores listens.
        cores: Vec<SocketAddr>,
        /// Abstract Unix socket for workers of the same host, if it offers shared memory.
        shm: Option<String>,
        /// Its cores take RDMA lanes.
        rdma: bool,
        /// It shares its host with a worker (mixed mode).
        colocated: bool,
        /// `DMLC_RANK`: preferred index in the roster.
        preferred: Option<u32>,
    },
}

/// The job as one node sees it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Roster {
    /// What tells this job from all others, at random, so that nothing of another one with the same
    /// key is taken for this one's.
    pub job: String,
    /// Which scheduler of the job this one is, from 1.
    #[serde(default)]
    pub term: u32,
    /// Membership generation, from 1.
    pub epoch: Epoch,
    /// Ranks in the job.
    pub size: u32,
    /// Whether sums pass through servers: not where all ranks are one group.
    pub through_servers: bool,
    /// This node's rank (worker) or server index (server).
    pub index: u32,
    /// Host and pid of each rank, for messages. Only servers are told: among workers the list would
    /// grow with the square of the job.
    pub workers: Vec<Peer>,
    /// To a worker: the other ranks of its group.
    pub neighbours: Vec<Neighbour>,
    /// The servers, by index.
    pub servers: Vec<ServerPeer>,
    /// Whether the job goes on when members die (`BPS_ELASTIC`).
    #[serde(default)]
    pub elastic: bool,
    /// Whether rounds go on without ranks that die (`BPS_ELASTIC=shrink`).
    #[serde(default)]
    pub shrinks: bool,
    /// What has changed since the epoch before, in one line for people; none in the first.
    #[serde(default)]
    pub change: Option<String>,
}

/// A worker as servers know it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Peer {
    /// Host name.
    pub host: String,
    /// Process id there.
    pub pid: u32,
    /// Its group, from 0: the ranks that reduce among themselves before servers are asked. A rank
    /// that has nobody to do so with is a group of its own.
    pub group: u32,
}

/// A worker as the others of its group reach it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Neighbour {
    /// Its rank.
    pub rank: Rank,
    /// Host name.
    pub host: String,
    /// Process id there.
    pub pid: u32,
    /// Abstract Unix socket.
    pub local: String,
}

/// A server as workers reach it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ServerPeer {
    /// Host name.
    pub host: String,
    /// Process id there.
    pub pid: u32,
    /// Same value: same host, memory can be shared.
    pub host_id: String,
    /// Where each core listens.
    pub cores: Vec<SocketAddr>,
    /// Abstract Unix socket for workers of the same host.
    pub shm: Option<String>,
    /// Its cores take RDMA lanes.
    pub rdma: bool,
}

/// What a rank says that it will push.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Declaration {
    /// Unique in the job.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Its shape; a tensor without elements is allowed and has no parts.
    pub shape: TensorShape,
    /// What a round computes.
    pub operation: Operation,
    /// It lives on GPUs: the ranks of a host reduce it there.
    #[serde(default)]
    pub device: bool,
    /// The ranks that push it.
    #[serde(default, skip_serializing_if = "Members::is_all")]
    pub members: Members,
    /// How its parts travel to servers and back, if not as they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encoding: Option<Encoding>,
    /// How its value stays on the servers between rounds, if it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store: Option<Store>,
}

/// A declaration that takes the place of another of the same name.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Replacement {
    /// What the name stands for from now on.
    pub said: Declaration,
    /// How often this rank has pushed the tensor that the name stood for.
    pub rounds: u64,
}

/// A tensor that another rank has replaced.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Superseded {
    /// From `Assignment`.
    pub tensor: u32,
    /// How often that rank had pushed it.
    pub rounds: u64,
}

/// A key that no rank will push any more, unless it is installed again.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RetiredKey {
    /// Its id.
    pub key: Key,
    /// Index of the core in the server.
    pub core: u32,
    /// Its last round.
    pub rounds: u64,
}

/// Where the parts of a tensor live. The parts cover it in order, without gaps.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Assignment {
    /// Dense, from 0, by order of first declaration.
    pub tensor: u32,
    /// In order of offset.
    pub parts: Vec<Part>,
    /// How often it may be pushed, where another rank has replaced it already.
    pub until: Option<u64>,
}

/// A piece of a tensor, at most a partition in size.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Part {
    /// Its id.
    pub key: Key,
    /// First byte within the tensor.
    pub offset: u64,
    /// Bytes, a multiple of the element size.
    pub bytes: u32,
    /// Where it is summed over the groups; nowhere if there is one group only.
    pub core: Option<CoreId>,
    /// The rank that sums it in the group of whoever is told, and alone speaks to the core.
    pub owner: Rank,
}

/// A key as its server must know it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct KeySpec {
    /// Its id.
    pub key: Key,
    /// Index of the core in the server.
    pub core: u32,
    /// Element type.
    pub dtype: DType,
    /// Bytes of a contribution, as the workers send it.
    pub bytes: u32,
    /// What a round computes.
    pub operation: Operation,
    /// Rounds that it has had, if it was retired before.
    pub rounds: u64,
    /// The ranks that push it.
    #[serde(default, skip_serializing_if = "Members::is_all")]
    pub members: Members,
    /// How contributions come and results go, if not as they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encoding: Option<Encoding>,
    /// How its value is kept between rounds, if it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store: Option<Store>,
}

/// Two ranks declared one name differently.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Mismatch {
    /// The rank that declared it first.
    pub first: Rank,
    /// What it said.
    pub first_said: Box<Declaration>,
    /// The rank that disagrees.
    pub second: Rank,
    /// What it said.
    pub second_said: Box<Declaration>,
    /// Rounds on which the ranks had agreed, of each tensor that the name stood for to any of them;
    /// these go on. A tensor of the name that is not here was replaced by all ranks.
    pub agreed: Vec<Superseded>,
}

/// An open round that waits, as its server sees it, or the rank that sums it for a group.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StalledKey {
    /// The part.
    pub key: Key,
    /// Its open round.
    pub round: u64,
    /// Milliseconds since the first contribution.
    pub waited_ms: u64,
    /// Who has not contributed.
    pub missing: Vec<Rank>,
    /// Those of them that have said goodbye on their lane: they cannot contribute any more.
    #[serde(default)]
    pub left: Vec<Rank>,
}

/// An open round that waits, as people are told.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Stall {
    /// The tensor.
    pub name: String,
    /// Its open round.
    pub round: u64,
    /// Milliseconds since the first contribution.
    pub waited_ms: u64,
    /// Who has contributed.
    pub arrived: Vec<Rank>,
    /// For whom it waits.
    pub missing: Vec<Rank>,
    /// Those of them that left the job in good order: they will not come.
    #[serde(default)]
    pub left: Vec<Rank>,
}
