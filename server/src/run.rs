//! A server process from start to end: its listeners, its threads, and what they tell each other.

#![forbid(unsafe_code)]

use crate::agent::{Agent, Effect};
use crate::cores::{QUEUE, ShardHandle, start_shard};
use crate::error::{ServerError, resource};
use crate::listen::{listen_tcp, listen_unix, start_acceptor};
use crate::shard::{Command, Report};
use crate::shown::Shown;
use crate::signals::{SIGTERM_NAME, Signals};
use crate::timeline::Tracing;
use bps_engine::config::{Config, Program};
use bps_engine::control::{
    ControlLink, Door, Found, JobKey, Knocker, LinkError, LinkReceiver, LinkSender, Listener,
    Progress, Redial, ask_time, take_time,
};
use bps_engine::harness::{self};
use bps_engine::host::{self, HostError};
use bps_engine::metrics::Collector;
use bps_engine::proto::messages::{Node, NodeMessage, Register, SchedulerMessage};
use bps_engine::proto::pulse::Pulse;
use bps_engine::ring::Mpsc;
use bps_engine::topo::claim::Claims;
use bps_engine::topo::plan::{Near, Place, Request, Side, plan};
use bps_engine::topo::{Topology, pin};
use bps_engine::trace::log;
use bps_engine::transport::Waker;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Descriptors that a server may open, if the hard limit lets it: several for each lane.
const DESCRIPTORS: u64 = 1 << 20;
/// How much longer than the scheduler a server waits for the job to form: the scheduler knows what
/// is missing, and gets the time to say so.
const FORMING_GRACE: Duration = Duration::from_secs(2);
/// How often the control thread looks around when nothing comes.
const CONTROL_TICK: Duration = Duration::from_millis(50);
/// The same while there is no scheduler.
const LOOK: Duration = Duration::from_millis(10);

/// `bps-server`: reads flags and variables, runs, and returns the exit code: 0 the job finished, 1
/// it failed or could not start, 2 a flag or variable is wrong, 130 or 143 a signal ended it.
pub fn cli(arguments: impl IntoIterator<Item = OsString>) -> i32 {
    let loaded = match bps_engine::config::open(Program::Server, arguments) {
        Ok(loaded) => loaded,
        Err(code) => return code,
    };
    match run(&loaded.config) {
        Ok(()) => 0,
        Err(error) => {
            log::error!("{error}");
            error.code()
        }
    }
}

