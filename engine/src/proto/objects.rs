//! Keys that authenticate objects which a rank sends to all others, so that no rank unpickles what
//! somebody between it and a server has written.
//!
//! Invariant: no two objects of a job have the same key, and both ends of one have. A key holds the
//! job, the membership, the name, the root, and how many objects had this name before: each rank
//! counts for itself.

use super::handshake::{JobKey, PROOF_BYTES};
use crate::base::{Epoch, Rank};
use std::collections::HashMap;

const LABEL: &[u8] = b"bps objects 1: of a membership";
const OBJECT_LABEL: &[u8] = b"bps objects 1: of one object";

/// The keys of one membership.
#[derive(Debug)]
pub struct ObjectKeys {
    secret: JobKey,
    /// Objects so far, by name.
    counts: HashMap<String, u64>,
}

impl ObjectKeys {
    /// Those of a job, which its scheduler named, in an epoch; none if it has no key.
    #[must_use]
    pub fn new(key: &JobKey, job: &str, epoch: Epoch) -> Option<ObjectKeys> {
        let context = [&epoch.0.to_le_bytes(), job.as_bytes()].concat();
        let secret = JobKey::from_bytes(key.derive(LABEL, &context));
        (!key.is_open()).then(|| ObjectKeys { secret, counts: HashMap::new() })
    }

    /// The key of the next object of this name.
    pub fn next(&mut self, name: &str, root: Rank) -> [u8; PROOF_BYTES] {
        let count = self.counts.entry(name.to_owned()).or_default();
        let context = [&root.0.to_le_bytes()[..], &count.to_le_bytes(), name.as_bytes()].concat();
        *count += 1;
        self.secret.derive(OBJECT_LABEL, &context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_have_the_same_key_and_no_two_objects_have() {
        let job = JobKey::from_bytes([7; PROOF_BYTES]);
        let keys = |job: &JobKey, name, epoch| ObjectKeys::new(job, name, Epoch(epoch)).unwrap();
        let (mut one, mut other) = (keys(&job, "a", 1), keys(&job, "a", 1));
        let mut seen = Vec::new();
        for (name, root) in [("x", 0), ("x", 0), ("x", 1), ("y", 0), ("", 0), ("y", 0)] {
            let key = one.next(name, Rank(root));
            assert_eq!(key, other.next(name, Rank(root)));
            seen.push(key);
        }
        for mut stranger in [
            keys(&job, "b", 1),
            keys(&job, "a", 2),
            keys(&JobKey::from_bytes([8; PROOF_BYTES]), "a", 1),
        ] {
            seen.push(stranger.next("x", Rank(0)));
        }
        let count = seen.len();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), count, "two objects have one key");
        assert!(ObjectKeys::new(&JobKey::open(), "a", Epoch(1)).is_none());
    }
}
