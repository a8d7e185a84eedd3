//! Tensors with [memory of their own](Staging) in the host. A rank alone on its host has them, as
//! far as that memory goes.
//!
//! Their copies are enqueued ahead of what they wait for. A gradient is copied down behind its
//! event when it is pushed, and the NIC loop sees in memory that it has come. A result is copied up
//! when it has landed; or, once its caller [wants](Task::is_wanted) to put a stream behind it,
//! before that, behind a wait for the word that the NIC loop will write. So the caller's thread
//! goes on and launches what comes next, while this tensor is on its way.
//!
//! Invariant: of a round, all that other ranks need is enqueued, and the NIC loop has been told,
//! before a wait is enqueued. From then on the wait ends without a call of CUDA, by any thread of
//! any rank: see `nic::staged`.
//!
//! Streams of their own, down and up: what waits here for the network is not in the way of copies
//! out of slots, which others need. And rounds in slots do not begin while a result is waited for
//! here, nor is one waited for while they are open: a lane that holds back a result until a slot is
//! free, which takes calls of CUDA, would hold back what comes behind it.

use super::copies::{empty, fill};
use super::{BYTES_OF_MARK, COPIES_OF_MARK, Copying, DeviceTensor, Of, Pipeline, Written};
use crate::base::task::{Mark, Series, Task};
use crate::cuda::{EventPool, GpuError, PooledEvent, Progress, Track};
use crate::gpu::staging::StagingMemory;
use crate::rounds::handover::{From, FromGpu};
use crate::rounds::{PartOf, Staging};
use bps_engine::base::{Operation, word};
use bps_engine::trace::log;
use bps_engine::trace::timeline::Mark as Seen;
use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

/// Results that nobody wants yet are held until they are so many bytes, or for so long, to be
/// copied up and marked together: each by itself would take three calls of the driver.
const BYTES_HELD: usize = 1 << 20;
const HELD: Duration = Duration::from_micros(200);

/// See the [module](self).
pub(in crate::gpu) struct Staged {
    memory: StagingMemory,
    /// Names of tensors that have some.
    names: HashSet<Arc<str>>,
    pub(super) down: Track,
    pub(super) up: Track,
    /// Copies down, and bytes of them, that are not marked.
    unmarked: (usize, usize),
    /// Since when results are held that have landed and are not marked, and their bytes.
    held: Option<(Duration, usize)>,
    /// What the stream down has waited for last.
    last_ready: Option<Arc<PooledEvent>>,
    /// Rounds whose last copy is enqueued, and is not marked.
    finished: Vec<(u32, Arc<Task>)>,
    /// Marks behind results.
    marks: u64,
    /// Results that have landed.
    landings: u64,
    /// Somebody wants what may not have come.
    is_wanted: bool,
    /// Rounds whose callers were told, and whose results may not have come.
    ahead: usize,
    /// Copies up under way, of which only a timeline tells.
    rising: VecDeque<Copying>,
}

/// A part of a tensor.
#[derive(Clone, Copy)]
pub(super) struct Part {
    staging: Staging,
    /// The copy up of the open round is enqueued.
    is_up: bool,
    /// When its last result landed, in the order of all.
    landed: u64,
}

impl Staged {
    pub(in crate::gpu) fn new(memory: StagingMemory, [down, up]: [Track; 2]) -> Staged {
        Staged {
            memory,
            names: HashSet::new(),
            down,
            up,
            unmarked: (0, 0),
            held: None,
            last_ready: None,
            finished: Vec::new(),
            marks: 0,
            landings: 0,
            is_wanted: false,
            ahead: 0,
            rising: VecDeque::new(),
        }
    }

    /// How far its copies down are.
    pub(in crate::gpu) fn progress(&self) -> Progress {
        self.down.progress()
    }

    /// A mark behind all results that are enqueued, and the event for their callers.
    fn mark_results(&mut self, events: &EventPool) -> Result<(u32, Arc<PooledEvent>), GpuError> {
        let event = events.take()?;
        self.up.record(&event)?;
        self.held = None;
        self.marks += 1;
        Ok((self.up.mark()?, Arc::new(event)))
    }

    /// Tells a caller that its result is enqueued, before the last mark.
    fn tell(&self, task: &Task, event: &Arc<PooledEvent>) {
        let (event, series) = (Arc::clone(event), Series::Staged(self.marks));
        task.finish_behind(Mark { event, series });
    }

