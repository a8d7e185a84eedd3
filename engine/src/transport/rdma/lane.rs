//! One lane over a reliable connection: what it sends, what it receives, and how it ends.
//!
//! A payload travels as extents, each one write with immediate data into the peer's area: a prefix,
//! then the payload, from the mirror of that area or from memory that was shared. The reader serves
//! pieces where they lie. Space comes back as credit, in the prefixes of the other direction or, if
//! nothing goes there, in a write of its own without bytes.
//!
//! An answer for which the peer granted memory is one write straight there, if it lies in shared
//! memory itself; else it travels as extents that say so, and is received as any frame.
//!
//! An end that leaves says farewell behind its last extent and waits until the device has seen it
//! acknowledged. An end that dies cannot: then its stream ends, and this end stops the connection,
//! which brings back whatever had arrived before. Invariant: the device is told only addresses of
//! live regions and of payloads whose poster waits for `Sent`.

mod outgoing;

use self::outgoing::Outgoing;
use super::chain::Chain;
use super::device::{Counters, QueuePair, Rails};
use super::error::BROKEN;
use super::ffi;
use super::flow::{Arrived, Notice, Prefix, Receiving, Said, Sending};
use super::grants::Grants;
use super::layout::{BATCH, PREFIX_BYTES, RECEIVES};
use super::memory::Region;
use super::setup::{RdmaLink, Stream};
use crate::limits::LANE_FRAMES_MAX;
use crate::mem::Writable;
use crate::transport::{Carried, Cause, Event, Landing, LaneId, Piece, Room};
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most bytes that one poll copies for one lane each way, so that no lane keeps the others waiting
/// for long.
const COPY_BYTES: usize = 1 << 20;
/// How long the end of a connection may take before this end no longer waits for the device.
const END_WITHIN: Duration = Duration::from_secs(2);
/// In the id of a work request: it is a place to receive.
pub(super) const RECEIVE: u64 = 1 << 63;

/// What the next bytes of the lane are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Expect {
    Header,
    Answer { total: usize },
    Into { rest: Writable },
    Pieces { left: usize },
    Consume { length: usize, left: usize },
}

/// The extent that is being read, and how far.
#[derive(Clone, Copy)]
struct Reading {
    payload_at: usize,
    length: usize,
    done: usize,
}

/// How a lane is ending.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// It is not.
    Open,
    /// This end has said farewell and waits, at most until then, for the acknowledgement.
    Farewell(Instant),
    /// The peer's stream ended: what had arrived is still coming, at most until then.
    Draining(Instant),
    /// Nothing more comes.
    PeerLeft,
}

/// See the [module](self).
pub(super) struct RdmaLane {
    // The queue pair comes first: it is destroyed before the memory that it reaches is freed.
    pair: QueuePair,
    incoming: Region,
    outgoing: Region,
    rails: Arc<Rails>,
    stream: Stream,
    remote_address: u64,
    remote_key: u32,
    /// What its work requests are known by.
    id: u64,
    chain: Box<Chain>,
    sending: Sending,
    receiving: Receiving,
    grants: Grants,
    frames: VecDeque<Outgoing>,
    /// Frames at the front of `frames` that are under way as a whole.
    pumped: usize,
    /// Payload bytes of the frame after those that are under way.
    started: usize,
    /// Bytes sent since something that wakes the peer.
    quiet_bytes: usize,
    expect: Expect,
    reading: Option<Reading>,
    /// Places to receive that the device has.
    places: usize,
    end: End,
    closing: bool,
    failure: Option<Cause>,
    cause: Option<Cause>,
}

impl RdmaLane {
    /// A lane whose work requests carry this id, with places to receive posted.
    pub(super) fn new(link: RdmaLink, id: u64) -> std::io::Result<RdmaLane> {
        let mut lane = RdmaLane {
            pair: link.pair,
            incoming: link.incoming,
            outgoing: link.outgoing,
            rails: link.rails,
            stream: link.stream,
            remote_address: link.remote_address,
            remote_key: link.remote_key,
            id,
            chain: Chain::new(),
            sending: Sending::new(link.theirs),
            receiving: Receiving::new(link.ours),
            grants: Grants::new(),
            frames: VecDeque::with_capacity(LANE_FRAMES_MAX),
            pumped: 0,
            started: 0,
            quiet_bytes: 0,
            expect: Expect::Header,
            reading: None,
            places: 0,
            end: End::Open,
            closing: false,
            failure: None,
            cause: None,
        };
        while lane.places < RECEIVES {
            lane.post_receives(BATCH.min(RECEIVES - lane.places))?;
        }
        Ok(lane)
    }

