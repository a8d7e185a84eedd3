//! A worker's place in a job of several ranks: joining it, its two threads, and how callers reach
//! them.

#![forbid(unsafe_code)]

pub mod agent;
mod asking;
mod attending;
mod control;
pub(crate) mod declared;
mod dialing;
pub(crate) mod neighbours;
pub mod nic_loop;
mod nic_side;
mod nic_thread;
pub(crate) mod places;
pub(crate) mod start;
mod timeline;
mod uneven;

use self::agent::Agent;
use self::control::{Answers, Control};
use self::declared::{Declared, News};
use self::nic_loop::Command;
pub(crate) use self::nic_side::NicSide;
use self::nic_thread::NicThread;
use self::places::{Poller, Spot};
use self::timeline::Tracing;
use crate::base::error::{Death, Error, Overdue, PeerDied, Source, StartError};
use crate::base::lock;
use crate::base::task::{Bell, Handle, Task};
use crate::base::types::{GpuPushPull, Kept, Speed, TensorId};
use crate::cuda::PooledEvent;
use crate::host::switches::Switches;
use crate::nic::{NicConfig, NicStatistics, Report};
use crate::rounds::Memory;
use crate::rounds::handover::{GpuInbox, GpuPush};
use crate::terminated;
use bps_engine::base::{Epoch, Rank};
use bps_engine::config::Config;
use bps_engine::control::LinkSender;
use bps_engine::harness::{self, PATIENCE};
use bps_engine::metrics::Collector;
use bps_engine::optimize::Act;
use bps_engine::proto::messages::NodeMessage;
use bps_engine::ring::Mpsc;
use bps_engine::team::{Helper, Team};
use bps_engine::trace::log;
use bps_engine::transport::rdma::Ports;
use bps_engine::transport::{Link, Waker};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Commands that may wait for the NIC loop.
const COMMANDS: usize = 4096;
/// How much later than a server this rank may hear of a death.
const NEWS: Duration = Duration::from_secs(10);
/// How often a caller that waits for the scheduler looks around.
const LOOK: Duration = Duration::from_millis(50);
/// How long leaving may take before it is given up.
const LEAVE: Duration = Duration::from_secs(5);
/// How often it looks before that whether results have come that streams wait for.
const AHEAD_LOOK: Duration = Duration::from_micros(100);

/// What the thread of this rank's GPU will need, and what it is reached by once it is there.
pub(crate) struct GpuSide {
    /// What its lanes to those of the host are made of; for the first who asks.
    pub(crate) order: Mutex<Vec<(Rank, Link)>>,
    /// Wakes it.
    pub(crate) waker: Waker,
    /// The membership that they are of.
    pub(crate) epoch: Epoch,
    /// Its queue.
    pub(crate) inbox: Arc<OnceLock<GpuInbox>>,
    /// Rounds of tensors of the host that are on the GPU and were not copied down.
    pub(crate) bouncing: Arc<AtomicUsize>,
}

impl GpuSide {
    fn new(order: Vec<(Rank, Link)>, waker: Waker, epoch: Epoch) -> GpuSide {
        let (order, inbox, bouncing) = (Mutex::new(order), Arc::default(), Arc::default());
        GpuSide { order, waker, epoch, inbox, bouncing }
    }
}

/// The part of a worker that exists only if there are others.
pub(crate) struct Job {
    pub(crate) nic: NicSide,
    /// The ranks that this one reduces with, and itself.
    switches: Switches,
    /// Lanes to servers and to ranks of the group.
    lanes: usize,
    pub(crate) gpu: GpuSide,
    /// See [`start::Joined::ports`]; for the first who asks.
    ports: Mutex<Option<Result<Ports, String>>>,
    agent: Arc<Mutex<Agent>>,
    sender: LinkSender,
    answers: Arc<(Mutex<Answers>, Condvar)>,
    leaving: Arc<AtomicBool>,
    has_said_goodbye: Arc<AtomicBool>,
    /// Nodes that wait to be let in.
    newcomers: Arc<AtomicU32>,
    /// What this rank is known by when it comes back.
    session: u64,
    elastic: bool,
    /// Rounds go on without ranks that die.
    pub(crate) shrinks: bool,
    speeds: Arc<Mutex<VecDeque<Speed>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Rung when the NIC loop has ended, for threads that may sleep then.
    bells: Mutex<Vec<Arc<Bell>>>,
    /// How long callers spin before they sleep.
    spin: Duration,
    /// How long a caller waits for the scheduler or for other ranks where it does not say itself.
    /// The scheduler ends a job that stands still for less.
    patience: Duration,
    /// The same, should another scheduler have to take over meanwhile.
    patience_away: Duration,
    pub(crate) tracing: Arc<Tracing>,
}

