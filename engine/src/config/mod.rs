//! Every knob, once: variable, flag, default, unit, meaning. Read once at start into [`Config`],
//! which nothing changes.
//!
//! [`table::TABLE`] is the only list of knobs: reading, `--help`, `--print-config` and
//! `docs/env.md` follow from it. Programs call [`open`], which prints what is to be printed; the
//! Python worker calls [`from_environment`]. A flag beats a variable, and a variable beats the
//! default.

#![forbid(unsafe_code)]

use crate::base::Placement;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

mod check;
mod document;
mod error;
mod foreign;
mod key;
mod known;
mod load;
mod origin;
mod table;

pub use document::document;
pub use error::ConfigError;
pub use key::decode_key;
pub use load::{
    Loaded, Outcome, from_environment, from_environment_with, load, open, unknown_variables,
};
pub use origin::{Origin, Source};
pub use table::{Program, Row, TABLE};

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

impl Role {
    /// As `DMLC_ROLE` spells it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Role::Worker => "worker",
            Role::Server => "server",
            Role::Scheduler => "scheduler",
        }
    }
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
    /// Shared memory to servers of the same host, else RDMA where both ends have it, else TCP.
    Auto,
    /// TCP to every server.
    Tcp,
    /// Shared memory; an error where a server is not on this host.
    Shm,
    /// RDMA; an error where an end has none.
    Rdma,
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
#[derive(Clone, PartialEq)]
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
    /// `BPS_STAY`: a scheduler waits for ranks that have all shut down to come back.
    pub stays: bool,
    /// `BPS_ELASTIC`: what a job does when a member dies.
    pub elastic: ElasticMode,
    /// `BPS_MIN_WORKERS`: fewest ranks with which an elastic job goes on.
    pub min_workers: Option<u32>,
    /// `BPS_ELASTIC_WAIT`: how long an elastic job with too few members waits for new ones.
    pub elastic_wait: Duration,
    /// `BPS_SCHEDULER_WAIT`: how long nodes of an elastic job wait for another scheduler.
    pub scheduler_wait: Duration,
    /// `BPS_LEAVE_NOTICE`: from SIGTERM to a member of an elastic job until it counts as dead.
    pub leave_notice: Duration,
    /// `BPS_JOINS`: this rank is none of the first ones of an elastic job.
    pub joins: bool,
    /// `DMLC_PS_ROOT_URI`: where the scheduler is.
    pub root_uri: String,
    /// `DMLC_PS_ROOT_PORT`.
    pub root_port: u16,
    /// `DMLC_INTERFACE`: network interface to listen on, by name prefix.
    pub interface: Option<String>,
    /// `DMLC_NODE_HOST`: address to announce, instead of the interface's.
    pub node_host: Option<String>,
    /// `DMLC_PORT`: first port to listen on (server: core i listens on port + i); 0 lets the kernel
    /// choose.
    pub port: u16,
    /// `DMLC_RANK`: preferred index of a server.
    pub preferred_rank: Option<u32>,
    /// `BPS_SERVER_CORES`, `--cores`: polling threads of a server.
    pub server_cores: u32,
    /// `BYTEPS_PARTITION_BYTES`: largest part.
    pub partition_bytes: u32,
    /// `BYTEPS_MIN_COMPRESS_BYTES`: smaller tensors are not encoded.
    pub min_compress_bytes: u32,
    /// `BPS_AUTO_COMPRESSION`: `measured`, `none`, `bf16`, `codec`.
    pub auto_compression: AutoCompression,
    /// `BYTEPS_ENABLE_ASYNC`: optimizers train asynchronously unless they are told otherwise.
    pub enable_async: bool,
    /// `BPS_STALENESS`: by how many pushes a rank may be ahead of the slowest, for stored tensors
    /// that do not say so themselves.
    pub staleness: Option<u32>,
    /// `BPS_BACKUP_WORKERS`: for how many slow ranks rounds of gradients do not wait.
    pub backup_workers: u32,
    /// `BPS_BACKUP_BEHIND`: by how many rounds a rank may be behind.
    pub backup_behind: u32,
    /// `BYTEPS_SCHEDULING_CREDIT`: parts that may be in flight on all lanes of a process, in
    /// partitions; 0 takes the default.
    pub scheduling_credit: u32,
    /// `BPS_TUNE_CREDIT`: the job finds its credit by itself.
    pub tune_credit: bool,
    /// `BPS_TUNE_PARTITION`: the job finds the size of its parts by itself.
    pub tune_partition: bool,
    /// `BPS_TUNE_FILE`: where what was found is written.
    pub tune_file: Option<PathBuf>,
    /// `BYTEPS_KEY_HASH_FN` (and `BYTEPS_ENABLE_MIXED_MODE`).
    pub placement: Placement,
    /// `BYTEPS_MIXED_MODE_BOUND`.
    pub mixed_bound: u32,
    /// `BYTEPS_BUILT_IN_HASH_COEF`.
    pub built_in_coefficient: u64,
    /// `BPS_LOCAL_REDUCE`: the ranks of a host reduce among themselves before servers are asked.
    pub local_reduce: bool,
    /// What this process says of its host, in place of what it finds. No variable sets it: it lets
    /// tests of one machine be several hosts.
    pub host_id: Option<String>,
    /// `BPS_TRANSPORT` (and `DMLC_ENABLE_RDMA`): `auto`, `tcp`, `shm`, `rdma`.
    pub transport: TransportChoice,
    /// Whether RDMA devices that page on demand send tensors from where they lie.
    pub rdma_on_demand: bool,
    /// `BPS_GPU_STAGING_MB`: pinned memory that tensors on a GPU have of their own, at most, in
    /// MiB.
    pub gpu_staging_mb: u32,
    /// `BPS_GPUDIRECT`: `auto`, `demand`, `none`.
    pub gpudirect: GpuDirect,
    /// `BPS_TCP_DRIVER`: `auto`, `uring`, `poll`.
    pub tcp_driver: TcpDriver,
    /// `BPS_TCP_CONGESTION`: name of a congestion control; `None` keeps the system's but for bbr.
    pub tcp_congestion: Option<String>,
    /// `BPS_TCP_SNDBUF`: bytes that the kernel holds of a lane; 0 leaves it to the kernel.
    pub tcp_send_buffer: u32,
    /// `BPS_TCP_OFFLOAD`: large sends go to threads of the kernel's.
    pub tcp_offload: bool,
    /// `BPS_NCCL_LIBRARY`: the file of NCCL; found without it.
    pub nccl_library: Option<PathBuf>,
    /// `BYTEPS_NCCL_GROUP_SIZE`: collectives in one launch, at most; 0 is the worker's choice.
    pub nccl_group_size: u32,
    /// `BYTEPS_NCCL_NUM_RINGS`: channels of a communicator; 0 and 1 leave them to NCCL.
    pub nccl_rings: u32,
    /// `BYTEPS_REDUCE_ROOTS`: local ranks, rising, to which GPUs of a host reduce; all if empty.
    pub reduce_roots: Vec<u32>,
    /// `BYTEPS_PCIE_SWITCH_SIZE`: ranks among which NCCL reduces; 0 is all of a host.
    pub switch_size: u32,
    /// `BPS_PAYLOAD_CHECKSUM`: `auto`, `1`, `0`.
    pub payload_checksum: PayloadChecksum,
    /// `BPS_IDLE`: `busy`, `adaptive`.
    pub idle: Idle,
    /// `BPS_PIN`: pin polling threads to cores.
    pub pin: bool,
    /// `BPS_NIC_HELPERS`: further threads that copy and add; `None` as there are CPUs for them.
    pub nic_helpers: Option<usize>,
    /// `BPS_JOB_KEY`: the key itself, in hexadecimal.
    pub job_key: Option<String>,
    /// `BPS_JOB_KEY_FILE`: a file with the key.
    pub job_key_file: Option<PathBuf>,
    /// `BPS_ENCRYPT`: TCP lanes are encrypted.
    pub encrypt: bool,
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
    /// `BYTEPS_TRACE_ON`: record a timeline.
    pub trace_on: bool,
    /// `BYTEPS_TRACE_DIR`: the folder of its files.
    pub trace_dir: Option<PathBuf>,
    /// `BYTEPS_TRACE_START_STEP`: the first round of a tensor in it.
    pub trace_start_step: u32,
    /// `BYTEPS_TRACE_END_STEP`: the last round of a tensor in it.
    pub trace_end_step: u32,
    /// `BPS_METRICS_PORT`: where the scheduler shows the whole job's metrics; nowhere if unset.
    pub metrics_port: Option<u32>,
    /// `BPS_SERVER_METRICS_PORT`: where a server shows its own.
    pub server_metrics_port: Option<u32>,
    /// `BPS_METRICS_ADDRESS`: the address of both.
    pub metrics_address: String,
    /// `BPS_LINK_SPEED`: of this node's network interface, Mbit/s, where the kernel does not know.
    pub link_speed: Option<u32>,
    /// What ByteScheduler's variables say, in its units; `check` has made ours of them.
    pub bytescheduler: ByteSchedulerConfig,
    /// What only `bps-top` uses.
    pub top: TopConfig,
    /// What only `bpslaunch` uses.
    pub launch: LaunchConfig,
}

