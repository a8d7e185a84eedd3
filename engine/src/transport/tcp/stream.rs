//! One lane without a system call: its two halves, how it ends, and the queue of lanes that have
//! something to do. Both drivers are a loop around this.
//!
//! Invariant: once `closing` is set the lane wants no more bytes and offers none, and the driver
//! emits `Closed` as soon as the kernel holds none of its memory.

use super::memory::Pool;
use super::receiver::{Receiver, Wanted};
use super::sealed::Keys;
use super::sealing::Sealing;
use super::sender::Sender;
use super::watch::Progress;
use crate::limits::GATHER_MAX;
use crate::transport::{Cause, Event, Frame, Full, Landing, LaneId};
use libc::iovec;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::time::Duration;

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

/// How the peer's bytes ended.
#[derive(Clone, Copy)]
enum Over {
    End,
    Failed(i32),
}

/// A lane of a stream socket.
pub(super) struct Stream {
    pub lane: LaneId,
    receiver: Receiver,
    sender: Sender,
    /// Between these two and the driver, if the lane is encrypted.
    sealing: Option<Box<Sealing>>,
    closing: Option<Cause>,
    /// No more bytes come: what the kernel said. The lane closes once those that came are events.
    over: Option<Over>,
    /// The peer takes nothing any more: why, and in which poll that was found.
    refused: Option<(i32, u64)>,
    /// The poll of the lane's last turn, and that of its last event.
    poll: u64,
    told: u64,
    /// Counted in a driver's [`Cork`].
    has_more: bool,
    progress: Progress,
}

/// Holds sends back while small frames that came together are answered one after the other: the
/// answers go out together too, instead of each with a system call, and a packet, of its own.
#[derive(Default)]
pub(super) struct Cork {
    /// Lanes of which another frame is here already.
    lanes: usize,
    /// Polls since sends were first held back.
    polls: u32,
    /// Sends wait in this poll.
    holds: bool,
}

/// Polls that sends are held back at most: each serves a header or the payload of a small frame.
const HOLD_POLLS_MAX: u32 = 128;

impl Cork {
    /// A poll begins; the last one brought events or not. If it brought none, the caller is not
    /// about to answer.
    pub fn begin(&mut self, progress: bool) {
        self.holds = progress && self.lanes > 0 && self.polls < HOLD_POLLS_MAX;
        self.polls = if self.holds { self.polls + 1 } else { 0 };
    }

    /// Whether this lane's sends wait for company.
    pub fn holds(&self, stream: &Stream) -> bool {
        self.holds && stream.outgoing().is_some_and(|sender| !sender.is_batch())
    }

    /// Looks at a lane after its events were taken out, or before it goes.
    pub fn note(&mut self, stream: &mut Stream) {
        let has_more = stream.closing.is_none() && stream.has_more_frames();
        match (std::mem::replace(&mut stream.has_more, has_more), has_more) {
            (false, true) => self.lanes += 1,
            (true, false) => self.lanes -= 1,
            _ => {}
        }
    }
}

impl Stream {
    pub fn new(lane: LaneId, keys: Option<&Keys>) -> Stream {
        let (receiver, sender) = (Receiver::new(), Sender::new());
        Stream {
            lane,
            receiver,
            sender,
            sealing: keys.map(|keys| Box::new(Sealing::new(keys))),
            closing: None,
            over: None,
            refused: None,
            poll: 0,
            told: 0,
            has_more: false,
            progress: Progress::default(),
        }
    }

    pub fn closing(&self) -> Option<Cause> {
        self.closing
    }

    /// The lane ends, for this reason unless it had one already.
    pub fn close(&mut self, cause: Cause) {
        self.closing.get_or_insert(cause);
    }

    /// Closes the lane if its peer has acknowledged nothing for so long; says whether it did.
    pub fn look(&mut self, socket: &OwnedFd, now: Duration, silence: Duration) -> bool {
        let silent = self.progress.look(socket, now).filter(|&silent| silent >= silence);
        let Some(silent) = silent.filter(|_| self.closing.is_none()) else { return false };
        // For readers: 49 days and more are told as that.
        let milliseconds = u32::try_from(silent.as_millis()).unwrap_or(u32::MAX);
        self.close(Cause::Unacknowledged { milliseconds });
        true
    }

