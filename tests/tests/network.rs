//! Real processes on hosts of their own, between which packets are lost: everybody is told what
//! happened to whom, nobody who is well is blamed, and nobody waits for ever.

use bps_tests::network::{Network, Rule};
use bps_tests::program::Program;
use std::io::{Read, Write};
use std::time::{Duration, Instant};

const JOIN: Duration = Duration::from_secs(60);

/// Hosts of every job: the scheduler, a server, and ranks.
const SCHEDULER: usize = 0;
const SERVER: usize = 1;
const RANKS: [usize; 2] = [2, 3];

struct Job {
    network: Network,
    scheduler: Program,
    server: Program,
    ranks: Vec<Program>,
}

/// A job of two ranks and a server, each on a host of its own, that has made its first round.
fn running(count: &str, extra: &[(&'static str, &str)]) -> Option<Job> {
    let arguments: &[&str] = &["100000000", "0", count];
    Some(job_on(Network::new(4)?, [arguments; 2], extra))
}

/// The same, on this network, with ranks of these arguments.
fn job_on(network: Network, arguments: [&[&str]; 2], extra: &[(&'static str, &str)]) -> Job {
    let variables = |role: &str, host: usize| {
        let root = network.address(SCHEDULER);
        let mut all = vec![
            ("DMLC_ROLE", role.to_owned()),
            ("DMLC_NUM_WORKER", RANKS.len().to_string()),
            ("DMLC_NUM_SERVER", "1".to_owned()),
            ("DMLC_PS_ROOT_URI", root),
            ("DMLC_PS_ROOT_PORT", "9000".to_owned()),
            ("DMLC_NODE_HOST", network.address(host)),
            ("BPS_PIN", "0".to_owned()),
            ("BPS_LOCAL_REDUCE", "0".to_owned()),
        ];
        let is_known = |name: &str| name != "BPS_METRICS_PORT" || role == "scheduler";
        let extra = extra.iter().filter(|(name, _)| is_known(name));
        all.extend(extra.map(|&(name, value)| (name, value.to_owned())));
        all
    };
    let start = |host, name: &str, arguments: &[&str], role| {
        network.start(host, name, arguments, &variables(role, host))
    };
    let scheduler = start(SCHEDULER, "bps-scheduler", &[], "scheduler");
    let server = start(SERVER, "bps-server", &["--cores", "1"], "server");
    let rank = |(index, host): (usize, usize)| {
        let mut variables = variables("worker", host);
        variables.push(("DMLC_WORKER_ID", index.to_string()));
        network.start(host, "bps-test-rank", arguments[index], &variables)
    };
    let ranks: Vec<Program> = RANKS.into_iter().enumerate().map(rank).collect();
    for rank in &ranks {
        let _ = rank.wait_for_line("rank has begun", JOIN);
    }
    Job { network, scheduler, server, ranks }
}

/// Each of these ends by itself in time, badly, and says all of these words in one line.
fn end_with(programs: &mut [&mut Program], words: &[&str], limit: Duration) {
    let since = Instant::now();
    for program in programs {
        let status = program.wait(limit.saturating_sub(since.elapsed()));
        assert!(!status.success(), "it ended as if all were well");
        let said = program.lines().join("\n");
        let line = said.lines().find(|line| words.iter().all(|word| line.contains(word)));
        assert!(line.is_some(), "no line has {words:?} in:\n{said}");
    }
}

/// What the documents promise for a path that loses bytes, with the default settings, and a little
/// for a machine that is busy with other tests.
const VERDICT: Duration = Duration::from_secs(10 + 15);

/// Loses packets between the server and rank 1, and sees that a line tells of it, that the job ends
/// for that reason, and that nobody is said to be waited for.
fn loses(count: &str, driver: &str, ways: &[(usize, usize)], rule: Rule, leg: &str) {
    let Some(mut job) = running(count, &[("BPS_TCP_DRIVER", driver)]) else { return };
    for &(from, to) in ways {
        job.network.set(from, to, rule);
    }
    for rank in &job.ranks {
        let _ = rank.wait_for_line(leg, VERDICT);
    }
    let Job { scheduler, server, ranks, .. } = &mut job;
    let mut all: Vec<&mut Program> = ranks.iter_mut().chain([server, scheduler]).collect();
    let words = ["the path between", "server 0", "rank 1", "acknowledged"];
    end_with(&mut all, &words, VERDICT);
    for program in all {
        let said = program.lines().join("\n");
        assert!(!said.contains(" late by "), "a rank is blamed for a path:\n{said}");
    }
}

const TO_RANK: &str = "the path from server 0 to rank 1";
const TO_SERVER: &str = "the path from rank 1 to server 0";
const LARGE: &str = "100000";
const SMALL: &str = "10";

#[test]
fn a_black_hole_before_a_rank_is_found_and_named() {
    loses(LARGE, "uring", &[(SERVER, RANKS[1])], Rule::mtu(600), TO_RANK);
}

#[test]
fn a_black_hole_before_a_rank_is_found_with_plain_sockets() {
    loses(LARGE, "poll", &[(SERVER, RANKS[1])], Rule::mtu(600), TO_RANK);
}

#[test]
fn a_black_hole_before_a_server_is_found_and_named() {
    loses(LARGE, "uring", &[(RANKS[1], SERVER)], Rule::mtu(600), TO_SERVER);
}

#[test]
fn small_results_that_are_lost_are_missed() {
    loses(SMALL, "poll", &[(SERVER, RANKS[1])], Rule::BLOCK, TO_RANK);
}

#[test]
fn a_rank_that_is_cut_off_from_a_server_is_not_called_dead() {
    let ways = [(SERVER, RANKS[1]), (RANKS[1], SERVER)];
    loses(SMALL, "uring", &ways, Rule::BLOCK, "the path");
}

/// Cuts rank 1 off from the server while nothing is on its way between them: rank 1 computes, and
/// rank 0 waits for it. Nobody has sent anything that could stay unacknowledged, so only probes of
/// the kernel find out, and long before a stall would be an error.
fn finds_while_nothing_passes(driver: &str) {
    let Some(network) = Network::new(4) else { return };
    let steady: &[&str] = &["100000000", "0", SMALL];
    let busy: &[&str] = &["100000000", "2", SMALL, "1", "60"];
    let mut job = job_on(network, [steady, busy], &[("BPS_TCP_DRIVER", driver)]);
    let _ = job.ranks[1].wait_for_line("rank stalls in round 2", JOIN);
    // What had been sent before is acknowledged by then.
    std::thread::sleep(Duration::from_millis(500));
    job.network.set_both(SERVER, RANKS[1], Rule::BLOCK);
    let Job { scheduler, server, ranks, .. } = &mut job;
    let [first, second] = &mut ranks[..] else { unreachable!("two ranks") };
    let words = ["the path between", "server 0", "rank 1", "timed out"];
    end_with(&mut [first, server, scheduler], &words, VERDICT);
    // It still computes, and has been told.
    assert!(second.runs(), "{}", second.lines().join("\n"));
    let _ = second.wait_for_line("the path between", Duration::from_secs(5));
}

#[test]
fn a_cut_beside_a_lane_at_rest_is_found_and_named() {
    finds_while_nothing_passes("uring");
}

#[test]
fn a_cut_beside_a_lane_at_rest_is_found_with_plain_sockets() {
    finds_while_nothing_passes("poll");
}

/// Whether each program of a job with this key, whose scheduler is at this address of its host,
/// says that the job has no key. All of them are on one host but the rank.
fn warnings(root: &str, rank_host: usize, key: Option<&str>) -> Option<[bool; 3]> {
    let network = Network::new(2)?;
    let root = if root.is_empty() { network.address(0) } else { root.to_owned() };
    let start = |host, name: &str, arguments: &[&str]| {
        let node = if root.starts_with("127.") { root.clone() } else { network.address(host) };
        let mut variables = vec![
            ("DMLC_NUM_WORKER", "1".to_owned()),
            ("DMLC_NUM_SERVER", "1".to_owned()),
            ("DMLC_PS_ROOT_URI", root.clone()),
            ("DMLC_PS_ROOT_PORT", "9000".to_owned()),
            ("DMLC_NODE_HOST", node),
            ("BYTEPS_FORCE_DISTRIBUTED", "1".to_owned()),
            ("BPS_PIN", "0".to_owned()),
            ("BPS_LOCAL_REDUCE", "0".to_owned()),
        ];
        variables.extend(key.map(|key| ("BPS_JOB_KEY", key.to_owned())));
        network.start(host, name, arguments, &variables)
    };
    let programs = [
        start(0, "bps-scheduler", &[]),
        start(0, "bps-server", &["--cores", "1"]),
        start(rank_host, "bps-test-rank", &["1"]),
    ];
    Some(programs.map(|mut program| {
        let status = program.wait(JOIN);
        assert!(status.success(), "{status}: {}", program.lines().join("\n"));
        program.lines().iter().any(|line| line.contains("this job has no key"))
    }))
}

#[test]
fn a_job_without_a_key_that_others_can_reach_says_so() {
    const KEY: &str = "abababababababababababababababababababababababababababababababab";
    let Some(warned) = warnings("", 1, None) else { return };
    assert_eq!(warned, [true; 3], "scheduler, server, rank");
    assert_eq!(warnings("", 1, Some(KEY)), Some([false; 3]), "with a key");
    assert_eq!(warnings("127.0.0.1", 0, None), Some([false; 3]), "on loopback");
}

/// Interrupts these ways for so long. Nobody minds, then or later.
fn survives(ways: &[(usize, usize)], outage: Duration) {
    let Some(mut job) = running(SMALL, &[]) else { return };
    for &(from, to) in ways {
        job.network.set(from, to, Rule::BLOCK);
    }
    std::thread::sleep(outage);
    for &(from, to) in ways {
        job.network.set(from, to, Rule::default());
    }
    // Whoever gave somebody up has done so and said so by then.
    std::thread::sleep(Duration::from_secs(8));
    let Job { scheduler, server, ranks, .. } = &mut job;
    for program in ranks.iter_mut().chain([server, scheduler]) {
        let said = program.lines().join("\n");
        assert!(program.runs(), "after an outage of {outage:?} on {ways:?}:\n{said}");
    }
}

/// Below `BPS_HEARTBEAT_TIMEOUT`, so that the documents promise that it harms nobody.
const OUTAGE: Duration = Duration::from_millis(3_500);

#[test]
fn an_outage_below_the_timeout_harms_nobody() {
    let (up, down) = ((RANKS[1], SCHEDULER), (SCHEDULER, RANKS[1]));
    let of_server = [(SERVER, SCHEDULER), (SCHEDULER, SERVER)];
    std::thread::scope(|scope| {
        scope.spawn(|| survives(&[up, down], OUTAGE));
        scope.spawn(|| survives(&[up], OUTAGE));
        scope.spawn(|| survives(&[down], OUTAGE));
        scope.spawn(|| survives(&of_server, Duration::from_secs(2)));
    });
}

#[test]
fn lanes_outlive_an_outage_below_the_timeout() {
    survives(&[(SERVER, RANKS[1]), (RANKS[1], SERVER)], OUTAGE);
}

#[test]
fn a_rank_that_the_scheduler_no_longer_hears_is_told_so() {
    let Some(mut job) = running(SMALL, &[]) else { return };
    // A scheduler whose last words were not acknowledged sends these again before any others. So
    // this is to happen between two heartbeats, which come each half of a second since the rank
    // connected, a moment before it began.
    std::thread::sleep(Duration::from_millis(700));
    job.network.set(RANKS[1], SCHEDULER, Rule::BLOCK);
    let Job { scheduler, server, ranks, .. } = &mut job;
    let [first, second] = &mut ranks[..] else { unreachable!("two ranks") };
    let limit = Duration::from_secs(5 + 10);
    end_with(&mut [first, server, scheduler], &["rank 1", "died", "no heartbeat"], limit);
    // It hears the scheduler, which has its last heartbeat from before.
    end_with(&mut [second], &["the scheduler declared this process dead: no heartbeat"], limit);
}

#[test]
fn a_rank_that_is_cut_off_from_the_scheduler_does_not_call_it_dead() {
    let Some(mut job) = running(SMALL, &[]) else { return };
    job.network.set_both(RANKS[1], SCHEDULER, Rule::BLOCK);
    let Job { scheduler, server, ranks, .. } = &mut job;
    let [first, second] = &mut ranks[..] else { unreachable!("two ranks") };
    let limit = Duration::from_secs(5 + 10);
    end_with(&mut [second], &["the scheduler at 10.77.0.1:9000 has not answered for 4."], limit);
    end_with(&mut [first, server, scheduler], &["rank 1", "no heartbeat"], limit);
    assert!(!second.lines().join("\n").contains("scheduler died"));
}

/// Bytes a second of a way that is slow.
const SLOW: u64 = 4_000_000;
const METRICS: u16 = 9100;

/// A metric of each rank, as the scheduler shows it; 0 where it says nothing.
fn of_ranks(network: &Network, name: &str) -> [f64; 2] {
    let mut stream = network.connect(SCHEDULER, METRICS).expect("the scheduler shows its metrics");
    stream.set_read_timeout(Some(JOIN)).expect("a timeout is not zero");
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: test\r\n\r\n").expect("it reads");
    let mut page = String::new();
    stream.read_to_string(&mut page).expect("it answers");
    [0, 1].map(|rank| {
        let sample = format!("{name}{{rank=\"{rank}\"}} ");
        let value = page.lines().find_map(|line| line.strip_prefix(&sample));
        value.map_or(0.0, |value| value.parse().expect("a number"))
    })
}

/// A job that chooses encodings sees that these ways are slow, how slow they are, and encodes.
fn encodes(ways: &[(usize, usize)]) {
    let Some(network) = Network::new(4) else { return };
    for &(from, to) in ways {
        network.set(from, to, Rule { rate: Some(SLOW), ..Rule::default() });
    }
    let port = METRICS.to_string();
    let arguments: &[&str] = &["100000000", "0", "500000", "1", "0", "auto"];
    let extra = [("BPS_METRICS_PORT", port.as_str()), ("BPS_HEARTBEAT_INTERVAL", "0.2")];
    let Job { network, mut scheduler, server: _server, ranks: _ranks } =
        job_on(network, [arguments; 2], &extra);
    let until = Instant::now() + JOIN;
    loop {
        let speeds = of_ranks(&network, "bps_rank_line_bytes_per_second");
        let plain = of_ranks(&network, "bps_rank_auto_plain_parts");
        let coded = of_ranks(&network, "bps_rank_auto_codec_parts");
        if plain == [0.0; 2] && coded.iter().all(|parts| *parts > 0.0) {
            // What the kernel holds is sent faster than the line, so it may seem faster than it is.
            let slow = SLOW as f64;
            let is_near = |speed: &f64| (slow / 2.0..slow * 2.0).contains(speed);
            assert!(speeds.iter().all(is_near), "{speeds:?} B/s on lines of {SLOW}");
            return;
        }
        let seen = format!("{speeds:?} B/s; plain {plain:?}, encoded {coded:?}");
        assert!(Instant::now() < until, "{seen}");
        assert!(scheduler.runs(), "{seen}:\n{}", scheduler.lines().join("\n"));
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn auto_encodes_where_the_way_to_a_server_is_slow() {
    encodes(&[(RANKS[0], SERVER), (RANKS[1], SERVER)]);
}

#[test]
fn auto_encodes_where_the_way_from_a_server_is_slow() {
    encodes(&[(SERVER, RANKS[0]), (SERVER, RANKS[1])]);
}