/// Runs a server until its job is over.
///
/// # Errors
/// See [`ServerError`]; each says what to do.
pub fn run(config: &Config) -> Result<(), ServerError> {
    log::init(config.log_level, "server");
    let key = JobKey::load(config)?;
    let stop = Signals::install()?;
    let address = listen_address(config, &stop)?;
    host::raise_descriptor_limit(DESCRIPTORS);
    let (listeners, cores) = listen_tcp(config, address)?;
    let (unix_listeners, shm_name) = listen_unix(config)?;
    let reports: Mpsc<(u32, Report)> = Mpsc::new(QUEUE);
    let report_waker = Waker::new().map_err(|error| resource("an eventfd", error))?;
    let mut shards = Vec::new();
    let mut threads = Vec::new();
    let (places, pinning, _claims) = places(config);
    for core in 0..config.server_cores {
        let place = places[core as usize];
        let (shard, thread, line) = start_shard(config, core, place, &reports, &report_waker)?;
        if core == 0 {
            let number = match config.server_cores {
                1 => "1 core".to_owned(),
                cores => format!("{cores} cores"),
            };
            log::info!("{number} on {address}; {pinning}; {line}");
        }
        shards.push(shard);
        threads.push(thread);
    }
    let shown = Arc::new(Shown::default());
    let _exporter = shown.serve(config)?;
    let all: Vec<Listener> = listeners.into_iter().chain(unix_listeners).collect();
    let acceptor = start_acceptor(all, key.clone(), config.encrypt, shards.clone())?;
    let dial =
        || ControlLink::connect(&config.root_uri, config.root_port, &key, config.start_timeout);
    let link = stop.while_alone(dial)?.map_err(ServerError::NoScheduler)?;
    let fail = |error: std::io::Error| ServerError::SchedulerLost(LinkError::Lost(error));
    link.notice_loss_after(config.heartbeat_timeout).map_err(fail)?;
    let (session, door) = (link.session(), link.door(&key).map_err(fail)?);
    let address = door.address.to_string();
    let (interval, timeout) = (config.heartbeat_interval, config.heartbeat_timeout);
    let pulse = Pulse::new(&address, interval, timeout, Duration::ZERO);
    let (sender, receiver) = link.split();
    let takes_rdma = shards.iter().all(|shard| shard.rails.is_some());
    let register = register(config, cores, shm_name, takes_rdma, session);
    let root = (config.root_uri.as_str(), config.root_port);
    let redial = Redial::new(root, &key, session, (interval, timeout));
    sender.send(&NodeMessage::Register(register.clone()))?;
    let agent = Agent::new(config.server_cores, pulse).with_encryption(config.encrypt);
    let agent = agent.outlasting(config.scheduler_wait);
    let control = Control {
        agent: Arc::new(Mutex::new(agent)),
        door: Arc::new(Mutex::new(door)),
        knocker: Arc::default(),
        shards: shards.clone(),
        sender,
        done: Arc::new(AtomicBool::new(false)),
        tracing: Arc::new(Tracing::new(config, key.is_open())),
        shown,
    };
    let tracing = Arc::clone(&control.tracing);
    let way = Way { receiver, is_cut: false, redial, register };
    let result = control.run(config, way, &reports, &report_waker, &stop);
    acceptor.stop();
    // A core that hangs ends with this process.
    let told: Result<Vec<()>, _> = shards.iter().map(|shard| shard.send(Command::Stop)).collect();
    let ended = told.and_then(|_| Ok(threads.into_iter().try_for_each(harness::join)?));
    tracing.finish();
    result.and(ended)
}

/// The address to listen on. Nodes start in any order, so the scheduler's name may not resolve yet:
/// it is looked up until the job should have formed.
fn listen_address(config: &Config, stop: &Signals) -> Result<IpAddr, ServerError> {
    let mut told = false;
    let waiting = |error: &HostError| {
        if !std::mem::replace(&mut told, true) {
            log::warning!(
                "{error}: trying again for {} s (BPS_START_TIMEOUT)",
                config.start_timeout.as_secs()
            );
        }
        stop.came().is_none()
    };
    match host::wait_for_listen_address(config, config.start_timeout, waiting) {
        Ok(address) => Ok(address),
        Err(error) => Err(match stop.came() {
            Some(signal) => ServerError::Signal(signal),
            None => ServerError::Address(error),
        }),
    }
}

/// Where each core's thread and memory go, a line about it, and what keeps others from those CPUs.
fn places(config: &Config) -> (Vec<Place>, String, Option<Claims>) {
    let nowhere = vec![Place { cpu: None, memory_node: None }; config.server_cores as usize];
    if !config.pin {
        return (nowhere, "not pinned (BPS_PIN=0)".into(), None);
    }
    let topology = match Topology::read(Path::new("/")) {
        Ok(topology) => topology,
        Err(error) => return (nowhere, format!("not pinned: {error}"), None),
    };
    let near = config.interface.clone().map_or(Near::Anywhere, Near::Nic);
    let threads = vec![near; config.server_cores as usize];
    let affinity = pin::affinity().unwrap_or_default();
    // One CPU is left for the kernel's own work and our control threads.
    let request = Request {
        side: Side::Last,
        threads: &threads,
        affinity: &affinity,
        others: 1,
        use_isolated: false,
    };
    let mut claims = Claims::open();
    let mut plan = plan(&topology, &request);
    let settle = |thread| claims.settle(&topology, &request, &plan, thread);
    plan.places = (0..threads.len()).map(settle).collect();
    let line = plan.note.clone().unwrap_or_else(|| plan.describe());
    (plan.places, line, Some(claims))
}

