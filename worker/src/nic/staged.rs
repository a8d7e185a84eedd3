//! Parts of tensors on the GPU that have memory of their own in the host ([`Staging`]): the GPU
//! copies them there, they are sent from there, and their results land in the same place, or beside
//! it in jobs that keep both for another server. Then a word is written that the GPU may be waiting
//! for.
//!
//! The GPU waits for that word in a stream, in front of the copy of a result that has not come. So
//! nothing that leads to it may need CUDA: a call of the framework's that waits for its stream, as
//! `cudaFree` does, holds locks of the driver that the pipeline's thread needs. This loop sees by
//! itself, in memory, which parts the GPU has copied, and it calls no CUDA.
//!
//! Invariant: every round that was begun opens the part's gate, by its result or, where none will
//! come, with bytes that nobody takes for one. Bytes are spoilt only once no transport has them
//! and the GPU is done with its copy, since either would put back what looks like a gradient.

use super::{Nic, Part, PartId, Phase, Stage};
use crate::rounds::Staging;
use crate::rounds::handover::{From, FromGpu, Progress};
use bps_engine::trace::timeline::Mark;
use std::collections::VecDeque;
use std::time::Duration;

/// How often it looks how far the GPU is, when nothing else keeps it awake.
const NAP: Duration = Duration::from_micros(30);
/// How long the GPU may take to complete gradients that were pushed before the job was over.
const LAST: Duration = Duration::from_secs(2);

/// A part that the GPU copies, or will.
struct Falling {
    /// It is done once the track has passed this.
    mark: u32,
    staging: Staging,
    round: u64,
    priority: i64,
    /// None where ranks disagree about the tensor.
    part: Option<PartId>,
    /// Its bytes, if the GPU encodes it.
    encoded: Option<usize>,
}

/// See the [module](self).
#[derive(Default)]
pub(super) struct Staged {
    progress: Option<Progress>,
    /// In the order of their marks.
    falling: VecDeque<Falling>,
    /// When all lanes were closed.
    over_since: Option<Duration>,
}

impl Staged {
    /// By which it is seen what the GPU has copied.
    pub(super) fn watch(&mut self, progress: Option<Progress>) {
        assert!(self.progress.is_none() && self.falling.is_empty(), "a process has one GPU");
        self.progress = progress;
    }

    /// How long the loop may sleep, of this time.
    pub(super) fn nap(&self, timeout: Duration) -> Duration {
        if self.falling.is_empty() { timeout } else { timeout.min(NAP) }
    }

    /// The next part that the GPU has copied; or that it may have, if nobody waits any longer.
    fn next(&mut self, is_late: bool) -> Option<Falling> {
        let mark = self.falling.front()?.mark;
        let has_fallen = |progress: Progress| progress.passed().has(mark);
        let is_due = is_late || self.progress.is_some_and(has_fallen);
        if is_due { self.falling.pop_front() } else { None }
    }
}

impl Nic {
    /// The next round of a part of a tensor on the GPU begins, with its bytes there, so many if the
    /// GPU has encoded them; the part has no number where ranks disagree about the tensor.
    pub(crate) fn push_from(
        &mut self,
        part: Option<PartId>,
        round: u64,
        priority: i64,
        (from, encoded): (From, Option<usize>),
    ) {
        match (from, part) {
            (From::Nowhere, Some(part)) => self.push_slot(part, round, priority, None),
            (From::Slot(slot), Some(part)) => {
                self.encoded_by_gpu(part, encoded);
                self.push_slot(part, round, priority, Some(slot));
            }
            (From::Nowhere, None) => {}
            (From::Slot(slot), None) => self.release(slot),
            (From::Staging(staging, mark), part) => {
                assert!(self.staged.progress.is_some(), "who stages says how far it is");
                let room = staging.slot().whole().len();
                let fits = part.is_none_or(|part| self.part(part).plan.bytes <= room);
                assert!(fits && encoded.is_none_or(|bytes| bytes <= room), "a part has its memory");
                let last = self.staged.falling.back().map(|last| mark.wrapping_sub(last.mark));
                debug_assert!(last.is_none_or(|ahead| ahead < u32::MAX / 2), "marks rise");
                let falling = Falling { mark, staging, round, priority, part, encoded };
                self.staged.falling.push_back(falling);
            }
        }
    }

