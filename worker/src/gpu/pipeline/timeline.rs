//! What a timeline shows of the GPU: when this thread saw that something was done.
//!
//! Invariant: while nobody records, nothing is enqueued for this and no clock is read.

#![forbid(unsafe_code)]

use super::turns::Of;
use super::{Batch, Copying, DeviceTensor, Ordered};
use crate::cuda::{Event, GpuError, Passed, Track};
use crate::rounds::PlanPart;
use bps_engine::base::{Operation, Rank, word};
use bps_engine::trace::timeline::{Mark, Recorder};
use std::collections::VecDeque;
use std::time::Duration;

/// How long the GPU may take for what was enqueued before a timeline was ended.
const LAST: Duration = Duration::from_secs(1);

/// The tracks that carry marks which only a timeline needs.
#[derive(Clone, Copy)]
pub(super) enum Place {
    Up,
    Host,
    Ready,
    Staged,
}

/// What is recorded once a mark is passed.
#[derive(Clone, Copy)]
struct Awaited {
    behind: u32,
    mark: Mark,
    /// Parts, by their places in the plan.
    parts: (u32, u32),
    tensor: u32,
    round: u64,
}

/// See the [module](self).
pub(super) struct Trace {
    rank: Rank,
    recorder: Recorder,
    /// By [`Place`], in the order of the marks.
    awaited: [VecDeque<Awaited>; 4],
    /// What began before the end of a timeline is recorded until then.
    ends_at: Option<Duration>,
}

type Tensors = [Option<DeviceTensor>];

fn find(tensors: &Tensors, tensor: u32) -> Option<&DeviceTensor> {
    tensors.get(tensor as usize)?.as_ref()
}

impl Trace {
    pub(super) fn new(rank: Rank) -> Trace {
        Trace { rank, recorder: Recorder::default(), awaited: Default::default(), ends_at: None }
    }

    /// A timeline begins, or ends once all is seen that has begun.
    pub(super) fn switch(&mut self, recorder: Recorder, now: Duration) {
        if recorder.is_on() {
            self.awaited.iter_mut().for_each(VecDeque::clear);
            (self.recorder, self.ends_at) = (recorder, None);
        } else if self.recorder.is_on() {
            self.ends_at = Some(now + LAST);
        }
    }

    /// Whether a mark is awaited.
    pub(super) fn is_awaiting(&self) -> bool {
        self.awaited.iter().any(|awaited| !awaited.is_empty())
    }

    fn record(&mut self, mark: Mark, part: &PlanPart, round: u64) {
        self.recorder.record(mark, part.key, round, self.rank, part.bytes);
    }

    fn record_all(&mut self, mark: Mark, parts: &[PlanPart], round: u64) {
        parts.iter().for_each(|part| self.record(mark, part, round));
    }

    /// A tensor's round begins.
    pub(super) fn begun(&mut self, asked_ns: u64, tensor: u32, tensors: &Tensors) {
        if let Some(state) = find(tensors, tensor).filter(|state| self.covers(state.round)) {
            for part in &state.plan.parts {
                let (key, round) = (part.key, state.round);
                let mark = Mark::Queued;
                self.recorder.record_at(asked_ns, mark, key, round, self.rank, part.bytes);
            }
        }
    }

    /// A tensor's gradient is complete.
    pub(super) fn complete(&mut self, tensor: u32, tensors: &Tensors) {
        if self.recorder.is_on()
            && let Some(state) = find(tensors, tensor)
        {
            self.record_all(Mark::Ready, &state.plan.parts, state.round);
        }
    }

    /// As [`complete`](Trace::complete), once the track has passed the event, for which nobody else
    /// waits here.
    pub(super) fn completes(
        &mut self,
        tensor: u32,
        tensors: &Tensors,
        event: &Event,
        ready: &mut Track,
    ) -> Result<(), GpuError> {
        if let Some(state) = find(tensors, tensor).filter(|state| self.covers(state.round)) {
            ready.wait(event)?;
            self.awaits(Place::Ready, ready.mark()?, Mark::Ready, tensor, state);
        }
        Ok(())
    }

    /// All of a tensor's result is enqueued in this track.
    pub(super) fn finishes(
        &mut self,
        tensor: u32,
        tensors: &Tensors,
        (place, track): (Place, &mut Track),
    ) -> Result<(), GpuError> {
        if let Some(state) = find(tensors, tensor).filter(|state| self.covers(state.round)) {
            self.awaits(place, track.mark()?, Mark::Done, tensor, state);
        }
        Ok(())
    }

