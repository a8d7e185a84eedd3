//! What a key keeps beside its memory whose value stays there between rounds: how far each rank is,
//! and who is to be answered.
//!
//! A rank's first contribution is the value if it is the root's, and empty otherwise; each later
//! one is a delta. A rank is answered once there is a value that holds its own contribution, and
//! once the slowest rank is near enough, if there is a bound.

#![forbid(unsafe_code)]

use super::groups::{Groups, NumberSet};
use bps_engine::base::Rank;
use bps_engine::proto::store::Deltas;

/// What a rank has that left in good order: nobody waits for it.
const LEFT: u64 = u64::MAX;

/// See the [module](self).
pub(super) struct Stored {
    store: Deltas,
    /// Contributions of each rank that are complete, by its place among the key's ranks.
    counts: Box<[u64]>,
    /// The root's first contribution is complete.
    has_value: bool,
    /// Ranks whose contribution is complete and not answered.
    waiting: NumberSet,
    /// Ranks to which the value is being sent.
    told: NumberSet,
}

impl Stored {
    /// Nobody has contributed yet.
    pub(super) fn new(store: Deltas, groups: &Groups) -> Stored {
        let places = groups.iter().last().map_or(0, |last| last.0 + 1);
        Stored {
            store,
            counts: vec![0; groups.ranks() as usize].into(),
            has_value: false,
            waiting: NumberSet::new(places),
            told: NumberSet::new(places),
        }
    }

    /// How its deltas are added up.
    pub(super) fn store(&self) -> Deltas {
        self.store
    }

    /// The round that this rank contributes to next.
    pub(super) fn open_round(&self, place: u32) -> u64 {
        self.counts[place as usize].saturating_add(1)
    }

    /// Whether this rank's next contribution has bytes.
    pub(super) fn takes_bytes(&self, rank: Rank, place: u32) -> bool {
        rank == self.store.root || self.counts[place as usize] > 0
    }

    /// Whether a contribution of this rank is complete and not answered.
    pub(super) fn is_waiting(&self, rank: Rank) -> bool {
        self.waiting.contains(rank.0)
    }

    /// A contribution of this rank is complete. Says whether it has changed the value.
    pub(super) fn complete(&mut self, rank: Rank, place: u32) -> bool {
        let count = &mut self.counts[place as usize];
        let is_first = *count == 0;
        *count += 1;
        self.waiting.insert(rank.0);
        self.has_value |= rank == self.store.root;
        rank == self.store.root || !is_first
    }

    /// This rank will contribute no more: nobody waits for it, unless for the value itself.
    pub(super) fn leave(&mut self, rank: Rank, place: u32) {
        if rank != self.store.root || self.has_value {
            self.counts[place as usize] = LEFT;
        }
    }

    /// This rank has died: it is not answered either.
    pub(super) fn lose(&mut self, rank: Rank, place: u32) {
        self.counts[place as usize] = LEFT;
        if self.waiting.contains(rank.0) {
            self.waiting.remove(rank.0);
        }
    }

    /// Deltas of a rank with so many contributions.
    fn deltas(count: u64) -> u64 {
        count.saturating_sub(1)
    }

    /// The most deltas that an answered rank may have.
    fn bound(&self) -> u64 {
        let Some(staleness) = self.store.staleness else { return u64::MAX };
        let slowest = self.counts.iter().min().map_or(LEFT, |least| Stored::deltas(*least));
        slowest.saturating_add(u64::from(staleness))
    }

    fn count_of(&self, groups: &Groups, rank: Rank) -> u64 {
        self.counts[groups.of(rank) as usize]
    }

    /// Whether some rank is to be answered now.
    pub(super) fn has_due(&self, groups: &Groups) -> bool {
        let bound = self.bound();
        let is_due = |rank| Stored::deltas(self.count_of(groups, Rank(rank))) <= bound;
        self.has_value && self.waiting.iter().any(is_due)
    }

    /// The value is sent to all that are to be answered now: returns how many they are.
    pub(super) fn answer(&mut self, groups: &Groups) -> u32 {
        let (bound, mut next) = (self.bound(), self.waiting.next(0));
        while let Some(rank) = next {
            if Stored::deltas(self.count_of(groups, Rank(rank))) <= bound {
                self.waiting.remove(rank);
                self.told.insert(rank);
            }
            next = self.waiting.next(rank + 1);
        }
        self.told.len()
    }