impl Job {
    pub(crate) fn start(
        config: &Config,
        joined: start::Joined,
        declared: &Arc<Mutex<Declared>>,
    ) -> Result<Job, Error> {
        let commands: Mpsc<Command> = Mpsc::new(COMMANDS);
        let reports: Mpsc<Report> = Mpsc::new(joined.links.len() * 2 + 16);
        let report_waker =
            Waker::new().map_err(|error| StartError::resource("no eventfd", error))?;
        let statistics = Arc::new(NicStatistics::default());
        let nic = NicSide {
            commands: commands.clone(),
            waker: joined.wakers.nic.clone(),
            ended: Arc::default(),
            over: Arc::default(),
        };
        let (session, elastic) = (joined.heart.door.session, joined.roster.elastic);
        let shrinks = joined.roster.shrinks;
        let (lanes, switches) = (joined.lanes(), joined.switches(config));
        let (team, helpers) = team(config, &joined)?;
        let nic_config = nic_config(config, &joined, &switches, team);
        let (lane_count, ports) = (joined.links.len(), Mutex::new(joined.ports()));
        let gpu = GpuSide::new(joined.order, joined.wakers.gpu, joined.roster.epoch);
        let (started, has_started) = std::sync::mpsc::channel();
        let Spot { cpu, claims, .. } = places::spot(config, Poller::Nic);
        let thread = NicThread {
            commands: commands.clone(),
            reports: reports.clone(),
            report_waker,
            statistics: Arc::clone(&statistics),
            ended: Arc::clone(&nic.ended),
            over: Arc::clone(&nic.over),
            config: config.clone(),
        };
        let (links, waker) = (joined.links, joined.wakers.nic);
        let body = move || {
            let _claims = claims;
            thread.run(nic_config, links, &waker, &started);
        };
        let nic_thread = harness::spawn("bps-nic", cpu, body).map_err(no_thread)?;
        let line = has_started.recv_timeout(PATIENCE).map_err(not_started)??;
        log::info!("{line}");
        let tracing = Arc::new(Tracing::new(&joined.roster, &joined.sender, &nic, &gpu.inbox));
        let agent = Agent::new(joined.roster, lanes, switches.clone(), joined.pulse)
            .outlasting(config.scheduler_wait);
        let agent = Arc::new(Mutex::new(agent));
        let answers: Arc<(Mutex<Answers>, Condvar)> = Arc::default();
        let (leaving, speeds): (Arc<AtomicBool>, Arc<Mutex<VecDeque<Speed>>>) = Default::default();
        let (newcomers, has_said_goodbye): (Arc<AtomicU32>, Arc<AtomicBool>) = Default::default();
        let control = Control {
            agent: Arc::clone(&agent),
            declared: Arc::clone(declared),
            sender: joined.sender.clone(),
            receiver: joined.receiver,
            nic: nic.clone(),
            reports,
            answers: Arc::clone(&answers),
            leaving: Arc::clone(&leaving),
            has_said_goodbye: Arc::clone(&has_said_goodbye),
            newcomers: Arc::clone(&newcomers),
            notice: elastic.then_some(config.leave_notice),
            noticed_at: None,
            collector: Collector::new(config, vec![Arc::clone(&statistics.counters)]),
            statistics,
            heartbeat_interval: config.heartbeat_interval,
            tunes: !start::tuning(config).is_off(),
            heart: joined.heart,
            lost_at: None,
            verdict: config.heartbeat_timeout + 2 * config.heartbeat_interval,
            speeds: Arc::clone(&speeds),
            tracing: Arc::clone(&tracing),
        };
        let control_thread =
            harness::spawn("bps-control", None, move || control.run()).map_err(no_thread)?;
        let patience = config.stall_timeout + 2 * config.heartbeat_timeout;
        Ok(Job {
            nic,
            switches,
            lanes: lane_count,
            gpu,
            ports,
            agent,
            sender: joined.sender,
            answers,
            leaving,
            has_said_goodbye,
            newcomers,
            session,
            elastic,
            shrinks,
            speeds,
            threads: Mutex::new([nic_thread, control_thread].into_iter().chain(helpers).collect()),
            bells: Mutex::default(),
            spin: start::caller_spin(),
            patience,
            patience_away: patience + config.scheduler_wait,
            tracing,
        })
    }

