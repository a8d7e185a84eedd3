//! The simulated network itself: connections, and the agenda of what happens when.

#![forbid(unsafe_code)]

use super::end::{End, Post};
use super::random::Random;
use crate::base::nanoseconds;
use crate::limits::LANE_FRAMES_MAX;
use crate::transport::{Cause, Frame, Full};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Largest part of a stream that travels as one.
const CHUNK_BYTES_MAX: usize = 64 << 10;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Place {
    pub(super) connection: usize,
    pub(super) end: usize,
}

impl Place {
    pub(super) fn peer(self) -> Place {
        Place { end: 1 - self.end, ..self }
    }
}

/// What the network does when the time comes.
pub(super) enum Action {
    /// Takes the next bytes of the frames posted at this end.
    Pump(Place),
    /// Brings the oldest bytes under way from this end to its peer; no bytes mean that the stream
    /// is over.
    Arrive(Place),
    /// Gives the oldest frame that is wholly under way back to this end.
    Sent(Place),
    /// Ends this end.
    End(Place, Option<Cause>),
    /// Breaks a connection.
    Cut(usize),
}

struct Connection {
    ends: [End; 2],
    window: usize,
    /// Nothing travels any more.
    broken: bool,
    /// What these ends send is lost, and nobody is told.
    muted: [bool; 2],
    /// How long an end that is muted waits for an acknowledgement, if it has a deadline.
    patience: Option<u64>,
}

pub(super) struct State {
    now: u64,
    pub(super) random: Random,
    sequence: u64,
    agenda: BTreeMap<(u64, u64), Action>,
    connections: Vec<Connection>,
    loss_one_in: Option<u64>,
}

/// The network; clones are the same one.
#[derive(Clone)]
pub struct SimNetwork(Arc<Mutex<State>>);

/// One end of a simulated link, not yet attached. Dropping it closes the link.
pub struct SimLink {
    pub(super) network: SimNetwork,
    pub(super) place: Place,
    pub(super) attached: bool,
}

impl SimLink {
    /// The number of the connection, for [`SimNetwork::cut`]. Both ends have the same.
    #[must_use]
    pub fn connection(&self) -> usize {
        self.place.connection
    }
}

impl Drop for SimLink {
    fn drop(&mut self) {
        if !self.attached {
            self.network.state().leave(self.place);
        }
    }
}

impl SimNetwork {
    /// A network whose every choice follows from `seed`.
    #[must_use]
    pub fn new(seed: u64) -> SimNetwork {
        SimNetwork(Arc::new(Mutex::new(State {
            now: 0,
            random: Random::new(seed),
            sequence: 0,
            agenda: BTreeMap::new(),
            connections: Vec::new(),
            loss_one_in: None,
        })))
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new connection: its two ends.
    #[must_use]
    pub fn link(&self) -> (SimLink, SimLink) {
        let mut state = self.state();
        let window = 4096usize << state.random.below(9);
        state.connections.push(Connection {
            ends: [End::new(), End::new()],
            window,
            broken: false,
            muted: [false; 2],
            patience: None,
        });
        let connection = state.connections.len() - 1;
        let link = |end| SimLink {
            network: self.clone(),
            place: Place { connection, end },
            attached: false,
        };
        (link(0), link(1))
    }

    /// The virtual time since the network began.
    #[must_use]
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.state().now)
    }

    /// Moves the time to the next thing that happens. Returns false when nothing is in flight: then
    /// only a caller (by `post`, `land`, `consume` or `close`, and `poll`) can make anything
    /// happen.
    pub fn advance(&self) -> bool {
        self.state().step(u64::MAX)
    }

    /// Moves the time on by `duration`, past everything that happens meanwhile.
    pub fn advance_by(&self, duration: Duration) {
        let mut state = self.state();
        let until = state.now.saturating_add(nanoseconds(duration));
        while state.step(until) {}
        state.now = until;
    }

    /// Takes one step, or moves the time on by `timeout` if nothing happens before.
    pub fn advance_within(&self, timeout: Duration) {
        let mut state = self.state();
        let until = state.now.saturating_add(nanoseconds(timeout));
        if !state.step(until) {
            state.now = until;
        }
    }

    /// Breaks a connection as a pulled cable does: what is under way is lost, and both ends close.
    pub fn cut(&self, connection: usize) {
        self.state().cut(connection);
    }

    /// From now on nothing that the first or the second end of a connection sends arrives. It sees
    /// its frames sent all the same, and closes once nothing was acknowledged for so long, if it
    /// has such a deadline. The other end is told nothing.
    pub fn mute(&self, connection: usize, end: usize, patience: Option<Duration>) {
        let mut state = self.state();
        let connection = &mut state.connections[connection];
        connection.muted[end] = true;
        connection.patience = patience.map(nanoseconds);
    }

    /// From now on one frame in `one_in` breaks its connection somewhere on its way; `None` ends
    /// that.
    pub fn lose(&self, one_in: Option<u64>) {
        self.state().loss_one_in = one_in;
    }
}

