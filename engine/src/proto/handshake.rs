//! Who is at the other end: a mutual challenge and response over the job key, before anything else
//! is parsed.
//!
//! | step | who | bytes | content |
//! |---|---|---|---|
//! | 1 | dialer | [`HELLO_BYTES`] | magic, version, purpose, rank, epoch, nonce |
//! | 2 | acceptor | [`ANSWER_BYTES`] | magic, version, status, nonce, proof |
//! | 3 | dialer | [`PROOF_BYTES`] | proof |
//!
//! A proof is HMAC-SHA256 by the job key over a label of its own direction and every byte that was
//! said before it, so neither end can be answered with its own words and no field can be changed on
//! the way. A dialer that finds the acceptor's proof wrong sends zeros in place of its own: the
//! acceptor then knows the reason as well.
//!
//! Invariant: nothing that a peer sends is kept or acted on, beyond these fixed sizes, until its
//! proof holds.

use crate::base::{Epoch, Rank};
use hkdf::Hkdf;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use std::fmt;

/// First bytes of both ends' first message.
pub const MAGIC: [u8; 4] = *b"BPSH";
/// How ZeroMQ begins a connection.
const ZEROMQ: [u8; 4] = [0xff, 0, 0, 0];
/// Version of the handshake and of all that follows it on a connection.
pub const VERSION: u8 = 10;
/// Bytes of the dialer's first message.
pub const HELLO_BYTES: usize = 32;
/// Bytes of the acceptor's message.
pub const ANSWER_BYTES: usize = 56;
/// Bytes of a proof, and of the job key.
pub const PROOF_BYTES: usize = 32;
/// Bytes of the secret of one direction.
pub const SECRET_BYTES: usize = 32;
/// Bytes of a nonce.
pub const NONCE_BYTES: usize = 16;

/// A number used once, from the kernel's random source.
pub type Nonce = [u8; NONCE_BYTES];

const ACCEPTOR_LABEL: &[u8] = b"bps handshake 1: acceptor proves";
const DIALER_LABEL: &[u8] = b"bps handshake 1: dialer proves";
const TO_ACCEPTOR: &[u8] = b"bps sealed lane 1: dialer to acceptor";
const TO_DIALER: &[u8] = b"bps sealed lane 1: acceptor to dialer";
const CHALLENGE_BYTES: usize = ANSWER_BYTES - PROOF_BYTES;
const STATUS_OK: u8 = 0;
const STATUS_VERSION: u8 = 1;

const _: () = assert!(HELLO_BYTES + PROOF_BYTES <= 256 && CHALLENGE_BYTES == 8 + NONCE_BYTES);

/// The secret that the processes of one job share. It is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct JobKey([u8; PROOF_BYTES]);

impl JobKey {
    /// The key of these bytes.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; PROOF_BYTES]) -> JobKey {
        JobKey(bytes)
    }

    /// The well-known key of jobs that set none: it keeps jobs of other protocols out, and nobody
    /// else.
    #[must_use]
    pub const fn open() -> JobKey {
        JobKey([0; PROOF_BYTES])
    }

    /// Whether this is the well-known key.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.0 == [0; PROOF_BYTES]
    }

    /// The secret itself in hexadecimal, for the environment of a process that this one starts. Not
    /// for logs.
    #[must_use]
    pub fn expose_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// A key of its own for another use than the handshake's proofs.
    #[must_use]
    pub fn derive(&self, label: &[u8], context: &[u8]) -> [u8; PROOF_BYTES] {
        self.prove(label, context, &[])
    }

    /// What the two directions of a connection are encrypted with: HKDF-SHA256 of this key, with
    /// all that was said before the proofs as the salt, so with the nonces of both ends.
    fn secrets(&self, hello: &[u8; HELLO_BYTES], challenge: &[u8; CHALLENGE_BYTES]) -> Secrets {
        let salt = [&hello[..], challenge].concat();
        let derived = Hkdf::<Sha256>::new(Some(&salt), &self.0);
        let secret = |label: &[u8]| {
            let mut secret = [0; SECRET_BYTES];
            derived.expand(label, &mut secret).expect("HKDF gives up to 255 times as much");
            secret
        };
        Secrets { to_acceptor: secret(TO_ACCEPTOR), to_dialer: secret(TO_DIALER) }
    }

    fn mac(&self, label: &[u8], hello: &[u8], challenge: &[u8]) -> Hmac<Sha256> {
        let mut mac: Hmac<Sha256> =
            KeyInit::new_from_slice(&self.0).expect("HMAC takes keys of every length");
        mac.update(label);
        mac.update(hello);
        mac.update(challenge);
        mac
    }

    fn prove(&self, label: &[u8], hello: &[u8], challenge: &[u8]) -> [u8; PROOF_BYTES] {
        self.mac(label, hello, challenge).finalize().into_bytes().into()
    }

    /// Compares in constant time.
    fn check(&self, label: &[u8], hello: &[u8], challenge: &[u8], proof: &[u8]) -> bool {
        self.mac(label, hello, challenge).verify_slice(proof).is_ok()
    }
}

