//! How jobs form where something is late, missing, slow or hostile: the job forms all the same, or
//! each node says in time why it does not.

use bps_engine::base::{Placement, Rank};
use bps_engine::config::{Config, LogLevel, Role, TransportChoice};
use bps_engine::control::{Acceptor, ControlLink, JobKey, Listener, Socket, dial_unix};
use bps_engine::host::raise_descriptor_limit;
use bps_engine::proto::handshake::Hello;
use bps_engine::proto::messages::{Node, NodeMessage, Planning, Register, SchedulerMessage};
use bps_engine::transport::Waker;
use bps_engine::transport::shm::{self, ShmOptions};
use bps_server::ServerError;
use bps_tests::job::{self, JobShape, free_port};
use bps_tests::program::Program;
use bps_worker::Worker;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddress, UnixListener};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

const JOIN: Duration = Duration::from_secs(60);

fn variables(port: u16, extra: &[(&'static str, &str)]) -> Vec<(&'static str, String)> {
    let fixed = [
        ("DMLC_NUM_WORKER", "1"),
        ("DMLC_NUM_SERVER", "1"),
        ("DMLC_PS_ROOT_URI", "127.0.0.1"),
        ("DMLC_NODE_HOST", "127.0.0.1"),
        ("BPS_PIN", "0"),
        ("BPS_LOCAL_REDUCE", "0"),
        ("BYTEPS_FORCE_DISTRIBUTED", "1"),
    ];
    let mut all: Vec<(&'static str, String)> =
        fixed.iter().chain(extra).map(|&(name, value)| (name, value.to_owned())).collect();
    all.push(("DMLC_PS_ROOT_PORT", port.to_string()));
    all
}

#[test]
fn a_low_soft_limit_of_descriptors_is_raised() {
    const RANKS: usize = 4;
    let port = free_port();
    // Lanes over TCP, as between machines: 4 ranks × 16 cores at the server.
    let extra = [("DMLC_NUM_WORKER", "4"), ("BPS_SERVER_CORES", "16"), ("BPS_TRANSPORT", "tcp")];
    let limited = "ulimit -Sn 48; exec \"$@\"";
    let scheduler = Program::start_in(limited, "bps-scheduler", &[], &variables(port, &extra));
    let server = Program::start_in(limited, "bps-server", &[], &variables(port, &extra));
    let rank = |index: usize| {
        let mut variables = variables(port, &extra);
        variables.push(("DMLC_WORKER_ID", index.to_string()));
        Program::start_in(limited, "bps-test-rank", &["3"], &variables)
    };
    let mut all: Vec<Program> = (0..RANKS).map(rank).chain([server, scheduler]).collect();
    for program in &mut all {
        let status = program.wait(JOIN);
        assert!(status.success(), "{status}: {}", program.lines().join("\n"));
    }
}

#[test]
fn a_server_waits_for_a_name_that_does_not_resolve_yet() {
    // In a mount namespace of its own, the server sees a file of this test as /etc/hosts, and no
    // name server.
    let folder = std::env::temp_dir().join(format!("bps-test-hosts-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a temporary folder");
    let hosts = folder.join("hosts");
    std::fs::write(&hosts, "127.0.0.1 localhost\n").expect("written");
    std::fs::write(folder.join("resolv.conf"), "nameserver 127.0.0.1\n").expect("written");
    let mounts = format!(
        "mount --bind {0}/hosts /etc/hosts && mount --bind {0}/resolv.conf /etc/resolv.conf",
        folder.display()
    );
    let allowed = Command::new("unshare").args(["-rm", "sh", "-c", &mounts]).output();
    if !allowed.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: no mount namespaces here (unshare -rm)");
        return;
    }
    let script = format!("exec unshare -rm sh -c '{mounts} && exec \"$@\"' sh \"$@\"");
    let port = free_port();
    let early = [("DMLC_PS_ROOT_URI", "scheduler.test"), ("BPS_START_TIMEOUT", "60")];
    let mut server_variables = variables(port, &early);
    // The address to listen on is found by the route to the scheduler.
    server_variables.retain(|(name, _)| *name != "DMLC_NODE_HOST");
    let mut server = Program::start_in(&script, "bps-server", &[], &server_variables);
    let line = server.wait_for_line("can't be resolved", JOIN);
    assert!(line.contains("scheduler.test") && line.contains("trying again"), "{line}");
    let scheduler = Program::start("bps-scheduler", &[], &variables(port, &[]));
    let rank = Program::start("bps-test-rank", &["3"], &variables(port, &[]));
    std::fs::write(&hosts, "127.0.0.1 localhost scheduler.test\n").expect("written");
    let status = server.wait(JOIN);
    assert!(status.success(), "{status}: {}", server.lines().join("\n"));
    for mut program in [scheduler, rank] {
        assert!(program.wait(JOIN).success(), "{}", program.lines().join("\n"));
    }
    std::fs::remove_dir_all(&folder).expect("removed");
}

/// Declares so many elements of 4 bytes at a server of one core, whose program is started by this
/// script. The rank has no such tensor, and pushes nothing.
fn declared(script: &str, elements: u64) -> [Program; 3] {
    let port = free_port();
    let count = elements.to_string();
    let variables = variables(port, &[]);
    let scheduler = Program::start("bps-scheduler", &[], &variables);
    let server = Program::start_in(script, "bps-server", &["--cores", "1"], &variables);
    let rank = Program::start("bps-test-rank", &["0", "0", &count], &variables);
    [scheduler, server, rank]
}

#[test]
fn a_server_that_takes_memory_for_a_while_says_so_before_and_after() {
    let [scheduler, mut server, rank] = declared("exec \"$@\"", 300 << 20);
    let _ = server.wait_for_line("core 0: takes 1.3 GB for declared tensors", JOIN);
    let _ = server.wait_for_line("core 0: has the 1.3 GB after ", JOIN);
    for mut program in [rank, scheduler] {
        assert!(program.wait(JOIN).success(), "{}", program.lines().join("\n"));
    }
    assert!(server.wait(JOIN).success());
    let [_scheduler, mut server, mut rank] = declared("exec \"$@\"", 1000);
    assert!(rank.wait(JOIN).success() && server.wait(JOIN).success());
    let said = server.lines().join("\n");
    assert!(!said.contains("for declared tensors"), "a small one is not worth a line:\n{said}");
}

#[test]
fn a_tensor_larger_than_the_memory_of_its_server_is_an_error_by_name_everywhere() {
    // In a mount namespace of its own, the server sees a file of this test as /proc/meminfo.
    let name = format!("bps-test-meminfo-{}", std::process::id());
    let file = std::env::temp_dir().join(name);
    let text = "MemTotal: 16000000 kB\nMemFree: 8000000 kB\nMemAvailable: 8000000 kB\n";
    std::fs::write(&file, text).expect("written");
    let mount = format!("mount --bind {} /proc/meminfo", file.display());
    let allowed = Command::new("unshare").args(["-rm", "sh", "-c", &mount]).output();
    if !allowed.is_ok_and(|output| output.status.success()) {
        std::fs::remove_file(&file).expect("removed");
        eprintln!("skipped: no mount namespaces here (unshare -rm)");
        return;
    }
    let script = format!("exec unshare -rm sh -c '{mount} && exec \"$@\"' sh \"$@\"");
    let [mut scheduler, mut server, mut rank] = declared(&script, 5_000_000_000);
    let _ = server.wait_for_line("core 0: takes 20.0 GB for declared tensors", JOIN);
    for program in [&mut rank, &mut server, &mut scheduler] {
        let status = program.wait(JOIN);
        let said = program.lines().join("\n");
        assert!(!status.success(), "{said}");
        let words = "bytes are needed but this machine has 8192000000 left";
        assert!(said.contains(words), "{said}");
    }
    let said = rank.lines().join("\n");
    assert!(said.contains("rank ended: server 0 (host "), "{said}");
    std::fs::remove_file(&file).expect("removed");
}

#[test]
fn a_server_does_not_wait_for_ever_for_a_silent_scheduler() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    // It lets the server in, and then says nothing.
    let (keep, _kept) = channel();
    let admit = move |_, _, socket, _| drop(keep.send(socket));
    let listeners = vec![Listener::Tcp(listener)];
    let _scheduler = Acceptor::start(listeners, JobKey::open(), admit, |line| eprintln!("{line}"))
        .expect("runs");
    let config = Config {
        role: Role::Server,
        num_servers: 1,
        root_uri: "127.0.0.1".into(),
        root_port: port,
        pin: false,
        start_timeout: Duration::from_secs(1),
        log_level: LogLevel::Warning,
        ..Config::default()
    };
    let start = Instant::now();
    let (ended, end) = channel();
    std::thread::spawn(move || ended.send(bps_server::run::run(&config)));
    let result = end.recv_timeout(Duration::from_secs(20)).expect("it gives up by itself");
    let Err(error @ ServerError::NotFormed { .. }) = result else { panic!("{result:?}") };
    let text = error.to_string();
    assert!(text.contains("BPS_START_TIMEOUT") && text.contains("127.0.0.1"), "{text}");
    assert!(start.elapsed() >= Duration::from_secs(1), "{:?}", start.elapsed());
}

#[test]
fn a_rank_that_dies_early_is_replaced() {
    let port = free_port();
    let extra = [("DMLC_NUM_WORKER", "2")];
    let mut scheduler = Program::start("bps-scheduler", &[], &variables(port, &extra));
    let rank = |index: &str| {
        let mut variables = variables(port, &extra);
        variables.push(("DMLC_WORKER_ID", index.to_owned()));
        Program::start("bps-test-rank", &["3"], &variables)
    };
    let first = rank("0");
    let _ = first.wait_for_line("waiting for server 0 of 1, worker rank 1 of 2", JOIN);
    drop(first);
    let line = scheduler.wait_for_line("is gone before the job has formed", JOIN);
    assert!(line.contains("rank 0 (host"), "{line}");
    let mut server = Program::start("bps-server", &[], &variables(port, &extra));
    for program in [&mut rank("0"), &mut rank("1"), &mut server, &mut scheduler] {
        let status = program.wait(JOIN);
        assert!(status.success(), "{status}: {}", program.lines().join("\n"));
    }
}

/// A server of one job that holds the lanes which come to it, and does nothing else.
struct FakeServer {
    _acceptor: Acceptor,
    _lanes: Receiver<Socket>,
    _heart: Heart,
}

impl FakeServer {
    /// Registers cores that are reached at `announced`, and lets in whoever comes to `listener`.
    fn join(
        port: u16,
        num_workers: u32,
        announced: Vec<SocketAddr>,
        listener: TcpListener,
    ) -> FakeServer {
        let (keep, lanes) = channel();
        let admit = move |_, _, socket, _| drop(keep.send(socket));
        let listeners = vec![Listener::Tcp(listener)];
        let acceptor =
            Acceptor::start(listeners, JobKey::open(), admit, |line| eprintln!("{line}"))
                .expect("a thread");
        let link =
            ControlLink::connect("127.0.0.1", port, &JobKey::open(), JOIN).expect("a scheduler");
        let node = Node::Server {
            cores: announced,
            shm: None,
            rdma: false,
            colocated: false,
            preferred: None,
        };
        let register = Register {
            node,
            host: "fake".into(),
            host_id: "fake".into(),
            pid: 1,
            instance: 0,
            session: 0,
            former: None,
            release: env!("CARGO_PKG_VERSION").into(),
            encrypt: false,
            num_workers,
            num_servers: 1,
        };
        link.send(&NodeMessage::Register(register)).expect("registered");
        FakeServer { _acceptor: acceptor, _lanes: lanes, _heart: Heart::of(link) }
    }
}

/// Heartbeats of a fake node, until this is dropped.
struct Heart(Arc<AtomicBool>);

impl Heart {
    fn of(link: ControlLink) -> Heart {
        let ended = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&ended);
        let (sender, mut receiver) = link.split();
        std::thread::spawn(move || {
            while !is_over.load(Ordering::Relaxed)
                && sender.send(&NodeMessage::Heartbeat { rounds: 0 }).is_ok()
            {
                let until = Instant::now() + Duration::from_millis(250);
                while Instant::now() < until {
                    let left = until.saturating_duration_since(Instant::now());
                    if receiver.receive(left).is_err() {
                        return;
                    }
                }
            }
        });
        Heart(ended)
    }
}

impl Drop for Heart {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Relays connections to `target`; each byte takes `delay` in each direction. Ends with the test.
fn relay(target: SocketAddr, delay: Duration) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for here in listener.incoming().map_while(Result::ok) {
            let Ok(there) = TcpStream::connect(target) else { return };
            let ends = [(here.try_clone(), there.try_clone()), (Ok(there), Ok(here))];
            for (from, to) in ends {
                let (mut from, mut to) = (from.expect("a copy"), to.expect("a copy"));
                std::thread::spawn(move || {
                    let mut bytes = [0; 4096];
                    while let Ok(count @ 1..) = from.read(&mut bytes) {
                        std::thread::sleep(delay);
                        if to.write_all(&bytes[..count]).is_err() {
                            break;
                        }
                    }
                    let _ = to.shutdown(Shutdown::Both);
                });
            }
        }
    });
    address
}

