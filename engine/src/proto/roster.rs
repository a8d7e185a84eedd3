//! What nodes say of themselves when they come, and what each is told of the job once it forms.

use super::planning::Planning;
use crate::base::{Epoch, Rank};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

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
    /// Chosen at random when the node starts. Who says it by two connections is one node, and the
    /// later connection is the one that it uses; 0 where it is not said.
    #[serde(default)]
    pub instance: u64,
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
        /// The framework that it trains with, for messages; none where it has not said.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        speaks: Option<String>,
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
