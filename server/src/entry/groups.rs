//! The groups of a job, and which of them have taken part in a round of a key.

#![forbid(unsafe_code)]

use bps_engine::base::{Rank, word};
use bps_engine::proto::members::Members;
use std::sync::Arc;

/// The groups of a job: ranks of a host that reduce among themselves, and of which one speaks for
/// all, or single ranks. Of a set of ranks, what its members are of each.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Groups {
    /// By rank, or by place in the set.
    of_rank: Box<[u32]>,
    sizes: Box<[u32]>,
    members: Members,
    /// Rounds go on without ranks that die.
    shrinks: bool,
    /// Those that did, and the bit by which results say that they lack it.
    gone: Vec<(u32, Rank)>,
    /// Their groups, none of which has a rank that lives.
    lost: Vec<u32>,
}

impl Groups {
    /// By the group of each rank.
    #[must_use]
    pub fn new(of_rank: &[u32]) -> Groups {
        let groups = of_rank.iter().max().map_or(0, |last| *last as usize + 1);
        let mut sizes = vec![0; groups];
        for group in of_rank {
            sizes[*group as usize] += 1;
        }
        Groups {
            of_rank: of_rank.into(),
            sizes: sizes.into(),
            members: Members::ALL,
            shrinks: false,
            gone: Vec::new(),
            lost: Vec::new(),
        }
    }

    /// The same, of a job in which rounds go on without ranks that die.
    #[must_use]
    pub fn that_shrink(self, shrinks: bool) -> Groups {
        Groups { shrinks, ..self }
    }

    /// The same when these ranks of the job have died, in this order: whole groups. Results name
    /// them by their ranks, or else in this order.
    #[must_use]
    pub fn without(&self, gone: &[Rank], by_rank: bool) -> Groups {
        let bit = |(place, rank): (u32, Rank)| (if by_rank { rank.0 } else { place }, rank);
        self.clone().that_lack((0..).zip(gone.iter().copied()).map(bit))
    }

    fn that_lack(self, gone: impl Iterator<Item = (u32, Rank)>) -> Groups {
        let gone: Vec<(u32, Rank)> = gone.filter(|(_, rank)| self.has(*rank)).collect();
        let mut lost: Vec<u32> = gone.iter().map(|(_, rank)| self.of(*rank)).collect();
        lost.sort_unstable();
        lost.dedup();
        Groups { gone, lost, ..self }
    }

    /// Whether rounds go on without ranks that die.
    #[must_use]
    pub fn shrinks(&self) -> bool {
        self.shrinks
    }

    /// Those that have, and the bit by which results say that they lack them.
    #[must_use]
    pub fn gone(&self) -> &[(u32, Rank)] {
        &self.gone
    }

    /// Their groups.
    #[must_use]
    pub fn lost(&self) -> &[u32] {
        &self.lost
    }

    /// Whether this rank has died.
    #[must_use]
    pub fn is_gone(&self, rank: Rank) -> bool {
        self.gone.iter().any(|(_, gone)| *gone == rank)
    }

    /// Those of a set of ranks, numbered anew; `None` where one of them is not of this job.
    #[must_use]
    pub fn among(&self, members: &Members) -> Option<Groups> {
        let group = |rank: &Rank| self.of_rank.get(rank.0 as usize).copied();
        let before = members.listed().iter().map(group).collect::<Option<Vec<u32>>>()?;
        let mut known = before.clone();
        known.sort_unstable();
        known.dedup();
        let number = |group| word(known.partition_point(|other| *other < group));
        let of_rank: Vec<u32> = before.into_iter().map(number).collect();
        let few = Groups { members: members.clone(), ..Groups::new(&of_rank) };
        Some(self.as_gone(few))
    }

    /// The same ranks, each by itself: stored tensors are summed in no group.
    #[must_use]
    pub fn apart(&self) -> Groups {
        let of_rank: Vec<u32> = (0..self.ranks()).collect();
        self.as_gone(Groups { members: self.members.clone(), ..Groups::new(&of_rank) })
    }

    /// Other groups of the same ranks, or of some of them, of whom as many have died.
    fn as_gone(&self, other: Groups) -> Groups {
        Groups { shrinks: self.shrinks, ..other }.that_lack(self.gone.iter().copied())
    }

    /// Ranks in the job, or in the set.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        word(self.of_rank.len())
    }

    /// Which set of ranks they are.
    #[must_use]
    pub fn members(&self) -> &Members {
        &self.members
    }

    /// These ranks, in rising order.
    pub fn iter(&self) -> impl Iterator<Item = Rank> + '_ {
        self.members.iter(self.ranks())
    }

    /// Whether this rank is one of them.
    #[must_use]
    pub fn has(&self, rank: Rank) -> bool {
        self.place(rank).is_some()
    }

    fn place(&self, rank: Rank) -> Option<usize> {
        match self.members.is_all() {
            true => Some(rank.0 as usize).filter(|place| *place < self.of_rank.len()),
            false => self.members.listed().binary_search(&rank).ok(),
        }
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> u32 {
        word(self.sizes.len())
    }

    /// The group of a rank of the job, or of the set.
    ///
    /// # Panics
    /// It is none of them.
    #[must_use]
    pub fn of(&self, rank: Rank) -> u32 {
        self.of_rank[self.place(rank).expect("only members are asked for")]
    }

    /// Ranks in this group.
    #[must_use]
    pub fn size_of(&self, group: u32) -> u32 {
        self.sizes[group as usize]
    }

    /// Ranks in the group of this one.
    #[must_use]
    pub fn size_with(&self, rank: Rank) -> u32 {
        self.sizes[self.of(rank) as usize]
    }
}

