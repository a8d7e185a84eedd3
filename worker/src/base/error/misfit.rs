//! What a frame says that cannot be, as data: what came, and what it was compared with.

use bps_engine::base::{Epoch, Key, Rank};
use bps_engine::encode::Malformed;
use bps_engine::limits::PARTS_MAX;
use bps_engine::proto::text::shorten;
use bps_engine::wire::{Invalid, Kind};

/// What of a frame does not follow the protocol, or does not fit what this rank has pushed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Misfit {
    /// 64 bytes that are no header.
    #[error(transparent)]
    Header(#[from] Invalid),
    /// A server refuses a frame of this rank; the frame that says so gives no reason.
    #[error("it refused a frame of this rank; its log says why")]
    Refused,
    /// A kind of frame that no server sends.
    #[error("a server does not send {0:?}")]
    NotOfServer(Kind),
    /// A kind of frame that no rank sends to another on this lane.
    #[error("a rank does not send {0:?} to another")]
    NotOfRank(Kind),
    /// A kind of frame that has no place on a lane of GPUs.
    #[error("{0:?} says nothing about the order of collectives")]
    NoOrder(Kind),
    /// In the name of another rank, or of another membership.
    #[error(
        "a frame on the lane of {lane}, epoch {}, says {rank}, epoch {}",
        epoch.0, said.0
    )]
    Speaker {
        /// The rank at the other end of the lane.
        lane: Rank,
        /// This rank's membership.
        epoch: Epoch,
        /// The rank that the frame names.
        rank: Rank,
        /// The membership that it names.
        said: Epoch,
    },
    /// A payload, of a kind that has none.
    #[error("{kind:?} has a payload of {bytes} bytes")]
    Payload {
        /// The frame's kind.
        kind: Kind,
        /// The payload's length.
        bytes: u32,
    },
    /// About a key that is not declared here.
    #[error("{kind:?} of unknown {key}")]
    UnknownKey {
        /// The frame's kind.
        kind: Kind,
        /// What it names.
        key: Key,
    },
    /// More keys than there can be.
    #[error("it has pushed over {PARTS_MAX} keys")]
    TooManyKeys,
    /// On a lane whose rank sums nothing with this one.
    #[error("it has no share of this rank's parts")]
    NoShare,
    /// A word about a tensor on GPUs, on a lane whose rank has no share of it.
    #[error("{kind:?} of {key}, whose tensor is on GPUs")]
    OnGpus {
        /// The frame's kind.
        kind: Kind,
        /// The part.
        key: Key,
    },
    /// A push of a part that another rank sums.
    #[error("{key} is not this rank's to sum")]
    NotOwned {
        /// The part.
        key: Key,
    },
    /// A push of a part of a tensor for a set of ranks, of which the sender is none.
    #[error("{key} is a part of a tensor for a set of ranks, of which it is none")]
    Outside {
        /// The part.
        key: Key,
    },
    /// A push of a round that it has pushed already, or that is not the open one.
    #[error("{key}: round {round} was pushed already, or is not the open one ({open})")]
    Untimely {
        /// The part.
        key: Key,
        /// The round that it named.
        round: u64,
        /// The open one.
        open: u64,
    },
    /// A result that is given back, which only servers take.
    #[error("a result of {key} is no contribution")]
    Result {
        /// The part.
        key: Key,
    },
    /// A frame about a part that this rank knows, which does not fit the part's round.
    #[error("{0}")]
    Part(PartMisfit),
    /// A result that is no encoding of its part.
    #[error("a publication of `{}` ({key}): {why}", shorten(tensor))]
    Encoding {
        /// The tensor's name.
        tensor: String,
        /// The part.
        key: Key,
        /// The part's open round.
        round: u64,
        /// What is wrong.
        why: Malformed,
    },
}

/// A frame about a part that this rank knows, which is not what the part waits for.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "{what} of `{}` ({key}, round {round}, {bytes} bytes) does not fit what was pushed (a part \
     of {part_bytes} bytes, in round {open})",
    shorten(tensor)
)]
pub struct PartMisfit {
    /// What the frame would be.
    pub what: Unasked,
    /// The tensor's name.
    pub tensor: String,
    /// The part.
    pub key: Key,
    /// The round that the frame names.
    pub round: u64,
    /// Length of its payload.
    pub bytes: u32,
    /// The part's length in memory.
    pub part_bytes: usize,
    /// The part's round that is open here, or was the last one.
    pub open: u64,
}

/// A frame that answers nothing, or not what this rank has said.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Unasked {
    /// A result.
    #[error("a publication")]
    Publication,
    /// Another rank's bytes.
    #[error("a contribution")]
    Contribution,
    /// The owner asks for this rank's bytes.
    #[error("a grant")]
    Grant,
    /// A server asks for this rank's contribution once more.
    #[error("a second request for the contribution")]
    Again,
}

impl Misfit {
    /// The tensor that it is about and the round of it that is open here, where the frame names a
    /// part that this rank knows.
    #[must_use]
    pub fn tensor(&self) -> Option<(&str, u64)> {
        match self {
            Misfit::Part(PartMisfit { tensor, open, .. }) => Some((tensor, *open)),
            Misfit::Encoding { tensor, round, .. } => Some((tensor, *round)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_that_does_not_fit_says_what_came_and_what_was_pushed() {
        let part = PartMisfit {
            what: Unasked::Publication,
            tensor: "layer4.weight".into(),
            key: Key(7),
            round: 9,
            bytes: 64,
            part_bytes: 4096,
            open: 3,
        };
        let misfit = Misfit::Part(part.clone());
        assert_eq!(
            misfit.to_string(),
            "a publication of `layer4.weight` (key 7, round 9, 64 bytes) does not fit what was \
             pushed (a part of 4096 bytes, in round 3)"
        );
        assert_eq!(misfit.tensor(), Some(("layer4.weight", 3)));
        let again = PartMisfit { what: Unasked::Again, ..part };
        assert!(again.to_string().starts_with("a second request for the contribution of `layer4"));
        let (lane, rank) = (Rank(1), Rank(2));
        let other = Misfit::Speaker { lane, epoch: Epoch(3), rank, said: Epoch(4) };
        assert_eq!(
            other.to_string(),
            "a frame on the lane of rank 1, epoch 3, says rank 2, epoch 4"
        );
        assert_eq!(other.tensor(), None);
    }
}
