//! Tensors that are cut anew while they are pushed: see [`tuning`](crate::proto::tuning).
//!
//! Invariant: a round of a tensor has one cut. The new keys are installed before any rank is told
//! of them, and a cut is taken only if every rank has said that it knows the new parts and how many
//! rounds it has begun with the old ones; the old ones have as many as the rank that is furthest.
//! Keys count their rounds from where their cut begins.

use super::{
    Batch, Declaration, Key, Part, Places, Rank, Registered, Registry, Reply, owner, retire_parts,
    specify,
};
use crate::keys::partition::{part_count, parts, share_bytes, tensor_bytes};
use crate::keys::placement::Placer;
use crate::limits::{
    ALIGNMENT, DECLARE_PARTS_MAX, GROUP_PART_BYTES_MIN, PARTS_MAX, RECUT_TENSORS_MAX,
    SERVER_PART_BYTES, SERVER_PARTS, SERVER_WHOLE_BYTES,
};
use crate::proto::messages::{Assignment, KeySpec, RetiredKey};
use crate::proto::tuning::Recut;
use crate::proto::uneven::Pushes;
use std::collections::BTreeMap;
use std::time::Duration;

/// Parts of a tensor.
#[derive(Debug)]
pub(super) struct Cut {
    /// Their owner is filled in for whoever is told.
    pub(super) parts: Vec<Part>,
    /// By part.
    pub(super) places: Vec<Places>,
}

/// Tensors that are about to be cut anew.
#[derive(Debug)]
pub(super) struct Recutting {
    next: BTreeMap<u32, Cut>,
    /// The install that not all servers have answered, if there was one.
    request: Option<u64>,
}

/// Why tensors can't be cut so: there would be too many parts, or there are too many tensors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::proto::scheduler) struct TooMany;

/// Whether a tensor may be cut anew: all ranks push it, from memory of the host, and nothing is
/// kept for its parts between rounds, as codecs and stores do.
pub(super) fn is_cuttable(said: &Declaration) -> bool {
    !said.device && said.members.is_all() && said.encoding.is_none() && said.store.is_none()
}

/// The parts that a tensor should have for the servers' sake, and the cores that these are spread
/// over: the same number on each core, and some on each server.
pub(super) fn server_shares(placer: &Placer) -> (u64, u64) {
    let (servers, cores) = placer.chosen();
    ((servers * SERVER_PARTS as u64).next_multiple_of(cores.max(1)), cores)
}

impl Registered {
    /// Rounds that it had had when it was cut into its parts.
    pub(super) fn base(&self) -> u64 {
        self.cuts.last().map_or(0, |(_, rounds)| *rounds)
    }
}

impl Registry {
    /// The round of a tensor, by that of a key of it.
    pub(in crate::proto::scheduler) fn round_of(&self, key: Key, round: u64) -> u64 {
        let tensor = usize::try_from(key.0).ok().and_then(|key| self.keys.get(key));
        let Some(tensor) = tensor.and_then(|tensor| self.tensors.get(*tensor as usize)) else {
            return round;
        };
        let cut = tensor.cuts.iter().rev().find(|(first, _)| key >= *first);
        cut.map_or(round, |(_, rounds)| rounds.saturating_add(round))
    }

    /// Largest part of a tensor of so many bytes: small enough for each rank of the largest group
    /// to have one, and for each server to answer one while the next comes in.
    ///
    /// What is encoded is few bytes, and counts by part in its codec: no server needs it finer. On
    /// GPUs each part takes copies and marks in streams.
    pub(super) fn part_bytes(&self, said: &Declaration, tensor_bytes: u64) -> u32 {
        let partition_bytes =
            if is_cuttable(said) { self.tuned_bytes } else { self.partition_bytes };
        let share = tensor_bytes.div_ceil(self.groups.largest() as u64);
        let least = (GROUP_PART_BYTES_MIN as u64).min(u64::from(partition_bytes));
        let share = share.next_multiple_of(ALIGNMENT as u64).max(least);
        // A share of 4 GiB and more is above any partition.
        let for_ranks = u32::try_from(share).unwrap_or(u32::MAX).min(partition_bytes);
        if said.encoding.is_some() || said.device || !self.needs_servers(said) {
            return for_ranks;
        }
        let units = (SERVER_PART_BYTES, SERVER_WHOLE_BYTES);
        let for_servers = share_bytes(tensor_bytes, self.shares, units, partition_bytes);
        for_ranks.min(for_servers)
    }

    /// Cuts a tensor, and gives its parts keys and places.
    pub(super) fn cut(&mut self, tensor: u32, said: &Declaration) -> Cut {
        let mut cut = Cut { parts: Vec::new(), places: Vec::new() };
        let count = said.shape.count();
        let all = tensor_bytes(count, said.dtype).unwrap_or(u64::MAX);
        let part_bytes = self.part_bytes(said, all);
        let pieces: Vec<(u64, u32)> = parts(count, said.dtype, part_bytes).collect();
        let (served, of_all) = (self.needs_servers(said), said.members.is_all());
        let equal = pieces.iter().take_while(|(_, bytes)| *bytes == pieces[0].1).count();
        for (part, (offset, bytes)) in (0u32..).zip(pieces) {
            let core = served.then(|| self.placer.place(tensor, part, bytes));
            let key = Key(self.keys.len() as u64);
            self.keys.push(tensor);
            let (core, owner) = (core.flatten(), Rank(0));
            cut.parts.push(Part { key, offset, bytes, core, owner });
            let in_turn = said.device.then_some((part as usize, equal));
            // Owners of a set's parts are found without.
            let chosen = of_all.then(|| self.owners.choose(bytes, in_turn));
            cut.places.push(chosen.unwrap_or_default());
        }
        cut
    }