/// A set of small numbers, such as groups or ranks, as bits.
#[derive(Clone, Debug, Default)]
pub struct NumberSet {
    words: Vec<u64>,
    count: u32,
}

impl NumberSet {
    /// An empty set of numbers below this.
    #[must_use]
    pub fn new(limit: u32) -> NumberSet {
        NumberSet { words: vec![0; (limit as usize).div_ceil(64)], count: 0 }
    }

    /// Adds a number; false if it was in.
    pub fn insert(&mut self, number: u32) -> bool {
        let Some(word) = self.words.get_mut(number as usize / 64) else { return false };
        let bit = 1 << (number % 64);
        let new = *word & bit == 0;
        *word |= bit;
        self.count += u32::from(new);
        new
    }

    /// Whether a number is in.
    #[must_use]
    pub fn contains(&self, number: u32) -> bool {
        contains(&self.words, number)
    }

    /// Takes a number out, which is in.
    pub fn remove(&mut self, number: u32) {
        assert!(self.contains(number), "what is taken out is in");
        self.words[number as usize / 64] &= !(1 << (number % 64));
        self.count -= 1;
    }

    /// The first member from this number on.
    #[must_use]
    pub fn next(&self, from: u32) -> Option<u32> {
        next_bit(&self.words, from)
    }

    /// The members, in rising order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        std::iter::successors(self.next(0), |last| self.next(last + 1))
    }

    /// Members.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.count
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Empties it.
    pub fn clear(&mut self) {
        self.words.fill(0);
        self.count = 0;
    }
}

/// Who has taken part in one round of one key: for each group a bit whether its contribution has
/// begun to arrive and one whether it is complete, for each rank one whether it spoke for its
/// group.
///
/// A key has one only while a round of it is open, or while that round's result is being sent.
#[derive(Debug)]
pub struct Turnout {
    /// Bits of groups that have arrived, of groups that are complete, and of speakers.
    words: Box<[u64]>,
    /// Words of the bits of all groups.
    group_words: usize,
    complete: u32,
}

/// Turnouts that no round uses: as many as rounds were open at once beside those in use.
#[derive(Debug, Default)]
pub struct Turnouts {
    unused: Vec<Turnout>,
    groups: Arc<Groups>,
}

fn words_of(bits: u32) -> usize {
    (bits as usize).div_ceil(64)
}

fn contains(words: &[u64], bit: u32) -> bool {
    words.get(bit as usize / 64).is_some_and(|word| word >> (bit % 64) & 1 == 1)
}

/// The first bit from this one on that is set.
fn next_bit(words: &[u64], from: u32) -> Option<u32> {
    let (mut at, offset) = (from as usize / 64, from % 64);
    let mut word = words.get(at)? >> offset << offset;
    while word == 0 {
        at += 1;
        word = *words.get(at)?;
    }
    u32::try_from(at * 64).ok().map(|base| base + word.trailing_zeros())
}

/// Sets a bit; says whether it was clear.
fn insert(words: &mut [u64], bit: u32) -> bool {
    let word = &mut words[bit as usize / 64];
    let is_new = *word >> (bit % 64) & 1 == 0;
    *word |= 1 << (bit % 64);
    is_new
}

fn remove(words: &mut [u64], bit: u32) {
    words[bit as usize / 64] &= !(1 << (bit % 64));
}

impl Turnout {
    fn new(groups: &Groups) -> Turnout {
        let group_words = words_of(groups.count());
        let words = vec![0; 2 * group_words + words_of(groups.ranks())].into();
        Turnout { words, group_words, complete: 0 }
    }

    /// This rank begins to contribute for its group.
    pub fn arrive(&mut self, group: u32, speaker: Rank) {
        insert(&mut self.words[..self.group_words], group);
        insert(&mut self.words[2 * self.group_words..], speaker.0);
    }

    /// Whether a contribution of this group has begun to arrive.
    #[must_use]
    pub fn has_arrived(&self, group: u32) -> bool {
        contains(&self.words[..self.group_words], group)
    }

    /// What has begun to arrive of this group does not come, or does not count.
    pub fn withdraw(&mut self, group: u32, speaker: Rank) {
        if self.is_complete(group) {
            remove(&mut self.words[self.group_words..2 * self.group_words], group);
            self.complete -= 1;
        }
        remove(&mut self.words[..self.group_words], group);
        remove(&mut self.words[2 * self.group_words..], speaker.0);
    }