impl State {
    pub(super) fn end(&mut self, place: Place) -> &mut End {
        &mut self.connections[place.connection].ends[place.end]
    }

    pub(super) fn plan(&mut self, at: u64, action: Action) {
        self.sequence += 1;
        self.agenda.insert((at.max(self.now), self.sequence), action);
    }

    /// Mostly microseconds, now and then milliseconds: a lane must be able to overtake any other.
    pub(super) fn delay(&mut self) -> u64 {
        let bound = if self.random.once_in(16) { 5_000_000 } else { 100_000 };
        self.random.below(bound)
    }

    /// Does the next thing that is due until then.
    fn step(&mut self, until: u64) -> bool {
        match self.agenda.first_entry() {
            Some(entry) if entry.key().0 <= until => {
                let ((at, _), action) = entry.remove_entry();
                self.now = at;
                self.act(&action);
                true
            }
            _ => false,
        }
    }

    fn act(&mut self, action: &Action) {
        match *action {
            Action::Pump(place) => self.pump(place),
            Action::Arrive(place) => {
                let end = self.end(place);
                let Some(bytes) = end.wire.pop_front() else { return };
                end.wire_bytes -= bytes.len();
                if self.connections[place.connection].muted[place.end] {
                    return self.lose(place);
                }
                let peer = self.end(place.peer());
                peer.finished |= bytes.is_empty();
                if peer.open {
                    peer.inbox.extend(bytes);
                }
            }
            Action::Sent(place) => {
                let end = self.end(place);
                if let Some(token) = end.taken.pop_front() {
                    end.sent.push_back(token);
                }
            }
            Action::Cut(connection) => self.cut(connection),
            Action::End(place, cause) => {
                let cause = cause.unwrap_or_else(|| self.end(place).cause_of_end());
                self.end(place).finish(cause);
            }
        }
    }

    /// Bytes of a muted end are lost: it closes when it has waited for long enough.
    fn lose(&mut self, place: Place) {
        let patience = &mut self.connections[place.connection].patience;
        if let Some(patience) = patience.take() {
            // For readers: 49 days and more are told as that.
            let milliseconds = u32::try_from(patience / 1_000_000).unwrap_or(u32::MAX);
            let cause = Cause::Unacknowledged { milliseconds };
            self.plan(self.now + patience, Action::End(place, Some(cause)));
        }
        self.start(place);
    }

    /// Bytes that may be sent from this end before its peer reads some.
    fn room(&mut self, place: Place) -> usize {
        let used = self.end(place.peer()).inbox.len() + self.end(place).wire_bytes;
        self.connections[place.connection].window.saturating_sub(used)
    }