    /// Something on the GPU may use its memory yet.
    pub(super) fn leak(&mut self) {
        self.memory.leak();
    }
}

impl Pipeline {
    /// Memory of its own for a tensor of this plan, if it is to have some and there is some left.
    pub(super) fn stage(&mut self, plan: &crate::rounds::Plan) -> Option<Box<[Part]>> {
        let staged = self.staged.as_mut()?;
        // The broadcast of a model is one round of each tensor, most often. And a tensor that
        // replaces another, which keeps what it has, would let memory grow with each size.
        let is_broadcast = matches!(plan.operation, Operation::Broadcast(_));
        if is_broadcast || staged.names.contains(&plan.name) {
            return None;
        }
        staged.names.insert(Arc::clone(&plan.name));
        let pieces = staged.memory.pinned().0;
        match staged.memory.take(plan) {
            Ok(stagings) => {
                let (now, bytes) = staged.memory.pinned();
                if now > pieces {
                    log::debug!("{} MiB pinned for tensors of their own", bytes >> 20);
                }
                let part = |staging| Part { staging, is_up: false, landed: 0 };
                stagings.map(|stagings| stagings.into_iter().map(part).collect())
            }
            Err(error) => {
                log::warning!("tensors share pinned slots from now on, which is slower: {error}");
                self.staged.as_mut()?.memory.close();
                None
            }
        }
    }

    /// Enqueues the copies down of a round that begins.
    pub(super) fn begin_staged(
        &mut self,
        tensor: u32,
        ready: &Arc<PooledEvent>,
    ) -> Result<(), GpuError> {
        let Some(DeviceTensor { written, run, plan, .. }) = self.tensor(tensor) else {
            unreachable!("it begins a round")
        };
        let parts = word(plan.parts.len());
        let written = std::mem::take(written);
        let is_wanted = run.as_ref().is_some_and(|run| run.push.task.is_wanted());
        let Some(staged) = &mut self.staged else { unreachable!("its tensors are staged") };
        staged.is_wanted |= is_wanted;
        if let Written::Behind(mark, event) = written
            && !staged.up.passed().has(mark)
        {
            // The last result leaves the memory, and is in the tensor, before the next one comes.
            staged.down.wait(&event)?;
        }
        if staged.last_ready.as_ref().is_none_or(|last| !Arc::ptr_eq(last, ready)) {
            staged.down.wait(ready)?;
            staged.last_ready = Some(Arc::clone(ready));
        }
        for index in 0..parts {
            self.copy_down_staged(Of { tensor, index })?;
        }
        Ok(())
    }

    fn copy_down_staged(&mut self, of: Of) -> Result<(), GpuError> {
        let coder = self.coder_of(of);
        let encoded = coder.map(|coder| coder.encoded);
        let (tensors, staged) = (&mut self.tensors, &mut self.staged);
        let (Some(Some(state)), Some(staged)) = (tensors.get_mut(of.tensor as usize), staged)
        else {
            unreachable!("a staged tensor begins a round")
        };
        let (Some(run), Some(parts)) = (&state.run, &mut state.staging) else {
            unreachable!("a staged tensor begins a round")
        };
        let (round, priority) = (state.round, run.push.priority);
        let plan = state.plan.parts[of.index as usize];
        let part = &mut parts[of.index as usize];
        part.is_up = false;
        let (staging, source) = (part.staging, run.push.source + plan.offset as u64);
        // SAFETY: the part lies inside the tensor, which its caller keeps until the task is
        // finished, and whatever uses it after that comes behind this in its streams. The memory is
        // this part's: its last result has left it, since this stream has waited for that.
        unsafe { fill(&mut staged.down, staging.slot(), source, plan.bytes, coder) }?;
        let mark = staged.down.next_mark();
        staged.unmarked = (staged.unmarked.0 + 1, staged.unmarked.1 + plan.bytes);
        if staged.unmarked.0 >= COPIES_OF_MARK || staged.unmarked.1 >= BYTES_OF_MARK {
            staged.unmarked = (0, 0);
            staged.down.mark()?;
        }
        let (of, from) =
            (PartOf { tensor: of.tensor, index: of.index }, From::Staging(staging, mark));
        self.tell(FromGpu::Part { of, round, priority, from, encoded });
        Ok(())
    }

