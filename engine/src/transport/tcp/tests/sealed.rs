//! Encrypted lanes with somebody between their ends, over both drivers.

use super::*;
use crate::transport::tcp::sealed::{Keys, PREFIX_BYTES, SECRET_BYTES, SealError, TAG_BYTES};
use std::io::{Read, Write};
use std::net::Shutdown;

const SENTINEL: u8 = 0xa7;

/// Two transports whose lanes end in the test's hands.
struct Between {
    left: Tcp,
    /// What the left one sends comes here.
    from: TcpStream,
    /// What is written here comes to the right one.
    to: TcpStream,
    right: Tcp,
}

fn sealed_link(socket: TcpStream, seal: u8, open: u8) -> Link {
    let keys = Keys { seal: [seal; SECRET_BYTES], open: [open; SECRET_BYTES] };
    Link::SealedTcp(socket.into(), Box::new(keys))
}

impl Between {
    fn new(driver: TcpDriver) -> Between {
        let ((here, from), (there, to)) = (connection(), connection());
        let (mut left, mut right) = (transport(driver, 1), transport(driver, 1));
        left.attach(LaneId(0), sealed_link(here, 1, 2)).expect("a fresh socket");
        right.attach(LaneId(0), sealed_link(there, 2, 1)).expect("a fresh socket");
        from.set_read_timeout(Some(PATIENCE)).expect("a socket");
        Between { left, from, to, right }
    }

    /// Sends a frame and takes its records off the line.
    fn send(&mut self, payload: &[u8], token: u64) -> Vec<Vec<u8>> {
        post(&mut self.left, 0, payload, token).expect("room");
        until(&mut self.left, "Sent", |_, event| matches!(event, Event::Sent { .. }));
        let (mut records, mut plain) = (Vec::new(), 0);
        while plain < HEADER_BYTES + payload.len() {
            let mut record = vec![0; PREFIX_BYTES];
            self.from.read_exact(&mut record).expect("a prefix");
            let length = u32::from_le_bytes(record[..4].try_into().expect("four")) as usize;
            record.resize(PREFIX_BYTES + length + TAG_BYTES, 0);
            self.from.read_exact(&mut record[PREFIX_BYTES..]).expect("the rest of a record");
            plain += length;
            records.push(record);
        }
        assert_eq!(plain, HEADER_BYTES + payload.len(), "a frame ends with a record");
        records
    }

    /// Lets the right end read these bytes, and nothing more, to its end. Returns the payloads that
    /// landed, the landing at hand when it ended, and why it did.
    fn receive(&mut self, bytes: &[u8]) -> (Vec<Vec<u8>>, Vec<u8>, Cause) {
        self.to.write_all(bytes).expect("room");
        self.to.shutdown(Shutdown::Write).expect("connected");
        let (mut whole, mut landing, mut cause) = (Vec::new(), Vec::new(), None);
        until(&mut self.right, "Closed", |tcp, event| {
            match event {
                Event::Header { header, .. } => {
                    landing = vec![SENTINEL; length_in(&header)];
                    tcp.land(LaneId(0), into(&mut landing));
                }
                Event::Landed { .. } => whole.push(std::mem::take(&mut landing)),
                Event::Closed { cause: why, .. } => cause = Some(why),
                other => panic!("unexpected {other:?}"),
            }
            cause.is_some()
        });
        (whole, landing, cause.expect("it is closed"))
    }
}