    /// Wakes the pump of this end if it has something to do.
    pub(super) fn start(&mut self, place: Place) {
        let has_room = self.room(place) > 0;
        let end = self.end(place);
        if end.open && !end.pumping && !end.posts.is_empty() && has_room {
            end.pumping = true;
            let at = self.now + self.random.below(20_000);
            self.plan(at, Action::Pump(place));
        }
    }

    /// Takes a random number of bytes from the posted frames, reading the caller's memory only now.
    fn pump(&mut self, place: Place) {
        let limit = [64, 4096, CHUNK_BYTES_MAX, CHUNK_BYTES_MAX][self.random.index(4)];
        let wanted = 1 + self.random.index(limit);
        let peer_gone = !self.end(place.peer()).open;
        let room = self.room(place);
        let broken = self.connections[place.connection].broken;
        let now = self.now;
        let end = self.end(place);
        end.pumping = false;
        if !end.open || end.posts.is_empty() || room == 0 || broken {
            return;
        }
        let delay = end.posts[0].delay;
        let (bytes, whole) = end.take(wanted.min(room));
        end.arrival = end.arrival.max(now + delay);
        end.wire_bytes += bytes.len();
        end.wire.push_back(bytes);
        let arrival = end.arrival;
        self.plan(arrival, Action::Arrive(place));
        for _ in 0..whole {
            let late = self.delay();
            let end = self.end(place);
            end.returned = end.returned.max(now + late);
            let at = end.returned;
            self.plan(at, Action::Sent(place));
        }
        // A kernel answers bytes for a socket that is gone with a reset, and the reset overtakes
        // what is unread.
        if peer_gone && self.random.once_in(4) {
            let at = now + self.delay();
            self.plan(at, Action::End(place, Some(Cause::Os(libc::ECONNRESET))));
        }
        self.start(place);
    }

    fn cut(&mut self, connection: usize) {
        self.connections[connection].broken = true;
        for end in 0..2 {
            let place = Place { connection, end };
            self.end(place).wire.clear();
            self.end(place).wire_bytes = 0;
            let cause = [Some(Cause::Os(libc::ECONNRESET)), Some(Cause::Os(libc::ETIMEDOUT)), None]
                [self.random.index(3)];
            let at = self.now + self.random.below(50_000);
            self.plan(at, Action::End(place, cause));
        }
    }

    /// Takes a frame to send, unless there is no room or the whim says so.
    pub(super) fn post(&mut self, place: Place, frame: &Frame) -> Result<(), Full> {
        let whim = self.random.once_in(16);
        let end = self.end(place);
        let unsent = end.unsent();
        if !end.open || unsent >= LANE_FRAMES_MAX || (unsent > 0 && whim) {
            return Err(Full);
        }
        let delay = self.delay();
        self.end(place).posts.push_back(Post {
            header: frame.header,
            payload: frame.payload,
            taken: 0,
            token: frame.token,
            delay,
        });
        self.start(place);
        if let Some(one_in) = self.loss_one_in
            && self.random.once_in(one_in)
        {
            let at = self.now + self.random.below(delay + 50_000);
            self.plan(at, Action::Cut(place.connection));
        }
        Ok(())
    }

    /// This end was told to close: the caller's memory is still in use for a while.
    pub(super) fn close(&mut self, place: Place) {
        self.leave(place);
        self.end(place).closing = true;
        let at = self.now + self.delay();
        self.plan(at, Action::End(place, Some(Cause::Local)));
    }

    /// This end stops in good order: what is under way still arrives, then the peer sees the end.
    pub(super) fn leave(&mut self, place: Place) {
        let late = self.delay();
        let now = self.now;
        let end = self.end(place);
        if !std::mem::replace(&mut end.open, false) {
            return;
        }
        end.drop_frames();
        end.arrival = end.arrival.max(now + late);
        end.wire.push_back(Vec::new());
        let arrival = end.arrival;
        self.plan(arrival, Action::Arrive(place));
    }
}
