//! What a box between two nodes can do: change bytes of a lane, by accident or not, and meddle with
//! the control plane. Whatever it does, no wrong sum comes out, and in a job with a key nothing is
//! made of what it wrote.

use bps_engine::config::{PayloadChecksum, TransportChoice};
use bps_engine::control::channel::GREETING_BYTES;
use bps_engine::proto::handshake::{ANSWER_BYTES, HELLO_BYTES, PROOF_BYTES};
use bps_tests::job::{self, JobShape};
use bps_tests::relay::{self, Meddler, Relay, Way};
use bps_tests::sums::{ROUNDS, Seen, sums};
use bps_worker::Error;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
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
        let details = error.details();
        assert_eq!(
            (details.tensor.as_deref(), details.ranks),
            (Some("gradient"), vec![bps_engine::base::Rank(0)])
        );
        assert!(details.round.is_some(), "{error}");
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

/// Runs two ranks and a server in a job with or without a key. Rank 0 reaches the scheduler by way
/// of a relay, whose meddlers may ask whether the job has formed.
fn by_way_of(
    key: Option<&str>,
    meddler: impl Fn(Way, &Arc<AtomicBool>) -> Meddler + Clone + Send + 'static,
) -> Vec<Seen> {
    let formed = Arc::new(AtomicBool::new(false));
    let meddler = {
        let formed = Arc::clone(&formed);
        move |way| meddler(way, &formed)
    };
    let relays = Mutex::new(Vec::new());
    let port_of = |scheduler: u16, worker: u32| {
        if worker != 0 {
            return scheduler;
        }
        let relay = Relay::start(LOOPBACK, (LOOPBACK, scheduler).into(), meddler.clone());
        let port = relay.address().port();
        relays.lock().unwrap().push(relay);
        port
    };
    job::run_relayed(JobShape::default(), key, port_of, move |worker| match worker {
        Ok(worker) => {
            formed.store(true, Ordering::Release);
            sums(&worker)
        }
        Err(error) => Seen { right: 0, wrong: false, error: Some(error) },
    })
}

const KEY: &str = "abababababababababababababababababababababababababababababababab";

#[test]
fn who_is_between_a_rank_and_the_scheduler_reads_messages_only_without_a_key() {
    for (key, is_heard) in [(None, true), (Some(KEY), false)] {
        let heard = Arc::new(AtomicBool::new(false));
        let hears = Arc::clone(&heard);
        let seen = by_way_of(key, move |_, _| relay::listen(b"\"type\":", Arc::clone(&hears)));
        assert_eq!(heard.load(Ordering::Relaxed), is_heard, "with {key:?}");
        for seen in seen {
            assert!(seen.right == ROUNDS && seen.error.is_none(), "{seen:?}");
        }
    }
}

/// What somebody between two nodes may try with a record.
type Trick = (&'static str, fn(&mut Vec<u8>));

const TRICKS: [Trick; 4] = [
    ("changed", |record| record[7] ^= 1),
    ("repeated", |record| record.extend_from_within(..)),
    ("left out", Vec::clear),
    ("forged", |record| {
        let text = br#"{"type":"over","reason":{"kind":"finished"}}"#;
        let length = u16::try_from(4 + text.len()).unwrap();
        *record = length.to_le_bytes().to_vec();
        record.extend(u32::try_from(text.len()).unwrap().to_le_bytes());
        record.extend(text);
    }),
];

#[test]
fn a_message_to_the_scheduler_that_was_meddled_with_ends_the_job_by_name() {
    for (what, trick) in TRICKS {
        // Of a job that has not formed, the scheduler forgets who is cut off.
        let seen = by_way_of(Some(KEY), move |way, formed| match way {
            Way::ToListener => {
                let formed = Arc::clone(formed);
                let bytes = HELLO_BYTES + PROOF_BYTES + GREETING_BYTES;
                relay::meddle_with_record(bytes, move |_| formed.load(Ordering::Acquire), trick)
            }
            Way::ToDialer => relay::honest(),
        });
        assert!(seen[0].error.is_some() && !seen[0].wrong && !seen[1].wrong, "{what}: {seen:?}");
        let text = seen[1].error.as_ref().expect("the job is over").to_string();
        for part in ["rank 0", "the connection from 127.0.0.1:", "does not authenticate"] {
            assert!(text.contains(part), "{what}: {text}");
        }
    }
}

#[test]
fn a_message_from_the_scheduler_that_was_meddled_with_ends_the_job_by_name() {
    for (what, trick) in TRICKS.into_iter().filter(|(what, _)| *what != "left out") {
        let seen = by_way_of(Some(KEY), move |way, _| match way {
            Way::ToListener => relay::honest(),
            Way::ToDialer => {
                let bytes = ANSWER_BYTES + GREETING_BYTES;
                relay::meddle_with_record(bytes, |record| record == 0, trick)
            }
        });
        let Some(error @ Error::Corrupt(_)) = &seen[0].error else { panic!("{what}: {seen:?}") };
        let text = error.to_string();
        for part in ["from the scheduler at 127.0.0.1:", " to 127.0.0.1:", "not authenticate"] {
            assert!(text.contains(part), "{what}: {text}");
        }
        assert!(seen[1].error.is_some() && !seen[1].wrong, "{what}: {seen:?}");
    }
}

/// What somebody between two nodes may do to what they say as a whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Harm {
    /// Two records that follow each other change places; in a job without a key, two messages.
    Swapped,
    /// The connection ends within one.
    Cut,
}

