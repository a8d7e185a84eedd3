//! A member of a job as a scheduler sees it, and what it tells the next one.

use super::*;
use crate::proto::moving::{HeldKey, MovedKey};
use crate::proto::resume::Resume;

/// A member of a job, and what it would tell another scheduler.
#[derive(Clone)]
pub(super) struct Member {
    pub(super) node: u64,
    pub(super) register: Register,
    pub(super) term: u32,
    pub(super) roster: Roster,
    pub(super) reset: Option<Epoch>,
    pub(super) gone: Vec<Rank>,
    pub(super) left: Vec<Rank>,
    pub(super) known: BTreeMap<u32, KnownTensor>,
    pub(super) keys: BTreeMap<Key, KeySpec>,
    /// Requests without an answer; a declaration where there is one.
    pub(super) open: BTreeMap<u64, Option<Declaration>>,
    pub(super) passed: u64,
    pub(super) next: u64,
    /// Servers that it knows to be lost, and whose keys have moved.
    pub(super) lost: Vec<u32>,
    /// Keys that it has room for since then.
    pub(super) adopted: BTreeMap<Key, AdoptedKey>,
    /// Where keys have moved, as it was told last, and how often it was told of any.
    pub(super) moved: BTreeMap<Key, MovedKey>,
    pub(super) moves: u32,
    /// How often it was told to make room.
    pub(super) adoptions: u32,
    /// Rounds whose results it has had, where that is of interest, and whether it has the last one.
    pub(super) rounds: BTreeMap<Key, u64>,
    pub(super) is_holder: bool,
    pub(super) lives: bool,
    /// A server that was told to leave, and asks to be let go.
    pub(super) leaves: bool,
    /// It was told that the job goes on without it.
    pub(super) is_released: bool,
    /// It was told that its job is over, or that it goes on without it.
    pub(super) told: Option<OverReason>,
}

impl Member {
    pub(super) fn new(node: u64, register: Register, roster: Roster) -> Member {
        Member {
            node,
            register,
            term: roster.term,
            roster,
            reset: None,
            gone: Vec::new(),
            left: Vec::new(),
            known: BTreeMap::new(),
            keys: BTreeMap::new(),
            open: BTreeMap::new(),
            passed: 0,
            next: 0,
            lost: Vec::new(),
            adopted: BTreeMap::new(),
            moved: BTreeMap::new(),
            moves: 0,
            adoptions: 0,
            rounds: BTreeMap::new(),
            is_holder: false,
            lives: true,
            leaves: false,
            is_released: false,
            told: None,
        }
    }

    pub(super) fn is_worker(&self) -> bool {
        matches!(self.register.node, Node::Worker { .. })
    }

    /// What it says of keys that it knows with lost servers alone.
    pub(super) fn held(&self) -> Vec<HeldKey> {
        let parts = self.known.values().flat_map(|known| &known.assignment.parts);
        let is_away = |part: &&Part| part.core.is_some_and(|one| self.lost.contains(&one.server));
        let held = |part: &Part| {
            let rounds = *self.rounds.get(&part.key)?;
            Some(HeldKey { key: part.key, rounds, holds: self.is_holder })
        };
        parts.filter(is_away).filter_map(held).collect()
    }

    /// Of a tensor, the keys whose last result it had when they moved, and others had not.
    pub(super) fn holds(&self, known: &KnownTensor) -> Vec<Key> {
        let keys = known.assignment.parts.iter().map(|part| part.key);
        let has = |key: &Key| {
            let given = self.moved.get(key).filter(|moved| self.is_holder && moved.restores);
            given.is_some_and(|moved| self.rounds.get(key) == Some(&(moved.rounds + 1)))
        };
        keys.filter(has).collect()
    }

    pub(super) fn account(&self) -> Vec<NodeMessage> {
        let resume = Resume {
            register: self.register.clone(),
            term: self.term,
            roster: self.roster.clone(),
            reset: self.reset,
            gone: self.gone.clone(),
            lost: self.lost.clone(),
            left: self.left.clone(),
            barriers: self.passed,
            tensors: self.known.len() as u64,
            keys_end: self.keys.keys().next_back().map_or(0, |key| key.0 + 1),
            adopted: self.adopted.len() as u64,
            obstacle: None,
        };
        let adopted: Vec<AdoptedKey> = self.adopted.values().copied().collect();
        let known = self.known.values();
        let known = known.map(|one| KnownTensor { holds: self.holds(one), ..one.clone() });
        NodeMessage::resuming(resume, known, &adopted)
    }
}