    pub(super) fn stream(&self) -> BorrowedFd<'_> {
        self.stream.0.as_fd()
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    pub(super) fn pair(&self) -> &QueuePair {
        &self.pair
    }

    fn counters(&self) -> &Counters {
        &self.rails.counters
    }

    pub(super) fn land(&mut self, landing: Landing) {
        let Expect::Answer { total } = self.expect else { return };
        self.expect = match landing {
            _ if landing.length() != total => {
                self.failure.get_or_insert(BROKEN);
                return;
            }
            _ if total == 0 => Expect::Header,
            Landing::Into(rest) => Expect::Into { rest },
            Landing::Pieces(left) => Expect::Pieces { left },
        };
    }

    pub(super) fn consume(&mut self) {
        if let Expect::Consume { length, left } = self.expect {
            self.expect = if left == 0 { Expect::Header } else { Expect::Pieces { left } };
            self.advance(length);
        }
    }

    pub(super) fn close(&mut self) {
        self.closing = true;
    }

    /// The stream has ended. Stops the connection, so that whatever arrived before comes back.
    pub(super) fn handle_stream_end(&mut self) {
        if matches!(self.end, End::Open | End::Farewell(_)) {
            let deadline = Instant::now() + END_WITHIN;
            let is_stopped = self.pair.fail().is_ok() && self.places > 0;
            self.end = if is_stopped { End::Draining(deadline) } else { End::PeerLeft };
        }
    }

    /// The lane is of no more use. The first cause counts, but what is merely given back says less
    /// than the operation for which it is: they come in two queues.
    pub(super) fn fail(&mut self, cause: Cause) {
        if matches!(self.failure, None | Some(Cause::Rdma { status: ffi::WC_FLUSHED })) {
            self.failure = Some(cause);
        }
    }

    /// What became of one of this lane's operations.
    pub(super) fn handle(&mut self, completion: &ffi::Wc) {
        let is_good = completion.status == ffi::WC_SUCCESS;
        if completion.wr_id & RECEIVE != 0 {
            // The device gives back each place that it was given, once. One that does not is no
            // reason to end the process: its lane ends.
            let Some(places) = self.places.checked_sub(1) else {
                return self.fail(BROKEN);
            };
            self.places = places;
            Counters::add(&self.counters().receive_completions, 1);
            if is_good && let Err(cause) = self.handle_notice(completion) {
                self.failure.get_or_insert(cause);
            }
            if self.places == 0 && matches!(self.end, End::Draining(_)) {
                self.end = End::PeerLeft;
            }
        } else {
            Counters::add(&self.counters().send_completions, 1);
            if is_good {
                self.sending.handle_completion();
            }
        }
        // What is flushed because this end stopped the connection is no failure.
        if !is_good && matches!(self.end, End::Open | End::Farewell(_)) {
            self.fail(Cause::Rdma { status: completion.status });
        }
    }

    fn handle_notice(&mut self, completion: &ffi::Wc) -> Result<(), Cause> {
        match Notice::decode(u32::from_be(completion.imm_data)).ok_or(BROKEN)? {
            Notice::Extent { offset } => {
                let bytes = completion.byte_len as usize;
                self.receiving.check(offset, bytes)?;
                let mut prefix = [0; PREFIX_BYTES];
                let at = self.incoming.at(offset, bytes).cast_const();
                // SAFETY: `at` has `bytes` bytes, at least a prefix. The peer may write to them
                // at any moment, if it breaks the rules: they are copied once, then checked.
                unsafe { at.copy_to_nonoverlapping(prefix.as_mut_ptr(), PREFIX_BYTES) };
                let prefix = Prefix::decode(&prefix)?;
                self.sending.handle_released(prefix.released)?;
                self.receiving.arrive(offset, bytes, prefix)
            }
            Notice::Credit { released } => self.sending.handle_released(released),
            Notice::Answer { number, released } => {
                self.sending.handle_released_low(released)?;
                self.grants.fill(number, completion.byte_len as usize)?;
                self.receiving.answer(number);
                Ok(())
            }
            Notice::Farewell => {
                self.end = End::PeerLeft;
                Ok(())
            }
        }
    }