    pub(crate) fn speed(&self) -> Option<Speed> {
        lock(&self.speeds).pop_front()
    }

    /// The ranks that reduce with this one; this one is among them.
    pub(crate) fn switches(&self) -> &Switches {
        &self.switches
    }

    /// Lanes to servers and to ranks of the group.
    pub(crate) fn lanes(&self) -> usize {
        self.lanes
    }

    /// The RDMA ports over which this rank reaches every server, or what server it reaches
    /// otherwise; none if it reaches none so. To be asked once: a port is open as long as somebody
    /// has it.
    pub(crate) fn take_ports(&self) -> Option<Result<Ports, String>> {
        lock(&self.ports).take()
    }

    /// A further thread that ends with the NIC loop.
    pub(crate) fn keep(&self, thread: JoinHandle<()>) {
        lock(&self.threads).push(thread);
    }

    /// As [`keep`](Self::keep), of one that this bell wakes.
    pub(crate) fn keep_by(&self, thread: JoinHandle<()>, bell: &Arc<Bell>) {
        lock(&self.bells).push(Arc::clone(bell));
        self.keep(thread);
    }

    /// What a caller waits for whose push is handed over now.
    pub(crate) fn task(&self) -> Arc<Task> {
        Arc::new(Task::new(self.spin, self.tracing.asked_ns()))
    }

    /// Pushed commands are there: the loop may be asleep.
    pub(crate) fn wake(&self) {
        self.nic.wake();
    }

    fn ended(&self) -> Error {
        self.nic.why_ended()
    }

    /// Why the thread of this rank's GPU has ended, if so: no more results come to the GPU.
    pub(crate) fn end_of_gpu(&self) -> Option<Error> {
        let has_ended = self.gpu.inbox.get().is_some_and(|gpu| gpu.has_ended());
        has_ended.then(|| self.ended())
    }

    /// The ids of what is new, and then of what is replaced.
    pub(crate) fn declare(&self, news: &News) -> Result<Vec<u32>, Error> {
        let mut requests = Vec::new();
        if !news.new.is_empty() {
            requests.push(self.ask(|agent| agent.declare(news.new.clone()))?);
        }
        if !news.replaced.is_empty() {
            requests.push(self.ask(|agent| agent.redeclare(news.replaced.clone()))?);
        }
        let answer = |request: u64| {
            let found = |answers: &mut Answers| answers.declares.remove(&request);
            self.answer(self.patience, found)?
                .unwrap_or_else(|| Err(Overdue::Declare { waited: self.patience }.into()))
        };
        // Each is waited for, also behind one that failed: none is left unanswered.
        let answers: Vec<Result<Vec<u32>, Error>> = requests.into_iter().map(answer).collect();
        answers.into_iter().collect::<Result<Vec<_>, _>>().map(|ids| ids.concat())
    }

    /// This rank has pushed a tensor more often than those did that have replaced it.
    pub(crate) fn overrun(&self, tensor: u32) {
        // If the scheduler can't be told, the job is over.
        let _ = self.send(&NodeMessage::Overrun { tensor });
    }

