//! What a name stands for to each rank: one declaration, until the rank declares it anew.
//!
//! A name has *eras*, one after the other; in each it stands for one tensor. The rank that first
//! leaves an era says how often it had pushed the tensor, and so fixes where the era ends. Every
//! other rank must push as often, and then say the same. Ranks pass through the eras at different
//! times, so several are known at once: from that of the slowest rank to the newest.

use crate::base::Rank;
use crate::proto::members::Members;
use std::collections::{BTreeMap, VecDeque};

/// A stretch of a name's rounds in which it stands for one tensor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Era {
    /// What it stands for.
    pub(super) tensor: u32,
    /// Rounds that the tensor had before it, in earlier eras.
    pub(super) start: u64,
    /// Where it ends, and the rank that left it first.
    pub(super) end: Option<End>,
}

/// The end of an era.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct End {
    /// Rounds of the tensor up to here, those of its earlier eras included.
    pub(super) rounds: u64,
    /// Who left first.
    pub(super) by: Rank,
}

/// The eras of one name.
#[derive(Debug)]
pub(super) struct Eras {
    /// From the slowest rank's to the newest, which has no end.
    known: VecDeque<Era>,
    /// Eras that every rank has left.
    passed: u64,
    /// Eras that each rank has left; empty until the first rank leaves the first era.
    left: Box<[u64]>,
}

/// Eras that a rank has left which the name is not for: nobody waits for it.
const OUTSIDE: u64 = u64::MAX;

impl Eras {
    /// A name that stands for this tensor.
    pub(super) fn new(tensor: u32) -> Eras {
        let first = Era { tensor, start: 0, end: None };
        Eras { known: VecDeque::from([first]), passed: 0, left: Box::default() }
    }

    fn index(&self, rank: Rank) -> usize {
        match self.left.get(rank.0 as usize).copied().unwrap_or(0) {
            // What it says of the name is held against the oldest era.
            OUTSIDE => 0,
            left => usize::try_from(left - self.passed).expect("no more eras than are kept"),
        }
    }

    /// The era that a rank is in.
    pub(super) fn current(&self, rank: Rank) -> Era {
        self.known[self.index(rank)]
    }

    /// The era after the one that a rank is in, if another rank has begun it.
    pub(super) fn next(&self, rank: Rank) -> Option<Era> {
        self.known.get(self.index(rank) + 1).copied()
    }

    /// How many are known.
    pub(super) fn count(&self) -> usize {
        self.known.len()
    }

    /// The rounds on which the ranks have agreed, of each tensor of a known era, if this rank does
    /// not go along beyond so many rounds of its era.
    pub(super) fn agreed(&self, rank: Rank, rounds: u64) -> BTreeMap<u32, u64> {
        let (last, mut agreed) = (self.index(rank), BTreeMap::new());
        for (index, era) in self.known.iter().enumerate() {
            let end =
                era.end.map(|end| if index == last { end.rounds.min(rounds) } else { end.rounds });
            match end {
                Some(end) if index <= last => drop(agreed.insert(era.tensor, end)),
                _ => drop(agreed.entry(era.tensor).or_insert(era.start)),
            }
        }
        agreed
    }

    /// A rank has died, and nobody waits for it to go along. Returns what
    /// [`advance`](Self::advance) does.
    pub(super) fn lose(&mut self, rank: Rank) -> Vec<(u32, u64)> {
        match self.left.get_mut(rank.0 as usize) {
            Some(left) => *left = OUTSIDE,
            None => return Vec::new(),
        }
        self.pass()
    }

    /// This rank is the first to leave the newest era, after so many rounds of its tensor; the name
    /// stands for another tensor from then on, which has had `start` rounds before. Returns the
    /// others of the `members` of the job's `ranks` that are in the era.
    pub(super) fn begin(
        &mut self,
        rank: Rank,
        (members, ranks): (&Members, u32),
        rounds: u64,
        (tensor, start): (u32, u64),
    ) -> Vec<Rank> {
        if self.left.is_empty() {
            let left = |rank| if members.contains(rank) { 0 } else { OUTSIDE };
            self.left = (0..ranks).map(Rank).map(left).collect();
        }
        let newest = self.known.len() - 1;
        assert_eq!(self.index(rank), newest, "only the newest era has no end");
        self.known[newest].end = Some(End { rounds, by: rank });
        self.known.push_back(Era { tensor, start, end: None });
        let is_in = |&other: &Rank| other != rank && self.index(other) == newest;
        members.iter(ranks).filter(is_in).collect()
    }

