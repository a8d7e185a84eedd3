//! Lanes through memory that a worker and a server on the same host share.
//!
//! A lane is one sealed memfd, which the worker makes, holding two rings of descriptors and the
//! slots that payloads pass through; see [`offer`] and [`accept`]. A server that
//! [shares](Shm::share) its arena does not copy what it posts from there: the worker reads it in
//! place. Each end is told of the other's death by the stream that the lane was set up over, and
//! wakes the other through its eventfd only if that said that it sleeps.
//!
//! Invariant: the peer is not trusted. Whatever it writes to the shared memory, the worst that
//! happens is wrong bytes in its own payloads or the end of its own lane.

mod lane;
mod segment;
mod setup;

pub use segment::ShmOptions;
pub use setup::{ShmLink, accept, offer};

use super::interest::Interest;
use super::{Driver, Event, Frame, Full, Landing, LaneId, Link, Room, Waker};
use crate::base::word;
use crate::mem::Arena;
use crate::team::Team;

use lane::ShmLane;
use rustix::event::{Timespec, epoll};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::time::Duration;

/// Polls between two looks at the streams of the peers, which cost a system call. A peer that
/// leaves in good order says so in the shared memory; this is for those that die while we never
/// sleep.
const STREAMS_EVERY: u32 = 4096;
/// Streams that one look tells of at most.
const STREAMS_MAX: usize = 16;
/// A payload of this many bytes or fewer is copied into a slot though it could be read in place:
/// its memory is free at once, for little work.
const COPIED_BYTES_MAX: usize = 1024;
/// What the epoll says of the waker; lanes are told apart by their number.
const WAKER: u64 = u64::MAX;

/// Where memory lies whose payloads are posted by reference.
#[derive(Clone, Copy)]
struct Shared {
    base: usize,
    bytes: usize,
}

/// All shared-memory lanes of one thread. Dropping it is a death: its peers see their lanes close.
pub struct Shm {
    lanes: Vec<Option<Box<ShmLane>>>,
    epoll: OwnedFd,
    /// Keeps the eventfd that the epoll watches.
    _waker: Waker,
    shared: Option<Shared>,
    team: Team,
    is_armed: bool,
    polls: u32,
    first: usize,
}

impl Shm {
    /// A driver without lanes, which the waker wakes. Its links must be made with the same waker.
    ///
    /// # Errors
    /// No file descriptor is left.
    pub fn new(waker: Waker) -> io::Result<Shm> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, waker.fd(), epoll::EventData::new_u64(WAKER), epoll::EventFlags::IN)?;
        Ok(Shm {
            lanes: Vec::new(),
            epoll,
            _waker: waker,
            shared: None,
            team: Team::default(),
            is_armed: false,
            polls: 0,
            first: 0,
        })
    }

    /// The team that copies payloads, on lanes that are attached from now on.
    #[must_use]
    pub fn with_team(self, team: Team) -> Shm {
        Shm { team, ..self }
    }

    /// Names the arena whose memfd is given to [`accept`]: payloads in it are posted by reference,
    /// except small ones, which are copied to be free at once. Peers read them by the memfd, so
    /// this end keeps no more of the arena than where it is.
    pub fn share(&mut self, arena: &Arena) {
        let (base, bytes) = (arena.base().addr(), arena.reserved_bytes());
        self.shared = Some(Shared { base, bytes });
    }

    fn lane(&mut self, lane: LaneId) -> Option<&mut Box<ShmLane>> {
        self.lanes.get_mut(lane.0 as usize)?.as_mut()
    }

    /// Where in the arena a frame's payload lies, if it is to go by reference.
    fn reference(&self, frame: &Frame, arena_bytes: usize) -> Option<usize> {
        let shared = self.shared.filter(|shared| shared.bytes == arena_bytes)?;
        let Frame { payload, .. } = frame;
        let offset = payload.as_ptr().addr().checked_sub(shared.base)?;
        let inside = offset < shared.bytes && payload.len() <= shared.bytes - offset;
        (inside && payload.len() > COPIED_BYTES_MAX).then_some(offset)
    }

    /// Waits for the waker or the end of a stream. Returns whether a stream ended.
    fn look(&mut self, timeout: Duration) -> bool {
        // Whole milliseconds, upwards: all that older kernels take.
        let millis = timeout.as_nanos().div_ceil(1_000_000).min(u128::from(u32::MAX >> 1));
        // Bounded on the line above.
        let millis = Duration::from_millis(u64::try_from(millis).unwrap_or(u64::MAX));
        let Ok(timeout) = Timespec::try_from(millis) else { return false };
        let mut space = [MaybeUninit::uninit(); STREAMS_MAX];
        // An interrupted wait is a short wait: the caller polls again.
        let Ok((seen, _)) = epoll::wait(&self.epoll, &mut space, Some(&timeout)) else {
            return false;
        };
        let mut ended = false;
        for event in seen {
            // The waker's mark, and others than lanes, are beyond the table.
            let index = usize::try_from(event.data.u64()).unwrap_or(usize::MAX);
            if let Some(Some(lane)) = self.lanes.get_mut(index) {
                // Nothing is ever sent over the stream, so whatever it has to say is that it is
                // over. It would say so again and again.
                let _ = epoll::delete(&self.epoll, lane.stream());
                lane.peer_left = true;
                ended = true;
            }
        }
        ended
    }

    fn disarm(&mut self) {
        if std::mem::take(&mut self.is_armed) {
            for lane in self.lanes.iter().flatten() {
                lane.disarm();
            }
        }
    }
}

