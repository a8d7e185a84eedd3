//! The rounds of tensors in memory of the host: one is open at a time, later pushes wait behind it,
//! and a tensor on which ranks disagree has no more of them. No lane, no memory and no clock is
//! known here: what a round asks of the lanes goes through [`Parts`].
//!
//! Tensors on the GPU are in the table as well, so that their ids, names and ends are known in one
//! place; their rounds are the pipeline's.

#![forbid(unsafe_code)]

use self::recut::Next;
use super::{Memory, PartId, PartOf, Plan, PlanPart};
use crate::base::error::{Death, Error, PeerDied, Refusal};
use crate::base::task::Task;
use bps_engine::base::{Key, Operation};
use bps_engine::optimize::Act;
use bps_engine::proto::messages::RoundOf;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

mod invariants;
mod recut;

pub use recut::PassedError;

/// A push of a tensor.
#[derive(Debug)]
pub struct Push {
    /// Its bytes.
    pub memory: Memory,
    /// Larger goes sooner.
    pub priority: i64,
    /// What the round is for, of a tensor with an optimizer.
    pub act: Act,
    /// Told when it is over.
    pub task: Arc<Task>,
}

/// What carries parts to where they are summed, and back.
pub trait Parts {
    /// The next round of a part begins, with these bytes.
    fn push(&mut self, part: PartId, round: u64, push: &PartPush);

    /// Nobody wants rounds of this part any more. If one is open, it is over once no transport has
    /// its memory.
    fn abandon(&mut self, part: PartId);
}

/// A part of a push.
#[derive(Clone, Copy, Debug)]
pub struct PartPush {
    /// Its bytes within the tensor's.
    pub memory: Memory,
    /// Larger goes sooner.
    pub priority: i64,
    /// As [`Push::act`].
    pub act: Act,
    /// When it was asked for, by the monotonic clock; 0 where nobody records a timeline.
    pub asked_ns: u64,
}

/// What the result of a round does not hold, because ranks have died or were late.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lacks {
    /// A bit for each rank without a contribution.
    pub ranks: u64,
    /// Bits are in the order of ranks, however many these are; else they are what
    /// [`missing_by_rank`](bps_engine::wire::missing_by_rank) says.
    pub by_rank: bool,
    /// There is no result: it was to come from one of them.
    pub is_lost: bool,
}

impl Lacks {
    /// All contributions are in.
    pub const NOTHING: Lacks = Lacks { ranks: 0, by_rank: false, is_lost: false };

    /// What one of two parts lacks.
    #[must_use]
    pub fn or(self, other: Lacks) -> Lacks {
        Lacks {
            ranks: self.ranks | other.ranks,
            by_rank: self.by_rank || other.by_rank,
            is_lost: self.is_lost || other.is_lost,
        }
    }
}

/// Why a round of this plan has no result: who was to give it has died.
///
/// # Panics
/// The plan is not that of a broadcast.
#[must_use]
pub fn root_lost(plan: &Plan, round: u64) -> Error {
    let Operation::Broadcast(root) = plan.operation else {
        unreachable!("only what one rank gives is lost with it");
    };
    let of = RoundOf { tensor: plan.name.to_string(), round };
    PeerDied::from(Death::RootLost { root, of }).into()
}

/// A round that is over.
#[derive(Debug)]
pub struct Done {
    /// The tensor.
    pub tensor: u32,
    /// Its first key.
    pub key: Key,
    /// The round, as its parts count.
    pub round: u64,
    /// Bytes of the tensor.
    pub bytes: usize,
    /// To be finished with the result.
    pub task: Arc<Task>,
    /// What became of it.
    pub result: Result<(), Error>,
    /// What any of its parts lacks.
    pub lacks: Lacks,
}

/// A round under way.
struct Run {
    task: Arc<Task>,
    /// Parts that are not over.
    left: u32,
    /// What those lack that are.
    lacks: Lacks,
}

struct Tensor {
    plan: Arc<Plan>,
    first: PartId,
    round: u64,
    run: Option<Run>,
    /// Later pushes: a key never has two rounds in flight, so that no lane can wait for another.
    waiting: VecDeque<Push>,
    /// Why it will be of no use, once it has had the rounds on which the ranks had agreed.
    doomed: Option<(u64, Error)>,
    poisoned: Option<Error>,
    /// Rounds that it had had when it was cut into its parts, which count theirs from there.
    base: u64,
    /// Other parts, to which it is to change.
    next: Option<Box<Next>>,
}

/// See the [module](self).
#[derive(Default)]
pub struct Rounds {
    /// By id.
    tensors: Vec<Option<Tensor>>,
    /// Rounds under way.
    open: usize,
}

