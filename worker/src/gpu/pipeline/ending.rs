//! How a pipeline ends: a tensor that is of no use any more, a GPU that can't go on, the end of the
//! job.

#![forbid(unsafe_code)]

use super::{DeviceTensor, Early, Pipeline, Staged};
use crate::base::error::{Closed, Error, Refusal, Source};
use crate::cuda::{Awaited, Closing, GpuError, Track};
use crate::gpu::order_lanes::OrderLanes;
use crate::rounds::handover::{FromGpu, GpuPush};
use bps_engine::base::{Rank, word};
use bps_engine::trace::log;
use std::time::Duration;

/// How long copies and collectives may take to end once the job is over.
const DRAIN: Duration = Duration::from_secs(5);
/// How long they may take for what was ordered of a tensor on which ranks disagree, and for what
/// stands before it in their streams.
const DISPUTE: Duration = Duration::from_secs(60);
/// How long the job has to say who died, which it knows better, before NCCL's word is told: longer
/// than the control thread waits for the scheduler.
const VERDICT: Duration = Duration::from_secs(3);

/// A round that was given up: its memory is its caller's again once the GPU has passed these marks.
pub(super) struct Drained {
    push: Box<GpuPush>,
    error: Error,
    /// Of the host's stream, and of those up and down; none until NCCL is enqueueing nothing.
    marks: Option<(Option<u32>, [u32; 2])>,
    /// Those of tensors with memory of their own.
    is_staged: bool,
    since: Duration,
}

impl Drained {
    /// A round that ends so.
    pub(super) fn new(
        push: Box<GpuPush>,
        error: Error,
        is_staged: bool,
        since: Duration,
    ) -> Drained {
        Drained { push, error, marks: None, is_staged, since }
    }
}

/// How far the end of a pipeline is.
pub(super) struct End {
    /// The communicator, while NCCL has it.
    closing: Option<Closing>,
    /// The lanes to the other pipelines of the host, until the last has closed.
    lanes: Option<OrderLanes>,
    /// Its stream.
    track: Option<Track>,
    /// Why, if not in good order.
    error: Option<Error>,
    /// When the communicator's end was over, or this began.
    since: Duration,
    /// When this began.
    began: Duration,
}

impl Pipeline {
    /// The first error ends the job: nothing more is enqueued, and the rest comes from above.
    pub(super) fn check(&mut self, result: Result<(), GpuError>) {
        let Err(error) = result else { return };
        if self.failed.is_none() {
            let wait = if error.is_of_another_rank() { VERDICT } else { Duration::ZERO };
            self.fails_at = Some(self.now + wait);
            self.failed = Some(error);
        }
    }

    /// Tells the first error, once it is time.
    pub(super) fn tell_failure(&mut self) {
        if self.fails_at.is_some_and(|at| at <= self.now)
            && let Some(error) = &self.failed
        {
            self.fails_at = None;
            self.tell(FromGpu::Failed { source: Source::new(error.clone()) });
        }
    }

    /// Ranks disagree about a tensor. What was ordered of it in the host is still done, as all of
    /// the host do it: so its end comes with the word of who gives the order.
    pub(super) fn on_poison(&mut self, tensor: u32, error: &Error) {
        // No tensor of the GPU has this id: the NIC loop's table ends it.
        let Some(state) = self.tensor(tensor) else { return };
        state.poisoned = Some(error.clone());
        let pushes: Vec<_> = state.waiting.drain(..).collect();
        for push in pushes {
            self.end_push(&push, error.clone());
        }
        if !self.end_orders_of(tensor) {
            self.end_disputed(tensor);
        }
    }

    /// Ends what is under way of a tensor on which ranks disagree, and of which nothing more is
    /// ordered: once that is enqueued which was.
    pub(super) fn end_disputed(&mut self, tensor: u32) {
        let is_open = self.tensor(tensor).is_some_and(|state| state.run.is_some());
        if is_open && !self.disputed.contains(&tensor) {
            self.disputed.push(tensor);
        }
    }

