//! Whole jobs of real processes whose tensors are on fake GPUs (`tests/fake_gpu`), for the
//! tests in `gpu_pipeline.rs` and `gpu_options.rs`.

use crate::fake_gpu;
use crate::job::free_port;
use crate::program::{self, Program};
use std::time::{Duration, Instant};

/// How long a job that ends well may take.
pub const LIMIT: Duration = Duration::from_secs(60);
/// What the documents promise, and a little for a machine that is busy with other tests.
pub const PROMISE: Duration = Duration::from_secs(5);
/// See [`PROMISE`].
pub const SLACK: Duration = Duration::from_secs(3);

/// The processes of a job.
pub struct Job {
    /// The one.
    pub scheduler: Program,
    /// By no order.
    pub servers: Vec<Program>,
    /// By rank.
    pub ranks: Vec<Program>,
}

/// What a job is: ranks by host, servers, and settings of all its processes.
pub struct Shape<'a> {
    /// Ranks of each.
    pub hosts: &'a [u32],
    /// How many.
    pub servers: u32,
    /// Of every process that uses them.
    pub settings: &'a [(&'static str, &'a str)],
}

/// Variables and their values.
pub type Variables = Vec<(&'static str, String)>;

/// What the variables say of machines, and of processes on each: the hosts, where they are alike.
fn machines(shape: &Shape<'_>) -> (u32, u32) {
    let ranks: u32 = shape.hosts.iter().sum();
    match shape.hosts {
        [size, others @ ..] if others.iter().all(|other| other == size) => (ranks / size, *size),
        _ => (ranks, 1),
    }
}

fn variables(shape: &Shape<'_>, port: u16, role: &str) -> Variables {
    let (machines, processes) = machines(shape);
    let mut all: Variables = vec![
        ("DMLC_ROLE", role.to_owned()),
        ("DMLC_NUM_WORKER", machines.to_string()),
        ("BYTEPS_LOCAL_SIZE", processes.to_string()),
        ("DMLC_NUM_SERVER", shape.servers.to_string()),
        ("DMLC_PS_ROOT_URI", "127.0.0.1".into()),
        ("DMLC_PS_ROOT_PORT", port.to_string()),
        ("DMLC_NODE_HOST", "127.0.0.1".into()),
        ("BPS_PIN", "0".into()),
        ("BPS_LOG_LEVEL", "warning".into()),
        ("FAKE_GPU_COUNT", "8".into()),
        ("LD_LIBRARY_PATH", fake_gpu::library_path().display().to_string()),
    ];
    // Who does not use a setting says so.
    let used = |name: &str| role == "worker" || !name.contains("_NCCL_");
    let settings = shape.settings.iter().filter(|(name, _)| used(name));
    all.extend(settings.map(|&(name, value)| (name, value.to_owned())));
    all
}

/// Starts a job; `rank` gives each rank's arguments behind its host, and settings of its own.
#[must_use]
pub fn start(shape: &Shape<'_>, rank: impl Fn(u32) -> (Vec<String>, Variables)) -> Job {
    let port = free_port();
    let scheduler = Program::start("bps-scheduler", &[], &variables(shape, port, "scheduler"));
    let memlock = shape.settings.iter().find(|(name, _)| *name == SERVER_MEMLOCK);
    let server = |_| {
        let variables = variables(shape, port, "server");
        match memlock {
            None => Program::start("bps-server", &["--cores", "1"], &variables),
            Some((_, bytes)) => server_of_little_memory(bytes, &variables),
        }
    };
    let servers = (0..shape.servers).map(server).collect();
    let hosts = (0..).zip(shape.hosts).flat_map(|(host, &size)| (0..size).map(move |_| host));
    let one = |(index, host): (u32, u32)| {
        let (scenario, own) = rank(index);
        let mut all = variables(shape, port, "worker");
        let (_, processes) = machines(shape);
        all.push(("DMLC_WORKER_ID", (index / processes).to_string()));
        all.push(("BYTEPS_LOCAL_RANK", (index % processes).to_string()));
        all.push(("CUDA_VISIBLE_DEVICES", format!("{index},7")));
        all.extend(own);
        let host = host.to_string();
        let arguments: Vec<&str> =
            std::iter::once(host.as_str()).chain(scenario.iter().map(String::as_str)).collect();
        Program::start("bps-test-gpu-rank", &arguments, &all)
    };
    let ranks = (0..).zip(hosts).map(one).collect();
    Job { scheduler, servers, ranks }
}

/// Among the settings of a [`Shape`]: the bytes of memory that servers may lock, although the root
/// that runs them may lock all.
pub const SERVER_MEMLOCK: &str = "TEST_SERVER_MEMLOCK";

fn server_of_little_memory(bytes: &str, variables: &[(&'static str, String)]) -> Program {
    let limit = format!("--memlock={bytes}");
    let server = program::path("bps-server").display().to_string();
    let words = ["--bounding-set=-ipc_lock", "prlimit", &limit, &server, "--cores", "1"];
    Program::start("/usr/bin/setpriv", &words, variables)
}

/// As [`start`], with the same words for all ranks.
#[must_use]
pub fn start_all(shape: &Shape<'_>, scenario: &str) -> Job {
    start(shape, |_| (words(scenario), Variables::new()))
}

/// As a list.
#[must_use]
pub fn words(scenario: &str) -> Vec<String> {
    scenario.split(' ').map(str::to_owned).collect()
}

impl Job {
    /// All end well, and no process says anything.
    #[track_caller]
    pub fn ends_in_silence(mut self) {
        for rank in &mut self.ranks {
            let status = rank.wait(LIMIT);
            let said = rank.lines();
            assert!(status.success() && said == ["rank ended: ok"], "{}", said.join("\n"));
        }
        for other in self.servers.iter_mut().chain([&mut self.scheduler]) {
            let status = other.wait(LIMIT);
            let said = other.lines();
            assert!(status.success() && said.is_empty(), "{}", said.join("\n"));
        }
    }

    /// The ranks but one, and whether each ends by itself in time, with a line that has these
    /// words.
    #[track_caller]
    pub fn others_end_with(&mut self, but: usize, words: &[&str], since: Instant, limit: Duration) {
        for (index, rank) in self.ranks.iter_mut().enumerate().filter(|(at, _)| *at != but) {
            let status = rank.wait(limit.saturating_sub(since.elapsed()));
            let said = rank.lines().join("\n");
            assert!(!status.success(), "rank {index} ended as if all were well:\n{said}");
            let line = said.lines().find(|line| words.iter().all(|word| line.contains(word)));
            assert!(line.is_some(), "rank {index} has no line with {words:?} in:\n{said}");
        }
    }
}

/// Runs a job that ends well, and tells how long it took.
pub fn right(hosts: &[u32], servers: u32, scenario: &str, settings: &[(&'static str, &str)]) {
    let begun = Instant::now();
    let settings = [&[("BYTEPS_PARTITION_BYTES", "16384")], settings].concat();
    start_all(&Shape { hosts, servers, settings: &settings }, scenario).ends_in_silence();
    println!("hosts of {hosts:?} ranks, {servers} servers, {settings:?}: {:?}", begun.elapsed());
}

/// Starts a job in which every rank trains on, and waits until all have begun.
#[must_use]
pub fn running(shape: &Shape<'_>) -> Job {
    let job = start_all(shape, "loop 1000000");
    for rank in &job.ranks {
        let _ = rank.wait_for_line("rank has begun", LIMIT);
    }
    job
}

/// One rank's words, and those of all others.
#[must_use]
pub fn start_but(shape: &Shape<'_>, odd: u32, its: &str, others: &str) -> Job {
    start(shape, |rank| (words(if rank == odd { its } else { others }), Variables::new()))
}
