//! How a pipeline ends: a tensor that is of no use any more, a GPU that can't go on, the end of the
//! job.

use super::{Pipeline, Tensor};
use crate::error::Error;
use crate::gpu::GpuError;
use crate::gpu::track::Track;
use crate::nic::Command;
use crate::nic::staged::Staged;
use bps_engine::base::Rank;
use bps_engine::trace::log;
use std::time::{Duration, Instant};

/// How long copies and collectives may take to end once the job is over.
const DRAIN: Duration = Duration::from_secs(5);
/// How long the job has to say who died, which it knows better, before NCCL's word is told: longer
/// than the control thread waits for the scheduler.
const VERDICT: Duration = Duration::from_secs(3);
/// How long it sleeps between two looks then.
const LOOK: Duration = Duration::from_millis(1);

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
            self.tell(Command::GpuFailed { message: error.to_string() });
        }
    }

    /// Ranks disagree about a tensor. What was ordered of it in the host is still done, as all of
    /// the host do it: so its end comes with the word of who gives the order.
    pub(super) fn on_poison(&mut self, tensor: u32, error: &Error) -> Result<(), GpuError> {
        let Some(state) = self.tensor(tensor) else { return Ok(()) };
        state.poisoned = Some(error.clone());
        let pushes: Vec<_> = state.waiting.drain(..).collect();
        for push in pushes {
            self.end_push(&push, error.clone());
        }
        if self.end_orders_of(tensor) { Ok(()) } else { self.end_poisoned(tensor) }
    }

    /// Ends what is under way of a tensor on which ranks disagree, and of which nothing more is
    /// ordered. Its memory is its caller's again only when the GPU is done with it.
    pub(super) fn end_poisoned(&mut self, tensor: u32) -> Result<(), GpuError> {
        let begun = Instant::now();
        while self.submitted.is_some() || !self.orders.is_empty() {
            self.carry_out()?;
            if begun.elapsed() > DRAIN {
                let what = "what was ordered of a tensor on which ranks disagree".into();
                return Err(GpuError::Timeout { what, after: DRAIN });
            }
            std::thread::yield_now();
        }
        self.to_copy.forget(tensor);
        self.incomplete.retain(|(_, one)| *one != tensor);
        let Some(state) = self.tensor(tensor) else { return Ok(()) };
        let (run, error) = (state.run.take(), state.poisoned.clone());
        if let (Some(run), Some(error)) = (run, error) {
            self.drain(self.host.as_ref().map(|host| &host.track));
            self.end_push(&run.push, error);
        }
        Ok(())
    }

    /// A rank of the host has left in good order. If it gave the order, it gives none any more.
    pub(super) fn on_gone(&mut self, rank: Rank) -> Result<(), GpuError> {
        self.gone.push(rank);
        // Whoever waits for this rank learns of it in this turn.
        self.next_tick = self.now;
        let all = 0..u32::try_from(self.tensors.len()).unwrap_or(u32::MAX);
        let is_poisoned = |tensor: &u32| {
            let state = self.tensors[*tensor as usize].as_ref();
            state.is_some_and(|state| state.poisoned.is_some() && state.run.is_some())
        };
        let ends: Vec<u32> =
            all.filter(|_| self.leader() == Some(rank)).filter(is_poisoned).collect();
        ends.into_iter().try_for_each(|tensor| self.end_poisoned(tensor))
    }

    /// Waits until all streams are idle, for [`DRAIN`] at most; says whether they are.
    fn drain(&self, host: Option<&Track>) -> bool {
        let begun = Instant::now();
        let tracks = [&self.ready, &self.down, &self.up];
        let mut idle = true;
        for stream in tracks.into_iter().chain(host).map(Track::stream) {
            while matches!(stream.is_idle(), Ok(false)) && begun.elapsed() < DRAIN {
                std::thread::sleep(LOOK);
            }
            // What the driver can't tell any more, it does not write any more.
            idle &= stream.is_idle().unwrap_or(true);
        }
        idle
    }

    /// The NIC loop has ended.
    pub(super) fn end(mut self) {
        let failed = self.failed.take().map(|failed| Error::Refused(failed.to_string()));
        let error = self.job_over.get().cloned().or(failed);
        let mut track = None;
        if let Some(host) = self.host.take() {
            track = Some(host.track);
            // Who waits on the GPU for a rank that is gone returns. In good order a rank that is
            // late need not keep this one: nothing is under way.
            let closed = match error {
                Some(_) => host.comm.abort(),
                None => host.comm.close(DRAIN),
            };
            if let Err(closing) = closed {
                log::info!("{closing}");
            }
        }
        let is_idle = self.drain(track.as_ref());
        // What the GPU did last is in the timeline too.
        while let Some(copy) = self.rising.pop_front().filter(|_| is_idle) {
            self.has_risen(&copy);
        }
        let host = track.as_ref().map(Track::passed);
        let [up, ready] = [&self.up, &self.ready].map(Track::passed);
        self.trace.look([Some(up), host, Some(ready)], &self.tensors, self.now);
        // To free memory of the GPU waits for all of its work, also for that of a framework which
        // waits for a rank that is gone.
        if error.is_some() || !is_idle {
            std::mem::forget(std::mem::take(&mut self.direct));
        }
        let error = error.unwrap_or_else(|| Error::Closed("this worker has shut down".into()));
        while let Some(message) = self.inbox.pop() {
            if let Staged::Push { push, .. } = message {
                self.end_push(&push, error.clone());
            }
        }
        for state in std::mem::take(&mut self.tensors).into_iter().flatten() {
            let Tensor { run, waiting, .. } = state;
            for push in run.map(|run| run.push).into_iter().chain(waiting) {
                self.end_push(&push, error.clone());
            }
        }
        if !is_idle {
            // Something on the GPU may write here yet.
            std::mem::forget(self.memory);
        }
    }
}
