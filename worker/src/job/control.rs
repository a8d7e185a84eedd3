//! The control thread of a worker: reads the scheduler, listens to the NIC loop, and carries out
//! what the [`Agent`] makes of it. Nothing of the data path passes here.

use super::NicSide;
use super::nic_loop::{self, Command};
use crate::base::error::{Error, Overdue, Source};
use crate::base::lock;
use crate::base::types::{Follow, Speed};
use crate::job::agent::{Agent, Effect};
use crate::job::declared::Declared;
use crate::job::timeline::Tracing;
use crate::nic::{NicStatistics, Report};
use crate::terminated;
use bps_engine::base::{Rank, milliseconds};
use bps_engine::control::{
    Door, Found, Knocker, LinkError, LinkReceiver, LinkSender, Progress, Redial, ask_time,
    take_time,
};
use bps_engine::metrics::Collector;
use bps_engine::proto::messages::{NodeMessage, Register, SchedulerMessage};
use bps_engine::proto::uneven::{UnevenOrder, UnevenReport};
use bps_engine::ring::Mpsc;
use bps_engine::trace::log;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant, SystemTime};

/// How often this thread looks around when nothing comes.
const TICK: Duration = Duration::from_millis(50);
/// The same in a job that tunes itself: rounds wait for what the NIC loop reports.
const TUNING_TICK: Duration = Duration::from_millis(5);
/// The same while there is no scheduler.
const LOOK: Duration = Duration::from_millis(10);
/// How long a rank that was told to end waits for the scheduler to hear of it.
const GOODBYE: Duration = Duration::from_secs(1);
/// Over how long throughput is measured.
const SPEED_INTERVAL: Duration = Duration::from_secs(1);
/// Throughput samples that are kept.
const SPEEDS_MAX: usize = 1024;

/// Answers that callers wait for.
#[derive(Default)]
pub(crate) struct Answers {
    pub(crate) declares: HashMap<u64, Result<Vec<u32>, Error>>,
    pub(crate) barriers: Vec<u64>,
    /// For a rank that has joined: what it has to follow, and that all have joined.
    pub(crate) follows: VecDeque<Follow>,
    /// Whether roots have joined, by the number of the question.
    pub(crate) roots: HashMap<u64, Option<u64>>,
    /// Ranks that have died and that the job goes on without, in order.
    pub(crate) gone: Vec<Rank>,
    pub(crate) over: Option<Error>,
}

/// What heartbeats need beside the connection to the scheduler.
pub(crate) struct Heart {
    /// Since when the time counts that the agent is told.
    pub(crate) began: Instant,
    /// Where to knock if the scheduler does not answer.
    pub(crate) door: Door,
    pub(crate) knocker: Option<Knocker>,
    /// The way to another scheduler, and what this rank is to register there as.
    pub(crate) redial: Redial,
    pub(crate) register: Register,
    /// The connection to the scheduler is of no use any more.
    pub(crate) is_cut: bool,
}

/// The control thread of a worker.
pub(crate) struct Control {
    pub(crate) agent: Arc<Mutex<Agent>>,
    pub(crate) declared: Arc<Mutex<Declared>>,
    pub(crate) sender: LinkSender,
    pub(crate) receiver: LinkReceiver,
    pub(crate) nic: NicSide,
    pub(crate) reports: Mpsc<Report>,
    pub(crate) answers: Arc<(Mutex<Answers>, Condvar)>,
    pub(crate) leaving: Arc<AtomicBool>,
    pub(crate) has_said_goodbye: Arc<AtomicBool>,
    pub(crate) newcomers: Arc<AtomicU32>,
    /// How long a program that leaves by itself may take to do so; `None` in a job that lets no
    /// rank leave.
    pub(crate) notice: Option<Duration>,
    pub(crate) noticed_at: Option<Instant>,
    pub(crate) statistics: Arc<NicStatistics>,
    pub(crate) collector: Collector,
    pub(crate) heartbeat_interval: Duration,
    /// Whether the job tunes itself.
    pub(crate) tunes: bool,
    pub(crate) heart: Heart,
    pub(crate) lost_at: Option<Instant>,
    /// How long the scheduler has to say why a lane was lost. It may have to wait for another
    /// node's heartbeats before it knows.
    pub(crate) verdict: Duration,
    pub(crate) speeds: Arc<Mutex<VecDeque<Speed>>>,
    pub(crate) tracing: Arc<Tracing>,
}