/// Settings of ByteScheduler.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct ByteSchedulerConfig {
    /// `BYTESCHEDULER_PARTITION`: elements of the largest part.
    pub partition: Option<u32>,
    /// `BYTESCHEDULER_CREDIT`: elements that may be in flight.
    pub credit: Option<u32>,
    /// `BYTESCHEDULER_TIMELINE`: the folder of a timeline, which it starts.
    pub timeline: Option<PathBuf>,
    /// `BYTESCHEDULER_DEBUG`: log everything.
    pub debug: bool,
}

/// Settings of `bps-top`.
#[derive(Clone, PartialEq, Debug)]
pub struct TopConfig {
    /// `--once`: print one table and leave.
    pub once: bool,
    /// `--interval`: time between two looks.
    pub interval: Duration,
}

/// Settings of the launcher.
#[derive(Clone, PartialEq, Debug)]
pub struct LaunchConfig {
    /// `--local`: stand-alone mode with this many workers; 0 takes the job from `DMLC_*`.
    pub local: u32,
    /// `--hosts`: the machines of a job on several, and their ranks.
    pub hosts: Option<String>,
    /// `--hostfile`: the same in a file.
    pub hostfile: Option<PathBuf>,
    /// `--servers`, where it is no number: the machines of servers, and their cores.
    pub server_hosts: Option<String>,
    /// `--scheduler-host`: the machine of the scheduler.
    pub scheduler_host: Option<String>,
    /// `BPS_MAX_WORKERS`: most ranks; with it, new ranks take the places of those that have died.
    pub max_workers: Option<u32>,
    /// `--host-discovery`: a command that prints the machines that there are.
    pub discovery: Option<String>,
    /// `--slots`: ranks of a machine whose line has no number.
    pub slots: u32,
    /// `BPS_DISCOVERY_INTERVAL`: time between two runs of that command.
    pub discovery_interval: Duration,
    /// `BPS_DISCOVERY_TIMEOUT`: how long a run of it may take.
    pub discovery_timeout: Duration,
    /// `BPS_RESTART_DELAY`: how long a machine is left out after a failure.
    pub restart_delay: Duration,
    /// `BPS_RESTART_DELAY_MAX`: the same after many failures in a row.
    pub restart_delay_max: Duration,
    /// `--env`: variables for all processes, `NAME` or `NAME=VALUE`.
    pub pass: Vec<String>,
    /// `--chdir`: the folder in which processes start.
    pub chdir: Option<PathBuf>,
    /// `--ssh-port`; 0 leaves it to ssh.
    pub ssh_port: u16,
    /// `--ssh-user`: whom to log in as.
    pub ssh_user: Option<String>,
    /// `--ssh-command`: the client, with options of its own.
    pub ssh_command: String,
    /// `--ssh-timeout`: how long a machine may take to answer.
    pub ssh_timeout: Duration,
    /// `--remote-program`: `bpslaunch` on the other machines.
    pub remote_program: Option<String>,
    /// `--agent`: be the part that runs on each machine.
    pub agent: bool,
    /// `--no-prefix`: pass output through untouched.
    pub no_prefix: bool,
    /// `--grace`: how long a process that was asked to end may take before it is killed.
    pub grace: Duration,
    /// `--dry-run`: print what would be started, and leave.
    pub dry_run: bool,
    /// `--gpus`: whether each worker process has a GPU of its own.
    pub gpus: Gpus,
    /// `CUDA_VISIBLE_DEVICES`; empty is not the same as unset.
    pub cuda_visible: Option<String>,
    /// `CUDA_DEVICE_ORDER`.
    pub cuda_order: Option<String>,
    /// `NVIDIA_VISIBLE_DEVICES`: one worker process for each entry.
    pub visible_devices: Option<String>,
    /// `BYTEPS_ENABLE_GDB`: run workers under gdb.
    pub gdb: bool,
    /// `BYTEPS_NUMA_ON`: give each worker process its own cores.
    pub numa: bool,
    /// `BYTEPS_NUMA_DEFAULT_QUOTA`: physical cores of a process; 0 divides them evenly.
    pub numa_default_quota: u32,
    /// `BYTEPS_NUMA_ROOT_QUOTA`: physical cores of the last process; 0 takes what is left.
    pub numa_root_quota: u32,
    /// `BYTEPS_MULTITHREADED_CPU`: add each core's hyper-thread siblings.
    pub multithreaded_cpu: bool,
    /// `BYTEPS_CPU_BLACKLIST`: CPUs that no process gets.
    pub cpu_blacklist: Option<String>,
    /// `BYTEPS_VISIBLE_CPU_CORES`: one list of CPUs a process, separated by colons.
    pub visible_cpu_cores: Option<String>,
}

