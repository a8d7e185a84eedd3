//! Which ranks of the job a tensor belongs to. Part of every declaration that is not for all.
//!
//! Invariant: a list of ranks is not empty, rises, and has no rank twice; what a peer sends is held
//! to this when it is decoded. All ranks of the job are no list: they cost nothing in memory or on
//! the wire.

use super::text::list;
use crate::base::{Rank, word};
use crate::limits::RANKS_MAX;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// The ranks that push a tensor and get its results.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(try_from = "Vec<Rank>", into = "Vec<Rank>")]
pub struct Members(Option<Arc<[Rank]>>);

/// Why a list of ranks is no set of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MembersError {
    /// There is none.
    #[error("a set of ranks needs at least one rank")]
    Empty,
    /// It is too long.
    #[error("a set of {0} ranks: a job has at most {RANKS_MAX}")]
    Many(usize),
    /// One is there twice, or a peer has sent them in another order.
    #[error("{0} is in a set of ranks twice, or out of order")]
    Order(Rank),
}

/// Why a tensor cannot belong to these ranks.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum MembersFault {
    /// The job has fewer ranks.
    Beyond {
        /// A member.
        rank: Rank,
        /// Ranks of the job.
        size: u32,
    },
    /// Who declares it is none of them.
    Outside {
        /// The rank.
        rank: Rank,
    },
    /// The root of the broadcast is none of them.
    Root {
        /// The root.
        root: Rank,
    },
    /// It is on GPUs, which all ranks of a host reduce together.
    OnGpus,
    /// The name has stood for a tensor of other ranks.
    Changed {
        /// Of these.
        before: Members,
    },
}

impl Members {
    /// All ranks of the job, however many it has.
    pub const ALL: Members = Members(None);

    /// These ranks, in any order.
    ///
    /// # Errors
    /// [`MembersError`] for no rank, too many, or one that is there twice.
    pub fn new(mut ranks: Vec<Rank>) -> Result<Members, MembersError> {
        ranks.sort_unstable();
        Members::try_from(ranks)
    }

    /// Whether they are all ranks of any job.
    #[must_use]
    pub fn is_all(&self) -> bool {
        self.0.is_none()
    }

    /// Whether this rank of the job is one of them.
    #[must_use]
    pub fn contains(&self, rank: Rank) -> bool {
        self.0.as_ref().is_none_or(|ranks| ranks.binary_search(&rank).is_ok())
    }

    /// How many they are in a job of so many ranks.
    #[must_use]
    pub fn count(&self, size: u32) -> u32 {
        self.0.as_ref().map_or(size, |ranks| word(ranks.len()))
    }

    /// Their ranks where they are a list.
    #[must_use]
    pub fn listed(&self) -> &[Rank] {
        self.0.as_deref().unwrap_or(&[])
    }

    /// Those of a job of so many ranks, in rising order.
    pub fn iter(&self, size: u32) -> impl Iterator<Item = Rank> + '_ {
        let all = if self.is_all() { 0..size } else { 0..0 };
        all.map(Rank).chain(self.listed().iter().copied())
    }

    /// As [`ALL`](Self::ALL) if they are all ranks of a job of this size.
    #[must_use]
    pub fn within(self, size: u32) -> Members {
        // The list rises, so one of this length that ends with the last rank has every rank.
        let is_whole =
            self.count(size) == size && self.listed().last().is_some_and(|last| last.0 + 1 == size);
        if is_whole { Members::ALL } else { self }
    }
}

impl TryFrom<Vec<Rank>> for Members {
    type Error = MembersError;

    fn try_from(ranks: Vec<Rank>) -> Result<Members, MembersError> {
        if ranks.is_empty() {
            return Err(MembersError::Empty);
        }
        if ranks.len() > RANKS_MAX {
            return Err(MembersError::Many(ranks.len()));
        }
        match ranks.windows(2).find(|pair| pair[0] >= pair[1]) {
            Some(pair) => Err(MembersError::Order(pair[1])),
            None => Ok(Members(Some(ranks.into()))),
        }
    }
}

