//! Which keys a shard has: installed as tensors are declared, and forgotten with their memory once
//! no rank pushes them any more.

use super::Shard;
use crate::entry::{Entry, accumulator_bytes};
use bps_engine::base::Key;
use bps_engine::limits::ALIGNMENT;
use bps_engine::proto::messages::{KeySpec, RetiredKey};
use bps_engine::trace::log;
use bps_engine::transport::DirectMemory;
use std::ptr::NonNull;
use std::time::Instant;

/// So many bytes may take a second.
const SLOW_BYTES: usize = 1 << 30;

impl Shard {
    pub(super) fn install(&mut self, keys: &[KeySpec]) -> Result<(), String> {
        let is_new = |spec: &&KeySpec| !self.index.contains_key(&spec.key);
        let bytes = keys.iter().filter(is_new).map(accumulator_bytes);
        self.prepare(bytes.map(|bytes| bytes.next_multiple_of(ALIGNMENT)).sum())?;
        for spec in keys {
            if spec.bytes == 0 {
                return Err(format!("{} has no bytes: it can't be summed", spec.key));
            }
            if let Some(&index) = self.index.get(&spec.key) {
                // A retired key that is still busy, and used again before it could be forgotten.
                if self.entries[index].last_round.take().is_none() {
                    return Err(format!("{} was installed twice", spec.key));
                }
                continue;
            }
            let accumulator = self
                .arena
                .claim(accumulator_bytes(spec))
                .map_err(|error| format!("no memory for {}: {error}", spec.key))?;
            let entry = Entry::new(spec, &self.groups, accumulator);
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

    /// Takes the pages of all accumulators at once, with a line where that takes a while.
    fn prepare(&mut self, bytes: usize) -> Result<(), String> {
        let start = Instant::now();
        let gigabytes = bytes as f64 / 1e9;
        if bytes >= SLOW_BYTES {
            log::info!("core {}: takes {gigabytes:.1} GB for declared tensors", self.core);
        }
        self.arena.prepare(bytes).map_err(|error| format!("no memory for tensors: {error}"))?;
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
        if !self.entries[index].is_over() {
            return;
        }
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