    pub(crate) fn barrier(&self, timeout: Option<Duration>) -> Result<(), Error> {
        let request = self.ask(Agent::barrier)?;
        let found = |answers: &mut Answers| {
            let position = answers.barriers.iter().position(|&done| done == request)?;
            Some(answers.barriers.swap_remove(position))
        };
        let timeout = timeout.unwrap_or(self.patience);
        match self.answer(timeout, found)? {
            Some(_) => Ok(()),
            None => Err(Overdue::Barrier { waited: timeout }.into()),
        }
    }

    /// The ranks that have died for which these bits of a result stand. A server may know of a
    /// death before this rank does.
    pub(crate) fn gone(&self, bits: u64) -> Result<Vec<Rank>, Error> {
        let named = |answers: &mut Answers| {
            let known = (0..u64::BITS).zip(answers.gone.iter().copied());
            let named = known.filter(|(bit, _)| bits >> bit & 1 == 1);
            let named: Vec<Rank> = named.map(|(_, rank)| rank).collect();
            (named.len() == bits.count_ones() as usize).then_some(named)
        };
        self.answer(NEWS, named)?.ok_or(Overdue::Gone { waited: NEWS }.into())
    }

    fn send(&self, message: &NodeMessage) -> Result<(), Error> {
        if self.leaving.load(Ordering::Acquire) || self.nic.has_ended() {
            return Err(self.ended());
        }
        self.sender.send(message).map_err(|error| {
            let source = Source::new(error);
            PeerDied::from(Death::SchedulerUnreachable { source }).into()
        })
    }

