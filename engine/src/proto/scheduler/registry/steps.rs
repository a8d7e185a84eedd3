//! What a declaration is to its name, and what comes of it if ranks disagree.

use super::{Declaration, Mismatch, Rank, Registry, Reply, Said, Superseded};
use crate::proto::messages::Frameworks;
use crate::proto::scheduler::eras::Era;
use std::cmp::Ordering;

/// What a declaration is to its name.
pub(super) enum Step {
    /// The name is new.
    New,
    /// It says again what the rank said before, or what others did.
    Same(Era),
    /// It follows other ranks to the next era.
    Next(Era),
    /// It is the first of an era, of a tensor that the name has stood for before, if one is given.
    Begin(Option<u32>),
    Disagrees(Mismatch),
}

impl Registry {
    /// What a declaration of this rank is to its name.
    pub(super) fn step(&self, rank: Rank, (said, rounds): &Said) -> Step {
        let Some(name) = self.names.get(&said.name) else { return Step::New };
        let (era, next) = (name.eras.current(rank), name.eras.next(rank));
        let known = &self.tensors[era.tensor as usize];
        let step = match (rounds, era.end.zip(next)) {
            _ if known.said == *said => Step::Same(era),
            _ if known.said.members != said.members => {
                Step::Disagrees(self.mismatch((known.first, &known.said), (rank, said), 0))
            }
            (None, _) => {
                Step::Disagrees(self.mismatch((known.first, &known.said), (rank, said), 0))
            }
            (Some(rounds), Some((end, next))) => {
                let follows = &self.tensors[next.tensor as usize].said;
                let (first, second) = match rounds.cmp(&end.rounds) {
                    Ordering::Less => (&known.said, said),
                    Ordering::Equal => (follows, said),
                    Ordering::Greater => (follows, &known.said),
                };
                if first == second {
                    Step::Next(next)
                } else {
                    Step::Disagrees(self.mismatch((end.by, first), (rank, second), *rounds))
                }
            }
            (Some(_), None) => {
                let same = |tensor: &&u32| self.tensors[**tensor as usize].said == *said;
                Step::Begin(name.tensors.iter().find(same).copied())
            }
        };
        // Of a spoiled name, rounds on which the ranks had agreed before may still come.
        match (&name.spoiled, step) {
            (Some(mismatch), Step::Begin(_) | Step::Disagrees(_)) => {
                Step::Disagrees(mismatch.clone())
            }
            (Some(mismatch), Step::Same(era) | Step::Next(era)) if era.end.is_none() => {
                Step::Disagrees(mismatch.clone())
            }
            (_, step) => step,
        }
    }

    /// Two ranks disagree; the second has gone along with the others for so many rounds of its era.
    fn mismatch(
        &self,
        (first, first_said): (Rank, &Declaration),
        (second, second_said): (Rank, &Declaration),
        rounds: u64,
    ) -> Mismatch {
        let (first_said, second_said) =
            (Box::new(first_said.clone()), Box::new(second_said.clone()));
        let name = self.names.get(&first_said.name);
        let eras = &name.expect("the first rank has declared it").eras;
        let agreed = eras.agreed(second, rounds).into_iter();
        let agreed = agreed.map(|(tensor, rounds)| Superseded { tensor, rounds }).collect();
        // Who speaks what is known where it is sent.
        let frameworks = Frameworks::default();
        Mismatch { first, first_said, second, second_said, frameworks, agreed }
    }

    /// A rank has pushed a tensor beyond the rounds after which another has replaced it.
    pub(in crate::proto::scheduler) fn overrun(
        &mut self,
        rank: Rank,
        tensor: u32,
    ) -> Option<Reply> {
        let said = &self.tensors.get(tensor as usize)?.said;
        let eras = &self.names.get(&said.name)?.eras;
        if !said.members.contains(rank) {
            return None;
        }
        let era = eras.current(rank);
        // What it pushed may belong to an era that it has left since.
        let (end, next) = (era.end.filter(|_| era.tensor == tensor)?, eras.next(rank)?);
        let other = &self.tensors[next.tensor as usize].said;
        let mismatch = self.mismatch((end.by, other), (rank, said), end.rounds);
        Some(self.spoil(rank, mismatch))
    }

    /// Marks a name as of no use, and says so: to all when it happens, to a latecomer alone after
    /// that.
    pub(super) fn spoil(&mut self, rank: Rank, mismatch: Mismatch) -> Reply {
        let name = self.names.get_mut(&mismatch.first_said.name).expect("two ranks declared it");
        if let Some(mismatch) = &name.spoiled {
            return Reply::Mismatch { to: Some(rank), mismatch: mismatch.clone() };
        }
        name.spoiled = Some(mismatch.clone());
        Reply::Mismatch { to: None, mismatch }
    }
}
