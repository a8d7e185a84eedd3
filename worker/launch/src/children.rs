//! The processes that this one has started: their ends, their output, and signals for them.
//!
//! None is reaped before all have ended, so that no group can belong to anybody else.

#![forbid(unsafe_code)]

use super::child::{GROUPS_MAX, Guardian, Output, reap, spawn};
use super::crew::{Crew, Ended, Slot};
use super::error::LaunchError;
use super::hosts::Host;
use super::output::say;
use super::plan::{Kind, LaunchPlan, Process};
use super::screen::Screen;
use super::signals::{self, Signals};
use super::streams::{Source, Streams};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, waitid,
};
use std::os::fd::BorrowedFd;
use std::process::Child;
use std::time::{Duration, Instant};

/// How often a process is started again.
const REVIVALS_MAX: u32 = 16;
/// For output that is still on its way when all processes have ended.
const LAST_OUTPUT: Duration = Duration::from_secs(1);

/// Codes above this are those of processes that a signal has ended.
const SIGNALLED: i32 = 128;

/// What takes the output: the place of the process, which stream, and the bytes; none when the
/// stream has ended.
pub(super) type Sink<'a> = dyn FnMut(Source, Option<&[u8]>) + 'a;

struct Running {
    child: Child,
    /// The group that it leads. The number stays taken because nothing is reaped before the end.
    group: Pid,
    ended: bool,
    /// What to start again when a signal of somebody else ends it, and how often.
    again: Option<(Process, u32)>,
}

/// The children of this process, and the guardian that ends them if this process cannot.
pub(super) struct Children {
    running: Vec<Running>,
    /// Those that others have taken the place of.
    replaced: Vec<Child>,
    output: Output,
    guardian: Guardian,
    streams: Streams,
}

impl Children {
    /// None yet.
    pub(super) fn new() -> Result<Children, LaunchError> {
        let failed = |source| LaunchError::System { what: "cannot start the guardian", source };
        let guardian = Guardian::start().map_err(failed)?;
        let (running, replaced, output) = (Vec::new(), Vec::new(), Output::Inherited);
        Ok(Children { running, replaced, output, guardian, streams: Streams::new() })
    }

    /// Starts them all. Those that have started when one cannot be are still here.
    pub(super) fn start(
        &mut self,
        processes: &[Process],
        output: Output,
    ) -> Result<(), LaunchError> {
        self.output = output;
        for process in processes {
            if self.running.len() >= GROUPS_MAX {
                return Err(LaunchError::Conflict {
                    problem: format!("{GROUPS_MAX} processes have been started here already"),
                    remedy: "start the job again".to_owned(),
                });
            }
            let failed = |source| LaunchError::Start {
                label: process.label.clone(),
                program: process.command[0].clone(),
                source,
            };
            let mut child = spawn(process, output, &self.guardian).map_err(failed)?;
            let group = Pid::from_child(&child);
            self.streams.add(self.running.len(), &mut child).map_err(failed)?;
            let again = process.is_revived.then(|| (process.clone(), REVIVALS_MAX));
            self.running.push(Running { child, group, ended: false, again });
        }
        Ok(())
    }

    /// How many have been started.
    pub(super) fn count(&self) -> usize {
        self.running.len()
    }

    /// What to poll for readiness to read.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.streams.descriptors()
    }

    /// Hands on the output that there is.
    pub(super) fn pass_on(&mut self, sink: &mut Sink<'_>) {
        self.streams.pass_on(sink);
    }

    /// Those that have ended since the last call; none is reaped.
    pub(super) fn ends(&mut self) -> Vec<Ended> {
        let mut ends = Vec::new();
        for index in 0..self.running.len() {
            let process = &mut self.running[index];
            if process.ended {
                continue;
            }
            let Some((code, how)) = how_ended(process.group) else { continue };
            // What ends by itself has decided so.
            if code <= SIGNALLED || !self.revive(index, &how) {
                self.running[index].ended = true;
                ends.push(Ended { process: index, code, how });
            }
        }
        ends
    }

    /// Starts a process again, if it is one for which that is done. Says whether it runs.
    fn revive(&mut self, index: usize, how: &str) -> bool {
        let Some((process, left)) = self.running[index].again.take().filter(|(_, left)| *left > 0)
        else {
            return false;
        };
        say(&format!("{} {how}; starting it again", process.label));
        let started = spawn(&process, self.output, &self.guardian).and_then(|mut child| {
            self.streams.add(index, &mut child)?;
            Ok(child)
        });
        let child = match started {
            Ok(child) => child,
            Err(error) => {
                say(&format!("{} can't be started again: {error}", process.label));
                return false;
            }
        };
        let group = Pid::from_child(&child);
        let again = Some((process, left - 1));
        let new = Running { child, group, ended: false, again };
        self.replaced.push(std::mem::replace(&mut self.running[index], new).child);
        true
    }

    /// Whether none of them runs.
    pub(super) fn have_ended(&self) -> bool {
        self.running.iter().all(|process| process.ended)
    }

    /// Signals the group of a process.
    pub(super) fn signal(&mut self, process: usize, signal: Signal) {
        if let Some(process) = self.running.get_mut(process) {
            // It is meant to end.
            process.again = None;
            // A group without members has ended, which is what we want.
            let _ = kill_process_group(process.group, signal);
        }
    }

    /// Tells a process, and not its children, that all ranks have ended.
    pub(super) fn tell_the_end(&mut self, process: usize) {
        if let Some(process) = self.running.get_mut(process).filter(|process| !process.ended) {
            process.again = None;
            let _ = kill_process(process.group, Signal::USR1);
        }
    }

    /// Kills every group.
    pub(super) fn kill_all(&mut self) {
        for process in 0..self.running.len() {
            self.signal(process, Signal::KILL);
        }
    }

    /// Passes on the last output, ends what the processes have left behind, and reaps them all.
    pub(super) fn finish(mut self, sink: &mut Sink<'_>) {
        let deadline = Instant::now() + LAST_OUTPUT;
        while self.streams.are_open() && Instant::now() < deadline {
            let left = deadline.saturating_duration_since(Instant::now());
            wait(self.streams.descriptors(), left);
            self.pass_on(sink);
        }
        // The guardian would do, but somebody may have killed it.
        self.kill_all();
        self.guardian.finish();
        let running = self.running.iter_mut().map(|process| &mut process.child);
        if let Some(held) = reap(running.chain(&mut self.replaced)) {
            say(&held);
        }
        self.streams.pass_on(sink);
        self.streams.finish(sink);
    }
}

