//! What nodes tell each other when a server is lost whose keys move to others, in a job that goes
//! on without it.
//!
//! 1. The scheduler says that the server is [lost](MovingOrder::Lost). Workers let go of its lanes,
//!    hold back what they push of its keys, and say how far they [are](MovingReport::Held).
//! 2. It gives the keys to other servers, which [adopt](MovingOrder::Adopt) them: at the round that
//!    is open for all, or, if only some have had the result of a round, at that round.
//! 3. Workers are told where the keys [are](MovingOrder::Moved). They contribute once more to a
//!    round that nobody has a result of. Of one that some have, these give the result, and the
//!    server publishes it to the others, as it is.

use super::declaration::KeySpec;
use crate::base::{CoreId, Key};
use crate::limits::DECLARE_PARTS_MAX;
use serde::{Deserialize, Serialize};

/// Keys that move at once at most: what is said of them fits into one control message.
pub const MOVED_KEYS_MAX: usize = DECLARE_PARTS_MAX;

/// Keys that one `Adopt` has at most.
pub const ADOPTED_KEYS_MAX: usize = 1024;

/// From the scheduler.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum MovingOrder {
    /// To every node. Workers answer by [`MovingReport::Held`].
    Lost {
        /// All of this epoch, by index, in the order in which they were given up.
        servers: Vec<u32>,
        /// One line for people: who died last, and who is left.
        text: String,
    },
    /// To a server: keys of a lost one. Answered as `Install` is.
    Adopt {
        /// To be returned in `Installed`.
        request: u64,
        /// At most [`ADOPTED_KEYS_MAX`]. It may have been given some of them before, and nobody has
        /// contributed to those.
        keys: Vec<Adopted>,
    },
    /// To a worker: where keys are from now on.
    Moved {
        /// All keys of lost servers that were nowhere; some may be of tensors that it does not
        /// know.
        keys: Vec<MovedKey>,
    },
}

/// A key for a server to adopt.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Adopted {
    /// What it is, and the rounds whose results all ranks have had.
    pub spec: KeySpec,
    /// Some ranks have had the result of the next one as well, and give it to the others.
    pub restores: bool,
}

/// A key that has moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MovedKey {
    /// Its id.
    pub key: Key,
    /// Where it is.
    pub core: CoreId,
    /// As its server knows it.
    pub rounds: u64,
    /// As in [`Adopted`].
    pub restores: bool,
}

/// To the scheduler.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum MovingReport {
    /// From a worker: its lanes to lost servers are closed, and how far it is with all keys that
    /// are nowhere now.
    Held {
        /// How many servers it knows to be lost.
        lost: u32,
        /// At most [`MOVED_KEYS_MAX`].
        keys: Vec<HeldKey>,
    },
    /// From a server: ranks have given it the results of these keys, and it publishes them.
    Restored {
        /// Keys that it has adopted.
        keys: Vec<Key>,
    },
}

/// How far a worker is with a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HeldKey {
    /// Its id.
    pub key: Key,
    /// Rounds whose results it has had.
    pub rounds: u64,
    /// It has the last of these still, to give it to others.
    pub holds: bool,
}
