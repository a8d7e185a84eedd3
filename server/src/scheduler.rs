//! The scheduler program: one thread that runs the engine's scheduler machine over sockets, and one
//! that accepts connections.
//!
//! Invariant: no node can make it wait. Reads and writes never block, what a node does not take is
//! queued up to a bound and then costs that node its connection, and unproven connections stay with
//! the acceptor.

#![forbid(unsafe_code)]

mod hub;

use bps_engine::base::word;
use bps_engine::config::{Config, ElasticMode, Program};
use bps_engine::control::{Acceptor, Hello, JobKey, JobKeyError, Listener, Purpose, Socket};
use bps_engine::host::{self, HostError};
use bps_engine::limits::{RANKS_MAX, SERVERS_MAX};
use bps_engine::metrics::{self, Exporter, MetricsError};
use bps_engine::proto::scheduler::{Elastic, Exit, Scheduler, SchedulerConfig};
use bps_engine::trace::log;
use bps_engine::transport::Waker;
use hub::{Hub, Viewer};
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use std::ffi::OsString;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel, sync_channel};
use std::time::Duration;

/// How long a page waits for the hub, which never blocks.
const VIEW: Duration = Duration::from_secs(2);

/// Why a scheduler could not start, or how its job ended.
#[derive(Debug, thiserror::Error)]
pub enum SchedulerError {
    /// The job key cannot be had.
    #[error(transparent)]
    Key(#[from] JobKeyError),
    /// A setting names no address of this machine.
    #[error(transparent)]
    Address(#[from] HostError),
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {error}: {remedy}")]
    Listen {
        /// Which.
        address: SocketAddr,
        /// What the kernel said.
        error: std::io::Error,
        /// What to do.
        remedy: &'static str,
    },
    /// Metrics cannot be shown where they should be.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    /// A thread or descriptor is missing.
    #[error("cannot allocate {what}: {error}: raise the limits of this user (ulimit -a)")]
    Resource {
        /// What.
        what: &'static str,
        /// What the kernel said.
        error: std::io::Error,
    },
    /// The job ended badly; every node was told why, and so was the log.
    #[error("the job failed")]
    Failed,
    /// The job never began; every node was told why, and so was the log.
    #[error("the job was not formed")]
    NotFormed,
}

impl SchedulerError {
    /// The exit code: 1 the job failed, 2 the scheduler could not start, 3 the job was not formed.
    #[must_use]
    pub fn code(&self) -> i32 {
        match self {
            SchedulerError::Failed => Exit::Failed.code(),
            SchedulerError::NotFormed => Exit::NotFormed.code(),
            _ => 2,
        }
    }
}

/// `bps-scheduler`: reads flags and variables, runs, and returns the exit code: 0 the job finished,
/// 1 it failed or was stopped by a signal, 2 a flag, a variable or the address is wrong, 3 the
/// nodes did not come together.
pub fn cli(arguments: impl IntoIterator<Item = OsString>) -> i32 {
    let loaded = match bps_engine::config::open(Program::Scheduler, arguments) {
        Ok(loaded) => loaded,
        Err(code) => return code,
    };
    match run(&loaded.config) {
        Ok(()) => Exit::Finished.code(),
        Err(error) => {
            log::error!("{error}");
            error.code()
        }
    }
}

/// Runs a scheduler until its job is over, or SIGTERM or Ctrl-C ends it. With [`Config::stays`] a
/// job whose ranks have all left is not over: they may come back, until SIGUSR1 says that none
/// will.
///
/// # Errors
/// See [`SchedulerError`].
pub fn run(config: &Config) -> Result<(), SchedulerError> {
    log::init(config.log_level, "scheduler");
    let stop = Stop::default();
    let signals = Signals::install(&stop)?;
    let result = Bound::bind(config)?.run(&stop);
    drop(signals);
    result
}

/// A request to stop, from a signal or from the code that runs the scheduler. Clones are the same
/// request.
#[derive(Clone, Debug, Default)]
pub struct Stop {
    /// The signal, or `usize::MAX`; 0 is none.
    cause: Arc<AtomicUsize>,
    /// No further generation of ranks comes: see [`Config::stays`].
    last: Arc<AtomicBool>,
}

impl Stop {
    /// Ends the job: all nodes are told that the scheduler was stopped.
    pub fn stop(&self) {
        self.cause.store(usize::MAX, Ordering::Relaxed);
    }

    /// Whether somebody has said that no rank will come any more.
    fn is_last(&self) -> bool {
        self.last.load(Ordering::Relaxed)
    }

    /// Who asked to stop, if anybody.
    fn cause(&self) -> Option<&'static str> {
        match i32::try_from(self.cause.load(Ordering::Relaxed)) {
            Ok(0) => None,
            Ok(SIGTERM) => Some("SIGTERM"),
            Ok(SIGINT) => Some("Ctrl-C"),
            _ => Some("its launcher"),
        }
    }
}

/// Signal handlers, for as long as this lives.
struct Signals(Vec<signal_hook::SigId>);

impl Signals {
    fn install(stop: &Stop) -> Result<Signals, SchedulerError> {
        let mut signals = Signals(Vec::new());
        for (signal, value) in [(SIGTERM, SIGTERM), (SIGINT, SIGINT)] {
            // A signal's number is small and positive.
            let value = usize::try_from(value).unwrap_or(usize::MAX);
            let id = signal_hook::flag::register_usize(signal, Arc::clone(&stop.cause), value)
                .map_err(|error| SchedulerError::Resource { what: "a signal handler", error })?;
            signals.0.push(id);
        }
        let id = signal_hook::flag::register(SIGUSR1, Arc::clone(&stop.last))
            .map_err(|error| SchedulerError::Resource { what: "a signal handler", error })?;
        signals.0.push(id);
        Ok(signals)
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for id in self.0.drain(..) {
            signal_hook::low_level::unregister(id);
        }
    }
}

/// A scheduler that listens, and has not begun to talk.
pub struct Bound {
    listener: TcpListener,
    address: SocketAddr,
    key: JobKey,
    config: Config,
}

impl Bound {
    /// Listens where the configuration says: on `DMLC_NODE_HOST` or `DMLC_INTERFACE` if set, else
    /// on `DMLC_PS_ROOT_URI` itself.
    ///
    /// # Errors
    /// The key cannot be read, or the address or the port cannot be used.
    pub fn bind(config: &Config) -> Result<Bound, SchedulerError> {
        let key = JobKey::load(config)?;
        let ip = if config.node_host.is_some() || config.interface.is_some() {
            host::listen_address(config)?
        } else {
            host::scheduler_address(config)?.ip()
        };
        let wanted = SocketAddr::new(ip, config.root_port);
        let fail = |error: std::io::Error| SchedulerError::Listen {
            address: wanted,
            remedy: remedy(&error),
            error,
        };
        let listener = TcpListener::bind(wanted).map_err(fail)?;
        let address = listener.local_addr().map_err(fail)?;
        Ok(Bound { listener, address, key, config: config.clone() })
    }

