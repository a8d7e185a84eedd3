//! What the forming of an elastic job's next epoch knows of the one that ended: who of it is still
//! awaited, and what would be lacking if they all came back.

use super::groups::Groups;
use super::{Duration, NodeId, Origin, OverReason, counted};
use crate::proto::messages::Planning;
use std::collections::{BTreeMap, BTreeSet};

/// A rank of the epoch that ended.
#[derive(Debug)]
pub(super) struct Awaited {
    /// Its connection then.
    pub(super) node: NodeId,
    pub(super) session: u64,
    pub(super) who: Origin,
    pub(super) host_id: String,
    /// Since when it is between two connections.
    pub(super) away: Option<Duration>,
}

/// An epoch that ended, as the forming of the next one needs it.
#[derive(Debug)]
pub(super) struct Regroup {
    pub(super) awaited: BTreeMap<u32, Awaited>,
    /// Servers that have not forgotten it.
    pub(super) resetting: BTreeSet<NodeId>,
    pub(super) newcomers: u32,
    /// Who waited to be let in has not come to it yet: how it stands is not clear.
    pub(super) is_filling: bool,
    /// Ranks that left while all others suspended, and servers that were let go: they do not come
    /// back, and have not died.
    pub(super) departed: Vec<Origin>,
    /// A rank of it has left in good order, so the others may be about to.
    pub(super) has_left: bool,
    /// A rank of it is there again.
    pub(super) has_returned: bool,
    pub(super) planning: Planning,
    pub(super) min_workers: u32,
    /// A rank had said that it comes back, and has not in time.
    pub(super) has_strayed: bool,
    /// For how long the scheduler did not run meanwhile: nobody is late for that.
    pub(super) stopped: Duration,
    /// What ended it; nothing did if its ranks left to let others in.
    pub(super) reason: Option<OverReason>,
}

impl Regroup {
    /// The scheduler did not run for so long.
    pub(super) fn forgive(&mut self, gap: Duration) {
        self.stopped += gap;
        for away in self.awaited.values_mut().filter_map(|one| one.away.as_mut()) {
            *away += gap;
        }
    }

    /// Whether everybody is back, or is not awaited any more, and every server has forgotten it.
    pub(super) fn is_settled(&self) -> bool {
        self.awaited.is_empty() && self.resetting.is_empty()
    }

    /// Whether all of its ranks have ended, and at least one of them well.
    pub(super) fn is_finished(&self) -> bool {
        self.has_left && !self.has_returned && self.awaited.is_empty()
    }

    /// What there is too little of, even if all who are awaited come back to the workers that are
    /// there already, on these hosts.
    pub(super) fn lacks<'a>(
        &'a self,
        there: impl Iterator<Item = &'a str>,
        has_server: bool,
    ) -> Option<String> {
        if self.has_left && !self.awaited.is_empty() {
            // If they leave as well, nothing is lacking.
            return None;
        }
        let hosts = self.awaited.values().map(|one| one.host_id.as_str());
        lacks(hosts.chain(there), has_server, &self.planning, self.min_workers)
    }

    /// What ended it, and who went with it.
    pub(super) fn why(&self) -> String {
        let Some(reason) = &self.reason else { return self.changes() };
        let left = self.departed.iter().map(|who| format!("; {who} left"));
        std::iter::once(reason.to_string()).chain(left).collect()
    }

    /// Who has come and gone without a death.
    fn changes(&self) -> String {
        let left = self.departed.iter().map(|who| format!("{who} left"));
        let new = format!("{} new", counted(self.newcomers as usize, "node"));
        let new = Some(new).filter(|_| self.newcomers > 0 || self.departed.is_empty());
        left.chain(new).collect::<Vec<_>>().join(", ")
    }

    /// For whom it waits, for people; `lacks` is what it [lacks](Self::lacks).
    pub(super) fn missing(&self, lacks: Option<String>) -> String {
        let mut missing: Vec<String> =
            self.awaited.values().map(|one| one.who.to_string()).collect();
        if !self.resetting.is_empty() {
            missing.push(format!("{} to reset", counted(self.resetting.len(), "server")));
        }
        missing.extend(lacks.map(|lacks| format!("new nodes, because {lacks}")));
        missing.join(", ")
    }
}

/// What workers on these hosts lack to be a job.
pub(super) fn lacks<'a>(
    hosts: impl Iterator<Item = &'a str>,
    has_server: bool,
    planning: &Planning,
    min_workers: u32,
) -> Option<String> {
    let groups = Groups::planned(planning, hosts);
    let workers = groups.ranks() as usize;
    if workers < min_workers.max(1) as usize {
        let left = counted(workers, "worker");
        return Some(format!("{left} of at least {min_workers} (BPS_MIN_WORKERS) left"));
    }
    if !has_server && groups.need_servers(planning) {
        return Some(format!("no server left for {}", counted(workers, "worker")));
    }
    None
}
