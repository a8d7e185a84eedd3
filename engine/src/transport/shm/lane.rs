//! One lane over shared memory: what it sends, what it receives, and how it ends.
//!
//! A payload travels as *extents*, each with a descriptor: copied into a slot by the sender, or
//! left in the sender's arena and named there. The reader gives extents back in order, by moving
//! its cursor; that also frees the slot or the arena's memory. Invariant: nothing is copied to or
//! from an address that `Segment` or the caller did not give, and nothing by reference is believed
//! after the sender has revoked it.

use super::segment::{
    BROKEN, DESCRIPTORS, Extent, Mapping, Segment, WAKE_PUBLISHED, WAKE_RELEASED,
};
use super::setup::{ShmLink, Stream};
use crate::base::word;
use crate::limits::{ALIGNMENT, LANE_FRAMES_MAX, PART_BYTES_MAX, STAGING_BYTES};
use crate::mem::{Readable, Writable, cache};
use crate::ring::cursor::{ConsumerCursor, Corrupt, ProducerCursor};
use crate::sync::{Ordering, fence};
use crate::team::Team;
use crate::transport::area::Area;
use crate::transport::{Carried, Cause, Event, Frame, Full, Landing, LaneId, Piece, Room};
use crate::wire::RawHeader;
use rustix::fd::AsFd;
use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Most bytes that one poll copies for one lane each way, so that no lane keeps the others waiting
/// for long.
const COPY_BYTES: usize = 1 << 20;
/// Bytes of a payload that are asked for before they are needed.
const FETCH_BYTES: usize = 4096;

impl From<Corrupt> for Cause {
    fn from(_: Corrupt) -> Cause {
        BROKEN
    }
}

/// A frame that was posted and not yet returned.
struct Outgoing {
    header: RawHeader,
    payload: Readable,
    token: u64,
    /// Where the payload lies in the arena that the peer has mapped.
    reference: Option<usize>,
    /// How many extents the peer must have given back before the frame is sent.
    returned_at: u64,
}

/// What the next bytes of the lane are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Expect {
    Header,
    Answer { total: usize },
    Into { rest: Writable },
    Pieces { left: usize },
    Consume { length: usize, left: usize },
}

/// Aligned as pieces must be.
#[derive(Clone, Copy)]
#[repr(align(64))]
#[allow(dead_code, reason = "the bytes are reached by their address")]
struct Line([u8; ALIGNMENT]);

/// See the [module](self).
pub(super) struct ShmLane {
    producer: ProducerCursor,
    consumer: ConsumerCursor,
    segment: Segment,
    peer_arena: Option<Mapping>,
    arena_bytes: usize,
    stream: Stream,
    peer_event: OwnedFd,
    /// Copies payloads.
    team: Team,
    frames: VecDeque<Outgoing>,
    /// Frames at the front of `frames` that are under way as a whole.
    pumped: usize,
    /// Payload bytes of the frame after those that are under way.
    copied: usize,
    /// Slot bytes of each extent under way, by descriptor.
    taken: [u32; DESCRIPTORS as usize],
    published: u64,
    returned: u64,
    area: Area,
    expect: Expect,
    /// The extent that is being read, and how far.
    extent: Option<Extent>,
    done: usize,
    /// Through which the pieces of a payload in the peer's arena pass.
    staging: Box<[Line]>,
    /// What the peer may sleep for and now has: bits as in the interest word.
    news: u32,
    pub(super) peer_left: bool,
    closing: bool,
    cause: Option<Cause>,
}

impl ShmLane {
    pub(super) fn new(link: ShmLink, team: Team) -> ShmLane {
        let ShmLink { segment, stream, peer_event, peer_arena, arena_bytes } = link;
        let (producer, consumer) = segment.cursors();
        let lines = if peer_arena.is_some() { STAGING_BYTES / ALIGNMENT } else { 0 };
        ShmLane {
            producer,
            consumer,
            area: Area::new(segment.layout().area_bytes),
            segment,
            peer_arena,
            arena_bytes,
            stream,
            peer_event,
            team,
            frames: VecDeque::with_capacity(LANE_FRAMES_MAX),
            pumped: 0,
            copied: 0,
            taken: [0; DESCRIPTORS as usize],
            published: 0,
            returned: 0,
            expect: Expect::Header,
            extent: None,
            done: 0,
            staging: vec![Line([0; ALIGNMENT]); lines].into(),
            news: 0,
            peer_left: false,
            closing: false,
            cause: None,
        }
    }