impl Control {
    pub(crate) fn run(mut self) {
        terminated::watch();
        self.run_until_over();
        if self.notice.is_none() {
            // What the program does after its job is no leaving either.
            terminated::take_notice(false);
        } else if let Some(deadline) = self.deadline() {
            terminated::end_at(deadline);
        }
        terminated::ignore();
    }

    /// When a program that SIGTERM has come to must have left, if it is one that leaves by itself
    /// and may.
    fn deadline(&mut self) -> Option<Instant> {
        let notice = self.notice.filter(|_| terminated::is_noticed())?;
        let noticed_at = *self.noticed_at.get_or_insert_with(|| {
            log::info!("SIGTERM: this rank leaves at the next commit, within {notice:?}");
            Instant::now()
        });
        Some(noticed_at + notice)
    }

    /// Whether SIGTERM is to end this process now.
    fn is_to_end(&mut self) -> bool {
        terminated::came() && self.deadline().is_none_or(|deadline| Instant::now() >= deadline)
    }

    /// Tells the others that this rank was told to end, and ends it.
    fn end_process(&mut self) {
        if !self.leaving.load(Ordering::Acquire) {
            let message = "it was stopped by SIGTERM".to_owned();
            let _ = self.sender.send(&NodeMessage::failed(message));
            let begun = Instant::now();
            // The scheduler closes the connection when it has read that.
            while begun.elapsed() < GOODBYE && self.receiver.receive(TICK).is_ok() {}
        }
        terminated::die();
    }

    fn run_until_over(&mut self) {
        // Statistics go out at once: by these the scheduler knows that this rank has its lanes.
        let (began, mut told) = (self.heart.began, None::<Instant>);
        let mut measured = (Instant::now(), 0);
        let mut effects = Vec::new();
        let tick = if self.tunes { TUNING_TICK } else { TICK };
        loop {
            if self.is_to_end() {
                self.end_process();
            }
            ask_time(&self.tracing.clock, &self.sender);
            match self.receive(tick, &mut effects) {
                Ok(Some(SchedulerMessage::Clock(answer))) => {
                    take_time(&self.tracing.clock, &answer, &self.sender);
                }
                Ok(Some(message)) => {
                    lock(&self.agent).handle(message, began.elapsed(), &mut effects);
                }
                Ok(None) => {}
                Err(_) if self.has_said_goodbye.load(Ordering::Acquire) => return,
                Err(error @ LinkError::Altered { .. }) => {
                    lock(&self.agent).control_altered(Source::new(error), &mut effects);
                }
                Err(error) => {
                    self.heart.is_cut = true;
                    let mut agent = lock(&self.agent);
                    let (source, now) = (Source::new(error), began.elapsed());
                    agent.scheduler_lost(source, now, &mut effects);
                }
            }
            self.tick(began.elapsed(), &mut effects);
            while let Some(report) = self.reports.pop() {
                lock(&self.agent).handle_report(report, &mut effects);
            }
            self.wait_for_verdict(&mut effects);
            let over = self.carry_out(&mut effects);
            let left = self.has_said_goodbye.load(Ordering::Acquire) && self.nic.has_ended();
            if over || left {
                return;
            }
            if measured.0.elapsed() >= SPEED_INTERVAL {
                measured = self.measure(measured);
            }
            if told.is_none_or(|told| told.elapsed() >= self.heartbeat_interval) {
                told = Some(Instant::now());
                let statistics = self.collector.take();
                let _ = self.sender.send(&NodeMessage::Statistics(statistics));
            }
        }
    }