    /// Does what is due and appends what has happened. Returns false after `Closed`.
    pub(super) fn poll(&mut self, lane: LaneId, events: &mut Room<'_>) -> bool {
        if let End::Draining(deadline) = self.end
            && Instant::now() > deadline
        {
            self.end = End::PeerLeft;
        }
        if self.cause.is_none() && self.closing {
            if !self.is_wound_down() {
                return true;
            }
            self.cause = Some(Cause::Local);
        }
        if self.cause.is_none() {
            self.cause = self.work(lane, events).err();
        }
        // A piece stays valid until it is consumed, whatever becomes of the lane, unless this end
        // has let go of it.
        let held = matches!(self.expect, Expect::Consume { .. }) && !self.closing;
        match self.cause {
            Some(cause) if !held && !events.is_full() => {
                events.push(Event::Closed { lane, cause });
                false
            }
            _ => true,
        }
    }

    /// Says farewell. Returns whether all that was sent has arrived, or never will.
    pub(super) fn is_wound_down(&mut self) -> bool {
        match self.end {
            _ if self.failure.is_some() => true,
            End::Draining(_) | End::PeerLeft => true,
            End::Open => {
                self.push(Notice::Farewell, true);
                self.end = End::Farewell(Instant::now() + END_WITHIN);
                self.flush().is_err()
            }
            End::Farewell(deadline) => self.sending.is_idle() || Instant::now() > deadline,
        }
    }

    fn work(&mut self, lane: LaneId, events: &mut Room<'_>) -> Result<(), Cause> {
        if let Some(cause) = self.failure {
            return Err(cause);
        }
        if self.end == End::Open {
            if self.places + BATCH <= RECEIVES {
                self.post_receives(BATCH).map_err(|error| os(&error))?;
            }
            self.pump()?;
        }
        while self.is_front_sent() && !events.is_full() {
            let Some(frame) = self.frames.pop_front() else { break };
            self.pumped -= 1;
            events.push(Event::Sent { lane, token: frame.token });
        }
        let starved = self.receive(lane, events)?;
        if self.end == End::Open && self.receiving.is_due() && self.sending.has_room() {
            let released = self.receiving.tell();
            self.push(Notice::Credit { released }, false);
            Counters::add(&self.counters().credits, 1);
            self.flush()?;
        }
        match self.expect {
            Expect::Header if starved && self.end == End::PeerLeft => Err(Cause::Peer),
            _ if starved && self.end == End::PeerLeft => Err(Cause::Truncated),
            _ => Ok(()),
        }
    }

    /// Gives the device places to receive.
    fn post_receives(&mut self, count: usize) -> std::io::Result<()> {
        let id = self.id | RECEIVE;
        let null = std::ptr::null_mut();
        let mut places: [ffi::RecvWr; BATCH] = std::array::from_fn(|_| ffi::RecvWr {
            wr_id: id,
            next: null,
            sg_list: std::ptr::null_mut(),
            num_sge: 0,
        });
        let first = places.as_mut_ptr();
        for index in 1..count {
            places[index - 1].next = first.wrapping_add(index);
        }
        Counters::add(&self.counters().receive_calls, 1);
        Counters::add(&self.counters().receives, count);
        // SAFETY: linked above, and it ends; it names no memory.
        match unsafe { self.pair.post_receive(first) } {
            0 => {
                self.places += count;
                Ok(())
            }
            errno => Err(std::io::Error::from_raw_os_error(errno)),
        }
    }

    /// Reads on as far as it goes. Returns whether only the peer could bring more.
    fn receive(&mut self, lane: LaneId, events: &mut Room<'_>) -> Result<bool, Cause> {
        let mut budget = COPY_BYTES;
        while !events.is_full() {
            match self.expect {
                Expect::Header => {
                    let Some(arrived) = self.receiving.next() else { return Ok(true) };
                    events.push(self.begin_frame(lane, arrived)?);
                }
                Expect::Into { rest } => {
                    let part = self.part(rest.len(), budget)?;
                    let Some((at, length)) = part else { return Ok(true) };
                    if length == 0 {
                        return Ok(false);
                    }
                    let into = rest.part(0, length).as_ptr();
                    // SAFETY: lent until `Landed`, and `part` answers with bytes of the area.
                    unsafe { std::ptr::copy_nonoverlapping(at, into, length) };
                    Counters::add(&self.counters().copied_bytes, length);
                    self.advance(length);
                    budget -= length;
                    if rest.len() == length {
                        self.expect = Expect::Header;
                        events.push(Event::Landed { lane });
                    } else {
                        self.expect = Expect::Into { rest: rest.behind(length) };
                    }
                }
                Expect::Pieces { left } => {
                    let Some((data, length)) = self.part(left, usize::MAX)? else {
                        return Ok(true);
                    };
                    self.expect = Expect::Consume { length, left: left - length };
                    // SAFETY: the device has written them to our area, where it may write again
                    // once `consume` gives them back. The area is there until a poll drops the
                    // lane, which it does not while a piece is held that was not let go of.
                    let piece = unsafe { Piece::new(data, length) };
                    events.push(Event::Piece { lane, piece });
                }
                Expect::Answer { .. } | Expect::Consume { .. } => return Ok(false),
            }
        }
        Ok(false)
    }