/// The code and manner of a process's end, once it has ended.
fn how_ended(process: Pid) -> Option<(i32, String)> {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    match waitid(WaitId::Pid(process), options) {
        Ok(None) | Err(Errno::INTR) => None,
        Ok(Some(status)) => match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => Some((code, format!("exited with code {code}"))),
            (None, Some(signal)) => {
                let name = signals::name(signal);
                Some((128 + signal, format!("was killed by {name} ({signal})")))
            }
            (None, None) => None,
        },
        // Somebody else in this process has reaped it, so how it ended is not known.
        Err(_) => Some((1, "ended in an unknown way".to_owned())),
    }
}

/// The children of the launcher itself: their output goes to its own.
pub(super) struct LocalCrew<'a> {
    plan: &'a LaunchPlan,
    children: Children,
    screen: Screen,
}

impl LocalCrew<'_> {
    /// None has started yet.
    pub(super) fn new(plan: &LaunchPlan) -> Result<LocalCrew<'_>, LaunchError> {
        let labels = plan.processes.iter().map(|process| process.label.as_str());
        let screen = Screen::new(labels, plan.prefix);
        Ok(LocalCrew { plan, children: Children::new()?, screen })
    }

    /// As [`Children::start`].
    pub(super) fn start(&mut self) -> Result<(), LaunchError> {
        self.children.start(&self.plan.processes, self.output())
    }

    fn output(&self) -> Output {
        if self.plan.prefix { Output::Piped } else { Output::Inherited }
    }

    /// Kills what runs, where not all could be started.
    pub(super) fn kill_all(&mut self) {
        self.children.kill_all();
    }

    /// As [`Children::finish`].
    pub(super) fn finish(mut self) {
        self.children.finish(&mut |source, bytes| self.screen.show(source, bytes));
    }
}

impl Crew for LocalCrew<'_> {
    fn sleep(&mut self, signals: &Signals, timeout: Duration) {
        wait(signals.descriptors().chain(self.children.descriptors()), timeout);
    }

    fn attend(&mut self) -> Vec<Ended> {
        self.children.pass_on(&mut |source, bytes| self.screen.show(source, bytes));
        self.children.ends()
    }

    fn signal(&mut self, process: usize, signal: Signal) {
        self.children.signal(process, signal);
    }

    fn tell_the_end(&mut self, process: usize) {
        self.children.tell_the_end(process);
    }

    fn enlist(&mut self, slot: &Slot) -> Result<Option<usize>, String> {
        let mut ranks = self.plan.processes.iter().filter(|it| it.kind == Kind::Worker);
        let Some(process) = ranks.nth(slot.local_rank as usize) else {
            return Err(format!("the job has no rank {}", slot.local_rank));
        };
        let (place, output) = (self.children.count(), self.output());
        let started = self.children.start(std::slice::from_ref(process), output);
        started.map_err(|error| error.to_string())?;
        self.screen.add(&slot.label);
        Ok(Some(place))
    }

    fn release(&mut self, _: &Host) {}

    fn nobody_listens(&self) -> bool {
        self.screen.nobody_listens()
    }
}

/// Sleeps until one of the descriptors can be read, or `timeout` has passed.
pub(super) fn wait<'a>(descriptors: impl Iterator<Item = BorrowedFd<'a>>, timeout: Duration) {
    let mut polled: Vec<PollFd<'_>> =
        descriptors.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
    let timeout = Timespec::try_from(timeout).ok();
    // Interrupted or not: the caller looks at everything again.
    let _ = poll(&mut polled, timeout.as_ref());
}
