//! Why a job is over, as the scheduler tells every node: data, from which each node makes the same
//! line for people and its callers read who, what and since when.

use super::origin::Origin;
use super::paths::{End, Member, Names, PathLoss, PathStall};
use super::stall::{STALLS_SHOWN_MAX, Stall};
use super::text::{seconds, shorten};
use super::unformed::Unformed;
use crate::base::{Epoch, Rank};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;

/// Stalls that one line shows.
const SHOWN_MAX: usize = 3;

/// Why a job is over.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "why", rename_all = "snake_case")]
pub enum OverReason {
    /// All workers left in good order.
    Finished,
    /// A node's connection was lost or its heartbeats stopped.
    Died {
        /// The node.
        who: Origin,
        /// How the scheduler noticed.
        how: Sign,
        /// Rounds it had completed by its last heartbeat.
        rounds: u64,
    },
    /// To the node that `Died` names, if it can still be reached.
    Removed {
        /// As there.
        how: Sign,
    },
    /// A server left in good order, as it had asked. To that server: the job goes on without it.
    Left {
        /// The server.
        who: Origin,
    },
    /// A node ended with an error of its own.
    Failed {
        /// The node.
        who: Origin,
        /// Its line.
        message: String,
        /// The round in which it failed, if it was in one.
        #[serde(default)]
        round: Option<RoundOf>,
    },
    /// To whoever is left of an elastic job: the epoch is over, and whoever comes back is in the
    /// next one.
    Reforming {
        /// What ended the epoch.
        reason: Box<OverReason>,
        /// The next one.
        epoch: Epoch,
    },
    /// To a rank, within `Reforming`: the scheduler was lost when this epoch had only begun, and
    /// nobody from whom the next one took the job over knew of it.
    UnknownEpoch {
        /// The epoch.
        epoch: Epoch,
    },
    /// An elastic job has too few members left to go on.
    TooFew {
        /// What ended the epoch.
        reason: Box<OverReason>,
        /// Who is left, and how many there must be.
        left: String,
    },
    /// A lane broke and both of its ends are well.
    PathLost(PathLoss),
    /// Bytes that one node has sent did not reach another for longer than `BPS_STALL_TIMEOUT`.
    PathStalled {
        /// The oldest first.
        stalls: Vec<PathStall>,
        /// Where those run that `stalls` names first: at most
        /// [`MEMBERS_MAX`](super::stall::MEMBERS_MAX).
        #[serde(default)]
        members: Vec<Member>,
    },
    /// A stall lasted longer than `BPS_STALL_TIMEOUT`.
    Stalled {
        /// The oldest first.
        stalls: Vec<Stall>,
        /// As of `PathStalled`.
        #[serde(default)]
        members: Vec<Member>,
    },
    /// Ranks wait for others that have left the job in good order and will not come.
    Abandoned {
        /// The oldest first.
        stalls: Vec<Stall>,
        /// As of `PathStalled`.
        #[serde(default)]
        members: Vec<Member>,
    },
    /// Nodes did not come in time, or what they were told about the job disagrees.
    NotFormed {
        /// What disagrees, or who is missing.
        cause: Unformed,
    },
}

impl OverReason {
    /// What ended the epoch, without what follows from it.
    #[must_use]
    pub fn cause(&self) -> &OverReason {
        match self {
            OverReason::Reforming { reason, .. } | OverReason::TooFew { reason, .. } => {
                reason.cause()
            }
            reason => reason,
        }
    }
}

/// The epoch goes on without ranks that died.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Shrunk {
    /// All of this epoch, in the order in which they were given up: at most
    /// [`GONE_MAX`](crate::limits::GONE_MAX).
    pub gone: Vec<Rank>,
    /// One line for people: who died last, and who is left.
    pub text: String,
}

/// How the scheduler noticed that a node is gone.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sign {
    /// No heartbeat came for so long.
    Silent {
        /// For how long.
        milliseconds: u64,
    },
    /// Its connection ended, or it broke the protocol: what was seen, in one line.
    Seen(String),
}

/// One round of one tensor.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct RoundOf {
    /// Its name.
    pub tensor: String,
    /// Counted from 1.
    pub round: u64,
}

impl fmt::Display for OverReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OverReason::Finished => f.write_str("all workers have finished"),
            OverReason::Died { who, how, rounds } => {
                write!(f, "{who} died")?;
                // As its last heartbeat had it, of which there may have been none.
                if *rounds > 0 {
                    write!(f, " after at least {rounds} rounds")?;
                }
                write!(f, ": {how}: its own log says why")
            }
            OverReason::Removed { how } => write!(
                f,
                "the scheduler declared this process dead: {how}: its machine was stopped or \
                 overloaded, or the network between them was"
            ),
            OverReason::Left { who } => write!(f, "{who} left"),
            OverReason::Failed { who, message, .. } => write!(f, "{who} failed: {message}"),
            OverReason::Reforming { reason, epoch } => {
                write!(f, "{reason}; epoch {} forms from whoever is left", epoch.0)
            }
            OverReason::UnknownEpoch { epoch } => write!(
                f,
                "the scheduler was lost when epoch {} had only begun, and others did not know it",
                epoch.0
            ),
            // Nobody has died: ranks have left in good order.
            OverReason::TooFew { reason, left } if **reason == OverReason::Finished => {
                write!(f, "ranks have left; the job cannot go on: {left}")
            }
            OverReason::TooFew { reason, left } => {
                write!(f, "{reason}; the job cannot go on: {left}")
            }
            OverReason::PathLost(loss) => loss.fmt(f),
            OverReason::PathStalled { stalls, members } => {
                let mut names = Names::new(members);
                f.write_str("no progress for too long (BPS_STALL_TIMEOUT): ")?;
                for (index, stall) in stalls.iter().take(SHOWN_MAX).enumerate() {
                    let comma = if index == 0 { "" } else { "; " };
                    f.write_str(comma)?;
                    stall.write(f, &mut names)?;
                }
                Ok(())
            }
            OverReason::Stalled { stalls, members } => {
                f.write_str("no progress for too long (BPS_STALL_TIMEOUT): ")?;
                write_stalls(f, stalls, &mut Names::new(members))
            }
            OverReason::Abandoned { stalls, members } => {
                let mut names = Names::new(members);
                let left: BTreeSet<Rank> =
                    stalls.iter().flat_map(|stall| &stall.left).copied().collect();
                for (index, rank) in left.iter().enumerate() {
                    let comma = if index == 0 { "" } else { ", " };
                    write!(f, "{comma}{}", names.next(End::Rank(*rank)))?;
                }
                f.write_str(" left the job while others wait: ")?;
                write_stalls(f, stalls, &mut names)?;
                f.write_str(": let every rank make the same steps before it shuts down")
            }
            OverReason::NotFormed { cause } => write!(f, "the job was not formed: {cause}"),
        }
    }
}

