//! What the members of a lost scheduler's job know of it, beside who they are.

use super::{BTreeMap, Duration, KnownTensor, Rank, Roster, Scheduler, Seat, Takeover};
use crate::proto::scheduler::registry::{Recalled, Registry};

/// Fills a registry with what ranks and servers know.
pub(super) fn recall(
    registry: &mut Registry,
    takeover: &Takeover,
    now: Duration,
) -> Result<(), String> {
    let mut all: BTreeMap<u32, Recalled> = BTreeMap::new();
    let mut keys_end = 0;
    for (seat, member) in &takeover.members {
        keys_end = keys_end.max(member.resume.keys_end);
        let Seat::Rank(rank) = seat else { continue };
        for KnownTensor { said, assignment } in &member.known {
            if assignment.until.is_some() {
                return Err(format!("tensor `{}` was declared anew", said.name));
            }
            let recalled = all
                .entry(assignment.tensor)
                .or_insert_with(|| Recalled { said: said.clone(), by: Vec::new() });
            if recalled.said != *said {
                return Err(format!("ranks know tensor {} differently", assignment.tensor));
            }
            recalled.by.push((Rank(*rank), assignment.parts.clone()));
        }
    }
    registry.recall(all, keys_end, now)
}

impl Scheduler {
    /// Ranks keep results for servers that are lost only in an epoch that began so: it goes on
    /// without members only then, whatever this scheduler was started with.
    pub(super) fn keep_rules(&mut self, roster: &Roster) {
        if let Some(elastic) = &mut self.config.elastic {
            elastic.shrinks &= roster.shrinks;
        }
    }

    /// A rank that was told of a tensor has had all its lanes since before it asked for it. So it
    /// can do without one of its servers at once, also without one that has not come.
    pub(super) fn note_lanes(&mut self, takeover: &Takeover) {
        for member in takeover.members.values().filter(|member| !member.known.is_empty()) {
            if let Some(peer) = self.peers.get_mut(&member.node) {
                peer.has_lanes = true;
            }
        }
    }
}
