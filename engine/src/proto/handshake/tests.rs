//! Both ends of a handshake against each other, and against who lacks the key.

use super::*;

const HELLO: Hello = Hello::lane(Rank(3), Epoch(2));

fn key(byte: u8) -> JobKey {
    JobKey::from_bytes([byte; PROOF_BYTES])
}

/// Runs both ends against each other, the acceptor fed in pieces of `piece` bytes, with one bit
/// of the whole conversation flipped if asked.
fn converse(
    dialer: &JobKey,
    acceptor: &JobKey,
    piece: usize,
    flip: Option<usize>,
) -> (Result<(), HandshakeError>, Result<Hello, HandshakeError>) {
    let spoil = |bytes: &mut [u8], from: usize| {
        if let Some(at) = flip.and_then(|bit| bit.checked_sub(from * 8))
            && at < bytes.len() * 8
        {
            bytes[at / 8] ^= 1 << (at % 8);
        }
    };
    let dialing = Dialing::new(dialer, HELLO, &[1; NONCE_BYTES]);
    let mut accepting = Accepting::new(acceptor, [2; NONCE_BYTES]);
    let mut hello = *dialing.hello();
    spoil(&mut hello, 0);
    let mut answer = match feed(&mut accepting, &hello, piece) {
        Ok(Step::Send(answer)) => answer,
        Ok(Step::Reject(answer, error)) => {
            return (dialing.handle_answer(&answer).1, Err(error));
        }
        Ok(step) => panic!("{step:?} after the hello"),
        Err(error) => return (Err(HandshakeError::Closed), Err(error)),
    };
    spoil(&mut answer, HELLO_BYTES);
    let (mut proof, dialed) = dialing.handle_answer(&answer);
    spoil(&mut proof, HELLO_BYTES + ANSWER_BYTES);
    let accepted = match feed(&mut accepting, &proof, piece) {
        Ok(Step::Accepted(hello)) => Ok(hello),
        Ok(step) => panic!("{step:?} after the proof"),
        Err(error) => Err(error),
    };
    (dialed, accepted)
}

fn feed(accepting: &mut Accepting, mut bytes: &[u8], piece: usize) -> Result<Step, HandshakeError> {
    loop {
        let (now, later) = bytes.split_at(piece.min(bytes.len()));
        let step = accepting.handle_bytes(now)?;
        bytes = later;
        if bytes.is_empty() {
            return Ok(step);
        }
        assert_eq!(step, Step::Read);
    }
}

#[test]
fn equal_keys_come_together_however_the_bytes_arrive() {
    for piece in 1..=HELLO_BYTES {
        assert_eq!(converse(&key(7), &key(7), piece, None), (Ok(()), Ok(HELLO)));
    }
    assert_eq!(converse(&JobKey::open(), &JobKey::open(), 32, None), (Ok(()), Ok(HELLO)));
}

#[test]
fn different_keys_are_named_at_both_ends() {
    let both = (Err(HandshakeError::Key), Err(HandshakeError::Key));
    assert_eq!(converse(&key(7), &key(8), 32, None), both);
    assert_eq!(converse(&key(7), &JobKey::open(), 32, None), both);
}

#[test]
fn no_single_bit_may_change_on_the_way() {
    for bit in 0..(HELLO_BYTES + ANSWER_BYTES + PROOF_BYTES) * 8 {
        let (_, accepted) = converse(&key(7), &key(7), 32, Some(bit));
        assert!(accepted.is_err(), "bit {bit} changed and was not noticed");
    }
}