impl Rounds {
    /// Whether a round is under way, or held.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.open > 0 || self.tensors.iter().flatten().any(|one| !one.waiting.is_empty())
    }

    /// Tensors that were declared.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tensors.iter().flatten().count()
    }

    /// Whether none was.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether this one was.
    #[must_use]
    pub fn knows(&self, tensor: u32) -> bool {
        self.tensor(tensor).is_some()
    }

    /// A tensor was declared, and its parts have the numbers from `first` on.
    ///
    /// # Panics
    /// It [is known](Self::knows), or the plan [is none](Plan::check).
    pub fn plan(&mut self, tensor: u32, plan: Arc<Plan>, first: PartId) {
        plan.check();
        let index = tensor as usize;
        if self.tensors.len() <= index {
            self.tensors.resize_with(index + 1, || None);
        }
        let place = &mut self.tensors[index];
        assert!(place.is_none(), "tensor {tensor} was planned before");
        let (waiting, doomed, poisoned) = (VecDeque::new(), None, None);
        let (round, run, base, next) = (0, None, 0, None);
        let state = Tensor { plan, first, round, run, waiting, doomed, poisoned, base, next };
        state.check();
        *place = Some(state);
    }

    /// The plans of the tensors on the GPU, by id.
    pub fn on_gpu(&self) -> impl Iterator<Item = (u32, &Arc<Plan>)> {
        let all = (0..).zip(&self.tensors);
        all.filter_map(|(tensor, state)| Some((tensor, &state.as_ref()?.plan)))
            .filter(|(_, plan)| plan.device)
    }

    /// Whether a tensor is on the GPU.
    #[must_use]
    pub fn is_on_gpu(&self, tensor: u32) -> bool {
        self.tensor(tensor).is_some_and(|state| state.plan.device)
    }

    fn tensor(&self, tensor: u32) -> Option<&Tensor> {
        self.tensors.get(tensor as usize)?.as_ref()
    }

    /// The number of a part of a tensor that is of use; none where ranks disagree about it.
    ///
    /// # Panics
    /// There is no such part.
    #[must_use]
    pub fn part(&self, of: PartOf) -> Option<PartId> {
        let tensor = self.tensor(of.tensor).expect("who names a part has its plan");
        assert!((of.index as usize) < tensor.plan.parts.len(), "the plan has this part");
        tensor.poisoned.is_none().then_some(PartId(tensor.first.0 + of.index))
    }

    /// The parts of a tensor, their first elements and how many they have.
    pub fn parts_of(&self, tensor: u32) -> impl Iterator<Item = (PartId, Range<usize>)> + use<> {
        let mut elements = Vec::new();
        if let Some(state) = self.tensor(tensor) {
            let size = state.plan.dtype.size();
            let range = |part: &PlanPart| part.offset / size..(part.offset + part.bytes) / size;
            elements.extend(state.parts().zip(state.plan.parts.iter().map(range)));
        }
        elements.into_iter()
    }

    /// Why a tensor can't be pushed, if so.
    fn refusal(&self, tensor: u32) -> Option<Error> {
        let Some(state) = self.tensor(tensor) else {
            return Some(Refusal::UnknownId { id: tensor }.into());
        };
        let name = &state.plan.name;
        let is_gpus = state.plan.device.then(|| Refusal::OfGpu { tensor: name.to_string() }.into());
        state.poisoned.clone().or(is_gpus)
    }

    /// A tensor in memory of the host is pushed: at once, or behind what was pushed before. What
    /// can't be is told to its task.
    pub fn push(&mut self, tensor: u32, push: Push, parts: &mut impl Parts) {
        if let Some(error) = self.refusal(tensor) {
            return push.task.finish_now(Err(error));
        }
        let state = self.tensors[tensor as usize].as_mut().expect("it was checked");
        if state.plan.parts.is_empty() {
            return push.task.finish_now(Ok(()));
        }
        if state.run.is_some() || state.is_held() {
            state.waiting.push_back(push);
        } else {
            assert!(state.waiting.is_empty(), "what waits begins when a round ends");
            self.open += 1;
            state.begin(push, parts);
        }
        state.check();
    }

    /// The lanes are done with a part's round, whether or not its result has come. Returns the
    /// tensor's round if that was its last part; [`next`](Self::next) is to be called then.
    ///
    /// # Panics
    /// No round of the tensor is open.
    pub fn part_over(&mut self, tensor: u32, lacks: Lacks) -> Option<Done> {
        let state = self.tensors[tensor as usize].as_mut().expect("a part has a tensor");
        state.check();
        let run = state.run.as_mut().expect("a part that is over was pushed");
        run.left = run.left.checked_sub(1).expect("each part is over once");
        run.lacks = run.lacks.or(lacks);
        if run.left > 0 {
            return None;
        }
        assert!(self.open > 0, "the round that is over was counted");
        self.open -= 1;
        let Run { task, lacks, .. } = state.run.take()?;
        let (key, round) = (state.plan.parts[0].key, state.round - state.base);
        let bytes = state.plan.bytes();
        let lost = lacks.is_lost.then(|| root_lost(&state.plan, state.round));
        let result = state.poisoned.clone().or(lost).map_or(Ok(()), Err);
        Some(Done { tensor, key, round, bytes, task, result, lacks })
    }

    /// Begins what waits behind a round that is over, or ends the tensor if ranks disagree about
    /// what comes.
    pub fn next(&mut self, tensor: u32, parts: &mut impl Parts) {
        self.end_if_doomed(tensor, parts);
        let state = self.tensors[tensor as usize].as_mut().expect("a part has a tensor");
        assert!(state.run.is_none(), "the round is over");
        if !state.is_held()
            && let Some(push) = state.waiting.pop_front()
        {
            self.open += 1;
            state.begin(push, parts);
        }
        state.check();
    }

    /// A name on which the ranks disagree: what is pending of its tensors fails, and so does what
    /// comes, but for `agreed` rounds of them, by tensor. A tensor that is not there was replaced
    /// by all. Calls `on_gpu` for each that is the pipeline's to end.
    pub fn poison(
        &mut self,
        name: &str,
        agreed: &[(u32, u64)],
        error: &Error,
        parts: &mut impl Parts,
        mut on_gpu: impl FnMut(u32),
    ) {
        for &(tensor, rounds) in agreed {
            let Some(Some(state)) = self.tensors.get_mut(tensor as usize) else { continue };
            if *state.plan.name != *name || state.poisoned.is_some() {
                continue;
            }
            // The pipeline of a GPU knows no rounds that were agreed on: there, all that is pending
            // fails.
            let device = state.plan.device;
            state.doomed = Some((if device { 0 } else { rounds }, error.clone()));
            self.end_if_doomed(tensor, parts);
            if device {
                assert!(
                    self.tensor(tensor).is_some_and(|state| state.poisoned.is_some()),
                    "no round of the table keeps it going"
                );
                on_gpu(tensor);
            }
        }
        self.check_open();
    }

    /// Fails what is pending of a doomed tensor, once it has had the rounds agreed on.
    fn end_if_doomed(&mut self, tensor: u32, parts: &mut impl Parts) {
        let state = self.tensors[tensor as usize].as_mut().expect("it is known");
        let is_due = |(agreed, _): &mut (u64, Error)| {
            state.round > *agreed || state.round == *agreed && state.run.is_none()
        };
        // Not doomed, or rounds that were agreed on are still to come.
        let Some((_, error)) = state.doomed.take_if(is_due) else { return };
        for push in state.waiting.drain(..) {
            push.task.finish_now(Err(error.clone()));
        }
        state.poisoned = Some(error);
        state.abandon_next(parts);
        for part in state.parts() {
            parts.abandon(part);
        }
        state.check();
    }

    /// The job is over, and nobody has memory of callers any more: fails all that is pending.
    pub fn fail_all(&mut self, error: &Error) {
        for state in self.tensors.iter_mut().flatten() {
            if let Some(run) = state.run.take() {
                self.open -= 1;
                run.task.finish_now(Err(error.clone()));
            }
            for push in state.waiting.drain(..) {
                push.task.finish_now(Err(error.clone()));
            }
        }
        assert!(self.open == 0, "all rounds under way are of tensors");
    }
}