    /// The ranks to which the value is being sent.
    pub(super) fn told(&self) -> &NumberSet {
        &self.told
    }

    /// The value has been sent to all of them.
    pub(super) fn sent(&mut self) {
        self.told.clear();
    }

    /// Whether nobody waits for an answer.
    pub(super) fn is_idle(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Whether a rank waits for this one: to give the first value, or to come within the bound.
    pub(super) fn is_missing(&self, groups: &Groups, rank: Rank) -> bool {
        if self.waiting.is_empty() {
            return false;
        }
        if !self.has_value {
            return rank == self.store.root;
        }
        let Some(staleness) = self.store.staleness else { return false };
        let waiting = self.waiting.iter().map(|rank| self.count_of(groups, Rank(rank)));
        let slowest = waiting.min().map_or(0, Stored::deltas);
        let near = Stored::deltas(self.count_of(groups, rank)).saturating_add(staleness.into());
        near < slowest
    }

    /// Rounds that every rank has been answered.
    pub(super) fn answered(&self, groups: &Groups) -> u64 {
        let of = |rank: Rank| self.count_of(groups, rank) - u64::from(self.is_waiting(rank));
        groups.iter().map(of).min().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(staleness: Option<u32>) -> (Stored, Groups) {
        let groups = Groups::new(&[0, 0, 1]).apart();
        (Stored::new(Deltas { root: Rank(1), staleness }, &groups), groups)
    }

    fn answered(stored: &mut Stored, groups: &Groups) -> Vec<u32> {
        if !stored.has_due(groups) {
            return Vec::new();
        }
        assert!(stored.answer(groups) > 0);
        let told = stored.told().iter().collect();
        stored.sent();
        told
    }

    #[test]
    fn nobody_is_answered_before_the_root_gave_the_value() {
        let (mut stored, groups) = stored(None);
        assert!(!stored.takes_bytes(Rank(0), 0) && stored.takes_bytes(Rank(1), 1));
        assert!(!stored.complete(Rank(0), 0), "it asks for the value and changes nothing");
        assert!(answered(&mut stored, &groups).is_empty());
        let missing =
            |stored: &Stored| [0, 1, 2].map(|rank| stored.is_missing(&groups, Rank(rank)));
        assert_eq!(missing(&stored), [false, true, false]);
        // A root that left before it gave one is still missed.
        stored.leave(Rank(1), 1);
        assert_eq!(missing(&stored), [false, true, false]);
        assert!(stored.complete(Rank(1), 1));
        assert_eq!(answered(&mut stored, &groups), [0, 1]);
        assert!(stored.complete(Rank(0), 0), "from now on its deltas count");
        assert_eq!(answered(&mut stored, &groups), [0]);
        assert_eq!((stored.open_round(0), stored.open_round(1), stored.open_round(2)), (3, 2, 1));
    }

    #[test]
    fn a_rank_that_is_too_far_ahead_waits_for_the_slowest() {
        let (mut stored, groups) = stored(Some(1));
        for rank in [1, 0, 2] {
            stored.complete(Rank(rank), rank);
        }
        assert_eq!(answered(&mut stored, &groups), [0, 1, 2]);
        stored.complete(Rank(0), 0);
        assert_eq!(answered(&mut stored, &groups), [0], "one ahead is within the bound");
        stored.complete(Rank(0), 0);
        assert!(answered(&mut stored, &groups).is_empty());
        assert!(stored.is_missing(&groups, Rank(2)) && !stored.is_missing(&groups, Rank(0)));
        stored.complete(Rank(1), 1);
        assert_eq!(answered(&mut stored, &groups), [1]);
        assert_eq!(stored.answered(&groups), 1);
        stored.complete(Rank(2), 2);
        assert_eq!(answered(&mut stored, &groups), [0, 2]);
        // Nobody waits for a rank that has left.
        stored.leave(Rank(2), 2);
        stored.leave(Rank(1), 1);
        for _ in 0..5 {
            stored.complete(Rank(0), 0);
            assert_eq!(answered(&mut stored, &groups), [0]);
        }
    }
}
