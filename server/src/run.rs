//! A server process from start to end: its listeners, its threads, and what they tell each other.

use crate::agent::{Agent, Effect};
use crate::listen::{listen_tcp, listen_unix, start_acceptor};
use crate::shard::{Command, Report, Shard};
use crate::shown::Shown;
use crate::signals::Signals;
use crate::timeline::Tracing;
use bps_engine::config::{Config, Program, TransportChoice};
use bps_engine::control::{
    Door, JobKey, Knocker, Link, LinkReceiver, LinkSender, Listener, ask_time, take_time,
};
use bps_engine::harness::{self, Idler, Step};
use bps_engine::host::{self, HostError};
use bps_engine::lane::Endpoint;
use bps_engine::limits::RANKS_MAX;
use bps_engine::mem::{Arena, Options};
use bps_engine::metrics::{Collector, MetricsError};
use bps_engine::proto::messages::{Node, NodeMessage, Register, SchedulerMessage};
use bps_engine::proto::pulse::Pulse;
use bps_engine::ring::Mpsc;
use bps_engine::topo::claim::Claims;
use bps_engine::topo::plan::{Near, Place, Request, Side, plan};
use bps_engine::topo::{Topology, pin};
use bps_engine::trace::counters::Counters;
use bps_engine::trace::log;
use bps_engine::transport::rdma::{self, Rails, Rdma, RdmaOptions};
use bps_engine::transport::shm::{self, Shm};
use bps_engine::transport::tcp::Tcp;
use bps_engine::transport::{self, Transport, Waker};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Commands that may wait for a shard, and reports that may wait for the control thread.
const QUEUE: usize = 4096;
/// Descriptors that a server may open, if the hard limit lets it: several for each lane.
const DESCRIPTORS: u64 = 1 << 20;
/// How much longer than the scheduler a server waits for the job to form: the scheduler knows what
/// is missing, and gets the time to say so.
const FORMING_GRACE: Duration = Duration::from_secs(2);
/// How often the control thread looks around when nothing comes.
const CONTROL_TICK: Duration = Duration::from_millis(50);
/// Why a server could not start, or how its job ended.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// A setting that only shows to be wrong when used.
    #[error("{0}")]
    Config(String),
    /// An address can't be listened on.
    #[error("can't listen on {address}: {error}; {remedy}")]
    Listen {
        /// Which.
        address: String,
        /// What the kernel said.
        error: std::io::Error,
        /// What to do.
        remedy: &'static str,
    },
    /// A thread, descriptor or memory is missing.
    #[error("{0}")]
    Resource(String),
    /// Metrics can't be shown where they should be.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    /// The scheduler can't be reached.
    #[error("{0}")]
    Scheduler(String),
    /// The job ended badly; what happened was said before.
    #[error("the job ended with an error")]
    Job,
    /// A signal ended this server.
    #[error("stopped by {0}")]
    Signal(&'static str),
}

/// What the other threads hold of a shard.
#[derive(Clone)]
pub(crate) struct ShardHandle {
    commands: Mpsc<Command>,
    waker: Waker,
    counters: Arc<Counters>,
    memory: Option<SharedMemory>,
    rails: Option<Arc<Rails>>,
}

/// An arena that workers of this host may map, and its length.
type SharedMemory = Arc<(OwnedFd, usize)>;

impl ShardHandle {
    /// Sets up shared memory with a worker of this host.
    pub(crate) fn accept(&self, stream: &UnixStream) -> std::io::Result<transport::Link> {
        let arena = self.memory.as_deref().map(|(memfd, length)| (memfd.as_fd(), *length));
        shm::accept(stream, &self.waker, arena).map(transport::Link::Shm)
    }

    /// Sets RDMA up with a worker; what goes wrong is told to both.
    pub(crate) fn accept_rdma(&self, stream: TcpStream) -> Result<transport::Link, String> {
        let rails = self.rails.as_ref().ok_or("this server has no RDMA")?;
        rdma::accept(stream, rails, RdmaOptions::default())
            .map(|link| transport::Link::Rdma(Box::new(link)))
            .map_err(|error| error.to_string())
    }

