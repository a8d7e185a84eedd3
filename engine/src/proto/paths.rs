//! What nodes tell each other about the paths between them: lanes that broke though both ends are
//! well, and bytes that were sent and do not arrive. The control messages carry these types.

use super::text::{seconds, shorten};
use crate::base::{Key, Rank};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;

/// Keys that one question or report about paths names at most.
pub const PATH_KEYS_MAX: usize = 64;
/// Paths that one message to people names at most.
pub const PATHS_MAX: usize = 16;

/// A node as the ends of a lane know each other.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// A rank.
    Rank(Rank),
    /// The server with this index.
    Server(u32),
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            End::Rank(rank) => rank.fmt(f),
            End::Server(index) => write!(f, "server {index}"),
        }
    }
}

/// A member of the job, for messages.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Member {
    /// Its place in the job.
    pub end: End,
    /// Host name.
    pub host: String,
    /// Process id there.
    pub pid: u32,
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (host {}, pid {})", self.end, self.host, self.pid)
    }
}

/// Names nodes in one text: where a node occurs first, with its host and process, if known.
pub(super) struct Names<'a> {
    members: &'a [Member],
    told: BTreeSet<End>,
}

impl<'a> Names<'a> {
    /// A text that these nodes occur in.
    pub(super) fn new(members: &'a [Member]) -> Names<'a> {
        Names { members, told: BTreeSet::new() }
    }

    /// How to write this node next.
    pub(super) fn next(&mut self, end: End) -> String {
        let member = self.members.iter().find(|member| member.end == end);
        match member.filter(|_| self.told.insert(end)) {
            Some(member) => member.to_string(),
            None => end.to_string(),
        }
    }
}

/// How a lane ended that neither end meant to close.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LaneFault {
    /// The other end's machine acknowledged nothing of what was sent for so long.
    Unacknowledged {
        /// For how long.
        milliseconds: u32,
    },
    /// The connection ended as if the other end had closed it.
    Closed,
    /// The kernel or a device reported an error: its text.
    Error(String),
}

/// A lane that broke while both of its ends still answer the scheduler.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PathLoss {
    /// Who noticed it first.
    pub from: Member,
    /// The other end.
    pub to: Member,
    /// What was seen there.
    pub fault: LaneFault,
    /// Milliseconds from the report to this verdict.
    pub waited_ms: u64,
}

impl fmt::Display for PathLoss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PathLoss { from, to, fault, .. } = self;
        write!(f, "the path between {from} and {to} failed: ")?;
        match fault {
            LaneFault::Unacknowledged { milliseconds } => write!(
                f,
                "nothing that {} sent was acknowledged for {:.1} s",
                from.end,
                f64::from(*milliseconds) / 1000.0
            ),
            LaneFault::Closed => write!(f, "the lane of {} was closed on the way", from.end),
            LaneFault::Error(text) => write!(f, "{} saw: {text}", from.end),
        }?;
        f.write_str(
            "; both still answer the scheduler: look at the network between these hosts, its MTU \
             and its firewalls",
        )
    }
}

/// A result that a worker waits for, though its own part was sent.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct AwaitedKey {
    /// The part.
    pub key: Key,
    /// Its round.
    pub round: u64,
    /// Who sums it.
    pub server: u32,
    /// Milliseconds since the contribution was sent.
    pub waited_ms: u64,
}

/// How far a server is with a key.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct KeyState {
    /// The part.
    pub key: Key,
    /// The last round that was published; 0 if none was.
    pub published: u64,
    /// Milliseconds since then.
    pub published_ms: u64,
    /// Who has not contributed to the round behind it.
    pub missing: Vec<Rank>,
}

/// What of a round is lost, or late, between a rank and a server.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Leg {
    /// The server published the result and the rank does not have it.
    Result,
    /// The rank sent its part and the server does not have it.
    Contribution,
    /// The server does not say how far it is.
    Unknown,
}

/// A round that waits for bytes which one node has sent to another.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PathStall {
    /// The rank at one end.
    pub rank: Rank,
    /// The server at the other.
    pub server: u32,
    /// What is on its way.
    pub leg: Leg,
    /// The tensor.
    pub name: String,
    /// Its round.
    pub round: u64,
    /// Milliseconds since it was sent.
    pub waited_ms: u64,
}

impl fmt::Display for PathStall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f, &mut Names::new(&[]))
    }
}

impl PathStall {
    pub(super) fn write(&self, f: &mut fmt::Formatter<'_>, names: &mut Names<'_>) -> fmt::Result {
        let PathStall { rank, server, round, .. } = self;
        let (the_rank, the_server) =
            (names.next(End::Rank(*rank)), names.next(End::Server(*server)));
        let name = shorten(&self.name);
        let seconds = seconds(self.waited_ms);
        match self.leg {
            Leg::Result => write!(
                f,
                "{the_rank} waits for the result of `{name}`, round {round}, which {the_server} \
                 published {seconds:.1} s ago: the path from server {server} to {rank} loses \
                 packets or is too slow"
            ),
            Leg::Contribution => write!(
                f,
                "{the_server} waits for the part of {the_rank} in round {round} of `{name}`, which \
                 was sent {seconds:.1} s ago: the path from {rank} to server {server} loses \
                 packets or is too slow"
            ),
            Leg::Unknown => write!(
                f,
                "{the_rank} waits since {seconds:.1} s for the result of `{name}`, round {round}, \
                 and {the_server} does not say how far it is: read its log"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_name_both_ends_and_the_direction() {
        let member = |end, host: &str| Member { end, host: host.into(), pid: 7 };
        let loss = PathLoss {
            from: member(End::Server(0), "b"),
            to: member(End::Rank(Rank(2)), "a"),
            fault: LaneFault::Unacknowledged { milliseconds: 9_040 },
            waited_ms: 500,
        };
        assert_eq!(
            loss.to_string(),
            "the path between server 0 (host b, pid 7) and rank 2 (host a, pid 7) failed: nothing \
             that server 0 sent was acknowledged for 9.0 s; both still answer the scheduler: look \
             at the network between these hosts, its MTU and its firewalls"
        );
        let stall = |leg| PathStall {
            rank: Rank(1),
            server: 0,
            leg,
            name: "w".into(),
            round: 3,
            waited_ms: 5_000,
        };
        assert_eq!(
            stall(Leg::Result).to_string(),
            "rank 1 waits for the result of `w`, round 3, which server 0 published 5.0 s ago: the \
             path from server 0 to rank 1 loses packets or is too slow"
        );
        assert_eq!(
            stall(Leg::Contribution).to_string(),
            "server 0 waits for the part of rank 1 in round 3 of `w`, which was sent 5.0 s ago: \
             the path from rank 1 to server 0 loses packets or is too slow"
        );
        assert!(stall(Leg::Unknown).to_string().contains("server 0 does not say"));
    }
}
