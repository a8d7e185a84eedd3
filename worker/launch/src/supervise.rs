//! Runs a plan to its end: starts the processes, passes their output on, and ends them together.
//!
//! Stages follow one another and never go back, each but the first has a deadline, and what has not
//! ended at the last one is killed: the launcher always ends.

#![forbid(unsafe_code)]

use super::children::LocalCrew;
use super::crew::{Crew, Ended};
use super::error::LaunchError;
use super::fleet::{End, Fleet, Recruit};
use super::output::say;
use super::plan::{Kind, LaunchPlan, Process};
use super::signals::{self, Signals};
use rustix::process::Signal;
use std::time::{Duration, Instant};

/// Longest sleep: a notice that was lost is made up for after this.
const SLEEP_MAX: Duration = Duration::from_millis(500);
/// How long ends are collected after a first failure, to tell its cause from what follows from it.
const SETTLE_MAX: Duration = Duration::from_secs(1);
/// How many times longer than a request to end an interrupted rank may take: it may write a
/// checkpoint, and the user can interrupt again.
const INTERRUPTED_GRACES: u32 = 12;
/// From the request to end an elastic job to the second one.
const URGE: Duration = Duration::from_secs(1);
/// The code of a Python program that an exception ends, and of a server whose job failed: most
/// often because of another process.
const FOLLOWS: i32 = 1;

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

/// A process as the supervisor knows it.
pub(super) struct Member {
    kind: Kind,
    label: String,
    /// See [`Process::stays`].
    stays: bool,
    /// See [`Process::is_spared`].
    is_spared: bool,
    /// It was started while the job ran.
    is_recruit: bool,
    ended: bool,
}

impl Member {
    /// A process of a plan, that has not ended.
    pub(super) fn new(process: &Process) -> Member {
        Member::of(process.kind, process.label.clone(), process.stays, process.is_spared)
    }

    /// A process that has not ended; see [`Process`].
    pub(super) fn of(kind: Kind, label: String, stays: bool, is_spared: bool) -> Member {
        Member { kind, label, stays, is_spared, is_recruit: false, ended: false }
    }

    /// Whether it is a rank.
    pub(super) fn is_worker(&self) -> bool {
        self.kind == Kind::Worker
    }
}

/// A process that ended badly.
struct Failure {
    kind: Kind,
    label: String,
    code: i32,
    /// Completes "rank 1 …".
    how: String,
}

/// Decides for all processes of a job when they end, and how the job has ended.
pub(super) struct Supervisor<'a, C: Crew> {
    crew: &'a mut C,
    members: Vec<Member>,
    /// While the cause of the end is looked for, in the order in which they were noticed.
    failures: Vec<Failure>,
    stage: Stage,
    grace: Duration,
    /// Fewest workers with which the job goes on without others.
    workers_min: usize,
    /// Completes "the job goes on with 2 workers": empty if these are all.
    here: &'static str,
    /// Starts further ranks and lets others leave, where that is wanted.
    fleet: Option<Fleet>,
    /// A rank has ended well that was not asked to end.
    has_finished: bool,
    /// See [`LaunchPlan::notice`].
    notice: Option<Duration>,
    /// When members that were asked to end are asked again.
    urge_at: Option<Instant>,
    /// What the launcher will return, set once.
    code: Option<i32>,
    asked: bool,
}

/// Starts everything and returns the code to leave with: of the first process that failed, or 128
/// and the number of the signal that ended it or the launcher. Ranks come and go by the `fleet`.
pub(super) fn run(plan: &LaunchPlan, fleet: Option<Fleet>) -> Result<i32, LaunchError> {
    let mut crew = LocalCrew::new(plan)?;
    let mut signals = Signals::catch()?;
    for note in &plan.notes {
        say(note);
    }
    let started = crew.start();
    if started.is_err() {
        crew.kill_all();
    }
    let code = started.map(|()| {
        let members: Vec<Member> = plan.processes.iter().map(Member::new).collect();
        let workers = (0..members.len()).filter(|place| members[*place].is_worker()).collect();
        let fleet = fleet.map(|mut fleet| {
            fleet.begin_here(workers);
            fleet
        });
        let supervisor = Supervisor::new(&mut crew, members, plan.grace, plan.workers_min, " here");
        Supervisor { fleet, notice: plan.notice, ..supervisor }.watch(&mut signals)
    });
    crew.finish();
    code
}

