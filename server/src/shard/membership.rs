//! What changes at a core between rounds: keys that are installed, and a membership that ends when
//! the next begins.

use super::{Receiving, Report, Shard};
use crate::entry::{Entry, Groups, NumberSet, accumulator_bytes};
use bps_engine::base::{Epoch, Rank};
use bps_engine::limits::{ALIGNMENT, EVENTS_MAX};
use bps_engine::proto::messages::KeySpec;
use bps_engine::trace::log;
use bps_engine::transport::{Event, LaneId};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// So many bytes may take a second.
const SLOW_BYTES: usize = 1 << 30;
/// How long lanes may take to close once they were told to.
const CLOSE: Duration = Duration::from_secs(10);

/// Lanes of a membership that is over did not close.
#[derive(Debug, thiserror::Error)]
#[error(
    "core {core}: the lanes of {} did not close within {} s, so their memory can't be used again: \
     a device or the kernel hangs; start this server again",
    names(ranks),
    CLOSE.as_secs()
)]
struct LanesOpen {
    core: u32,
    ranks: Vec<Rank>,
}

fn names(ranks: &[Rank]) -> String {
    let names: Vec<String> = ranks.iter().map(Rank::to_string).collect();
    names.join(", ")
}

impl Shard {
    pub(super) fn install(&mut self, keys: &[KeySpec]) -> Result<(), String> {
        let bytes = keys.iter().map(|spec| accumulator_bytes(spec).next_multiple_of(ALIGNMENT));
        self.prepare(bytes.sum())?;
        for spec in keys {
            if self.index.contains_key(&spec.key) {
                return Err(format!("{} was installed twice", spec.key));
            }
            let accumulator = self
                .arena
                .claim(accumulator_bytes(spec))
                .map_err(|error| format!("no memory for {}: {error}", spec.key))?;
            self.index.insert(spec.key, self.entries.len());
            self.entries.push(Entry::new(spec, &self.groups, accumulator));
        }
        let (base, bytes) = (NonNull::new(self.arena.base()), self.arena.resident_bytes());
        if let (Some(rdma), Some(base)) = (self.endpoint.rdma(), base) {
            // SAFETY: below its resident bytes the arena is mapped, and the endpoint is dropped
            // before it.
            if let Err(error) = unsafe { rdma.register(base, bytes) } {
                log::warning!("publications are copied before a device sends them: {error}");
            }
        }
        let room = self.entries.len();
        for session in self.sessions.iter_mut().flatten() {
            session.outbox.reserve(room - session.outbox.len().min(room));
            session.sending.reserve(room - session.sending.len().min(room));
            session.grants.resize(room, None);
        }
        Ok(())
    }

    /// Takes the pages of all accumulators at once, with a line where that takes a while.
    fn prepare(&mut self, bytes: usize) -> Result<(), String> {
        let start = Instant::now();
        let gigabytes = bytes as f64 / 1e9;
        if bytes >= SLOW_BYTES {
            log::info!("core {}: takes {gigabytes:.1} GB for declared tensors", self.core);
        }
        self.arena.prepare(bytes).map_err(|error| format!("no memory for tensors: {error}"))?;
        if bytes >= SLOW_BYTES {
            let seconds = start.elapsed().as_secs_f64();
            log::info!("core {}: has the {gigabytes:.1} GB after {seconds:.1} s", self.core);
        }
        Ok(())
    }

    pub(super) fn begin(&mut self, epoch: Epoch, groups: Arc<Groups>) {
        for index in 0..self.sessions.len() {
            if let Some(session) = &mut self.sessions[index] {
                session.receiving = Receiving::Closing;
                session.goodbye = true;
                self.endpoint.close(LaneId(u32::try_from(index).unwrap_or(u32::MAX)));
            }
        }
        if let Err(error) = self.wait_for_lanes() {
            // The memory that they may still read can't be used again: the job ends.
            return self.report(Report::Failed { message: error.to_string() });
        }
        self.epoch = epoch;
        self.groups = groups;
        self.index.clear();
        self.entries.clear();
        if let Err(error) = self.arena.release_all() {
            self.report(Report::Failed { message: error.to_string() });
        }
        self.checksums = false;
        self.lanes.clear();
        self.lanes.resize(self.groups.ranks() as usize, None);
        self.left = NumberSet::new(self.groups.ranks());
        for (link, rank, epoch) in std::mem::take(&mut self.early) {
            self.attach(link, rank, epoch);
        }
    }

    /// The kernel may still read accumulators until every lane of the old membership has closed.
    fn wait_for_lanes(&mut self) -> Result<(), LanesOpen> {
        let mut events = Vec::with_capacity(EVENTS_MAX);
        let start = Instant::now();
        while self.sessions.iter().any(Option::is_some) {
            self.endpoint.poll(&mut events);
            for event in events.drain(..) {
                if let Event::Closed { lane, .. } = event {
                    self.sessions[lane.0 as usize] = None;
                }
            }
            if start.elapsed() >= CLOSE {
                let open = self.sessions.iter().flatten().map(|session| session.rank);
                return Err(LanesOpen { core: self.core, ranks: open.collect() });
            }
        }
        Ok(())
    }
}
