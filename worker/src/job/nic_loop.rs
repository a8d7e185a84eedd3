//! The loop of the thread `bps-nic`: takes commands, keeps the [rounds](Rounds) of tensors in
//! memory of the host, and drives the [lanes](Nic) that carry their parts.

use crate::base::error::{Closed, Error, Overdue, Source};
use crate::base::task::Task;
use crate::base::types::Kept;
use crate::nic::{LanePeer, Move, Nic, NicConfig, NicStatistics, Report};
use crate::rounds::handover::{FromGpu, GpuThread, ToGpu};
use crate::rounds::{Done, Memory, Plan, Push, Rounds};
use bps_engine::harness;
use bps_engine::lane::Endpoint;
use bps_engine::limits::EVENTS_MAX;
use bps_engine::optimize::Act;
use bps_engine::proto::tuning::TuneReport;
use bps_engine::proto::uneven::Pushes;
use bps_engine::ring::Mpsc;
use bps_engine::trace::timeline::Recorder;
use bps_engine::transport::{LaneId, Link, Waker};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Commands that are taken before the lanes get their turn: the first tensors of a long list are on
/// their way while the last ones are still being handed over.
const COMMANDS_PER_TURN: usize = 64;
/// How long a finished task may wait for its caller to be woken while the loop has more to do: a
/// caller of many tensors then finds many of them done, instead of sleeping on each.
const WAKE_DELAY: Duration = Duration::from_micros(50);

/// From the other threads to the loop.
pub enum Command {
    /// A tensor was declared.
    Plan {
        /// Its id: dense, from 0.
        tensor: u32,
        /// Where its parts live.
        plan: Arc<Plan>,
    },
    /// Push this tensor and pull its result.
    Push {
        /// Its id.
        tensor: u32,
        /// Its bytes.
        memory: Memory,
        /// Larger goes sooner.
        priority: i64,
        /// What the round is for, of a tensor with an optimizer.
        act: Act,
        /// Told when it is over.
        task: Arc<Task>,
    },
    /// Multiply what error feedback adds to the next rounds of these tensors.
    ScaleResidues {
        /// Their ids.
        tensors: Vec<u32>,
        /// By this.
        factor: f32,
    },
    /// Tell what an encoded tensor keeps.
    TellKept {
        /// Its id.
        tensor: u32,
        /// Whom.
        to: SyncSender<Kept>,
    },
    /// An encoded tensor keeps this from now on.
    Keep {
        /// Its id.
        tensor: u32,
        /// Whose lengths are those of the tensor, or 0.
        kept: Box<Kept>,
        /// Told when what is pushed from then on comes behind it.
        done: SyncSender<()>,
    },
    /// A GPU's pipeline is there: what concerns it is to go here from now on.
    OpenGpu(GpuThread),
    /// The GPU can't be used, which ends the job.
    GpuFailed {
        /// Why.
        source: Source,
    },
    /// These tensors are to get other parts: hold their rounds, and tell how many have begun.
    Recut {
        /// To be returned.
        trial: u32,
        /// By id.
        plans: Vec<(u32, Arc<Plan>)>,
    },
    /// Settings hold from now on that the job tries.
    Tune {
        /// Their number.
        trial: u32,
        /// Bytes that may be in flight.
        credit_bytes: usize,
        /// The last rounds with the old parts, of those that get others.
        rounds: Vec<Pushes>,
    },
    /// These servers are lost, all of this epoch: let go of their lanes, and say how far their keys
    /// are.
    LoseServers(Vec<u32>),
    /// Keys of lost servers are elsewhere now.
    Moved(Vec<Move>),
    /// Record a timeline with these from now on; recorders that are off end it.
    Trace {
        /// The loop's own.
        nic: Recorder,
        /// The pipeline's, if it is not there yet.
        gpu: Option<Recorder>,
    },
    /// This name is of no use any more: what is pending of its tensors fails, and so does what
    /// comes, but for rounds on which the ranks had agreed.
    Poison {
        /// The name.
        name: String,
        /// How many rounds of which of its tensors. All rounds of one that is not here.
        agreed: Vec<(u32, u64)>,
        /// Why.
        error: Error,
    },
    /// The job is over for this worker: close all lanes, then fail what is pending.
    Fail {
        /// Why.
        error: Error,
    },
    /// Nothing is pending: say goodbye on all lanes and end.
    Leave {
        /// It means to come back.
        suspend: bool,
    },
}

