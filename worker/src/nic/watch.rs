//! What the NIC loop notices about itself a few times a second: gauges, and results that do not
//! come.

use super::{Nic, NicStatistics, Peer, Receiving, Report, RunPart, Stage};
use bps_engine::proto::paths::{AwaitedKey, PATH_KEYS_MAX};

impl NicStatistics {
    /// A frame with or without a payload was posted.
    #[inline]
    pub(super) fn posted(&self, length: usize) {
        self.counters.frames_out.add(1);
        self.counters.bytes_out.add(length as u64);
    }
}

impl Nic {
    /// Brings the gauges among its counters up to date: a few times a second, not in each turn.
    pub fn sample(&self) {
        let counters = &self.statistics.counters;
        counters.queued.set((self.queue.len() + self.gathered.len()) as u64);
        counters.lanes.set(self.lanes.iter().filter(|lane| lane.open).count() as u64);
        counters.keys.set(self.tensors.iter().flatten().count() as u64);
    }

    /// A part's contribution is on its way to its server.
    #[inline]
    pub(super) fn note_asked(&mut self, of: RunPart) {
        let tensor = self.runs[of.run as usize].tensor as usize;
        if let Some(Some(tensor)) = self.tensors.get_mut(tensor) {
            tensor.asked[of.part as usize] = self.now;
        }
    }

    /// Reports what servers owe this rank. Half of the report time is enough: the scheduler asks
    /// the servers how far they are, and knows for whom to wait when it is time to say so.
    pub(super) fn look_for_results(&mut self) {
        if self.over.is_some() || self.leaving {
            return;
        }
        let mut keys: Vec<AwaitedKey> = Vec::new();
        for tensor in self.tensors.iter().flatten().filter(|tensor| tensor.run.is_some()) {
            for (at, part) in tensor.plan.parts.iter().enumerate() {
                let Some(lane) = part.core.filter(|_| part.owner.is_none()) else { continue };
                let lane = &self.lanes[lane.0 as usize];
                let run = tensor.run;
                let is_landing = matches!(
                    lane.receiving,
                    Receiving::Landing { part, .. }
                        if Some(part.run) == run && part.part as usize == at
                );
                let is_asked = matches!(tensor.stages[at], Stage::Asked | Stage::Granted);
                let waited = self.now.saturating_sub(tensor.asked[at]);
                let Peer::Server(server) = lane.peer else { continue };
                if (is_asked || is_landing) && waited >= self.config.stall_report / 2 {
                    let waited_ms = u64::try_from(waited.as_millis()).unwrap_or(u64::MAX);
                    let (key, round) = (part.key, tensor.round);
                    keys.push(AwaitedKey { key, round, server, waited_ms });
                }
            }
        }
        if keys.is_empty() && !self.awaits_told {
            return;
        }
        keys.sort_by_key(|key| std::cmp::Reverse(key.waited_ms));
        keys.truncate(PATH_KEYS_MAX);
        self.awaits_told = !keys.is_empty();
        self.report(Report::Awaiting { keys });
    }
}