impl fmt::Display for Sign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Sign::Silent { milliseconds } => {
                write!(f, "no heartbeat for {:.1} s", seconds(*milliseconds))
            }
            Sign::Seen(text) => f.write_str(text),
        }
    }
}

impl fmt::Display for RoundOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "round {} of `{}`", self.round, shorten(&self.tensor))
    }
}

fn write_stalls(
    f: &mut fmt::Formatter<'_>,
    stalls: &[Stall],
    names: &mut Names<'_>,
) -> fmt::Result {
    for (index, stall) in stalls.iter().take(SHOWN_MAX).enumerate() {
        let comma = if index == 0 { "" } else { "; " };
        f.write_str(comma)?;
        stall.write(f, names)?;
    }
    match stalls.len().saturating_sub(SHOWN_MAX) {
        0 => Ok(()),
        // A message that names as many as it may has left others out.
        more if stalls.len() >= STALLS_SHOWN_MAX => write!(f, "; and at least {more} more"),
        more => write!(f, "; and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::paths::Leg;

    #[test]
    fn a_verdict_names_a_few_stalls_and_counts_the_others() {
        let left = Stall {
            name: "layer4.weight".into(),
            round: 812,
            waited_ms: 5040,
            arrived: vec![Rank(1)],
            missing: vec![Rank(0), Rank(2)],
            left: vec![Rank(2)],
        };
        let over = OverReason::Stalled { stalls: vec![left.clone(); 5], members: Vec::new() };
        assert!(over.to_string().ends_with("s ago; and 2 more"), "{over}");
        let stalls = vec![left.clone(); STALLS_SHOWN_MAX];
        let over = OverReason::Stalled { stalls, members: Vec::new() };
        assert!(over.to_string().ends_with("s ago; and at least 13 more"), "{over}");
        let abandoned = OverReason::Abandoned { stalls: vec![left], members: Vec::new() };
        assert_eq!(
            abandoned.to_string(),
            "rank 2 left the job while others wait: round 812 of `layer4.weight` waits for rank 0, \
             rank 2 (left); rank 1 arrived 5.0 s ago: let every rank make the same steps before it \
             shuts down"
        );
    }

    #[test]
    fn a_verdict_says_once_where_each_of_those_runs_that_it_waits_for() {
        let member = |end, pid| Member { end, host: "a".into(), pid };
        let members = vec![member(End::Rank(Rank(2)), 7), member(End::Server(0), 8)];
        let stall = |name: &str, missing: &[u32], left: &[u32]| Stall {
            name: name.into(),
            round: 3,
            waited_ms: 1_000,
            arrived: vec![Rank(1)],
            missing: missing.iter().copied().map(Rank).collect(),
            left: left.iter().copied().map(Rank).collect(),
        };
        let stalls = vec![stall("v", &[0, 2], &[]), stall("w", &[2], &[])];
        assert_eq!(
            OverReason::Stalled { stalls, members: members.clone() }.to_string(),
            "no progress for too long (BPS_STALL_TIMEOUT): round 3 of `v` waits for rank 0, rank 2 \
             (host a, pid 7); rank 1 arrived 1.0 s ago; round 3 of `w` waits for rank 2; rank 1 \
             arrived 1.0 s ago"
        );
        let stalls = vec![stall("v", &[2], &[2])];
        let abandoned = OverReason::Abandoned { stalls, members: members.clone() };
        assert!(
            abandoned.to_string().starts_with(
                "rank 2 (host a, pid 7) left the job while others wait: round 3 of `v` waits for \
                 rank 2 (left); rank 1"
            ),
            "{abandoned}"
        );
        let path = |name: &str| PathStall {
            rank: Rank(2),
            server: 0,
            leg: Leg::Result,
            name: name.into(),
            round: 3,
            waited_ms: 1_000,
        };
        let stalled = OverReason::PathStalled { stalls: vec![path("v"), path("w")], members };
        assert_eq!(
            stalled.to_string(),
            "no progress for too long (BPS_STALL_TIMEOUT): rank 2 (host a, pid 7) waits for the \
             result of `v`, round 3, which server 0 (host a, pid 8) published 1.0 s ago: the path \
             from server 0 to rank 2 loses packets or is too slow; rank 2 waits for the result of \
             `w`, round 3, which server 0 published 1.0 s ago: the path from server 0 to rank 2 \
             loses packets or is too slow"
        );
    }
}
