//! Runs a plan to its end: starts the processes, passes their output on, and ends them together.
//!
//! Stages follow one another and never go back, each but the first has a deadline, and what has not
//! ended at the last one is killed: the launcher always ends.

#![forbid(unsafe_code)]

use super::child::{Guardian, Output, spawn};
use super::error::LaunchError;
use super::output::say;
use super::plan::{Kind, Plan};
use super::signals::{self, Signals};
use super::streams::Streams;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, waitid,
};
use std::process::Child;
use std::time::{Duration, Instant};

/// Longest sleep: a notice that was lost is made up for after this.
const SLEEP_MAX: Duration = Duration::from_millis(500);
/// How long ends are collected after a first failure, to tell its cause from what follows from it.
const SETTLE_MAX: Duration = Duration::from_secs(1);
/// How many times longer than a request to end an interrupted rank may take: it may write a
/// checkpoint, and the user can interrupt again.
const INTERRUPTED_GRACES: u32 = 12;
/// The code of a Python program that an exception ends, and of a server whose job failed: most
/// often because of another process.
const FOLLOWS: i32 = 1;
/// For output that is still on its way when all processes have ended.
const LAST_OUTPUT: Duration = Duration::from_secs(1);

/// Where the job is on its way to its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// All is well.
    Running,
    /// Something failed, and what else ends may tell why.
    Settling(Instant),
    /// A server or the scheduler failed: the workers notice by themselves and say so.
    Reporting(Instant),
    /// The workers were asked to end.
    EndingWorkers(Instant),
    /// All workers have ended well, and the others end by themselves.
    Lingering(Instant),
    /// The others were asked to end.
    EndingHelpers(Instant),
    /// Nothing runs any more.
    Done,
}

struct Running {
    kind: Kind,
    label: String,
    child: Child,
    /// The group that it leads. The number stays taken because nothing is reaped before the end.
    group: Pid,
    /// See [`Process::stays`](super::plan::Process::stays).
    stays: bool,
    /// See [`Process::is_spared`](super::plan::Process::is_spared).
    is_spared: bool,
    ended: bool,
}

/// A process that ended badly.
struct Failure {
    kind: Kind,
    label: String,
    code: i32,
    /// Completes "rank 1 …".
    how: String,
}

struct Supervisor {
    running: Vec<Running>,
    /// While the cause of the end is looked for, in the order in which they were noticed.
    failures: Vec<Failure>,
    stage: Stage,
    grace: Duration,
    /// Fewest workers with which the job goes on without others.
    workers_min: usize,
    /// What the launcher will return, set once.
    code: Option<i32>,
    asked: bool,
}

/// Starts everything and returns the code to leave with: of the first process that failed, or 128
/// and the number of the signal that ended it or the launcher.
pub(super) fn run(plan: Plan) -> Result<i32, LaunchError> {
    let system = |what| move |source| LaunchError::System { what, source };
    let guardian = Guardian::start().map_err(system("cannot start the guardian"))?;
    let mut signals = Signals::catch().map_err(system("cannot catch signals"))?;
    for note in &plan.notes {
        say(note);
    }
    let mut streams = Streams::new();
    let mut supervisor = Supervisor {
        running: Vec::with_capacity(plan.processes.len()),
        failures: Vec::new(),
        stage: Stage::Running,
        grace: plan.grace,
        workers_min: plan.workers_min,
        code: None,
        asked: false,
    };
    let started = supervisor.start(&plan, &guardian, &mut streams);
    if started.is_ok() {
        supervisor.watch(&mut signals, &mut streams);
    } else {
        supervisor.kill_all();
    }
    supervisor.finish(guardian, &mut streams);
    started.map(|()| supervisor.code.unwrap_or(0))
}

impl Supervisor {
    fn start(
        &mut self,
        plan: &Plan,
        guardian: &Guardian,
        streams: &mut Streams,
    ) -> Result<(), LaunchError> {
        let output = if plan.prefix { Output::Piped } else { Output::Inherited };
        for process in &plan.processes {
            let failed = |source| LaunchError::Start {
                label: process.label.clone(),
                program: process.command[0].clone(),
                source,
            };
            let mut child = spawn(process, output, guardian).map_err(failed)?;
            let group = Pid::from_child(&child);
            streams.add(&process.label, &mut child).map_err(failed)?;
            let (kind, label, stays) = (process.kind, process.label.clone(), process.stays);
            let (is_spared, ended) = (process.is_spared, false);
            self.running.push(Running { kind, label, child, group, stays, is_spared, ended });
        }
        Ok(())
    }

