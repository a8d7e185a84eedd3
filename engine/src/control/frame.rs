//! Control messages as bytes: a little-endian `u32` length, and that many bytes of JSON.
//!
//! Invariant: a peer can make this end hold at most one message of [`CONTROL_BYTES_MAX`] bytes, and
//! memory is taken as bytes arrive, not as they are announced.

use super::JobKey;
use super::channel::{self, Altered, GREETING_BYTES, Opener, Sealer};
use crate::limits::CONTROL_BYTES_MAX;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Bytes of the length in front of a message.
const LENGTH_BYTES: usize = 4;
/// Consumed bytes that an inbox keeps before it moves the rest to the front.
const COMPACT_BYTES: usize = 64 << 10;

/// Why bytes are no message, or a message makes no bytes.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FrameError {
    /// The message is longer than a control message may be.
    #[error(
        "a control message of {0} bytes is over the limit of {CONTROL_BYTES_MAX}: declare fewer \
         tensors at once, or raise BYTEPS_PARTITION_BYTES"
    )]
    TooLong(usize),
    /// The bytes are not those that the other end sent.
    #[error(
        "a control message does not authenticate: {0}: something between the two ends meddles with \
         the connection"
    )]
    Altered(#[from] Altered),
    /// The bytes are no message of this release.
    #[error("a control message cannot be read ({0}): run the same release on every node")]
    Malformed(String),
}

/// The bytes of a message, with its length in front.
///
/// # Errors
/// The message is too long.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, FrameError> {
    let mut bytes = vec![0; LENGTH_BYTES];
    serde_json::to_writer(&mut bytes, message)
        .map_err(|error| FrameError::Malformed(error.to_string()))?;
    let length = bytes.len() - LENGTH_BYTES;
    match u32::try_from(length) {
        Ok(prefix) if length <= CONTROL_BYTES_MAX => {
            bytes[..LENGTH_BYTES].copy_from_slice(&prefix.to_le_bytes());
            Ok(bytes)
        }
        _ => Err(FrameError::TooLong(length)),
    }
}

/// Bytes on their way to being messages.
#[derive(Debug, Default)]
pub struct Inbox {
    bytes: Vec<u8>,
    consumed: usize,
    opener: Opener,
    /// What was wrong with the bytes behind those that are here.
    broken: Option<Altered>,
}

impl Inbox {
    /// An empty one.
    #[must_use]
    pub fn new() -> Inbox {
        Inbox::default()
    }

    /// An empty one for what this opens.
    #[must_use]
    pub fn behind(opener: Opener) -> Inbox {
        Inbox { opener, ..Inbox::default() }
    }

    /// Whether a message has begun and is not whole.
    #[must_use]
    pub fn is_partial(&self) -> bool {
        self.consumed != self.bytes.len() || self.opener.is_partial()
    }

    /// Takes bytes as they were read.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.consumed >= COMPACT_BYTES || self.consumed == self.bytes.len() {
            self.bytes.drain(..self.consumed);
            self.consumed = 0;
        }
        if self.broken.is_none() {
            self.broken = self.opener.open(bytes, &mut self.bytes).err();
        }
    }

    /// The next whole message, if there is one.
    ///
    /// # Errors
    /// The peer sent something else; nothing after it can be read.
    pub fn next_message<T: DeserializeOwned>(&mut self) -> Result<Option<T>, FrameError> {
        let unread = &self.bytes[self.consumed..];
        let incomplete = self.broken.map_or(Ok(None), |altered| Err(altered.into()));
        let Some((prefix, rest)) = unread.split_first_chunk::<LENGTH_BYTES>() else {
            return incomplete;
        };
        let length = u32::from_le_bytes(*prefix) as usize;
        if length > CONTROL_BYTES_MAX {
            return Err(FrameError::TooLong(length));
        }
        let Some(body) = rest.get(..length) else {
            return incomplete;
        };
        let message = serde_json::from_slice(body)
            .map_err(|error| FrameError::Malformed(error.to_string()))?;
        self.consumed += LENGTH_BYTES + length;
        Ok(Some(message))
    }
}

/// The accepting end of a control connection, behind the handshake: bytes in, messages out, and
/// the other way. In a job with a key the dialer's greeting comes first.
#[derive(Default)]
pub struct Connection {
    /// Until the greeting is there: the key, what has come of it, and what is to be sent after it.
    waiting: Option<Ungreeted>,
    sealer: Sealer,
    inbox: Inbox,
}

