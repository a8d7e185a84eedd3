//! The NIC loop, as the other threads reach it.

#![forbid(unsafe_code)]

use super::nic_loop::{self, Command};
use crate::base::error::{Closed, Error};
use crate::base::task::{Handle, Task};
use crate::rounds::Memory;
use bps_engine::optimize::Act;
use bps_engine::ring::Mpsc;
use bps_engine::transport::Waker;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Clones reach the same loop.
#[derive(Clone)]
pub(crate) struct NicSide {
    pub(crate) commands: Mpsc<Command>,
    pub(crate) waker: Waker,
    /// It takes no more commands: set before its last look at the queue.
    pub(crate) ended: Arc<AtomicBool>,
    /// Why the job is over, if it is.
    pub(crate) over: Arc<OnceLock<Error>>,
}

impl NicSide {
    /// Whether the loop has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Why nothing can be asked of it any more.
    pub(crate) fn why_ended(&self) -> Error {
        let closed = || Closed::Reused.into();
        self.over.get().cloned().unwrap_or_else(closed)
    }

    /// Hands it a command.
    ///
    /// # Errors
    /// The loop has ended, or hangs.
    pub(crate) fn command(&self, command: Command) -> Result<(), Error> {
        if !nic_loop::hand_over(&self.commands, &self.waker, &self.ended, command)? {
            return Err(self.why_ended());
        }
        // The loop may have ended between the look and the push: then nobody else empties the
        // queue.
        if self.ended.load(Ordering::SeqCst) {
            nic_loop::drain(&self.commands, &self.why_ended());
        }
        Ok(())
    }

    /// Hands it a push of a tensor of the host, whose end this task will tell. If the loop has
    /// ended, the handle says why.
    pub(crate) fn push(
        &self,
        tensor: u32,
        memory: Memory,
        priority: i64,
        act: Act,
        task: Arc<Task>,
    ) -> Handle {
        let told = Arc::clone(&task);
        match self.command(Command::Push { tensor, memory, priority, act, task: told }) {
            Ok(()) => Handle(task),
            Err(error) => Handle::finished(Err(error)),
        }
    }

    /// Commands are there, and the loop may be asleep.
    pub(crate) fn wake(&self) {
        self.waker.wake();
    }
}
