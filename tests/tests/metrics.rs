//! Every metric of the table moves: a job of real programs in which everything happens that is
//! counted, scraped as Prometheus would.
//!
//! Rank 0 is a real worker. Ranks 1 and 2 are played by hand, because no worker of ours would stop
//! in the middle of a payload, leave its results unread, or send what does not fit.

use bps_engine::base::{DType, Key, Operation, Placement, Rank, Round};
use bps_engine::config::{AutoCompression, Role, TransportChoice};
use bps_engine::control::{ControlLink, Hello, JobKey, LinkSender, dial};
use bps_engine::metrics::{FAMILIES, Kind};
use bps_engine::proto::messages::{
    Assignment, Declaration, Node, NodeMessage, Planning, Register, Roster, SchedulerMessage,
};
use bps_engine::wire::{Header, Kind as FrameKind};
use bps_tests::job::{self, JobShape, free_port};
use bps_tests::program::{Program, path};
use bps_worker::Members;
use bps_worker::{PushPull, Worker};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const RANKS: u32 = 3;
const PART_BYTES: u32 = 64 << 10;
/// More than a lane and the kernel's buffers hold, so that publications must wait.
const PARTS: u64 = 640;
const BYTES: u64 = PARTS * PART_BYTES as u64;
/// Of jobs that nobody outlives, these are 0 or absent: tests of the scheduler look at those of the
/// job, and `sim.rs` at the last, which moves when a rank dies in the middle of a part.
const OF_ELASTIC_JOBS: [&str; 7] = [
    "bps_job_deaths_total",
    "bps_job_waited_seconds_total",
    "bps_job_change_seconds",
    "bps_job_change_uptime_seconds",
    "bps_job_reforming_seconds",
    "bps_core_short_rounds_total",
    "bps_core_restarted_rounds_total",
];
/// Of jobs that tune themselves, likewise: they have a test of their own.
const OF_TUNING_JOBS: &str = "bps_job_tuning_";
/// Of tensors that are encoded, likewise; that of lines is in `network.rs`.
const OF_CODECS: [&str; 3] = ["bps_rank_auto_", "bps_rank_line_", "bps_rank_spared_"];
/// Of rounds that do not wait for slow ranks: `server/tests/shard/short.rs` looks at them.
const OF_BACKUPS: [&str; 2] = ["bps_core_late_", "bps_core_backup_"];
const PATIENCE: Duration = Duration::from_secs(30);

fn declaration() -> Declaration {
    Declaration {
        name: "w".into(),
        dtype: DType::F32,
        shape: (BYTES / 4).into(),
        operation: Operation::Average,
        device: false,
        members: Members::ALL,
        receiver: None,
        encoding: None,
        store: None,
    }
}

