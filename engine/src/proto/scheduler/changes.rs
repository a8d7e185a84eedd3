//! Changes of who takes part in an elastic job, for those who watch it: who was lost or came, why,
//! and for how long the job waited. A new scheduler knows those since it has begun.

use super::{Duration, Epoch, Output, Scheduler};
use std::collections::VecDeque;

/// Of these, as many are kept: a page of metrics must not grow with the life of a job.
const KEPT_MAX: usize = 8;
/// Characters of a line that are kept: parts of it come from other nodes.
const LINE_CHARS_MAX: usize = 240;

/// A change of who takes part.
#[derive(Clone, PartialEq, Debug)]
pub struct Change {
    /// From 1.
    pub number: u64,
    /// When, since the scheduler started.
    pub at: Duration,
    /// Of the epoch that went on, or began.
    pub epoch: Epoch,
    /// For how long there was no membership, or parts were without a server.
    pub waited: Duration,
    /// Who was lost or came, and why: what every node is told.
    pub line: String,
}

/// The last of them, and what all together have cost.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Changes {
    /// The oldest first.
    pub last: VecDeque<Change>,
    /// For how long the job has waited in all.
    pub waited: Duration,
    /// How many there were.
    pub count: u64,
}

impl Changes {
    fn add(&mut self, at: Duration, epoch: Epoch, line: &str, waited: Duration) {
        self.count += 1;
        if self.last.len() == KEPT_MAX {
            self.last.pop_front();
        }
        let line = line.chars().take(LINE_CHARS_MAX).collect();
        let change = Change { number: self.count, at, epoch, waited: Duration::ZERO, line };
        self.last.push_back(change);
        self.wait(self.count, waited);
    }

    /// It turns out that the job has waited so long for a change.
    fn wait(&mut self, number: u64, waited: Duration) {
        self.waited += waited;
        if let Some(change) = self.last.iter_mut().find(|change| change.number == number) {
            change.waited += waited;
        }
    }
}

impl Scheduler {
    /// Who takes part has changed, as this line says, which is logged. Returns the number of the
    /// change.
    pub(super) fn changed(&mut self, line: &str, waited: Duration) -> u64 {
        self.put(Output::Log(line.to_owned()));
        let (at, epoch) = (self.clock, self.epoch);
        self.history.changes.add(at, epoch, line, waited);
        self.history.changes.count
    }

    /// The job has waited so long for a change that was told before.
    pub(super) fn waited_for(&mut self, number: u64, waited: Duration) {
        self.history.changes.wait(number, waited);
    }
}
