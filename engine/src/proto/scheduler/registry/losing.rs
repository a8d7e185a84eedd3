//! What of the registry hangs on a rank that has died, where the others go on without it.

use super::{Rank, Registry, Reply};
use crate::proto::messages::Declaration;
use crate::proto::store::Store;
use std::fmt;

/// Why the others can't go on without a rank: what it did for them nobody can do now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::proto::scheduler) enum Needed {
    /// No server takes part: ranks gave it their contributions, or had theirs from it.
    Group,
    /// Rounds of some tensors are whole or nothing: an optimizer steps once, and what each rank
    /// encodes as it likes is not added apart.
    All,
    /// It was to give the first value of a tensor that servers store.
    Root,
}

impl fmt::Display for Needed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Needed::Group => "it summed with other ranks of its host",
            Needed::All => "there are tensors with an optimizer, or encoded as `auto`",
            Needed::Root => "stored tensors begin with its value",
        })
    }
}

impl Registry {
    /// The ranks that sum with this one before servers do, itself among them.
    pub(in crate::proto::scheduler) fn host_of(&self, rank: Rank) -> &[Rank] {
        self.groups.members_with(rank)
    }

    /// Why the others can't go on without these ranks, [a whole host](Self::host_of), if so.
    pub(in crate::proto::scheduler) fn needs(&self, ranks: &[Rank]) -> Option<Needed> {
        if !self.through_servers {
            return Some(Needed::Group);
        }
        let said = || self.tensors.iter().map(|tensor| &tensor.said);
        let chooses = |said: &Declaration| said.encoding.is_some_and(|encoding| encoding.auto);
        if said().any(|said| chooses(said) || said.store.and_then(Store::optimizer).is_some()) {
            return Some(Needed::All);
        }
        let deltas = |said: &Declaration| said.store.and_then(Store::deltas);
        let is_root =
            said().any(|said| deltas(said).is_some_and(|deltas| ranks.contains(&deltas.root)));
        is_root.then_some(Needed::Root)
    }

    /// The others go on without this rank: nobody waits for what it would have declared.
    pub(in crate::proto::scheduler) fn lose(&mut self, rank: Rank) -> Vec<Reply> {
        self.forget(rank);
        self.gone.push(rank);
        let over: Vec<(u32, u64)> =
            self.names.values_mut().flat_map(|name| name.eras.lose(rank)).collect();
        let mut replies = Vec::new();
        self.retire(&over, &mut replies);
        replies
    }
}
