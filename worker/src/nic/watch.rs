//! What the NIC loop counts of itself, beside what it does in each turn.

use super::{Nic, NicStatistics};

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
}
