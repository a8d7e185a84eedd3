//! What nodes tell with their heartbeats for those who watch the job.

use serde::{Deserialize, Serialize};

/// What a node has counted since it started, for those who watch the job. Nothing depends on it.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize)]
pub struct Statistics {
    /// Seconds from the node's joining to this look, by its own clock: what rates are taken over.
    pub uptime: f64,
    /// Bytes of memory that the process has in RAM.
    pub resident_bytes: u64,
    /// The network interface that it uses, if one was found.
    pub link: Option<LinkStatistics>,
    /// Of each polling thread: a server's cores by index, or the one of a worker.
    pub loops: Vec<LoopStatistics>,
}

/// A network interface: all of its traffic, whoever caused it.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize)]
pub struct LinkStatistics {
    /// Its name.
    pub interface: String,
    /// Bytes a second that it can move in each direction, where that is known.
    pub speed: Option<u64>,
    /// Bytes received.
    pub received: u64,
    /// Bytes sent.
    pub sent: u64,
    /// Bytes a second received since the last heartbeat.
    pub receive_rate: f64,
    /// Bytes a second sent since the last heartbeat.
    pub send_rate: f64,
}

/// A polling thread.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize)]
pub struct LoopStatistics {
    /// Its counters, in the order of their declaration, which is that of the release.
    pub counts: Vec<u64>,
    /// Fraction of the time since the last heartbeat in which it had something to do.
    pub busy: f64,
}