fn worker_config(port: u16, num_workers: u32) -> Config {
    Config {
        role: Role::Worker,
        num_workers,
        num_servers: 1,
        root_uri: "127.0.0.1".into(),
        root_port: port,
        transport: TransportChoice::Tcp,
        local_reduce: false,
        force_distributed: true,
        pin: false,
        log_level: LogLevel::Warning,
        ..Config::default()
    }
}

#[test]
fn forty_cores_far_away_are_reached_while_the_heart_beats() {
    const CORES: usize = 40;
    // A round trip of 60 ms is paid twice for each lane, by TCP and by the handshake. A relay on
    // loopback delays only the handshake, so it delays it twice as long: one lane after the other,
    // that is 4.8 s, and the scheduler takes four of silence for a death.
    const DELAY: Duration = Duration::from_millis(60);
    let port = free_port();
    let mut scheduler = Program::start("bps-scheduler", &[], &variables(port, &[]));
    let _ = scheduler.wait_for_line("listening", JOIN);
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let target = listener.local_addr().expect("an address");
    let announced = (0..CORES).map(|_| relay(target, DELAY)).collect();
    let server = FakeServer::join(port, 1, announced, listener);
    let worker = Worker::start(&worker_config(port, 1)).expect("the job forms");
    worker.barrier(Some(JOIN)).expect("nobody took it for dead");
    worker.shutdown(false).expect("it leaves in good order");
    let status = scheduler.wait(JOIN);
    assert!(status.success(), "{status}: {}", scheduler.lines().join("\n"));
    drop(server);
}

