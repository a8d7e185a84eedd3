//! The driver on plain non-blocking calls: edge-triggered epoll says which lanes may be read or
//! written, and each is tried until it says otherwise.
//!
//! Invariant: `readable` and `writable` are false only if a call found the socket empty or full
//! since the last edge, so another edge is sure to come.

use super::lingering::Lingering;
use super::memory::Pool;
use super::sealed::Keys;
use super::stream::{Cork, Out, Ready, Stream};
use crate::limits::{EVENTS_MAX, GATHER_MAX};
use crate::transport::{Cause, Event, Frame, Full, Landing, LaneId, Waker};
use libc::iovec;
use rustix::event::{Timespec, epoll};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

/// Readiness reports taken by one call.
const REPORTS_MAX: usize = 64;
/// Polls that serve known lanes before the kernel is asked for others.
const POLLS_UNASKED_MAX: u64 = 16;
/// What epoll reports for the waker; no lane has this number.
const WAKER: u64 = u64::MAX;

struct Lane {
    stream: Stream,
    socket: OwnedFd,
    readable: bool,
    writable: bool,
    /// The peer has closed: no further edge will come, so `readable` stays.
    hung_up: bool,
}

/// See the [module](self).
pub(super) struct Poll {
    epoll: OwnedFd,
    lanes: Box<[Option<Lane>]>,
    /// Lanes whose end the last poll told: until the next one, the caller may hold pieces in their
    /// memory.
    gone: Vec<Stream>,
    lingering: Lingering,
    ready: Ready,
    cork: Cork,
    /// The last poll brought events.
    progress: bool,
    pool: Pool,
    polls: u64,
    // It keeps open the descriptor that epoll watches.
    _waker: Waker,
}

impl Poll {
    /// A driver for lanes 0 to `lanes_max - 1`.
    pub fn new(waker: Waker, lanes_max: u32) -> io::Result<Poll> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        // The waker is level-triggered: it stays readable until the sleeper has emptied it.
        epoll::add(&epoll, waker.fd(), epoll::EventData::new_u64(WAKER), epoll::EventFlags::IN)?;
        let lanes = (0..lanes_max).map(|_| None).collect();
        let (ready, pool) = (Ready::new(lanes_max), Pool::new());
        Ok(Poll {
            epoll,
            lanes,
            gone: Vec::new(),
            lingering: Lingering::default(),
            ready,
            cork: Cork::default(),
            progress: false,
            pool,
            polls: 0,
            _waker: waker,
        })
    }

    pub fn attach(&mut self, lane: LaneId, socket: OwnedFd, keys: Option<&Keys>) -> io::Result<()> {
        let Some(place) = self.lanes.get_mut(lane.0 as usize) else {
            return Err(io::Error::from(io::ErrorKind::QuotaExceeded));
        };
        if place.is_some() {
            return Err(io::Error::from(io::ErrorKind::AlreadyExists));
        }
        let interest = epoll::EventFlags::IN
            | epoll::EventFlags::OUT
            | epoll::EventFlags::RDHUP
            | epoll::EventFlags::ET;
        let data = epoll::EventData::new_u64(u64::from(lane.0));
        epoll::add(&self.epoll, &socket, data, interest)?;
        let stream = Stream::new(lane, keys);
        *place = Some(Lane { stream, socket, readable: true, writable: true, hung_up: false });
        self.pool.grow();
        self.ready.push(lane.0);
        Ok(())
    }

    fn lane(&mut self, lane: LaneId) -> Option<&mut Lane> {
        self.lanes.get_mut(lane.0 as usize)?.as_mut()
    }

    pub fn post(&mut self, lane: LaneId, frame: &Frame) -> Result<(), Full> {
        self.lane(lane).ok_or(Full)?.stream.post(frame)?;
        self.ready.push(lane.0);
        Ok(())
    }

    pub fn land(&mut self, lane: LaneId, landing: Landing) {
        if let Some(at) = self.lane(lane) {
            at.stream.land(landing);
            self.ready.push(lane.0);
        }
    }

    pub fn consume(&mut self, lane: LaneId) {
        if let Some(Some(at)) = self.lanes.get_mut(lane.0 as usize) {
            at.stream.consume(&mut self.pool);
            self.ready.push(lane.0);
        }
    }

    pub fn close(&mut self, lane: LaneId) {
        if let Some(at) = self.lane(lane) {
            at.stream.close(Cause::Local);
            self.ready.push(lane.0);
        }
    }

    pub fn poll(&mut self, events: &mut Vec<Event>) {
        self.polls += 1;
        self.pool.bury(&mut self.gone);
        let before = events.len();
        let mut out = Out::new(events, EVENTS_MAX);
        self.cork.begin(self.progress);
        if self.ready.is_empty() || self.polls.is_multiple_of(POLLS_UNASKED_MAX) {
            self.collect(Duration::ZERO);
        }
        for _ in 0..self.ready.len() {
            let Some(index) = self.ready.pop() else { break };
            if self.turn(index, &mut out) {
                self.ready.push(index);
            }
        }
        self.progress = events.len() > before;
    }

    /// Closes the lanes whose peers have acknowledged nothing for so long.
    pub fn look(&mut self, now: Duration, silence: Option<Duration>) {
        self.lingering.look(now);
        let Some(silence) = silence else { return };
        for lane in self.lanes.iter_mut().flatten() {
            if lane.stream.look(&lane.socket, now, silence) {
                self.ready.push(lane.stream.lane.0);
            }
        }
    }

    pub fn block(&mut self, timeout: Duration) {
        if self.ready.is_empty() {
            self.collect(timeout);
        }
    }

    /// Takes readiness reports into the lanes, waiting for one at most so long. A failed call is an
    /// empty one: the next poll asks again.
    fn collect(&mut self, timeout: Duration) {
        let Ok(timeout) = Timespec::try_from(timeout) else { return };
        let mut reports = [MaybeUninit::uninit(); REPORTS_MAX];
        let Ok((reports, _)) = epoll::wait(&self.epoll, &mut reports, Some(&timeout)) else {
            return;
        };
        for report in reports {
            let (data, flags) = (report.data.u64(), report.flags);
            // A lane's socket leaves the set before its place is free, so a report is never for a
            // later lane.
            let Ok(index) = u32::try_from(data) else { continue };
            let Some(Some(lane)) = self.lanes.get_mut(index as usize) else { continue };
            let over = epoll::EventFlags::RDHUP | epoll::EventFlags::HUP | epoll::EventFlags::ERR;
            lane.hung_up |= flags.intersects(over);
            lane.readable |= flags.contains(epoll::EventFlags::IN) || lane.hung_up;
            lane.writable |= flags.contains(epoll::EventFlags::OUT) || lane.hung_up;
            self.ready.push(index);
        }
    }

    /// Events out, one call each way. Returns whether the lane can go on though nothing happens.
    fn turn(&mut self, index: u32, out: &mut Out<'_>) -> bool {
        let Some(lane) = &mut self.lanes[index as usize] else { return false };
        lane.stream.begin(self.polls);
        if lane.stream.drain(&mut self.pool, out) {
            return true;
        }
        if lane.writable && !self.cork.holds(&lane.stream) {
            send(lane, self.polls);
        }
        if lane.readable {
            receive(lane, &mut self.pool);
        }
        let is_full = lane.stream.drain(&mut self.pool, out);
        self.cork.note(&mut lane.stream);
        if is_full {
            return true;
        }
        let Some(cause) = lane.stream.closing() else {
            return lane.writable && lane.stream.outgoing().is_some()
                || lane.readable && !lane.stream.standing()
                || lane.stream.impatient();
        };
        self.detach(index);
        out.push(Event::Closed { lane: LaneId(index), cause });
        false
    }

    fn detach(&mut self, index: u32) {
        let gone = self.lanes[index as usize].take();
        let mut lane = gone.expect("the caller has just looked at this lane");
        self.cork.note(&mut lane.stream);
        // A socket that others hold open too would stay in the set when this end drops it.
        let _ = epoll::delete(&self.epoll, &lane.socket);
        self.lingering.add(lane.socket);
        self.gone.push(lane.stream);
    }
}