/// What somebody between two ends does with four records of a frame each, how many of the frames
/// arrive then, and how the lane ends.
type Trick = (&'static str, fn(&mut Vec<Vec<u8>>), usize, Cause);

fn tricks() -> Vec<Trick> {
    let repeated = |number, expected| Cause::Seal(SealError::Repeated { number, expected });
    let ahead = |number, expected| Cause::Seal(SealError::Ahead { number, expected });
    let altered = |number| Cause::Seal(SealError::Altered { number });
    vec![
        ("nothing", |_| {}, 4, Cause::Peer),
        ("flips a bit of a payload", |records| records[2][900] ^= 4, 2, altered(2)),
        ("flips a bit of a header", |records| records[0][PREFIX_BYTES + 9] ^= 1, 0, altered(0)),
        (
            "flips a bit of a tag",
            |records| *records[3].last_mut().expect("a tag") ^= 128,
            3,
            altered(3),
        ),
        ("flips a bit of a length", |records| records[1][0] ^= 1, 1, altered(1)),
        ("repeats a record", |records| records.insert(2, records[1].clone()), 2, repeated(1, 2)),
        ("repeats the last record", |records| records.push(records[3].clone()), 4, repeated(3, 4)),
        ("swaps two records", |records| records.swap(1, 2), 1, ahead(2, 1)),
        ("leaves a record out", |records| drop(records.remove(1)), 1, ahead(2, 1)),
        ("cuts a record short", |records| records[3].truncate(700), 3, Cause::Truncated),
        ("cuts a prefix short", |records| records[3].truncate(5), 3, Cause::Truncated),
        ("cuts between records", |records| records.truncate(2), 2, Cause::Peer),
        ("puts a plain frame in", |records| records[1] = header(0, 1).to_vec(), 1, {
            let number = u64::from_le_bytes([0, 0, 0, 0, 1, 0, 0, 0]);
            ahead(number, 1)
        }),
        (
            "claims a long record",
            |records| records[0][..4].copy_from_slice(&u32::MAX.to_le_bytes()),
            0,
            Cause::Seal(SealError::Malformed { bytes: u32::MAX }),
        ),
    ]
}

#[test]
fn whoever_is_between_can_end_a_lane_by_name_and_nothing_else() {
    for driver in DRIVERS {
        for (what, trick, arrive, cause) in tricks() {
            let mut between = Between::new(driver);
            let payloads: Vec<Vec<u8>> = (0..4).map(|at| payload(2000, at + 5)).collect();
            let mut records: Vec<Vec<u8>> = Vec::new();
            for (token, payload) in (0..).zip(&payloads) {
                records.extend(between.send(payload, token));
            }
            assert_eq!(records.len(), payloads.len(), "a small frame is one record");
            trick(&mut records);
            let (whole, _, why) = between.receive(&records.concat());
            assert_eq!(why, cause, "{what}, {driver:?}");
            assert!(whole == payloads[..arrive], "{what}: {} frames, {driver:?}", whole.len());
        }
    }
}

#[test]
fn no_byte_of_a_record_that_does_not_open_reaches_memory_of_the_caller() {
    const LENGTH: usize = 150_000;
    for driver in DRIVERS {
        for spoilt in 0..5 {
            let mut between = Between::new(driver);
            let payload = payload(LENGTH, 77);
            let mut records = between.send(&payload, 0);
            assert_eq!(records.len(), 5);
            let before: usize = records[..spoilt]
                .iter()
                .map(|record| record.len() - PREFIX_BYTES - TAG_BYTES)
                .sum();
            let at = records[spoilt].len() / 2;
            records[spoilt][at] ^= 1;
            let (whole, landing, cause) = between.receive(&records.concat());
            let number = spoilt as u64;
            assert_eq!(cause, Cause::Seal(SealError::Altered { number }));
            assert!(whole.is_empty(), "a payload with a spoilt record landed");
            if spoilt == 0 {
                assert!(landing.is_empty(), "its header came out of a spoilt record");
                continue;
            }
            let right = before - HEADER_BYTES;
            assert!(landing[..right] == payload[..right], "record {spoilt}, {driver:?}");
            assert!(
                landing[right..].iter().all(|&byte| byte == SENTINEL),
                "record {spoilt} was spoilt and landed, {driver:?}"
            );
        }
    }
}

#[test]
fn the_line_shows_nothing_of_what_is_sent() {
    for driver in DRIVERS {
        let mut between = Between::new(driver);
        let pattern = *b"an old secret";
        let payload: Vec<u8> = pattern.iter().copied().cycle().take(100_000).collect();
        let records = between.send(&payload, 9).concat();
        let header = header(payload.len(), 9);
        for words in [&pattern[..], &header[8..24]] {
            let is_there = records.windows(words.len()).any(|window| window == words);
            assert!(!is_there, "{words:?} is on the line, {driver:?}");
        }
        let (whole, _, cause) = between.receive(&records);
        assert!(whole == [payload] && cause == Cause::Peer);
    }
}

#[test]
fn ends_with_other_keys_do_not_come_together() {
    for driver in DRIVERS {
        let ((here, from), (there, to)) = (connection(), connection());
        let (mut left, mut right) = (transport(driver, 1), transport(driver, 1));
        left.attach(LaneId(0), sealed_link(here, 1, 2)).expect("a fresh socket");
        right.attach(LaneId(0), sealed_link(there, 2, 3)).expect("a fresh socket");
        let mut between = Between { left, from, to, right };
        let records = between.send(&[], 0).concat();
        let (_, _, cause) = between.receive(&records);
        assert_eq!(cause, Cause::Seal(SealError::Altered { number: 0 }));
    }
}
