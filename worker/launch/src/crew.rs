//! What the supervisor asks of the processes of a job, wherever they run.

#![forbid(unsafe_code)]

use super::hosts::Host;
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

/// A place for a rank that starts while the job runs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Slot {
    /// Its machine; the launcher's own if nobody has named any.
    pub(super) host: Host,
    /// Its place among the ranks there, which have been given so many.
    pub(super) local_rank: u32,
    pub(super) count: u32,
    /// The number of the machine among those with ranks.
    pub(super) worker_id: u32,
    /// Whether it is none of the places that the job began with.
    pub(super) is_new: bool,
    /// What its lines begin with.
    pub(super) label: String,
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
    /// Starts a rank in a slot. Returns its place, which is behind all others; `None` while its
    /// machine is being reached, and then the caller asks again.
    fn enlist(&mut self, slot: &Slot) -> Result<Option<usize>, String>;
    /// No rank is to run on a machine any more.
    fn release(&mut self, host: &Host);
    /// Whether the reader of the launcher's own output has gone away.
    fn nobody_listens(&self) -> bool;
}