impl Tensor {
    fn parts(&self) -> impl Iterator<Item = PartId> + use<> {
        let count = u32::try_from(self.plan.parts.len()).expect("parts are counted in u32");
        (self.first.0..self.first.0 + count).map(PartId)
    }

    /// Opens the next round.
    fn begin(&mut self, push: Push, parts: &mut impl Parts) {
        assert!(self.run.is_none() && self.poisoned.is_none(), "one round is open at a time");
        let is_agreed = self.doomed.as_ref().is_none_or(|(agreed, _)| self.round < *agreed);
        assert!(is_agreed && !self.is_held(), "rounds begin as far as the ranks have agreed");
        let Push { memory, priority, act, task } = push;
        let asked_ns = task.asked_ns();
        self.change_if_due();
        self.round += 1;
        let round = self.round - self.base;
        debug_assert!(
            memory.target().len() == self.plan.bytes(),
            "a push is as long as its tensor"
        );
        let left = u32::try_from(self.plan.parts.len()).expect("parts are counted in u32");
        self.run = Some(Run { task, left, lacks: Lacks::NOTHING });
        for (id, part) in self.parts().zip(&self.plan.parts) {
            let memory = memory.part(part.offset, part.bytes);
            parts.push(id, round, &PartPush { memory, priority, act, asked_ns });
        }
    }
}

#[cfg(test)]
mod tests;
