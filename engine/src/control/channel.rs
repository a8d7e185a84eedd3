//! What keeps control messages from whoever is between their two ends. In a job with a key, each
//! byte behind the handshake is encrypted and authenticated by the Noise protocol; in one without,
//! bytes pass as they are.
//!
//! The dialer greets with [`GREETING_BYTES`], the acceptor answers with as many, and what follows
//! are records: a little-endian `u16` of the bytes that come, and those bytes, the last
//! [`TAG_BYTES`] of which authenticate the others and their place in the order. A record that was
//! changed, repeated, left out or moved is one that does not open; nothing behind it is read.
//!
//! Invariant: bytes come out of an [`Opener`] only if the other end sealed exactly them, after
//! exactly those that came out before.

use crate::proto::handshake::JobKey;
use snow::{Builder, HandshakeState, StatelessTransportState};
use std::fmt;
use std::sync::Arc;

/// Bytes of the dialer's greeting, and of its answer: a key and a tag.
pub const GREETING_BYTES: usize = 48;
/// Bytes of a record that authenticate it.
pub const TAG_BYTES: usize = 16;
/// Bytes in front of a record.
const LENGTH_BYTES: usize = 2;
/// Largest record.
const RECORD_BYTES_MAX: usize = u16::MAX as usize;
/// Largest part of a message that fits one.
const PLAIN_BYTES_MAX: usize = RECORD_BYTES_MAX - TAG_BYTES;

/// The pre-shared key takes part from the first byte on, and fresh keys of both ends make each
/// connection's own. Neither end has a key pair: that it knows the job key is all there is to know.
const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
const PROLOGUE: &[u8] = b"bps control channel 1";
const KEY_LABEL: &[u8] = b"bps control channel 1: pre-shared key";

/// What came is not what the other end sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("it was changed, repeated, left out or moved on the way")]
pub struct Altered;

/// One direction of a channel that is encrypted.
#[derive(Clone)]
struct Half {
    session: Arc<StatelessTransportState>,
    /// Records so far: no two are sealed alike.
    count: u64,
}

impl Half {
    fn both(handshake: HandshakeState) -> Result<(Half, Half), Altered> {
        let session = handshake.into_stateless_transport_mode().map_err(|_| Altered)?;
        let half = Half { session: Arc::new(session), count: 0 };
        Ok((half.clone(), half))
    }
}

impl fmt::Debug for Half {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "encrypted, {} records so far", self.count)
    }
}

/// The sending direction.
#[derive(Debug, Default)]
pub struct Sealer(Option<Half>);

impl Sealer {
    /// What goes over the connection for these bytes.
    ///
    /// # Panics
    /// After 2^64 records.
    #[must_use]
    pub fn seal(&mut self, bytes: Vec<u8>) -> Vec<u8> {
        let Some(half) = &mut self.0 else { return bytes };
        let records = bytes.len().div_ceil(PLAIN_BYTES_MAX);
        let mut sealed = vec![0; bytes.len() + records * (LENGTH_BYTES + TAG_BYTES)];
        let mut rest = &mut sealed[..];
        for plain in bytes.chunks(PLAIN_BYTES_MAX) {
            let (length, body) = rest.split_at_mut(LENGTH_BYTES);
            let (body, behind) = body.split_at_mut(plain.len() + TAG_BYTES);
            let count = u16::try_from(body.len()).expect("at most RECORD_BYTES_MAX");
            length.copy_from_slice(&count.to_le_bytes());
            let written = half.session.write_message(half.count, plain, body);
            assert_eq!(written.ok(), Some(body.len()), "a record of a sound size was not sealed");
            half.count += 1;
            rest = behind;
        }
        sealed
    }
}

/// The receiving direction.
#[derive(Debug, Default)]
pub struct Opener {
    half: Option<Half>,
    /// What has come of a record.
    sealed: Vec<u8>,
}