    pub(super) fn stream(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Bytes of our arena that the peer can reach.
    pub(super) fn arena_bytes(&self) -> usize {
        self.arena_bytes
    }

    pub(super) fn post(&mut self, frame: &Frame, reference: Option<usize>) -> Result<(), Full> {
        assert!(frame.payload.len() <= PART_BYTES_MAX, "a frame is never larger than a part");
        if self.frames.len() >= LANE_FRAMES_MAX {
            return Err(Full);
        }
        self.frames.push_back(Outgoing {
            header: frame.header,
            payload: frame.payload,
            token: frame.token,
            reference,
            returned_at: 0,
        });
        Ok(())
    }

    pub(super) fn land(&mut self, landing: Landing) {
        let Expect::Answer { total } = self.expect else { return };
        self.expect = match landing {
            _ if landing.length() != total => {
                self.cause.get_or_insert(BROKEN);
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

    /// Does what is due and appends what has happened. Returns false after `Closed`.
    pub(super) fn poll(&mut self, lane: LaneId, events: &mut Room<'_>) -> bool {
        if self.closing {
            self.cause.get_or_insert(Cause::Local);
        }
        if self.cause.is_none() {
            self.cause = self.work(lane, events).err();
            self.tell();
        }
        // A piece stays valid until it is consumed, whatever becomes of the lane, unless this end
        // has let go of it.
        let held = matches!(self.expect, Expect::Consume { .. }) && !self.closing;
        match self.cause {
            Some(cause) if !held && !events.is_full() => {
                self.leave();
                events.push(Event::Closed { lane, cause });
                false
            }
            _ => true,
        }
    }

    fn work(&mut self, lane: LaneId, events: &mut Room<'_>) -> Result<(), Cause> {
        // Acquire: the pair of the Release in `leave`. What the peer published before it left is
        // still read.
        self.peer_left |= self.segment.theirs().left.load(Ordering::Acquire) != 0;
        self.reap()?;
        if !self.peer_left {
            self.pump();
        }
        while self.is_front_sent() && !events.is_full() {
            let Some(frame) = self.frames.pop_front() else { break };
            self.pumped -= 1;
            events.push(Event::Sent { lane, token: frame.token });
        }
        let starved = self.receive(lane, events)?;
        match self.expect {
            Expect::Header if starved && self.peer_left => Err(Cause::Peer),
            _ if starved && self.peer_left => Err(Cause::Truncated),
            _ => Ok(()),
        }
    }

    /// Takes back the extents that the peer is done with.
    fn reap(&mut self) -> Result<(), Cause> {
        let under_way = DESCRIPTORS - self.producer.refresh()?;
        while self.published - self.returned > u64::from(under_way) {
            self.area.free(self.taken[slot(self.returned)] as usize);
            self.returned += 1;
            if self.returned == self.published {
                self.prepare();
            }
        }
        Ok(())
    }

    /// The peer has read all: takes the lines that the next frame will be written to from its cache
    /// before there is a frame that would wait for them.
    fn prepare(&self) {
        let length = FETCH_BYTES.min(self.segment.layout().area_bytes);
        cache::fetch_to_write(self.segment.outgoing(0, length), length);
        let (descriptor, length) = self.segment.place(self.producer.index());
        cache::fetch_to_write(descriptor, length);
    }

    fn is_front_sent(&self) -> bool {
        let front = self.frames.front();
        self.pumped > 0 && front.is_some_and(|frame| frame.returned_at <= self.returned)
    }

    /// The next extent to send: how long it is, and its place in the slots if it needs one.
    fn next_extent(&self) -> Option<(usize, Option<(usize, usize)>)> {
        let frame = self.frames.get(self.pumped)?;
        if self.published - self.returned >= u64::from(DESCRIPTORS) {
            return None;
        }
        if frame.payload.is_empty() || frame.reference.is_some() {
            return Some((frame.payload.len(), None));
        }
        let length = (frame.payload.len() - self.copied).min(self.segment.layout().slot_bytes);
        Some((length, Some(self.area.find(length)?)))
    }

    /// Publishes extents of the posted frames, as many as there is room and time for.
    fn pump(&mut self) {
        let mut budget = COPY_BYTES;
        while budget > 0
            && let Some((length, place)) = self.next_extent()
        {
            let frame = &mut self.frames[self.pumped];
            let (offset, taken) = match (place, frame.reference) {
                (Some(place), _) => place,
                (None, Some(in_arena)) => (in_arena, 0),
                // A header without a payload takes no room.
                (None, None) => (0, 0),
            };
            let extent = Extent {
                first: (self.copied == 0).then_some((frame.header, frame.payload.len())),
                in_arena: frame.reference.is_some(),
                offset,
                length,
            };
            if place.is_some() {
                self.area.reserve(offset, length, taken);
                let source = frame.payload.part(self.copied, length);
                // SAFETY: `outgoing` checked the target, which no live extent overlaps (`Area`).
                let target =
                    unsafe { Writable::new(self.segment.outgoing(offset, length), length) };
                // SAFETY: the payload is lent until `Sent`, and lies in no lane's memory.
                unsafe { source.copy_to(target, &self.team) };
                budget = budget.saturating_sub(length);
            }
            self.taken[slot(self.published)] = word(taken);
            self.segment.write(self.producer.index(), &extent);
            self.producer.publish(1);
            self.published += 1;
            self.news |= WAKE_PUBLISHED;
            self.copied += length;
            if self.copied == frame.payload.len() {
                // A copied payload is the caller's again at once, one by reference when its extent
                // comes back.
                frame.returned_at = if extent.in_arena { self.published } else { 0 };
                self.pumped += 1;
                self.copied = 0;
            } else {
                // The peer can begin to read while we write on.
                self.tell();
            }
        }
    }

    /// Reads on as far as it goes. Returns whether only the peer could bring more.
    fn receive(&mut self, lane: LaneId, events: &mut Room<'_>) -> Result<bool, Cause> {
        let mut budget = COPY_BYTES;
        while !events.is_full() {
            match self.expect {
                Expect::Header => {
                    let Some(extent) = self.read()? else { return Ok(true) };
                    let (header, total) = extent.first.ok_or(BROKEN)?;
                    extent.check(total)?;
                    self.expect = Expect::Answer { total };
                    if total == 0 {
                        self.advance(0);
                    }
                    events.push(Event::Header { lane, header, carried: Carried::Nothing });
                }
                Expect::Into { rest } => {
                    let part = self.part(rest.len(), budget)?;
                    let Some((at, length)) = part else { return Ok(true) };
                    if length == 0 {
                        return Ok(false);
                    }
                    // SAFETY: `part` answers with memory of a mapping; if the peer writes it
                    // meanwhile, the worst is wrong bytes in its own payload.
                    let source = unsafe { Readable::new(at, length) };
                    // SAFETY: `rest` is lent until `Landed`, and lies in no lane's memory.
                    unsafe { source.copy_to(rest.part(0, length), &self.team) };
                    self.believe()?;
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
                    let Some((at, length)) = self.part(left, usize::MAX)? else {
                        return Ok(true);
                    };
                    // SAFETY: `part` answers with memory of a mapping.
                    let (data, length) = unsafe { self.stage(at, length) }?;
                    self.expect = Expect::Consume { length, left: left - length };
                    // SAFETY: bytes of a slot, which the peer gets back by `consume`, or of our
                    // staging, which is written again after it. Both are there until a poll drops
                    // the lane, which it does not while a piece is held that was not let go of.
                    let piece = unsafe { Piece::new(data, length) };
                    events.push(Event::Piece { lane, piece });
                }
                Expect::Answer { .. } | Expect::Consume { .. } => return Ok(false),
            }
        }
        Ok(false)
    }

    /// The next extent of the peer, if it has published one.
    fn read(&mut self) -> Result<Option<Extent>, Cause> {
        if self.consumer.ready()? == 0 {
            return Ok(None);
        }
        let arena_bytes = self.peer_arena.as_ref().map_or(0, Mapping::bytes);
        let extent = self.segment.read(self.consumer.index(), arena_bytes).ok_or(BROKEN)?;
        self.extent = Some(extent);
        self.done = 0;
        self.fetch_ahead(&extent);
        Ok(Some(extent))
    }

    /// Asks for the first bytes of a payload, which are in the sender's cache: they come while the
    /// caller looks at the header.
    fn fetch_ahead(&self, extent: &Extent) {
        let length = extent.length.min(FETCH_BYTES);
        let at = match &self.peer_arena {
            Some(arena) if extent.in_arena => arena.at(extent.offset, length).cast_const(),
            _ => self.segment.incoming(extent.offset, length),
        };
        cache::fetch(at, length);
    }

    /// The next bytes of a payload of which `left` are missing: at most `limit`, in one run.
    fn part(&mut self, left: usize, limit: usize) -> Result<Option<(*const u8, usize)>, Cause> {
        let extent = match self.extent {
            Some(extent) => extent,
            None => {
                let Some(extent) = self.read()? else { return Ok(None) };
                if extent.first.is_some() || extent.length == 0 {
                    return Err(BROKEN);
                }
                extent.check(left)?;
                extent
            }
        };
        let length = (extent.length - self.done).min(limit);
        let offset = extent.offset + self.done;
        let at = match &self.peer_arena {
            Some(arena) if extent.in_arena => arena.at(offset, length).cast_const(),
            _ => self.segment.incoming(offset, length),
        };
        Ok(Some((at, length)))
    }

    /// A piece of the bytes at `at`: these themselves in a slot, but a copy of what can be revoked.
    ///
    /// # Safety
    /// `length` bytes from `at` on are mapped. The peer may write them meanwhile.
    unsafe fn stage(&mut self, at: *const u8, length: usize) -> Result<(*const u8, usize), Cause> {
        if !self.extent.is_some_and(|extent| extent.in_arena) {
            return Ok((at, length));
        }
        let length = length.min(STAGING_BYTES);
        let staging = self.staging.as_mut_ptr().cast::<u8>();
        // SAFETY: the caller's promise, of no more bytes than it named. Staging is memory of our
        // own, and was made `STAGING_BYTES` long because there is an arena.
        unsafe { std::ptr::copy_nonoverlapping(at, staging, length) };
        self.believe()?;
        Ok((staging.cast_const(), length))
    }

    /// Whether what was just copied from the peer's arena was the payload, and not what came after
    /// it.
    fn believe(&self) -> Result<(), Cause> {
        if !self.extent.is_some_and(|extent| extent.in_arena) {
            return Ok(());
        }
        // Acquire: the copy comes before the look; the pair of the fence in `leave`, before the
        // memory's new use.
        fence(Ordering::Acquire);
        let revoked = self.segment.theirs().revoked.load(Ordering::Relaxed);
        if revoked == 0 { Ok(()) } else { Err(Cause::Truncated) }
    }

    /// So many bytes of the extent are read; gives it back if they were the last.
    fn advance(&mut self, length: usize) {
        self.done += length;
        if self.extent.is_some_and(|extent| self.done >= extent.length) {
            self.extent = None;
            self.consumer.release(1);
            self.news |= WAKE_RELEASED;
        }
    }

    /// Rings if the peer sleeps for what is new.
    fn tell(&mut self) {
        let news = std::mem::take(&mut self.news);
        if news == 0 {
            return;
        }
        if self.segment.theirs().interest.take(news) {
            self.ring();
        }
    }

    fn ring(&self) {
        // The counter can only be full if nobody ever empties it, and then it is readable as well.
        let _ = rustix::io::write(&self.peer_event, &1u64.to_ne_bytes());
    }

    /// Leaves the shared memory: from here on the peer believes nothing that we posted by
    /// reference.
    fn leave(&self) {
        let ours = self.segment.ours();
        ours.revoked.store(1, Ordering::Relaxed);
        // The revocation comes before whatever the memory is used for next; the pair is the fence
        // in `believe`.
        fence(Ordering::SeqCst);
        // Release: what was published comes before it; the pair is the Acquire in `work`.
        ours.left.store(1, Ordering::Release);
        self.ring();
    }

    /// Tells the peer what we are about to sleep for; what that comes before, and a look at
    /// [`is_ready`](Self::is_ready), follow in the caller.
    pub(super) fn arm(&self) {
        let reads = !matches!(self.expect, Expect::Answer { .. } | Expect::Consume { .. });
        let published = if reads { WAKE_PUBLISHED } else { 0 };
        let released = if self.frames.is_empty() { 0 } else { WAKE_RELEASED };
        self.segment.ours().interest.say(published | released);
    }

    /// We are awake.
    pub(super) fn disarm(&self) {
        self.segment.ours().interest.say(0);
    }

    /// What the peer sleeps for.
    #[cfg(test)]
    pub(super) fn peer_interest(&self) -> u32 {
        self.segment.theirs().interest.said()
    }

    /// Whether a poll would have something to do.
    pub(super) fn is_ready(&mut self) -> bool {
        let held = matches!(self.expect, Expect::Consume { .. });
        if self.closing || (self.cause.is_some() && !held) || self.news != 0 {
            return true;
        }
        if self.cause.is_some() {
            return false;
        }
        if !self.peer_left && self.segment.theirs().left.load(Ordering::Relaxed) != 0 {
            return true;
        }
        if self.reap().is_err() || self.is_front_sent() {
            return true;
        }
        let sends = !self.peer_left && self.next_extent().is_some();
        let reads = match self.expect {
            Expect::Answer { .. } | Expect::Consume { .. } => false,
            _ => self.extent.is_some() || self.consumer.ready() != Ok(0) || self.peer_left,
        };
        sends || reads
    }
}

fn slot(sequence: u64) -> usize {
    usize::try_from(sequence % u64::from(DESCRIPTORS)).expect("there are few descriptors")
}