/// What a job does when one of its members dies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ElasticMode {
    /// It ends.
    None,
    /// The others form it again, and redo the step.
    Redo,
    /// Rounds go on without a rank, where they can; else as `Redo`.
    Shrink,
}

/// Which payloads carry a CRC-32C.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PayloadChecksum {
    /// Those on lanes where bytes may change unnoticed: over TCP to other hosts.
    Auto,
    /// All.
    Always,
    /// None.
    Never,
}

/// How far tensors are encoded whose encoding is `auto`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AutoCompression {
    /// As far as that is measured to save time.
    Measured,
    /// Not at all.
    None,
    /// As bf16, where that is shorter.
    Bf16,
    /// By the codec that they name.
    Codec,
}

/// Whether RDMA devices reach the memory of GPUs by themselves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GpuDirect {
    /// Where a trial at the start shows that they do, and as fast as that of the host.
    Auto,
    /// An error where they can't; a slow way is taken.
    Demand,
    /// Never.
    None,
}

/// What the launcher does about GPUs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Gpus {
    /// Binds each worker process to its GPU where there are enough of them.
    Auto,
    /// Starts nothing where there are too few.
    Demand,
    /// Pays no regard to them.
    None,
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
            stays: false,
            elastic: ElasticMode::None,
            min_workers: None,
            elastic_wait: Duration::ZERO,
            scheduler_wait: Duration::from_secs(60),
            leave_notice: Duration::from_secs(30),
            joins: false,
            root_uri: String::new(),
            root_port: 0,
            interface: None,
            node_host: None,
            port: 0,
            preferred_rank: None,
            server_cores: 1,
            partition_bytes: 256 << 10,
            min_compress_bytes: 64 << 10,
            auto_compression: AutoCompression::Measured,
            enable_async: false,
            staleness: None,
            backup_workers: 0,
            backup_behind: 4,
            scheduling_credit: 0,
            tune_credit: false,
            tune_partition: false,
            tune_file: None,
            placement: Placement::Balanced,
            mixed_bound: 101,
            built_in_coefficient: 1,
            local_reduce: true,
            host_id: None,
            transport: TransportChoice::Auto,
            rdma_on_demand: false,
            gpu_staging_mb: 4096,
            gpudirect: GpuDirect::Auto,
            tcp_driver: TcpDriver::Auto,
            tcp_congestion: None,
            tcp_offload: false,
            tcp_send_buffer: 0,
            nccl_library: None,
            nccl_group_size: 0,
            nccl_rings: 0,
            reduce_roots: Vec::new(),
            switch_size: 0,
            payload_checksum: PayloadChecksum::Never,
            idle: Idle::Adaptive,
            pin: true,
            nic_helpers: None,
            job_key: None,
            job_key_file: None,
            encrypt: false,
            start_timeout: Duration::from_secs(120),
            stall_report: Duration::from_secs(3),
            stall_timeout: Duration::from_secs(300),
            heartbeat_interval: Duration::from_millis(500),
            heartbeat_timeout: Duration::from_secs(4),
            log_level: LogLevel::Info,
            trace_on: false,
            trace_dir: Some("trace".into()),
            trace_start_step: 10,
            trace_end_step: 20,
            metrics_port: None,
            server_metrics_port: None,
            metrics_address: "127.0.0.1".into(),
            link_speed: None,
            bytescheduler: ByteSchedulerConfig::default(),
            top: TopConfig { once: false, interval: Duration::from_secs(1) },
            launch: LaunchConfig::default(),
        }
    }
}