    /// The parts of a tensor, with their owners in the group of this rank.
    pub(super) fn parts_for(
        &self,
        rank: Rank,
        said: &Declaration,
        parts: &[Part],
        places: &[Places],
    ) -> Vec<Part> {
        let part = |(part, places): (&Part, &Places)| Part {
            owner: owner(&self.groups, rank, (part.key, places), said),
            ..*part
        };
        parts.iter().zip(places).map(part).collect()
    }

    /// Cuts into parts of at most so many bytes what can be, once the ranks have agreed on it; what
    /// is declared from now on is cut so at once. Returns what is to be sent to servers.
    ///
    /// # Errors
    /// It can't be done; nothing is changed then.
    pub(in crate::proto::scheduler) fn recut(
        &mut self,
        partition_bytes: u32,
        now: Duration,
    ) -> Result<Vec<Reply>, TooMany> {
        assert!(self.recutting.is_none(), "one cut is agreed on before the next begins");
        let before = std::mem::replace(&mut self.tuned_bytes, partition_bytes);
        let chosen: Vec<u32> = (0..)
            .zip(&self.tensors)
            .filter(|(_, one)| self.changes(one))
            .map(|(at, _)| at)
            .collect();
        let count = |tensor: &u32| self.count_of(&self.tensors[*tensor as usize].said);
        let count = chosen.iter().map(count).fold(0, u64::saturating_add);
        // Half of all keys are left to tensors that are still to come.
        let all = (self.keys.len() as u64).saturating_add(count);
        let is_too_much = count > DECLARE_PARTS_MAX as u64 / 2 || all > PARTS_MAX as u64 / 2;
        if is_too_much || chosen.len() > RECUT_TENSORS_MAX {
            self.tuned_bytes = before;
            return Err(TooMany);
        }
        let mut by_server: BTreeMap<u32, Vec<KeySpec>> = BTreeMap::new();
        let mut next = BTreeMap::new();
        for tensor in chosen {
            let said = self.tensors[tensor as usize].said.clone();
            let cut = self.cut(tensor, &said);
            specify(&said, &cut.parts, 0, &mut by_server);
            next.insert(tensor, cut);
        }
        let request = (!by_server.is_empty()).then(|| self.number());
        self.recutting = Some(Recutting { next, request });
        let Some(request) = request else { return Ok(Vec::new()) };
        let servers = by_server.keys().copied().collect();
        let batch = Batch { since: now, servers, tensors: Vec::new(), waiting: Vec::new() };
        self.batches.insert(request, batch);
        let install = |(server, keys)| Reply::Install { server, request, keys };
        Ok(by_server.into_iter().map(install).collect())
    }

    fn count_of(&self, said: &Declaration) -> u64 {
        let bytes = tensor_bytes(said.shape.count(), said.dtype).unwrap_or(u64::MAX);
        part_count(bytes, self.part_bytes(said, bytes))
    }

    /// Whether a tensor can be cut anew and is to have other parts than it has. One that is not
    /// pushed now keeps its parts, and so does one whose servers do not know these yet.
    fn changes(&self, tensor: &Registered) -> bool {
        let is_in_use = !tensor.retired && tensor.batch.is_none();
        let is_spoiled =
            self.names.get(&tensor.said.name).is_none_or(|name| name.spoiled.is_some());
        is_in_use
            && !is_spoiled
            && is_cuttable(&tensor.said)
            && self.count_of(&tensor.said) != tensor.parts.len() as u64
    }

    /// Whether servers have made room for what is to be cut anew.
    pub(in crate::proto::scheduler) fn is_recut_installed(&self) -> bool {
        let request = self.recutting.as_ref().and_then(|recutting| recutting.request);
        request.is_none_or(|request| !self.batches.contains_key(&request))
    }

    /// What a rank has to know of the parts to come.
    pub(in crate::proto::scheduler) fn recuts_for(&self, rank: Rank) -> Vec<Recut> {
        let next = self.recutting.iter().flat_map(|recutting| &recutting.next);
        let recut = |(&tensor, cut): (&u32, &Cut)| {
            let said = self.tensors[tensor as usize].said.clone();
            let parts = self.parts_for(rank, &said, &cut.parts, &cut.places);
            Recut { said, assignment: Assignment { tensor, parts, until: None } }
        };
        next.map(recut).collect()
    }

    /// The ranks have agreed: these tensors have had so many rounds, in rising order, when their
    /// new parts begin. The others keep their parts. Returns what servers may forget, and what the
    /// ranks are to be told.
    pub(in crate::proto::scheduler) fn take_cuts(
        &mut self,
        agreed: &BTreeMap<u32, u64>,
    ) -> (Vec<Reply>, Vec<Pushes>) {
        let mut by_server: BTreeMap<u32, Vec<RetiredKey>> = BTreeMap::new();
        let mut told = Vec::new();
        let next = self.recutting.take().map(|recutting| recutting.next).unwrap_or_default();
        for (number, cut) in next {
            let Some(&rounds) = agreed.get(&number) else {
                retire_parts(&cut.parts, 0, &mut by_server);
                continue;
            };
            let tensor = &mut self.tensors[number as usize];
            retire_parts(&tensor.parts, rounds.saturating_sub(tensor.base()), &mut by_server);
            tensor.cuts.push((cut.parts[0].key, rounds));
            (tensor.parts, tensor.places) = (cut.parts, cut.places);
            if tensor.retired {
                // All ranks have replaced it meanwhile.
                let last = tensor.rounds.saturating_sub(rounds);
                retire_parts(&tensor.parts, last, &mut by_server);
            }
            Pushes::append(&mut told, number, rounds);
        }
        let retire = |(server, keys)| Reply::Retire { server, keys };
        (by_server.into_iter().map(retire).collect(), told)
    }
}
