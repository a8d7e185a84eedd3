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

pub use network::{Random, SimLink, SimNetwork};

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

    fn land(&mut self, lane: LaneId, landing: Landing, length: usize) {
        if let Some(place) = self.place(lane) {
            self.network.state().end(place).land(landing, length);
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
mod tests {
    use super::*;
    use crate::transport::Cause;
    use std::fmt::Write as _;

    const FRAMES: usize = 40;

    /// What a run looks like from outside, addresses left out.
    fn describe(log: &mut String, network: &SimNetwork, event: &Event) {
        let what = match event {
            Event::Header { lane, header, .. } => format!("{lane:?} header {}", header[0]),
            Event::Landed { lane } => format!("{lane:?} landed"),
            Event::Piece { lane, length, .. } => format!("{lane:?} piece {length}"),
            Event::Sent { lane, token } => format!("{lane:?} sent {token}"),
            Event::Answered { .. } => panic!("nothing was granted"),
            Event::Closed { lane, cause } => format!("{lane:?} closed {cause:?}"),
        };
        let _ = writeln!(log, "{:?} {what}", network.now());
    }

    /// Sends frames over two lanes until they have all landed, or the lanes have closed if `loss`
    /// breaks them.
    fn exchange(seed: u64, loss: Option<u64>) -> String {
        let network = SimNetwork::new(seed);
        let (mut left, mut right) = (Sim::new(network.clone()), Sim::new(network.clone()));
        for lane in 0..2 {
            let (one, other) = network.link();
            left.attach(LaneId(lane), Link::Sim(one)).unwrap();
            right.attach(LaneId(lane), Link::Sim(other)).unwrap();
        }
        network.lose(loss);
        let payload: Vec<u8> = (0..100_000u32).map(|index| index.to_le_bytes()[0]).collect();
        let mut landings = vec![vec![0u8; payload.len()]; 2];
        let mut posted = [0; 2];
        let mut landed = [0; 2];
        let (mut log, mut events, mut closed) = (String::new(), Vec::new(), 0);
        loop {
            for lane in 0..2u8 {
                let count = posted[usize::from(lane)];
                let (at, length) = (payload.as_ptr(), count * 2_500);
                let frame = Frame::new([lane; 64], at, length, count as u64);
                if count < FRAMES && left.post(LaneId(lane.into()), &frame).is_ok() {
                    posted[usize::from(lane)] += 1;
                }
            }
            left.poll(&mut events);
            right.poll(&mut events);
            let idle = events.is_empty();
            for event in events.drain(..) {
                describe(&mut log, &network, &event);
                match event {
                    Event::Header { lane, header, .. } => {
                        let index = usize::from(header[0]);
                        let target = Landing::Into(landings[index].as_mut_ptr());
                        right.land(lane, target, landed[index] * 2_500);
                        landed[index] += usize::from(landed[index] == 0);
                    }
                    Event::Landed { lane } => {
                        let index = lane.0 as usize;
                        let length = landed[index] * 2_500;
                        assert_eq!(landings[index][..length], payload[..length]);
                        landed[index] += 1;
                    }
                    Event::Closed { cause, .. } => {
                        assert!(loss.is_some() && cause != Cause::Local);
                        closed += 1;
                    }
                    Event::Sent { .. } | Event::Piece { .. } | Event::Answered { .. } => {}
                }
            }
            if !network.advance() && idle {
                break;
            }
        }
        let complete = landed.iter().filter(|count| **count == FRAMES).count();
        assert!(closed % 2 == 0 && closed / 2 + complete >= 2, "{closed} {landed:?}");
        log
    }

    #[test]
    fn a_seed_gives_one_run_and_another_seed_another() {
        assert_eq!(exchange(7, None), exchange(7, None));
        assert_ne!(exchange(7, None), exchange(8, None));
        assert_eq!(exchange(7, Some(20)), exchange(7, Some(20)));
    }

    #[test]
    fn lanes_overtake_each_other_and_losses_end_both_ends() {
        let mut firsts = std::collections::BTreeSet::new();
        for seed in 0..20 {
            let log = exchange(seed, None);
            let first = log.lines().find(|line| line.contains("landed")).map(str::to_owned);
            firsts.insert(first.is_some_and(|line| line.contains("LaneId(0)")));
            let lost = exchange(seed, Some(3));
            assert_eq!(lost.matches("closed").count(), 4, "seed {seed}: {lost}");
        }
        assert_eq!(firsts.len(), 2, "one lane came first under every seed");
    }
}
