//! Links between two ranks, each of which takes its end when it is formed.

use bps_engine::base::Rank;
use bps_engine::transport::sim::{SimLink, SimNetwork};
use std::collections::HashMap;

/// Ends for whichever of two ranks is formed later: by its rank and the other.
#[derive(Default)]
pub(super) struct Ends(HashMap<(Rank, Rank), SimLink>);

impl Ends {
    /// This rank's end of its link to another.
    pub(super) fn meet(&mut self, network: &SimNetwork, own: Rank, other: Rank) -> SimLink {
        self.0.remove(&(own, other)).unwrap_or_else(|| {
            let (mine, theirs) = network.link();
            self.0.insert((other, own), theirs);
            mine
        })
    }
}
