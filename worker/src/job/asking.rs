//! What callers ask the scheduler for, and how they wait while there is none.

use super::agent::Agent;
use super::{Job, LOOK};
use crate::base::error::Error;
use crate::base::lock;
use bps_engine::proto::messages::NodeMessage;
use bps_engine::trace::log;
use std::time::{Duration, Instant};

/// When it is said once more that something waits; again after twice that, and so on.
const REPORT: Duration = Duration::from_secs(4);

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
        let (begun, mut told) = (Instant::now(), None);
        while lock(&self.agent).is_away() {
            let waited = begun.elapsed();
            if told.is_none_or(|next| waited >= next) {
                let what = if suspend { "suspend" } else { "the good-bye of this rank" };
                log::warning!("{what} waits for a scheduler ({} s)", waited.as_secs());
                told = Some(REPORT.max(2 * waited));
            }
            std::thread::sleep(LOOK);
        }
        if lock(&self.agent).is_forsaken() {
            log::warning!("no scheduler has come: this rank has done its work, and ends");
        }
    }
}
