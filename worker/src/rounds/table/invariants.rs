//! What holds of a tensor between two calls of the table. It is looked at where debug assertions
//! are on, which is in all tests and in the simulation.

use super::{Rounds, Tensor};

impl Tensor {
    /// After each call that has changed the tensor.
    ///
    /// # Panics
    /// The fields do not agree.
    pub(super) fn check(&self) {
        if !cfg!(debug_assertions) {
            return;
        }
        let (parts, name) = (self.plan.parts.len(), &self.plan.name);
        assert!(self.base <= self.round, "`{name}` was cut after a round that has not begun");
        let is_behind = self.run.is_some() || self.is_held();
        assert!(self.waiting.is_empty() || is_behind, "pushes of `{name}` wait for nothing");
        if let Some(run) = &self.run {
            assert!((1..=parts).contains(&(run.left as usize)), "{} of {parts} parts", run.left);
            assert!(self.round > self.base, "a round under way has the parts of the last cut");
        }
        if self.plan.device {
            assert!(self.run.is_none() && self.next.is_none(), "`{name}` is the pipeline's");
        }
        if let Some((agreed, _)) = &self.doomed {
            let is_last = self.round == *agreed && self.run.is_some();
            assert!(self.round < *agreed || is_last, "`{name}` is over after round {agreed}");
        }
        if self.poisoned.is_some() {
            assert!(self.waiting.is_empty(), "pushes of `{name}` wait that can't begin");
            assert!(self.doomed.is_none() && self.next.is_none(), "`{name}` ends once");
        }
        if let Some(next) = &self.next {
            next.check(self);
        }
    }
}

impl Rounds {
    /// After calls that go over many tensors: the count of what is under way.
    ///
    /// # Panics
    /// It is another.
    pub(super) fn check_open(&self) {
        if cfg!(debug_assertions) {
            let open = self.tensors.iter().flatten().filter(|state| state.run.is_some()).count();
            assert_eq!(self.open, open, "rounds under way are counted");
        }
    }
}