impl Command {
    /// Nobody carries the command out: whoever waits for it hears why.
    fn refuse(self, error: &Error) {
        if let Command::Push { task, .. } = self {
            task.finish_now(Err(error.clone()));
        }
    }
}

/// Hands a command to the loop, which is woken if its queue is full. Says whether it was taken: not
/// if the loop has ended.
///
/// # Errors
/// The loop hangs.
pub(crate) fn hand_over(
    commands: &Mpsc<Command>,
    waker: &Waker,
    ended: &AtomicBool,
    command: Command,
) -> Result<bool, Overdue> {
    let has_ended = || ended.load(Ordering::Acquire);
    #[allow(clippy::result_large_err, reason = "what is not taken comes back")]
    let push = |command| commands.push(command).inspect_err(|_| waker.wake());
    match harness::offer(command, has_ended, push) {
        Ok(()) => Ok(true),
        Err(_) if has_ended() => Ok(false),
        Err(_) => Err(Overdue::LANES),
    }
}

/// Ends the job where the loop can't carry out what a tensor's declaration says.
fn report_if_out_of_reach(nic: &Nic, plan: &Plan) {
    if let Some(error) = nic.out_of_reach(plan) {
        nic.report(Report::Failed { source: Source::new(error) });
    }
}

/// Finishes what is in the queue of a loop that has ended.
pub(crate) fn drain(commands: &Mpsc<Command>, error: &Error) {
    while let Some(command) = commands.pop() {
        command.refuse(error);
    }
}

/// See the [module](self).
pub struct NicLoop {
    nic: Nic,
    rounds: Rounds,
    commands: Mpsc<Command>,
    statistics: Arc<NicStatistics>,
    /// Called with what ended the job, before any caller sees it.
    say: fn(&Error),
    /// Finished tasks that somebody sleeps on.
    wakes: Vec<Arc<Task>>,
    /// When the first of them was seen to wait.
    first_wake: Option<Instant>,
    over: Option<Error>,
    /// It leaves once all is said.
    wants_to_leave: Option<bool>,
    leaving: bool,
}

impl NicLoop {
    /// A loop without lanes.
    #[must_use]
    pub fn new(
        endpoint: Endpoint,
        config: NicConfig,
        commands: Mpsc<Command>,
        (reports, report_waker): (Mpsc<Report>, Waker),
        statistics: Arc<NicStatistics>,
        say: fn(&Error),
    ) -> NicLoop {
        NicLoop {
            nic: Nic::new(endpoint, config, reports, report_waker, Arc::clone(&statistics)),
            rounds: Rounds::default(),
            commands,
            statistics,
            say,
            wakes: Vec::with_capacity(EVENTS_MAX),
            first_wake: None,
            over: None,
            wants_to_leave: None,
            leaving: false,
        }
    }

    /// Adds a lane: see [`Nic::attach`].
    ///
    /// # Errors
    /// The transport refuses the link.
    pub fn attach(&mut self, peer: LanePeer, link: Link) -> std::io::Result<LaneId> {
        self.nic.attach(peer, link)
    }

    /// Why the job is over for this worker, if it is.
    #[must_use]
    pub fn over(&self) -> Option<&Error> {
        self.over.as_ref()
    }

    /// Whether all lanes are closed and nothing will happen any more.
    #[must_use]
    pub fn ended(&self) -> bool {
        let has_ended = (self.leaving || self.over.is_some()) && self.nic.is_closed();
        has_ended && !self.nic.is_falling()
    }

    /// Slots for results that lanes or the GPU have.
    #[must_use]
    pub fn slots_in_use(&self) -> usize {
        self.nic.slots_in_use()
    }

    /// Whether a round is open, or the GPU is about to open one.
    #[must_use]
    pub fn is_awaiting(&self) -> bool {
        self.nic.is_open() || self.nic.is_gpu_busy()
    }