    pub(crate) fn send(&self, mut command: Command) {
        while let Err(back) = self.commands.push(command) {
            command = back;
            self.waker.wake();
            std::thread::yield_now();
        }
        self.waker.wake();
    }
}

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
            match error {
                ServerError::Config(_) | ServerError::Metrics(_) => 2,
                ServerError::Signal("SIGTERM") => 143,
                ServerError::Signal(_) => 130,
                _ => 1,
            }
        }
    }
}

/// Runs a server until its job is over.
///
/// # Errors
/// See [`ServerError`]; each says what to do.
pub fn run(config: &Config) -> Result<(), ServerError> {
    log::init(config.log_level, "server");
    let key = JobKey::load(config).map_err(|error| ServerError::Config(error.to_string()))?;
    let stop = Signals::install()?;
    let address = listen_address(config, &stop)?;
    host::raise_descriptor_limit(DESCRIPTORS);
    let (listeners, cores) = listen_tcp(config, address)?;
    let (unix_listeners, shm_name) = listen_unix(config)?;
    let reports: Mpsc<(u32, Report)> = Mpsc::new(QUEUE);
    let report_waker = Waker::new().map_err(|error| resource("an eventfd", &error))?;
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
    let acceptor = start_acceptor(all, key.clone(), shards.clone())?;
    let dial = || Link::connect(&config.root_uri, config.root_port, &key, config.start_timeout);
    let link =
        stop.while_alone(dial)?.map_err(|error| ServerError::Scheduler(error.to_string()))?;
    link.notice_loss_after(config.heartbeat_timeout)
        .map_err(|error| ServerError::Scheduler(error.to_string()))?;
    let fail = |error: std::io::Error| ServerError::Scheduler(error.to_string());
    let (session, door) = (link.session(), link.door(&key).map_err(fail)?);
    let address = door.address.to_string();
    let (interval, timeout) = (config.heartbeat_interval, config.heartbeat_timeout);
    let pulse = Pulse::new(&address, interval, timeout, Duration::ZERO);
    let (sender, receiver) = link.split();
    let takes_rdma = shards.iter().all(|shard| shard.rails.is_some());
    sender
        .send(&NodeMessage::Register(register(config, cores, shm_name, takes_rdma, session)))
        .map_err(|error| ServerError::Scheduler(error.to_string()))?;
    let control = Control {
        agent: Arc::new(Mutex::new(Agent::new(config.server_cores, pulse))),
        door,
        knocker: Arc::default(),
        shards: shards.clone(),
        sender,
        done: Arc::new(AtomicBool::new(false)),
        tracing: Arc::new(Tracing::new(config, key.is_open())),
        shown,
    };
    let tracing = Arc::clone(&control.tracing);
    let result = control.run(config, receiver, &reports, &report_waker, &stop);
    acceptor.stop();
    for shard in &shards {
        shard.send(Command::Stop);
    }
    for thread in threads {
        // The harness aborts the process when a thread panics, so joining can't fail otherwise.
        let _ = thread.join();
    }
    tracing.finish();
    result
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
            None => ServerError::Config(error.to_string()),
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

pub(crate) fn resource(what: &str, error: &dyn std::fmt::Display) -> ServerError {
    ServerError::Resource(format!("{what} is not to be had: {error}"))
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
        session,
        release: env!("CARGO_PKG_VERSION").into(),
        num_workers: config.num_workers,
        num_servers: config.num_servers,
    }
}

/// Address space of one core's accumulators: all of the machine's memory, of which only what
/// tensors claim is taken.
fn arena_bytes() -> usize {
    let system = rustix::system::sysinfo();
    usize::try_from(system.totalram * u64::from(system.mem_unit)).unwrap_or(usize::MAX / 2)
}

type Started = (ShardHandle, JoinHandle<()>, String);

