//! Both drivers over real sockets of this host, loopback TCP and socket pairs alike.

use super::*;
use crate::limits::{EVENTS_MAX, HEADER_BYTES, LANE_FRAMES_MAX};
use crate::mem::{Readable, Writable};
use crate::transport::{Cause, RawHeader};
use std::collections::VecDeque;
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::Instant;

mod churn;
mod close;
mod drivers;
mod sealed;
mod traffic;

const DRIVERS: [TcpDriver; 2] = [TcpDriver::Uring, TcpDriver::Poll];
/// No wait of a test is longer: what takes this long has failed.
const PATIENCE: Duration = Duration::from_secs(40);

fn transport(driver: TcpDriver, lanes_max: u32) -> Tcp {
    let waker = Waker::new().expect("an eventfd");
    Tcp::new(waker, driver, lanes_max).expect("this machine allows both drivers")
}

/// Two ends of a loopback connection.
fn connection() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("bound");
    let one = TcpStream::connect(address).expect("somebody listens");
    let (two, _) = listener.accept().expect("somebody connects");
    (one, two)
}

fn sockets(loopback: bool) -> (OwnedFd, OwnedFd) {
    if loopback {
        let (one, two) = connection();
        (one.into(), two.into())
    } else {
        let (one, two) = UnixStream::pair().expect("a socket pair");
        (one.into(), two.into())
    }
}

/// A header of the tests: the payload's length and a number.
fn header(length: usize, number: u64) -> RawHeader {
    let mut raw = [0x5a; HEADER_BYTES];
    raw[..8].copy_from_slice(&(length as u64).to_le_bytes());
    raw[8..16].copy_from_slice(&number.to_le_bytes());
    raw
}

fn length_in(raw: &RawHeader) -> usize {
    u64::from_le_bytes(raw[..8].try_into().expect("eight bytes")) as usize
}

fn payload(length: usize, seed: u64) -> Vec<u8> {
    let mut random = Random(seed | 1);
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        bytes.extend_from_slice(&random.next().to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// xorshift64*: enough for sizes and patterns.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// Posts a frame whose payload the caller keeps.
fn post(tcp: &mut Tcp, lane: u32, payload: &[u8], token: u64) -> Result<(), Full> {
    let header = header(payload.len(), token);
    // SAFETY: the tests keep payloads unchanged until they are sent, or their lane is gone.
    let payload = unsafe { Readable::of(payload) };
    tcp.post(LaneId(lane), &Frame::new(header, payload, token))
}

/// Lets a payload land in memory that the caller keeps.
fn into(landing: &mut [u8]) -> Landing {
    // SAFETY: the tests keep landings untouched until they are whole, or their lane is gone.
    Landing::Into(unsafe { Writable::of(landing) })
}

/// Polls, sleeping in between, until `done` has seen what it waits for.
fn until(tcp: &mut Tcp, what: &str, mut done: impl FnMut(&mut Tcp, Event) -> bool) {
    let start = Instant::now();
    let mut events = Vec::new();
    loop {
        events.clear();
        tcp.poll(&mut events);
        for (index, &event) in events.iter().enumerate() {
            if done(tcp, event) {
                assert_eq!(index + 1, events.len(), "unexpected events behind {what}");
                return;
            }
        }
        assert!(start.elapsed() < PATIENCE, "no {what} within {PATIENCE:?}");
        tcp.block(Duration::from_millis(20));
    }
}

fn until_header(tcp: &mut Tcp) {
    until(tcp, "header", |_, event| match event {
        Event::Header { .. } => true,
        other => panic!("{other:?} instead of a header"),
    });
}

fn until_closed(tcp: &mut Tcp, expected: Cause) {
    until(tcp, "Closed", |_, event| match event {
        Event::Closed { cause, .. } => {
            assert_eq!(cause, expected);
            true
        }
        Event::Sent { .. } => false,
        other => panic!("{other:?} instead of Closed"),
    });
}
