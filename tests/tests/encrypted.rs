//! Jobs whose TCP lanes are encrypted: the sums are right, whoever is between a worker and a server
//! reads nothing and can only end the lane, and nodes that disagree do not come together.

use bps_engine::config::{Config, Role, TcpDriver};
use bps_engine::control::JobKey;
use bps_engine::proto::handshake::{ANSWER_BYTES, HELLO_BYTES, PROOF_BYTES};
use bps_engine::proto::messages::SchedulerMessage;
use bps_engine::transport::tcp::sealed::PREFIX_BYTES;
use bps_tests::job::{self, JobShape};
use bps_tests::relay::{self, Meddler, Relay, Way};
use bps_tests::stand_in::StandIn;
use bps_tests::sums::{ROUNDS, Seen, sums};
use bps_worker::{Error, Worker};
use std::net::{IpAddr, Ipv4Addr};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const KEY: &str = "abababababababababababababababababababababababababababababababab";

fn shape(driver: TcpDriver, encrypt: bool) -> JobShape {
    JobShape { driver, encrypt, partition_bytes: 256 << 10, ..JobShape::default() }
}

fn handshake_bytes(way: Way) -> usize {
    match way {
        Way::ToListener => HELLO_BYTES + PROOF_BYTES,
        Way::ToDialer => ANSWER_BYTES,
    }
}

/// Runs two ranks and a server in a job with a key. Rank 0 reaches the server by way of a relay.
fn by_way_of(
    shape: JobShape,
    meddler: impl Fn(Way) -> Meddler + Clone + Send + 'static,
) -> Vec<Seen> {
    let key = JobKey::load(&Config { job_key: Some(KEY.into()), ..Config::default() });
    let key = key.expect("a key");
    let (lanes, stand_ins) = (Arc::<Mutex<Vec<Relay>>>::default(), Mutex::new(Vec::new()));
    let lead = move |message: &mut SchedulerMessage| {
        let SchedulerMessage::Roster(roster) = message else { return };
        for core in roster.servers.iter_mut().flat_map(|server| &mut server.cores) {
            let relay = Relay::start(LOOPBACK, *core, meddler.clone());
            *core = relay.address();
            lanes.lock().unwrap().push(relay);
        }
    };
    let port_of = |scheduler: u16, worker: u32| {
        if worker != 0 {
            return scheduler;
        }
        let stand_in = StandIn::start((LOOPBACK, scheduler).into(), &key, lead.clone());
        let port = stand_in.port();
        stand_ins.lock().unwrap().push(stand_in);
        port
    };
    job::run_relayed(shape, Some(KEY), port_of, |worker| sums(&worker.expect("the job starts")))
}

#[test]
fn sums_are_right_over_both_drivers() {
    for driver in [TcpDriver::Uring, TcpDriver::Poll] {
        let shape = JobShape { servers: 2, cores: 2, ..shape(driver, true) };
        let rank = |worker: Result<Worker, Error>| sums(&worker.expect("the job starts"));
        let seen = job::run_relayed(shape, Some(KEY), |port, _| port, rank);
        for seen in seen {
            assert!(seen.right == ROUNDS && !seen.wrong && seen.error.is_none(), "{seen:?}");
        }
    }
}

#[test]
fn who_is_between_reads_gradients_only_where_they_are_not_encrypted() {
    // Four values of the tensor, one behind the other.
    const WORDS: &[u8] = &{
        let values = [1f32.to_le_bytes(), 2f32.to_le_bytes(), 3f32.to_le_bytes()];
        let mut words = [0; 12];
        let mut at = 0;
        while at < 12 {
            words[at] = values[at / 4][at % 4];
            at += 1;
        }
        words
    };
    for encrypt in [false, true] {
        let heard = Arc::new(AtomicBool::new(false));
        let hears = Arc::clone(&heard);
        let listens = move |_| relay::listen(WORDS, Arc::clone(&hears));
        let seen = by_way_of(shape(TcpDriver::Auto, encrypt), listens);
        assert_eq!(heard.load(Ordering::Relaxed), !encrypt, "encrypted: {encrypt}");
        for seen in seen {
            assert!(seen.right == ROUNDS && seen.error.is_none(), "{seen:?}");
        }
    }
}

/// What somebody between two ends does with the records of a lane from the ninth on, and what the
/// end that notices says.
type Trick = (&'static str, fn() -> Pass, &'static str);
type Pass = Box<dyn FnMut(usize, Vec<u8>, &mut Vec<u8>) -> ControlFlow<()> + Send>;

const AT: usize = 9;