    /// What the scheduler says next; of another one, where this one is lost, once it leads the job.
    fn receive(
        &mut self,
        tick: Duration,
        effects: &mut Vec<Effect>,
    ) -> Result<Option<SchedulerMessage>, LinkError> {
        if !lock(&self.agent).is_away() {
            return self.receiver.receive(tick);
        }
        let progress = self.heart.redial.poll(tick);
        let now = self.heart.began.elapsed();
        match progress {
            Progress::None => {}
            Progress::Connected => {
                let messages = lock(&self.agent).resume(self.heart.register.clone());
                self.heart.redial.ask(&messages);
            }
            Progress::Says(SchedulerMessage::Heartbeat) => {}
            Progress::Says(message) => return Ok(Some(message)),
            Progress::Leads { found, term } => self.follow((*found, term), now, effects),
            Progress::Failed => lock(&self.agent).not_found(now),
        }
        if self.heart.redial.is_asking() {
            return Ok(None);
        }
        if self.heart.is_cut {
            std::thread::sleep(LOOK);
            return Ok(None);
        }
        self.receiver.receive(LOOK)
    }

    /// Goes over to another scheduler, and asks it for what has no answer.
    fn follow(&mut self, found: (Found, u32), now: Duration, effects: &mut Vec<Effect>) {
        let (Found { sender, receiver, door }, term) = found;
        // Callers ask under this lock: each request goes out by one connection, or by both once.
        let mut agent = lock(&self.agent);
        let Some(asked) = agent.follow(term, now, effects) else { return };
        // If it was only stopped, it learns so that it is followed no more.
        if !self.heart.is_cut {
            let _ = self.sender.send(&NodeMessage::Deposed { term });
        }
        self.sender.replace(sender);
        self.receiver = receiver;
        (self.heart.door, self.heart.is_cut) = (door, false);
        for message in asked {
            // If that fails, `receive` finds the connection closed.
            let _ = self.sender.send(&message);
        }
    }

    /// Heartbeats, their answers, and what is to be done without.
    fn tick(&self, now: Duration, effects: &mut Vec<Effect>) {
        let mut agent = lock(&self.agent);
        while let Some(answer) = self.heart.knocker.as_ref().and_then(Knocker::answer) {
            agent.handle_aside(answer, now, effects);
        }
        agent.handle_tick(now, effects);
    }

    fn knock(&mut self, round_trip: Option<Duration>) {
        self.heart.knocker = round_trip.and_then(|round_trip| {
            let started = Knocker::start(Door { round_trip, ..self.heart.door.clone() });
            started.inspect_err(|error| log::warning!("no thread: {error}")).ok()
        });
    }

    /// Takes a throughput sample, if any tensor was finished since the last one.
    fn measure(&self, (since, bytes_then): (Instant, u64)) -> (Instant, u64) {
        let (now, bytes) = (Instant::now(), self.statistics.bytes.read());
        if bytes > bytes_then {
            let megabytes = (bytes - bytes_then) as f64 / 1e6;
            let megabytes_per_second = megabytes / (now - since).as_secs_f64();
            let mut speeds = lock(&self.speeds);
            if speeds.len() == SPEEDS_MAX {
                speeds.pop_front();
            }
            speeds.push_back(Speed { unix_ms: unix_ms(), megabytes_per_second });
        }
        (now, bytes)
    }

    fn wait_for_verdict(&mut self, effects: &mut Vec<Effect>) {
        let mut agent = lock(&self.agent);
        if agent.is_unheard() || !agent.has_lost() {
            // Only a scheduler that runs knows; or it was said why, and the job goes on.
            self.lost_at = None;
        } else {
            let since = *self.lost_at.get_or_insert_with(Instant::now);
            if since.elapsed() > self.verdict {
                agent.give_up(effects);
            }
        }
    }

