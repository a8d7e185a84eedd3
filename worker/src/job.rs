//! A worker's place in a job of several ranks: its two threads, and how callers reach them.

use crate::agent::Agent;
use crate::control::{Answers, Control, lock};
use crate::declared::{Declared, News};
use crate::error::Error;
use crate::gpu::{PooledEvent, Push};
use crate::nic::{self, Command, Memory, Nic, NicConfig, NicStatistics, Report};
use crate::places::{self, Poller, Spot};
use crate::start;
use crate::switches::Switches;
use crate::task::{Handle, Task};
use crate::timeline::Tracing;
use crate::types::{GpuPushPull, PushPull, Speed};
use bps_engine::base::Rank;
use bps_engine::config::Config;
use bps_engine::control::LinkSender;
use bps_engine::harness::{self, Idler, Step};
use bps_engine::metrics::Collector;
use bps_engine::proto::messages::NodeMessage;
use bps_engine::ring::Mpsc;
use bps_engine::trace::counters::Counters;
use bps_engine::trace::log;
use bps_engine::transport::Waker;
use bps_engine::transport::rdma::Ports;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Commands that may wait for the NIC loop.
const COMMANDS: usize = 4096;
/// How often a caller that waits for the scheduler looks around.
const LOOK: Duration = Duration::from_millis(50);
/// How long leaving may take before it is given up.
const LEAVE: Duration = Duration::from_secs(5);