struct Ungreeted {
    key: JobKey,
    greeting: Vec<u8>,
    unsent: Vec<u8>,
}

impl Connection {
    /// A connection that has carried nothing but the handshake.
    #[must_use]
    pub fn accept(key: &JobKey) -> Connection {
        let waiting = Ungreeted { key: key.clone(), greeting: Vec::new(), unsent: Vec::new() };
        Connection { waiting: (!key.is_open()).then_some(waiting), ..Connection::default() }
    }

    /// Takes bytes as they were read. Returns bytes to be sent at once, if there are any.
    ///
    /// # Errors
    /// The dialer is not who made the handshake; drop the connection.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Vec<u8>, FrameError> {
        let Some(waiting) = &mut self.waiting else {
            self.inbox.push(bytes);
            return Ok(Vec::new());
        };
        let missing = GREETING_BYTES - waiting.greeting.len();
        let (now, later) = bytes.split_at(missing.min(bytes.len()));
        waiting.greeting.extend_from_slice(now);
        let Some(greeting) = waiting.greeting.first_chunk() else { return Ok(Vec::new()) };
        let (answer, (mut sealer, opener)) = channel::answer(&waiting.key, greeting)?;
        let mut bytes = answer.to_vec();
        bytes.extend(sealer.seal(std::mem::take(&mut waiting.unsent)));
        (self.waiting, self.sealer, self.inbox) = (None, sealer, Inbox::behind(opener));
        self.inbox.push(later);
        Ok(bytes)
    }

    /// The next whole message, if there is one.
    ///
    /// # Errors
    /// As [`Inbox::next_message`].
    pub fn next_message<T: DeserializeOwned>(&mut self) -> Result<Option<T>, FrameError> {
        self.inbox.next_message()
    }

    /// The bytes to be sent for a message, behind all that came of earlier calls. None yet, as long
    /// as the dialer has not greeted.
    ///
    /// # Errors
    /// The message is too long.
    pub fn encode<T: Serialize>(&mut self, message: &T) -> Result<Vec<u8>, FrameError> {
        let bytes = encode(message)?;
        if let Some(waiting) = &mut self.waiting {
            waiting.unsent.extend(bytes);
            return Ok(Vec::new());
        }
        Ok(self.sealer.seal(bytes))
    }

    /// Whether all that was encoded has been handed out.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.waiting.as_ref().is_none_or(|waiting| waiting.unsent.is_empty())
    }

    /// Whether what came ends within a message.
    #[must_use]
    pub fn is_partial(&self) -> bool {
        let greeted = self.waiting.as_ref().is_some_and(|waiting| !waiting.greeting.is_empty());
        greeted || self.inbox.is_partial()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::messages::NodeMessage;

    #[test]
    fn messages_survive_every_way_of_cutting_them() {
        let sent = [
            NodeMessage::Heartbeat { rounds: 7 },
            NodeMessage::Barrier { request: 1 },
            NodeMessage::Leave { suspend: true },
        ];
        let bytes: Vec<u8> = sent.iter().flat_map(|message| encode(message).unwrap()).collect();
        for piece in 1..=bytes.len() {
            let mut inbox = Inbox::new();
            let mut received = Vec::new();
            for part in bytes.chunks(piece) {
                inbox.push(part);
                while let Some(message) = inbox.next_message::<NodeMessage>().unwrap() {
                    received.push(message);
                }
            }
            assert_eq!(received, sent);
        }
    }

    #[test]
    fn an_absurd_length_or_text_is_an_error_at_once() {
        let mut inbox = Inbox::new();
        inbox.push(&u32::MAX.to_le_bytes());
        assert_eq!(
            inbox.next_message::<NodeMessage>(),
            Err(FrameError::TooLong(u32::MAX as usize))
        );
        for text in
            ["{}", "[", "{\"type\":\"no_such\"}", "{\"type\":\"barrier\",\"request\":-1}", "\u{0}"]
        {
            let mut inbox = Inbox::new();
            inbox.push(&u32::try_from(text.len()).unwrap().to_le_bytes());
            inbox.push(text.as_bytes());
            assert!(
                matches!(inbox.next_message::<NodeMessage>(), Err(FrameError::Malformed(_))),
                "{text}"
            );
        }
    }
}
