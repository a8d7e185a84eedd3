//! Control messages as bytes: a little-endian `u32` length, and that many bytes of JSON.
//!
//! Invariant: a peer can make this end hold at most one message of [`CONTROL_BYTES_MAX`] bytes, and
//! memory is taken as bytes arrive, not as they are announced.

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
}

impl Inbox {
    /// An empty one.
    #[must_use]
    pub fn new() -> Inbox {
        Inbox::default()
    }

    /// Takes bytes as they were read.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.consumed >= COMPACT_BYTES || self.consumed == self.bytes.len() {
            self.bytes.drain(..self.consumed);
            self.consumed = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// The next whole message, if there is one.
    ///
    /// # Errors
    /// The peer sent something else; nothing after it can be read.
    pub fn next_message<T: DeserializeOwned>(&mut self) -> Result<Option<T>, FrameError> {
        let unread = &self.bytes[self.consumed..];
        let Some((prefix, rest)) = unread.split_first_chunk::<LENGTH_BYTES>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*prefix) as usize;
        if length > CONTROL_BYTES_MAX {
            return Err(FrameError::TooLong(length));
        }
        let Some(body) = rest.get(..length) else {
            return Ok(None);
        };
        let message = serde_json::from_slice(body)
            .map_err(|error| FrameError::Malformed(error.to_string()))?;
        self.consumed += LENGTH_BYTES + length;
        Ok(Some(message))
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