    pub fn post(&mut self, frame: &Frame) -> Result<(), Full> {
        if self.closing.is_some() || self.refused.is_some() {
            return Err(Full);
        }
        self.sender.post(frame)
    }

    /// The answer to a header; too late if the lane is about to close.
    pub fn land(&mut self, landing: Landing) {
        if self.closing.is_none() {
            self.receiver.land(landing);
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
        self.poll = poll;
        // A poll may give a lane several turns: what it was told in this one, nobody has seen.
        if let Some((errno, since)) = self.refused
            && since.max(self.told) < poll
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
                if event.is_none() && self.open(pool) {
                    continue;
                }
            }
            let Some(event) = event else {
                self.conclude();
                return false;
            };
            self.told = self.poll;
            out.push(event);
        }
        true
    }

    /// On an encrypted lane, gives the receiver more of what came; says whether there was any. The
    /// lane ends here if that is not what its other end sent.
    fn open(&mut self, pool: &mut Pool) -> bool {
        let Some(sealing) = &mut self.sealing else { return false };
        match sealing.open(&mut self.receiver, pool) {
            Ok(some) => some,
            Err(error) => {
                self.close(Cause::Seal(error));
                false
            }
        }
    }

    /// Whether the caller's answer brings another event without the kernel's help.
    fn has_more_frames(&self) -> bool {
        let sealed = self.sealing.as_ref().is_some_and(|sealing| sealing.has_more());
        self.receiver.has_more() || sealed && self.receiver.standing()
    }

    /// All bytes that came are events; if no more come, and it is not for the caller to move the
    /// lane on, it ends.
    fn conclude(&mut self) {
        if self.receiver.standing() {
            return;
        }
        match self.over {
            None => {}
            Some(Over::End) => self.close(match &self.sealing {
                Some(sealing) if sealing.is_partial() => Cause::Truncated,
                _ => self.receiver.cause_at_end(),
            }),
            Some(Over::Failed(errno)) => self.close(Cause::Os(errno)),
        }
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
        if self.closing.is_some() {
            return None;
        }
        match &mut self.sealing {
            None => self.receiver.wanted(pool),
            Some(_) if self.receiver.standing() => None,
            Some(sealing) => Some(sealing.wanted()),
        }
    }

    /// What goes out next, if anything.
    pub fn outgoing(&self) -> Option<&Sender> {
        let open = self.closing.is_none() && self.refused.is_none();
        (open && self.sender.unsent()).then_some(&self.sender)
    }

    /// Names what goes out next, in order, and says in how many pieces: 0 if nothing does. To be
    /// called only while no send is under way.
    pub fn gather(&mut self, iovecs: &mut [iovec; GATHER_MAX]) -> usize {
        if self.outgoing().is_none() {
            return 0;
        }
        let Some(sealing) = &mut self.sealing else { return self.sender.gather(iovecs) };
        sealing.gather(&self.sender, iovecs).unwrap_or_else(|error| {
            self.close(Cause::Seal(error));
            0
        })
    }

    pub fn received(&mut self, count: usize) {
        match &mut self.sealing {
            None => self.receiver.received(count),
            Some(sealing) => sealing.received(count),
        }
    }

    pub fn sent(&mut self, count: usize) {
        let count = self.sealing.as_mut().map_or(count, |sealing| sealing.sent(count));
        self.sender.sent(count);
    }

    /// The peer's bytes are at their end.
    pub fn ended(&mut self) {
        self.over.get_or_insert(Over::End);
    }

    /// Receiving failed.
    pub fn failed(&mut self, errno: i32) {
        self.over.get_or_insert(Over::Failed(errno));
    }

    /// The kernel takes no more bytes of this lane. If that is because the peer is gone, reading
    /// comes to an end too, and is waited for; else the lane ends here.
    pub fn refuse(&mut self, errno: i32, poll: u64) {
        match errno {
            libc::EPIPE | libc::ECONNRESET => {
                self.refused.get_or_insert((errno, poll));
            }
            _ => self.close(Cause::Os(errno)),
        }
    }

    /// Gives the pool back what the lane holds: the last thing before the lane goes.
    pub fn release(&mut self, pool: &mut Pool) {
        self.receiver.release(pool);
    }
}