    /// Waits for an answer; `None` if the time is over first.
    fn answer<T>(
        &self,
        timeout: Duration,
        mut found: impl FnMut(&mut Answers) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let start = Instant::now();
        let (answers, changed) = &*self.answers;
        let mut answers = lock(answers);
        loop {
            if let Some(answer) = found(&mut answers) {
                return Ok(Some(answer));
            }
            if let Some(error) = &answers.over {
                return Err(error.clone());
            }
            if start.elapsed() >= timeout {
                return Ok(None);
            }
            let slice = timeout.saturating_sub(start.elapsed()).min(LOOK);
            answers = match changed.wait_timeout(answers, slice) {
                Ok((guard, _)) => guard,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }

    /// Hands a push_pull to the NIC loop. If that has ended, the handle says why.
    pub(crate) fn push(&self, tensor: TensorId, memory: Memory, priority: i64, act: Act) -> Handle {
        self.nic.push(tensor.0, memory, priority, act, self.task())
    }

    /// See [`Worker::scale_residues`](crate::Worker::scale_residues).
    pub(crate) fn scale_residues(&self, tensors: Vec<u32>, factor: f32) -> Result<(), Error> {
        self.command(Command::ScaleResidues { tensors, factor })
    }

    /// See [`Worker::kept`](crate::Worker::kept).
    pub(crate) fn kept(&self, tensor: TensorId) -> Result<Kept, Error> {
        let (to, told) = sync_channel(1);
        self.command(Command::TellKept { tensor: tensor.0, to })?;
        self.told(&told)
    }

    /// See [`Worker::keep`](crate::Worker::keep).
    pub(crate) fn keep_for(&self, tensor: TensorId, kept: Kept) -> Result<(), Error> {
        let (done, told) = sync_channel(1);
        self.command(Command::Keep { tensor: tensor.0, kept: Box::new(kept), done })?;
        self.told(&told)
    }

    /// What the NIC loop answers to a command, or a GPU's pipeline for it.
    fn told<T>(&self, told: &Receiver<T>) -> Result<T, Error> {
        self.wake();
        let is_late = |why| why == RecvTimeoutError::Timeout;
        told.recv_timeout(PATIENCE)
            .map_err(|why| if is_late(why) { Overdue::LANES.into() } else { self.ended() })
    }

    /// Hands push_pulls of tensors on the GPU to its thread. If that has ended, the handles say
    /// why.
    pub(crate) fn push_gpu(
        &self,
        items: impl Iterator<Item = GpuPushPull>,
        ready: &Arc<PooledEvent>,
    ) -> Vec<Handle> {
        let Some(gpu) = self.gpu.inbox.get() else {
            return items.map(|_| Handle::finished(Err(self.ended()))).collect();
        };
        let hand_over = |item: GpuPushPull| {
            let task = self.task();
            let GpuPushPull { tensor, source, target, priority } = item;
            let handle = Handle::of(&task);
            let ready = Arc::clone(ready);
            let push = Box::new(GpuPush { source, target, priority, task, ready });
            let given = harness::offer(push, || gpu.has_ended(), |push| gpu.push(tensor.0, push));
            if let Err(push) = given {
                let has_ended = gpu.has_ended();
                let error = if has_ended { self.ended() } else { Overdue::GPU.into() };
                push.task.finish_now(Err(error));
            }
            handle
        };
        let handles = items.map(hand_over).collect();
        gpu.wake();
        // The thread may have ended meanwhile: then nobody else empties the queue.
        if gpu.has_ended() {
            gpu.refuse(&self.ended());
        }
        handles
    }

    /// Streams are put behind the results of these: see
    /// [`Worker::enqueue_results`](crate::Worker::enqueue_results).
    pub(crate) fn want(&self, handles: &[Handle]) {
        // Without a pipeline there is nothing that could be enqueued.
        let Some(gpu) = self.gpu.inbox.get() else { return };
        let mut is_new = false;
        for handle in handles.iter().filter(|handle| !handle.is_told()) {
            handle.want();
            is_new = true;
        }
        if is_new {
            // Of a pipeline that has ended the handles tell; one that hangs is found by others.
            let _ = harness::offer((), || gpu.has_ended(), |()| gpu.want().map_err(drop));
            gpu.wake();
        }
    }

    /// Hands a command to the NIC loop.
    ///
    /// # Errors
    /// The loop has ended, or hangs.
    pub(crate) fn command(&self, command: Command) -> Result<(), Error> {
        self.nic.command(command)
    }

    /// Nodes that wait to be let in, of a job that is elastic; `None` in any other.
    pub(crate) fn newcomers(&self) -> Option<u32> {
        self.elastic.then(|| self.newcomers.load(Ordering::Relaxed))
    }

    /// Whether this rank was told to leave by SIGTERM, and has time to do so.
    pub(crate) fn is_to_leave(&self) -> bool {
        self.elastic && terminated::is_noticed()
    }

    /// Waits until all results are there for which streams of the GPU wait. They come, or the job
    /// ends by its own deadlines, and the NIC loop with it: both as a wait for a handle would have.
    /// Only a thread of the GPU that hangs would let neither be seen.
    ///
    /// # Errors
    /// What has ended the job, so that some may not have come; or none has come for longer than a
    /// job may stand still.
    pub(crate) fn settle(&self) -> Result<(), Error> {
        let ahead = || self.gpu.inbox.get().map_or(0, GpuInbox::ahead);
        let (mut last, mut since) = (ahead(), Instant::now());
        while last > 0 && !self.nic.has_ended() {
            std::thread::sleep(AHEAD_LOOK);
            let now = ahead();
            if now != last {
                (last, since) = (now, Instant::now());
            } else if since.elapsed() >= self.patience_away {
                return Err(Overdue::of_gpu(self.patience_away).into());
            }
        }
        if ahead() > 0 { Err(self.ended()) } else { Ok(()) }
    }

    /// What this rank is known by when it comes back after [`leave`](Self::leave), if it may: its
    /// epoch is over and the job is not, or it `suspend`s.
    pub(crate) fn return_ticket(&self, suspend: bool) -> Option<u64> {
        let agent = lock(&self.agent);
        // The NIC loop fails what is under way before it tells that the job is over.
        let goes_on = !agent.is_over() && self.nic.over.get().is_none();
        let suspends = suspend && self.elastic && goes_on;
        (suspends || agent.may_return()).then_some(self.session)
    }

    pub(crate) fn leave(&self, suspend: bool) -> Result<(), Error> {
        if self.leaving.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        // The end of the job says it all if they do not come.
        let _ = self.settle();
        let deadline = Instant::now() + LEAVE;
        let was_over = self.nic.over.get().cloned();
        if was_over.is_none() {
            // A loop that has ended, or hangs, is noticed below.
            let _ = self.command(Command::Leave { suspend });
            self.nic.wake();
            while !self.nic.has_ended() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
            self.wait_for_scheduler(suspend);
            // Whoever is not there any more needs no goodbye.
            self.has_said_goodbye.store(true, Ordering::Release);
            let _ = self.sender.send(&NodeMessage::Leave { suspend });
        }
        self.has_said_goodbye.store(true, Ordering::Release);
        let _ = self.command(Command::Fail { error: self.ended() });
        self.nic.wake();
        if was_over.is_none() {
            // The scheduler closes the connection then, and the control thread need not wait for
            // its next look around.
            self.sender.end();
        }
        lock(&self.bells).iter().for_each(|bell| bell.ring());
        let threads = std::mem::take(&mut *lock(&self.threads));
        let ended = threads.into_iter().try_for_each(harness::join).map_err(Overdue::Ending);
        self.tracing.stop();
        let may_return = was_over.is_some() && lock(&self.agent).may_return();
        if may_return {
            // The scheduler waits for this rank: it comes back, or it does not.
            let _ = self.sender.send(&NodeMessage::Leave { suspend });
        }
        if was_over.is_none() || may_return {
            if !self.sender.close(LEAVE) {
                log::warning!(
                    "the scheduler has not closed the connection {} s after the good-bye of this \
                     rank: it hangs or is unreachable, and may take this rank for dead; its own \
                     log says more",
                    LEAVE.as_secs()
                );
            }
        } else {
            self.sender.shutdown();
        }
        // A rank that has done its work misses nothing if an epoch ends behind it.
        let is_well = may_return && !suspend;
        was_over.filter(|_| !is_well).map_or_else(|| Ok(ended?), Err)
    }
}

fn not_started(error: RecvTimeoutError) -> StartError {
    let task = "drives the lanes";
    match error {
        RecvTimeoutError::Disconnected => StartError::ThreadEnded { task },
        RecvTimeoutError::Timeout => StartError::ThreadSilent { task, waited: PATIENCE },
    }
}

fn no_thread(error: std::io::Error) -> Error {
    StartError::resource("no thread", error).into()
}

/// The team of the NIC loop, and the threads of its helpers, which end with it. They are started
/// here and not by the loop's thread, which may be pinned.
fn team(config: &Config, joined: &start::Joined) -> Result<(Team, Vec<JoinHandle<()>>), Error> {
    let shares_memory = joined.links.iter().any(|(_, link)| matches!(link, Link::Shm(_)));
    let count = if shares_memory { start::helpers(config) } else { 0 };
    if count > 0 {
        log::info!("threads that help the NIC loop within the host: {count} (BPS_NIC_HELPERS)");
    }
    let (team, helpers) = Team::with_helpers(count);
    let spawn = |helper: Helper| harness::spawn("bps-helper", None, || helper.run());
    let threads = helpers.into_iter().map(spawn).collect::<Result<_, _>>().map_err(no_thread)?;
    Ok((team, threads))
}

fn nic_config(
    config: &Config,
    joined: &start::Joined,
    switches: &Switches,
    team: Team,
) -> NicConfig {
    let rank = Rank(joined.roster.index);
    NicConfig {
        rank,
        size: joined.roster.size,
        epoch: joined.roster.epoch,
        credit_bytes: start::credit_bytes(config, joined.lanes().cores.len()),
        column: switches.others_of_column(rank).collect(),
        stall_report: config.stall_report,
        auto: config.auto_compression,
        keeps: joined.roster.shrinks,
        paces: rank == Rank(0) && !start::tuning(config).is_off(),
        team,
    }
}