fn register(
    config: &Config,
    cores: Vec<SocketAddr>,
    shm: Option<String>,
    rdma: bool,
    session: u64,
) -> Register {
    let preferred = config.preferred_rank;
    Register {
        node: Node::Server { cores, shm, rdma, colocated: false, preferred },
        host: host::name(),
        host_id: config.host_id.clone().unwrap_or_else(host::id),
        pid: std::process::id(),
        instance: host::instance(),
        session,
        former: None,
        release: env!("CARGO_PKG_VERSION").into(),
        num_workers: config.num_workers,
        num_servers: config.num_servers,
        encrypt: config.encrypt,
    }
}

/// The way to the scheduler, and to another one.
struct Way {
    receiver: LinkReceiver,
    /// It is of no use any more.
    is_cut: bool,
    redial: Redial,
    register: Register,
}

impl Way {
    /// Carries out what is for the way alone.
    fn take_steps(&mut self, effects: &mut Vec<Effect>, agent: &Mutex<Agent>, now: Duration) {
        effects.retain(|effect| {
            match effect {
                Effect::Redial(true) => {
                    if let Err(error) = self.redial.dial() {
                        log::warning!("no thread: {error}");
                        agent.lock().unwrap_or_else(PoisonError::into_inner).not_found(now);
                    }
                }
                Effect::Redial(false) => self.redial.forget(),
                _ => return true,
            }
            false
        });
    }
}

/// What the two control threads share: one reads the scheduler, the other the shards.
#[derive(Clone)]
struct Control {
    agent: Arc<Mutex<Agent>>,
    shards: Vec<ShardHandle>,
    sender: LinkSender,
    done: Arc<AtomicBool>,
    door: Arc<Mutex<Door>>,
    knocker: Arc<Mutex<Option<Knocker>>>,
    tracing: Arc<Tracing>,
    shown: Arc<Shown>,
}

impl Control {
    fn run(
        self,
        config: &Config,
        mut way: Way,
        reports: &Mpsc<(u32, Report)>,
        report_waker: &Waker,
        stop: &Signals,
    ) -> Result<(), ServerError> {
        let reporter = {
            let (control, reports, waker) = (self.clone(), reports.clone(), report_waker.clone());
            let interval = config.heartbeat_interval;
            let counters = self.shards.iter().map(|shard| Arc::clone(&shard.counters)).collect();
            let mut collector = Collector::new(config, counters);
            let body = move || control.report(&reports, &waker, interval, &mut collector);
            harness::spawn("bps-report", None, body).map_err(|error| resource("a thread", error))?
        };
        let mut effects = Vec::new();
        let began = Instant::now();
        let form_by = Instant::now() + config.start_timeout + FORMING_GRACE;
        let outcome = loop {
            if let Some((signal, message)) = self.is_stopped(config, stop, &began, &mut effects) {
                let _ = self.sender.send(&NodeMessage::failed(message));
                break Err(ServerError::Signal(signal));
            }
            ask_time(&self.tracing.clock, &self.sender);
            let received = self.receive(&mut way, began.elapsed(), &mut effects);
            if let Ok(Some(SchedulerMessage::Clock(answer))) = &received {
                take_time(&self.tracing.clock, answer, &self.sender);
            }
            {
                let (mut agent, now) = (self.agent(), began.elapsed());
                match received {
                    Ok(Some(message)) => agent.handle(message, now, &mut effects),
                    Ok(None) => {}
                    Err(error) => {
                        way.is_cut = true;
                        let line = error.line(agent.scheduler());
                        agent.scheduler_lost(line, now, &mut effects);
                    }
                }
                let knocker = self.knocker.lock().unwrap_or_else(PoisonError::into_inner);
                while let Some(answer) = knocker.as_ref().and_then(Knocker::answer) {
                    agent.handle_aside(answer, now, &mut effects);
                }
                agent.handle_tick(now, &mut effects);
            }
            way.take_steps(&mut effects, &self.agent, began.elapsed());
            if let Some(well) = self.carry_out(&mut effects) {
                break if well { Ok(()) } else { Err(ServerError::Job) };
            }
            if !self.is_formed() && Instant::now() >= form_by {
                break Err(ServerError::NotFormed {
                    waited: config.start_timeout,
                    scheduler: format!("{}:{}", config.root_uri, config.root_port),
                });
            }
        };
        self.done.store(true, Ordering::Release);
        report_waker.ring();
        outcome.and_then(|()| Ok(harness::join(reporter)?))
    }