    /// The contribution of this group is complete.
    pub fn complete(&mut self, group: u32) {
        let complete = &mut self.words[self.group_words..2 * self.group_words];
        self.complete += u32::from(insert(complete, group));
    }

    /// Whether the contribution of this group is complete.
    #[must_use]
    pub fn is_complete(&self, group: u32) -> bool {
        contains(&self.words[self.group_words..2 * self.group_words], group)
    }

    /// Groups whose contribution is complete.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.complete
    }

    /// Whether this rank spoke for its group.
    #[must_use]
    pub fn has_spoken(&self, rank: Rank) -> bool {
        contains(&self.words[2 * self.group_words..], rank.0)
    }

    /// The first rank from this one on that spoke for its group.
    #[must_use]
    pub fn next_speaker(&self, from: Rank) -> Option<Rank> {
        next_bit(&self.words[2 * self.group_words..], from.0).map(Rank)
    }
}

impl Turnouts {
    /// None yet, for rounds among these groups.
    #[must_use]
    pub fn new(groups: &Arc<Groups>) -> Turnouts {
        Turnouts { unused: Vec::new(), groups: Arc::clone(groups) }
    }

    /// One in which nobody has taken part.
    pub fn take(&mut self) -> Turnout {
        self.unused.pop().unwrap_or_else(|| Turnout::new(&self.groups))
    }

    /// Takes back one that was [taken](Self::take).
    pub fn give_back(&mut self, mut turnout: Turnout) {
        turnout.words.fill(0);
        turnout.complete = 0;
        self.unused.push(turnout);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_set_only_its_members_count() {
        let groups = Groups::new(&[0, 0, 1, 1, 2]);
        let members = Members::new([4, 1, 0].map(Rank).to_vec()).unwrap();
        let few = groups.among(&members).unwrap();
        assert_eq!((few.ranks(), few.count()), (3, 2));
        assert_eq!([0, 1, 4].map(|rank| few.of(Rank(rank))), [0, 0, 1]);
        assert_eq!((few.size_with(Rank(1)), few.size_with(Rank(4))), (2, 1));
        assert_eq!([0, 2, 4, 5].map(|rank| few.has(Rank(rank))), [true, false, true, false]);
        assert_eq!(few.iter().collect::<Vec<_>>(), [0, 1, 4].map(Rank));
        let beyond = Members::new(vec![Rank(1), Rank(5)]).unwrap();
        assert_eq!(groups.among(&beyond), None);
        assert!(groups.has(Rank(4)) && !groups.has(Rank(5)));
    }

    #[test]
    fn the_dead_are_named_by_their_ranks_or_by_the_order_of_their_deaths() {
        let groups = Groups::new(&[0, 1, 2, 3, 4]).that_shrink(true);
        let few = groups.among(&Members::new([1, 2, 4].map(Rank).to_vec()).unwrap()).unwrap();
        let dead = [3, 1, 4].map(Rank);
        let bits = |groups: &Groups, by_rank| {
            let gone = groups.without(&dead, by_rank);
            gone.gone().iter().map(|(bit, rank)| (*bit, rank.0)).collect::<Vec<_>>()
        };
        assert_eq!(bits(&groups, true), [(3, 3), (1, 1), (4, 4)]);
        assert_eq!(bits(&groups, false), [(0, 3), (1, 1), (2, 4)]);
        assert_eq!(bits(&few, true), [(1, 1), (4, 4)]);
        assert_eq!(bits(&few, false), [(1, 1), (2, 4)]);
        // Whoever is told of a further death tells of the same ones as before.
        let later = groups.without(&dead[..2], true).without(&dead, true);
        assert_eq!(later.gone(), groups.without(&dead, true).gone());
    }

    #[test]
    fn speakers_are_found_in_rising_order_across_words() {
        let of_rank: Vec<u32> = (0..200).map(|rank| rank / 2).collect();
        let groups = Arc::new(Groups::new(&of_rank));
        let mut turnouts = Turnouts::new(&groups);
        for _ in 0..2 {
            let mut turnout = turnouts.take();
            assert_eq!(turnout.next_speaker(Rank(0)), None);
            for rank in [0, 63, 64, 131, 199].map(Rank) {
                turnout.arrive(groups.of(rank), rank);
                turnout.complete(groups.of(rank));
                turnout.complete(groups.of(rank));
            }
            assert_eq!(turnout.count(), 5);
            let mut found = Vec::new();
            let mut from = Rank(0);
            while let Some(rank) = turnout.next_speaker(from) {
                found.push(rank.0);
                from = Rank(rank.0 + 1);
            }
            assert_eq!(found, [0, 63, 64, 131, 199]);
            assert!(turnout.has_arrived(groups.of(Rank(1))) && !turnout.has_spoken(Rank(1)));
            assert!(turnout.is_complete(31) && !turnout.is_complete(30));
            turnouts.give_back(turnout);
        }
    }
}
