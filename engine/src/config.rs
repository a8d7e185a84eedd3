//! Every knob, once: variable, flag, default, unit, meaning. Read once at start into [`Config`], which nothing changes.

use crate::base::Placement;
use std::path::PathBuf;
use std::time::Duration;

/// What a process of the job is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// A training process.
    Worker,
    /// A summation server.
    Server,
    /// Rendezvous, registry, health.
    Scheduler,
}

/// What a polling thread does when there is nothing to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Idle {
    /// Never sleeps: for dedicated cores.
    Busy,
    /// Spins for a bounded time, then sleeps in the kernel.
    Adaptive,
}

/// Which transport lanes use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TransportChoice {
    /// Shared memory to servers of the same host, else TCP.
    Auto,
    /// TCP to every server.
    Tcp,
    /// Shared memory; an error where a server is not on this host.
    Shm,
}

/// How TCP talks to the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TcpDriver {
    /// io_uring if the kernel lets us, else plain calls, with one line that says why.
    Auto,
    /// io_uring or an error.
    Uring,
    /// Plain non-blocking calls.
    Poll,
}

/// All settings of one process.
#[derive(Clone, PartialEq, Debug)]
pub struct Config {
    /// `DMLC_ROLE`.
    pub role: Role,
    /// `DMLC_NUM_WORKER`: worker hosts.
    pub num_workers: u32,
    /// `DMLC_NUM_SERVER`: server processes.
    pub num_servers: u32,
    /// `DMLC_WORKER_ID`: index of this worker host.
    pub worker_id: u32,
    /// `BYTEPS_LOCAL_RANK`: index of this process on its host.
    pub local_rank: u32,
    /// `BYTEPS_LOCAL_SIZE`: worker processes on this host.
    pub local_size: u32,
    /// `BYTEPS_GLOBAL_RANK`: overrides the computed rank.
    pub global_rank: Option<u32>,
    /// `BYTEPS_FORCE_DISTRIBUTED`: use servers even with one worker host.
    pub force_distributed: bool,
    /// `DMLC_PS_ROOT_URI`: where the scheduler is.
    pub root_uri: String,
    /// `DMLC_PS_ROOT_PORT`.
    pub root_port: u16,
    /// `DMLC_INTERFACE`: network interface to listen on, by name prefix.
    pub interface: Option<String>,
    /// `DMLC_NODE_HOST`: address to announce, instead of the interface's.
    pub node_host: Option<String>,
    /// `DMLC_PORT`: first port to listen on (server: core i listens on port + i); 0 lets the kernel choose.
    pub port: u16,
    /// `DMLC_RANK`: preferred index of a server.
    pub preferred_rank: Option<u32>,
    /// `BPS_SERVER_CORES`, `--cores`: polling threads of a server.
    pub server_cores: u32,
    /// `BYTEPS_PARTITION_BYTES`: largest part.
    pub partition_bytes: u32,
    /// `BYTEPS_SCHEDULING_CREDIT`: parts that may be in flight on a lane, in partitions; 0 takes the default.
    pub scheduling_credit: u32,
    /// `BYTEPS_KEY_HASH_FN` (and `BYTEPS_ENABLE_MIXED_MODE`).
    pub placement: Placement,
    /// `BYTEPS_MIXED_MODE_BOUND`.
    pub mixed_bound: u32,
    /// `BYTEPS_BUILT_IN_HASH_COEF`.
    pub built_in_coefficient: u64,
    /// `BPS_TRANSPORT`: `auto`, `tcp`, `shm`.
    pub transport: TransportChoice,
    /// `BPS_TCP_DRIVER`: `auto`, `uring`, `poll`.
    pub tcp_driver: TcpDriver,
    /// `BPS_PAYLOAD_CHECKSUM`: CRC-32C over every payload.
    pub payload_checksum: bool,
    /// `BPS_IDLE`: `busy`, `adaptive`.
    pub idle: Idle,
    /// `BPS_PIN`: pin polling threads to cores.
    pub pin: bool,
    /// `BPS_JOB_KEY`: the key itself, in hexadecimal.
    pub job_key: Option<String>,
    /// `BPS_JOB_KEY_FILE`: a file with the key.
    pub job_key_file: Option<PathBuf>,
    /// `BPS_START_TIMEOUT`: how long to wait for the other nodes.
    pub start_timeout: Duration,
    /// `BPS_STALL_REPORT`: a round open for longer than this is reported.
    pub stall_report: Duration,
    /// `BPS_STALL_TIMEOUT`: a round open for longer than this is an error.
    pub stall_timeout: Duration,
    /// `BPS_HEARTBEAT_INTERVAL` (`PS_HEARTBEAT_INTERVAL`).
    pub heartbeat_interval: Duration,
    /// `BPS_HEARTBEAT_TIMEOUT` (`PS_HEARTBEAT_TIMEOUT`): silence after which a node counts as dead.
    pub heartbeat_timeout: Duration,
    /// `BPS_LOG_LEVEL` (`BYTEPS_LOG_LEVEL`): `error`, `warning`, `info`, `debug`.
    pub log_level: LogLevel,
}

/// How much a process says on standard error.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum LogLevel {
    /// Only what ends the process.
    Error,
    /// What the user should act on.
    Warning,
    /// Start, end, and choices made.
    Info,
    /// Everything that happens outside the data plane.
    Debug,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            role: Role::Worker,
            num_workers: 1,
            num_servers: 0,
            worker_id: 0,
            local_rank: 0,
            local_size: 1,
            global_rank: None,
            force_distributed: false,
            root_uri: String::new(),
            root_port: 0,
            interface: None,
            node_host: None,
            port: 0,
            preferred_rank: None,
            server_cores: 1,
            partition_bytes: 1 << 20,
            scheduling_credit: 0,
            placement: Placement::Balanced,
            mixed_bound: 101,
            built_in_coefficient: 1,
            transport: TransportChoice::Auto,
            tcp_driver: TcpDriver::Auto,
            payload_checksum: false,
            idle: Idle::Adaptive,
            pin: true,
            job_key: None,
            job_key_file: None,
            start_timeout: Duration::from_secs(120),
            stall_report: Duration::from_secs(3),
            stall_timeout: Duration::from_secs(300),
            heartbeat_interval: Duration::from_secs(1),
            heartbeat_timeout: Duration::from_secs(4),
            log_level: LogLevel::Info,
        }
    }
}