    /// The signal that ends this server now, if one does, and what to say of it. The first SIGTERM
    /// is a notice where the job can do without this server.
    fn is_stopped(
        &self,
        config: &Config,
        stop: &Signals,
        began: &Instant,
        effects: &mut Vec<Effect>,
    ) -> Option<(&'static str, String)> {
        let (mut agent, now) = (self.agent(), began.elapsed());
        if agent.leaves_by().is_some_and(|by| now >= by) {
            let notice = config.leave_notice;
            let message = format!(
                "it was stopped by SIGTERM, and the job could not let it go within {notice:?} \
                 (BPS_LEAVE_NOTICE)"
            );
            return Some((SIGTERM_NAME, message));
        }
        let signal = stop.came()?;
        if signal == SIGTERM_NAME && agent.leave(config.leave_notice, now, effects) {
            stop.take_notice();
            return None;
        }
        Some((signal, format!("it was stopped by {signal}")))
    }

    /// What the scheduler says next; of another one, where this one is lost, once it leads the job.
    fn receive(
        &self,
        way: &mut Way,
        now: Duration,
        effects: &mut Vec<Effect>,
    ) -> Result<Option<SchedulerMessage>, LinkError> {
        if !self.agent().is_away() {
            return way.receiver.receive(CONTROL_TICK);
        }
        let was_asking = way.redial.is_asking();
        match way.redial.poll(CONTROL_TICK) {
            Progress::None | Progress::Says(SchedulerMessage::Heartbeat) => {}
            Progress::Connected => {
                let messages = self.agent().resume(way.register.clone());
                way.redial.ask(&messages);
                self.tell_asking(way, true);
            }
            Progress::Says(message) => return Ok(Some(message)),
            Progress::Leads { found, term } => self.follow(way, (*found, term), now, effects),
            Progress::Failed => {
                self.agent().not_found(now);
                if was_asking {
                    self.tell_asking(way, false);
                }
            }
        }
        if way.redial.is_asking() {
            return Ok(None);
        }
        if way.is_cut {
            std::thread::sleep(LOOK);
            return Ok(None);
        }
        way.receiver.receive(LOOK)
    }

    /// Tells the scheduler that was silent, which reads it when it goes on, whether another one was
    /// asked. One that can't be written to is lost.
    fn tell_asking(&self, way: &Way, another: bool) {
        if !way.is_cut {
            let _ = self.sender.send(&NodeMessage::Asks { another });
        }
    }

    /// Goes over to another scheduler.
    fn follow(
        &self,
        way: &mut Way,
        (found, term): (Found, u32),
        now: Duration,
        effects: &mut Vec<Effect>,
    ) {
        let Found { sender, receiver, door } = found;
        let mut agent = self.agent();
        let Some(told) = agent.follow(term, now, effects) else {
            return self.tell_asking(way, false);
        };
        // If it was only stopped, it learns so that it is followed no more.
        if !way.is_cut {
            let _ = self.sender.send(&NodeMessage::Deposed { term });
        }
        self.sender.replace(sender);
        (way.receiver, way.is_cut) = (receiver, false);
        *self.door.lock().unwrap_or_else(PoisonError::into_inner) = door;
        for message in told {
            // If that fails, `receive` finds the connection closed.
            let _ = self.sender.send(&message);
        }
    }