    /// Sleeps until there is something to do, or the time is over.
    pub fn sleep(&mut self, timeout: Duration) {
        let commands = &self.commands;
        self.nic.sleep(timeout, || !commands.is_empty());
    }

    /// Brings gauges up to date: a few times a second, not in each turn.
    pub fn sample(&self) {
        self.nic.sample(self.rounds.len());
    }

    /// One turn of the loop; says whether there was anything to do. `now` is the time since any
    /// fixed moment.
    pub fn step(&mut self, now: Duration) -> bool {
        self.nic.begin_turn(now);
        let mut progress = false;
        for _ in 0..COMMANDS_PER_TURN {
            let Some(command) = self.commands.pop() else { break };
            self.on_command(command);
            progress = true;
        }
        while let Some(message) = self.nic.hear_gpu() {
            self.on_gpu(message);
            progress = true;
        }
        progress |= self.nic.take_fallen();
        progress |= self.nic.turn();
        self.settle();
        self.nic.pump_all();
        let is_free = self.nic.is_all_said() && !self.nic.is_moving();
        if let Some(suspend) = self.wants_to_leave.take_if(|_| is_free) {
            self.leave(suspend);
        }
        self.nic.say_goodbyes();
        self.wake_callers(progress);
        self.nic.end_turn();
        progress
    }

    /// Ends the rounds whose parts are over, and begins what waits behind them.
    fn settle(&mut self) {
        while let Some((part, lacks)) = self.nic.take_over() {
            if let Some(done) = self.rounds.part_over(part.tensor, lacks) {
                self.finish(done);
                self.rounds.next(part.tensor, &mut self.nic);
            }
        }
        // Once every lane is closed, nobody but this process holds the callers' memory.
        if let Some(error) = &self.over
            && self.nic.is_closed()
        {
            self.rounds.fail_all(error);
        }
    }

    fn finish(&mut self, done: Done) {
        let Done { key, round, bytes, task, result, lacks, .. } = done;
        task.lacks(lacks.ranks, lacks.by_rank);
        if result.is_ok() {
            self.nic.record_done(key, round);
            self.statistics.bytes.add(bytes as u64);
        }
        if task.finish(result) {
            self.wakes.push(task);
        }
    }

    /// Wakes whoever sleeps on what is finished, once there is nothing else to do or the first has
    /// waited for [`WAKE_DELAY`].
    fn wake_callers(&mut self, progress: bool) {
        if self.wakes.is_empty() {
            return self.first_wake = None;
        }
        let busy = progress && self.nic.is_open();
        if busy && self.first_wake.get_or_insert_with(Instant::now).elapsed() < WAKE_DELAY {
            return;
        }
        self.first_wake = None;
        for task in self.wakes.drain(..) {
            task.wake();
        }
    }

    /// Why nothing more can be pushed, if so.
    fn refusal(&self) -> Option<Error> {
        self.over.clone().or_else(|| self.leaving.then(|| Closed::Left.into()))
    }

