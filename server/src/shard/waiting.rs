//! Lanes whose payload waits until their key is free.

#![forbid(unsafe_code)]

use super::{Receiving, Shard, session};
use bps_engine::transport::LaneId;
use bps_engine::wire::Header;

impl Shard {
    /// Puts a lane at the end of those that wait for this key.
    pub(super) fn park(&mut self, lane: LaneId, index: usize, header: Header) {
        let entry = &mut self.entries[index];
        let before = entry.waiting.map(|(_, last)| last);
        entry.waiting = Some((entry.waiting.map_or(lane, |(first, _)| first), lane));
        if let Some(before) = before {
            session(&mut self.sessions, before).behind = Some(lane);
        }
        session(&mut self.sessions, lane).receiving = Receiving::Parked { entry: index, header };
    }

    /// Lets the next waiting lane of a key go on, if the key is free.
    pub(super) fn next_in_line(&mut self, index: usize) {
        let entry = &mut self.entries[index];
        if !entry.free() {
            return;
        }
        let Some((lane, last)) = entry.waiting else { return };
        // Lanes of a membership that is over close in any order, and wait for nothing any more.
        let Some(session) = &mut self.sessions[lane.0 as usize] else { return };
        entry.waiting = session.behind.take().map(|behind| (behind, last));
        if let Receiving::Parked { header, .. } = session.receiving {
            self.take(lane, index, header);
        }
    }

    /// Takes a lane that closes out of those that wait for this key; `behind` is the one behind it.
    pub(super) fn unpark(&mut self, lane: LaneId, index: usize, behind: Option<LaneId>) {
        let entry = &mut self.entries[index];
        let (first, last) = entry.waiting.expect("this lane waits for it");
        if first == lane {
            entry.waiting = behind.map(|behind| (behind, last));
            return;
        }
        let mut at = first;
        loop {
            let session = session(&mut self.sessions, at);
            let next = session.behind.expect("this lane is behind another");
            if next == lane {
                session.behind = behind;
                break;
            }
            at = next;
        }
        if last == lane {
            entry.waiting = Some((first, at));
        }
    }
}