    /// The loop: sleep until something happens, then notice it, then decide.
    fn watch(&mut self, signals: &mut Signals, streams: &mut Streams) {
        while self.stage != Stage::Done {
            self.sleep(signals, streams);
            streams.pass_on();
            for signal in signals.take() {
                self.on_signal(signal);
            }
            if streams.nobody_listens() {
                self.on_signal(signal_hook::consts::SIGPIPE);
            }
            self.notice_ends();
            self.decide(Instant::now());
        }
    }

    fn sleep(&self, signals: &Signals, streams: &Streams) {
        let until = match self.stage {
            Stage::Running | Stage::Done => SLEEP_MAX,
            Stage::Settling(deadline)
            | Stage::Reporting(deadline)
            | Stage::EndingWorkers(deadline)
            | Stage::Lingering(deadline)
            | Stage::EndingHelpers(deadline) => {
                deadline.saturating_duration_since(Instant::now()).min(SLEEP_MAX)
            }
        };
        wait(signals.descriptors().chain(streams.descriptors()), until);
    }

    fn on_signal(&mut self, signal: i32) {
        if self.asked {
            // SIGPIPE repeats itself; only a second request of the user is one.
            if signal != signal_hook::consts::SIGPIPE {
                say(&format!("{} again: killing all processes", signals::name(signal)));
                self.kill_all();
            }
            return;
        }
        self.asked = true;
        if matches!(self.stage, Stage::Settling(_)) {
            self.blame();
        }
        self.code.get_or_insert(128 + signal);
        if signal != signal_hook::consts::SIGPIPE {
            say(&format!("{}: ending all processes", signals::name(signal)));
        }
        if matches!(self.stage, Stage::Running | Stage::Reporting(_)) {
            if signal == signal_hook::consts::SIGINT {
                self.interrupt_workers();
            } else {
                self.end_workers();
            }
        } else if matches!(self.stage, Stage::Lingering(_)) {
            self.end_helpers();
        }
    }

    /// Looks which processes have ended, without reaping them.
    fn notice_ends(&mut self) {
        for index in 0..self.running.len() {
            let process = &mut self.running[index];
            if process.ended {
                continue;
            }
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
            let failure = match waitid(WaitId::Pid(process.group), options) {
                Ok(None) | Err(Errno::INTR) => continue,
                Ok(Some(status)) => match (status.exit_status(), status.terminating_signal()) {
                    (Some(0), _) => None,
                    (Some(code), _) => Some((code, format!("exited with code {code}"))),
                    (None, Some(signal)) => Some((
                        128 + signal,
                        format!("was killed by {} ({signal})", signals::name(signal)),
                    )),
                    (None, None) => continue,
                },
                // Somebody else in this process has reaped it, so how it ended is not known.
                Err(_) => Some((1, "ended in an unknown way".to_owned())),
            };
            process.ended = true;
            if let Some((code, how)) = failure {
                self.on_failure(index, code, &how);
            }
        }
    }

    fn on_failure(&mut self, index: usize, code: i32, how: &str) {
        let (kind, label) = (self.running[index].kind, self.running[index].label.clone());
        let left = self.count(Kind::Worker);
        match self.stage {
            // Whether the others can go on is for the scheduler to say, which ends if not.
            Stage::Running if self.running[index].is_spared && left >= self.workers_min => {
                let plural = if left == 1 { "" } else { "s" };
                say(&format!("{label} {how}; the job goes on with {left} worker{plural} here"));
            }
            Stage::Running | Stage::Settling(_) => {
                if self.failures.is_empty() {
                    self.stage = Stage::Settling(Instant::now() + self.grace.min(SETTLE_MAX));
                }
                self.failures.push(Failure { kind, label, code, how: how.to_owned() });
            }
            // Each worker says by itself why it ends; the launcher says which ones did.
            Stage::Reporting(_) | Stage::Lingering(_) => say(&format!("{label} {how}")),
            // These were asked to end, and the manner does not matter.
            _ => {}
        }
    }

    /// Names the process that the job ends by, and lets the others end.
    fn blame(&mut self) {
        let mut failures = std::mem::take(&mut self.failures);
        if failures.is_empty() {
            return;
        }
        let Failure { kind, label, code, how } = failures.remove(cause(&failures));
        self.code.get_or_insert(code);
        match kind {
            Kind::Worker => {
                say(&format!("{label} {how}; ending the other processes"));
                self.end_workers();
            }
            Kind::Helper => {
                say(&format!("{label} {how}; the job cannot go on"));
                self.stage = Stage::Reporting(Instant::now() + self.grace);
            }
        }
        for Failure { label, how, .. } in failures {
            say(&format!("{label} {how}"));
        }
    }