impl Default for LaunchConfig {
    fn default() -> LaunchConfig {
        LaunchConfig {
            local: 0,
            hosts: None,
            hostfile: None,
            server_hosts: None,
            scheduler_host: None,
            max_workers: None,
            discovery: None,
            slots: 1,
            discovery_interval: Duration::from_secs(1),
            discovery_timeout: Duration::from_secs(10),
            restart_delay: Duration::from_secs(1),
            restart_delay_max: Duration::from_secs(600),
            pass: Vec::new(),
            chdir: None,
            ssh_port: 0,
            ssh_user: None,
            ssh_command: "ssh".into(),
            ssh_timeout: Duration::from_secs(30),
            remote_program: None,
            agent: false,
            no_prefix: false,
            grace: Duration::from_secs(5),
            dry_run: false,
            gpus: Gpus::Auto,
            cuda_visible: None,
            cuda_order: None,
            visible_devices: None,
            gdb: false,
            numa: true,
            numa_default_quota: 0,
            numa_root_quota: 0,
            multithreaded_cpu: true,
            cpu_blacklist: None,
            visible_cpu_cores: None,
        }
    }
}

impl Config {
    /// How long a member that is told to end has to leave its job, if that goes on without it.
    #[must_use]
    pub fn leaves_within(&self) -> Option<Duration> {
        (self.elastic != ElasticMode::None).then_some(self.leave_notice)
    }