    /// Whether the roster has come.
    fn is_formed(&self) -> bool {
        self.agent().index().is_some()
    }

    fn agent(&self) -> MutexGuard<'_, Agent> {
        self.agent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn knock(&self, round_trip: Option<Duration>) {
        let knocker = round_trip.and_then(|round_trip| {
            let door = self.door.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let started = Knocker::start(Door { round_trip, ..door });
            started.inspect_err(|error| log::warning!("no thread: {error}")).ok()
        });
        *self.knocker.lock().unwrap_or_else(PoisonError::into_inner) = knocker;
    }

    /// Passes on what the shards report and count.
    fn report(
        &self,
        reports: &Mpsc<(u32, Report)>,
        waker: &Waker,
        interval: Duration,
        collector: &mut Collector,
    ) {
        let mut told = Instant::now();
        let mut effects = Vec::new();
        while !self.done.load(Ordering::Acquire) {
            waker.prepare();
            if reports.is_empty()
                && let Ok(timeout) = Timespec::try_from(interval / 2)
            {
                // An interrupted or failed wait is a short one.
                let _ = poll(&mut [PollFd::new(&waker.fd(), PollFlags::IN)], Some(&timeout));
            }
            waker.awake();
            while let Some((core, report)) = reports.pop() {
                let mut agent = self.agent();
                agent.handle_report(core, report, &mut effects);
            }
            self.carry_out(&mut effects);
            if told.elapsed() >= interval {
                told = Instant::now();
                let index = self.agent().index();
                if let Some(statistics) = self.shown.take(index, collector) {
                    let _ = self.sender.send(&NodeMessage::Statistics(statistics));
                }
            }
        }
    }

    /// A core that takes no commands ends the job, badly.
    fn hangs(&self, sent: Result<(), ServerError>) -> Option<bool> {
        let error = sent.err()?;
        log::error!("{error}");
        let _ = self.sender.send(&NodeMessage::failed(error.to_string()));
        Some(false)
    }

    /// Returns how the job ended, if it did.
    fn carry_out(&self, effects: &mut Vec<Effect>) -> Option<bool> {
        let mut over = None;
        for effect in effects.drain(..) {
            match effect {
                Effect::Shard(core, command) => {
                    let sent = self.shards[core as usize].send(command);
                    over = self.hangs(sent).or(over);
                }
                Effect::Send(message) => {
                    let _ = self.sender.send(&message);
                }
                Effect::Beat => {
                    // A scheduler that can't be written to is noticed by the thread that reads it.
                    let rounds = self.shards.iter().map(|shard| shard.counters.rounds.read()).sum();
                    let _ = self.sender.send(&NodeMessage::Heartbeat { rounds });
                }
                Effect::Knock(round_trip) => self.knock(round_trip),
                // The control thread has taken these.
                Effect::Redial(_) => {}
                Effect::Timeline(server, timeline) => {
                    let recorders = self.tracing.apply(server, timeline.as_ref());
                    for (shard, recorder) in self.shards.iter().zip(recorders) {
                        over = self.hangs(shard.send(Command::Trace(recorder))).or(over);
                    }
                    if timeline.is_none() {
                        self.tracing.finish();
                    }
                }
                Effect::Info(line) => log::info!("{line}"),
                Effect::Warn(line) => log::warning!("{line}"),
                Effect::Changed(line) => {
                    log::warning!("{line}");
                    self.tracing.note(&line);
                }
                Effect::Over(well) => over = Some(well),
            }
        }
        over
    }
}
