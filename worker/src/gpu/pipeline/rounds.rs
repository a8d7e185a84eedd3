//! The rounds of a tensor, from its push to the mark behind its result.

#![forbid(unsafe_code)]

use super::ending::Drained;
use super::timeline::Place;
use super::{DeviceTensor, Early, Of, Ordered, Pipeline, RowState, Run, Written};
use crate::base::error::Error;
use crate::base::task::{Mark, Series, Task};
use crate::cuda::{GpuError, PooledEvent};
use crate::rounds::handover::{From, FromGpu, GpuPush};
use crate::rounds::{Lacks, PartOf, root_lost};
use bps_engine::base::{Operation, word};
use std::sync::Arc;

impl Run {
    /// Its caller's task, which is told what the result lacks.
    pub(super) fn finished(self) -> Arc<Task> {
        self.push.task.lacks(self.lacks.ranks, self.lacks.by_rank);
        self.push.task
    }
}

impl Pipeline {
    /// A push is over: its memory is its caller's again.
    pub(super) fn end_push(&self, push: &GpuPush, error: Error) {
        self.inbox.push_over();
        push.task.finish_now(Err(error));
    }

    pub(super) fn tensor(&mut self, tensor: u32) -> Option<&mut DeviceTensor> {
        self.tensors.get_mut(tensor as usize)?.as_mut()
    }

    pub(super) fn on_push(&mut self, tensor: u32, push: Box<GpuPush>) -> Result<(), GpuError> {
        let Some(state) = self.tensor(tensor) else {
            self.early.push((tensor, Early::Push(push)));
            return Ok(());
        };
        if let Some(error) = state.poisoned.clone() {
            self.end_push(&push, error);
            return Ok(());
        }
        let is_in_slots = state.staging.is_none();
        state.pushed += 1;
        if is_in_slots && (self.is_ahead() || !self.kept.is_empty()) {
            self.kept.push_back((tensor, push));
            return Ok(());
        }
        self.push_now(tensor, push)
    }

    /// Begins a round with this push, or lets it wait for the one that is open.
    pub(super) fn push_now(&mut self, tensor: u32, push: Box<GpuPush>) -> Result<(), GpuError> {
        // The job ends then, and its end says why: who died, rather than what NCCL saw of it.
        let has_failed = self.failed.is_some();
        let Some(state) = self.tensor(tensor) else { unreachable!("its plan is there") };
        if state.run.is_some() || has_failed {
            state.waiting.push_back(push);
            return Ok(());
        }
        self.begin(tensor, push)
    }

    /// Opens the next round of a tensor.
    pub(super) fn begin(&mut self, tensor: u32, push: Box<GpuPush>) -> Result<(), GpuError> {
        let is_unmarked = |state: &mut DeviceTensor| matches!(state.written, Written::Unmarked);
        let mut may_begin = Ok(());
        if self.tensor(tensor).is_some_and(is_unmarked) {
            may_begin = self.mark_results().and_then(|()| self.mark_staged_results());
        }
        let may_begin = may_begin.and_then(|()| self.rescale(tensor));
        if let (Err(_), Some(state)) = (&may_begin, self.tensor(tensor)) {
            // It ends with the job.
            state.waiting.push_front(push);
            return may_begin;
        }
        let (since, rank) = (self.now, self.rank);
        let (asked_ns, ready) = (push.task.asked_ns(), Arc::clone(&push.ready));
        let Some(state) = self.tensor(tensor) else { unreachable!("its caller has found it") };
        state.round += 1;
        let is_local = state.is_local;
        for (row, state_of_row) in state.rows.iter().zip(&mut state.states) {
            let parts = &state.plan.parts[row.parts()];
            let own = parts.iter().filter(|part| part.holder == rank).count();
            let missing = word(own);
            *state_of_row = RowState { ordered: Ordered::Nothing, missing };
        }
        state.landed.fill(false);
        let rows = word(state.rows.len());
        let left = rows + state.own;
        let is_staged = state.staging.is_some();
        state.run =
            Some(Run { push, since, left, is_ready: false, is_told: false, lacks: Lacks::NOTHING });
        self.trace.begun(asked_ns, tensor, &self.tensors);
        if left == 0 {
            return self.finish(tensor);
        }
        if is_staged {
            return self.begin_staged(tensor, &ready);
        }
        if !is_local {
            let mark = self.await_gradient(tensor, &ready)?;
            self.incomplete.push_back((mark, tensor));
            return Ok(());
        }
        // The collective itself will wait for the gradient, on the GPU.
        self.trace.completes(tensor, &self.tensors, &ready, &mut self.ready)?;
        self.say_ready(tensor);
        Ok(())
    }

