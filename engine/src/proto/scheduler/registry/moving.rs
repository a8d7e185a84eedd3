//! Keys of servers that are lost: they get places at other servers, and nobody who declares is told
//! of any place until the keys are there.

use super::{Batch, Registered, Registry, Reply, RetiredKey};
use crate::base::{CoreId, Key};
use crate::proto::messages::{Declaration, KeySpec};
use crate::proto::moving::{Adopted, MOVED_KEYS_MAX, MovedKey};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

/// Stands for a server among those that answers to declares wait for, until keys have moved.
const NOWHERE: u32 = u32::MAX;

/// Why keys can't move from a server that is lost: what it had of them nobody else has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::proto::scheduler) enum Pinned {
    /// Values, or an optimizer's, or what slow ranks are still to be answered.
    Store,
    /// What error feedback has kept for later rounds; or ranks send what they choose to send.
    Encoding,
    /// One message can't say where they all are.
    Many,
}

impl fmt::Display for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Pinned::Store => "it kept values of tensors, or what slow ranks are to get",
            Pinned::Encoding => "there are tensors encoded as `auto`, or with error feedback",
            Pinned::Many => "",
        };
        match self {
            Pinned::Many => write!(f, "it had over {MOVED_KEYS_MAX} parts of tensors"),
            _ => f.write_str(text),
        }
    }
}

/// Where a key stands: the rounds whose results all ranks have had, and whether some have had the
/// next one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::proto::scheduler) struct Reached {
    pub(in crate::proto::scheduler) rounds: u64,
    pub(in crate::proto::scheduler) restores: bool,
}

/// Keys on their way from servers that are lost.
#[derive(Debug, Default)]
pub(super) struct Moving {
    /// They have places, and are not there.
    pub(super) homeless: BTreeSet<Key>,
    /// The batch for which answers to declares wait meanwhile.
    pub(super) batch: Option<u64>,
}

impl Registry {
    /// Why the keys of this server can't move, if so.
    pub(in crate::proto::scheduler) fn pins(&self, server: u32) -> Option<Pinned> {
        let said = || self.tensors.iter().map(|tensor| &tensor.said);
        if said().any(|said| said.store.is_some()) {
            return Some(Pinned::Store);
        }
        let keeps = |said: &Declaration| said.encoding.is_some_and(|how| how.auto || how.feedback);
        if said().any(keeps) {
            return Some(Pinned::Encoding);
        }
        let parts = self.tensors.iter().flat_map(|tensor| &tensor.parts);
        let there = parts.filter(|part| part.core.is_some_and(|core| core.server == server));
        let count = there.count() + self.moving.homeless.len();
        (count > MOVED_KEYS_MAX).then_some(Pinned::Many)
    }

    /// A server is lost: its keys get other places, and answers wait until they are there.
    pub(in crate::proto::scheduler) fn lose_server(&mut self, server: u32, now: Duration) {
        self.placer.lose(server);
        for (number, tensor) in (0u32..).zip(&mut self.tensors) {
            for (part, state) in (0u32..).zip(&mut tensor.parts) {
                if state.core.is_some_and(|core| core.server == server) {
                    state.core = self.placer.place(number, part, state.bytes);
                    self.moving.homeless.insert(state.key);
                }
            }
        }
        self.await_moves(now);
        // It answers no more. What it was to install is among what moves.
        let open: Vec<u64> = self.batches.keys().copied().collect();
        for request in open {
            let told = self.installed(server, request);
            assert!(told.is_empty(), "all answers wait for the keys that move");
        }
    }

    /// Answers to declares wait for the keys that are nowhere, if there are any.
    pub(super) fn await_moves(&mut self, now: Duration) {
        if self.moving.batch.is_none() {
            let batch = self.number();
            self.moving.batch = Some(batch);
            let waiting: Vec<u64> = self.waiting.keys().copied().collect();
            self.waiting.values_mut().for_each(|one| one.batches += 1);
            let (servers, tensors) = (BTreeSet::from([NOWHERE]), Vec::new());
            self.batches.insert(batch, Batch { since: now, servers, tensors, waiting });
        }
    }