    /// Lets go of the rounds of disputed tensors of which all is enqueued that was ordered, also by
    /// a batch whose last word has not come. Only while NCCL is enqueueing nothing, since this
    /// marks its stream. A round's memory is its caller's again only when the GPU is done with it.
    pub(super) fn let_go(&mut self) -> Result<(), GpuError> {
        let is_ordered = |tensor: &u32| {
            let rows = self.orders.iter().flat_map(|batch| &batch.rows);
            rows.chain(&self.coming).any(|of| of.tensor == *tensor)
        };
        let (wait, ended): (Vec<u32>, Vec<u32>) =
            std::mem::take(&mut self.disputed).into_iter().partition(is_ordered);
        self.disputed = wait;
        for tensor in ended {
            self.to_copy.forget(tensor);
            self.incomplete.retain(|(_, one)| *one != tensor);
            let Some(state) = self.tensor(tensor) else { continue };
            let is_staged = state.staging.is_some();
            let (run, error) = (state.run.take(), state.poisoned.clone());
            if let (Some(run), Some(error)) = (run, error) {
                if run.is_told {
                    // Nobody is to wait for what a result lacks that does not come.
                    run.push.task.lacks(run.lacks.ranks, run.lacks.by_rank);
                    self.one_less_ahead();
                }
                self.drained.push(Drained::new(run.push, error, is_staged, self.now));
            }
        }
        for one in self.drained.iter_mut().filter(|one| one.marks.is_none()) {
            let host = self.host.as_mut().map(|host| host.track.mark()).transpose()?;
            let (up, down) = match &mut self.staged {
                Some(staged) if one.is_staged => (&mut staged.up, &mut staged.down),
                _ => (&mut self.up, &mut self.down),
            };
            one.marks = Some((host, [up.mark()?, down.mark()?]));
        }
        Ok(())
    }

    /// Ends the rounds with which the GPU is done.
    pub(super) fn end_drained(&mut self) -> Result<bool, GpuError> {
        if self.drained.is_empty() {
            return Ok(false);
        }
        let (host, [up, down, _]) = self.passed();
        let tracks = |staged: &Staged| [staged.up.passed(), staged.down.passed()];
        let staged = self.staged.as_ref().map(tracks);
        let has_passed = |one: &mut Drained| {
            let Some((of_host, [above, below])) = one.marks else { return false };
            if let Some([up, down]) = staged.filter(|_| one.is_staged) {
                return up.has(above) && down.has(below);
            }
            let is_host_done = of_host.is_none_or(|mark| host.is_some_and(|host| host.has(mark)));
            is_host_done && up.has(above) && down.has(below)
        };
        let over: Vec<Drained> = self.drained.extract_if(.., has_passed).collect();
        let progress = !over.is_empty();
        for one in over {
            self.end_push(&one.push, one.error);
        }
        let is_late = |one: &&Drained| self.now.saturating_sub(one.since) > DISPUTE;
        if let Some(late) = self.drained.iter().find(is_late) {
            let awaited = Awaited::FailedRound { why: late.error.to_string() };
            return Err(GpuError::Timeout { awaited, after: DISPUTE });
        }
        Ok(progress)
    }

    /// A rank of the host has left in good order. If it gave the order, it gives none any more.
    pub(super) fn on_gone(&mut self, rank: Rank) {
        self.gone.push(rank);
        // Whoever waits for this rank learns of it in this turn.
        self.next_tick = self.now;
        let all = 0..word(self.tensors.len());
        let is_poisoned = |tensor: &u32| {
            let state = self.tensors[*tensor as usize].as_ref();
            state.is_some_and(|state| state.poisoned.is_some() && state.run.is_some())
        };
        let ends: Vec<u32> =
            all.filter(|_| self.leader() == Some(rank)).filter(is_poisoned).collect();
        ends.into_iter().for_each(|tensor| self.end_disputed(tensor));
    }