impl Pool {
    /// These lanes are forgotten, with what they hold.
    pub fn bury(&mut self, gone: &mut Vec<Stream>) {
        for mut stream in gone.drain(..) {
            stream.release(self);
            self.shrink();
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::HEADER_BYTES;
    use crate::mem::Writable;

    const LANE: LaneId = LaneId(0);

    /// Plays the kernel: fills all that the lane wants.
    fn fill(stream: &mut Stream, pool: &mut Pool, most: usize) {
        let wanted = stream.wanted(pool).expect("the lane is open");
        let count = wanted.iter().map(|part| part.iov_len).sum::<usize>().min(most);
        let first = count.min(wanted[0].iov_len);
        // SAFETY: the lane wants `iov_len` bytes at each of the two places.
        unsafe {
            wanted[0].iov_base.cast::<u8>().write_bytes(1, first);
            wanted[1].iov_base.cast::<u8>().write_bytes(1, count - first);
        }
        stream.received(count);
    }

    fn drain(stream: &mut Stream, pool: &mut Pool, room: usize) -> Vec<Event> {
        let mut events = Vec::new();
        stream.drain(pool, &mut Out::new(&mut events, room));
        events
    }

    #[test]
    fn what_came_before_the_end_is_delivered_before_the_lane_closes() {
        let mut pool = Pool::new();
        pool.grow();
        for failed in [false, true] {
            let mut stream = Stream::new(LANE, None);
            fill(&mut stream, &mut pool, HEADER_BYTES);
            assert!(matches!(drain(&mut stream, &mut pool, 9)[..], [Event::Header { .. }]));
            let mut landing = vec![0u8; 100_000];
            // SAFETY: the vector is not touched until the payload has landed.
            stream.land(Landing::Into(unsafe { Writable::of(&mut landing) }));
            assert!(drain(&mut stream, &mut pool, 9).is_empty());
            // The payload, the next header, and the end, all before anybody looks.
            fill(&mut stream, &mut pool, usize::MAX);
            if failed {
                stream.failed(104)
            } else {
                stream.ended()
            }
            assert!(matches!(drain(&mut stream, &mut pool, 1)[..], [Event::Landed { .. }]));
            assert_eq!(stream.closing(), None);
            assert!(matches!(drain(&mut stream, &mut pool, 9)[..], [Event::Header { .. }]));
            assert_eq!(stream.closing(), None, "the caller may still say that no payload follows");
            stream.land(Landing::NOTHING);
            assert!(drain(&mut stream, &mut pool, 9).is_empty());
            let expected = if failed { Cause::Os(104) } else { Cause::Peer };
            assert_eq!(stream.closing(), Some(expected));
            assert!(stream.wanted(&mut pool).is_none());
            stream.release(&mut pool);
        }
    }

    #[test]
    fn a_lane_that_can_send_no_more_is_read_on_unless_the_caller_left_it_standing() {
        let mut pool = Pool::new();
        pool.grow();
        let mut stream = Stream::new(LANE, None);
        stream.refuse(libc::EPIPE, 5);
        stream.begin(6);
        assert_eq!(stream.closing(), None, "it is not standing");
        fill(&mut stream, &mut pool, HEADER_BYTES);
        assert_eq!(drain(&mut stream, &mut pool, 9).len(), 1);
        assert!(stream.impatient());
        stream.begin(6);
        assert_eq!(stream.closing(), None, "the caller has not had its turn");
        stream.begin(7);
        assert_eq!(stream.closing(), Some(Cause::Os(libc::EPIPE)));
        let mut stream = Stream::new(LANE, None);
        stream.refuse(libc::ENOBUFS, 5);
        assert_eq!(
            stream.closing(),
            Some(Cause::Os(libc::ENOBUFS)),
            "reading would go on for ever"
        );
    }

    #[test]
    fn a_lane_is_ready_once_however_often_it_is_said() {
        let mut ready = Ready::new(3);
        for lane in [2, 0, 2, 2, 0] {
            ready.push(lane);
        }
        assert_eq!(
            (ready.len(), ready.pop(), ready.pop(), ready.pop()),
            (2, Some(2), Some(0), None)
        );
        ready.push(2);
        assert_eq!(ready.pop(), Some(2));
        assert!(ready.is_empty());
    }
}
