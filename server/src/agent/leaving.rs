//! A server that is told to leave, as by SIGTERM before its machine is taken away.

use super::{Agent, Effect};
use bps_engine::proto::messages::NodeMessage;
use std::time::Duration;

impl Agent {
    /// Asks to be let go within `notice`, if the job can go on without this server. Says whether it
    /// has asked: nobody does twice.
    pub fn leave(&mut self, notice: Duration, now: Duration, effects: &mut Vec<Effect>) -> bool {
        let is_elastic = self.roster.as_ref().is_some_and(|roster| roster.elastic);
        if !is_elastic || self.over || self.leaves_by.is_some() || notice.is_zero() {
            return false;
        }
        self.leaves_by = Some(now + notice);
        effects.push(Effect::Info(format!(
            "SIGTERM: this server leaves when the job can go on without it, within {notice:?} \
             (BPS_LEAVE_NOTICE)"
        )));
        // Without a scheduler the next one is told, when it leads the job.
        if !self.is_away() {
            effects.push(Effect::Send(NodeMessage::Leave { suspend: false }));
        }
        true
    }

    /// Until when it waits to be let go, if it has asked.
    #[must_use]
    pub fn leaves_by(&self) -> Option<Duration> {
        self.leaves_by
    }
}