/// The part of a worker that exists only if there are others.
pub(crate) struct Job {
    pub(crate) commands: Mpsc<Command>,
    pub(crate) nic_waker: Waker,
    /// The NIC loop takes no more commands: set before its last look at the queue.
    pub(crate) nic_ended: Arc<AtomicBool>,
    /// The ranks that this one reduces with, and itself.
    switches: Switches,
    /// Lanes to servers and to ranks of the group.
    lanes: usize,
    /// See [`start::Joined::ports`]; for the first who asks.
    ports: Mutex<Option<Result<Ports, String>>>,
    pub(crate) over: Arc<OnceLock<Error>>,
    agent: Arc<Mutex<Agent>>,
    sender: LinkSender,
    answers: Arc<(Mutex<Answers>, Condvar)>,
    leaving: Arc<AtomicBool>,
    speeds: Arc<Mutex<VecDeque<Speed>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// How long callers spin before they sleep.
    spin: Duration,
    /// How long a caller waits for the scheduler or for other ranks where it does not say itself.
    /// The scheduler ends a job that stands still for less.
    patience: Duration,
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
        let nic_waker = joined.waker.clone();
        let report_waker =
            Waker::new().map_err(|error| Error::Start(format!("no eventfd: {error}")))?;
        let statistics = Arc::new(NicStatistics::default());
        let (nic_ended, over) = (Arc::new(AtomicBool::new(false)), Arc::new(OnceLock::new()));
        let rank = Rank(joined.roster.index);
        let (lanes, switches) = (joined.lanes(), joined.switches(config));
        let nic_config = nic_config(config, &joined, &switches);
        let (lane_count, ports) = (joined.links.len(), Mutex::new(joined.ports()));
        let (started, has_started) = std::sync::mpsc::channel();
        let Spot { cpu, claims, .. } = places::spot(config, Poller::Nic);
        let nic_thread = {
            let (commands, reports, statistics) =
                (commands.clone(), reports.clone(), Arc::clone(&statistics));
            let (ended, over, config) = (Arc::clone(&nic_ended), Arc::clone(&over), config.clone());
            let (links, waker) = (joined.links, joined.waker);
            let body = move || {
                let _claims = claims;
                let made = start::nic(
                    &config,
                    nic_config,
                    links,
                    &waker,
                    &commands,
                    &reports,
                    report_waker,
                    &statistics,
                );
                match made {
                    Ok((nic, line)) => {
                        let _ = started.send(Ok(line));
                        let counters = Arc::clone(&statistics.counters);
                        run_nic(nic, counters, &config, &ended, &over);
                    }
                    Err(error) => {
                        let _ = started.send(Err(error));
                    }
                }
            };
            harness::spawn("bps-nic", cpu, body)
        };
        let nic_thread = nic_thread.map_err(|error| Error::Start(format!("no thread: {error}")))?;
        let line = has_started
            .recv()
            .map_err(|_| Error::Start("the NIC thread ended at once".into()))??;
        log::info!("{line}");
        let tracing =
            Arc::new(Tracing::new(rank, &joined.sender, &commands, &nic_waker, &nic_ended));
        let agent = Agent::new(joined.roster, lanes, switches.clone(), joined.pulse);
        let agent = Arc::new(Mutex::new(agent));
        let answers: Arc<(Mutex<Answers>, Condvar)> = Arc::default();
        let (leaving, speeds): (Arc<AtomicBool>, Arc<Mutex<VecDeque<Speed>>>) = Default::default();
        let control = Control {
            agent: Arc::clone(&agent),
            declared: Arc::clone(declared),
            sender: joined.sender.clone(),
            receiver: joined.receiver,
            commands: commands.clone(),
            nic_waker: nic_waker.clone(),
            nic_ended: Arc::clone(&nic_ended),
            reports,
            answers: Arc::clone(&answers),
            leaving: Arc::clone(&leaving),
            collector: Collector::new(config, vec![Arc::clone(&statistics.counters)]),
            statistics,
            heartbeat_interval: config.heartbeat_interval,
            heart: joined.heart,
            lost_at: None,
            verdict: config.heartbeat_timeout + 2 * config.heartbeat_interval,
            speeds: Arc::clone(&speeds),
            tracing: Arc::clone(&tracing),
        };
        let control_thread = harness::spawn("bps-control", None, move || control.run())
            .map_err(|error| Error::Start(format!("no thread: {error}")))?;
        Ok(Job {
            commands,
            nic_waker,
            nic_ended,
            switches,
            lanes: lane_count,
            ports,
            over,
            agent,
            sender: joined.sender,
            answers,
            leaving,
            speeds,
            threads: Mutex::new(vec![nic_thread, control_thread]),
            spin: start::caller_spin(),
            patience: config.stall_timeout + 2 * config.heartbeat_timeout,
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

    /// Pushed commands are there: the loop may be asleep.
    pub(crate) fn wake(&self) {
        self.nic_waker.wake();
    }

    fn ended(&self) -> Error {
        let closed = || Error::Closed("this worker has shut down: call init() first".into());
        self.over.get().cloned().unwrap_or_else(closed)
    }

    /// The ids of what is new, and then of what is replaced.
    pub(crate) fn declare(&self, news: &News) -> Result<Vec<u32>, Error> {
        let mut requests = Vec::new();
        if !news.new.is_empty() {
            requests.push(lock(&self.agent).declare(news.new.clone()));
        }
        if !news.replaced.is_empty() {
            requests.push(lock(&self.agent).redeclare(news.replaced.clone()));
        }
        for (_, message) in &requests {
            self.send(message)?;
        }
        let answer = |(request, _): (u64, NodeMessage)| {
            let found = |answers: &mut Answers| answers.declares.remove(&request);
            self.answer(self.patience, found)?.unwrap_or_else(|| {
                Err(Error::Timeout(format!(
                    "declare: the scheduler answers heartbeats, but not this, for {:.0} s: read \
                     its log",
                    self.patience.as_secs_f64()
                )))
            })
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
        let (request, message) = lock(&self.agent).barrier();
        self.send(&message)?;
        let found = |answers: &mut Answers| {
            let position = answers.barriers.iter().position(|&done| done == request)?;
            Some(answers.barriers.swap_remove(position))
        };
        let timeout = timeout.unwrap_or(self.patience);
        match self.answer(timeout, found)? {
            Some(_) => Ok(()),
            None => Err(Error::Timeout(format!(
                "barrier: not all ranks came within {:.1} s",
                timeout.as_secs_f64()
            ))),
        }
    }

    fn send(&self, message: &NodeMessage) -> Result<(), Error> {
        if self.leaving.load(Ordering::Acquire) || self.nic_ended.load(Ordering::Acquire) {
            return Err(self.ended());
        }
        self.sender
            .send(message)
            .map_err(|error| Error::PeerDied(format!("the scheduler can't be reached: {error}")))
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
    pub(crate) fn push(&self, item: &PushPull) -> Handle {
        let task = Arc::new(Task::new(self.spin, self.tracing.asked_ns()));
        let memory = Memory { source: item.source, target: item.target };
        let command = Command::Push {
            tensor: item.tensor.0,
            memory,
            priority: item.priority,
            task: Arc::clone(&task),
        };
        if self.command(command) { Handle(task) } else { Handle::finished(Err(self.ended())) }
    }

    /// Hands a push_pull of a tensor on the GPU to the NIC loop, as [`push`](Self::push).
    pub(crate) fn push_gpu(&self, item: &GpuPushPull, ready: &Arc<PooledEvent>) -> Handle {
        let task = Arc::new(Task::new(self.spin, self.tracing.asked_ns()));
        let push = Push {
            source: item.source,
            target: item.target,
            priority: item.priority,
            task: Arc::clone(&task),
            ready: Arc::clone(ready),
        };
        let command = Command::PushGpu { tensor: item.tensor.0, push: Box::new(push) };
        if self.command(command) { Handle(task) } else { Handle::finished(Err(self.ended())) }
    }

    /// Hands a command to the NIC loop; says whether the loop is still there.
    pub(crate) fn command(&self, mut command: Command) -> bool {
        loop {
            if self.nic_ended.load(Ordering::Acquire) {
                return false;
            }
            match self.commands.push(command) {
                Ok(()) => break,
                Err(back) => command = back,
            }
            self.nic_waker.wake();
            std::thread::yield_now();
        }
        // The loop may have ended between the look and the push: then nobody else empties the
        // queue.
        if self.nic_ended.load(Ordering::SeqCst) {
            nic::drain(&self.commands, &self.ended());
        }
        true
    }

    pub(crate) fn leave(&self, suspend: bool) -> Result<(), Error> {
        if self.leaving.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let deadline = Instant::now() + LEAVE;
        let was_over = self.over.get().cloned();
        if was_over.is_none() {
            let _ = self.commands.push(Command::Leave);
            self.nic_waker.wake();
            while !self.nic_ended.load(Ordering::Acquire) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
            // Whoever is not there any more needs no goodbye.
            let _ = self.sender.send(&NodeMessage::Leave { suspend });
        }
        let _ = self.commands.push(Command::Fail { error: self.ended() });
        self.nic_waker.wake();
        for thread in lock(&self.threads).drain(..) {
            // The harness aborts the process when a thread panics, so joining can't fail otherwise.
            let _ = thread.join();
        }
        self.tracing.stop();
        was_over.map_or(Ok(()), Err)
    }
}

fn nic_config(config: &Config, joined: &start::Joined, switches: &Switches) -> NicConfig {
    let rank = Rank(joined.roster.index);
    NicConfig {
        rank,
        size: joined.roster.size,
        epoch: joined.roster.epoch,
        credit_bytes: start::credit_bytes(config, joined.lanes().cores.len()),
        column: switches.others_of_column(rank).collect(),
        stall_report: config.stall_report,
        say,
    }
}

/// The one line that every survivor prints.
fn say(error: &Error) {
    if !matches!(error, Error::Closed(_)) {
        log::error!("{error}");
    }
}

fn run_nic(
    mut nic: Nic,
    counters: Arc<Counters>,
    config: &Config,
    ended: &AtomicBool,
    over: &OnceLock<Error>,
) {
    let began = Instant::now();
    let mut idler = Idler::counting(config.idle, start::spin(), counters);
    while !nic.ended() {
        let progress = nic.step(began.elapsed());
        idler.expect(nic.is_awaiting());
        let step = idler.step(progress);
        if idler.is_sample_due() {
            nic.sample();
        }
        if step == Step::Sleep {
            nic.sleep(Duration::from_millis(500));
        }
    }
    nic.end(ended, over);
}
