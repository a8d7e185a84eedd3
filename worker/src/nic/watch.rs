//! What the NIC loop notices about itself a few times a second: gauges, and results that do not
//! come.

#![forbid(unsafe_code)]

use super::{LanePeer, Nic, NicStatistics, Phase, Report, Stage};
use bps_engine::base::milliseconds;
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
    pub(crate) fn sample(&self, tensors: usize) {
        let counters = &self.statistics.counters;
        counters.queued.set((self.queue.len() + self.gathered.len()) as u64);
        counters.lanes.set(self.lanes.iter().filter(|lane| lane.open).count() as u64);
        counters.keys.set(tensors as u64);
        if let Some(([plain, half, coded], line)) = self.choices() {
            counters.auto_plain.set(plain);
            counters.auto_half.set(half);
            counters.auto_coded.set(coded);
            counters.line_speed.set(line);
        }
    }

    /// Reports what servers owe this rank. Half of the report time is enough: the scheduler asks
    /// the servers how far they are, and knows for whom to wait when it is time to say so.
    pub(super) fn look_for_results(&mut self) {
        if self.phase != Phase::Running {
            return;
        }
        let mut keys: Vec<AwaitedKey> = Vec::new();
        for part in self.parts.iter().filter(|part| part.is_open() && part.plan.owner.is_none()) {
            let Some(lane) = part.plan.core else { continue };
            let LanePeer::Server(server) = self.lane(lane).peer else { continue };
            let is_asked = matches!(part.stage, Stage::Asked | Stage::Granted | Stage::Landing);
            let waited = self.now.saturating_sub(part.asked);
            if is_asked && waited >= self.config.stall_report / 2 {
                let waited_ms = milliseconds(waited);
                let (key, round) = (part.plan.key, part.round);
                keys.push(AwaitedKey { key, round, server, waited_ms });
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