fn start_shard(
    config: &Config,
    core: u32,
    place: Place,
    reports: &Mpsc<(u32, Report)>,
    report_waker: &Waker,
) -> Result<Started, ServerError> {
    let rails = match rdma::rails_for(config, place.memory_node) {
        Ok(rails) => rails,
        Err(error) if config.transport == TransportChoice::Rdma => {
            return Err(ServerError::Resource(format!("RDMA is demanded: {error}")));
        }
        Err(error) => {
            log::warning!("core {core} takes no RDMA lanes: {error}");
            None
        }
    };
    let waker = if rails.is_some() { Waker::watching() } else { Waker::new() };
    let waker = waker.map_err(|error| resource("an eventfd", &error))?;
    let counters = Arc::new(Counters::default());
    let mut handle = ShardHandle {
        commands: Mpsc::new(QUEUE),
        waker: waker.clone(),
        counters: Arc::clone(&counters),
        memory: None,
        rails: rails.clone(),
    };
    let (started, has_started) = std::sync::mpsc::channel();
    let queues = (handle.commands.clone(), reports.clone());
    let (config, report_waker) = (config.clone(), report_waker.clone());
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let spin = harness::spin_default(config.server_cores as usize, cpus);
    let body = move || {
        // io_uring wants its ring made by the thread that uses it.
        let node = place.memory_node;
        let made = make_shard(&config, core, node, &waker, rails, queues, report_waker, &counters);
        match made {
            Ok((shard, memory, line)) => {
                let _ = started.send(Ok((memory, line)));
                run_shard(shard, Idler::counting(config.idle, spin, counters));
            }
            Err(error) => {
                let _ = started.send(Err(error));
            }
        }
    };
    let thread = harness::spawn(&format!("bps-core-{core}"), place.cpu, body)
        .map_err(|error| resource("a thread", &error))?;
    let (memory, line) = has_started.recv().map_err(|error| resource("a thread", &error))??;
    handle.memory = memory;
    Ok((handle, thread, line))
}

#[allow(clippy::too_many_arguments, reason = "each goes into the shard")]
fn make_shard(
    config: &Config,
    core: u32,
    numa_node: Option<u32>,
    waker: &Waker,
    rails: Option<Arc<Rails>>,
    (commands, reports): (Mpsc<Command>, Mpsc<(u32, Report)>),
    report_waker: Waker,
    counters: &Arc<Counters>,
) -> Result<(Shard, Option<SharedMemory>, String), ServerError> {
    let is_shared = matches!(config.transport, TransportChoice::Auto | TransportChoice::Shm);
    let options = Options { name: format!("core {core}"), numa_node, shared: is_shared };
    let arena = Arena::reserve(arena_bytes(), &options)
        .map_err(|error| ServerError::Resource(error.to_string()))?;
    let lanes_max = u32::try_from(RANKS_MAX).unwrap_or(u32::MAX);
    let tcp = Tcp::new(waker.clone(), config.tcp_driver, lanes_max)
        .map(|tcp| tcp.with_congestion(config.tcp_congestion.clone()))
        .map(|tcp| tcp.with_offload(config.tcp_offload))
        .map(|tcp| tcp.with_send_buffer(config.tcp_send_buffer as usize))
        .map(|tcp| tcp.with_silence(config.lane_silence()))
        .map_err(|error| ServerError::Resource(error.to_string()))?;
    let mut line = tcp.description();
    let mut transports = vec![Transport::Tcp(tcp)];
    let mut memory = None;
    if is_shared {
        let mut shm = Shm::new(waker.clone()).map_err(|error| resource("an epoll", &error))?;
        // Workers of this host read what is published where it was summed.
        shm.share(arena.base(), arena.reserved_bytes());
        let memfd = arena.memfd().map(|memfd| memfd.try_clone_to_owned()).transpose();
        memory = memfd
            .map_err(|error| resource("a descriptor", &error))?
            .map(|memfd| Arc::new((memfd, arena.reserved_bytes())));
        transports.push(Transport::Shm(shm));
    }
    if let Some(rails) = rails {
        line = format!("{line}; {}", rails.description());
        let rdma = Rdma::new(waker.clone(), rails).map_err(|error| resource("an epoll", &error))?;
        waker.watch(rdma.fd()).map_err(|error| resource("an epoll", &error))?;
        transports.push(Transport::Rdma(Box::new(rdma)));
    }
    let endpoint = Endpoint::new(transports, waker.clone()).with_checksums(config.payload_checksum);
    let shard = Shard::new(
        core,
        endpoint,
        arena,
        commands,
        reports,
        report_waker,
        Arc::clone(counters),
        config.stall_report,
    );
    Ok((shard, memory, line))
}

