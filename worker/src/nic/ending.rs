//! How rounds, lanes and the NIC loop end before their time: a tensor that is of no use any more, a
//! lane that closes, a job that is over, a rank that leaves.

use super::staged::Staged;
use super::{Command, Lane, LaneId, Nic, Outgoing, Receiving, Report};
use crate::error::Error;
use bps_engine::ring::Mpsc;
use bps_engine::transport::Cause;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// Finishes what is in the queue of a loop that has ended.
pub(crate) fn drain(commands: &Mpsc<Command>, error: &Error) {
    while let Some(command) = commands.pop() {
        match command {
            Command::Push { task, .. } => task.finish_now(Err(error.clone())),
            Command::PushGpu { push, .. } => push.task.finish_now(Err(error.clone())),
            _ => {}
        }
    }
}

impl Nic {
    /// A name on which the ranks disagree: what is pending of its tensors fails, and so does what
    /// comes, but for `agreed` rounds of them. A tensor that is not there was replaced by all.
    pub(super) fn poison(&mut self, name: &str, agreed: &[(u32, u64)], error: &Error) {
        for &(tensor, rounds) in agreed {
            let Some(Some(state)) = self.tensors.get_mut(tensor as usize) else { continue };
            if state.plan.name != name || state.poisoned.is_some() {
                continue;
            }
            // The pipeline of a GPU knows no rounds: there, all that is pending fails.
            let rounds = if state.plan.device { 0 } else { rounds };
            state.doomed = Some((rounds, error.clone()));
            self.poison_if_doomed(tensor);
        }
    }

    /// Fails what is pending of a doomed tensor, once it has had the rounds agreed on.
    pub(super) fn poison_if_doomed(&mut self, tensor: u32) {
        let Some(Some(state)) = self.tensors.get_mut(tensor as usize) else { return };
        let agreed = state.doomed.as_ref().map_or(u64::MAX, |(rounds, _)| *rounds);
        if state.round < agreed || state.round == agreed && state.run.is_some() {
            return;
        }
        let Some((_, error)) = state.doomed.take() else { return };
        state.poisoned = Some(error.clone());
        for waiting in state.waiting.drain(..) {
            waiting.task.finish_now(Err(error.clone()));
        }
        if state.plan.device {
            self.pipeline.tell(Staged::Poisoned { tensor, error: error.clone() });
        }
        let Some(run) = state.run else { return };
        self.queue.remove(|of| of.run == run);
        let mut unsaid = Vec::new();
        for lane in &mut self.lanes {
            lane.outbox.retain(|one| match one {
                Outgoing::Part(word) if word.of.run == run => {
                    unsaid.push(*word);
                    false
                }
                _ => true,
            });
        }
        self.forget_in_group(run);
        self.give_slots_back(run, &unsaid);
        self.drop_held(run);
        self.forget_grants(run);
        let is_landing = |lane: &&Lane| match &lane.receiving {
            Receiving::Landing { part, .. } => part.run == run,
            _ => false,
        };
        let landing = u32::try_from(self.lanes.iter().filter(is_landing).count()).unwrap_or(0);
        let state = &mut self.runs[run as usize];
        state.failed = Some(error.clone());
        // No other result will come for it: only memory that a transport still has is open.
        state.open = state.posted + landing + 1;
        self.close_one(run);
    }

    /// The job is over: the kernel must let go of all memory before any task is finished.
    pub(super) fn fail(&mut self, error: Error) {
        if self.over.is_some() {
            return;
        }
        let error = match (error, self.where_it_stands()) {
            (Error::PeerDied(text), Some(round)) => Error::PeerDied(format!("{text}; {round}")),
            (error, _) => error,
        };
        (self.config.say)(&error);
        self.over = Some(error);
        for position in 0..self.lanes.len() {
            self.endpoint.close(LaneId(u32::try_from(position).unwrap_or(u32::MAX)));
        }
        self.fail_pending();
    }

    /// Once every lane is closed, nobody but us holds the callers' memory.
    pub(super) fn fail_pending(&mut self) {
        let Some(error) = self.over.clone() else { return };
        if self.lanes.iter().any(|lane| lane.open) {
            return;
        }
        for run in &mut self.runs {
            if let Some(task) = run.task.take() {
                task.finish_now(Err(error.clone()));
            }
        }
        for tensor in self.tensors.iter_mut().flatten() {
            tensor.run = None;
            for waiting in tensor.waiting.drain(..) {
                waiting.task.finish_now(Err(error.clone()));
            }
        }
    }

    pub(super) fn leave(&mut self) {
        if self.over.is_some() {
            return;
        }
        let is_open = self.tensors.iter().flatten().any(|tensor| tensor.run.is_some());
        if is_open || self.pipeline.is_busy() {
            let text = "shutdown was called while a push_pull was under way: synchronize it first";
            return self.fail(Error::Closed(text.into()));
        }
        self.leaving = true;
        self.say_goodbyes();
    }

    /// Says goodbye on each lane that has room for it. A lane that ends without has died, as its
    /// other end sees it, and takes the job with it.
    pub(super) fn say_goodbyes(&mut self) {
        for position in 0..self.lanes.len() {
            let id = LaneId(u32::try_from(position).unwrap_or(u32::MAX));
            let lane = &self.lanes[position];
            if lane.open && !lane.said_goodbye && self.say_goodbye(id).is_ok() {
                self.lanes[position].said_goodbye = true;
            }
        }
    }

    /// The loop has [ended](Self::ended), and is not stepped again: forgets all memory of others,
    /// says so by these two, and finishes what is in its queue.
    pub fn end(&mut self, ended: &AtomicBool, over: &OnceLock<Error>) {
        if let Some(error) = &self.over {
            let _ = over.set(error.clone());
        }
        self.forget_memory();
        ended.store(true, Ordering::SeqCst);
        let closed = Error::Closed("this worker has shut down".into());
        let error = over.get().unwrap_or(&closed);
        self.close_pipeline(error);
        drain(&self.commands, error);
    }

    pub(super) fn on_closed(&mut self, lane: LaneId, cause: Cause) {
        let round = self.where_it_stands();
        let state = &mut self.lanes[lane.0 as usize];
        state.open = false;
        state.receiving = Receiving::Closing;
        let (peer, goodbye) = (state.peer, state.goodbye);
        for circle in [&mut self.group, &mut self.column] {
            if let Ok(peer) = circle.place(lane) {
                circle.collector.gone(peer);
            }
        }
        if self.over.is_some() {
            self.fail_pending();
        } else if !self.leaving && !goodbye {
            self.report(Report::Lost { peer, cause, round });
        }
    }

    /// "round 812 of `layer4.weight` was open", or which was the last one.
    pub(super) fn where_it_stands(&self) -> Option<String> {
        let open = self.tensors.iter().flatten().find(|tensor| tensor.run.is_some());
        let last = self.tensors.get(self.latest as usize).and_then(Option::as_ref);
        let (tensor, how) = match (open, last) {
            (Some(tensor), _) => (tensor, "was open"),
            (None, Some(tensor)) if tensor.round > 0 => (tensor, "was the last one"),
            _ => return None,
        };
        Some(format!("round {} of `{}` {how}", tensor.round, tensor.plan.name))
    }
}