    fn on_command(&mut self, command: Command) {
        match command {
            Command::Plan { tensor, plan } => self.on_plan(tensor, plan),
            Command::Push { tensor, memory, priority, act, task } => match self.refusal() {
                Some(error) => task.finish_now(Err(error)),
                None => {
                    self.rounds.push(tensor, Push { memory, priority, act, task }, &mut self.nic)
                }
            },
            Command::ScaleResidues { tensors, factor } => {
                tensors.into_iter().for_each(|tensor| self.scale_residues(tensor, factor));
            }
            // By way of the pipeline, behind the factors that are on their way through it.
            Command::TellKept { tensor, to } if self.is_of_pipeline(tensor) => {
                self.nic.tell_gpu(ToGpu::TellKept { tensor, to });
            }
            Command::TellKept { tensor, to } => self.tell_kept(tensor, Kept::default(), &to),
            Command::Keep { tensor, kept, done } if self.is_of_pipeline(tensor) => {
                self.nic.tell_gpu(ToGpu::Keep { tensor, kept, done });
            }
            Command::Keep { tensor, kept, done } => self.keep(tensor, &kept, &done),
            Command::OpenGpu(to) => {
                self.nic.open_gpu(to);
                let plans = self.rounds.on_gpu().map(|(tensor, plan)| (tensor, Arc::clone(plan)));
                for (tensor, plan) in plans.collect::<Vec<_>>() {
                    report_if_out_of_reach(&self.nic, &plan);
                    let is_given = self.is_given(tensor);
                    let kept = Kept::default();
                    let kept = if is_given { self.with_kept(tensor, kept) } else { kept };
                    let kept = Box::new(kept);
                    self.nic.tell_gpu(ToGpu::Plan { tensor, plan, kept });
                }
            }
            Command::GpuFailed { source } => self.nic.report(Report::Failed { source }),
            Command::Trace { nic, gpu } => {
                self.nic.record_with(nic);
                if let Some(gpu) = gpu {
                    self.nic.record_gpu_with(gpu);
                }
            }
            Command::LoseServers(servers) => self.nic.lose_servers(&servers),
            Command::Moved(moves) => self.nic.moved(&moves),
            Command::Recut { trial, plans } => self.recut(trial, plans),
            Command::Tune { trial, credit_bytes, rounds } => {
                self.nic.tune(trial, credit_bytes);
                if let Err(error) = self.rounds.change(&rounds, &mut self.nic) {
                    self.nic.report(Report::Failed { source: Source::new(error) });
                }
            }
            Command::Poison { name, agreed, error } => self.poison(&name, &agreed, &error),
            Command::Fail { error } => self.fail(error),
            Command::Leave { suspend } => self.wants_to_leave = Some(suspend),
        }
    }

    /// Whether a pipeline has this tensor, which keeps what it encodes of it.
    fn is_of_pipeline(&self, tensor: u32) -> bool {
        self.nic.has_gpu() && self.rounds.is_on_gpu(tensor)
    }

    /// Whether something is kept of a tensor here.
    fn is_given(&self, tensor: u32) -> bool {
        self.rounds.parts_of(tensor).any(|(part, _)| self.nic.has_kept(part))
    }

    /// Shows what the parts of a tensor keep that are encoded here, with their elements.
    fn for_kept(&mut self, tensor: u32, mut show: impl FnMut(Range<usize>, [&mut [f32]; 2])) {
        for (part, elements) in self.rounds.parts_of(tensor) {
            if let Some(kept) = self.nic.kept(part) {
                show(elements, kept);
            }
        }
    }

    fn scale_residues(&mut self, tensor: u32, factor: f32) {
        self.for_kept(tensor, |_, [residue, _]| {
            residue.iter_mut().for_each(|value| *value *= factor);
        });
    }

    /// What is kept of a tensor elsewhere, and here.
    fn with_kept(&mut self, tensor: u32, mut all: Kept) -> Kept {
        let count = self.rounds.parts_of(tensor).last().map_or(0, |(_, elements)| elements.end);
        self.for_kept(tensor, |elements, parts| {
            for (part, whole) in parts.into_iter().zip([&mut all.residue, &mut all.velocity]) {
                if !part.is_empty() {
                    whole.resize(count, 0.0);
                    whole[elements.clone()].copy_from_slice(part);
                }
            }
        });
        all
    }

    fn tell_kept(&mut self, tensor: u32, elsewhere: Kept, to: &SyncSender<Kept>) {
        // Who has asked may have gone.
        let _ = to.try_send(self.with_kept(tensor, elsewhere));
    }

    fn keep(&mut self, tensor: u32, kept: &Kept, done: &SyncSender<()>) {
        self.for_kept(tensor, |elements, parts| {
            for (part, whole) in parts.into_iter().zip([&kept.residue, &kept.velocity]) {
                if !part.is_empty() && !whole.is_empty() {
                    part.copy_from_slice(&whole[elements.clone()]);
                }
            }
        });
        // Who has given it may have gone.
        let _ = done.try_send(());
    }