#[test]
fn a_death_is_heard_of_while_lanes_are_dialed() {
    let port = free_port();
    let extra = [("DMLC_NUM_WORKER", "2"), ("BPS_TRANSPORT", "tcp")];
    let scheduler = Program::start("bps-scheduler", &[], &variables(port, &extra));
    let _ = scheduler.wait_for_line("listening", JOIN);
    // Its core accepts and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let announced = vec![silent.local_addr().expect("an address")];
    let unused = TcpListener::bind("127.0.0.1:0").expect("a port");
    let _server = FakeServer::join(port, 2, announced, unused);
    let mut other = variables(port, &extra);
    other.push(("DMLC_WORKER_ID", "1".to_owned()));
    let other = Program::start("bps-test-rank", &["3"], &other);
    let (ended, end) = channel();
    std::thread::spawn(move || ended.send(Worker::start(&worker_config(port, 2)).map(drop)));
    let _ = scheduler.wait_for_line("all there", JOIN);
    drop(other);
    let error = end.recv_timeout(JOIN).expect("it ends").expect_err("the job can't form");
    assert!(error.to_string().contains("rank 1 (host"), "{error}");
}

#[test]
fn a_core_that_cannot_be_reached_is_named_to_all() {
    let port = free_port();
    let mut scheduler = Program::start("bps-scheduler", &[], &variables(port, &[]));
    let _ = scheduler.wait_for_line("listening", JOIN);
    // A port that was free a moment ago may be another test's by now; the kernel gives nobody this.
    let nobody = SocketAddr::from(([127, 0, 0, 1], 1));
    let unused = TcpListener::bind("127.0.0.1:0").expect("a port");
    let _server = FakeServer::join(port, 1, vec![nobody], unused);
    let error = Worker::start(&worker_config(port, 1)).map(drop).expect_err("nobody is there");
    assert!(error.to_string().contains("can't be reached"), "{error}");
    assert!(!scheduler.wait(JOIN).success());
    let said = scheduler.lines().join("\n");
    assert!(
        said.contains("rank 0") && said.contains("server 0 core 0 (host fake, pid 1)"),
        "{said}"
    );
}