    /// Where it listens; the port is the kernel's choice if the configuration said 0.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Runs until the job is over.
    ///
    /// # Errors
    /// How the job ended, if not well.
    pub fn run(self, stop: &Stop) -> Result<(), SchedulerError> {
        self.announce();
        // A large job has more nodes than the usual soft limit of descriptors.
        host::raise_descriptor_limit(2 * (RANKS_MAX + SERVERS_MAX) as u64);
        let fail = |what| move |error| SchedulerError::Resource { what, error };
        let waker = Waker::new().map_err(fail("an eventfd"))?;
        let (acceptor, arrivals) = self.accept(&waker).map_err(fail("the accepting thread"))?;
        let machine_config = self.machine_config()?;
        let (exporter, viewers) = self.show(&waker)?;
        let machine = |now| Scheduler::new(machine_config, now);
        let hub = Hub::new(machine, self.key.clone(), waker, arrivals, viewers)
            .with_tune_file(self.config.tune_file.clone());
        let exit = hub.run(stop, self.config.start_timeout);
        drop(exporter);
        acceptor.stop();
        match exit {
            Exit::Finished => Ok(()),
            Exit::Failed => Err(SchedulerError::Failed),
            Exit::NotFormed => Err(SchedulerError::NotFormed),
        }
    }

