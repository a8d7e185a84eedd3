//! Which keys a shard has: installed as tensors are declared, and forgotten with their memory once
//! no rank pushes them any more.

use super::Shard;
use crate::entry::{Entry, Groups, accumulator_bytes};
use bps_engine::base::{DType, Key, Operation, word};
use bps_engine::limits::{ALIGNMENT, PART_BYTES_MAX};
use bps_engine::mem::MemoryError;
use bps_engine::proto::encoding::EncodingFault;
use bps_engine::proto::members::Members;
use bps_engine::proto::messages::{KeySpec, RetiredKey};
use bps_engine::proto::moving::Adopted;
use bps_engine::proto::receiver::ReceiverFault;
use bps_engine::proto::store::{Deltas, Store, StoreFault};
use bps_engine::trace::log;
use bps_engine::transport::DirectMemory;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

/// So many bytes may take a second.
const SLOW_BYTES: usize = 1 << 30;

/// Why keys are not installed. The scheduler says what they are, and is not believed.
#[derive(Debug, thiserror::Error)]
pub(super) enum InstallError {
    /// Not the size of a part, or not whole elements.
    #[error("{key} has {bytes} bytes of {dtype}: it can't be summed")]
    Size { key: Key, bytes: u32, dtype: DType },
    /// It can't be encoded so.
    #[error("{key} can't be encoded: {fault}")]
    Encoding { key: Key, fault: EncodingFault },
    /// Its value can't be kept.
    #[error("{key} can't be stored: {fault}")]
    Store { key: Key, fault: StoreFault },
    /// Its results can't go to one rank.
    #[error("the results of {key} can't go to one rank: {fault}")]
    Receiver { key: Key, fault: ReceiverFault },
    /// It is there.
    #[error("{key} was installed twice")]
    Twice { key: Key },
    /// It was retired, and is to be something else now.
    #[error("{key} was installed again as something else")]
    Changed { key: Key },
    /// Its rounds are whole or nothing.
    #[error("{key} can't get back a result that a lost server had: its rounds need all ranks")]
    Restored { key: Key },
    /// It is for ranks that are not there, or from one that it is not for.
    #[error("{key} is for {members}, its root among them, which are not all ranks of this job")]
    Members { key: Key, members: Members },
    /// No pages, for all of them together.
    #[error("no memory for tensors: {0}")]
    Pages(MemoryError),
    /// No place in the arena.
    #[error("no memory for {key}: {error}")]
    Claim { key: Key, error: MemoryError },
}

/// Whether this is what a part can be.
fn check(spec: &KeySpec) -> Result<(), InstallError> {
    let KeySpec { key, bytes, dtype, .. } = *spec;
    let fits = (1..=PART_BYTES_MAX).contains(&(bytes as usize));
    if !fits || !bytes.is_multiple_of(word(dtype.size())) {
        return Err(InstallError::Size { key, bytes, dtype });
    }
    if let Some(store) = spec.store {
        let checked = store.check_key(dtype, spec.operation, spec.encoding);
        return checked.map_err(|fault| InstallError::Store { key, fault });
    }
    let Some(encoding) = spec.encoding else { return Ok(()) };
    let elements = u64::from(bytes / word(dtype.size()));
    let checked = encoding.check(dtype, spec.operation, elements);
    checked.map_err(|fault| InstallError::Encoding { key, fault })
}

impl Shard {
    pub(super) fn install(&mut self, keys: &[KeySpec]) -> Result<(), InstallError> {
        keys.iter().try_for_each(check)?;
        let shrinks = self.groups.shrinks();
        let is_new = |spec: &&KeySpec| !self.index.contains_key(&spec.key);
        let bytes = keys.iter().filter(is_new).map(|spec| accumulator_bytes(spec, shrinks));
        self.prepare(bytes.map(|bytes| bytes.next_multiple_of(ALIGNMENT)).sum())?;
        for spec in keys {
            let key = spec.key;
            if let Some(&index) = self.index.get(&key) {
                // A retired key that is still busy, and used again before it could be forgotten.
                let entry = &mut self.entries[index];
                if entry.last_round.take().is_none() {
                    return Err(InstallError::Twice { key });
                }
                let is_same = (entry.dtype, entry.bytes) == (spec.dtype, spec.bytes as usize)
                    && (entry.encoding(), entry.store()) == (spec.encoding, spec.store)
                    && entry.receiver() == spec.receiver
                    && *entry.groups().members() == spec.members;
                if !is_same {
                    return Err(InstallError::Changed { key });
                }
                continue;
            }
            let groups = self.groups_of(spec)?;
            let claimed = self.arena.claim(accumulator_bytes(spec, shrinks));
            let accumulator = claimed.map_err(|error| InstallError::Claim { key, error })?;
            let entry = Entry::new(spec, &groups, accumulator);
            let index = self.vacant.pop().unwrap_or(self.entries.len());
            if index == self.entries.len() {
                self.entries.push(entry);
            } else {
                self.entries[index] = entry;
            }
            self.index.insert(spec.key, index);
        }
        if let Some(base) = NonNull::new(self.arena.base()) {
            let bytes = self.arena.resident_bytes();
            // SAFETY: below its resident bytes the arena is mapped, and the endpoint is dropped
            // before it. Nothing is granted of it, and no payload of a core is a GPU's.
            let registered =
                unsafe { self.endpoint.register_memory(DirectMemory::ToSend { base, bytes }) };
            if let Err(error) = registered {
                log::warning!("publications are copied before a device sends them: {error}");
            }
        }
        self.results.make_room(self.entries.len());
        Ok(())
    }

