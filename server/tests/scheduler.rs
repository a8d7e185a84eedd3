//! The scheduler over real sockets and as a real process: honest nodes, dead ones, and strangers.

use bps_engine::base::{DType, Operation, Placement, Rank};
use bps_engine::config::Config;
use bps_engine::control::{ControlLink, DialError, JobKey, LinkError};
use bps_engine::proto::members::Members;
use bps_engine::proto::messages::{
    Declaration, Node, NodeMessage, Origin, OverReason, Party, Planning, Register, Roster,
    SchedulerMessage, Sign,
};
use bps_engine::proto::unformed::Unformed;
use bps_server::scheduler::{Bound, SchedulerError, Stop};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_secs(10);

struct Running {
    address: SocketAddr,
    key: JobKey,
    stop: Stop,
    thread: JoinHandle<Result<(), SchedulerError>>,
}

fn start(num_workers: u32, num_servers: u32, start_timeout: Duration) -> Running {
    let key = JobKey::mint().unwrap();
    let config = Config {
        num_workers,
        num_servers,
        root_uri: "127.0.0.1".to_owned(),
        job_key: Some(key.expose_hex()),
        start_timeout,
        heartbeat_timeout: Duration::from_secs(3),
        ..Config::default()
    };
    let bound = Bound::bind(&config).unwrap();
    let (address, stop) = (bound.address(), Stop::default());
    let stopped = stop.clone();
    let thread = std::thread::spawn(move || bound.run(&stopped));
    Running { address, key, stop, thread }
}

fn worker(worker_id: u32) -> Node {
    Node::Worker {
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
            force_distributed: false,
            reduce_roots: Vec::new(),
            switch_size: 0,
            tuning: bps_engine::proto::tuning::Tuning::OFF,
        },
        speaks: None,
    }
}

fn server() -> Node {
    let cores = vec!["127.0.0.1:5001".parse().unwrap(), "127.0.0.1:5002".parse().unwrap()];
    Node::Server { cores, shm: None, rdma: false, colocated: true, preferred: None }
}

fn join(address: SocketAddr, key: &JobKey, node: Node, numbers: (u32, u32)) -> ControlLink {
    let link = ControlLink::connect("127.0.0.1", address.port(), key, SOON).unwrap();
    let register = Register {
        node,
        host: "here".to_owned(),
        host_id: "this host".to_owned(),
        pid: std::process::id(),
        instance: 0,
        session: 0,
        former: None,
        release: env!("CARGO_PKG_VERSION").to_owned(),
        encrypt: false,
        num_workers: numbers.0,
        num_servers: numbers.1,
    };
    link.send(&NodeMessage::Register(register)).unwrap();
    link
}

/// The next message that is no waiting line.
fn next(link: &mut ControlLink) -> SchedulerMessage {
    let until = Instant::now() + SOON;
    while Instant::now() < until {
        match link.receive(Duration::from_millis(100)) {
            Ok(None | Some(SchedulerMessage::Waiting { .. })) => {}
            Ok(Some(message)) => return message,
            Err(error) => panic!("no message: {error}"),
        }
    }
    panic!("no message in time");
}

fn roster(link: &mut ControlLink) -> Roster {
    match next(link) {
        SchedulerMessage::Roster(roster) => roster,
        other => panic!("{other:?}, not a roster"),
    }
}

fn over(link: &mut ControlLink) -> OverReason {
    match next(link) {
        SchedulerMessage::Over { reason } => reason,
        other => panic!("{other:?}, not the end"),
    }
}

/// Two workers and a server, in a job that runs.
fn formed(running: &Running) -> (Vec<ControlLink>, ControlLink) {
    let mut server = join(running.address, &running.key, server(), (2, 1));
    let mut workers: Vec<ControlLink> =
        (0..2).map(|at| join(running.address, &running.key, worker(at), (2, 1))).collect();
    for (index, link) in (0..).zip(&mut workers) {
        let roster = roster(link);
        assert_eq!((roster.index, roster.size, roster.servers.len()), (index, 2, 1));
    }
    assert_eq!(roster(&mut server).index, 0);
    (workers, server)
}

