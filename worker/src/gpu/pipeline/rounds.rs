//! The rounds of a tensor, from its push to the mark behind its result.

use super::timeline::Place;
use super::{Of, Ordered, Pipeline, RowState, Run, Tensor};
use crate::base::error::Error;
use crate::base::task::Mark;
use crate::cuda::GpuError;
use crate::rounds::PartOf;
use crate::rounds::handover::{FromGpu, GpuPush};
use bps_engine::base::Operation;
use std::sync::Arc;

impl Pipeline {
    /// A push is over: its memory is its caller's again.
    pub(super) fn end_push(&self, push: &GpuPush, error: Error) {
        self.inbox.push_over();
        push.task.finish_now(Err(error));
    }

    pub(super) fn tensor(&mut self, tensor: u32) -> Option<&mut Tensor> {
        self.tensors.get_mut(tensor as usize)?.as_mut()
    }

    pub(super) fn on_push(&mut self, tensor: u32, push: Box<GpuPush>) -> Result<(), GpuError> {
        // The job ends then, and its end says why: who died, rather than what NCCL saw of it.
        let has_failed = self.failed.is_some();
        let Some(state) = self.tensor(tensor) else {
            self.early.push((tensor, push));
            return Ok(());
        };
        if let Some(error) = state.poisoned.clone() {
            self.end_push(&push, error);
            return Ok(());
        }
        if state.run.is_some() || has_failed {
            state.waiting.push_back(push);
            return Ok(());
        }
        self.begin(tensor, push)
    }

    /// Opens the next round of a tensor.
    fn begin(&mut self, tensor: u32, push: Box<GpuPush>) -> Result<(), GpuError> {
        let (since, rank) = (self.now, self.rank);
        let (asked_ns, ready) = (push.task.asked_ns(), Arc::clone(&push.ready));
        let Some(state) = self.tensor(tensor) else { return Ok(()) };
        state.round += 1;
        let is_local = state.is_local;
        for (row, state_of_row) in state.rows.iter().zip(&mut state.states) {
            let parts = &state.plan.parts[row.parts()];
            let own = parts.iter().filter(|part| part.holder == rank).count();
            let missing = u32::try_from(own).unwrap_or(u32::MAX);
            *state_of_row = RowState { ordered: Ordered::Nothing, missing };
        }
        state.landed.fill(false);
        let rows = u32::try_from(state.rows.len()).unwrap_or(u32::MAX);
        let left = rows + state.own;
        state.run = Some(Run { push, since, left, is_ready: false });
        self.trace.begun(asked_ns, tensor, &self.tensors);
        if left == 0 {
            return self.finish(tensor);
        }
        if !is_local {
            self.ready.wait(&ready)?;
            let mark = self.ready.mark()?;
            self.incomplete.push_back((mark, tensor));
            return Ok(());
        }
        // The collective itself will wait for the gradient, on the GPU.
        self.trace.completes(tensor, &self.tensors, &ready, &mut self.ready)?;
        self.say_ready(tensor);
        Ok(())
    }

    /// A gradient is in the GPU's memory, and is to leave the communicator.
    pub(super) fn gradient_complete(&mut self, tensor: u32) {
        self.trace.complete(tensor, &self.tensors);
        let Some(Tensor { run: Some(_), rows, .. }) = self.tensor(tensor) else { return };
        let parts = rows.len();
        if self.host.is_some() {
            return self.say_ready(tensor);
        }
        for index in 0..u32::try_from(parts).unwrap_or(u32::MAX) {
            self.is_reduced(Of { tensor, index });
        }
    }

    /// The switch's sum of a part is on its holder's GPU, or will be once the stream down comes to
    /// it.
    pub(super) fn is_reduced(&mut self, of: Of) {
        let rank = self.rank;
        // Parts wait for those of other switches, with a slot, so all ranks of a host must take
        // them in one order: in that in which they were ordered.
        let in_order = self.host.as_ref().is_some_and(|host| host.switches.count() > 1);
        let Some(Tensor { run: Some(run), plan, round, .. }) = self.tensor(of.tensor) else {
            return;
        };
        if plan.parts[of.index as usize].holder != rank {
            return;
        }
        if matches!(plan.operation, Operation::Broadcast(root) if root != rank) {
            // It has nothing to say; the result is all that it wants.
            let (priority, round) = (run.push.priority, *round);
            let of = PartOf { tensor: of.tensor, index: of.index };
            return self.tell(FromGpu::Part { of, round, priority, slot: None });
        }
        let priority = if in_order { 0 } else { run.push.priority };
        self.to_copy.push(priority, of);
    }

    /// One of a run's open ends is closed; the last one finishes it.
    pub(super) fn one_less(&mut self, tensor: u32) -> Result<(), GpuError> {
        let Some(Tensor { run: Some(run), .. }) = self.tensor(tensor) else { return Ok(()) };
        run.left -= 1;
        if run.left == 0 { self.finish(tensor) } else { Ok(()) }
    }

    /// All of a result is enqueued.
    fn finish(&mut self, tensor: u32) -> Result<(), GpuError> {
        let (place, last) = match &mut self.host {
            Some(host) => (Place::Host, &mut host.track),
            None => (Place::Up, &mut self.up),
        };
        let mark = self.events.take()?;
        // Before the event, so that who waits for that finds this round over.
        self.trace.finishes(tensor, &self.tensors, (place, last))?;
        mark.record(last.stream())?;
        let Some(state) = self.tensor(tensor) else { return Ok(()) };
        let (run, next) = (state.run.take(), state.waiting.pop_front());
        if next.is_some() {
            // It may push what is just being written.
            self.ready.wait(&mark)?;
        }
        if let Some(run) = run {
            self.inbox.push_over();
            self.marks += 1;
            run.push.task.finish_behind(Mark { event: Arc::new(mark), number: self.marks });
        }
        next.map_or(Ok(()), |next| self.begin(tensor, next))
    }
}