impl fmt::Debug for JobKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_open() { "JobKey(open)" } else { "JobKey(secret)" })
    }
}

/// What each direction of one connection may be encrypted with, and nothing else. Never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secrets {
    /// From who dialed.
    pub to_acceptor: [u8; SECRET_BYTES],
    /// To who dialed.
    pub to_dialer: [u8; SECRET_BYTES],
}

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secrets")
    }
}

/// What a connection is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Purpose {
    /// Messages between a node and the scheduler.
    Control = 1,
    /// Frames between a worker and a server core.
    Lane = 2,
    /// Setting up shared memory between a worker and a server core.
    ShmLane = 3,
    /// Setting up RDMA between a worker and a server core.
    RdmaLane = 4,
    /// Setting up shared memory between the threads of two ranks' GPUs.
    OrderLane = 5,
    /// Frames between a worker and a server core, in encrypted records.
    SealedLane = 6,
}

/// What the dialer says of itself and its connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hello {
    /// What the connection is for.
    pub purpose: Purpose,
    /// Who dials; 0 for [`Purpose::Control`], where a rank is not known yet.
    pub rank: Rank,
    /// Membership generation; 0 for [`Purpose::Control`].
    pub epoch: Epoch,
}

impl Hello {
    /// A connection to the scheduler.
    #[must_use]
    pub const fn control() -> Hello {
        Hello { purpose: Purpose::Control, rank: Rank(0), epoch: Epoch(0) }
    }

    /// A lane of this rank.
    #[must_use]
    pub const fn lane(rank: Rank, epoch: Epoch) -> Hello {
        Hello { purpose: Purpose::Lane, rank, epoch }
    }

    /// A lane of this rank that is encrypted.
    #[must_use]
    pub const fn sealed_lane(rank: Rank, epoch: Epoch) -> Hello {
        Hello { purpose: Purpose::SealedLane, rank, epoch }
    }

    /// A lane over shared memory of this rank.
    #[must_use]
    pub const fn shm_lane(rank: Rank, epoch: Epoch) -> Hello {
        Hello { purpose: Purpose::ShmLane, rank, epoch }
    }

    /// A lane over RDMA of this rank.
    #[must_use]
    pub const fn rdma_lane(rank: Rank, epoch: Epoch) -> Hello {
        Hello { purpose: Purpose::RdmaLane, rank, epoch }
    }

    /// A lane to the thread of a GPU, from that of this rank.
    #[must_use]
    pub const fn order_lane(rank: Rank, epoch: Epoch) -> Hello {
        Hello { purpose: Purpose::OrderLane, rank, epoch }
    }

    fn encode(&self, nonce: &Nonce) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4] = VERSION;
        bytes[5] = self.purpose as u8;
        bytes[8..12].copy_from_slice(&self.rank.0.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.epoch.0.to_le_bytes());
        bytes[16..32].copy_from_slice(nonce);
        bytes
    }

    fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<Hello, HandshakeError> {
        check_preamble(bytes)?;
        let purpose = match bytes[5] {
            1 => Purpose::Control,
            2 => Purpose::Lane,
            3 => Purpose::ShmLane,
            4 => Purpose::RdmaLane,
            5 => Purpose::OrderLane,
            6 => Purpose::SealedLane,
            _ => return Err(HandshakeError::Malformed("its purpose is unknown")),
        };
        if bytes[6..8] != [0, 0] {
            return Err(HandshakeError::Malformed("reserved bytes are not zero"));
        }
        let u32_at = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        Ok(Hello { purpose, rank: Rank(u32_at(8)), epoch: Epoch(u32_at(12)) })
    }
}

