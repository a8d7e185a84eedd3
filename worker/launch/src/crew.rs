//! What the supervisor asks of the processes of a job, wherever they run.

#![forbid(unsafe_code)]

use super::signals::Signals;
use rustix::process::Signal;
use std::time::Duration;

/// A process that has ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Ended {
    /// Its place in the plan.
    pub(super) process: usize,
    /// 0 if it ended well; 128 and the signal's number if a signal ended it.
    pub(super) code: i32,
    /// Completes "rank 1 …".
    pub(super) how: String,
}

/// The processes of a job, by their places in the plan.
pub(super) trait Crew {
    /// Sleeps until there may be a signal, output or an end, at most so long.
    fn sleep(&mut self, signals: &Signals, timeout: Duration);
    /// Passes on the output that there is; returns those that have ended since the last call.
    fn attend(&mut self) -> Vec<Ended>;
    /// Signals the whole group of a process, so that what it has started ends with it.
    fn signal(&mut self, process: usize, signal: Signal);
    /// Tells a process that stays that all ranks have ended.
    fn tell_the_end(&mut self, process: usize);
    /// Whether the reader of the launcher's own output has gone away.
    fn nobody_listens(&self) -> bool;
}