    /// Worker processes of the whole job.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.num_workers.saturating_mul(self.local_size)
    }

    /// This worker process's number in the job.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.global_rank.unwrap_or_else(|| {
            self.worker_id.saturating_mul(self.local_size).saturating_add(self.local_rank)
        })
    }

    /// The folder of timelines that nobody names a folder for.
    #[must_use]
    pub fn trace_folder(&self) -> PathBuf {
        self.trace_dir.clone().unwrap_or_else(|| "trace".into())
    }

    /// Whether this job needs a scheduler: more than one rank, or the user insists. It needs
    /// servers too unless all ranks are on one host and reduce among themselves.
    #[must_use]
    pub fn distributed(&self) -> bool {
        self.force_distributed || self.size() > 1
    }

    /// How long a lane's peer may acknowledge nothing of what was sent before the path to it counts
    /// as lost. After an outage, TCP sends again when it has waited for twice its length at most:
    /// one that the heartbeats survive must not cost the lanes.
    #[must_use]
    pub fn lane_silence(&self) -> Duration {
        2 * self.heartbeat_timeout + self.heartbeat_interval
    }

    /// Ranks below each PCIe switch of a host, where there are several switches.
    #[must_use]
    pub fn ranks_of_switch(&self) -> Option<u32> {
        Some(self.switch_size).filter(|size| (1..self.local_size).contains(size))
    }

    /// Whether sums pass through servers: not where the ranks of the only machine reduce among
    /// themselves.
    #[must_use]
    pub fn needs_servers(&self) -> bool {
        self.force_distributed || self.num_workers > 1 || self.size() > 1 && !self.local_reduce
    }
}

/// Prints every row of the table, and never the job key.
impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(TABLE.iter().map(|row| (row.name(), row.shown(self)))).finish()
    }
}
