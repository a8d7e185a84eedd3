//! What a box between two nodes can do: change bytes of a lane, by accident or not. Whatever it
//! does, no wrong sum comes out.

use bps_engine::base::{DType, Operation};
use bps_engine::config::{PayloadChecksum, TransportChoice};
use bps_engine::proto::handshake::{ANSWER_BYTES, HELLO_BYTES, PROOF_BYTES};
use bps_tests::job::{self, JobShape};
use bps_tests::relay::{self, Meddler, Relay, Way};
use bps_worker::{Declaration, Error, PushPull, Worker};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const PATIENCE: Option<Duration> = Some(Duration::from_secs(30));
/// Elements of the tensor: several parts.
const COUNT: usize = 300_000;
const ROUNDS: u64 = 6;

/// What a rank saw.
#[derive(Debug)]
struct Seen {
    /// Rounds whose sum was right.
    right: u64,
    /// A sum that was not.
    wrong: bool,
    /// How it ended, if badly.
    error: Option<Error>,
}

/// A rank that sums until something is wrong.
fn sums(worker: &Worker) -> Seen {
    let mut seen = Seen { right: 0, wrong: false, error: None };
    let done = try_sums(worker, &mut seen).and_then(|()| worker.shutdown(false));
    seen.error = done.err();
    seen
}

fn try_sums(worker: &Worker, seen: &mut Seen) -> Result<(), Error> {
    let declaration = Declaration {
        name: "gradient".into(),
        dtype: DType::F32,
        shape: (COUNT as u64).into(),
        operation: Operation::Sum,
        device: false,
    };
    let tensor = worker.declare(&[declaration])?[0];
    for round in 0..ROUNDS {
        let mut values: Vec<f32> = (0..64).cycle().take(COUNT).map(|at: u8| at.into()).collect();
        let target = values.as_mut_ptr().cast::<u8>();
        let item = PushPull { tensor, source: target.cast_const(), target, priority: 0 };
        // SAFETY: the values stay until the handle is done: a wait that fails has ended as well.
        let handles = unsafe { worker.push_pull(&[item]) }?;
        assert!(handles[0].wait(PATIENCE)?, "round {round} hangs");
        let expected = (0..64).cycle().map(|at: u8| 2.0 * f32::from(at));
        if values.iter().copied().zip(expected).any(|(value, expected)| value != expected) {
            seen.wrong = true;
        } else {
            seen.right += 1;
        }
    }
    Ok(())
}

/// Runs two ranks and a server. Rank 0 reaches the server by way of a relay, at an address that is
/// not loopback, which flips a bit in the payload of the fourth frame that goes this way.
fn with_flipped_bit(ip: IpAddr, way: Way, payload_checksum: PayloadChecksum) -> Vec<Seen> {
    let shape = JobShape { payload_checksum, partition_bytes: 256 << 10, ..JobShape::default() };
    assert_eq!(shape.transport, TransportChoice::Tcp);
    let lanes: Arc<Mutex<Vec<Relay>>> = Arc::default();
    let on_lane = move |here: Way| -> Meddler {
        match here {
            _ if here != way => relay::honest(),
            Way::ToListener => relay::flip_payload(HELLO_BYTES + PROOF_BYTES, 3),
            Way::ToDialer => relay::flip_payload(ANSWER_BYTES, 3),
        }
    };
    // The job has no key, so whoever is in between may say where the server is.
    let on_control = move |way: Way| -> Meddler {
        let lanes = Arc::clone(&lanes);
        match way {
            Way::ToListener => relay::honest(),
            Way::ToDialer => relay::rewrite(ANSWER_BYTES, move |message| {
                let Some(servers) = message.get_mut("servers").and_then(|it| it.as_array_mut())
                else {
                    return;
                };
                for core in servers.iter_mut().flat_map(|it| it["cores"].as_array_mut().unwrap()) {
                    let to: SocketAddr = core.as_str().unwrap().parse().unwrap();
                    let relay = Relay::start(ip, to, on_lane);
                    *core = relay.address().to_string().into();
                    lanes.lock().unwrap().push(relay);
                }
            }),
        }
    };
    let relays = Mutex::new(Vec::new());
    let port_of = |scheduler: u16, worker: u32| {
        if worker != 0 {
            return scheduler;
        }
        let relay = Relay::start(LOOPBACK, (LOOPBACK, scheduler).into(), on_control.clone());
        let port = relay.address().port();
        relays.lock().unwrap().push(relay);
        port
    };
    job::run_relayed(shape, None, port_of, |worker| sums(&worker.expect("the job starts")))
}

/// The job's end: nobody has a wrong sum, the rank at the spoilt path says which path it is, and
/// the other one hears it.
fn told_by_name(way: Way) {
    let Some(ip) = relay::own_address() else {
        return eprintln!("skipped: this machine has no address but loopback");
    };
    let seen = with_flipped_bit(ip, way, PayloadChecksum::Auto);
    for (rank, seen) in seen.iter().enumerate() {
        assert!(!seen.wrong, "rank {rank} has a wrong sum");
        assert!(seen.right < ROUNDS, "rank {rank} noticed nothing");
        let error = seen.error.as_ref().expect("the job ends badly");
        assert!(rank != 0 || matches!(error, Error::Corrupt(_)), "{error:?}");
        let (from, to) = match way {
            Way::ToListener => ("from rank 0", "to server 0"),
            Way::ToDialer => ("from server 0", "to rank 0"),
        };
        for part in [from, to, "`gradient`", "CRC-32C differs"] {
            assert!(error.to_string().contains(part), "rank {rank} says: {error}");
        }
    }
}

#[test]
fn a_bit_flipped_on_the_way_to_a_server_ends_the_job_by_name() {
    told_by_name(Way::ToListener);
}

#[test]
fn a_bit_flipped_on_the_way_from_a_server_ends_the_job_by_name() {
    told_by_name(Way::ToDialer);
}

/// What the two tests above are worth: the relay does spoil a sum where nobody looks.
#[test]
fn without_checksums_a_flipped_bit_is_a_wrong_sum() {
    let Some(ip) = relay::own_address() else {
        return eprintln!("skipped: this machine has no address but loopback");
    };
    let seen = with_flipped_bit(ip, Way::ToDialer, PayloadChecksum::Never);
    assert!(seen[0].wrong, "{seen:?}");
}
