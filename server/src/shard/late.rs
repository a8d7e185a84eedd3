//! Rounds that do not wait for slow ranks: when they are closed, and what becomes of contributions
//! that come later. Those are read and dropped without a turn at their key, and answered with what
//! the key keeps of their round.

#![forbid(unsafe_code)]

use super::{Receiving, Shard, session};
use crate::entry::KeptPlace;
use bps_engine::trace::timeline::Mark;
use bps_engine::transport::{Landing, LaneId};
use bps_engine::wire::Header;
use bps_engine::wire::header::FLAG_PAYLOAD_CHECKSUM;
use std::cmp::Reverse;
use std::time::Duration;

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Shard {
    /// Sees who has contributed to a round that is not whole, and notes when to close it.
    pub(super) fn see(&mut self, index: usize) {
        if let Some(due) = self.entries[index].see(self.now) {
            self.due.push(Reverse((due, index)));
        }
    }

    /// Closes rounds that have waited for slow ranks long enough. Returns whether there were any.
    pub(super) fn close_due(&mut self) -> bool {
        let mut any = false;
        while let Some(&Reverse((due, index))) = self.due.peek() {
            if due > self.now {
                break;
            }
            self.due.pop();
            any = true;
            // The round may be over, and the place another key's: they know.
            self.entries[index].expire(self.now);
            if self.index.get(&self.entries[index].key) == Some(&index) {
                self.go_on(index);
            }
        }
        any
    }

    /// Lets the payload of a contribution come whose round is closed.
    pub(super) fn take_late(&mut self, lane: LaneId, index: usize, header: Header) {
        self.entries[index].come_late(header.rank);
        let checked = header.flags & FLAG_PAYLOAD_CHECKSUM != 0;
        self.checksums |= checked;
        let session = session(&mut self.sessions, lane);
        session.checks |= checked;
        session.receiving =
            Receiving::Payload { entry: index, header, done: 0, checksum: 0, is_late: true };
        self.endpoint.land(lane, Landing::Pieces(header.length as usize));
    }

    /// A contribution has come whose round is closed: it gets that round's result.
    pub(super) fn answer_late(&mut self, lane: LaneId, index: usize, header: &Header) {
        self.trace.frame(Mark::Ended, header);
        let entry = &mut self.entries[index];
        let (place, saved) = entry.answer_late(header.rank, header.round.0, self.now);
        self.counters.late.add(1);
        self.counters.saved_ns.add(saved.map_or(0, nanoseconds));
        session(&mut self.sessions, lane).outgoing.owe(index, place);
        self.flush(lane);
    }

    /// A round is about to be closed whose result is made.
    pub(super) fn keep_result(&mut self, index: usize) {
        let entry = &mut self.entries[index];
        let waited = entry.keep_result(self.now);
        self.counters.awaited_ns.add(nanoseconds(waited));
    }

    /// A publication of what a key keeps is no longer read.
    pub(super) fn kept_sent(&mut self, index: usize, place: KeptPlace) {
        self.entries[index].kept_sent(place);
        // A place may have become free for the next short round.
        self.go_on(index);
    }
}