    /// Returns whether the job is over for this worker.
    fn carry_out(&mut self, effects: &mut Vec<Effect>) -> bool {
        let (mut over, mut hangs) = (false, false);
        for effect in effects.drain(..) {
            match effect {
                Effect::Nic(command) => {
                    match &command {
                        Command::Plan { plan, .. } => self.tracing.name(plan),
                        Command::Recut { plans, .. } => {
                            plans.iter().for_each(|(_, plan)| self.tracing.name(plan));
                        }
                        _ => {}
                    }
                    hangs |= self.command(command);
                }
                Effect::Send(message) => {
                    let _ = self.sender.send(&message);
                }
                Effect::Limit { tensor, until } => {
                    if lock(&self.declared).limit(tensor, until) {
                        let _ = self.sender.send(&NodeMessage::Overrun { tensor });
                    }
                }
                Effect::Beat => {
                    let rounds = self.statistics.counters.rounds.read();
                    // A scheduler that can't be written to is noticed by `receive`.
                    let _ = self.sender.send(&NodeMessage::Heartbeat { rounds });
                }
                Effect::Knock(round_trip) => self.knock(round_trip),
                Effect::Redial(true) => {
                    if let Err(error) = self.heart.redial.dial() {
                        log::warning!("no thread: {error}");
                        lock(&self.agent).not_found(self.heart.began.elapsed());
                    }
                }
                Effect::Redial(false) => self.heart.redial.forget(),
                Effect::Declared { request, result } => {
                    self.answer(|answers| drop(answers.declares.insert(request, result)));
                }
                Effect::BarrierDone { request } => {
                    self.answer(|answers| answers.barriers.push(request));
                }
                Effect::Gone(gone) => self.answer(|answers| answers.gone = gone),
                Effect::Uneven(order) => self.uneven(order),
                Effect::Newcomers(count) => self.newcomers.store(count, Ordering::Relaxed),
                Effect::Warn(line) => log::warning!("{line}"),
                Effect::Changed(line) => {
                    log::warning!("{line}");
                    self.tracing.note(&line);
                }
                Effect::Over(error) => {
                    over = true;
                    hangs |= self.command(Command::Fail { error: error.clone() });
                    self.answer(|answers| answers.over = Some(error));
                }
            }
            if hangs {
                self.lanes_hang();
                return true;
            }
        }
        over
    }

    /// The scheduler speaks of ranks that have run out of data.
    fn uneven(&self, order: UnevenOrder) {
        match order {
            UnevenOrder::Report => {
                if let Some(pushes) = lock(&self.declared).report() {
                    let report = UnevenReport::Pushed { pushes };
                    let _ = self.sender.send(&NodeMessage::Uneven(report));
                }
            }
            UnevenOrder::Follow { tensors } => {
                self.answer(|answers| answers.follows.push_back(Follow::Pushes(tensors)));
            }
            UnevenOrder::Root { request, joined_after } => {
                self.answer(|answers| {
                    answers.roots.insert(request, joined_after);
                });
            }
            UnevenOrder::AllJoined { last } => {
                lock(&self.declared).all_joined();
                self.answer(|answers| answers.follows.push_back(Follow::AllJoined(last)));
            }
        }
    }

    fn answer(&self, change: impl FnOnce(&mut Answers)) {
        change(&mut lock(&self.answers.0));
        self.answers.1.notify_all();
    }

    /// Hands a command to the NIC loop; says whether that hangs.
    fn command(&self, command: Command) -> bool {
        let nic = &self.nic;
        let given = nic_loop::hand_over(&nic.commands, &nic.waker, &nic.ended, command);
        nic.wake();
        given.is_err()
    }

    /// The NIC loop takes no commands: the job is over, and what was pushed is never finished.
    fn lanes_hang(&self) {
        let error = Error::from(Overdue::LANES);
        log::error!("{error}");
        let _ = self.sender.send(&NodeMessage::failed(error.to_string()));
        self.answer(|answers| answers.over = Some(error));
    }
}

/// Milliseconds since 1970.
fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    milliseconds(since)
}