fn variables(port: u16, role: &str) -> Vec<(&'static str, String)> {
    let fixed = [
        ("DMLC_ROLE", role),
        ("DMLC_NUM_WORKER", "3"),
        ("DMLC_NUM_SERVER", "1"),
        ("DMLC_PS_ROOT_URI", "127.0.0.1"),
        ("DMLC_NODE_HOST", "127.0.0.1"),
        ("BPS_PIN", "0"),
        ("BPS_LOCAL_REDUCE", "0"),
        ("BPS_STALL_REPORT", "0.3"),
        ("BPS_HEARTBEAT_INTERVAL", "0.1"),
        ("BPS_LINK_SPEED", "1000"),
        ("BPS_SERVER_METRICS_PORT", "0"),
        ("BPS_METRICS_PORT", "0"),
    ];
    let known = |name: &str| match role {
        "scheduler" => !matches!(name, "BPS_SERVER_METRICS_PORT" | "BPS_LINK_SPEED"),
        _ => name != "BPS_METRICS_PORT",
    };
    let mut all: Vec<(&'static str, String)> = fixed
        .into_iter()
        .filter(|(name, _)| known(name))
        .map(|(name, value)| (name, value.to_owned()))
        .collect();
    all.push(("DMLC_PS_ROOT_PORT", port.to_string()));
    all
}

/// Where a program says that its metrics are.
fn announced(program: &Program) -> String {
    let line = program.wait_for_line("http://", PATIENCE);
    let at = line.split_once("http://").expect("it was waited for").1;
    at.trim_end_matches("/metrics").to_owned()
}

/// A page, by name and labels.
fn scrape(address: &str) -> BTreeMap<String, f64> {
    let mut stream = TcpStream::connect(address).expect("it listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout is not zero");
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: test\r\n\r\n").expect("it reads");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("it answers");
    let (head, body) = text.split_once("\r\n\r\n").expect("a head and a body");
    assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
    let samples = body.lines().filter(|line| !line.starts_with('#')).map(|line| {
        let (name, value) = line.rsplit_once(' ').expect("a name and a value");
        (name.to_owned(), value.parse().expect("a number"))
    });
    samples.collect()
}

/// What was seen of a job so far.
struct Watcher {
    address: String,
    /// Families that had a value other than 0.
    moved: BTreeSet<&'static str>,
    /// The highest value of each counter.
    counters: BTreeMap<String, f64>,
}

impl Watcher {
    fn look(&mut self) -> BTreeMap<String, f64> {
        let page = scrape(&self.address);
        for (sample, value) in &page {
            let name = sample.split('{').next().expect("a name");
            let family = FAMILIES.iter().find(|family| family.name == name);
            let family = family.unwrap_or_else(|| panic!("{name} is in no table"));
            if *value != 0.0 {
                self.moved.insert(family.name);
            }
            if family.kind == Kind::Counter {
                let before = self.counters.insert(sample.clone(), *value).unwrap_or(0.0);
                assert!(*value >= before, "{sample} went back from {before} to {value}");
            }
        }
        page
    }

    /// Looks until these are above 0, by beginning of name and labels.
    fn until_moved(&mut self, wanted: &[&str]) {
        let until = Instant::now() + PATIENCE;
        loop {
            let page = self.look();
            let moved = |name: &&str| {
                page.iter().any(|(sample, value)| sample.starts_with(name) && *value > 0.0)
            };
            let still: Vec<&&str> = wanted.iter().filter(|name| !moved(name)).collect();
            if still.is_empty() {
                return;
            }
            assert!(Instant::now() < until, "{still:?} stay 0:\n{page:#?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// A rank by hand.
struct Played {
    roster: Roster,
    assignment: Assignment,
    lane: TcpStream,
    leaving: Arc<AtomicBool>,
    control: Option<JoinHandle<()>>,
}

impl Played {
    fn register(port: u16, worker_id: u32) -> (LinkSender, JoinHandle<Played>) {
        let key = JobKey::load(&bps_engine::config::Config::default()).expect("an open job");
        let link = ControlLink::connect("127.0.0.1", port, &key, PATIENCE).expect("a scheduler");
        let (sender, mut receiver) = link.split();
        let register = Register {
            node: Node::Worker {
                worker_id,
                local_rank: 0,
                local_size: 1,
                global_rank: None,
                local: None,
                planning: Planning {
                    partition_bytes: PART_BYTES,
                    placement: Placement::Balanced,
                    mixed_bound: 101,
                    built_in_coefficient: 1,
                    local_reduce: false,
                    force_distributed: true,
                    reduce_roots: Vec::new(),
                    switch_size: 0,
                    tuning: bps_engine::proto::tuning::Tuning::OFF,
                },
                speaks: None,
            },
            host: bps_engine::host::name(),
            host_id: bps_engine::host::id(),
            pid: std::process::id(),
            instance: 0,
            session: 0,
            former: None,
            release: env!("CARGO_PKG_VERSION").into(),
            encrypt: false,
            num_workers: RANKS,
            num_servers: 1,
        };
        sender.send(&NodeMessage::Register(register)).expect("the scheduler reads");
        let speaker = sender.clone();
        let joined = std::thread::spawn(move || {
            let mut roster = None;
            let assignment = loop {
                match receiver.receive(PATIENCE).expect("the scheduler is there") {
                    Some(SchedulerMessage::Roster(one)) => {
                        let declare =
                            NodeMessage::Declare { request: 1, tensors: vec![declaration()] };
                        speaker.send(&declare).expect("the scheduler reads");
                        roster = Some(one);
                    }
                    Some(SchedulerMessage::Declared { mut tensors, .. }) => {
                        break tensors.remove(0);
                    }
                    Some(SchedulerMessage::Waiting { .. }) => {}
                    other => panic!("rank {worker_id} got {other:?}"),
                }
            };
            let roster = roster.expect("it comes first");
            let hello = Hello::lane(Rank(roster.index), roster.epoch);
            let lane = dial(roster.servers[0].cores[0], &key, hello, PATIENCE).expect("a core");
            let leaving = Arc::new(AtomicBool::new(false));
            let leaves = Arc::clone(&leaving);
            let control = std::thread::spawn(move || {
                while !leaves.load(Ordering::Acquire)
                    && receiver.receive(Duration::from_millis(50)).is_ok()
                {
                    let _ = speaker.send(&NodeMessage::Heartbeat { rounds: 0 });
                }
            });
            Played { roster, assignment, lane, leaving, control: Some(control) }
        });
        (sender, joined)
    }

    fn header(&self, key: Key) -> Vec<u8> {
        let rank = Rank(self.roster.index);
        let mut header = Header::new(FrameKind::Contribution, DType::F32, rank, self.roster.epoch);
        header.key = key;
        header.round = Round(1);
        header.length = PART_BYTES;
        header.contributors = 1;
        header.encode().to_vec()
    }

    fn write(&mut self, bytes: &[u8]) {
        self.lane.write_all(bytes).expect("the core reads");
    }

    /// Contributes to all parts but the first.
    fn contribute_the_rest(&mut self) {
        let payload = vec![0; PART_BYTES as usize];
        for at in 1..self.assignment.parts.len() {
            let header = self.header(self.assignment.parts[at].key);
            self.write(&header);
            self.write(&payload);
        }
    }
}

impl Drop for Played {
    fn drop(&mut self) {
        self.leaving.store(true, Ordering::Release);
        if let Some(control) = self.control.take() {
            let _ = control.join();
        }
    }
}

/// Rank 0: pushes the tensor once and keeps the job alive until it is told to go.
fn real_rank(port: u16, go: Arc<AtomicBool>) -> JoinHandle<()> {
    let shape = JobShape {
        workers: RANKS,
        partition_bytes: PART_BYTES,
        transport: TransportChoice::Tcp,
        ..JobShape::default()
    };
    let mut config = job::config(&shape, port, Role::Worker, 0);
    config.heartbeat_interval = Duration::from_millis(100);
    std::thread::spawn(move || {
        let worker = Worker::start(&config).expect("the job forms");
        let tensor = worker.declare(&[declaration()]).expect("all agree")[0];
        while !go.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let mut memory = vec![0u8; usize::try_from(BYTES).expect("64 bits")];
        let target = memory.as_mut_ptr();
        let item = PushPull { tensor, source: target.cast_const(), target, priority: 0 };
        // SAFETY: `memory` lives until the handle is done, and nobody touches it meanwhile.
        let handles = unsafe { worker.push_pull(&[item]) }.expect("the job runs");
        assert!(handles[0].wait(Some(PATIENCE)).expect("the job runs"), "it hangs");
        while go.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(10));
        }
        // The others are still there: it need not end well.
        let _ = worker.shutdown(false);
    })
}

/// What `bps-top --once` prints of this scheduler.
fn top(address: &str) -> String {
    let port = address.rsplit_once(':').expect("a port").1;
    let output = std::process::Command::new(path("bps-top"))
        .args(["--once", "--metrics-port", port])
        .env_remove("BPS_METRICS_ADDRESS")
        .output()
        .expect("it is built");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn every_metric_of_the_table_moves() {
    let port = free_port();
    let scheduler = Program::start("bps-scheduler", &[], &variables(port, "scheduler"));
    let server = Program::start("bps-server", &["--cores", "1"], &variables(port, "server"));
    let mut watcher = Watcher {
        address: announced(&scheduler),
        moved: BTreeSet::new(),
        counters: BTreeMap::new(),
    };
    let own = announced(&server);
    let go = Arc::new(AtomicBool::new(false));
    let real = real_rank(port, Arc::clone(&go));
    let joining: Vec<_> = (1..RANKS).map(|worker| Played::register(port, worker)).collect();
    let mut played: Vec<Played> =
        joining.into_iter().map(|(_, joined)| joined.join().expect("it joins")).collect();
    watcher.until_moved(&["bps_job_formed", "bps_core_lanes", "bps_core_keys"]);

    // Rank 1 stops in the middle of its first payload, rank 2 has to wait behind it, and so does
    // rank 0 with all that comes after.
    let payload = vec![0; PART_BYTES as usize];
    let first = played[0].header(played[0].assignment.parts[0].key);
    played[0].write(&first);
    played[0].write(&payload[..payload.len() / 2]);
    watcher.until_moved(&["bps_core_receive_frames_total"]);
    let second = played[1].header(played[1].assignment.parts[0].key);
    played[1].write(&second);
    played[1].write(&payload);
    go.store(true, Ordering::Release);
    watcher.until_moved(&[
        "bps_core_parked{",
        "bps_core_parked_total",
        "bps_core_stalls_total",
        "bps_rank_parts_waiting{rank=\"0\"}",
        "bps_rank_waited_for{rank=\"1\"}",
        "bps_job_stalls",
        "bps_job_stall_seconds",
        "bps_job_path_stalls",
    ]);
    let table = top(&watcher.address);
    assert!(table.contains("STALLED for") && table.contains("WAITED FOR"), "{table}");
    assert!(table.contains("3 ranks, 1 server, epoch 1"), "{table}");

    // All go on, but nobody reads results for ranks 1 and 2.
    played[0].write(&payload[payload.len() / 2..]);
    std::thread::scope(|scope| {
        for rank in &mut played {
            scope.spawn(|| rank.contribute_the_rest());
        }
    });
    watcher.until_moved(&["bps_core_publications_waiting", "bps_core_full_total"]);
    played[1].write(&[0xa5; 64]);
    watcher.until_moved(&["bps_core_refused_frames_total"]);

    // Everything is counted exactly once.
    let exact = [
        ("bps_core_receive_bytes_total{server=\"0\",core=\"0\"}", u64::from(RANKS) * BYTES),
        ("bps_core_rounds_total{server=\"0\",core=\"0\"}", PARTS),
        ("bps_core_receive_frames_total{server=\"0\",core=\"0\"}", u64::from(RANKS) * PARTS + 1),
        ("bps_core_refused_frames_total{server=\"0\",core=\"0\"}", 1),
        ("bps_rank_transmit_bytes_total{rank=\"0\"}", BYTES),
        ("bps_rank_receive_bytes_total{rank=\"0\"}", BYTES),
        ("bps_rank_transmit_frames_total{rank=\"0\"}", PARTS),
        ("bps_rank_receive_frames_total{rank=\"0\"}", PARTS),
        ("bps_rank_rounds_total{rank=\"0\"}", PARTS),
    ];
    let until = Instant::now() + PATIENCE;
    for (sample, wanted) in exact {
        #[allow(clippy::cast_precision_loss, reason = "small numbers")]
        while watcher.look().get(sample) != Some(&(wanted as f64)) {
            assert!(Instant::now() < until, "{sample} is not {wanted}: {:#?}", watcher.counters);
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    let page = scrape(&own);
    assert!(page.keys().any(|sample| sample.starts_with("bps_core_rounds_total{server=\"0\"")));
    assert!(!page.keys().any(|sample| sample.starts_with("bps_job")), "a server sees itself alone");
    let still: Vec<&str> = FAMILIES
        .iter()
        .map(|family| family.name)
        .filter(|name| !watcher.moved.contains(name) && !OF_ELASTIC_JOBS.contains(name))
        .filter(|name| !name.starts_with(OF_TUNING_JOBS))
        .filter(|name| !OF_CODECS.iter().any(|of| name.starts_with(of)))
        .filter(|name| !OF_BACKUPS.iter().any(|of| name.starts_with(of)))
        .collect();
    go.store(false, Ordering::Release);
    real.join().expect("rank 0 got its result");
    assert!(still.is_empty(), "these never moved: {still:?}");
}

#[test]
fn an_elastic_job_counts_its_dead() {
    let port = free_port();
    let mut elastic = variables(port, "scheduler");
    elastic.extend([("BPS_ELASTIC", "redo".into()), ("BPS_ELASTIC_WAIT", "60".into())]);
    let scheduler = Program::start("bps-scheduler", &[], &elastic);
    let _server = Program::start("bps-server", &["--cores", "1"], &variables(port, "server"));
    let address = announced(&scheduler);
    let mut watcher = Watcher { address, moved: BTreeSet::new(), counters: BTreeMap::new() };
    let joining: Vec<_> = (0..RANKS).map(|worker| Played::register(port, worker)).collect();
    let mut played: Vec<Played> =
        joining.into_iter().map(|(_, joined)| joined.join().expect("it joins")).collect();
    watcher.until_moved(&["bps_job_formed"]);
    assert_eq!(watcher.look().get("bps_job_deaths_total"), Some(&0.0));
    drop(played.pop());
    watcher.until_moved(&["bps_job_deaths_total"]);
    assert!(top(&watcher.address).contains("epoch 2, 1 member lost"), "{}", top(&watcher.address));
}

#[test]
fn a_job_that_tunes_itself_counts_its_trials() {
    let port = free_port();
    let scheduler = Program::start("bps-scheduler", &[], &variables(port, "scheduler"));
    let _server = Program::start("bps-server", &["--cores", "1"], &variables(port, "server"));
    let address = announced(&scheduler);
    let mut watcher = Watcher { address, moved: BTreeSet::new(), counters: BTreeMap::new() };
    let is_over = Arc::new(AtomicBool::new(false));
    let ranks: Vec<_> = (0..RANKS)
        .map(|rank| {
            let shape =
                JobShape { workers: RANKS, partition_bytes: PART_BYTES, ..JobShape::default() };
            let mut config = job::config(&shape, port, Role::Worker, rank);
            (config.tune_credit, config.tune_partition) = (true, true);
            let is_over = Arc::clone(&is_over);
            std::thread::spawn(move || {
                step_until(&Worker::start(&config).expect("a job"), &is_over)
            })
        })
        .collect();
    let wanted: Vec<&str> = FAMILIES
        .iter()
        .map(|family| family.name)
        .filter(|name| name.starts_with(OF_TUNING_JOBS))
        .collect();
    let until = Instant::now() + PATIENCE;
    while !wanted.iter().all(|name| watcher.moved.contains(name)) {
        watcher.look();
        assert!(Instant::now() < until, "of {wanted:?} moved {:?}", watcher.moved);
        std::thread::sleep(Duration::from_millis(5));
    }
    is_over.store(true, Ordering::Release);
    ranks.into_iter().for_each(|rank| rank.join().expect("every sum was right"));
}

/// Sums a tensor until all ranks know that it is over.
fn step_until(worker: &Worker, is_over: &AtomicBool) {
    let small = Declaration { shape: u64::from(PART_BYTES).into(), ..declaration() };
    let tensor = worker.declare(&[small]).expect("all agree")[0];
    let mut memory = vec![0u8; 4 * PART_BYTES as usize];
    loop {
        // The average of the first element says how many have seen the end.
        let ends = f32::from(u8::from(is_over.load(Ordering::Acquire)));
        memory[..4].copy_from_slice(&ends.to_le_bytes());
        let target = memory.as_mut_ptr();
        let item = PushPull { tensor, source: target.cast_const(), target, priority: 0 };
        // SAFETY: `memory` lives until the handle is done, and nobody touches it meanwhile.
        let handles = unsafe { worker.push_pull(&[item]) }.expect("the job runs");
        assert!(handles[0].wait(Some(PATIENCE)).expect("the job runs"), "it hangs");
        let first = f32::from_le_bytes(memory[..4].try_into().expect("four bytes"));
        if first > 0.0 {
            break;
        }
    }
    worker.shutdown(false).expect("it ends well");
}

#[test]
fn top_says_what_is_missing_or_silent() {
    let run = |arguments: &[&str]| {
        let output = std::process::Command::new(path("bps-top"))
            .args(arguments)
            .env_remove("BPS_METRICS_PORT")
            .output()
            .expect("it is built");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, said) = run(&[]);
    assert!(code == Some(2) && said.contains("BPS_METRICS_PORT"), "{code:?} {said}");
    let port = free_port().to_string();
    let (code, said) = run(&["--metrics-port", &port, "--once"]);
    assert!(code == Some(1) && said.contains("nothing answers"), "{code:?} {said}");
}

#[test]
fn a_port_that_is_taken_is_said_at_start() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = taken.local_addr().expect("an address").port().to_string();
    for (program, role, variable) in [
        ("bps-scheduler", "scheduler", "BPS_METRICS_PORT"),
        ("bps-server", "server", "BPS_SERVER_METRICS_PORT"),
    ] {
        let mut variables = variables(free_port(), role);
        variables.retain(|(name, _)| *name != variable);
        variables.push((variable, port.clone()));
        let mut started = Program::start(program, &[], &variables);
        assert_eq!(started.wait(PATIENCE).code(), Some(2), "{program}");
        let said = started.lines().join("\n");
        assert!(said.contains(variable) && said.contains("can't show metrics"), "{said}");
    }
}

#[test]
fn a_job_that_chooses_encodings_says_which() {
    let port = free_port();
    let scheduler = Program::start("bps-scheduler", &[], &variables(port, "scheduler"));
    let _server = Program::start("bps-server", &["--cores", "1"], &variables(port, "server"));
    let address = announced(&scheduler);
    let mut watcher = Watcher { address, moved: BTreeSet::new(), counters: BTreeMap::new() };
    let is_seen = Arc::new(AtomicBool::new(false));
    let ranks: Vec<_> = (0..RANKS)
        .map(|rank| {
            let auto = &[AutoCompression::None, AutoCompression::Bf16, AutoCompression::Codec];
            let shape = JobShape { workers: RANKS, auto, ..JobShape::default() };
            let config = job::config(&shape, port, Role::Worker, rank);
            let is_seen = Arc::clone(&is_seen);
            std::thread::spawn(move || {
                let worker = Worker::start(&config).expect("the job forms");
                let encoding = Some("auto".parse().expect("an encoding"));
                let said = Declaration { encoding, shape: 1024.into(), ..declaration() };
                let tensor = worker.declare(&[said]).expect("all agree")[0];
                let mut memory = vec![0u8; 4096];
                let target = memory.as_mut_ptr();
                let item = PushPull { tensor, source: target.cast_const(), target, priority: 0 };
                // SAFETY: `memory` lives until the handle is done, and nobody touches it meanwhile.
                let handles = unsafe { worker.push_pull(&[item]) }.expect("the job runs");
                assert!(handles[0].wait(Some(PATIENCE)).expect("the job runs"), "it hangs");
                while !is_seen.load(Ordering::Acquire) {
                    std::thread::sleep(Duration::from_millis(10));
                }
                worker.shutdown(false).expect("leaving in good order");
            })
        })
        .collect();
    watcher.until_moved(&[
        "bps_rank_auto_plain_parts{rank=\"0\"}",
        "bps_rank_auto_bf16_parts{rank=\"1\"}",
        "bps_rank_auto_codec_parts{rank=\"2\"}",
        "bps_rank_spared_bytes_total{rank=\"0\"}",
    ]);
    let table = top(&watcher.address);
    assert!(table.contains("auto: 1 of 3 parts encoded, 1 as bf16"), "{table}");
    is_seen.store(true, Ordering::Release);
    for rank in ranks {
        rank.join().expect("a rank ends in good order");
    }
}
