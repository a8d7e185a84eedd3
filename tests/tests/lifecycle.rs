//! Real processes that die, hang, are stopped or disagree: everyone else must say who, within
//! seconds, and end.

use bps_engine::base::Epoch;
use bps_engine::control::{Acceptor, Inbox, JobKey, Listener, Socket, encode};
use bps_engine::proto::messages::{NodeMessage, Roster, SchedulerMessage};
use bps_tests::job::free_port;
use bps_tests::program::Program;
use rustix::process::Signal;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

const JOIN: Duration = Duration::from_secs(30);
/// What the documents promise, and a little for a machine that is busy with other tests.
const PROMISE: Duration = Duration::from_secs(5);
const SLACK: Duration = Duration::from_secs(3);

struct Job {
    scheduler: Program,
    server: Program,
    ranks: Vec<Program>,
}

fn variables(port: u16, role: &str, extra: &[(&'static str, &str)]) -> Vec<(&'static str, String)> {
    let fixed = [
        ("DMLC_ROLE", role),
        ("DMLC_NUM_WORKER", "3"),
        ("DMLC_NUM_SERVER", "1"),
        ("DMLC_PS_ROOT_URI", "127.0.0.1"),
        ("DMLC_NODE_HOST", "127.0.0.1"),
        ("BPS_PIN", "0"),
        // The path through the server, unless a test says otherwise.
        ("BPS_LOCAL_REDUCE", "0"),
    ];
    let mut all: Vec<(&'static str, String)> =
        fixed.iter().chain(extra).map(|&(name, value)| (name, value.to_owned())).collect();
    all.push(("DMLC_PS_ROOT_PORT", port.to_string()));
    all
}

/// Starts a job of three ranks; `arguments` gives each rank's.
fn start(arguments: [&[&str]; 3], extra: &[(&'static str, &str)]) -> Job {
    let port = free_port();
    let scheduler = Program::start("bps-scheduler", &[], &variables(port, "scheduler", extra));
    let server = Program::start("bps-server", &["--cores", "2"], &variables(port, "server", extra));
    let rank = |(index, arguments): (usize, &&[&str])| {
        let mut variables = variables(port, "worker", extra);
        variables.push(("DMLC_WORKER_ID", index.to_string()));
        Program::start("bps-test-rank", arguments, &variables)
    };
    let ranks = arguments.iter().enumerate().map(rank).collect();
    Job { scheduler, server, ranks }
}

const ENDLESS: &[&str] = &["1000000"];

fn running(extra: &[(&'static str, &str)]) -> Job {
    let job = start([ENDLESS; 3], extra);
    for rank in &job.ranks {
        let _ = rank.wait_for_line("rank has begun", JOIN);
    }
    job
}

/// Each of these ends by itself in time, and says these words before.
fn end_with(programs: &mut [&mut Program], words: &[&str], since: Instant, limit: Duration) {
    for program in programs {
        let left = limit.saturating_sub(since.elapsed());
        let status = program.wait(left);
        assert!(!status.success(), "it ended as if all were well");
        let said = program.lines().join("\n");
        let line = said.lines().find(|line| words.iter().all(|word| line.contains(word)));
        assert!(line.is_some(), "no line has {words:?} in:\n{said}");
    }
}

#[test]
fn a_killed_rank_is_named_by_all_with_the_open_round() {
    let mut job = running(&[]);
    let since = Instant::now();
    job.ranks[1].signal(Signal::KILL);
    let Job { scheduler, server, ranks } = &mut job;
    let [first, _, third] = &mut ranks[..] else { unreachable!("three ranks") };
    end_with(
        &mut [first, third],
        &["rank 1", "died", "round", "layer4.weight"],
        since,
        PROMISE + SLACK,
    );
    end_with(&mut [server, scheduler], &["rank 1", "died"], since, PROMISE + SLACK);
}

#[test]
fn a_killed_server_is_named_by_all() {
    let mut job = running(&[]);
    let since = Instant::now();
    job.server.signal(Signal::KILL);
    let Job { scheduler, ranks, .. } = &mut job;
    let mut all: Vec<&mut Program> = ranks.iter_mut().chain([scheduler]).collect();
    end_with(&mut all, &["server 0", "died"], since, PROMISE + SLACK);
}

#[test]
fn a_killed_scheduler_is_named_by_all() {
    let mut job = running(&[]);
    let since = Instant::now();
    job.scheduler.signal(Signal::KILL);
    let Job { server, ranks, .. } = &mut job;
    let mut all: Vec<&mut Program> = ranks.iter_mut().chain([server]).collect();
    end_with(&mut all, &["scheduler", "died"], since, PROMISE + SLACK);
}

#[test]
fn the_keys_of_a_server_killed_under_the_next_scheduler_move() {
    let extra = [("BPS_ELASTIC", "shrink"), ("DMLC_NUM_SERVER", "2")];
    let port = free_port();
    let start = |name, role| Program::start(name, &[], &variables(port, role, &extra));
    let first = start("bps-scheduler", "scheduler");
    let servers = [(); 2].map(|()| start("bps-server", "server"));
    // Each checks all its sums; several tensors, so that both servers have some.
    let rank = |index: u32| {
        let mut variables = variables(port, "worker", &extra);
        variables.push(("DMLC_WORKER_ID", index.to_string()));
        Program::start("bps-test-rank", &["8000", "0", "10000", "4"], &variables)
    };
    let mut ranks = [0, 1, 2].map(rank);
    for rank in &ranks {
        let _ = rank.wait_for_line("rank has begun", JOIN);
    }
    first.signal(Signal::KILL);
    let mut next = start("bps-scheduler", "scheduler");
    let _ = next.wait_for_line("term 2: 3 ranks and 2 servers", JOIN);
    servers[1].signal(Signal::KILL);
    let _ = next.wait_for_line("1 server of 2 goes on without server", JOIN);
    let _ = next.wait_for_line("moved to other servers within", JOIN);
    for rank in &mut ranks {
        assert!(rank.wait(2 * JOIN).success(), "{}", rank.lines().join("\n"));
        let said = rank.lines().join("\n");
        assert!(said.contains("goes on without server") && !said.contains("epoch 2"), "{said}");
    }
    assert!(next.wait(JOIN).success(), "{}", next.lines().join("\n"));
}

#[test]
fn a_frozen_rank_counts_as_dead() {
    let mut job = running(&[]);
    let since = Instant::now();
    job.ranks[2].signal(Signal::STOP);
    let Job { scheduler, server, ranks } = &mut job;
    let (alive, _) = ranks.split_at_mut(2);
    let mut all: Vec<&mut Program> = alive.iter_mut().chain([server, scheduler]).collect();
    end_with(&mut all, &["rank 2", "heartbeat"], since, PROMISE + SLACK);
}

#[test]
fn a_stopped_server_says_so_to_all() {
    let mut job = running(&[("BPS_TRANSPORT", "tcp")]);
    let since = Instant::now();
    job.server.signal(Signal::TERM);
    let Job { scheduler, server, ranks } = &mut job;
    assert_eq!(server.wait(PROMISE + SLACK).code(), Some(143));
    let mut all: Vec<&mut Program> = ranks.iter_mut().chain([scheduler]).collect();
    end_with(&mut all, &["server 0", "SIGTERM"], since, PROMISE + SLACK);
}

#[test]
fn a_stall_names_tensor_round_and_rank_then_ends_the_job() {
    let extra = [("BPS_STALL_TIMEOUT", "8")];
    let mut job = start([ENDLESS, &["1000000", "5"], ENDLESS], &extra);
    let _ = job.ranks[1].wait_for_line("rank stalls", JOIN);
    let since = Instant::now();
    for rank in &job.ranks {
        let line = rank.wait_for_line("rank 1 is late by", PROMISE + SLACK);
        assert!(line.contains("round 5 of `layer4.weight` waits for it"), "{line}");
    }
    assert!(since.elapsed() < PROMISE + SLACK, "{:?}", since.elapsed());
    let Job { ranks, .. } = &mut job;
    let place = format!(", pid {})", ranks[1].pid());
    let mut all: Vec<&mut Program> = ranks.iter_mut().collect();
    let limit = Duration::from_secs(8) + PROMISE + SLACK;
    let words = ["rank ended", "BPS_STALL_TIMEOUT", "waits for rank 1 (host ", &place];
    end_with(&mut all, &words, since, limit);
}

#[test]
fn a_rank_that_is_late_with_thousands_of_tensors_costs_one_line() {
    // Summed by the server and by the ranks themselves.
    for reduce in ["0", "1"] {
        // With enough rounds behind it to hear that it is over before the job is.
        let begun: &[&str] = &["80", "0", "100", "2000"];
        let late: &[&str] = &["80", "5", "100", "2000", "7"];
        let mut job = start([begun, late, begun], &[("BPS_LOCAL_REDUCE", reduce)]);
        for rank in &mut job.ranks {
            let status = rank.wait(JOIN + JOIN);
            assert!(status.success(), "{status}: {}", rank.lines().join("\n"));
        }
        assert!(job.scheduler.wait(JOIN).success());
        for program in job.ranks.iter().chain([&job.scheduler]) {
            let said = program.lines();
            let lines: Vec<&String> = said.iter().filter(|line| line.contains(" late")).collect();
            let [late, over] = &lines[..] else { panic!("{lines:#?}") };
            assert!(late.contains("rank 1 is late by "), "{late}");
            assert!(late.contains(": 2000 tensors wait for it (round 5 of `"), "{late}");
            assert!(over.contains("rank 1 is no longer late"), "{over}");
            assert_eq!(said.iter().filter(|line| line.contains("layer4")).count(), 1, "{said:#?}");
        }
    }
}

#[test]
fn a_rank_that_left_too_early_is_named_at_once() {
    let mut job = start([ENDLESS, &["50"], ENDLESS], &[]);
    let left = job.ranks[1].wait(JOIN);
    let since = Instant::now();
    assert!(left.success(), "{left}");
    let Job { scheduler, server, ranks } = &mut job;
    let place = format!(", pid {}) left the job while others wait", ranks[1].pid());
    let [first, _, third] = &mut ranks[..] else { unreachable!("three ranks") };
    let words = ["rank 1 (host ", &place, "round 51 of `layer4.weight`"];
    end_with(&mut [first, third, server, scheduler], &words, since, PROMISE);
}

#[test]
fn all_leave_in_good_order() {
    let key = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
    let mut job = start([&["50"]; 3], &[("BPS_JOB_KEY", key)]);
    for program in job.ranks.iter_mut().chain([&mut job.server, &mut job.scheduler]) {
        let status = program.wait(JOIN);
        assert!(status.success(), "{status}");
    }
}

#[test]
fn another_key_is_turned_away_with_the_reason() {
    let port = free_port();
    let key = |digit: &str| digit.repeat(64);
    let with = |role, key: &str| {
        let mut all = variables(port, role, &[("BPS_START_TIMEOUT", "10")]);
        all.push(("BPS_JOB_KEY", key.to_owned()));
        all
    };
    let _scheduler = Program::start("bps-scheduler", &[], &with("scheduler", &key("1")));
    let mut rank = Program::start("bps-test-rank", &["1"], &with("worker", &key("2")));
    let status = rank.wait(JOIN);
    assert_eq!(status.code(), Some(7));
    let said = rank.lines().join("\n");
    assert!(said.contains("key") && said.contains("BPS_JOB_KEY"), "{said}");
}

/// Three ranks of one host that reduce among themselves.
const GROUP: &[(&str, &str)] = &[("BPS_LOCAL_REDUCE", "1"), ("BPS_STALL_TIMEOUT", "8")];

#[test]
fn a_killed_rank_of_a_group_is_named_by_all_with_the_open_round() {
    let mut job = running(GROUP);
    let since = Instant::now();
    job.ranks[1].signal(Signal::KILL);
    let Job { scheduler, server, ranks } = &mut job;
    let [first, _, third] = &mut ranks[..] else { unreachable!("three ranks") };
    let words = ["rank 1", "died", "round", "layer4.weight"];
    end_with(&mut [first, third], &words, since, PROMISE + SLACK);
    end_with(&mut [server, scheduler], &["rank 1", "died"], since, PROMISE + SLACK);
}

#[test]
fn a_rank_of_a_group_that_never_pushes_is_named_alone() {
    // The first owns some parts of the tensor and lets others own the rest.
    for silent in 0..3 {
        let mut arguments = [ENDLESS; 3];
        arguments[silent] = &["1000000", "5"];
        let mut job = start(arguments, GROUP);
        let _ = job.ranks[silent].wait_for_line("rank stalls", JOIN);
        let since = Instant::now();
        for rank in &job.ranks {
            let late = format!("rank {silent} is late by");
            let line = rank.wait_for_line(&late, PROMISE + SLACK);
            assert!(line.contains("round 5 of `layer4.weight` waits for it"), "{line}");
        }
        let Job { ranks, .. } = &mut job;
        let mut all: Vec<&mut Program> = ranks.iter_mut().collect();
        let limit = Duration::from_secs(8) + PROMISE + SLACK;
        let who = format!("rank {silent}");
        end_with(&mut all, &["rank ended", "BPS_STALL_TIMEOUT", &who], since, limit);
    }
}

#[test]
fn a_group_leaves_in_good_order_and_needs_no_server() {
    let mut job = start([&["50"]; 3], GROUP);
    for program in job.ranks.iter_mut().chain([&mut job.server, &mut job.scheduler]) {
        let status = program.wait(JOIN);
        assert!(status.success(), "{status}");
    }
    let said = job.scheduler.lines().join("\n");
    assert!(said.contains("sums do not pass servers"), "{said}");
}

#[test]
fn ranks_of_one_machine_train_without_a_server() {
    let port = free_port();
    let alone = [
        ("DMLC_NUM_WORKER", "1"),
        ("DMLC_NUM_SERVER", "0"),
        ("BYTEPS_LOCAL_SIZE", "3"),
        ("BPS_LOCAL_REDUCE", "1"),
    ];
    let mut scheduler = Program::start("bps-scheduler", &[], &variables(port, "scheduler", &alone));
    let rank = |index: u32| {
        let mut variables = variables(port, "worker", &alone);
        variables.push(("BYTEPS_LOCAL_RANK", index.to_string()));
        Program::start("bps-test-rank", &["20"], &variables)
    };
    let mut all: Vec<Program> = (0..3).map(rank).collect();
    for rank in &mut all {
        let status = rank.wait(JOIN);
        assert!(status.success(), "{}", rank.lines().join("\n"));
    }
    assert!(scheduler.wait(JOIN).success(), "{}", scheduler.lines().join("\n"));
    // Where the servers shall be used, there must be some.
    let through = [alone.as_slice(), &[("BYTEPS_FORCE_DISTRIBUTED", "1")]].concat();
    let variables = variables(port, "worker", &through);
    let mut refused = Program::start("bps-test-rank", &["1"], &variables);
    assert!(!refused.wait(JOIN).success());
    let said = refused.lines().join("\n");
    assert!(said.contains("DMLC_NUM_SERVER=0") && said.contains("need a server"), "{said}");
}

const FROZEN: &[&str] = &["the scheduler at 127.0.0.1:", "has not answered for 4."];

#[test]
fn a_frozen_scheduler_is_named_by_all() {
    // One rank waits in a barrier, the others in a round.
    let mut job = start([ENDLESS, &["1000000", "5"], ENDLESS], &[]);
    let _ = job.ranks[1].wait_for_line("rank stalls", JOIN);
    let since = Instant::now();
    job.scheduler.signal(Signal::STOP);
    let Job { server, ranks, .. } = &mut job;
    let mut all: Vec<&mut Program> = ranks.iter_mut().chain([server]).collect();
    end_with(&mut all, FROZEN, since, PROMISE + SLACK);
}

#[test]
fn a_scheduler_that_is_frozen_for_a_short_while_is_forgiven() {
    let mut job = running(&[]);
    job.scheduler.signal(Signal::STOP);
    std::thread::sleep(Duration::from_millis(2_500));
    job.scheduler.signal(Signal::CONT);
    std::thread::sleep(PROMISE + Duration::from_secs(1));
    let Job { scheduler, server, ranks } = &mut job;
    for program in ranks.iter_mut().chain([server, scheduler]) {
        assert!(program.runs(), "{}", program.lines().join("\n"));
    }
}

#[test]
fn a_server_does_not_stay_when_its_ranks_have_left_a_frozen_scheduler() {
    let mut job = start([&["200"]; 3], &[]);
    for rank in &job.ranks {
        let _ = rank.wait_for_line("rank has begun", JOIN);
    }
    let since = Instant::now();
    job.scheduler.signal(Signal::STOP);
    end_with(&mut [&mut job.server], FROZEN, since, PROMISE + SLACK);
}

#[test]
fn a_rank_killed_under_a_frozen_scheduler_leaves_nobody_behind() {
    let mut job = running(&[]);
    let since = Instant::now();
    job.scheduler.signal(Signal::STOP);
    job.ranks[1].signal(Signal::KILL);
    let Job { server, ranks, .. } = &mut job;
    let [first, _, third] = &mut ranks[..] else { unreachable!("three ranks") };
    end_with(&mut [first, third, server], FROZEN, since, PROMISE + SLACK);
}

#[test]
fn a_forming_job_notices_a_frozen_scheduler() {
    let port = free_port();
    let scheduler = Program::start("bps-scheduler", &[], &variables(port, "scheduler", &[]));
    let mut server = Program::start("bps-server", &[], &variables(port, "server", &[]));
    let mut rank = Program::start("bps-test-rank", &["1"], &variables(port, "worker", &[]));
    for program in [&server, &rank] {
        let _ = program.wait_for_line("waiting for", JOIN);
    }
    let since = Instant::now();
    scheduler.signal(Signal::STOP);
    end_with(&mut [&mut server, &mut rank], FROZEN, since, PROMISE + SLACK);
}

#[test]
fn a_rank_that_was_declared_dead_says_so_when_it_wakes() {
    let mut job = running(&[]);
    job.ranks[2].signal(Signal::STOP);
    let since = Instant::now();
    let Job { scheduler, server, ranks } = &mut job;
    let (alive, frozen) = ranks.split_at_mut(2);
    let mut all: Vec<&mut Program> = alive.iter_mut().chain([server, scheduler]).collect();
    end_with(&mut all, &["rank 2", "no heartbeat"], since, PROMISE + SLACK);
    frozen[0].signal(Signal::CONT);
    let words = ["the scheduler declared this process dead: no heartbeat for"];
    end_with(&mut [&mut frozen[0]], &words, Instant::now(), PROMISE + SLACK);
}

/// The next message that this wants to have, of what a node says; `None` at the end.
fn hear<T>(
    (socket, inbox): &mut (TcpStream, Inbox),
    wanted: impl Fn(NodeMessage) -> Option<T>,
) -> Option<T> {
    let mut bytes = [0; 4096];
    loop {
        while let Some(message) = inbox.next_message().unwrap() {
            if let Some(found) = wanted(message) {
                return Some(found);
            }
        }
        match socket.read(&mut bytes).unwrap() {
            0 => return None,
            count => inbox.push(&bytes[..count]),
        }
    }
}

#[test]
fn a_server_tells_a_silent_scheduler_that_it_asks_another_and_that_this_was_in_vain() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (admit, admitted) = channel();
    let admit = move |_, _, socket, _| drop(admit.send(socket));
    let listeners = vec![Listener::Tcp(listener)];
    let acceptor = Acceptor::start(listeners, JobKey::open(), admit, |_| {}).unwrap();
    let accept = || {
        let Socket::Tcp(socket) = admitted.recv_timeout(JOIN).unwrap() else { unreachable!() };
        socket.set_read_timeout(Some(JOIN)).unwrap();
        (socket, Inbox::new())
    };
    let beats = [("BPS_HEARTBEAT_INTERVAL", "0.2"), ("BPS_HEARTBEAT_TIMEOUT", "1")];
    let _server = Program::start("bps-server", &[], &variables(port, "server", &beats));
    // It has a roster of this one, which then says nothing any more, as one that is stopped.
    let mut silent = accept();
    hear(&mut silent, |said| matches!(said, NodeMessage::Register(_)).then_some(())).unwrap();
    let roster = Roster {
        job: "job".into(),
        term: 1,
        epoch: Epoch(1),
        size: 1,
        through_servers: true,
        index: 0,
        workers: Vec::new(),
        neighbours: Vec::new(),
        servers: Vec::new(),
        elastic: true,
        shrinks: false,
        change: None,
    };
    silent.0.write_all(&encode(&SchedulerMessage::Roster(roster)).unwrap()).unwrap();
    let asks = |said| match said {
        NodeMessage::Asks { another } => Some(another),
        _ => None,
    };
    for _ in 0..2 {
        // Before, it has only said by further connections that it lives.
        let resumes = |said| matches!(said, NodeMessage::Resume(_)).then_some(());
        let is_other = |peer: &mut (TcpStream, Inbox)| hear(peer, resumes).is_some();
        let mut others = std::iter::repeat_with(accept).map(|mut peer| (is_other(&mut peer), peer));
        let other = others.find(|(resumes, _)| *resumes);
        assert_eq!(hear(&mut silent, asks), Some(true));
        drop(other);
        assert_eq!(hear(&mut silent, asks), Some(false));
    }
    acceptor.stop();
}