    /// Whether a key is on its way to another server.
    pub(in crate::proto::scheduler) fn is_homeless(&self, key: Key) -> bool {
        self.moving.homeless.contains(&key)
    }

    /// All of those.
    pub(in crate::proto::scheduler) fn homeless_keys(&self) -> impl Iterator<Item = Key> + '_ {
        self.moving.homeless.iter().copied()
    }

    /// Where a key is, or is to be.
    pub(in crate::proto::scheduler) fn place_of(&self, key: Key) -> Option<CoreId> {
        let (tensor, at) = self.part_of(key)?;
        tensor.parts[at].core
    }

    /// What each server is to adopt, where keys of which something is known stand so. `is_there` of
    /// those for which it has made room.
    pub(in crate::proto::scheduler) fn adoptions(
        &self,
        known: &BTreeMap<Key, Reached>,
        is_there: impl Fn(&Key) -> bool,
    ) -> BTreeMap<u32, Vec<Adopted>> {
        let mut by_server: BTreeMap<u32, Vec<Adopted>> = BTreeMap::new();
        for (spec, server) in self.homeless().filter(|(spec, _)| !is_there(&spec.key)) {
            let Reached { rounds, restores } =
                known.get(&spec.key).copied().unwrap_or_else(|| self.unpushed(spec.key));
            let spec = KeySpec { rounds, ..spec };
            by_server.entry(server).or_default().push(Adopted { spec, restores });
        }
        by_server
    }

    /// Servers have adopted all keys that were nowhere: where they are, and what to say to those
    /// who have waited.
    pub(in crate::proto::scheduler) fn settle(
        &mut self,
        known: &BTreeMap<Key, Reached>,
    ) -> (Vec<MovedKey>, Vec<Reply>) {
        let mut moved = Vec::new();
        let mut retired: BTreeMap<u32, Vec<RetiredKey>> = BTreeMap::new();
        for key in std::mem::take(&mut self.moving.homeless) {
            let Some((tensor, at)) = self.part_of(key) else { continue };
            let Some(core) = tensor.parts[at].core else { continue };
            let Reached { rounds, restores } =
                known.get(&key).copied().unwrap_or_else(|| self.unpushed(key));
            moved.push(MovedKey { key, core, rounds, restores });
            if tensor.retired {
                let rounds = tensor.rounds.saturating_sub(tensor.base());
                let key = RetiredKey { key, core: core.core, rounds };
                retired.entry(core.server).or_default().push(key);
            }
        }
        let mut replies: Vec<Reply> =
            retired.into_iter().map(|(server, keys)| Reply::Retire { server, keys }).collect();
        if let Some(batch) = self.moving.batch.take() {
            replies.extend(self.installed(NOWHERE, batch));
        }
        (moved, replies)
    }

    /// A number for something that a server is to answer.
    pub(in crate::proto::scheduler) fn request(&mut self) -> u64 {
        self.number()
    }

    /// A key that no rank knows.
    fn unpushed(&self, key: Key) -> Reached {
        let rounds = self.part_of(key).map_or(0, |(one, _)| one.rounds.saturating_sub(one.base()));
        Reached { rounds, restores: false }
    }

    /// The tensor of a key, and which of its parts that is.
    fn part_of(&self, key: Key) -> Option<(&Registered, usize)> {
        let tensor = *self.keys.get(usize::try_from(key.0).ok()?)?;
        let tensor = self.tensors.get(tensor as usize)?;
        let at = tensor.parts.binary_search_by_key(&key, |part| part.key).ok()?;
        Some((tensor, at))
    }

    fn homeless(&self) -> impl Iterator<Item = (KeySpec, u32)> + '_ {
        self.moving.homeless.iter().filter_map(|&key| {
            let (Registered { said, parts, .. }, at) = self.part_of(key)?;
            let core = parts[at].core?;
            let spec = KeySpec {
                key,
                core: core.core,
                dtype: said.dtype,
                bytes: parts[at].bytes,
                operation: said.operation,
                rounds: 0,
                members: said.members.clone(),
                receiver: said.receiver,
                encoding: said.encoding,
                store: said.store,
            };
            Some((spec, core.server))
        })
    }
}