/// Does so to one direction of a control connection, once `formed`.
fn harm(harm: Harm, key: Option<&str>, way: Way, formed: &Arc<AtomicBool>) -> Meddler {
    let greeting = if key.is_some() { GREETING_BYTES } else { 0 };
    let handshake = match way {
        Way::ToListener => HELLO_BYTES + PROOF_BYTES,
        Way::ToDialer => ANSWER_BYTES,
    };
    let formed = Arc::clone(formed);
    let (mut held, mut is_done) = (None, false);
    relay::meddle_with_control(handshake + greeting, key.is_some(), move |_, mut whole, bytes| {
        if is_done || !formed.load(Ordering::Acquire) {
            bytes.append(&mut whole);
        } else if harm == Harm::Cut {
            bytes.extend(&whole[..whole.len() / 2]);
            return ControlFlow::Break(());
        } else if let Some(mut first) = held.take() {
            bytes.append(&mut whole);
            bytes.append(&mut first);
            is_done = true;
        } else {
            held = Some(whole);
        }
        ControlFlow::Continue(())
    })
}

/// What two ranks see of whom the first is harmed so.
fn harmed(what: Harm, key: Option<&'static str>, harmed: Way) -> Vec<Seen> {
    let seen =
        by_way_of(
            key,
            move |way, formed| {
                if way == harmed { harm(what, key, way, formed) } else { relay::honest() }
            },
        );
    assert!(seen.iter().all(|seen| !seen.wrong), "{what:?}, {key:?}: {seen:?}");
    seen
}

/// The texts of the errors by which both ranks ended.
fn errors(seen: &[Seen], what: &str) -> Vec<String> {
    let text = |seen: &Seen| seen.error.as_ref().map(ToString::to_string);
    let texts: Option<Vec<String>> = seen.iter().map(text).collect();
    texts.unwrap_or_else(|| panic!("{what}: a rank noticed nothing: {seen:?}"))
}

#[test]
fn messages_to_the_scheduler_that_changed_places_end_the_job_by_name() {
    let texts = errors(&harmed(Harm::Swapped, Some(KEY), Way::ToListener), "swapped");
    for part in ["rank 0", "the connection from 127.0.0.1:", "does not authenticate"] {
        assert!(texts[1].contains(part), "{texts:?}");
    }
}

#[test]
fn messages_from_the_scheduler_that_changed_places_end_the_job_by_name() {
    let seen = harmed(Harm::Swapped, Some(KEY), Way::ToDialer);
    assert!(matches!(seen[0].error, Some(Error::Corrupt(_))), "{seen:?}");
    let texts = errors(&seen, "swapped");
    for part in ["from the scheduler at 127.0.0.1:", " to 127.0.0.1:", "not authenticate"] {
        assert!(texts[0].contains(part), "{texts:?}");
    }
    assert!(texts[1].contains("rank 0"), "{texts:?}");
}

#[test]
fn a_connection_to_the_scheduler_that_is_cut_within_a_message_ends_the_job_by_name() {
    for key in [None, Some(KEY)] {
        let texts = errors(&harmed(Harm::Cut, key, Way::ToListener), "cut");
        for part in ["rank 0 (host ", "the connection from 127.0.0.1:", "ended within a message"] {
            assert!(texts[1].contains(part), "{key:?}: {texts:?}");
        }
    }
}

#[test]
fn a_connection_from_the_scheduler_that_is_cut_within_a_message_ends_the_job_by_name() {
    for key in [None, Some(KEY)] {
        let texts = errors(&harmed(Harm::Cut, key, Way::ToDialer), "cut");
        for part in ["from the scheduler at 127.0.0.1:", " to 127.0.0.1:", "middle of a message"] {
            assert!(texts[0].contains(part), "{key:?}: {texts:?}");
        }
        assert!(texts[1].contains("rank 0 (host "), "{key:?}: {texts:?}");
    }
}

/// Nothing numbers messages in a job without a key: two that change places may go unnoticed, as
/// two answers may, but nobody hangs over them.
#[test]
fn messages_without_a_key_that_change_places_leave_nobody_waiting() {
    for way in [Way::ToListener, Way::ToDialer] {
        for (rank, seen) in harmed(Harm::Swapped, None, way).iter().enumerate() {
            assert!(seen.right == ROUNDS || seen.error.is_some(), "{way:?}, rank {rank}: {seen:?}");
        }
    }
}