/// Why two ends did not come together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HandshakeError {
    /// The magic differs.
    #[error("{}", other_protocol(*.0))]
    NotOurs([u8; 4]),
    /// The versions differ.
    #[error(
        "it speaks version {theirs} and this end {VERSION}: run the same release on every node"
    )]
    Version {
        /// The peer's.
        theirs: u8,
    },
    /// The proof does not hold.
    #[error("the job key differs: set the same BPS_JOB_KEY_FILE on every node")]
    Key,
    /// Its answer to the greeting of an encrypted channel is not that of who proved the key.
    #[error(
        "what came behind its handshake is not from who proved the job key: something between the \
         two ends changes what passes"
    )]
    Altered,
    /// A field has a value that this version never sends.
    #[error("its handshake is malformed ({0}): run the same release on every node")]
    Malformed(&'static str),
    /// The handshake was not over in time.
    #[error("it did not complete the handshake in time: it is overloaded, or is not of this job")]
    TooSlow,
    /// The peer closed in the middle of the handshake.
    #[error("it closed the connection during the handshake: its own log says why")]
    Closed,
    /// The kernel reported an error.
    #[error("{} during the handshake", std::io::Error::from_raw_os_error(*.0))]
    Os(i32),
}

fn other_protocol(start: [u8; 4]) -> String {
    if start == ZEROMQ {
        return "it speaks ZeroMQ, as MXNet's own parameter server does (kvstore 'dist_sync', which \
                waits here for ever: import byteps.mxnet and use 'dist_byteps'), and processes of \
                BytePS: run this release on every node"
            .to_owned();
    }
    format!(
        "its first bytes are {start:02x?}, not this protocol: another program listens or dials \
         there, check address and port"
    )
}

fn check_preamble(bytes: &[u8]) -> Result<(), HandshakeError> {
    if bytes[0..4] != MAGIC {
        return Err(HandshakeError::NotOurs([bytes[0], bytes[1], bytes[2], bytes[3]]));
    }
    if bytes[4] != VERSION {
        return Err(HandshakeError::Version { theirs: bytes[4] });
    }
    Ok(())
}

/// The dialer's side: send [`hello`](Dialing::hello), read [`ANSWER_BYTES`], send what
/// [`handle_answer`](Dialing::handle_answer) returns.
#[derive(Debug)]
pub struct Dialing {
    key: JobKey,
    hello: [u8; HELLO_BYTES],
}

impl Dialing {
    /// A handshake that will say `hello`. The nonce must be fresh.
    #[must_use]
    pub fn new(key: &JobKey, hello: Hello, nonce: &Nonce) -> Dialing {
        Dialing { key: key.clone(), hello: hello.encode(nonce) }
    }

    /// The first message.
    #[must_use]
    pub fn hello(&self) -> &[u8; HELLO_BYTES] {
        &self.hello
    }

    /// What the connection may be encrypted with, once the acceptor's proof in this answer holds.
    #[must_use]
    pub fn secrets(&self, answer: &[u8; ANSWER_BYTES]) -> Secrets {
        let challenge = answer.first_chunk().expect("an answer begins with the challenge");
        self.key.secrets(&self.hello, challenge)
    }

    /// Checks the acceptor's proof. What is returned first is to be sent in either case; the
    /// connection may be used if the second is `Ok`.
    pub fn handle_answer(
        &self,
        answer: &[u8; ANSWER_BYTES],
    ) -> ([u8; PROOF_BYTES], Result<(), HandshakeError>) {
        let zeros = [0; PROOF_BYTES];
        if let Err(error) = check_preamble(answer) {
            return (zeros, Err(error));
        }
        if answer[5] != STATUS_OK || answer[6..8] != [0, 0] {
            return (zeros, Err(HandshakeError::Malformed("its answer has an unknown status")));
        }
        let (challenge, proof) = answer.split_at(CHALLENGE_BYTES);
        if !self.key.check(ACCEPTOR_LABEL, &self.hello, challenge, proof) {
            return (zeros, Err(HandshakeError::Key));
        }
        (self.key.prove(DIALER_LABEL, &self.hello, challenge), Ok(()))
    }
}

