//! Records that carry a lane's bytes encrypted, one after the other, without a socket: a [`Sealer`]
//! makes them at one end, an [`Opener`] takes them at the other.
//!
//! A record is a prefix, up to [`PLAIN_BYTES_MAX`] encrypted bytes and their tag. The prefix holds
//! the number of the plain bytes and the record's own number, both in the clear and both under the
//! tag. Each end counts for itself, and decrypts by its own count: the number on the wire only says
//! what went wrong. The key is left behind after [`RECORDS_PER_KEY`] records, at both ends alike.
//!
//! Invariant: no byte comes out of an opener that the other end's sealer did not put in, in the
//! same order, without a gap; and no two records of a direction share a key and a nonce.

#![forbid(unsafe_code)]

use hkdf::Hkdf;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use sha2::Sha256;
use std::fmt;

/// Plain bytes of a record at most. Larger ones are no faster; all of one must be here before its
/// first byte can be used.
pub const PLAIN_BYTES_MAX: usize = 32 << 10;
/// Bytes in front of a record's encrypted ones.
pub const PREFIX_BYTES: usize = 12;
/// Bytes behind them.
pub const TAG_BYTES: usize = 16;
/// Bytes of a record at most.
pub const RECORD_BYTES_MAX: usize = PREFIX_BYTES + PLAIN_BYTES_MAX + TAG_BYTES;
/// Records after which a direction goes on with its next key: far below where so many blocks under
/// one key of AES-GCM could be told from chance.
pub const RECORDS_PER_KEY: u64 = 1 << 20;
/// Bytes of the secret of a direction.
pub const SECRET_BYTES: usize = 32;

const KEY_LABEL: &[u8] = b"bps sealed lane 1: key";
const NONCE_LABEL: &[u8] = b"bps sealed lane 1: nonce";
const NEXT_LABEL: &[u8] = b"bps sealed lane 1: next";

/// The secrets of a lane's two directions, as one of its ends uses them. Never printed.
#[derive(Clone)]
pub struct Keys {
    /// Of what this end sends.
    pub seal: [u8; SECRET_BYTES],
    /// Of what it receives.
    pub open: [u8; SECRET_BYTES],
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Keys")
    }
}

/// Why no more records can be opened, or made. The lane ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SealError {
    /// The tag is not that of these bytes.
    #[error(
        "record {number} of the encrypted lane does not authenticate: something between its two \
         ends changes what passes"
    )]
    Altered {
        /// The record.
        number: u64,
    },
    /// A record that came before.
    #[error(
        "record {number} of the encrypted lane came again where {expected} was due: something \
         between its two ends repeats what passes"
    )]
    Repeated {
        /// The record, by its own account.
        number: u64,
        /// The one that was due.
        expected: u64,
    },
    /// A record that is not due yet.
    #[error(
        "record {number} of the encrypted lane came where {expected} was due: something between \
         its two ends leaves records out, or moves them"
    )]
    Ahead {
        /// The record, by its own account.
        number: u64,
        /// The one that was due.
        expected: u64,
    },
    /// No record has so many bytes.
    #[error(
        "a record of the encrypted lane claims {bytes} bytes, 1 to {PLAIN_BYTES_MAX} are possible: \
         something between its two ends changes what passes"
    )]
    Malformed {
        /// Its plain bytes, by its own account.
        bytes: u32,
    },
    /// All numbers are used.
    #[error(
        "the encrypted lane has carried as many records as there are numbers: start the job anew"
    )]
    Exhausted,
}

/// One direction at one end: its key now, and how many records it has seen.
struct Cipher {
    secret: [u8; SECRET_BYTES],
    key: LessSafeKey,
    nonce: [u8; NONCE_LEN],
    number: u64,
}

impl Cipher {
    fn new(secret: &[u8; SECRET_BYTES], number: u64) -> Cipher {
        let derived = Hkdf::<Sha256>::from_prk(secret).expect("a secret is as long as a hash");
        let fill = |label: &[u8], bytes: &mut [u8]| {
            derived.expand(label, bytes).expect("HKDF gives up to 255 hashes");
        };
        let (mut key, mut nonce) = ([0; 32], [0; NONCE_LEN]);
        fill(KEY_LABEL, &mut key);
        fill(NONCE_LABEL, &mut nonce);
        let key = UnboundKey::new(&AES_256_GCM, &key).expect("32 bytes are a key of AES-256");
        Cipher { secret: *secret, key: LessSafeKey::new(key), nonce, number }
    }

    /// The nonce of the record that is due: unlike that of any other under this key.
    fn nonce(&self) -> Nonce {
        let mut nonce = self.nonce;
        for (byte, count) in nonce[NONCE_LEN - 8..].iter_mut().zip(self.number.to_be_bytes()) {
            *byte ^= count;
        }
        Nonce::assume_unique_for_key(nonce)
    }

    /// Whether there is a number for one more record: the last one is never used, so that the next
    /// is always one that can be told.
    fn check(&self) -> Result<(), SealError> {
        if self.number == u64::MAX { Err(SealError::Exhausted) } else { Ok(()) }
    }

