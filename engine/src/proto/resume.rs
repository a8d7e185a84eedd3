//! What a member of a job says to the scheduler that follows a lost one: all that this has to know.

use super::declaration::{Assignment, Declaration};
use super::roster::{Register, Roster};
use crate::base::{Epoch, Key, Rank};
use crate::limits::DECLARE_PARTS_MAX;
use serde::{Deserialize, Serialize};

/// Tensors that one `Known` has at most.
const TENSORS_MAX: usize = 1024;

/// Adopted keys that one `Known` has at most.
const ADOPTED_MAX: usize = 1 << 16;

/// Who a node is, and what it knew of the job when its scheduler was lost.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Resume {
    /// As it registered with the lost one, with the session that it had there.
    pub register: Register,
    /// Of the last scheduler that it followed.
    pub term: u32,
    /// As that one sent it.
    pub roster: Roster,
    /// Of a server that was told to forget the roster's epoch: the next one.
    #[serde(default)]
    pub reset: Option<Epoch>,
    /// Ranks that died, and that the epoch goes on without, in order.
    #[serde(default)]
    pub gone: Vec<Rank>,
    /// Servers that are lost, and that the epoch goes on without, in order.
    #[serde(default)]
    pub lost: Vec<u32>,
    /// Ranks that have said good-bye on all their lanes to this server.
    #[serde(default)]
    pub left: Vec<Rank>,
    /// Barriers that this rank has passed in this epoch.
    #[serde(default)]
    pub barriers: u64,
    /// How many tensors follow in `Known`.
    #[serde(default)]
    pub tensors: u64,
    /// One more than the highest key that this server was told to make room for; 0 for none.
    #[serde(default)]
    pub keys_end: u64,
    /// How many keys follow in `Known` that this server has adopted.
    #[serde(default)]
    pub adopted: u64,
    /// Why the epoch can't go on with another scheduler, if so; it forms again then.
    #[serde(default)]
    pub obstacle: Option<String>,
}

/// A tensor that a rank was told it may push.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct KnownTensor {
    /// What this rank had said.
    pub said: Declaration,
    /// The answer; its parts are where this rank was told last that they are.
    pub assignment: Assignment,
    /// Keys of it that have moved, with a last result that this rank has and others lacked then.
    #[serde(default)]
    pub holds: Vec<Key>,
}

/// A key of a lost server that another one has room for, and has said so.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct AdoptedKey {
    /// Its id.
    pub key: Key,
    /// The core that has it.
    pub core: u32,
    /// The rounds whose results all ranks had had then.
    pub rounds: u64,
    /// Some ranks had had the result of the next one, and it has not been restored yet.
    pub restores: bool,
}

/// What a server has adopted, likewise.
pub(super) fn adopted_pieces(adopted: &[AdoptedKey]) -> impl Iterator<Item = Vec<AdoptedKey>> {
    adopted.chunks(ADOPTED_MAX).map(<[AdoptedKey]>::to_vec)
}

/// What a rank knows, in pieces that each fit into one `Known`.
pub(super) fn pieces(known: impl Iterator<Item = KnownTensor>) -> Vec<Vec<KnownTensor>> {
    let mut all = Vec::new();
    let (mut tensors, mut parts) = (Vec::new(), 0);
    let (mut named, named_max) = (0, 1 << 16);
    for tensor in known {
        let (count, names) = (tensor.assignment.parts.len(), tensor.said.members.listed().len());
        let count = count + tensor.holds.len();
        let is_full = tensors.len() >= TENSORS_MAX
            || parts + count > DECLARE_PARTS_MAX
            || named + names > named_max;
        if is_full && !tensors.is_empty() {
            all.push(std::mem::take(&mut tensors));
            (parts, named) = (0, 0);
        }
        (parts, named) = (parts + count, named + names);
        tensors.push(tensor);
    }
    if !tensors.is_empty() {
        all.push(tensors);
    }
    all
}
