//! How a pipeline ends: a tensor that is of no use any more, a GPU that can't go on, the end of the
//! job.

use super::{Pipeline, Tensor};
use crate::error::Error;
use crate::gpu::GpuError;
use crate::nic::Command;
use crate::nic::staged::Staged;
use std::time::{Duration, Instant};

/// How long copies and collectives may take to end once the job is over.
const DRAIN: Duration = Duration::from_secs(5);
/// How long it sleeps between two looks then.
const LOOK: Duration = Duration::from_millis(1);

impl Pipeline {
    /// The first error ends the job: nothing more is enqueued, and the rest comes from above.
    pub(super) fn check(&mut self, result: Result<(), GpuError>) {
        let Err(error) = result else { return };
        if self.failed.is_none() {
            self.tell(Command::GpuFailed { message: error.to_string() });
            self.failed = Some(error);
        }
    }

    /// Ranks disagree about a tensor. What the GPU still does with it harms nobody: its memory is
    /// its caller's again only when that is done.
    pub(super) fn on_poison(&mut self, tensor: u32, error: &Error) {
        self.to_copy.forget(tensor);
        self.to_reduce.forget(tensor);
        self.to_gather.forget(tensor);
        self.incomplete.retain(|(_, one)| *one != tensor);
        let Some(state) = self.tensor(tensor) else { return };
        state.poisoned = Some(error.clone());
        let pushes: Vec<_> = state.waiting.drain(..).collect();
        let run = state.run.take();
        if run.is_some() {
            self.open -= 1;
            self.drain();
        }
        for push in run.map(|run| run.push).into_iter().chain(pushes) {
            push.task.finish_now(Err(error.clone()));
        }
    }

    /// Waits until the streams are idle, for [`DRAIN`] at most.
    fn drain(&self) {
        let begun = Instant::now();
        let streams = [self.down.stream(), self.up.stream()];
        let streams = streams.into_iter().chain(self.host.as_ref().map(|host| &host.stream));
        for stream in streams {
            while matches!(stream.is_idle(), Ok(false)) && begun.elapsed() < DRAIN {
                std::thread::sleep(LOOK);
            }
        }
    }

    /// The NIC loop has ended.
    pub(super) fn end(mut self) {
        let error = self.over.take().flatten();
        if let Some(host) = self.host.take() {
            // Who waits on the GPU for a rank that is gone returns.
            let closed = if error.is_some() { host.comm.abort() } else { host.comm.close() };
            if let (Err(closing), None) = (closed, &error) {
                bps_engine::trace::log::warning!("{closing}");
            }
        }
        self.drain();
        let closed = || Error::Closed("this worker has shut down".into());
        let failed = self.failed.take().map(|failed| Error::Refused(failed.to_string()));
        let error = error.or(failed).unwrap_or_else(closed);
        while let Some(message) = self.inbox.pop() {
            if let Staged::Push { push, .. } = message {
                push.task.finish_now(Err(error.clone()));
            }
        }
        for Tensor { run, waiting, .. } in self.tensors.iter_mut().flatten() {
            for push in run.take().map(|run| run.push).into_iter().chain(waiting.drain(..)) {
                push.task.finish_now(Err(error.clone()));
            }
        }
    }
}