impl Opener {
    /// Appends to `plain` what these bytes, which were read behind those of the last call, bring.
    ///
    /// # Errors
    /// They are not what the other end sent; all that came before them is in `plain`.
    pub fn open(&mut self, mut bytes: &[u8], plain: &mut Vec<u8>) -> Result<(), Altered> {
        let Some(half) = &mut self.half else {
            plain.extend_from_slice(bytes);
            return Ok(());
        };
        while !bytes.is_empty() {
            let wanted = match self.sealed.first_chunk::<LENGTH_BYTES>() {
                None => LENGTH_BYTES,
                Some(length) => match usize::from(u16::from_le_bytes(*length)) {
                    // One without a byte of a message is never sent.
                    ..=TAG_BYTES => return Err(Altered),
                    length => LENGTH_BYTES + length,
                },
            };
            let (now, later) = bytes.split_at((wanted - self.sealed.len()).min(bytes.len()));
            self.sealed.extend_from_slice(now);
            bytes = later;
            if wanted == LENGTH_BYTES || self.sealed.len() < wanted {
                continue;
            }
            let at = plain.len();
            plain.resize(at + wanted - LENGTH_BYTES, 0);
            let opened = half.session.read_message(
                half.count,
                &self.sealed[LENGTH_BYTES..],
                &mut plain[at..],
            );
            plain.truncate(at + opened.as_ref().map_or(0, |count| *count));
            opened.map_err(|_| Altered)?;
            half.count += 1;
            self.sealed.clear();
        }
        Ok(())
    }

    /// Whether a record has begun and is not whole.
    #[must_use]
    pub fn is_partial(&self) -> bool {
        !self.sealed.is_empty()
    }
}

/// Both directions.
pub type Channel = (Sealer, Opener);

/// The dialer's greeting on its way.
pub struct Greeting(HandshakeState);

impl Greeting {
    /// What to send first, and what to [finish](Greeting::finish) with the answer; nothing in a job
    /// without a key.
    ///
    /// # Panics
    /// When the kernel gives no random bytes, as it did for the handshake a moment ago.
    #[must_use]
    pub fn new(key: &JobKey) -> Option<(Greeting, [u8; GREETING_BYTES])> {
        if key.is_open() {
            return None;
        }
        let psk = key.derive(KEY_LABEL, &[]);
        let mut state = builder(&psk).build_initiator().expect("the pattern is sound");
        let mut greeting = [0; GREETING_BYTES];
        let written = state.write_message(&[], &mut greeting);
        assert_eq!(written.ok(), Some(GREETING_BYTES), "no random bytes for a greeting");
        Some((Greeting(state), greeting))
    }

    /// The channel, if the answer is that of an acceptor with the same key to this greeting.
    ///
    /// # Errors
    /// It is not.
    pub fn finish(mut self, answer: &[u8; GREETING_BYTES]) -> Result<Channel, Altered> {
        let read = self.0.read_message(answer, &mut []);
        read.map_err(|_| Altered)?;
        let (one, other) = Half::both(self.0)?;
        Ok((Sealer(Some(one)), Opener { half: Some(other), sealed: Vec::new() }))
    }
}

/// The acceptor's answer to a greeting, and the channel that it opens.
///
/// # Errors
/// The greeting is not that of a dialer with the same key.
///
/// # Panics
/// As [`Greeting::new`].
pub fn answer(
    key: &JobKey,
    greeting: &[u8; GREETING_BYTES],
) -> Result<([u8; GREETING_BYTES], Channel), Altered> {
    let psk = key.derive(KEY_LABEL, &[]);
    let mut state = builder(&psk).build_responder().expect("the pattern is sound");
    state.read_message(greeting, &mut []).map_err(|_| Altered)?;
    let mut answer = [0; GREETING_BYTES];
    let written = state.write_message(&[], &mut answer);
    assert_eq!(written.ok(), Some(GREETING_BYTES), "no random bytes for an answer");
    let (one, other) = Half::both(state)?;
    Ok((answer, (Sealer(Some(one)), Opener { half: Some(other), sealed: Vec::new() })))
}

