//! A seeded network in memory, for tests: virtual time, random delays, splits, backpressure and
//! loss.
//!
//! The harness and the tests use it; nothing else does. The same seed and the same calls give the
//! same run. Each direction of a link is a stream of bytes, as in TCP, and the simulator is as
//! unkind as the [contract](super) lets it be: it reads a posted payload bit by bit and as late as
//! it likes before `Sent`, writes a landing in splits, poisons a piece once it is consumed,
//! overwrites the rest of a landing that a close has cut short, and loses what is unread when its
//! reader's peer resets.
//!
//! Time stands still unless somebody moves it: [`SimNetwork::advance`], or `block`, which takes one
//! step. A loop that never blocks needs a test that advances.

mod end;
mod network;
mod random;

pub use network::{SimLink, SimNetwork};
pub use random::Random;

use super::{Driver, Event, Frame, Full, Landing, LaneId, Link, Room};
use crate::base::word;
use network::Place;
use std::io;
use std::time::Duration;

/// One node's view of a simulated network. Dropping it is a death: its links end without a word.
pub struct Sim {
    network: SimNetwork,
    lanes: Vec<Option<Place>>,
}

impl Sim {
    /// A node of this network.
    #[must_use]
    pub fn new(network: SimNetwork) -> Sim {
        Sim { network, lanes: Vec::new() }
    }

    fn place(&self, lane: LaneId) -> Option<Place> {
        self.lanes.get(lane.0 as usize).copied().flatten()
    }
}

impl Drop for Sim {
    fn drop(&mut self) {
        let mut state = self.network.state();
        for place in self.lanes.iter().flatten() {
            state.leave(*place);
        }
    }
}

impl Driver for Sim {
    fn takes(&self, link: &Link) -> bool {
        matches!(link, Link::Sim(_))
    }

    fn attach(&mut self, lane: LaneId, link: Link) -> io::Result<()> {
        let Link::Sim(mut link) = link else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a simulated link"));
        };
        if self.place(lane).is_some() {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                format!("{lane:?} is in use"),
            ));
        }
        let index = lane.0 as usize;
        if self.lanes.len() <= index {
            self.lanes.resize(index + 1, None);
        }
        link.attached = true;
        self.lanes[index] = Some(link.place);
        Ok(())
    }

    fn post(&mut self, lane: LaneId, frame: &Frame) -> Result<(), Full> {
        let place = self.place(lane).ok_or(Full)?;
        self.network.state().post(place, frame)
    }

    fn land(&mut self, lane: LaneId, landing: Landing) {
        if let Some(place) = self.place(lane) {
            self.network.state().end(place).land(landing);
        }
    }

    fn consume(&mut self, lane: LaneId) {
        if let Some(place) = self.place(lane) {
            self.network.state().end(place).consume();
        }
    }

    fn close(&mut self, lane: LaneId) {
        if let Some(place) = self.place(lane) {
            self.network.state().close(place);
        }
    }

    fn poll(&mut self, events: &mut Vec<Event>) {
        let mut events = Room::new(events);
        let mut state = self.network.state();
        let count = self.lanes.len();
        let first = state.random.index(count);
        for index in (first..count).chain(0..first) {
            let Some(place) = self.lanes[index] else { continue };
            let lane = LaneId(word(index));
            let mut random = state.random.fork();
            if !state.end(place).poll(lane, &mut events, &mut random) {
                self.lanes[index] = None;
            }
            // What was read has made room for the peer's next bytes.
            state.start(place.peer());
        }
    }

    /// Moves the network's time on by one step, or by the timeout if nothing happens before. Sleeps
    /// never: who waits for another thread yields to it.
    fn block(&mut self, timeout: Duration) {
        self.network.advance_within(timeout);
        std::thread::yield_now();
    }
}

#[cfg(test)]
mod tests;