impl From<Members> for Vec<Rank> {
    fn from(members: Members) -> Vec<Rank> {
        members.listed().to_vec()
    }
}

impl fmt::Display for Members {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.listed() {
            [] => f.write_str("all ranks"),
            [rank] => rank.fmt(f),
            ranks => write!(f, "ranks {}", list(ranks.iter().map(|rank| rank.0))),
        }
    }
}

impl MembersFault {
    /// Why a tensor with this name cannot belong to these ranks, in one line.
    pub(super) fn write(
        &self,
        f: &mut fmt::Formatter<'_>,
        tensor: &str,
        members: &Members,
    ) -> fmt::Result {
        write!(f, "tensor `{tensor}` of {members}: ")?;
        match self {
            MembersFault::Beyond { rank, size } => write!(
                f,
                "there is no {rank} in a job of {size} ranks: name 0 to {}",
                size.saturating_sub(1)
            ),
            MembersFault::Outside { rank } => {
                write!(f, "{rank} is none of them: only they declare it and push it")
            }
            MembersFault::Root { root } => {
                write!(
                    f,
                    "{root}, which broadcasts it, is none of them: let one of them be the root"
                )
            }
            MembersFault::OnGpus => {
                f.write_str("only tensors in memory of the host have a set of ranks: copy it there")
            }
            MembersFault::Changed { before } => {
                write!(f, "the name stands for one of {before}: give each set a name of its own")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(text: &str) -> Result<Members, serde_json::Error> {
        serde_json::from_str(text)
    }

    fn of(ranks: &[u32]) -> Members {
        Members::new(ranks.iter().copied().map(Rank).collect()).unwrap()
    }

    #[test]
    fn a_set_counts_prints_and_travels() {
        for (ranks, text) in [(&[3][..], "rank 3"), (&[5, 0, 2, 1], "ranks 0-2, 5")] {
            let members = of(ranks);
            assert_eq!((members.count(9) as usize, &*members.to_string()), (ranks.len(), text));
            assert_eq!(decode(&serde_json::to_string(&members).unwrap()).unwrap(), members);
            let found: Vec<u32> = members.iter(9).map(|rank| rank.0).collect();
            let mut sorted = ranks.to_vec();
            sorted.sort_unstable();
            assert_eq!(found, sorted);
            assert!((0..9).all(|rank| members.contains(Rank(rank)) == ranks.contains(&rank)));
        }
        assert_eq!((Members::ALL.count(3), Members::ALL.iter(3).count()), (3, 3));
        assert!(Members::ALL.contains(Rank(7)));
    }

    #[test]
    fn all_ranks_of_the_job_are_no_list() {
        assert!(of(&[1, 0, 2]).within(3).is_all());
        for (ranks, size) in [(&[0, 1][..], 3), (&[1, 2], 2), (&[0, 1, 2], 2), (&[0], 2)] {
            assert!(!of(ranks).within(size).is_all(), "{ranks:?} of {size}");
        }
    }

    #[test]
    fn what_a_peer_sends_is_a_set() {
        let cases = [
            ("[]", "at least one"),
            ("[1, 1]", "rank 1 is in a set of ranks twice"),
            ("[2, 1]", "rank 1 is in a set of ranks twice, or out of order"),
            ("[-1]", "invalid value"),
            ("7", "invalid type"),
        ];
        for (text, wanted) in cases {
            let error = decode(text).unwrap_err().to_string();
            assert!(error.contains(wanted), "{text}: {error}");
        }
        let many: Vec<u32> = (0..=word(RANKS_MAX)).collect();
        let error = decode(&serde_json::to_string(&many).unwrap()).unwrap_err().to_string();
        assert!(error.contains("a set of 4097 ranks"), "{error}");
        let twice = Members::new(vec![Rank(4), Rank(0), Rank(4)]);
        assert_eq!(twice, Err(MembersError::Order(Rank(4))));
    }
}
