//! A membership of a core that ends when the next begins.

#![forbid(unsafe_code)]

use super::sending::Results;
use super::{Receiving, Report, Shard};
use crate::entry::{Groups, NumberSet, Turnouts};
use bps_engine::base::{Epoch, Rank, word};
use bps_engine::proto::store::Store;
use bps_engine::transport::LaneId;
use bps_engine::wire::missing_by_rank;
use std::sync::Arc;
use std::time::Duration;

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

/// A membership to come.
pub(super) struct Next {
    epoch: Epoch,
    groups: Arc<Groups>,
    /// When it begins at the latest.
    until: Duration,
}

impl Shard {
    /// Ends this membership: the next one begins once all lanes have closed. Until then nothing of
    /// this one is taken, sent or told.
    pub(super) fn begin(&mut self, epoch: Epoch, groups: Arc<Groups>) {
        for index in 0..self.sessions.len() {
            if let Some(session) = &mut self.sessions[index] {
                session.receiving = Receiving::Closing;
                session.goodbye = true;
                self.endpoint.close(LaneId(word(index)));
            }
        }
        self.due.clear();
        self.next = Some(Next { epoch, groups, until: self.now + CLOSE });
        self.begin_if_closed();
    }

    /// Begins the next membership, if there is one to come: the kernel may read accumulators until
    /// every lane of this one has closed.
    pub(super) fn begin_if_closed(&mut self) {
        let Some(next) = self.next.take() else { return };
        if self.sessions.iter().any(Option::is_some) {
            if self.now < next.until {
                self.next = Some(next);
                return;
            }
            // The memory that they may still read can't be used again: the job ends.
            let open = self.sessions.iter().flatten().map(|session| session.rank);
            let error = LanesOpen { core: self.core, ranks: open.collect() };
            return self.report(Report::Failed { message: error.to_string() });
        }
        (self.epoch, self.groups) = (next.epoch, next.groups);
        self.sets.clear();
        self.apart.clear();
        self.index.clear();
        self.entries.clear();
        self.vacant.clear();
        self.results = Results::default();
        self.turnouts = Turnouts::new(&self.groups);
        if let Err(error) = self.arena.release_all() {
            self.report(Report::Failed { message: error.to_string() });
        }
        self.checksums = false;
        self.lanes.clear();
        self.lanes.resize(self.groups.ranks() as usize, None);
        self.left = NumberSet::new(self.groups.ranks());
        self.stalls_told = false;
        self.report(Report::Begun { epoch: self.epoch });
        for (link, rank, epoch) in std::mem::take(&mut self.early) {
            self.attach(link, rank, epoch);
        }
    }

    /// Rounds go on without these ranks, which have died: nothing of them is taken any more.
    pub(super) fn shrink(&mut self, gone: &[Rank]) {
        let before = self.groups.gone().len();
        let by_rank = missing_by_rank(self.groups.ranks());
        let without = |groups: &mut Arc<Groups>| *groups = Arc::new(groups.without(gone, by_rank));
        without(&mut self.groups);
        self.sets.values_mut().for_each(without);
        self.apart.values_mut().for_each(without);
        for rank in gone.iter().skip(before) {
            let Some(&Some(lane)) = self.lanes.get(rank.0 as usize) else { continue };
            let Some(session) = &mut self.sessions[lane.0 as usize] else { continue };
            if let Receiving::Parked { entry, .. } = session.receiving {
                let behind = session.behind.take();
                self.unpark(lane, entry, behind);
                self.withdraw(entry, lane, *rank);
                super::session(&mut self.sessions, lane).begun = None;
            }
            let session = super::session(&mut self.sessions, lane);
            (session.receiving, session.goodbye) = (Receiving::Closing, true);
            self.endpoint.close(lane);
        }
        for index in 0..self.entries.len() {
            let entry = &self.entries[index];
            // A place of a key that was forgotten is nobody's.
            if self.index.get(&entry.key) != Some(&index) {
                continue;
            }
            let members = entry.groups().members();
            let is_apart = entry.store().is_some_and(Store::is_apart);
            let groups = match (is_apart, members.is_all()) {
                (true, _) => &self.apart[members],
                (false, true) => &self.groups,
                (false, false) => &self.sets[members],
            };
            self.entries[index].lose(groups);
            self.go_on(index);
        }
    }

    /// What was coming of this rank does not come. If the sum has some of it, the ranks that live
    /// contribute once more.
    pub(super) fn withdraw(&mut self, index: usize, lane: LaneId, rank: Rank) {
        if !self.entries[index].withdraw(lane, rank) {
            return;
        }
        self.counters.rounds_anew.add(1);
        let mut from = Rank(0);
        while let Some(rank) = self.entries[index].take_back(from) {
            from = Rank(rank.0 + 1);
            // A rank whose lane is gone is dead.
            let Some(Some(lane)) = self.lanes.get(rank.0 as usize).copied() else { continue };
            super::session(&mut self.sessions, lane).outgoing.ask(index);
            self.flush(lane);
        }
    }

    /// A key may wait for less than before.
    pub(super) fn go_on(&mut self, index: usize) {
        self.publish_if_whole(index);
        self.next_in_line(index);
        self.forget_if_over(index);
    }
}
