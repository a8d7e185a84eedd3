//! Open rounds that wait: as the node that sums them reports them, and as people are told.

use super::paths::{End, Names};
use super::text::{list, seconds, shorten};
use crate::base::{Key, Rank};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Stalled keys that a node counts at most in one look.
pub const STALLS_MAX: usize = 4096;
/// Stalled keys that one report describes, and stalled tensors that one message names, at most.
pub const STALLS_SHOWN_MAX: usize = 16;

/// Nodes of which a verdict about stalls says where they run, at most.
pub const MEMBERS_MAX: usize = 16;

/// An open round that waits, as its server sees it, or the rank that sums it for a group.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StalledKey {
    /// The part.
    pub key: Key,
    /// Its open round.
    pub round: u64,
    /// Milliseconds since the first contribution.
    pub waited_ms: u64,
    /// Who has not contributed.
    pub missing: Vec<Rank>,
    /// Those of them that have said goodbye on their lane: they cannot contribute any more.
    #[serde(default)]
    pub left: Vec<Rank>,
}

/// An open round that waits, as people are told.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Stall {
    /// The tensor.
    pub name: String,
    /// Its open round.
    pub round: u64,
    /// Milliseconds since the first contribution.
    pub waited_ms: u64,
    /// Who has contributed.
    pub arrived: Vec<Rank>,
    /// For whom it waits.
    pub missing: Vec<Rank>,
    /// Those of them that left the job in good order: they will not come.
    #[serde(default)]
    pub left: Vec<Rank>,
}

impl fmt::Display for Stall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f, &mut Names::new(&[]))
    }
}

impl Stall {
    pub(super) fn write(&self, f: &mut fmt::Formatter<'_>, names: &mut Names<'_>) -> fmt::Result {
        write!(f, "round {} of `{}` waits for ", self.round, shorten(&self.name))?;
        for (index, rank) in self.missing.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            let left = if self.left.contains(rank) { " (left)" } else { "" };
            write!(f, "{comma}{}{left}", names.next(End::Rank(*rank)))?;
        }
        let seconds = seconds(self.waited_ms);
        match self.arrived.as_slice() {
            [] => write!(f, " since {seconds:.1} s"),
            [rank] => write!(f, "; {rank} arrived {seconds:.1} s ago"),
            ranks => {
                let ranks = list(ranks.iter().map(|Rank(rank)| *rank));
                write!(f, "; ranks {ranks} arrived {seconds:.1} s ago")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_who_is_awaited_and_who_waits() {
        let stall = Stall {
            name: "layer4.weight".into(),
            round: 812,
            waited_ms: 5040,
            arrived: vec![Rank(0), Rank(1), Rank(2)],
            missing: vec![Rank(3)],
            left: vec![],
        };
        assert_eq!(
            stall.to_string(),
            "round 812 of `layer4.weight` waits for rank 3; ranks 0-2 arrived 5.0 s ago"
        );
        let left = Stall {
            arrived: vec![Rank(1)],
            missing: vec![Rank(0), Rank(2)],
            left: vec![Rank(2)],
            ..stall
        };
        assert_eq!(
            left.to_string(),
            "round 812 of `layer4.weight` waits for rank 0, rank 2 (left); rank 1 arrived 5.0 s ago"
        );
    }
}