    /// The mark behind which the gradient is complete, and what was last written in its place is
    /// there. Tensors that were pushed together have one event, and one mark.
    fn await_gradient(&mut self, tensor: u32, ready: &Arc<PooledEvent>) -> Result<u32, GpuError> {
        let (host, [up, ..]) = self.passed();
        let last = host.unwrap_or(up);
        let Some(state) = self.tensor(tensor) else { unreachable!("it begins a round") };
        if let Written::Behind(mark, event) = std::mem::take(&mut state.written)
            && !last.has(mark)
        {
            // Its caller pushes what is just being written.
            self.ready.wait(&event)?;
        } else if let Some((last, mark)) = &self.last_ready
            && Arc::ptr_eq(last, ready)
        {
            return Ok(*mark);
        }
        self.ready.wait(ready)?;
        let mark = self.ready.mark()?;
        self.last_ready = Some((Arc::clone(ready), mark));
        Ok(mark)
    }

    /// A gradient is in the GPU's memory, and is to leave the communicator.
    pub(super) fn gradient_complete(&mut self, tensor: u32) {
        self.trace.complete(tensor, &self.tensors);
        // The round ended early, by an error, and its push has been told.
        let Some(DeviceTensor { run: Some(_), rows, .. }) = self.tensor(tensor) else { return };
        let parts = rows.len();
        if self.host.is_some() {
            return self.say_ready(tensor);
        }
        for index in 0..word(parts) {
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
        let Some(DeviceTensor { run: Some(run), plan, round, .. }) = self.tensor(of.tensor) else {
            return;
        };
        if plan.parts[of.index as usize].holder != rank {
            return;
        }
        if matches!(plan.operation, Operation::Broadcast(root) if root != rank) {
            // It has nothing to say; the result is all that it wants.
            let (priority, round) = (run.push.priority, *round);
            let of = PartOf { tensor: of.tensor, index: of.index };
            let (from, encoded) = (From::Nowhere, None);
            return self.tell(FromGpu::Part { of, round, priority, from, encoded });
        }
        let priority = if in_order { 0 } else { run.push.priority };
        self.to_copy.push(priority, of);
    }

    /// One of a run's open ends is closed; the last one finishes it. The run is there: if ranks
    /// disagree about a tensor, the NIC loop abandons its parts before it says so here, and says
    /// nothing of them afterwards; and a row that is ordered keeps its round open (`let_go`).
    pub(super) fn one_less(&mut self, tensor: u32) -> Result<(), GpuError> {
        let Some(DeviceTensor { run: Some(run), .. }) = self.tensor(tensor) else {
            unreachable!("what is closed was open")
        };
        run.left -= 1;
        if run.left == 0 { self.finish(tensor) } else { Ok(()) }
    }

    /// All of a result is enqueued. Its mark comes with those of its batch, or of this turn.
    fn finish(&mut self, tensor: u32) -> Result<(), GpuError> {
        let is_staged = self.tensor(tensor).is_some_and(|state| state.staging.is_some());
        let last = match (&mut self.host, &mut self.staged) {
            (None, Some(staged)) if is_staged => (Place::Staged, &mut staged.up),
            (Some(host), _) => (Place::Host, &mut host.track),
            (None, _) => (Place::Up, &mut self.up),
        };
        // Before the mark, so that a waiter observes the round as finished.
        self.trace.finishes(tensor, &self.tensors, last)?;
        if is_staged {
            return self.finish_staged(tensor);
        }
        let now = self.now;
        let Some(state) = self.tensor(tensor) else { unreachable!("its round is open") };
        let Some(run) = state.run.take() else { unreachable!("its last end was just closed") };
        let next = state.waiting.pop_front();
        if run.lacks.is_lost {
            let error = root_lost(&state.plan, state.round);
            // Other parts may have come, and are being copied up.
            self.drained.push(Drained::new(run.push, error, false, now));
        } else {
            state.written = Written::Unmarked;
            self.finished.push((tensor, run.finished()));
        }
        match next {
            Some(next) => self.begin(tensor, next),
            None => self.rescale(tensor),
        }
    }

    /// Marks what has been enqueued since this was last called.
    pub(super) fn mark_ends(&mut self) {
        if self.failed.is_none() {
            let marked = self.mark_results().and_then(|()| self.mark_up());
            let marked = marked.and_then(|()| self.mark_due_results());
            let marked = marked.and_then(|()| self.mark_staged());
            self.check(marked);
        }
    }

    /// Marks the results of which all is enqueued, and tells who waits for them.
    pub(super) fn mark_results(&mut self) -> Result<(), GpuError> {
        if self.finished.is_empty() {
            return Ok(());
        }
        let event = self.events.take()?;
        let last = match &mut self.host {
            Some(host) => &mut host.track,
            None => {
                self.unmarked = (0, 0);
                &mut self.up
            }
        };
        last.record(&event)?;
        let (mark, event) = (last.mark()?, Arc::new(event));
        self.marks += 1;
        let mut finished = std::mem::take(&mut self.finished);
        for (tensor, task) in finished.drain(..) {
            if let Some(state) = self.tensor(tensor) {
                state.written = Written::Behind(mark, Arc::clone(&event));
            }
            self.inbox.push_over();
            let series = Series::Slots(self.marks);
            task.finish_behind(Mark { event: Arc::clone(&event), series });
        }
        // Its memory serves the next turn.
        self.finished = finished;
        Ok(())
    }
}