    fn machine_config(&self) -> Result<SchedulerConfig, SchedulerError> {
        let config = &self.config;
        Ok(SchedulerConfig {
            job: JobKey::mint()?.expose_hex(),
            num_workers: config.num_workers,
            num_servers: config.num_servers,
            ranks_max: word(RANKS_MAX),
            release: env!("CARGO_PKG_VERSION").to_owned(),
            encrypt: config.encrypt,
            placement: config.placement,
            built_in_coefficient: config.built_in_coefficient,
            start_timeout: config.start_timeout,
            // A heartbeat is missed from when it was due.
            heartbeat_timeout: config.heartbeat_timeout + config.heartbeat_interval,
            stall_report: config.stall_report,
            stall_timeout: config.stall_timeout,
            stays: config.stays,
            elastic: (config.elastic != ElasticMode::None).then(|| Elastic {
                shrinks: config.elastic == ElasticMode::Shrink,
                min_workers: config.min_workers.unwrap_or(1),
                patience: config.elastic_wait,
                // A rank may be away from a round for so long.
                notice: config.stall_timeout.max(config.start_timeout),
            }),
        })
    }

    fn announce(&self) {
        let config = &self.config;
        let plural = |count: u32| if count == 1 { "" } else { "s" };
        log::info!(
            "listening on {} for {} worker host{} and {} server{}, {}",
            self.address,
            config.num_workers,
            plural(config.num_workers),
            config.num_servers,
            plural(config.num_servers),
            if self.key.is_open() { "with no job key" } else { "with a job key" }
        );
        if self.key.is_open() && !self.address.ip().is_loopback() {
            log::warning!(
                "this job has no key: whoever reaches {} can join it, and whoever is on the way \
                 can change what passes: set BPS_JOB_KEY_FILE on every node",
                self.address
            );
        }
        let told_so = config.root_uri == "localhost" || config.root_uri.parse::<IpAddr>().is_ok();
        if self.address.ip().is_loopback() && config.num_workers > 1 && !told_so {
            log::warning!(
                "{} is {} here, which other machines cannot reach: set DMLC_PS_ROOT_URI to an \
                 address of this machine, or DMLC_INTERFACE",
                config.root_uri,
                self.address.ip()
            );
        }
    }

    /// Starts to show metrics, if that is wanted. Whoever wants a page asks the hub for a view of
    /// the job through the receiver.
    fn show(&self, waker: &Waker) -> Result<(Option<Exporter>, Receiver<Viewer>), SchedulerError> {
        let (ask, viewers) = sync_channel::<Viewer>(1);
        let waker = waker.clone();
        let source = move || {
            let (answer, view) = sync_channel(1);
            ask.try_send(answer).ok()?;
            waker.ring();
            let view = view.recv_timeout(VIEW).ok()?;
            Some(metrics::page(Some(&view), &view.nodes))
        };
        let exporter = metrics::serve(Program::Scheduler, &self.config, source)?;
        if let Some(exporter) = &exporter {
            log::info!("metrics of the job on http://{}/metrics", exporter.address());
        }
        Ok((exporter, viewers))
    }

    /// Starts the accepting thread. Proven connections come out of the receiver.
    fn accept(&self, waker: &Waker) -> std::io::Result<(Acceptor, Receiver<TcpStream>)> {
        let (send, arrivals) = channel();
        let waker = waker.clone();
        let admit = move |_: usize, hello: Hello, socket: Socket, _| {
            match (hello.purpose, socket) {
                (Purpose::Control, Socket::Tcp(stream)) => {
                    // The receiver is gone only when the job is over.
                    let _ = send.send(stream);
                    waker.ring();
                }
                (purpose, _) => log::warning!(
                    "a {purpose:?} connection of {} came to the scheduler: is a server's \
                     DMLC_PORT the same as DMLC_PS_ROOT_PORT?",
                    hello.rank
                ),
            }
        };
        let listeners = vec![Listener::Tcp(self.listener.try_clone()?)];
        let acceptor =
            Acceptor::start(listeners, self.key.clone(), admit, |line| log::warning!("{line}"))?;
        Ok((acceptor, arrivals))
    }
}

fn remedy(error: &std::io::Error) -> &'static str {
    match error.kind() {
        ErrorKind::AddrInUse => {
            "another process has this port, perhaps the scheduler of another job: end it, or \
             choose another DMLC_PS_ROOT_PORT"
        }
        ErrorKind::AddrNotAvailable => {
            "this machine does not have that address: run the scheduler on the machine that \
             DMLC_PS_ROOT_URI names, or set DMLC_INTERFACE"
        }
        ErrorKind::PermissionDenied => {
            "ports below 1024 are for root: choose a higher DMLC_PS_ROOT_PORT"
        }
        _ => "check DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT and DMLC_INTERFACE",
    }
}