/// Changes this record and lets all others pass.
fn changed(change: fn(&mut Vec<u8>)) -> Pass {
    Box::new(move |number, mut record, bytes| {
        if number == AT {
            change(&mut record);
        }
        bytes.append(&mut record);
        ControlFlow::Continue(())
    })
}

const TRICKS: [Trick; 5] = [
    (
        "flips a bit",
        || changed(|record| record[PREFIX_BYTES + 3] ^= 8),
        "record 9 of the encrypted lane does not authenticate",
    ),
    (
        "repeats a record",
        || changed(|record| record.extend_from_within(..)),
        "record 9 of the encrypted lane came again where 10 was due",
    ),
    (
        "leaves a record out",
        || changed(Vec::clear),
        "record 10 of the encrypted lane came where 9 was due",
    ),
    (
        "swaps two records",
        || {
            let mut held = Vec::new();
            Box::new(move |number, mut record, bytes| {
                if number == AT {
                    held = record;
                } else {
                    bytes.append(&mut record);
                    bytes.append(&mut held);
                }
                ControlFlow::Continue(())
            })
        },
        "record 10 of the encrypted lane came where 9 was due",
    ),
    (
        "cuts a record short",
        || {
            Box::new(|number, mut record, bytes| {
                if number == AT {
                    record.truncate(PREFIX_BYTES + 5);
                }
                bytes.append(&mut record);
                if number == AT { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            })
        },
        "closed",
    ),
];

fn meddled_with(way: Way, driver: TcpDriver) {
    for (what, trick, says) in TRICKS {
        let seen = by_way_of(shape(driver, true), move |here| {
            if here == way {
                relay::meddle_with_lane(handshake_bytes(here), trick())
            } else {
                relay::honest()
            }
        });
        for (rank, seen) in seen.iter().enumerate() {
            assert!(!seen.wrong, "{what}: rank {rank} has a wrong sum");
            assert!(seen.right < ROUNDS, "{what}: rank {rank} noticed nothing");
            let text = seen.error.as_ref().expect("the job ends badly").to_string();
            for part in ["rank 0", "server 0", says] {
                assert!(text.contains(part), "{what}: rank {rank} says: {text}");
            }
        }
    }
}

#[test]
fn records_meddled_with_on_the_way_to_a_server_end_the_job_by_name() {
    meddled_with(Way::ToListener, TcpDriver::Auto);
}

#[test]
fn records_meddled_with_on_the_way_from_a_server_end_the_job_by_name() {
    meddled_with(Way::ToDialer, TcpDriver::Poll);
}

#[test]
fn nodes_that_disagree_are_refused_by_name() {
    for (role, encrypt) in [(Role::Worker, false), (Role::Worker, true), (Role::Server, true)] {
        let shape = JobShape { workers: 1, ..JobShape::default() };
        let port = job::free_port();
        let config = |own| Config {
            job_key: Some(KEY.into()),
            encrypt: if own == role { encrypt } else { !encrypt },
            // The scheduler tells nodes that come later for no longer than this.
            start_timeout: Duration::from_secs(2),
            ..job::config(&shape, port, own, 0)
        };
        let (scheduler, server, worker) =
            (config(Role::Scheduler), config(Role::Server), config(Role::Worker));
        let scheduler = std::thread::spawn(move || drop(bps_server::scheduler::run(&scheduler)));
        let server = std::thread::spawn(move || bps_server::run::run(&server));
        let worker = Worker::start(&worker).map(drop).expect_err("the job cannot form");
        server.join().expect("no panic").expect_err("the job cannot form");
        scheduler.join().expect("no panic");
        let (has, expected) = (u8::from(encrypt), u8::from(!encrypt));
        let who = if role == Role::Worker { "worker" } else { "server" };
        let (text, host) = (worker.to_string(), bps_engine::host::name());
        for part in [
            who,
            &format!("(host {host}, pid {})", std::process::id()),
            &format!("has BPS_ENCRYPT={has}, the scheduler BPS_ENCRYPT={expected}"),
            "set BPS_ENCRYPT=1 on every node",
        ] {
            assert!(text.contains(part), "{role:?}: {text}");
        }
    }
}

#[test]
fn without_a_key_a_worker_says_how_to_make_one() {
    let shape = JobShape::default();
    let config = Config { encrypt: true, ..job::config(&shape, 9, Role::Worker, 0) };
    let text = Worker::start(&config).map(drop).expect_err("no key").to_string();
    assert!(text.contains("BPS_ENCRYPT=1, but the job has no key: make one with"), "{text}");
}