    /// Marks the copies down that have no mark yet.
    pub(super) fn mark_staged(&mut self) -> Result<(), GpuError> {
        if let Some(staged) = &mut self.staged
            && staged.unmarked.0 > 0
        {
            staged.unmarked = (0, 0);
            staged.down.mark()?;
        }
        Ok(())
    }

    /// The result of a part has landed: it is copied up, unless that is enqueued already.
    pub(super) fn has_landed_staged(&mut self, of: Of) -> Result<(), GpuError> {
        let Some(staged) = &mut self.staged else { unreachable!("its tensors are staged") };
        staged.landings += 1;
        let landings = staged.landings;
        let Some(Some(state)) = self.tensors.get_mut(of.tensor as usize) else {
            unreachable!("its round is open")
        };
        let Some(parts) = &mut state.staging else { unreachable!("the tensor is staged") };
        parts[of.index as usize].landed = landings;
        if parts[of.index as usize].is_up {
            return Ok(());
        }
        let bytes = state.plan.parts[of.index as usize].bytes;
        let (since, held) = staged.held.unwrap_or((self.now, 0));
        staged.held = Some((since, held + bytes));
        self.copy_up_staged(of)
    }

    /// Enqueues the copy up of a part.
    fn copy_up_staged(&mut self, of: Of) -> Result<(), GpuError> {
        let coder = self.coder_of(of);
        let (Some(Some(state)), Some(staged)) =
            (self.tensors.get_mut(of.tensor as usize), &mut self.staged)
        else {
            unreachable!("a staged tensor has a round")
        };
        let (Some(run), Some(parts)) = (&state.run, &mut state.staging) else {
            unreachable!("a staged tensor has a round")
        };
        let plan = state.plan.parts[of.index as usize];
        let part = &mut parts[of.index as usize];
        part.is_up = true;
        let (slot, target) = (part.staging.result(), run.push.target + plan.offset as u64);
        // SAFETY: the part lies inside the tensor, which its caller keeps until the task is
        // finished, and whatever uses it after that comes behind this in its streams. The result is
        // in the slot, or the stream waits for that; nobody writes there before the next round is
        // sent, whose copy down waits for this stream.
        unsafe { empty(&mut staged.up, slot, target, plan.bytes, coder) }?;
        if self.trace.covers(state.round) {
            let mark = staged.up.mark()?;
            staged.rising.push_back(Copying { mark, of, round: state.round, slot });
        }
        Ok(())
    }

    /// Somebody wants what may not have come.
    pub(super) fn on_wanted(&mut self) {
        if let Some(staged) = &mut self.staged {
            staged.is_wanted = true;
        }
    }

    /// Enqueues the copies up of what is wanted and has not landed, each behind a wait for its
    /// result, and tells the callers.
    ///
    /// Not of a tensor's first round: only when that has come is it known that all ranks mean the
    /// same by its name, and a caller who is told too early would not hear of it.
    ///
    /// And not while a push waits for an earlier round of its tensor. So whatever is in the stream
    /// up before the result of a round was pushed before the next round of that tensor, on every
    /// rank, and ranks that push in one order never wait for each other: of all that is pushed and
    /// not copied down, take what was pushed first, on the rank where it is so. It waits for the
    /// framework's stream, and for the stream up as far as the last result of its tensor. Both wait
    /// for results only of what was pushed before it, which every rank has copied down.
    pub(super) fn enqueue_wanted(&mut self) -> Result<(), GpuError> {
        let is_wanted = self.staged.as_ref().is_some_and(|staged| staged.is_wanted);
        if !is_wanted || self.nic_ended.load(Ordering::Acquire) {
            return Ok(());
        }
        let is_in_the_way = |state: &DeviceTensor| match state.staging {
            Some(_) => !state.waiting.is_empty(),
            None => state.run.is_some(),
        };
        // What another thread has yet to copy down takes calls of CUDA, and other ranks may wait
        // for it before they push what is wanted.
        let is_bouncing = self.bouncing.load(Ordering::Acquire) > 0;
        if is_bouncing || self.tensors.iter().flatten().any(is_in_the_way) {
            return Ok(());
        }
        // What is to be waited for was copied down, and the NIC loop must have been told.
        self.mark_staged()?;
        if self.hand_over() {
            return Ok(());
        }
        // The driver has room for about a thousand waits in a stream, and the call that finds none
        // returns when some have ended: that is up to the NIC loop, which may be asleep.
        self.wake_nic();
        let Some(staged) = &mut self.staged else { unreachable!("somebody wants a result") };
        staged.is_wanted = false;
        let (mut tensors, mut parts) = (Vec::new(), Vec::new());
        for (tensor, state) in (0..).zip(&self.tensors) {
            let Some(DeviceTensor { run: Some(run), staging: Some(staging), .. }) = state else {
                continue;
            };
            let state = state.as_ref().expect("it was just seen");
            if !run.push.task.is_wanted() || run.is_told || !state.is_proved {
                continue;
            }
            tensors.push(tensor);
            let missing = (0..).zip(staging).filter(|(_, part)| !part.is_up);
            parts.extend(missing.map(|(index, part)| (part.landed, Of { tensor, index })));
        }
        // As they came in the last round, they come again, more or less.
        parts.sort_unstable();
        let (mut together, mut bytes) = (Vec::new(), 0);
        for (_, of) in parts {
            bytes += self.bytes_of(of);
            together.push(of);
            if together.len() >= COPIES_OF_MARK || bytes >= BYTES_OF_MARK {
                self.await_staged(&together)?;
                (bytes, together) = (0, Vec::new());
            }
        }
        self.await_staged(&together)?;
        self.tell_wanted(tensors)
    }