fn run_shard(mut shard: Shard, mut idler: Idler) {
    while !shard.stopped() {
        let progress = shard.step(idler.now());
        let step = idler.step(progress);
        if idler.is_sample_due() {
            shard.sample();
        }
        if step == Step::Sleep {
            shard.sleep();
        }
    }
}

/// What the two control threads share: one reads the scheduler, the other the shards.
#[derive(Clone)]
struct Control {
    agent: Arc<Mutex<Agent>>,
    shards: Vec<ShardHandle>,
    sender: LinkSender,
    done: Arc<AtomicBool>,
    door: Door,
    knocker: Arc<Mutex<Option<Knocker>>>,
    tracing: Arc<Tracing>,
    shown: Arc<Shown>,
}

impl Control {
    fn run(
        self,
        config: &Config,
        mut receiver: LinkReceiver,
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
            harness::spawn("bps-report", None, body)
                .map_err(|error| resource("a thread", &error))?
        };
        let mut effects = Vec::new();
        let began = Instant::now();
        let form_by = Instant::now() + config.start_timeout + FORMING_GRACE;
        let outcome = loop {
            if let Some(signal) = stop.came() {
                let message = format!("it was stopped by {signal}");
                let _ = self.sender.send(&NodeMessage::Failed { message });
                break Err(ServerError::Signal(signal));
            }
            ask_time(&self.tracing.clock, &self.sender);
            let received = receiver.receive(CONTROL_TICK);
            if let Ok(Some(SchedulerMessage::Clock(answer))) = &received {
                take_time(&self.tracing.clock, answer, &self.sender);
            }
            {
                let (mut agent, now) = (self.agent(), began.elapsed());
                match received {
                    Ok(Some(message)) => agent.handle(message, now, &mut effects),
                    Ok(None) => {}
                    Err(error) => {
                        let line = error.line(agent.scheduler());
                        agent.scheduler_lost(line, &mut effects);
                    }
                }
                let knocker = self.knocker.lock().unwrap_or_else(PoisonError::into_inner);
                while let Some(answer) = knocker.as_ref().and_then(Knocker::answer) {
                    agent.handle_aside(answer, now, &mut effects);
                }
                agent.handle_tick(now, &mut effects);
            }
            if let Some(well) = self.carry_out(&mut effects) {
                break if well { Ok(()) } else { Err(ServerError::Job) };
            }
            if !self.is_formed() && Instant::now() >= form_by {
                break Err(ServerError::Scheduler(format!(
                    "the job did not form within {} s (BPS_START_TIMEOUT), and the scheduler at \
                     {}:{} says nothing: see that it runs",
                    config.start_timeout.as_secs_f64(),
                    config.root_uri,
                    config.root_port
                )));
            }
        };
        self.done.store(true, Ordering::Release);
        report_waker.ring();
        let _ = reporter.join();
        outcome
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
            let started = Knocker::start(Door { round_trip, ..self.door.clone() });
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

    /// Returns how the job ended, if it did.
    fn carry_out(&self, effects: &mut Vec<Effect>) -> Option<bool> {
        let mut over = None;
        for effect in effects.drain(..) {
            match effect {
                Effect::Shard(core, command) => self.shards[core as usize].send(command),
                Effect::Send(message) => {
                    let _ = self.sender.send(&message);
                }
                Effect::Beat => {
                    // A scheduler that can't be written to is noticed by the thread that reads it.
                    let rounds = self.shards.iter().map(|shard| shard.counters.rounds.read()).sum();
                    let _ = self.sender.send(&NodeMessage::Heartbeat { rounds });
                }
                Effect::Knock(round_trip) => self.knock(round_trip),
                Effect::Timeline(server, timeline) => {
                    let recorders = self.tracing.apply(server, timeline.as_ref());
                    for (shard, recorder) in self.shards.iter().zip(recorders) {
                        shard.send(Command::Trace(recorder));
                    }
                    if timeline.is_none() {
                        self.tracing.finish();
                    }
                }
                Effect::Info(line) => log::info!("{line}"),
                Effect::Warn(line) => log::warning!("{line}"),
                Effect::Over(well) => over = Some(well),
            }
        }
        over
    }
}
