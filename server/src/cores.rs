//! The threads of a server's cores: how each is made, what others hold of it, and its loop.

#![forbid(unsafe_code)]

use crate::error::{ServerError, resource};
use crate::shard::{Command, Report, Shard};
use bps_engine::base::word;
use bps_engine::config::{Config, TransportChoice};
use bps_engine::harness::{self, Idler, Step};
use bps_engine::lane::EndpointBuilder;
use bps_engine::limits::RANKS_MAX;
use bps_engine::mem::{Arena, Options};
use bps_engine::ring::Mpsc;
use bps_engine::topo::plan::Place;
use bps_engine::trace::counters::Counters;
use bps_engine::trace::log;
use bps_engine::transport::rdma::{self, Rails, RdmaOptions};
use bps_engine::transport::shm;
use bps_engine::transport::{self, Waker};
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;

/// Commands that may wait for a shard, and reports that may wait for the control thread.
pub(crate) const QUEUE: usize = 4096;

/// What the other threads hold of a shard.
#[derive(Clone)]
pub(crate) struct ShardHandle {
    /// Its index in the server.
    core: u32,
    commands: Mpsc<Command>,
    waker: Waker,
    pub(crate) counters: Arc<Counters>,
    memory: Option<SharedMemory>,
    pub(crate) rails: Option<Arc<Rails>>,
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

    /// Hands a command to the core.
    ///
    /// # Errors
    /// Its queue has been full for too long: the core hangs. The command is dropped.
    pub(crate) fn send(&self, command: Command) -> Result<(), ServerError> {
        let push = |command| {
            let pushed = self.commands.push(command);
            self.waker.wake();
            pushed
        };
        let (core, waited) = (self.core, harness::PATIENCE);
        harness::offer(command, || false, push).map_err(|_| ServerError::CoreHangs { core, waited })
    }
}

/// Address space of one core's accumulators: all of the machine's memory, of which only what
/// tensors claim is taken.
fn arena_bytes() -> usize {
    let system = rustix::system::sysinfo();
    usize::try_from(system.totalram * u64::from(system.mem_unit)).unwrap_or(usize::MAX / 2)
}

/// A core's thread, and how it is reached.
pub(crate) type Started = (ShardHandle, JoinHandle<()>, String);

/// Starts the thread of a core, and returns when its shard is there, with a line about it.
pub(crate) fn start_shard(
    config: &Config,
    core: u32,
    place: Place,
    reports: &Mpsc<(u32, Report)>,
    report_waker: &Waker,
) -> Result<Started, ServerError> {
    let rails = match rdma::rails_for(config, place.memory_node) {
        Ok(rails) => rails,
        Err(error) if config.transport == TransportChoice::Rdma => {
            return Err(ServerError::Rdma(error.into()));
        }
        Err(error) => {
            log::warning!("core {core} takes no RDMA lanes: {error}");
            None
        }
    };
    let waker = if rails.is_some() { Waker::watching() } else { Waker::new() };
    let waker = waker.map_err(|error| resource("an eventfd", error))?;
    let counters = Arc::new(Counters::default());
    let mut handle = ShardHandle {
        core,
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
        .map_err(|error| resource("a thread", error))?;
    let made = has_started.recv_timeout(harness::PATIENCE);
    let (memory, line) = made.map_err(|error| resource("a core's thread", error))??;
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
    let arena = Arena::reserve(arena_bytes(), &options)?;
    let lanes_max = word(RANKS_MAX);
    let mut builder = EndpointBuilder::new(config, waker.clone()).tcp(lanes_max)?;
    let mut memory = None;
    if is_shared {
        // Workers of this host read what is published where it was summed.
        builder = builder.shm(Some(&arena))?;
        let memfd = arena.memfd().map(|memfd| memfd.try_clone_to_owned()).transpose();
        memory = memfd
            .map_err(|error| resource("a descriptor", error))?
            .map(|memfd| Arc::new((memfd, arena.reserved_bytes())));
    }
    if let Some(rails) = rails {
        builder = builder.rdma(rails)?;
    }
    let (endpoint, descriptions) = builder.build();
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
    Ok((shard, memory, descriptions.join("; ")))
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
