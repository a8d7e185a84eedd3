//! Tensors that get other parts while they are pushed, as the ranks have agreed.
//!
//! Invariant: from [`prepare`](Rounds::prepare) to [`change`](Rounds::change) no round of the
//! tensor begins, so what was told of its rounds holds until the ranks have agreed on the last
//! round with the old parts; and one round has the parts of one plan.

use super::{Parts, Rounds, Tensor};
use crate::rounds::{PartId, Plan};
use bps_engine::proto::uneven::Pushes;
use std::sync::Arc;

/// Other parts of a tensor.
pub(super) struct Next {
    plan: Arc<Plan>,
    first: PartId,
    /// The last round with the parts before; unknown while rounds are held.
    after: Option<u64>,
}

/// The ranks have agreed on parts for rounds that this one has begun with others.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "the scheduler changes the parts of tensor `{tensor}` after round {after}, and round {round} \
     has begun here: run the same release on every node, and set BPS_TUNE_PARTITION=0"
)]
pub struct PassedError {
    /// The tensor's name.
    pub tensor: String,
    /// The last round with the old parts, as the scheduler says.
    pub after: u64,
    /// The round that has begun.
    pub round: u64,
}

impl Rounds {
    /// A tensor is to get other parts, which have the numbers from `first` on: holds its rounds,
    /// and returns how many have begun. None if nobody may push it any more, or other parts wait
    /// already: then these are not used.
    pub fn prepare(
        &mut self,
        tensor: u32,
        plan: Arc<Plan>,
        first: PartId,
        parts: &mut impl Parts,
    ) -> Option<u64> {
        plan.check();
        let state = self.tensors.get_mut(tensor as usize)?.as_mut()?;
        let is_over = state.poisoned.is_some() || state.doomed.is_some();
        let next = Next { plan, first, after: None };
        if is_over || state.next.is_some() || state.plan.device {
            next.parts().for_each(|part| parts.abandon(part));
            return None;
        }
        state.next = Some(Box::new(next));
        state.check();
        Some(state.round)
    }

    /// The ranks have agreed: these tensors have had so many rounds when their other parts begin.
    /// All others that were prepared keep theirs. What was held goes on.
    ///
    /// # Errors
    /// A tensor is beyond the round on which they have agreed. It goes on with its old parts, and
    /// the job can't.
    pub fn change(&mut self, agreed: &[Pushes], parts: &mut impl Parts) -> Result<(), PassedError> {
        debug_assert!(agreed.is_sorted_by_key(|some| some.first), "`rounds_of` searches");
        let mut result = Ok(());
        for tensor in 0..self.tensors.len() {
            let Some(state) = self.tensors[tensor].as_mut() else { continue };
            let round = state.round;
            let Some(next) = state.next.as_mut().filter(|next| next.after.is_none()) else {
                continue;
            };
            let number = u32::try_from(tensor).expect("tensors are numbered in u32");
            match rounds_of(agreed, number) {
                Some(after) if after >= round => next.after = Some(after),
                Some(after) => {
                    let tensor = state.plan.name.to_string();
                    result = Err(PassedError { tensor, after, round });
                    state.abandon_next(parts);
                }
                None => state.abandon_next(parts),
            }
            assert!(!state.is_held(), "the ranks have agreed");
            if state.run.is_none() {
                self.next(number, parts);
            }
        }
        self.check_open();
        result
    }
}

impl Tensor {
    /// Whether its next round waits for the ranks to agree on its parts.
    pub(super) fn is_held(&self) -> bool {
        self.next.as_ref().is_some_and(|next| next.after.is_none())
    }

    /// Takes its other parts, before the first round with them.
    pub(super) fn change_if_due(&mut self) {
        assert!(self.run.is_none(), "a round under way keeps its parts");
        let round = self.round;
        if let Some(next) = self.next.take_if(|next| next.after == Some(round)) {
            (self.plan, self.first, self.base) = (next.plan, next.first, round);
        }
    }

    /// Its other parts are not used.
    pub(super) fn abandon_next(&mut self, parts: &mut impl Parts) {
        if let Some(next) = self.next.take() {
            next.parts().for_each(|part| parts.abandon(part));
        }
    }
}

impl Next {
    /// What holds of other parts while they wait, where debug assertions are on.
    ///
    /// # Panics
    /// They are not of this tensor, or too late.
    pub(super) fn check(&self, state: &Tensor) {
        let (old, new) = (&*state.plan, &*self.plan);
        assert!(old.bytes() == new.bytes() && old.dtype == new.dtype, "`{}` is cut", old.name);
        let ends = |first: PartId, plan: &Plan| first.0 as usize + plan.parts.len();
        let (first, behind) = (self.first, ends(state.first, old));
        let is_apart = behind <= first.0 as usize || ends(first, new) <= state.first.0 as usize;
        assert!(is_apart, "parts of two cuts have numbers of their own");
        assert!(self.after.is_none_or(|after| after >= state.round), "they come too late");
    }

    fn parts(&self) -> impl Iterator<Item = PartId> + use<> {
        let count = u32::try_from(self.plan.parts.len()).expect("parts are counted in u32");
        (self.first.0..self.first.0 + count).map(PartId)
    }
}

/// How many rounds of a tensor these say, which are in rising order.
fn rounds_of(all: &[Pushes], tensor: u32) -> Option<u64> {
    let behind = all.partition_point(|some| some.first <= tensor);
    let some = all.get(behind.checked_sub(1)?)?;
    (tensor - some.first < some.tensors).then_some(some.pushes)
}