    fn on_gpu(&mut self, message: FromGpu) {
        match message {
            FromGpu::Part { of, round, priority, from, encoded } => {
                self.nic.push_from(self.rounds.part(of), round, priority, (from, encoded));
            }
            FromGpu::Land(slot) => self.nic.release(slot),
            FromGpu::ScaleResidues { tensor, factor } => self.scale_residues(tensor, factor),
            FromGpu::Kept { tensor, kept, to } => self.tell_kept(tensor, *kept, &to),
            FromGpu::Keep { tensor, kept, done } => self.keep(tensor, &kept, &done),
            FromGpu::Stalled { keys } => self.nic.note_stalls(keys),
            FromGpu::Lost { rank, cause } => {
                let (peer, round) = (LanePeer::Rank(rank), self.nic.where_it_stands());
                self.nic.report(Report::Lost { peer, cause, round });
            }
            FromGpu::Corrupt { rank, misfit } => {
                self.nic.report(Report::Corrupt { peer: LanePeer::Rank(rank), misfit });
            }
            FromGpu::Failed { source } => self.nic.report(Report::Failed { source }),
        }
    }

    fn on_plan(&mut self, tensor: u32, plan: Arc<Plan>) {
        if self.rounds.knows(tensor) {
            return;
        }
        let first = self.nic.plan(plan.part_plans(tensor));
        if plan.device {
            report_if_out_of_reach(&self.nic, &plan);
            let (plan, kept) = (Arc::clone(&plan), Box::default());
            self.nic.tell_gpu(ToGpu::Plan { tensor, plan, kept });
        }
        self.rounds.plan(tensor, plan, first);
    }

    /// Holds the rounds of what is known here, and says how many of each have begun.
    fn recut(&mut self, trial: u32, plans: Vec<(u32, Arc<Plan>)>) {
        let mut rounds = Vec::new();
        for (tensor, plan) in plans {
            if !self.rounds.knows(tensor) {
                continue;
            }
            let first = self.nic.plan(plan.part_plans(tensor));
            if let Some(begun) = self.rounds.prepare(tensor, plan, first, &mut self.nic) {
                Pushes::append(&mut rounds, tensor, begun);
            }
        }
        self.nic.report(Report::Tune(TuneReport::Held { trial, rounds }));
    }

    fn poison(&mut self, name: &str, agreed: &[(u32, u64)], error: &Error) {
        let mut on_gpu = Vec::new();
        let add = |tensor| on_gpu.push(tensor);
        self.rounds.poison(name, agreed, error, &mut self.nic, add);
        for tensor in on_gpu {
            self.nic.tell_gpu(ToGpu::Poisoned { tensor, error: error.clone() });
        }
    }

    /// The job is over: the kernel must let go of all memory before any task is finished.
    fn fail(&mut self, error: Error) {
        if self.over.is_some() {
            return;
        }
        let error = match error {
            Error::PeerDied(mut died) if died.at.is_none() => {
                died.at = self.nic.where_it_stands();
                Error::PeerDied(died)
            }
            error => error,
        };
        (self.say)(&error);
        self.over = Some(error);
        self.nic.close();
    }

    fn leave(&mut self, suspend: bool) {
        if self.over.is_some() {
            return;
        }
        if self.rounds.is_open() || self.nic.is_open() || self.nic.is_gpu_busy() {
            return self.fail(Closed::UnderWay.into());
        }
        self.leaving = true;
        self.nic.leave(suspend);
    }

    /// The loop has [ended](Self::ended), and is not stepped again: forgets all memory of others,
    /// says so by these two, and finishes what is in its queue.
    pub fn end(&mut self, ended: &AtomicBool, over: &OnceLock<Error>) {
        if let Some(error) = &self.over {
            let _ = over.set(error.clone());
        }
        self.nic.forget_memory();
        ended.store(true, Ordering::SeqCst);
        // Before the pipeline's queue is read: what a pipeline that has not seen the store has said
        // before it looked is there (`Pipeline::enqueue_wanted`).
        fence(Ordering::SeqCst);
        let closed = Error::Closed(Closed::Left);
        let error = over.get().unwrap_or(&closed);
        self.nic.end();
        drain(&self.commands, error);
    }
}
