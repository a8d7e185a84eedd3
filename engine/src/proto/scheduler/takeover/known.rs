//! What the members of a lost scheduler's job know of it, beside who they are.

use super::{
    AdoptedKey, BTreeMap, BTreeSet, Duration, KnownTensor, Node, Planning, Rank, Roster, Scheduler,
    Seat, Standing, Takeover,
};
use crate::base::{CoreId, Key};
use crate::proto::scheduler::Running;
use crate::proto::scheduler::moving::Kept;
use crate::proto::scheduler::registry::{Moves, Recalled, Told};

/// Keys that servers which have come have adopted, and where.
type AdoptedKeys = BTreeMap<Key, (CoreId, AdoptedKey)>;

/// Fills the registry with what ranks and servers know, and says which keys are still on their way
/// from servers that are lost.
///
/// # Errors
/// Why the epoch can't go on.
pub(super) fn recall(
    running: &mut Running,
    takeover: &Takeover,
    shrinks: bool,
    now: Duration,
) -> Result<(), String> {
    let mut all: BTreeMap<u32, Recalled> = BTreeMap::new();
    let mut holders: BTreeMap<Key, BTreeSet<Rank>> = BTreeMap::new();
    let mut keys_end = 0;
    for (seat, member) in &takeover.members {
        keys_end = keys_end.max(member.resume.keys_end);
        let Seat::Rank(rank) = seat else { continue };
        for KnownTensor { said, assignment, holds } in &member.known {
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
            for key in holds {
                holders.entry(*key).or_default().insert(Rank(*rank));
            }
        }
    }
    let lost = takeover.lost();
    running.moving.lost.clone_from(&lost);
    if !lost.is_empty() && !shrinks {
        return Err("servers were lost, and this scheduler has no BPS_ELASTIC=shrink".to_owned());
    }
    if !takeover.is_agreed(&lost) {
        return Err("members know of different servers that are lost".to_owned());
    }
    let adopted = adopted(takeover);
    let cores = adopted.iter().map(|(key, (core, _))| (*key, *core)).collect();
    let moves = Moves { lost, adopted: cores };
    let told = running.registry.recall(all, keys_end, &moves, now)?;
    recall_moves(running, takeover, (told, adopted, holders))
}

fn adopted(takeover: &Takeover) -> AdoptedKeys {
    let servers = takeover.members.iter().filter_map(|(seat, member)| match seat {
        Seat::Server(server) => Some((*server, &member.adopted)),
        Seat::Rank(_) => None,
    });
    let keys = servers.flat_map(|(server, adopted)| {
        adopted.iter().map(move |one| (one.key, (CoreId { server, core: one.core }, *one)))
    });
    keys.collect()
}

/// Keys that are with a server already, and that some ranks do not know to be there; and keys with
/// a result that some ranks have not had yet.
fn recall_moves(
    running: &mut Running,
    takeover: &Takeover,
    (told, adopted, holders): (BTreeMap<Key, Told>, AdoptedKeys, BTreeMap<Key, BTreeSet<Rank>>),
) -> Result<(), String> {
    let Running { registry, moving, .. } = running;
    let has = |key: &Key| holders.get(key).cloned().unwrap_or_default();
    for (key, Told { core, aware }) in told {
        let there = adopted.get(&key).filter(|(at, _)| *at == core);
        let Some((_, AdoptedKey { rounds, restores, .. })) = there else {
            if takeover.members.contains_key(&Seat::Server(core.server)) {
                return Err("servers do not know keys that ranks know to have moved".to_owned());
            }
            // That one has not come, and is lost as well.
            continue;
        };
        let holders = has(&key).intersection(&aware).copied().collect();
        let (rounds, restores) = (*rounds, *restores);
        moving.kept.insert(key, Kept { core, rounds, restores, aware, holders });
    }
    let is_kept = |key: &Key| moving.kept.contains_key(key);
    if !takeover.left().is_empty() && registry.homeless_keys().any(|key| !is_kept(&key)) {
        return Err(format!("keys can't move: {}", crate::proto::scheduler::moving::HAS_LEFT));
    }
    for (key, (core, one)) in adopted {
        let is_there = registry.place_of(key) == Some(core) && !registry.is_homeless(key);
        if !one.restores || !is_there {
            continue;
        }
        let holders = has(&key);
        if holders.is_empty() {
            let name = registry.name_of(key).unwrap_or("a tensor");
            return Err(format!("no rank has the last result of `{name}`"));
        }
        moving.restoring.insert(key, holders);
    }
    Ok(())
}

impl Scheduler {
    /// Ranks keep results for servers that are lost only in an epoch that began so: it goes on
    /// without members only then, whatever this scheduler was started with.
    pub(super) fn keep_rules(&mut self, roster: &Roster) {
        if let Some(elastic) = &mut self.config.elastic {
            elastic.shrinks &= roster.shrinks;
        }
    }

    /// How tensors are planned, as any worker says.
    pub(super) fn planning(&self, takeover: &Takeover) -> Option<Planning> {
        let members = takeover.members.values().map(|member| &member.resume.register);
        let early = self.peers.values().filter_map(|peer| match &peer.standing {
            Standing::Early(register) => Some(&**register),
            _ => None,
        });
        let mut all = members.chain(early);
        all.find_map(|register| match &register.node {
            Node::Worker { planning, .. } => Some(planning.clone()),
            Node::Server { .. } => None,
        })
    }

    /// A rank that resumes has all its lanes: before that it says nothing to a later scheduler. So
    /// it can do without one of its servers at once, also without one that has not come.
    pub(super) fn note_lanes(&mut self, takeover: &Takeover) {
        for member in takeover.members.values() {
            if let Some(peer) = self.peers.get_mut(&member.node) {
                peer.has_lanes = true;
            }
        }
    }
}
