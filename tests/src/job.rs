//! A real job inside one process: scheduler, servers and workers as threads, over loopback or
//! shared memory.

use bps_engine::config::{
    AutoCompression, Config, ElasticMode, Idle, PayloadChecksum, Role, TcpDriver, TransportChoice,
};
use bps_worker::{Error, Worker};
use std::net::TcpListener;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Where [`free_port`] looks.
const PORT_MIN: u16 = 16_384;
const PORTS: u16 = 16_384;

/// Jobs of one process run one after the other: each has more polling threads than a small machine
/// has CPUs, and some are timed.
static ALONE: Mutex<()> = Mutex::new(());

/// How large a job is and what it runs over.
#[derive(Clone, Copy, Debug)]
pub struct JobShape {
    /// Ranks.
    pub workers: u32,
    /// Servers.
    pub servers: u32,
    /// Cores of each server.
    pub cores: u32,
    /// What lanes use.
    pub transport: TransportChoice,
    /// How TCP talks to the kernel.
    pub driver: TcpDriver,
    /// Largest part, bytes.
    pub partition_bytes: u32,
    /// `BYTEPS_SCHEDULING_CREDIT`.
    pub scheduling_credit: u32,
    /// The job finds its credit and its parts by itself, and writes them to this file.
    pub tune_file: Option<&'static str>,
    /// Tensors of fewer bytes are not encoded.
    pub min_compress_bytes: u32,
    /// How far each rank encodes tensors whose encoding is `auto`; empty: as far as it measures
    /// that this is faster.
    pub auto: &'static [AutoCompression],
    /// Whether TCP lanes are encrypted, which needs a key.
    pub encrypt: bool,
    /// What the job does when one of its members dies.
    pub elastic: ElasticMode,
    /// Which payloads carry a CRC-32C.
    pub payload_checksum: PayloadChecksum,
    /// What polling threads do when there is nothing to do.
    pub idle: Idle,
    /// Helpers of each NIC loop; `None` as there are CPUs for them.
    pub nic_helpers: Option<usize>,
    /// First and last round of a timeline from the start of the job, if there is to be one.
    pub trace: Option<(u32, u32)>,
    /// Folder of its files.
    pub trace_folder: &'static str,
    /// Ranks of each host, which reduce among themselves; together as many as there are workers.
    /// Empty: no local reduction, every contribution goes to a server.
    pub hosts: &'static [u32],
}

impl Default for JobShape {
    fn default() -> JobShape {
        JobShape {
            workers: 2,
            servers: 1,
            cores: 1,
            transport: TransportChoice::Tcp,
            driver: TcpDriver::Auto,
            partition_bytes: 1 << 20,
            scheduling_credit: 0,
            tune_file: None,
            min_compress_bytes: 0,
            auto: &[],
            encrypt: false,
            elastic: ElasticMode::None,
            payload_checksum: PayloadChecksum::Auto,
            idle: Idle::Adaptive,
            nic_helpers: None,
            trace: None,
            trace_folder: "trace",
            hosts: &[],
        }
    }
}

impl JobShape {
    /// The host of a rank, as the processes of a job tell them apart: the test's hosts are all one.
    fn host_of(&self, rank: u32) -> Option<String> {
        let mut end = 0;
        let host = self.hosts.iter().position(|size| {
            end += size;
            rank < end
        })?;
        Some(format!("test host {host}"))
    }
}

/// A port of loopback that was free a moment ago, below those that the kernel gives to connections:
/// one of theirs may be taken by another test before the scheduler listens on it.
///
/// # Panics
/// When loopback has no free port.
#[must_use]
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Processes of tests that run at once begin at different places.
    let start = u16::try_from(std::process::id() * 37 % u32::from(PORTS)).expect("below PORTS");
    let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    (0..PORTS)
        .map(|_| NEXT.fetch_add(1, Ordering::Relaxed) % PORTS)
        .map(|next| PORT_MIN + (start + next) % PORTS)
        .find(is_free)
        .expect("a free port on loopback")
}