impl<'a, C: Crew> Supervisor<'a, C> {
    /// Of processes that all run.
    pub(super) fn new(
        crew: &'a mut C,
        members: Vec<Member>,
        grace: Duration,
        workers_min: usize,
        here: &'static str,
    ) -> Supervisor<'a, C> {
        Supervisor {
            crew,
            members,
            failures: Vec::new(),
            stage: Stage::Running,
            grace,
            workers_min,
            here,
            fleet: None,
            has_finished: false,
            notice: None,
            urge_at: None,
            code: None,
            asked: false,
        }
    }

    /// With ranks that come and go.
    pub(super) fn with(self, fleet: Option<Fleet>) -> Self {
        Supervisor { fleet, ..self }
    }

    /// The loop: sleep until something happens, then notice it, then decide; until all have ended.
    /// Returns the code to leave with.
    pub(super) fn watch(mut self, signals: &mut Signals) -> i32 {
        while self.stage != Stage::Done {
            self.crew.sleep(signals, self.patience());
            let ends = self.crew.attend();
            for signal in signals.take() {
                self.on_signal(signal);
            }
            if self.crew.nobody_listens() {
                self.on_signal(signal_hook::consts::SIGPIPE);
            }
            for Ended { process, code, how } in ends {
                self.members[process].ended = true;
                self.on_end(process, code, &how);
            }
            if self.stage == Stage::Running {
                self.recruit();
            }
            self.decide(Instant::now());
        }
        self.code.unwrap_or(0)
    }

    fn patience(&self) -> Duration {
        match self.stage {
            Stage::Running | Stage::Done => SLEEP_MAX,
            Stage::Settling(deadline)
            | Stage::Reporting(deadline)
            | Stage::EndingWorkers(deadline)
            | Stage::Lingering(deadline)
            | Stage::EndingHelpers(deadline) => {
                deadline.saturating_duration_since(Instant::now()).min(SLEEP_MAX)
            }
        }
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

    fn on_end(&mut self, index: usize, code: i32, how: &str) {
        let is_worker = self.members[index].is_worker();
        let end = match &mut self.fleet {
            Some(fleet) if is_worker => fleet.ended(index, code, Instant::now()),
            _ if code == 0 => End::Well,
            _ => End::Failed,
        };
        match end {
            End::Failed => self.on_failure(index, code, how),
            End::Well => self.has_finished |= is_worker,
            End::Asked => {
                let label = &self.members[index].label;
                say(&format!("{label} has left ({how})"));
            }
        }
    }

    /// Starts ranks where there is room for them, and lets those leave that are not to stay.
    fn recruit(&mut self) {
        let running = self.count(Kind::Worker);
        let Some(fleet) = &mut self.fleet else { return };
        for Recruit { place, label } in fleet.look(self.crew, running, Instant::now()) {
            assert_eq!(place, self.members.len(), "a recruit is behind all others");
            say(&format!("{label} has started"));
            let member = Member::of(Kind::Worker, label, false, true);
            self.members.push(Member { is_recruit: true, ..member });
        }
    }

    /// Whether the job can do without this member, that has ended, with so many workers left.
    fn is_spared(&self, index: usize, left: usize) -> bool {
        let member = &self.members[index];
        // A job that ends has no use for who has just come; and one may wait for others to come.
        let is_late = member.is_recruit && self.has_finished;
        let waits = self.fleet.as_ref().is_some_and(Fleet::is_patient) && member.is_worker();
        member.is_spared && (left >= self.workers_min || is_late || waits)
    }

    fn on_failure(&mut self, index: usize, code: i32, how: &str) {
        let (kind, label) = (self.members[index].kind, self.members[index].label.clone());
        let left = self.count(Kind::Worker);
        match self.stage {
            // Whether the others can go on is for the scheduler to say, which ends if not.
            Stage::Running if self.is_spared(index, left) => {
                let plural = if left == 1 { "" } else { "s" };
                let so = match (left, self.has_finished) {
                    (0, true) => "the job has finished without it".to_owned(),
                    _ => format!("the job goes on with {left} worker{plural}{}", self.here),
                };
                say(&format!("{label} {how}; {so}"));
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
            Stage::Running if workers == 0 && self.has_workers() && !self.awaits_ranks() => {
                self.stage = Stage::Lingering(now + 2 * self.grace);
            }
            Stage::Reporting(_) if workers == 0 => self.end_helpers(),
            Stage::Reporting(deadline) if now >= deadline => self.end_workers(),
            Stage::EndingWorkers(_) if workers == 0 => self.end_helpers(),
            Stage::EndingWorkers(deadline) if now < deadline && self.is_to_urge(now) => {
                self.urge(Kind::Worker);
            }
            Stage::EndingHelpers(deadline) if now < deadline && self.is_to_urge(now) => {
                self.urge(Kind::Helper);
            }
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

    fn is_to_urge(&self, now: Instant) -> bool {
        self.urge_at.is_some_and(|at| now >= at)
    }

    fn urge(&mut self, kind: Kind) {
        self.urge_at = None;
        self.signal(kind, Signal::TERM);
    }

    /// Whether new ranks may come although none is left; the scheduler says when it is too late.
    fn awaits_ranks(&self) -> bool {
        let helpers = self.count(Kind::Helper) > 0;
        helpers && !self.has_finished && self.fleet.as_ref().is_some_and(Fleet::is_patient)
    }

    /// Tells who waits for ranks to come back that all have ended; again and again, because it
    /// ignores that until it has come so far as to listen.
    fn tell_the_end(&mut self) {
        let staying = self.members.iter().enumerate().filter(|(_, it)| it.stays && !it.ended);
        for (process, _) in staying {
            self.crew.tell_the_end(process);
        }
    }

    fn end_workers(&mut self) {
        self.signal(Kind::Worker, Signal::TERM);
        let now = Instant::now();
        self.urge_at = self.urges(Kind::Worker, now);
        self.stage = Stage::EndingWorkers(now + self.grace + self.notice.unwrap_or_default());
    }

    /// When members are asked to end for the second time. Those that the job can spare take the
    /// first SIGTERM for a request to leave it, at the next commit perhaps: where the job itself
    /// ends, they are not given as long.
    fn urges(&self, kind: Kind, now: Instant) -> Option<Instant> {
        let is_spared = self.members.iter().any(|it| it.kind == kind && it.is_spared);
        (is_spared && self.notice.is_none()).then(|| now + URGE.min(self.grace / 2))
    }

    /// As the terminal would: a Python program sees it as KeyboardInterrupt.
    fn interrupt_workers(&mut self) {
        self.signal(Kind::Worker, Signal::INT);
        self.stage = Stage::EndingWorkers(Instant::now() + self.grace * INTERRUPTED_GRACES);
    }

    fn end_helpers(&mut self) {
        self.signal(Kind::Helper, Signal::TERM);
        let now = Instant::now();
        self.urge_at = self.urges(Kind::Helper, now);
        self.stage = Stage::EndingHelpers(now + self.grace + self.notice.unwrap_or_default());
    }

    /// Kills what has not ended in time, and says so.
    fn kill_late(&mut self, kind: Kind) {
        for process in self.members.iter().filter(|process| process.kind == kind && !process.ended)
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
    fn signal(&mut self, kind: Kind, signal: Signal) {
        for (process, _) in self.members.iter().enumerate().filter(|(_, it)| it.kind == kind) {
            self.crew.signal(process, signal);
        }
    }

    fn count(&self, kind: Kind) -> usize {
        self.members.iter().filter(|process| process.kind == kind && !process.ended).count()
    }

    fn has_workers(&self) -> bool {
        self.members.iter().any(|process| process.kind == Kind::Worker)
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