fn builder(psk: &[u8; 32]) -> Builder<'_> {
    let params = PATTERN.parse().expect("the pattern is sound");
    let builder = Builder::new(params).psk(0, psk).and_then(|it| it.prologue(PROLOGUE));
    builder.expect("each is set once")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(byte: u8) -> JobKey {
        JobKey::from_bytes([byte; 32])
    }

    /// The dialer's channel and the acceptor's.
    fn pair() -> (Channel, Channel) {
        let (greeting, bytes) = Greeting::new(&key(7)).unwrap();
        let (answer, acceptor) = answer(&key(7), &bytes).unwrap();
        (greeting.finish(&answer).unwrap(), acceptor)
    }

    fn open(opener: &mut Opener, bytes: &[u8], piece: usize) -> Result<Vec<u8>, Altered> {
        let mut plain = Vec::new();
        bytes.chunks(piece).try_for_each(|part| opener.open(part, &mut plain)).map(|()| plain)
    }

    #[test]
    fn bytes_pass_both_ways_however_they_are_cut() {
        let long: Vec<u8> = (0..200_000_u32).map(|at| at.to_le_bytes()[0]).collect();
        for piece in [1, 2, 3, 17, 18, 19, 4096, 65_537, 1 << 20] {
            let (mut dialer, mut acceptor) = pair();
            for message in [&b"a"[..], b"", b"some words", &long[..PLAIN_BYTES_MAX], &long] {
                let there = dialer.0.seal(message.to_vec());
                assert!(message.len() < 4 || !there.windows(4).any(|it| it == &message[..4]));
                assert_eq!(open(&mut acceptor.1, &there, piece).unwrap(), message);
                let back = acceptor.0.seal(message.to_vec());
                assert_eq!(open(&mut dialer.1, &back, piece).unwrap(), message);
                assert!(!acceptor.1.is_partial() && !dialer.1.is_partial());
            }
        }
    }

    #[test]
    fn without_a_key_bytes_are_as_they_were() {
        assert!(Greeting::new(&JobKey::open()).is_none());
        let (mut sealer, mut opener) = Channel::default();
        assert_eq!(sealer.seal(b"words".to_vec()), b"words");
        assert_eq!(open(&mut opener, b"words", 2).unwrap(), b"words");
    }

    #[test]
    fn no_bit_of_a_greeting_or_its_answer_may_change() {
        assert_eq!(answer(&key(8), &Greeting::new(&key(7)).unwrap().1).err(), Some(Altered));
        for bit in 0..GREETING_BYTES * 8 {
            let (greeting, bytes) = Greeting::new(&key(7)).unwrap();
            let mut spoilt = bytes;
            spoilt[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(answer(&key(7), &spoilt).err(), Some(Altered), "greeting, bit {bit}");
            let (mut reply, _) = answer(&key(7), &bytes).unwrap();
            reply[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(greeting.finish(&reply).err(), Some(Altered), "answer, bit {bit}");
        }
    }

    #[test]
    fn a_repeated_greeting_opens_nothing() {
        let (greeting, bytes) = Greeting::new(&key(7)).unwrap();
        let (reply, _) = answer(&key(7), &bytes).unwrap();
        let mut dialer = greeting.finish(&reply).unwrap();
        let first = dialer.0.seal(b"register".to_vec());
        // Whoever recorded the connection plays it again to the acceptor, whose own key is new.
        let (_, mut again) = answer(&key(7), &bytes).unwrap();
        assert_eq!(open(&mut again.1, &first, 64), Err(Altered));
    }

    #[test]
    fn what_is_changed_repeated_left_out_moved_or_sent_back_does_not_open() {
        let sealed = || {
            let (mut dialer, acceptor) = pair();
            let records: Vec<Vec<u8>> =
                [b"one", b"two", b"six"].map(|it| dialer.0.seal(it.to_vec())).into();
            (dialer, acceptor.1, records)
        };
        let (_, _, records) = sealed();
        for bit in 0..records[0].len() * 8 {
            let (_, mut opener, mut records) = sealed();
            records[0][bit / 8] ^= 1 << (bit % 8);
            let opened = open(&mut opener, &records.concat(), 7);
            // A length that has grown lets the opener wait for more, which would not open either.
            let waits = opened == Ok(Vec::new()) && opener.is_partial();
            assert!(waits || opened == Err(Altered), "bit {bit} changed: {opened:?}");
        }
        for order in [&[0, 0][..], &[1], &[0, 2], &[1, 0], &[0, 1, 0], &[0, 1, 2, 2]] {
            let (_, mut opener, records) = sealed();
            let bytes: Vec<u8> = order.iter().flat_map(|at: &usize| records[*at].clone()).collect();
            let mut plain = Vec::new();
            assert_eq!(opener.open(&bytes, &mut plain), Err(Altered), "{order:?}");
            assert!(b"onetwosix".starts_with(&plain[..]), "{order:?}: {plain:?} came out");
        }
        let (mut dialer, _, records) = sealed();
        assert_eq!(open(&mut dialer.1, &records[0], 64), Err(Altered), "its own words");
    }

    #[test]
    fn a_record_cut_short_is_seen() {
        let (mut dialer, mut acceptor) = pair();
        let record = dialer.0.seal(b"words".to_vec());
        for cut in 1..record.len() {
            let opened = open(&mut acceptor.1, &record[cut - 1..cut], 1).unwrap();
            assert!(opened.is_empty() && acceptor.1.is_partial(), "{cut}");
        }
    }
}
