//! What a shard finds out about itself a few times a second: gauges, and rounds that wait too long.

#![forbid(unsafe_code)]

use super::{Receiving, Report, Session, Shard};
use crate::entry::Entry;
use bps_engine::base::{Key, Rank, milliseconds};
use bps_engine::proto::late::{LATE_RANKS_MAX, LateCollector, LateKeys};
use bps_engine::proto::messages::{STALLS_SHOWN_MAX, StalledKey};
use bps_engine::proto::paths::KeyState;
use std::collections::BTreeSet;
use std::time::Duration;

impl Shard {
    /// Brings the gauges among its counters up to date: a few times a second, not in each turn.
    pub fn sample(&self) {
        let sessions = || self.sessions.iter().flatten();
        let parked = |one: &&Session| matches!(one.receiving, Receiving::Parked { .. });
        let counters = &self.counters;
        counters.parked_now.set(sessions().filter(parked).count() as u64);
        counters.queued.set(sessions().map(|one| one.outgoing.queued()).sum());
        counters.lanes.set(sessions().count() as u64);
        counters.keys.set(self.key_count() as u64);
        counters.arena_claimed.set(self.arena.claimed_bytes() as u64);
        counters.arena_resident.set(self.arena.resident_bytes() as u64);
    }

    /// Tells how far these keys are.
    pub(super) fn tell_states(&mut self, keys: &[Key]) {
        let now = self.now;
        let state = |key: &Key| {
            let entry = &self.entries[*self.index.get(key)?];
            let since = now.saturating_sub(entry.published_at);
            Some(KeyState {
                key: *key,
                published: entry.published(),
                published_ms: milliseconds(since),
                missing: entry.unheard().collect(),
            })
        };
        let keys: Vec<KeyState> = keys.iter().filter_map(state).collect();
        if !keys.is_empty() {
            self.report(Report::KeyStates { keys });
        }
    }

    pub(super) fn look_for_stalls(&mut self, now: Duration) {
        let waited = |entry: &Entry| entry.opened_at.map(|since| now.saturating_sub(since));
        let gone = |entry: &Entry| -> Vec<Rank> {
            entry.missing().filter(|&rank| self.left.contains(rank.0)).collect()
        };
        let overdue = |entry: &&Entry| {
            waited(entry).is_some_and(|time| {
                time >= self.stall_report || !self.left.is_empty() && !gone(entry).is_empty()
            })
        };
        let mut stalled: Vec<&Entry> = self.entries.iter().filter(overdue).collect();
        if stalled.is_empty() && !self.stalls_told {
            return;
        }
        stalled.sort_by_key(|entry| entry.opened_at);
        stalled.truncate(STALLS_SHOWN_MAX);
        let describe = |entry: &&Entry| StalledKey {
            key: entry.key,
            round: entry.round + 1,
            waited_ms: waited(entry).map_or(0, milliseconds),
            missing: entry.missing().collect(),
            left: gone(entry),
        };
        let keys: Vec<StalledKey> = stalled.iter().map(describe).collect();
        for entry in &mut self.entries {
            let long = waited(entry).is_some_and(|time| time >= self.stall_report);
            if long && !std::mem::replace(&mut entry.stall_counted, true) {
                self.counters.stalls.add(1);
            }
        }
        self.stalls_told = !keys.is_empty();
        let late = self.late_keys(&keys);
        self.report(Report::Stalled { keys, late });
    }

    /// All that waits for the ranks that these keys wait for: a late rank holds up many, of which
    /// only the oldest are described.
    fn late_keys(&self, keys: &[StalledKey]) -> Vec<LateKeys> {
        let ranks: BTreeSet<Rank> = keys.iter().flat_map(|key| &key.missing).copied().collect();
        let mut late = LateCollector::default();
        for entry in self.entries.iter().filter(|entry| entry.opened_at.is_some()) {
            for &rank in ranks.iter().take(LATE_RANKS_MAX) {
                if entry.is_missing(rank) {
                    late.add(rank, entry.key);
                }
            }
        }
        late.finish(false)
    }
}
