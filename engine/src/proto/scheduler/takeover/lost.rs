//! Servers that were lost under an earlier scheduler, and whose keys have moved to others or are
//! about to. Members say which; where the keys are is what [`recall`](super::known::recall) makes
//! of what they know.

use super::{Resume, Scheduler, Seat, Takeover};
use std::collections::BTreeSet;

/// Whether these can be the servers that a member's epoch goes on without.
pub(super) fn can_be(resume: &Resume) -> bool {
    let (lost, servers) = (&resume.lost, resume.roster.servers.len());
    let different: BTreeSet<u32> = lost.iter().copied().collect();
    let are_servers = lost.iter().all(|server| (*server as usize) < servers);
    are_servers && different.len() == lost.len() && (lost.is_empty() || lost.len() < servers)
}

impl Takeover {
    /// Servers that were lost before, in order, as whoever knows most says.
    pub(super) fn lost(&self) -> Vec<u32> {
        let lists = self.members.values().map(|member| &member.resume.lost);
        lists.max_by_key(|list| list.len()).cloned().unwrap_or_default()
    }

    /// Whether nobody knows of others, or in another order: one was told of fewer, perhaps.
    pub(super) fn is_agreed(&self, lost: &[u32]) -> bool {
        self.members.values().all(|member| lost.starts_with(&member.resume.lost))
    }
}

impl Scheduler {
    /// A server that was given up and lives is not taken along.
    pub(super) fn refuse_lost(&mut self, takeover: &mut Takeover) {
        for server in takeover.lost() {
            if let Some(member) = takeover.members.remove(&Seat::Server(server)) {
                let register = member.resume.register;
                self.refuse_dead(member.node, &register, register.session);
            }
        }
    }
}
