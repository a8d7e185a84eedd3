//! How a communicator ends: NCCL's calls for that wait for the GPU and for other ranks, and who
//! owns one does not. It looks now and then how far they are.

use super::{Comm, IN_PROGRESS, LOOK, SUCCESS};
use crate::cuda::{Awaited, GpuError};
use cudarc::nccl::sys::ncclComm_t;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

/// The calls that end a communicator.
pub(crate) const FINALIZE: &str = "ncclCommFinalize";
pub(crate) const ABORT: &str = "ncclCommAbort";
const DESTROY: &str = "ncclCommDestroy";
/// How long NCCL may take to free a communicator before it is left to itself.
const END_LIMIT: Duration = Duration::from_secs(10);

/// A communicator that is being freed: one of two calls does that, on a thread of its own, because
/// they wait for the GPU.
#[must_use = "it is stepped until it is over"]
pub(crate) struct Closing(Phase);

enum Phase {
    /// NCCL says goodbye to the other ranks.
    Finalizing {
        comm: Comm,
        until: Duration,
        limit: Duration,
    },
    Freeing {
        result: Receiver<Result<(), GpuError>>,
        awaited: Awaited,
        /// What was wrong before, which counts more than what is now.
        failed: Option<GpuError>,
        until: Duration,
    },
    Over,
}

impl Closing {
    /// NCCL was told to say goodbye to the other ranks, for which it has so long.
    pub(crate) fn finalizing(comm: Comm, limit: Duration, now: Duration) -> Closing {
        Closing(Phase::Finalizing { comm, until: now + limit, limit })
    }

    /// Frees it by this call, after what has failed already if anything.
    pub(crate) fn free(
        mut comm: Comm,
        call: &'static str,
        now: Duration,
        failed: Option<GpuError>,
    ) -> Self {
        Closing::take(&mut comm, call, now, failed)
    }

    /// Calls what frees it. The communicator has no handle from then on.
    pub(crate) fn take(
        comm: &mut Comm,
        call: &'static str,
        now: Duration,
        failed: Option<GpuError>,
    ) -> Closing {
        let handle = std::mem::replace(&mut comm.handle, std::ptr::null_mut()).expose_provenance();
        if handle == 0 {
            return Closing(Phase::Over);
        }
        let (nccl, device) = (comm.nccl.clone(), comm.device.clone());
        let (done, result) = channel();
        let frees_at_once = nccl.0.frees_at_once;
        let free = move || {
            let handle: ncclComm_t = std::ptr::with_exposed_provenance_mut(handle);
            let functions = &nccl.0.call;
            let freed = device.make_current().and_then(|()| {
                // SAFETY: the handle was taken from its owner, so nobody else uses it.
                let code = unsafe {
                    match call {
                        DESTROY => (functions.ncclCommDestroy)(handle),
                        _ => (functions.ncclCommAbort)(handle),
                    }
                };
                // The communicator is gone: nothing may be asked of it.
                nccl.check(call, if code == IN_PROGRESS { 0 } else { code }, std::ptr::null_mut())
            });
            let _ = done.send(freed);
        };
        // Where there is no thread, `done` is dropped, which is an answer too.
        if frees_at_once {
            free();
        } else {
            drop(std::thread::Builder::new().name("bps-nccl-end".into()).spawn(free));
        }
        let awaited = Awaited::Freeing { call, rank: comm.rank, ranks: comm.ranks };
        Closing(Phase::Freeing { result, awaited, failed, until: now + END_LIMIT })
    }

    /// Looks how far it is: what became of it, once it is over.
    pub(crate) fn step(&mut self, now: Duration) -> Option<Result<(), GpuError>> {
        match std::mem::replace(&mut self.0, Phase::Over) {
            Phase::Finalizing { comm, until, limit } => {
                let state = comm.state();
                *self = match state {
                    Ok(SUCCESS) => Closing::free(comm, DESTROY, now, None),
                    Ok(IN_PROGRESS) if now < until => {
                        self.0 = Phase::Finalizing { comm, until, limit };
                        return None;
                    }
                    Ok(IN_PROGRESS) => {
                        let awaited = comm.waits_for_others(FINALIZE);
                        let error = GpuError::Timeout { awaited, after: limit };
                        Closing::free(comm, ABORT, now, Some(error))
                    }
                    Ok(code) => {
                        let error = comm.nccl.error(FINALIZE, code, comm.handle);
                        Closing::free(comm, ABORT, now, Some(error))
                    }
                    Err(error) => Closing::free(comm, ABORT, now, Some(error)),
                };
                self.step(now)
            }
            Phase::Freeing { result, awaited, failed, until } => match result.try_recv() {
                Ok(freed) => Some(failed.map_or(freed, Err)),
                Err(TryRecvError::Empty) if now < until => {
                    self.0 = Phase::Freeing { result, awaited, failed, until };
                    None
                }
                Err(_) => {
                    let late = GpuError::Timeout { awaited, after: END_LIMIT };
                    Some(Err(failed.unwrap_or(late)))
                }
            },
            Phase::Over => Some(Ok(())),
        }
    }

    /// Steps it until it is over, which it is in time.
    pub(crate) fn wait(mut self) -> Result<(), GpuError> {
        let begun = Instant::now();
        loop {
            if let Some(result) = self.step(begun.elapsed()) {
                return result;
            }
            std::thread::sleep(LOOK);
        }
    }
}