impl Driver for Shm {
    fn takes(&self, link: &Link) -> bool {
        matches!(link, Link::Shm(_))
    }

    fn attach(&mut self, lane: LaneId, link: Link) -> io::Result<()> {
        let Link::Shm(link) = link else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a shared-memory link"));
        };
        if self.lane(lane).is_some() {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                format!("{lane:?} is in use"),
            ));
        }
        let new = Box::new(ShmLane::new(link, self.team.clone()));
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
        let data = epoll::EventData::new_u64(u64::from(lane.0));
        epoll::add(&self.epoll, new.stream(), data, flags)?;
        let index = lane.0 as usize;
        if self.lanes.len() <= index {
            self.lanes.resize_with(index + 1, || None);
        }
        self.lanes[index] = Some(new);
        Ok(())
    }

    fn post(&mut self, lane: LaneId, frame: &Frame) -> Result<(), Full> {
        let arena_bytes = self.lane(lane).ok_or(Full)?.arena_bytes();
        let reference = self.reference(frame, arena_bytes);
        self.lane(lane).ok_or(Full)?.post(frame, reference)
    }

    fn land(&mut self, lane: LaneId, landing: Landing) {
        if let Some(lane) = self.lane(lane) {
            lane.land(landing);
        }
    }

    fn consume(&mut self, lane: LaneId) {
        if let Some(lane) = self.lane(lane) {
            lane.consume();
        }
    }

    fn close(&mut self, lane: LaneId) {
        if let Some(lane) = self.lane(lane) {
            lane.close();
        }
    }

    fn poll(&mut self, events: &mut Vec<Event>) {
        self.disarm();
        self.polls = self.polls.wrapping_add(1);
        if self.polls.is_multiple_of(STREAMS_EVERY) {
            self.look(Duration::ZERO);
        }
        let mut room = Room::new(events);
        let count = self.lanes.len();
        // Another lane begins each time, so that none is starved when there is more than room for.
        self.first = if self.first + 1 < count { self.first + 1 } else { 0 };
        for index in (self.first..count).chain(0..self.first) {
            let Some(lane) = &mut self.lanes[index] else { continue };
            let id = LaneId(word(index));
            if !lane.poll(id, &mut room) {
                // It is there unless its end was noticed; a copy that somebody holds would keep it
                // there.
                let _ = epoll::delete(&self.epoll, lane.stream());
                self.lanes[index] = None;
            }
        }
    }

    fn arm(&mut self) -> bool {
        self.is_armed = true;
        for lane in self.lanes.iter().flatten() {
            lane.arm();
        }
        Interest::before_looking();
        let mut ready = self.look(Duration::ZERO);
        for lane in self.lanes.iter_mut().flatten() {
            ready |= lane.is_ready();
        }
        ready
    }

    fn block(&mut self, timeout: Duration) {
        self.look(timeout);
    }
}

#[cfg(test)]
mod tests;