    /// A rank goes on to the next era. Returns the tensors that no rank will push again in any era
    /// that is known, with their rounds.
    pub(super) fn advance(&mut self, rank: Rank) -> Vec<(u32, u64)> {
        self.left[rank.0 as usize] += 1;
        self.pass()
    }

    /// Forgets the eras that every rank has left.
    fn pass(&mut self) -> Vec<(u32, u64)> {
        let mut over = Vec::new();
        while self.known.len() > 1 && self.left.iter().all(|&left| left > self.passed) {
            let Some(Era { tensor, end: Some(end), .. }) = self.known.pop_front() else {
                unreachable!("no rank leaves the newest era before it has an end");
            };
            self.passed += 1;
            if self.known.iter().all(|era| era.tensor != tensor) {
                over.push((tensor, end.rounds));
            }
        }
        over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: (&Members, u32) = (&Members::ALL, 3);

    #[test]
    fn an_era_is_over_when_all_ranks_that_it_is_for_have_left_it() {
        let members = Members::new(vec![Rank(0), Rank(2)]).unwrap();
        let mut eras = Eras::new(7);
        assert_eq!(eras.begin(Rank(2), (&members, 4), 3, (8, 0)), [Rank(0)]);
        assert_eq!(eras.advance(Rank(2)), []);
        // What another rank says counts from the oldest era that is known.
        assert_eq!(eras.current(Rank(1)).tensor, 7);
        assert_eq!(eras.agreed(Rank(3), 0), BTreeMap::from([(7, 0), (8, 0)]));
        assert_eq!(eras.advance(Rank(0)), [(7, 3)]);
        assert_eq!((eras.count(), eras.current(Rank(3)).tensor), (1, 8));
    }

    #[test]
    fn ranks_pass_through_the_eras_at_their_own_pace() {
        let mut eras = Eras::new(7);
        assert_eq!(eras.current(Rank(2)), Era { tensor: 7, start: 0, end: None });
        assert_eq!(eras.begin(Rank(1), ALL, 5, (8, 0)), [Rank(0), Rank(2)]);
        assert_eq!(eras.advance(Rank(1)), []);
        // Two eras ahead of the others, and back to the first tensor.
        assert_eq!(eras.begin(Rank(1), ALL, 2, (7, 5)), []);
        assert_eq!(eras.advance(Rank(1)), []);
        assert_eq!(eras.current(Rank(1)), Era { tensor: 7, start: 5, end: None });
        let end = Some(End { rounds: 5, by: Rank(1) });
        assert_eq!(eras.current(Rank(0)), Era { tensor: 7, start: 0, end });
        assert_eq!(eras.next(Rank(0)).map(|era| era.tensor), Some(8));
        assert_eq!(eras.agreed(Rank(0), 5), BTreeMap::from([(7, 5), (8, 0)]));
        assert_eq!(eras.agreed(Rank(0), 3), BTreeMap::from([(7, 3), (8, 0)]));
        assert_eq!(eras.advance(Rank(0)), []);
        assert_eq!(eras.agreed(Rank(0), 2), BTreeMap::from([(7, 5), (8, 2)]));
        // The first era is over, but its tensor is used again; the second is over for good.
        assert_eq!(eras.advance(Rank(2)), []);
        assert_eq!(eras.agreed(Rank(0), 1), BTreeMap::from([(7, 5), (8, 1)]));
        assert_eq!(eras.advance(Rank(0)), []);
        assert_eq!(eras.next(Rank(0)), None);
        assert_eq!(eras.advance(Rank(2)), [(8, 2)]);
        assert_eq!(eras.count(), 1);
        assert_eq!(eras.begin(Rank(2), ALL, 9, (8, 2)), [Rank(0), Rank(1)]);
        assert_eq!(eras.advance(Rank(2)), []);
        assert_eq!(eras.advance(Rank(0)), []);
        assert_eq!(eras.advance(Rank(1)), [(7, 9)]);
    }
}