    /// Counts a record; goes on to the next key where one has served its time.
    fn advance(&mut self) {
        self.number += 1;
        if self.number.is_multiple_of(RECORDS_PER_KEY) {
            let derived = Hkdf::<Sha256>::from_prk(&self.secret).expect("as long as a hash");
            let mut next = [0; SECRET_BYTES];
            derived.expand(NEXT_LABEL, &mut next).expect("HKDF gives up to 255 hashes");
            *self = Cipher::new(&next, self.number);
        }
    }
}

/// Makes records.
pub struct Sealer(Cipher);

impl Sealer {
    /// The first record of a direction is the next.
    #[must_use]
    pub fn new(secret: &[u8; SECRET_BYTES]) -> Sealer {
        Sealer(Cipher::new(secret, 0))
    }

    /// Makes a record of `plain` bytes that lie at [`PREFIX_BYTES`] in `space`, in their place, and
    /// returns how many bytes of `space` it takes.
    ///
    /// # Errors
    /// [`SealError::Exhausted`].
    ///
    /// # Panics
    /// `plain` is 0 or more than [`PLAIN_BYTES_MAX`], or `space` is too short.
    pub fn seal(&mut self, space: &mut [u8], plain: usize) -> Result<usize, SealError> {
        assert!((1..=PLAIN_BYTES_MAX).contains(&plain), "a record of {plain} bytes");
        self.0.check()?;
        let length = u32::try_from(plain).expect("PLAIN_BYTES_MAX is small");
        let (prefix, rest) =
            space.split_first_chunk_mut::<PREFIX_BYTES>().expect("room for the prefix");
        *prefix = prefix_of(length, self.0.number);
        let (bytes, rest) = rest.split_at_mut(plain);
        let (nonce, under) = (self.0.nonce(), Aad::from(*prefix));
        let tag = self.0.key.seal_in_place_separate_tag(nonce, under, bytes);
        let tag = tag.expect("a record is far shorter than what AES-GCM takes");
        rest[..TAG_BYTES].copy_from_slice(tag.as_ref());
        self.0.advance();
        Ok(PREFIX_BYTES + plain + TAG_BYTES)
    }
}

/// Opens records.
pub struct Opener(Cipher);

impl Opener {
    /// The first record of a direction is due.
    #[must_use]
    pub fn new(secret: &[u8; SECRET_BYTES]) -> Opener {
        Opener(Cipher::new(secret, 0))
    }

    /// How many bytes the record at the start of `bytes` has; `None` where its prefix is not whole.
    ///
    /// # Errors
    /// It is not the record that is due, or none at all.
    pub fn measure(&self, bytes: &[u8]) -> Result<Option<usize>, SealError> {
        let Some(prefix) = bytes.first_chunk::<PREFIX_BYTES>() else { return Ok(None) };
        self.0.check()?;
        let (plain, number) = of_prefix(prefix);
        let expected = self.0.number;
        if number < expected {
            return Err(SealError::Repeated { number, expected });
        }
        if number > expected {
            return Err(SealError::Ahead { number, expected });
        }
        if plain == 0 || plain as usize > PLAIN_BYTES_MAX {
            return Err(SealError::Malformed { bytes: plain });
        }
        Ok(Some(PREFIX_BYTES + plain as usize + TAG_BYTES))
    }

    /// Opens a whole record, as [measured](Opener::measure), in its place, and returns its plain
    /// bytes, which begin at [`PREFIX_BYTES`].
    ///
    /// # Errors
    /// Its tag does not hold; what is in `record` then is nobody's.
    ///
    /// # Panics
    /// `record` is shorter than the shortest one.
    pub fn open<'a>(&mut self, record: &'a mut [u8]) -> Result<&'a mut [u8], SealError> {
        self.0.check()?;
        let number = self.0.number;
        let (prefix, rest) =
            record.split_first_chunk_mut::<PREFIX_BYTES>().expect("a record has a prefix");
        let (nonce, under) = (self.0.nonce(), Aad::from(*prefix));
        let opened = self.0.key.open_in_place(nonce, under, rest);
        let plain = opened.map_err(|_| SealError::Altered { number })?;
        self.0.advance();
        Ok(plain)
    }
}

fn prefix_of(plain: u32, number: u64) -> [u8; PREFIX_BYTES] {
    let mut prefix = [0; PREFIX_BYTES];
    prefix[..4].copy_from_slice(&plain.to_le_bytes());
    prefix[4..].copy_from_slice(&number.to_le_bytes());
    prefix
}

fn of_prefix(prefix: &[u8; PREFIX_BYTES]) -> (u32, u64) {
    let (plain, number) = prefix.split_first_chunk().expect("twelve are four and eight");
    let number = number.try_into().expect("twelve are four and eight");
    (u32::from_le_bytes(*plain), u64::from_le_bytes(number))
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "patterns")]
mod tests;