/// Sends what is due, if anything, with one call.
fn send(lane: &mut Lane, poll: u64) {
    if lane.stream.outgoing().is_none() {
        return;
    }
    let mut iovecs = [iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; GATHER_MAX];
    let count = lane.stream.gather(&mut iovecs);
    if count == 0 {
        return;
    }
    // SAFETY: all-zero bytes are a valid `msghdr`: null pointers and zero lengths.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = iovecs.as_mut_ptr();
    message.msg_iovlen = count;
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: the vectors name headers in the sender's ring and payloads that who posted them keeps
    // valid, or records in the lane's own buffer.
    let result = unsafe { libc::sendmsg(lane.socket.as_raw_fd(), &raw const message, flags) };
    let due: usize = iovecs[..count].iter().map(|part| part.iov_len).sum();
    match usize::try_from(result) {
        Ok(count) => {
            lane.writable = count == due || lane.hung_up;
            lane.stream.sent(count);
        }
        Err(_) => match errno() {
            libc::EAGAIN => lane.writable = false,
            libc::EINTR => {}
            other => lane.stream.refuse(other, poll),
        },
    }
}

/// Receives what is wanted, if anything, with one call.
fn receive(lane: &mut Lane, pool: &mut Pool) {
    let Some(wanted) = lane.stream.wanted(pool) else { return };
    let count = if wanted[1].iov_len == 0 { 1 } else { 2 };
    // SAFETY: the vectors name memory of the receiver, or of the caller, who keeps it valid until
    // it has landed.
    let result = unsafe { libc::readv(lane.socket.as_raw_fd(), wanted.as_ptr(), count) };
    let due: usize = wanted.iter().map(|part| part.iov_len).sum();
    match usize::try_from(result) {
        Ok(0) => lane.stream.ended(),
        Ok(count) => {
            // A short count means that the socket is empty, and that an edge will say when it no
            // longer is.
            lane.readable = count == due || lane.hung_up;
            lane.stream.received(count);
        }
        Err(_) => match errno() {
            libc::EAGAIN => lane.readable = false,
            libc::EINTR => {}
            other => lane.stream.failed(other),
        },
    }
}

fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}