    /// Takes keys of a server that is lost. What it has got of them before, nobody has used.
    pub(super) fn adopt(&mut self, keys: &[Adopted]) -> Result<(), InstallError> {
        for Adopted { spec, .. } in keys {
            let Some(&index) = self.index.get(&spec.key) else { continue };
            if !self.entries[index].is_untouched() {
                return Err(InstallError::Twice { key: spec.key });
            }
            self.forget(index);
        }
        let specs: Vec<KeySpec> = keys.iter().map(|one| one.spec.clone()).collect();
        self.install(&specs)?;
        for Adopted { spec, .. } in keys.iter().filter(|one| one.restores) {
            let index = self.index[&spec.key];
            if !self.entries[index].shrinks() {
                return Err(InstallError::Restored { key: spec.key });
            }
            self.entries[index].restore();
        }
        Ok(())
    }

    /// The groups of the ranks that a key is for.
    fn groups_of(&mut self, spec: &KeySpec) -> Result<Arc<Groups>, InstallError> {
        let (key, members) = (spec.key, &spec.members);
        let strange = || InstallError::Members { key, members: members.clone() };
        let groups = if members.is_all() {
            &self.groups
        } else if let Some(known) = self.sets.get(members) {
            known
        } else {
            let few = self.groups.among(members).ok_or_else(strange)?;
            // Those that no key has any more are of no use.
            self.sets.retain(|_, groups| Arc::strong_count(groups) > 1);
            self.sets.entry(members.clone()).or_insert(Arc::new(few))
        };
        spec.check_receiver(|rank| groups.has(rank), groups.shrinks())
            .map_err(|fault| InstallError::Receiver { key, fault })?;
        if let Some(backup) = spec.store.and_then(Store::backup) {
            let checked = backup.check_ranks(members, self.groups.ranks());
            checked.map_err(|fault| InstallError::Store { key, fault: fault.into() })?;
        }
        match (spec.operation, spec.store) {
            (Operation::Broadcast(root), _) | (_, Some(Store::Deltas(Deltas { root, .. })))
                if !groups.has(root) =>
            {
                Err(strange())
            }
            (_, Some(store)) if store.is_apart() => {
                self.apart.retain(|_, groups| Arc::strong_count(groups) > 1);
                let apart = self.apart.entry(members.clone());
                Ok(Arc::clone(apart.or_insert_with(|| Arc::new(groups.apart()))))
            }
            _ => Ok(Arc::clone(groups)),
        }
    }

    /// Takes the pages of all accumulators at once, with a line where that takes a while.
    fn prepare(&mut self, bytes: usize) -> Result<(), InstallError> {
        let start = Instant::now();
        let gigabytes = bytes as f64 / 1e9;
        if bytes >= SLOW_BYTES {
            log::info!("core {}: takes {gigabytes:.1} GB for declared tensors", self.core);
        }
        self.arena.prepare(bytes).map_err(InstallError::Pages)?;
        if bytes >= SLOW_BYTES {
            let seconds = start.elapsed().as_secs_f64();
            log::info!("core {}: has the {gigabytes:.1} GB after {seconds:.1} s", self.core);
        }
        Ok(())
    }

    /// These keys are pushed no more after their last rounds, which may still be on their way.
    pub(super) fn retire(&mut self, keys: &[RetiredKey]) {
        for &RetiredKey { key, rounds, .. } in keys {
            let Some(&index) = self.index.get(&key) else { continue };
            self.entries[index].last_round = Some(rounds);
            self.forget_if_over(index);
        }
    }

    /// Takes back the memory of a retired key that has had its last round and is read by nobody.
    pub(super) fn forget_if_over(&mut self, index: usize) {
        if self.entries[index].is_over() {
            self.forget(index);
        }
    }

    fn forget(&mut self, index: usize) {
        // What stays is never found by a key, and claims nothing.
        let nothing = self.arena.claim(0).expect("a claim of no bytes always has room");
        let key: Key = self.entries[index].key;
        let accumulator = self.entries[index].take_accumulator(nothing);
        self.arena.release(accumulator);
        self.index.remove(&key);
        self.vacant.push(index);
    }

    /// Keys that are installed.
    pub(super) fn key_count(&self) -> usize {
        self.entries.len() - self.vacant.len()
    }
}
