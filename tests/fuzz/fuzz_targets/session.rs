//! A connection from its first byte: handshake, then control messages, cut as the fuzzer likes.
//!
//! The input is: the length of the pieces; whether the dialer knows the key; 64 bytes that are laid
//! over what the dialer says; and what follows the handshake.

#![no_main]

use bps_engine::base::{Epoch, Rank};
use bps_engine::control::channel::Greeting;
use bps_engine::control::{Connection, Inbox, encode};
use bps_engine::proto::handshake::{Accepting, Dialing, Hello, JobKey, Step};
use bps_engine::proto::messages::{NodeMessage, SchedulerMessage};
use libfuzzer_sys::fuzz_target;

/// Whether an acceptor lets this dialer in when `spoil` is laid over its hello and its proof.
fn handshake(key: &JobKey, dialer: &JobKey, piece: usize, spoil: &[u8; 64]) -> bool {
    let dialing = Dialing::new(dialer, Hello::lane(Rank(1), Epoch(1)), &[1; 16]);
    let mut accepting = Accepting::new(key, [2; 16]);
    let (first, second) = spoil.split_at(32);
    let lay = |bytes: &[u8], over: &[u8]| -> Vec<u8> {
        bytes.iter().zip(over).map(|(byte, over)| byte ^ over).collect()
    };
    let mut bytes = lay(dialing.hello(), first);
    let mut dialing = Some(dialing);
    loop {
        let count = accepting.wanted().min(piece).min(bytes.len());
        let now: Vec<u8> = bytes.drain(..count).collect();
        match accepting.handle_bytes(&now) {
            Ok(Step::Read) => {}
            Ok(Step::Send(answer)) => {
                let dialing = dialing.take().expect("an acceptor answers once");
                bytes = lay(&dialing.handle_answer(&answer).0, second);
            }
            Ok(Step::Accepted(_)) => return true,
            Ok(Step::Reject(..)) | Err(_) => return false,
        }
    }
}

fn messages(piece: usize, bytes: &[u8]) {
    let mut inbox = Inbox::new();
    for part in bytes.chunks(piece) {
        inbox.push(part);
        loop {
            match inbox.next_message::<NodeMessage>() {
                Ok(Some(message)) => drop(encode(&message)),
                Ok(None) => break,
                Err(error) => {
                    drop(error.to_string());
                    return;
                }
            }
        }
    }
    drop(serde_json::from_slice::<SchedulerMessage>(bytes));
}

/// Bytes at the scheduler's end of an encrypted connection: none of them is a message.
fn sealed(key: &JobKey, piece: usize, greets: bool, bytes: &[u8]) {
    let mut connection = Connection::accept(key);
    if greets {
        let (_, greeting) = Greeting::new(key).expect("a job with a key");
        assert!(connection.push(&greeting).is_ok(), "an honest greeting was refused");
    }
    for part in bytes.chunks(piece) {
        if connection.push(part).is_err() {
            return;
        }
        match connection.next_message::<NodeMessage>() {
            Ok(message) => assert!(message.is_none(), "a stranger's bytes were read"),
            Err(error) => return drop(error.to_string()),
        }
    }
}

fuzz_target!(|input: (u8, bool, [u8; 64], &[u8])| {
    let (piece, knows, spoil, rest) = input;
    let piece = usize::from(piece) + 1;
    let key = JobKey::from_bytes([7; 32]);
    let dialer = if knows { key.clone() } else { JobKey::from_bytes([8; 32]) };
    let accepted = handshake(&key, &dialer, piece, &spoil);
    assert_eq!(accepted, knows && spoil == [0; 64], "who has no key or spoils it stays outside");
    messages(piece, rest);
    sealed(&key, piece, knows, rest);
});