    fn bytes_of(&self, of: Of) -> usize {
        let Some(Some(state)) = self.tensors.get(of.tensor as usize) else {
            unreachable!("a staged tensor has a round")
        };
        state.plan.parts[of.index as usize].bytes
    }

    /// Lets the stream up wait for the results of these parts, and enqueues their copies behind
    /// that.
    fn await_staged(&mut self, together: &[Of]) -> Result<(), GpuError> {
        let gate = |of: &Of| {
            let Some(Some(DeviceTensor { staging: Some(parts), round, .. })) =
                self.tensors.get(of.tensor as usize)
            else {
                unreachable!("a staged tensor has a round")
            };
            parts[of.index as usize].staging.gate(*round)
        };
        let words: Vec<_> = together.iter().map(gate).collect();
        let Some(staged) = &mut self.staged else { unreachable!("somebody wants a result") };
        // SAFETY: words of pinned memory that the pipeline keeps until its streams are idle.
        unsafe { staged.up.wait_for_words(&words) }?;
        together.iter().try_for_each(|of| self.copy_up_staged(*of))
    }

    fn tell_wanted(&mut self, tensors: Vec<u32>) -> Result<(), GpuError> {
        let Some(staged) = &mut self.staged else { unreachable!("somebody wants a result") };
        if tensors.is_empty() {
            return Ok(());
        }
        let (mark, event) = staged.mark_results(&self.events)?;
        // A loop that ends after this finds all that it was told; one that has ended before may
        // not, and whoever waits for these is told why with the end of the pipeline.
        fence(Ordering::SeqCst);
        if self.nic_ended.load(Ordering::SeqCst) {
            return Ok(());
        }
        for tensor in tensors {
            let Some(Some(DeviceTensor { written, run: Some(run), .. })) =
                self.tensors.get_mut(tensor as usize)
            else {
                unreachable!("its round is open")
            };
            *written = Written::Behind(mark, Arc::clone(&event));
            run.is_told = true;
            staged.ahead += 1;
            self.inbox.begin_ahead();
            run.push.task.lacks_unknown();
            staged.tell(&run.push.task, &event);
        }
        Ok(())
    }

    /// The lanes are done with a round, whose copies are enqueued.
    pub(super) fn finish_staged(&mut self, tensor: u32) -> Result<(), GpuError> {
        let (Some(Some(state)), Some(staged)) =
            (self.tensors.get_mut(tensor as usize), &mut self.staged)
        else {
            unreachable!("a staged tensor has a round")
        };
        state.is_proved = true;
        let Some(run) = state.run.take() else { unreachable!("its last end was just closed") };
        let next = state.waiting.pop_front();
        if run.is_told {
            // In this order: who waits for the end of all that is ahead leaves then, and no push is
            // to be under way.
            self.inbox.push_over();
            drop(run.finished());
            self.one_less_ahead();
        } else {
            state.written = Written::Unmarked;
            staged.finished.push((tensor, run.finished()));
        }
        match next {
            Some(next) => self.begin(tensor, next),
            None => self.rescale(tensor),
        }
    }

