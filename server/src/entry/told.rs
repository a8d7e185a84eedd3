//! What a result says of whose contributions it holds.

#![forbid(unsafe_code)]

use super::Groups;
use bps_engine::base::word;

/// Whose contributions are in a result.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Told {
    /// Those of all.
    #[default]
    All,
    /// So many, without those of some that have died or are late.
    Some { contributors: u32, missing: u64 },
    /// Nobody's: the root of a broadcast has died before it gave its bytes.
    Lost,
}

impl Told {
    /// Of a key whose rounds need all ranks that live: who dies later ends the epoch.
    pub(super) fn all_but_the_dead(groups: &Groups) -> Told {
        if groups.gone().is_empty() {
            return Told::All;
        }
        let missing = groups.gone().iter().fold(0, |bits, (bit, _)| bits | 1u64 << bit);
        Told::Some { contributors: groups.ranks() - word(groups.gone().len()), missing }
    }

    pub(super) fn is_lost(self) -> bool {
        self == Told::Lost
    }

    /// How many they are, where they are not all.
    pub(super) fn contributors(self) -> u32 {
        match self {
            Told::Some { contributors, .. } => contributors,
            Told::All | Told::Lost => 0,
        }
    }
}
