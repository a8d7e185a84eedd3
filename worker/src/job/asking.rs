//! What callers ask the scheduler for, and how they wait while there is none.

use super::agent::Agent;
use super::{Job, LOOK};
use crate::base::error::Error;
use crate::base::lock;
use bps_engine::proto::messages::NodeMessage;
use bps_engine::trace::log;

impl Job {
    /// Sends what the agent asks for. It is asked again if there is no scheduler now, so this and
    /// the going over to another one exclude each other.
    pub(super) fn ask(
        &self,
        ask: impl FnOnce(&mut Agent) -> (u64, NodeMessage),
    ) -> Result<u64, Error> {
        let mut agent = lock(&self.agent);
        let (request, message) = ask(&mut agent);
        match self.send(&message) {
            Err(Error::PeerDied(_)) if agent.outlasts() => Ok(request),
            sent => sent.map(|()| request),
        }
    }

    /// A good-bye waits for a scheduler, too, which would take this rank for dead without. If none
    /// comes, the rank ends all the same: its work is done.
    pub(super) fn wait_for_scheduler(&self, suspend: bool) {
        let mut told = false;
        while lock(&self.agent).is_away() {
            if !std::mem::replace(&mut told, true) {
                let what = if suspend { "suspend" } else { "the good-bye of this rank" };
                log::warning!("{what} waits for a scheduler");
            }
            std::thread::sleep(LOOK);
        }
        if told && lock(&self.answers.0).over.is_some() {
            log::warning!("no scheduler has come: this rank has done its work, and ends");
        }
    }
}
