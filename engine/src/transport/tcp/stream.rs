//! One lane without a system call: its two halves, how it ends, and the queue of lanes that have
//! something to do. Both drivers are a loop around this.
//!
//! Invariant: once `closing` is set the lane wants no more bytes and offers none, and the driver
//! emits `Closed` as soon as the kernel holds none of its memory.

use super::memory::Pool;
use super::receiver::{Receiver, Wanted};
use super::sender::Sender;
use crate::transport::{Cause, Event, Frame, Full, Landing, LaneId};
use std::collections::VecDeque;

/// Where a poll puts its events, and how many it may put there.
pub(super) struct Out<'a> {
    events: &'a mut Vec<Event>,
    limit: usize,
}

impl<'a> Out<'a> {
    pub fn new(events: &'a mut Vec<Event>, count_max: usize) -> Out<'a> {
        let limit = events.len() + count_max;
        Out { events, limit }
    }

    pub fn full(&self) -> bool {
        self.events.len() >= self.limit
    }

    pub fn push(&mut self, event: Event) {
        self.events.push(event);
    }
}

/// A lane of a stream socket.
pub(super) struct Stream {
    pub lane: LaneId,
    receiver: Receiver,
    sender: Sender,
    closing: Option<Cause>,
    /// The peer takes nothing any more: why, and in which poll that was found.
    refused: Option<(i32, u64)>,
}

impl Stream {
    pub fn new(lane: LaneId) -> Stream {
        let (receiver, sender) = (Receiver::new(), Sender::new());
        Stream { lane, receiver, sender, closing: None, refused: None }
    }

    pub fn closing(&self) -> Option<Cause> {
        self.closing
    }

    /// The lane ends, for this reason unless it had one already.
    pub fn close(&mut self, cause: Cause) {
        self.closing.get_or_insert(cause);
    }

    pub fn post(&mut self, frame: &Frame) -> Result<(), Full> {
        if self.closing.is_some() || self.refused.is_some() {
            return Err(Full);
        }
        self.sender.post(frame)
    }

    /// The answer to a header; too late if the lane is about to close.
    pub fn land(&mut self, landing: Landing, length: usize) {
        if self.closing.is_none() {
            self.receiver.land(landing, length);
        }
    }

    /// The answer to a piece; too late if the lane is about to close.
    pub fn consume(&mut self, pool: &mut Pool) {
        if self.closing.is_none() {
            self.receiver.consume(pool);
        }
    }

    /// Starts a turn in this poll: a lane whose peer takes nothing is read to its end, since the
    /// peer's last frames say why; but if the caller has left it standing since an earlier poll, it
    /// ends here.
    pub fn begin(&mut self, poll: u64) {
        if let Some((errno, since)) = self.refused
            && since < poll
            && self.receiver.standing()
        {
            self.close(Cause::Os(errno));
        }
    }

    /// Moves what is known into events. Returns whether there is more of it than room.
    pub fn drain(&mut self, pool: &mut Pool, out: &mut Out<'_>) -> bool {
        while !out.full() {
            let mut event = self.sender.next(self.lane);
            if event.is_none() && self.closing.is_none() {
                event = self.receiver.next(self.lane, pool);
            }
            let Some(event) = event else { return false };
            out.push(event);
        }
        true
    }

    /// Whether the lane must be looked at in the next poll though nothing happens: see
    /// [`begin`](Stream::begin).
    pub fn impatient(&self) -> bool {
        self.refused.is_some() && self.closing.is_none() && self.receiver.standing()
    }

    /// Whether only the caller can move the receiving half on.
    pub fn standing(&self) -> bool {
        self.receiver.standing()
    }

    /// Where the next bytes go; to be asked after a `drain` that had room.
    pub fn wanted(&mut self, pool: &mut Pool) -> Option<Wanted> {
        if self.closing.is_some() { None } else { self.receiver.wanted(pool) }
    }

    /// What goes out next, if anything.
    pub fn outgoing(&self) -> Option<&Sender> {
        let open = self.closing.is_none() && self.refused.is_none();
        (open && self.sender.unsent()).then_some(&self.sender)
    }

    pub fn received(&mut self, count: usize) {
        self.receiver.received(count);
    }

    pub fn sent(&mut self, count: usize) {
        self.sender.sent(count);
    }

    /// The peer's bytes are at their end.
    pub fn ended(&mut self) {
        let cause = self.receiver.cause_at_end();
        self.close(cause);
    }

    /// The kernel takes no more bytes of this lane.
    pub fn refuse(&mut self, errno: i32, poll: u64) {
        self.refused.get_or_insert((errno, poll));
    }

    /// Gives the pool back what the lane holds: the last thing before the lane goes.
    pub fn release(&mut self, pool: &mut Pool) {
        self.receiver.release(pool);
    }
}

/// Lanes that have something to do, each at most once, first come first served.
pub(super) struct Ready {
    order: VecDeque<u32>,
    queued: Box<[bool]>,
}

impl Ready {
    pub fn new(lanes_max: u32) -> Ready {
        let order = VecDeque::with_capacity(lanes_max as usize);
        Ready { order, queued: vec![false; lanes_max as usize].into_boxed_slice() }
    }

    pub fn push(&mut self, lane: u32) {
        if !std::mem::replace(&mut self.queued[lane as usize], true) {
            self.order.push_back(lane);
        }
    }

    pub fn pop(&mut self) -> Option<u32> {
        let lane = self.order.pop_front()?;
        self.queued[lane as usize] = false;
        Some(lane)
    }

    pub fn len(&self) -> usize {
        self.order.len()
    }

    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }
}