#[test]
fn a_silent_neighbour_does_not_hold_up_the_lanes_of_others() {
    let port = free_port();
    let extra = [("DMLC_NUM_WORKER", "2"), ("BPS_TRANSPORT", "shm")];
    let _scheduler = Program::start("bps-scheduler", &[], &variables(port, &extra));
    let _server = Program::start("bps-server", &[], &variables(port, &extra));
    let join = |worker_id| {
        let link =
            ControlLink::connect("127.0.0.1", port, &JobKey::open(), JOIN).expect("a scheduler");
        let node = Node::Worker {
            worker_id,
            local_rank: 0,
            local_size: 1,
            global_rank: None,
            local: None,
            planning: Planning {
                partition_bytes: 1 << 20,
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
        };
        let register = Register {
            node,
            host: "fake".into(),
            host_id: "fake".into(),
            pid: 1,
            instance: 0,
            session: 0,
            former: None,
            release: env!("CARGO_PKG_VERSION").into(),
            encrypt: false,
            num_workers: 2,
            num_servers: 1,
        };
        link.send(&NodeMessage::Register(register)).expect("registered");
        link
    };
    let (mut first, second) = (join(0), join(1));
    let start = Instant::now();
    let roster = loop {
        assert!(start.elapsed() < JOIN, "no roster");
        if let Some(SchedulerMessage::Roster(roster)) =
            first.receive(Duration::from_secs(1)).expect("it lives")
        {
            break roster;
        }
    };
    let _hearts = [Heart::of(first), Heart::of(second)];
    let name = format!("{}.0", roster.servers[0].shm.as_ref().expect("shared memory"));
    let open = |rank| {
        let hello = Hello::shm_lane(Rank(rank), roster.epoch);
        dial_unix(&name, &JobKey::open(), hello, JOIN).expect("the server answers")
    };
    let start = Instant::now();
    // More than one, and all before the one that does its part.
    let _silent: Vec<_> = (0..4).map(|_| open(1)).collect();
    let stream = open(0);
    let waker = Waker::new().expect("an eventfd");
    shm::offer(&stream, &waker, ShmOptions::default()).expect("a lane");
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
}

/// Sockets that connect, say nothing, and connect again when they are sent away or are not let in
/// at once.
fn crowd(address: SocketAddr, size: usize, stop: &AtomicBool) {
    const PATIENCE: Duration = Duration::from_millis(5);
    let connect = || {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None);
        let socket = TcpStream::from(socket.expect("a descriptor"));
        // In progress, as a rule.
        let _ = rustix::net::connect(&socket, &address);
        (socket, Instant::now())
    };
    let mut sockets: Vec<(TcpStream, Instant)> = (0..size).map(|_| connect()).collect();
    while !stop.load(Ordering::Relaxed) {
        for one in &mut sockets {
            let is_in = match one.0.read(&mut [0; 64]) {
                Ok(0) => false,
                Ok(_) => true,
                Err(error) => error.kind() == ErrorKind::WouldBlock,
            };
            let is_stuck = one.1.elapsed() > PATIENCE && one.0.peer_addr().is_err();
            if !is_in || is_stuck {
                *one = connect();
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Ends a crowd, even if the test panics.
struct EndsCrowd<'a>(&'a AtomicBool);

impl Drop for EndsCrowd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_thousand_strangers_that_reconnect_do_not_keep_a_job_from_forming() {
    raise_descriptor_limit(8192);
    let port = free_port();
    let key = [("BPS_JOB_KEY", "5e".repeat(32))];
    let key: Vec<(&'static str, &str)> = key.iter().map(|(name, hex)| (*name, &**hex)).collect();
    let mut scheduler = Program::start("bps-scheduler", &[], &variables(port, &key));
    let _ = scheduler.wait_for_line("listening", JOIN);
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ends = EndsCrowd(&stop);
        scope.spawn(|| crowd(address, 1000, &stop));
        // Until the crowd has settled in.
        std::thread::sleep(Duration::from_millis(1500));
        let start = Instant::now();
        let mut server = Program::start("bps-server", &[], &variables(port, &key));
        let mut rank = Program::start("bps-test-rank", &["3"], &variables(port, &key));
        let formed = rank.wait(JOIN);
        stop.store(true, Ordering::Relaxed);
        assert!(formed.success(), "{formed}: {}", rank.lines().join("\n"));
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        for program in [&mut server, &mut scheduler] {
            let status = program.wait(JOIN);
            assert!(status.success(), "{status}: {}", program.lines().join("\n"));
        }
    });
}

#[test]
fn names_that_somebody_else_has_taken_keep_no_job_from_forming() {
    // What a process of the same number in another container would have, and what anybody can
    // guess.
    let pid = std::process::id();
    let guessed = (0..64).flat_map(|next| {
        [format!("bps-{pid}-{next}.0"), format!("bps-rank-{pid}-{next}")].into_iter()
    });
    let _taken: Vec<UnixListener> = guessed
        .map(|name| {
            let address = UnixAddress::from_abstract_name(name).expect("a name");
            UnixListener::bind_addr(&address).expect("free until now")
        })
        .collect();
    let shape = JobShape {
        workers: 3,
        hosts: &[2, 1],
        transport: TransportChoice::Auto,
        ..JobShape::default()
    };
    let sizes = job::run(shape, |worker| {
        worker.barrier(Some(JOIN)).expect("all are there");
        worker.size()
    });
    assert_eq!(sizes, [3, 3, 3]);
}
