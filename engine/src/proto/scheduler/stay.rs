//! A scheduler that outlives a generation of ranks: those that have all shut down may start again,
//! as after a suspend, until somebody who knows says that none will.

use super::{OverReason, Phase, Scheduler, Standing};

impl Scheduler {
    /// No rank will come any more: the job is over once those that are here have left.
    pub fn handle_last_generation(&mut self) {
        self.config.stays = false;
        let has_worker =
            self.peers.values().any(|peer| matches!(peer.standing, Standing::Worker(_)));
        if matches!(self.phase, Phase::Forming(_)) && !has_worker {
            self.end(OverReason::Finished, None);
        }
    }

    /// Whether all ranks have left, may come back, and none has yet.
    pub(super) fn is_between_generations(&self) -> bool {
        match &self.phase {
            Phase::Forming(rendezvous) => self.config.stays && rendezvous.is_unclaimed(),
            _ => false,
        }
    }
}