#[test]
fn versions_and_other_protocols_are_told_apart() {
    let (dialed, accepted) = converse(&key(7), &key(7), 32, Some(4 * 8));
    assert_eq!(accepted, Err(HandshakeError::Version { theirs: VERSION ^ 1 }));
    assert!(dialed.is_err());
    let mut accepting = Accepting::new(&key(7), [0; NONCE_BYTES]);
    assert_eq!(accepting.handle_bytes(b"GET / HTT"), Err(HandshakeError::NotOurs(*b"GET ")));
    let mut accepting = Accepting::new(&key(7), [0; NONCE_BYTES]);
    let zeromq = accepting.handle_bytes(b"\xff\0\0\0\0\0\0\0\x01\x7f").unwrap_err();
    assert!(zeromq.to_string().contains("use 'dist_byteps'"), "{zeromq}");
    let dialing = Dialing::new(&key(7), HELLO, &[1; NONCE_BYTES]);
    let mut answer = [b'x'; ANSWER_BYTES];
    answer[..8].copy_from_slice(b"HTTP/1.1");
    assert_eq!(dialing.handle_answer(&answer).1, Err(HandshakeError::NotOurs(*b"HTTP")));
}

#[test]
fn a_proof_cannot_be_reflected() {
    // An acceptor without the key gives the dialer's own later proof away to nobody: the labels
    // differ.
    let key = key(7);
    let challenge = [9; CHALLENGE_BYTES];
    let hello = [3; HELLO_BYTES];
    assert_ne!(
        key.prove(ACCEPTOR_LABEL, &hello, &challenge),
        key.prove(DIALER_LABEL, &hello, &challenge)
    );
}

#[test]
fn the_known_answer_holds() {
    // Computed by an independent implementation of HMAC-SHA256 over the same bytes.
    let mut accepting = Accepting::new(&key(7), [2; NONCE_BYTES]);
    let hello = HELLO.encode(&[1; NONCE_BYTES]);
    let Ok(Step::Send(answer)) = accepting.handle_bytes(&hello) else {
        panic!("no answer");
    };
    let hex: String = answer.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hex, KNOWN_ANSWER);
}

#[test]
fn secrets_are_the_same_at_both_ends_and_different_otherwise() {
    let secrets = |dialer: u8, acceptor: u8, hello: Hello| {
        let dialing = Dialing::new(&key(7), hello, &[dialer; NONCE_BYTES]);
        let mut accepting = Accepting::new(&key(7), [acceptor; NONCE_BYTES]);
        let Ok(Step::Send(answer)) = accepting.handle_bytes(dialing.hello()) else {
            panic!("no answer");
        };
        assert_eq!(accepting.secrets(), dialing.secrets(&answer));
        accepting.secrets()
    };
    let known = secrets(1, 2, HELLO);
    assert_ne!(known.to_acceptor, known.to_dialer);
    for other in [
        secrets(3, 2, HELLO),
        secrets(1, 3, HELLO),
        secrets(1, 2, Hello::lane(Rank(4), Epoch(2))),
        secrets(1, 2, Hello::lane(Rank(3), Epoch(3))),
        secrets(1, 2, Hello::sealed_lane(Rank(3), Epoch(2))),
    ] {
        assert!(other.to_acceptor != known.to_acceptor && other.to_dialer != known.to_dialer);
    }
    // Computed by an independent implementation of HKDF-SHA256 over the same bytes.
    let hex =
        |secret: &[u8]| -> String { secret.iter().map(|byte| format!("{byte:02x}")).collect() };
    assert_eq!([hex(&known.to_acceptor), hex(&known.to_dialer)], KNOWN_SECRETS);
    assert_eq!(format!("{known:?}"), "Secrets");
}

#[test]
fn a_key_is_not_printed() {
    assert_eq!(format!("{:?}", key(0xab)), "JobKey(secret)");
    assert_eq!(format!("{:?}", JobKey::open()), "JobKey(open)");
}

const KNOWN_SECRETS: [&str; 2] = [
    "da68be0656f434ecda38f8dc0cbb68d3b073278b978eaa5a582a1db35d71d7c1",
    "5e14db29f69e76d75d71a1d878f50961222e8cb3708072a121d0b0468ea34f35",
];
const KNOWN_ANSWER: &str = concat!(
    "425053480a00000002020202020202020202020202020202",
    "1261de3aaf2f8866e63f76a0f2dc2f83ae1d32b6d9faf7497db289d9a40af252"
);