/// What the acceptor has to do next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Read more: [`Accepting::wanted`] bytes at most.
    Read,
    /// Send this, then read on.
    Send([u8; ANSWER_BYTES]),
    /// Send this if it can be done at once, then drop the connection for this reason.
    Reject([u8; ANSWER_BYTES], HandshakeError),
    /// The dialer is of this job.
    Accepted(Hello),
}

/// The acceptor's side. It takes bytes as they come and never wants one byte beyond the handshake.
#[derive(Debug)]
pub struct Accepting {
    key: JobKey,
    nonce: Nonce,
    hello: [u8; HELLO_BYTES],
    challenge: [u8; CHALLENGE_BYTES],
    proof: [u8; PROOF_BYTES],
    filled: usize,
}

impl Accepting {
    /// A handshake with a peer that has just connected. The nonce must be fresh.
    #[must_use]
    pub fn new(key: &JobKey, nonce: Nonce) -> Accepting {
        Accepting {
            key: key.clone(),
            nonce,
            hello: [0; HELLO_BYTES],
            challenge: [0; CHALLENGE_BYTES],
            proof: [0; PROOF_BYTES],
            filled: 0,
        }
    }

    /// What the connection may be encrypted with, once the dialer is [accepted](Step::Accepted).
    #[must_use]
    pub fn secrets(&self) -> Secrets {
        self.key.secrets(&self.hello, &self.challenge)
    }

    /// Bytes that may be read now: what is missing of the current message.
    #[must_use]
    pub fn wanted(&self) -> usize {
        if self.filled < HELLO_BYTES {
            HELLO_BYTES - self.filled
        } else {
            HELLO_BYTES + PROOF_BYTES - self.filled
        }
    }

    /// Takes bytes that were read.
    ///
    /// # Errors
    /// The peer is not of this job; drop the connection.
    ///
    /// # Panics
    /// If there are more than [`wanted`](Accepting::wanted).
    pub fn handle_bytes(&mut self, bytes: &[u8]) -> Result<Step, HandshakeError> {
        assert!(bytes.len() <= self.wanted(), "read more than the handshake wants");
        let from = self.filled;
        self.filled += bytes.len();
        if from < HELLO_BYTES {
            self.hello[from..self.filled].copy_from_slice(bytes);
            if self.filled >= 4 && self.hello[0..4] != MAGIC {
                // Told apart as early as possible: a wrong protocol need not send 32 bytes.
                check_preamble(&self.hello)?;
            }
            return if self.filled == HELLO_BYTES { self.answer() } else { Ok(Step::Read) };
        }
        self.proof[from - HELLO_BYTES..self.filled - HELLO_BYTES].copy_from_slice(bytes);
        if self.filled < HELLO_BYTES + PROOF_BYTES {
            return Ok(Step::Read);
        }
        if !self.key.check(DIALER_LABEL, &self.hello, &self.challenge, &self.proof) {
            return Err(HandshakeError::Key);
        }
        Ok(Step::Accepted(Hello::decode(&self.hello)?))
    }

    fn answer(&mut self) -> Result<Step, HandshakeError> {
        let mut answer = [0; ANSWER_BYTES];
        answer[0..4].copy_from_slice(&MAGIC);
        answer[4] = VERSION;
        match Hello::decode(&self.hello) {
            Err(error @ HandshakeError::Version { .. }) => {
                answer[5] = STATUS_VERSION;
                return Ok(Step::Reject(answer, error));
            }
            Err(error) => return Err(error),
            Ok(_) => {}
        }
        answer[8..CHALLENGE_BYTES].copy_from_slice(&self.nonce);
        self.challenge.copy_from_slice(&answer[..CHALLENGE_BYTES]);
        let proof = self.key.prove(ACCEPTOR_LABEL, &self.hello, &self.challenge);
        answer[CHALLENGE_BYTES..].copy_from_slice(&proof);
        Ok(Step::Send(answer))
    }
}

#[cfg(test)]
mod tests;