fn declarations(count: u32, elements: u64) -> Vec<Declaration> {
    (0..count)
        .map(|at| Declaration {
            name: format!("layer{at}.weight"),
            dtype: DType::F32,
            shape: elements.into(),
            operation: Operation::Broadcast(Rank(0)),
            device: false,
            members: Members::ALL,
            receiver: None,
            encoding: None,
            store: None,
        })
        .collect()
}

fn declare_and_meet(workers: &mut [ControlLink], server: &mut ControlLink) {
    let tensors = declarations(1000, 1024);
    let start = Instant::now();
    for link in workers.iter() {
        link.send(&NodeMessage::Declare { request: 1, tensors: tensors.clone() }).unwrap();
    }
    let SchedulerMessage::Install { request, keys } = next(server) else { panic!() };
    assert_eq!(keys.len(), 1000);
    server.send(&NodeMessage::Installed { request }).unwrap();
    for link in workers.iter_mut() {
        let SchedulerMessage::Declared { request: 1, tensors } = next(link) else { panic!() };
        assert_eq!(tensors.len(), 1000);
    }
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    for link in workers.iter() {
        link.send(&NodeMessage::Barrier { request: 2 }).unwrap();
    }
    for link in workers.iter_mut() {
        assert_eq!(next(link), SchedulerMessage::BarrierDone { request: 2 });
    }
}

fn finish(workers: Vec<ControlLink>, mut server: ControlLink) {
    for link in workers {
        link.send(&NodeMessage::Leave { suspend: false }).unwrap();
    }
    assert_eq!(over(&mut server), OverReason::Finished);
}

#[test]
fn a_job_from_rendezvous_to_the_end() {
    let running = start(2, 1, SOON);
    let (mut workers, mut server) = formed(&running);
    declare_and_meet(&mut workers, &mut server);
    finish(workers, server);
    running.thread.join().unwrap().unwrap();
}

#[test]
fn a_dead_worker_ends_the_job_for_all() {
    let running = start(2, 1, SOON);
    let (mut workers, mut server) = formed(&running);
    drop(workers.pop());
    let start = Instant::now();
    for link in [&mut workers[0], &mut server] {
        let OverReason::Died { who, how, .. } = over(link) else { panic!() };
        assert_eq!(who.party, Party::Rank(Rank(1)));
        assert_eq!(how, Sign::Seen("its connection was closed".into()));
        assert!(matches!(link.receive(SOON), Err(LinkError::Closed)), "nothing follows the end");
    }
    assert!(start.elapsed() < Duration::from_secs(2));
    drop((workers, server));
    let error = running.thread.join().unwrap().unwrap_err();
    assert_eq!(error.code(), 1);
}

#[test]
fn a_silent_node_is_dead_too() {
    let running = start(2, 1, SOON);
    let (mut workers, server) = formed(&running);
    let (beating, _silent) = (workers.remove(0), workers.remove(0));
    let (server, _inbox) = server.split();
    let (sender, mut receiver) = beating.split();
    let start = Instant::now();
    loop {
        server.send(&NodeMessage::Heartbeat { rounds: 0 }).unwrap();
        sender.send(&NodeMessage::Heartbeat { rounds: 1 }).unwrap();
        match receiver.receive(Duration::from_millis(250)).unwrap() {
            None => assert!(start.elapsed() < SOON),
            Some(SchedulerMessage::Heartbeat) => std::thread::sleep(Duration::from_millis(100)),
            Some(SchedulerMessage::Over { reason: OverReason::Died { who, how, .. } }) => {
                assert_eq!(who.party, Party::Rank(Rank(1)));
                // The timeout behind when the heartbeat was due, half a second after the last one.
                assert!(matches!(how, Sign::Silent { milliseconds: 3_500..4_500 }), "{how}");
                break;
            }
            Some(other) => panic!("{other:?}"),
        }
    }
}