    /// One step of the end, after the NIC loop's; says whether it is over.
    pub fn end(&mut self, now: Duration) -> bool {
        self.now = now;
        let mut end = self.end.take().unwrap_or_else(|| self.begin_end());
        let mut is_said = true;
        if let Some(lanes) = &mut end.lanes {
            lanes.flush();
            lanes.poll(&mut self.heard);
            self.heard.clear();
            is_said = lanes.is_closed() || now.saturating_sub(end.began) >= DRAIN;
        }
        if let Some(closing) = &mut end.closing {
            let Some(closed) = closing.step(now) else { return self.is_ending(end) };
            if let Err(error) = closed {
                log::info!("{error}");
            }
            (end.closing, end.since) = (None, now);
        }
        let staged = self.staged.iter().flat_map(|staged| [&staged.down, &staged.up]);
        let tracks = [&self.ready, &self.down, &self.up].into_iter().chain(&end.track);
        let tracks = tracks.chain(staged);
        // A driver that cannot tell whether a stream is idle has failed; its GPU writes nothing.
        let is_idle = tracks.map(Track::stream).all(|stream| stream.is_idle().unwrap_or(true));
        if !is_said || !is_idle && now.saturating_sub(end.since) < DRAIN {
            return self.is_ending(end);
        }
        self.finish_all(end, is_idle);
        true
    }

    fn is_ending(&mut self, end: End) -> bool {
        self.end = Some(end);
        false
    }

    /// The NIC loop has ended.
    fn begin_end(&mut self) -> End {
        if self.failed.is_none() {
            // What has landed is there.
            let marked = self.mark_staged_results();
            self.check(marked);
        }
        let failed = self.failed.take().map(|failed| Refusal::Own(Source::new(failed)).into());
        let error = self.job_over.get().cloned().or(failed);
        let began = self.now;
        let Some(mut host) = self.host.take() else {
            let (closing, lanes, track, since) = (None, None, None, began);
            return End { closing, lanes, track, error, since, began };
        };
        // Who dies says nothing.
        match error {
            Some(_) => host.lanes.close(),
            None => host.lanes.say_goodbye(),
        }
        // Who waits on the GPU for a rank that is gone returns. In good order a rank that is late
        // need not keep this one: nothing is under way.
        let closing = match error {
            Some(_) => host.comm.begin_abort(),
            None => host.comm.begin_close(DRAIN, began),
        };
        let (closing, lanes, track) = (Some(closing), Some(host.lanes), Some(host.track));
        End { closing, lanes, track, error, since: began, began }
    }

    /// The GPU is idle, or has had its time.
    fn finish_all(&mut self, end: End, is_idle: bool) {
        let End { track, error, .. } = end;
        // What the GPU did last is in the timeline too.
        while let Some(copy) = self.rising.pop_front().filter(|_| is_idle) {
            self.has_risen(&copy);
        }
        let host = track.as_ref().map(Track::passed);
        let [up, ready] = [&self.up, &self.ready].map(Track::passed);
        let staged = self.staged.as_ref().map(|staged| staged.up.passed());
        self.trace_staged();
        self.trace.look([Some(up), host, Some(ready), staged], &self.tensors, self.now);
        // To free memory of the GPU waits for all of its work, also for that of a framework which
        // waits for a rank that is gone.
        if error.is_some() || !is_idle {
            std::mem::forget(std::mem::take(&mut self.direct));
        }
        let error = error.unwrap_or_else(|| Closed::Left.into());
        self.inbox.end(&error);
        let finished = std::mem::take(&mut self.finished);
        for (_, task) in finished.into_iter().chain(self.take_staged()) {
            self.inbox.push_over();
            task.finish_now(Err(error.clone()));
        }
        let early = std::mem::take(&mut self.early).into_iter().filter_map(|(_, one)| match one {
            Early::Push(push) => Some(push),
            Early::Factor(_) => None,
        });
        let kept = std::mem::take(&mut self.kept).into_iter().map(|(_, push)| push);
        for push in early.chain(kept) {
            self.end_push(&push, error.clone());
        }
        for one in std::mem::take(&mut self.drained) {
            self.end_push(&one.push, one.error);
        }
        for state in std::mem::take(&mut self.tensors).into_iter().flatten() {
            let DeviceTensor { run, waiting, kept, staging, .. } = state;
            if let Some(kept) = kept.filter(|_| is_idle) {
                kept.give_back(self.down_of(staging.is_some()).stream());
            }
            for push in run.map(|run| run.push).into_iter().chain(waiting) {
                self.end_push(&push, error.clone());
            }
        }
        if !is_idle {
            // Something on the GPU may write here yet.
            std::mem::forget(self.memory.take());
            self.staged.iter_mut().for_each(Staged::leak);
            self.keeping.leak();
        }
    }
}