    fn decide(&mut self, now: Instant) {
        let workers = self.count(Kind::Worker);
        let helpers = self.count(Kind::Helper);
        if workers + helpers == 0 {
            self.blame();
            self.stage = Stage::Done;
            return;
        }
        match self.stage {
            Stage::Settling(deadline) if workers == 0 || now >= deadline => self.blame(),
            Stage::Running if workers == 0 && self.has_workers() => {
                self.stage = Stage::Lingering(now + 2 * self.grace);
            }
            Stage::Reporting(_) if workers == 0 => self.end_helpers(),
            Stage::Reporting(deadline) if now >= deadline => self.end_workers(),
            Stage::EndingWorkers(_) if workers == 0 => self.end_helpers(),
            Stage::EndingWorkers(deadline) if now >= deadline => {
                self.kill_late(Kind::Worker);
                self.end_helpers();
            }
            Stage::Lingering(deadline) if now >= deadline => self.kill_late(Kind::Helper),
            Stage::Lingering(_) => self.tell_the_end(),
            Stage::EndingHelpers(deadline) if now >= deadline => self.kill_late(Kind::Helper),
            _ => {}
        }
    }

    /// Tells who waits for ranks to come back that all have ended; again and again, because it
    /// ignores that until it has come so far as to listen.
    fn tell_the_end(&self) {
        for process in self.running.iter().filter(|process| process.stays && !process.ended) {
            let _ = kill_process(process.group, Signal::USR1);
        }
    }

    fn end_workers(&mut self) {
        self.signal(Kind::Worker, Signal::TERM);
        self.stage = Stage::EndingWorkers(Instant::now() + self.grace);
    }

    /// As the terminal would: a Python program sees it as KeyboardInterrupt.
    fn interrupt_workers(&mut self) {
        self.signal(Kind::Worker, Signal::INT);
        self.stage = Stage::EndingWorkers(Instant::now() + self.grace * INTERRUPTED_GRACES);
    }

    fn end_helpers(&mut self) {
        self.signal(Kind::Helper, Signal::TERM);
        self.stage = Stage::EndingHelpers(Instant::now() + self.grace);
    }

    /// Kills what has not ended in time, and says so.
    fn kill_late(&mut self, kind: Kind) {
        for process in self.running.iter().filter(|process| process.kind == kind && !process.ended)
        {
            say(&format!("{} did not end in time: killed", process.label));
        }
        self.signal(kind, Signal::KILL);
        if kind == Kind::Helper {
            self.stage = Stage::EndingHelpers(Instant::now() + SLEEP_MAX);
        }
    }

    fn kill_all(&mut self) {
        self.signal(Kind::Worker, Signal::KILL);
        self.signal(Kind::Helper, Signal::KILL);
    }

    /// Signals whole groups, so that what the processes have started ends with them.
    fn signal(&self, kind: Kind, signal: Signal) {
        for process in self.running.iter().filter(|process| process.kind == kind) {
            // A group without members has ended, which is what we want.
            let _ = kill_process_group(process.group, signal);
        }
    }

    fn count(&self, kind: Kind) -> usize {
        self.running.iter().filter(|process| process.kind == kind && !process.ended).count()
    }

    fn has_workers(&self) -> bool {
        self.running.iter().any(|process| process.kind == Kind::Worker)
    }

    /// Passes on the last output, ends what the processes have left behind, and reaps them all.
    fn finish(&mut self, guardian: Guardian, streams: &mut Streams) {
        let deadline = Instant::now() + LAST_OUTPUT;
        while streams.are_open() && Instant::now() < deadline {
            let left = deadline.saturating_duration_since(Instant::now());
            wait(streams.descriptors(), left);
            streams.pass_on();
        }
        // The guardian would do, but somebody may have killed it.
        self.kill_all();
        guardian.finish();
        for process in &mut self.running {
            let _ = process.child.wait();
        }
        streams.pass_on();
        streams.finish();
    }
}

/// The failure that explains the others: the first one that is not what follows from another's,
/// else the first worker's, else the first.
fn cause(failures: &[Failure]) -> usize {
    let first = |is: &dyn Fn(&Failure) -> bool| failures.iter().position(is);
    first(&|failure| failure.code != FOLLOWS)
        .or_else(|| first(&|failure| failure.kind == Kind::Worker))
        .unwrap_or(0)
}

/// Sleeps until one of the descriptors can be read, or `timeout` has passed.
fn wait<'a>(descriptors: impl Iterator<Item = std::os::fd::BorrowedFd<'a>>, timeout: Duration) {
    let mut polled: Vec<PollFd<'_>> =
        descriptors.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
    let timeout = Timespec::try_from(timeout).ok();
    // Interrupted or not: the caller looks at everything again.
    let _ = poll(&mut polled, timeout.as_ref());
}