#[test]
fn strangers_do_not_disturb_an_honest_job() {
    let running = start(2, 1, SOON);
    let strangers = |count: usize| -> Vec<TcpStream> {
        (0..count)
            .map(|at| {
                let mut stream = TcpStream::connect(running.address).unwrap();
                let garbage: &[u8] = match at % 4 {
                    0 => b"",
                    1 => b"BPSH\x01",
                    2 => b"GET / HTTP/1.1\r\n\r\n",
                    _ => &[0xff; 100],
                };
                // It may be closed already.
                let _ = stream.write_all(garbage);
                stream
            })
            .collect()
    };
    let _early = strangers(60);
    let wrong = ControlLink::connect("127.0.0.1", running.address.port(), &JobKey::open(), SOON);
    let error = wrong.unwrap_err();
    assert!(matches!(error, DialError::Handshake { .. }));
    assert!(error.to_string().contains("the job key differs"), "{error}");
    let (mut workers, mut server) = formed(&running);
    let _late = strangers(60);
    // One with the key, but without manners.
    let mut rude =
        ControlLink::connect("127.0.0.1", running.address.port(), &running.key, SOON).unwrap();
    rude.send(&NodeMessage::Barrier { request: 1 }).unwrap();
    assert!(matches!(rude.receive(SOON), Err(LinkError::Closed)));
    declare_and_meet(&mut workers, &mut server);
    finish(workers, server);
    running.thread.join().unwrap().unwrap();
}

#[test]
fn a_node_that_reads_nothing_does_not_hold_up_the_others() {
    let running = start(2, 1, SOON);
    let (mut workers, mut server) = formed(&running);
    // Rank 1 asks for far more than sockets hold and reads none of it, while rank 0 goes on.
    let tensors = declarations(10_000, 1);
    for request in 0..10 {
        let tensors = tensors.clone();
        workers[1].send(&NodeMessage::Declare { request, tensors }).unwrap();
    }
    let SchedulerMessage::Install { request, .. } = next(&mut server) else { panic!() };
    server.send(&NodeMessage::Installed { request }).unwrap();
    let one = tensors[..1].to_vec();
    workers[0].send(&NodeMessage::Declare { request: 7, tensors: one }).unwrap();
    assert!(matches!(next(&mut workers[0]), SchedulerMessage::Declared { request: 7, .. }));
    for request in 0..10 {
        let SchedulerMessage::Declared { request: answered, tensors } = next(&mut workers[1])
        else {
            panic!()
        };
        assert_eq!((answered, tensors.len()), (request, 10_000));
    }
    finish(workers, server);
    running.thread.join().unwrap().unwrap();
}

#[test]
fn a_job_that_does_not_form_ends_with_what_is_missing() {
    let running = start(2, 1, Duration::from_millis(300));
    let mut link = join(running.address, &running.key, worker(1), (2, 1));
    let OverReason::NotFormed { cause } = over(&mut link) else { panic!() };
    let Unformed::Missing { missing, .. } = cause else { panic!("{cause}") };
    assert_eq!(missing, "server 0 of 1, worker rank 0 of 2");
    drop(link);
    assert_eq!(running.thread.join().unwrap().unwrap_err().code(), 3);
}

#[test]
fn a_stop_is_told_to_all_nodes() {
    let running = start(2, 1, SOON);
    let (mut workers, mut server) = formed(&running);
    running.stop.stop();
    for link in workers.iter_mut().chain([&mut server]) {
        let OverReason::Failed { who, message, .. } = over(link) else { panic!() };
        assert_eq!(who, Origin::scheduler());
        assert_eq!(message, "it was stopped by its launcher");
    }
    drop((workers, server));
    assert_eq!(running.thread.join().unwrap().unwrap_err().code(), 1);
}