    /// Whether a result is waited for in a stream: until it has come no round in slots begins.
    pub(super) fn is_ahead(&self) -> bool {
        self.staged.as_ref().is_some_and(|staged| staged.ahead > 0)
    }

    /// A result has come that was waited for in a stream, or never will.
    pub(super) fn one_less_ahead(&mut self) {
        let Some(staged) = &mut self.staged else { unreachable!("its caller was told") };
        staged.ahead = staged.ahead.checked_sub(1).expect("a round is over once");
        self.inbox.end_ahead();
    }

    /// Begins what was kept for the end of waits in streams; says whether there was something.
    pub(super) fn begin_kept(&mut self) -> Result<bool, GpuError> {
        let mut progress = false;
        while !self.is_ahead()
            && let Some((tensor, push)) = self.kept.pop_front()
        {
            progress = true;
            match self.tensor(tensor).and_then(|state| state.poisoned.clone()) {
                Some(error) => self.end_push(&push, error),
                None => self.push_now(tensor, push)?,
            }
        }
        Ok(progress)
    }

    /// Marks the results of which all is enqueued, and tells who waits for them.
    pub(super) fn mark_staged_results(&mut self) -> Result<(), GpuError> {
        let Some(staged) = self.staged.as_mut().filter(|staged| !staged.finished.is_empty()) else {
            return Ok(());
        };
        let (mark, event) = staged.mark_results(&self.events)?;
        let mut finished = std::mem::take(&mut staged.finished);
        for (tensor, task) in finished.drain(..) {
            if let Some(Some(state)) = self.tensors.get_mut(tensor as usize) {
                state.written = Written::Behind(mark, Arc::clone(&event));
            }
            self.inbox.push_over();
            staged.tell(&task, &event);
        }
        // Its memory serves the next turn.
        staged.finished = finished;
        Ok(())
    }

    /// Marks what has landed, if that is to be: at once if somebody wants it, or if nothing else is
    /// under way that it could be marked with.
    pub(super) fn mark_due_results(&mut self) -> Result<(), GpuError> {
        let Some(Staged { held: Some((since, bytes)), is_wanted, finished, .. }) = &self.staged
        else {
            // Those of parts without bytes.
            return self.mark_staged_results();
        };
        let is_wanted = *is_wanted || finished.iter().any(|(_, task)| task.is_wanted());
        let is_due = is_wanted
            || *bytes >= BYTES_HELD
            || self.now.saturating_sub(*since) >= HELD
            || self.inbox.under_way() == finished.len() + self.finished.len();
        if !is_due {
            return Ok(());
        }
        if finished.is_empty() {
            // Of tensors of which not all has landed.
            let Some(staged) = &mut self.staged else { unreachable!("it holds results") };
            staged.held = None;
            return staged.up.enqueue();
        }
        self.mark_staged_results()
    }

    /// Whether results are held that are to be marked soon.
    pub(super) fn holds_results(&self) -> bool {
        self.staged.as_ref().is_some_and(|staged| staged.held.is_some())
    }

    /// Whether a timeline waits for copies.
    pub(super) fn watches_staged(&self) -> bool {
        self.staged.as_ref().is_some_and(|staged| !staged.rising.is_empty())
    }

    /// Tells a timeline which copies are done.
    pub(super) fn trace_staged(&mut self) {
        let Some(staged) = &mut self.staged else { return };
        let passed = staged.up.passed();
        while let Some(&copy) = staged.rising.front()
            && passed.has(copy.mark)
        {
            staged.rising.pop_front();
            // It may have waited before it began, which nobody has seen.
            self.trace.copy(Seen::Rising, &copy, &self.tensors);
            self.trace.copy(Seen::Risen, &copy, &self.tensors);
        }
    }

    /// What is not finished, and never will be.
    pub(super) fn take_staged(&mut self) -> Vec<(u32, Arc<Task>)> {
        self.staged.as_mut().map(|staged| std::mem::take(&mut staged.finished)).unwrap_or_default()
    }
}