    /// Begins to read the next frame; returns what is to be told of that.
    fn begin_frame(&mut self, lane: LaneId, arrived: Arrived) -> Result<Event, Cause> {
        let (prefix, payload_at) = match arrived {
            Arrived::Extent { prefix, payload_at } => (prefix, payload_at),
            Arrived::Answer(number) => {
                let token = self.grants.close_filled(number)?.token;
                return Ok(Event::Answered { lane, token });
            }
        };
        let (header, total) = prefix.first.ok_or(BROKEN)?;
        prefix.check(total)?;
        self.begin(payload_at, prefix.length);
        let carried = match prefix.said {
            Said::Nothing => Carried::Nothing,
            Said::Grants(grant) => Carried::Grant(grant),
            // The memory may be one that no processor can write to.
            Said::Answers(number) => {
                Carried::Declined(self.grants.close_unfilled(number, total)?.token)
            }
        };
        self.expect = Expect::Answer { total };
        if total == 0 {
            self.advance(0);
        }
        Ok(Event::Header { lane, header, carried })
    }

    fn begin(&mut self, payload_at: usize, length: usize) {
        self.reading = Some(Reading { payload_at, length, done: 0 });
    }

    /// The next bytes of a payload of which `left` are missing: at most `limit`, in one run.
    fn part(&mut self, left: usize, limit: usize) -> Result<Option<(*const u8, usize)>, Cause> {
        if self.reading.is_none() {
            let Some(arrived) = self.receiving.next() else { return Ok(None) };
            let Arrived::Extent { prefix, payload_at } = arrived else { return Err(BROKEN) };
            if prefix.first.is_some() || prefix.length == 0 {
                return Err(BROKEN);
            }
            prefix.check(left)?;
            self.begin(payload_at, prefix.length);
        }
        let Some(reading) = self.reading else { return Ok(None) };
        let length = (reading.length - reading.done).min(limit);
        let at = self.incoming.at(reading.payload_at + reading.done, length);
        Ok(Some((at.cast_const(), length)))
    }

    /// So many bytes of the extent are read; gives it back if they were the last.
    fn advance(&mut self, length: usize) {
        if let Some(reading) = &mut self.reading {
            reading.done += length;
            if reading.done >= reading.length {
                let bytes = PREFIX_BYTES + reading.length;
                self.reading = None;
                self.receiving.release(bytes);
            }
        }
    }

    /// Whether it waits for what becomes of its sends. Not while all that it lacks is credit, which
    /// the peer sends: then a path that dies is seen when the sleeper's time is over.
    pub(super) fn awaits_sends(&self) -> bool {
        let is_front_under_way = self.pumped > 0 && !self.is_front_sent();
        let has_sent_all = self.frames.is_empty() && !self.sending.is_idle();
        is_front_under_way
            || has_sent_all
            || self.sending.awaits_completion()
            || matches!(self.end, End::Farewell(_))
    }

    /// Whether it waits for all that the device gives back, which nobody marks.
    pub(super) fn is_draining(&self) -> bool {
        matches!(self.end, End::Draining(_))
    }

    /// Whether a poll would have something to do.
    pub(super) fn is_ready(&self) -> bool {
        let held = matches!(self.expect, Expect::Consume { .. });
        let is_over = matches!(self.end, End::PeerLeft);
        if self.cause.is_some() {
            return !held || self.closing;
        }
        if self.closing {
            let waits = matches!(self.end, End::Farewell(_)) && self.failure.is_none();
            return !waits || self.sending.is_idle();
        }
        if self.failure.is_some() || self.is_front_sent() {
            return true;
        }
        let reads = match self.expect {
            Expect::Answer { .. } | Expect::Consume { .. } => false,
            _ => self.reading.is_some() || !self.receiving.is_empty() || is_over,
        };
        let is_open = self.end == End::Open;
        let credits = self.receiving.is_due() && self.sending.has_room();
        let sends = credits || self.next().is_some() || self.places + BATCH <= RECEIVES;
        reads || (is_open && sends)
    }
}

fn os(error: &std::io::Error) -> Cause {
    Cause::Os(error.raw_os_error().unwrap_or(libc::EIO))
}
