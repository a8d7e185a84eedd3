//! The job as those see it who watch it: a copy, for metrics.

use super::tuner::{Tuner, TuningView};
use super::{Changes, Duration, NodeState, Phase, Scheduler, Standing};
use crate::base::{Rank, word};
use crate::limits::CORES_MAX;
use crate::proto::messages::{Stall, Statistics};
use crate::proto::paths::PathStall;

/// Characters of a network interface's name, as the kernel has it.
const INTERFACE_CHARS: usize = 15;
/// Counters of a polling thread that are kept: far more than there are.
const COUNTS_MAX: usize = 64;

/// A job at one moment.
#[derive(Clone, PartialEq, Debug)]
pub struct JobView {
    /// Membership generation.
    pub epoch: u32,
    /// Whether all nodes are there.
    pub formed: bool,
    /// Ranks of the job; before it is formed, those that have come.
    pub ranks: u32,
    /// Servers, likewise.
    pub servers: u32,
    /// Members of earlier epochs that were given up.
    pub deaths: u64,
    /// How long the last re-formation took; none if there was none.
    pub reformed: Option<Duration>,
    /// Changes of who takes part.
    pub changes: Changes,
    /// Since the scheduler started.
    pub uptime: Duration,
    /// Who waits for whom longer than `BPS_STALL_REPORT`, the oldest first.
    pub stalls: Vec<Stall>,
    /// Bytes that are on their way for longer than that, the oldest first.
    pub paths: Vec<PathStall>,
    /// What is tried, in a job that tunes itself.
    pub tuning: Option<TuningView>,
    /// Members that are there, workers by rank and then servers by index.
    pub nodes: Vec<NodeView>,
}

/// What a node is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum NodeRole {
    /// A rank.
    Worker,
    /// A server.
    Server,
}

/// A member of the job.
#[derive(Clone, PartialEq, Debug)]
pub struct NodeView {
    /// Worker or server.
    pub role: NodeRole,
    /// Rank, or index of the server.
    pub index: u32,
    /// Host name.
    pub host: String,
    /// Process id there.
    pub pid: u32,
    /// Since anything was last heard of it; none if nobody listens for it here.
    pub silent: Option<Duration>,
    /// What it counted by its last heartbeat.
    pub statistics: Option<Statistics>,
}

impl Scheduler {
    /// The job now.
    #[must_use]
    pub fn view(&self, now: Duration) -> JobView {
        let mut nodes: Vec<NodeView> =
            self.peers.iter().filter_map(|(node, peer)| self.member(*node, peer, now)).collect();
        nodes.sort_by_key(|node| (node.role, node.index));
        let come = |role| nodes.iter().filter(|node| node.role == role).count();
        let mut view = JobView {
            epoch: self.epoch.0,
            formed: false,
            ranks: word(come(NodeRole::Worker)),
            servers: word(come(NodeRole::Server)),
            deaths: self.history.deaths,
            reformed: self.history.reformed,
            changes: self.history.changes.clone(),
            uptime: now,
            stalls: Vec::new(),
            paths: Vec::new(),
            tuning: None,
            nodes,
        };
        if let Phase::Running(running) = &self.phase {
            view.formed = true;
            view.tuning = running.tuner.as_ref().map(Tuner::view);
            view.ranks = running.job.size() - word(running.gone.len());
            view.servers = running.servers_left();
            let mut waits = running.stalls.waits(
                &running.registry,
                &running.barriers,
                &running.left,
                self.config.stall_report,
                now,
            );
            running.paths.excuse(&mut waits.rounds);
            view.stalls = waits.oldest();
            view.paths = running.paths.stalls().to_vec();
        }
        view
    }

    fn member(&self, node: super::NodeId, peer: &NodeState, now: Duration) -> Option<NodeView> {
        let (role, index) = match (&peer.standing, &self.phase) {
            (Standing::Worker(Rank(rank)), _) => (NodeRole::Worker, *rank),
            (Standing::Server, Phase::Running(running)) => {
                (NodeRole::Server, running.server(node)?)
            }
            // A server has no number before the job is formed.
            _ => return None,
        };
        Some(NodeView {
            role,
            index,
            host: peer.host.clone(),
            pid: peer.pid,
            silent: Some(now.saturating_sub(peer.heard)),
            statistics: peer.statistics.as_deref().cloned(),
        })
    }
}

/// A node's statistics, cut to what an honest one could send: they are kept, and shown to people.
pub(super) fn bounded(mut statistics: Statistics) -> Statistics {
    statistics.loops.truncate(CORES_MAX);
    for one in &mut statistics.loops {
        one.counts.truncate(COUNTS_MAX);
    }
    if let Some(link) = &mut statistics.link {
        link.interface = link.interface.chars().take(INTERFACE_CHARS).collect();
    }
    statistics
}