    /// Begins the rounds of parts that the GPU has copied; says whether there were some.
    pub(crate) fn take_fallen(&mut self) -> bool {
        if self.phase == Phase::Over {
            return self.spoil_fallen();
        }
        let mut progress = false;
        while let Some(fallen) = self.staged.next(false) {
            let Falling { staging, round, priority, part, encoded, .. } = fallen;
            progress = true;
            match part.filter(|part| !self.part(*part).abandoned) {
                Some(part) => {
                    let (key, bytes) = (self.part(part).plan.key, self.part(part).plan.bytes);
                    // When the gradient was complete and its copy began, nobody has seen.
                    for mark in [Mark::Ready, Mark::Falling, Mark::Fallen] {
                        self.trace.record(mark, key, round, self.config.rank, bytes);
                    }
                    self.encoded_by_gpu(part, encoded);
                    self.stage(part, staging);
                    self.push_slot(part, round, priority, Some(staging.slot()));
                }
                // SAFETY: it was not given to a transport, and the GPU has copied it.
                None => unsafe { staging.spoil(round) },
            }
        }
        progress
    }

    /// The job is over: nothing that falls is sent. Once the lanes are closed nothing lands.
    fn spoil_fallen(&mut self) -> bool {
        if !self.is_closed() {
            return false;
        }
        let now = self.now;
        let since = *self.staged.over_since.get_or_insert(now);
        // First what has fallen: the GPU may wait for it before it comes to the rest.
        self.spoil_open();
        let is_late = now.saturating_sub(since) > LAST;
        let mut progress = false;
        while let Some(Falling { staging, round, .. }) = self.staged.next(is_late) {
            progress = true;
            // SAFETY: it was not given to a transport, and the GPU has copied it. Of one that is
            // late the GPU may still copy over this: then it is about to fail, or hangs.
            unsafe { staging.spoil(round) };
        }
        progress
    }

    /// No result comes any more of rounds that are open.
    fn spoil_open(&mut self) {
        assert!(self.is_closed(), "a transport may land what would be spoilt, or send it");
        let is_due = |part: &&mut Part| part.stage != Stage::Idle && !part.abandoned;
        for part in self.parts.iter_mut().filter(is_due) {
            if let Some(staging) = part.staging {
                part.stage = Stage::Idle;
                assert!(!staging.is_open(part.round), "the GPU may have this result");
                // SAFETY: all lanes are closed, and its round began when it had fallen.
                unsafe { staging.spoil(part.round) };
            }
        }
    }

    /// Whether a part falls.
    pub(crate) fn is_falling(&self) -> bool {
        !self.staged.falling.is_empty()
    }

    /// The result of a part is there: the GPU need not wait for it.
    pub(super) fn open_gate(&self, part: PartId) {
        let state = self.part(part);
        if let Some(staging) = state.staging.filter(|_| !state.abandoned) {
            assert!(state.stage == Stage::Idle, "its result has landed");
            staging.open(state.round);
        }
    }

    /// The round of a part is over that nobody wants.
    pub(super) fn spoil_abandoned(&self, part: PartId) {
        let state = self.part(part);
        let is_over = state.abandoned && state.open == 0 && !self.gives_back(part);
        let is_due = |staging: &Staging| is_over && !staging.is_open(state.round);
        if let Some(staging) = state.staging.filter(is_due) {
            assert!(state.posted == 0 && state.stage == Stage::Idle, "no transport has it");
            // SAFETY: no frame with it is posted and none lands there, so no transport has it; it
            // had fallen when the round began.
            unsafe { staging.spoil(state.round) };
        }
    }

    /// The loop has ended, and the pipeline can see that: nothing falls after what it has said
    /// before, and nothing waits for results.
    pub(super) fn open_all_gates(&mut self) {
        self.spoil_open();
        while let Some(message) = self.hear_gpu() {
            if let FromGpu::Part { round, from: From::Staging(staging, _), .. } = message {
                // SAFETY: all lanes are closed. The GPU may copy over it: this was begun in the
                // last moment, and whoever asked for it is told by its next call.
                unsafe { staging.spoil(round) };
            }
        }
        for part in &self.parts {
            if let Some(staging) = part.staging {
                staging.open_for_good(part.round);
            }
        }
    }
}