/// The program itself, ended with its test.
struct Program(Child);

impl Program {
    fn start(command: &mut Command) -> Program {
        let command = command.env_clear().env("DMLC_NUM_WORKER", "1").env("DMLC_NUM_SERVER", "1");
        Program(command.stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap())
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        let mut letter = [0];
        // Letter by letter, so that what follows stays for `end`.
        while self.0.stderr.as_mut().unwrap().read(&mut letter).unwrap() == 1 && letter != *b"\n" {
            line.push(letter[0].into());
        }
        line
    }

    /// The address of the start line.
    fn address(&mut self) -> SocketAddr {
        let line = self.line();
        let words: Vec<&str> = line.split_whitespace().collect();
        let at = words.iter().position(|word| *word == "on").unwrap_or_else(|| panic!("{line}"));
        words[at + 1].parse().unwrap()
    }

    /// Exit code and what it said on standard error.
    fn end(mut self) -> (Option<i32>, String) {
        let lines = BufReader::new(self.0.stderr.as_mut().unwrap()).lines();
        let lines: Vec<String> = lines.map(Result::unwrap).collect();
        (self.0.wait().unwrap().code(), lines.join("\n"))
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn program(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bps-scheduler"));
    command.args(arguments);
    command
}

#[test]
fn sigterm_ends_the_job_in_good_order() {
    let here = ["--root-uri", "127.0.0.1", "--root-port", "0"];
    let mut program = Program::start(&mut program(&here));
    let address = program.address();
    let mut server = join(address, &JobKey::open(), server(), (1, 1));
    let mut worker = join(address, &JobKey::open(), worker(0), (1, 1));
    roster(&mut server);
    roster(&mut worker);
    let pid = rustix::process::Pid::from_child(&program.0);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(over(&mut worker).to_string().contains("stopped by SIGTERM"));
    assert!(over(&mut server).to_string().contains("stopped by SIGTERM"));
    drop((worker, server));
    let (code, text) = program.end();
    assert_eq!(code, Some(1), "{text}");
}

#[test]
fn what_is_wrong_with_the_address_is_said_with_a_remedy() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let here = ["--root-uri", "127.0.0.1", "--root-port"];
    let cases: [(Vec<&str>, &str); 4] = [
        ([&here[..], &[&port]].concat(), "choose another DMLC_PS_ROOT_PORT"),
        (vec!["--root-uri", "192.0.2.1", "--root-port", "0"], "does not have that address"),
        ([&here[..], &["0", "--interface", "nonesuch"]].concat(), "DMLC_INTERFACE=nonesuch"),
        (vec!["--root-port", "0"], "DMLC_PS_ROOT_URI"),
    ];
    for (arguments, part) in cases {
        let (code, text) = Program::start(&mut program(&arguments)).end();
        assert_eq!(code, Some(2), "{text}");
        assert!(text.contains(part), "{part} is not in: {text}");
        assert!(text.lines().count() <= 3, "{text}");
    }
}

#[test]
fn running_out_of_descriptors_passes() {
    let scheduler = env!("CARGO_BIN_EXE_bps-scheduler");
    let script = format!("ulimit -n 24; exec {scheduler} --root-uri 127.0.0.1 --root-port 0");
    let mut program = Program::start(Command::new("/bin/sh").args(["-c", &script]));
    let address = program.address();
    let idle: Vec<TcpStream> = (0..40).map(|_| TcpStream::connect(address).unwrap()).collect();
    let line = program.line();
    assert!(line.contains("cannot accept connections") && line.contains("ulimit -n"), "{line}");
    drop(idle);
    let mut server = join(address, &JobKey::open(), server(), (1, 1));
    let mut worker = join(address, &JobKey::open(), worker(0), (1, 1));
    roster(&mut server);
    roster(&mut worker);
    finish(vec![worker], server);
    let (code, text) = program.end();
    assert_eq!(code, Some(0), "{text}");
}