/// The configuration of a node of such a job.
#[must_use]
pub fn config(shape: &JobShape, port: u16, role: Role, worker: u32) -> Config {
    Config {
        role,
        num_workers: shape.workers,
        num_servers: shape.servers,
        worker_id: worker,
        root_uri: "127.0.0.1".into(),
        root_port: port,
        server_cores: shape.cores,
        partition_bytes: shape.partition_bytes,
        scheduling_credit: shape.scheduling_credit,
        tune_credit: shape.tune_file.is_some(),
        tune_partition: shape.tune_file.is_some(),
        tune_file: shape.tune_file.map(Into::into),
        min_compress_bytes: shape.min_compress_bytes,
        auto_compression: shape
            .auto
            .get(worker as usize)
            .copied()
            .unwrap_or(AutoCompression::Measured),
        transport: shape.transport,
        tcp_driver: shape.driver,
        encrypt: shape.encrypt,
        elastic: shape.elastic,
        payload_checksum: shape.payload_checksum,
        idle: shape.idle,
        nic_helpers: shape.nic_helpers,
        force_distributed: shape.hosts.is_empty(),
        local_reduce: !shape.hosts.is_empty(),
        host_id: if role == Role::Worker { shape.host_of(worker) } else { None },
        start_timeout: Duration::from_secs(30),
        log_level: bps_engine::config::LogLevel::Warning,
        trace_on: shape.trace.is_some(),
        trace_dir: Some(shape.trace_folder.into()),
        trace_start_step: shape.trace.map_or(1, |rounds| rounds.0),
        trace_end_step: shape.trace.map_or(u32::MAX, |rounds| rounds.1),
        ..Config::default()
    }
}

/// Starts a job and runs `body` as each of its ranks. Returns what the ranks returned, by rank,
/// once scheduler and servers have ended as well.
///
/// # Panics
/// When a rank panics, or the job does not start or end in good order.
pub fn run<T: Send + 'static>(
    shape: JobShape,
    body: impl Fn(&Worker) -> T + Clone + Send + 'static,
) -> Vec<T> {
    run_nodes(shape, move |worker| {
        let result = body(&worker);
        worker.shutdown(false).expect("leaving in good order");
        result
    })
}

/// As [`run`], but the ranks leave (or do not) by themselves, and nobody has to end in good order.
///
/// # Panics
/// When a rank panics or the job does not start.
pub fn run_nodes<T: Send + 'static>(
    shape: JobShape,
    body: impl Fn(Worker) -> T + Clone + Send + 'static,
) -> Vec<T> {
    // Lanes are encrypted only in a job with a key.
    let key = "ab".repeat(32);
    let key = shape.encrypt.then_some(&*key);
    run_relayed(shape, key, |port, _| port, move |worker| body(worker.expect("the job starts")))
}

/// As [`run_nodes`], but each rank asks `port_of` at which port it finds the scheduler, which
/// listens at the port given, and the job may have a key. A rank may fail to join.
///
/// # Panics
/// When a rank panics.
pub fn run_relayed<T: Send + 'static>(
    shape: JobShape,
    key: Option<&str>,
    port_of: impl Fn(u16, u32) -> u16,
    body: impl Fn(Result<Worker, Error>) -> T + Clone + Send + 'static,
) -> Vec<T> {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let port = free_port();
    let config = |shape: &JobShape, port, role, worker| Config {
        job_key: key.map(str::to_owned),
        // Of jobs that do not form, the scheduler tells nodes that come later for no longer.
        start_timeout: Duration::from_secs(8),
        ..config(shape, port, role, worker)
    };
    let scheduler = {
        let config = config(&shape, port, Role::Scheduler, 0);
        named("scheduler", move || drop(bps_server::scheduler::run(&config)))
    };
    let servers: Vec<JoinHandle<()>> = (0..shape.servers)
        .map(|_| {
            let config = config(&shape, port, Role::Server, 0);
            named("server", move || drop(bps_server::run::run(&config)))
        })
        .collect();
    let ranks: Vec<JoinHandle<T>> = (0..shape.workers)
        .map(|index| {
            let config = config(&shape, port_of(port, index), Role::Worker, index);
            let body = body.clone();
            named("rank", move || body(Worker::start(&config)))
        })
        .collect();
    let results = ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect();
    for node in servers.into_iter().chain([scheduler]) {
        node.join().expect("a server or the scheduler panicked");
    }
    results
}

/// A thread whose name says what runs on it; what it starts without a name bears it too.
fn named<T: Send + 'static>(
    name: &str,
    body: impl FnOnce() -> T + Send + 'static,
) -> JoinHandle<T> {
    std::thread::Builder::new().name(name.to_owned()).spawn(body).expect("a thread")
}