    /// Whether this round of a tensor is recorded.
    pub(super) fn covers(&self, round: u64) -> bool {
        self.ends_at.is_none() && self.recorder.covers(round)
    }

    fn awaits(&mut self, place: Place, behind: u32, mark: Mark, tensor: u32, state: &DeviceTensor) {
        let all = word(state.plan.parts.len());
        // One part stands for the end of all.
        let parts = (0, if mark == Mark::Done { 1 } else { all });
        let awaited = Awaited { behind, mark, parts, tensor, round: state.round };
        self.awaited[place as usize].push_back(awaited);
    }

    /// A copy is the next one of its stream, or is done.
    pub(super) fn copy(&mut self, mark: Mark, copy: &Copying, tensors: &Tensors) {
        if self.recorder.is_on()
            && let Some(state) = find(tensors, copy.of.tensor)
        {
            self.record(mark, &state.plan.parts[copy.of.index as usize], copy.round);
        }
    }

    /// NCCL is called.
    pub(super) fn submitted(&mut self, batch: &Batch, tensors: &Tensors) {
        if !self.recorder.is_on() {
            return;
        }
        for of in &batch.rows {
            if let Some((state, [mark, _])) = collective(batch.order, *of, tensors) {
                let row = &state.rows[of.index as usize];
                self.record_all(mark, &state.plan.parts[row.parts()], state.round);
            }
        }
    }

    /// NCCL has enqueued it.
    pub(super) fn enqueued(
        &mut self,
        batch: &Batch,
        tensors: &Tensors,
        track: &mut Track,
    ) -> Result<(), GpuError> {
        let mut marked = None;
        for of in &batch.rows {
            let Some((state, [_, mark])) = collective(batch.order, *of, tensors) else { continue };
            if self.covers(state.round) {
                let behind = match marked {
                    Some(behind) => behind,
                    None => *marked.insert(track.mark()?),
                };
                let row = &state.rows[of.index as usize];
                let parts = (row.first, row.first + row.count);
                let (tensor, round) = (of.tensor, state.round);
                let awaited = Awaited { behind, mark, parts, tensor, round };
                self.awaited[Place::Host as usize].push_back(awaited);
            }
        }
        Ok(())
    }

    /// Records what the tracks have passed, by [`Place`]; says whether there was something.
    pub(super) fn look(
        &mut self,
        passed: [Option<Passed>; 4],
        tensors: &Tensors,
        now: Duration,
    ) -> bool {
        if !self.recorder.is_on() {
            return false;
        }
        let mut progress = false;
        for (place, passed) in passed.into_iter().enumerate() {
            while let Some(&awaited) = self.awaited[place].front()
                && passed.is_some_and(|passed| passed.has(awaited.behind))
            {
                self.awaited[place].pop_front();
                progress = true;
                if awaited.mark == Mark::Reduced {
                    // What is reduced was complete, whatever the other stream has written by now.
                    let ready = &mut self.awaited[Place::Ready as usize];
                    let same =
                        |one: &Awaited| (one.tensor, one.round) == (awaited.tensor, awaited.round);
                    let at = ready.iter().position(same);
                    if let Some(one) = at.and_then(|at| ready.remove(at)) {
                        self.has_passed(one, tensors);
                    }
                }
                self.has_passed(awaited, tensors);
            }
        }
        if self.ends_at.is_some_and(|at| now >= at || !self.is_awaiting()) {
            self.switch_off();
        }
        progress
    }

    fn has_passed(&mut self, awaited: Awaited, tensors: &Tensors) {
        // The tensor ended meanwhile, and its names with it.
        let Some(state) = find(tensors, awaited.tensor) else { return };
        let parts = awaited.parts.0 as usize..awaited.parts.1 as usize;
        let parts = state.plan.parts.get(parts).unwrap_or_default();
        self.record_all(awaited.mark, parts, awaited.round);
    }

    fn switch_off(&mut self) {
        self.awaited.iter_mut().for_each(VecDeque::clear);
        (self.recorder, self.ends_at) = (Recorder::default(), None);
    }
}

/// The tensor of a row, and what the beginning and the end of its collective are called, if it has
/// one: a broadcast through servers is not reduced.
fn collective(order: Ordered, of: Of, tensors: &Tensors) -> Option<(&DeviceTensor, [Mark; 2])> {
    let state = find(tensors, of.tensor).filter(|state| state.run.is_some())?;
    match (order, state.plan.operation) {
        (Ordered::Gather, _) => Some((state, [Mark::Copying, Mark::Copied])),
        (_, Operation::Broadcast(_)) if !state.is_local => None,
        _ => Some((state, [Mark::Granted, Mark::Reduced])),
    }
}
