//! One end of a simulated connection: the frames that it sends and how far it has read its stream.
//!
//! Invariant: a caller's memory is touched only between `post` and `Sent`, or `land` and `Landed`,
//! and never after `Closed`.

use super::random::Random;
use crate::limits::{ALIGNMENT, HEADER_BYTES};
use crate::mem::{Readable, Writable};
use crate::transport::{Carried, Cause, Event, Landing, LaneId, Piece, Room};

use crate::wire::RawHeader;
use std::collections::VecDeque;
use std::io::Read;

/// Largest piece of a payload that passes the caller by.
const PIECE_BYTES_MAX: usize = 64 << 10;
/// What memory is overwritten with when it is no longer the reader's.
const POISON: u8 = 0xdd;

/// A posted frame.
pub(super) struct Post {
    pub(super) header: RawHeader,
    pub(super) payload: Readable,
    pub(super) taken: usize,
    pub(super) token: u64,
    pub(super) delay: u64,
}

/// What the next bytes of a stream are.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Expect {
    Header,
    Answer,
    Into { rest: Writable },
    Pieces { left: usize },
    Consume { left: usize },
}

/// Memory that is aligned as pieces must be.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Line([u8; ALIGNMENT]);

/// One end of a connection.
pub(super) struct End {
    pub(super) open: bool,
    /// `close` was called here.
    pub(super) closing: bool,
    /// Why this end is over, which the next poll tells.
    pub(super) cause: Option<Cause>,
    pub(super) posts: VecDeque<Post>,
    pub(super) pumping: bool,
    pub(super) wire: VecDeque<Vec<u8>>,
    pub(super) wire_bytes: usize,
    pub(super) arrival: u64,
    pub(super) taken: VecDeque<u64>,
    pub(super) returned: u64,
    pub(super) sent: VecDeque<u64>,
    pub(super) inbox: VecDeque<u8>,
    pub(super) finished: bool,
    pub(super) expect: Expect,
    pub(super) staging: Box<[Line]>,
}

impl End {
    pub(super) fn new() -> End {
        End {
            open: true,
            closing: false,
            cause: None,
            posts: VecDeque::new(),
            pumping: false,
            wire: VecDeque::new(),
            wire_bytes: 0,
            arrival: 0,
            taken: VecDeque::new(),
            returned: 0,
            sent: VecDeque::new(),
            inbox: VecDeque::new(),
            finished: false,
            expect: Expect::Header,
            staging: Box::new([]),
        }
    }

    pub(super) fn unsent(&self) -> usize {
        self.posts.len() + self.taken.len() + self.sent.len()
    }

    pub(super) fn drop_frames(&mut self) {
        self.posts.clear();
        self.taken.clear();
        self.sent.clear();
        self.inbox.clear();
    }

    pub(super) fn finish(&mut self, cause: Cause) {
        self.open = false;
        if self.cause.is_none() {
            self.cause = Some(cause);
            self.drop_frames();
        }
    }

    /// How the end of a stream looks from here.
    pub(super) fn cause_of_end(&self) -> Cause {
        let between = self.expect == Expect::Header && self.inbox.is_empty();
        if between { Cause::Peer } else { Cause::Truncated }
    }

    /// The next `wanted` bytes, and how many frames end in them.
    pub(super) fn take(&mut self, wanted: usize) -> (Vec<u8>, usize) {
        let mut bytes = Vec::with_capacity(wanted);
        let mut whole = 0;
        while let Some(post) = self.posts.front_mut() {
            if post.taken < HEADER_BYTES {
                let count = (wanted - bytes.len()).min(HEADER_BYTES - post.taken);
                bytes.extend_from_slice(&post.header[post.taken..post.taken + count]);
                post.taken += count;
            }
            let offset = post.taken.saturating_sub(HEADER_BYTES);
            let count = (wanted - bytes.len()).min(post.payload.len() - offset);
            if post.taken >= HEADER_BYTES && count > 0 {
                // SAFETY: lent until `Sent`, which comes after the last byte was taken here, and
                // copied at once.
                bytes.extend_from_slice(unsafe { post.payload.part(offset, count).bytes() });
                post.taken += count;
            }
            if post.taken < HEADER_BYTES + post.payload.len() {
                break;
            }
            self.taken.push_back(post.token);
            self.posts.pop_front();
            whole += 1;
        }
        (bytes, whole)
    }

    /// Answers a header.
    pub(super) fn land(&mut self, landing: Landing) {
        if self.expect != Expect::Answer {
            return;
        }
        self.expect = match landing {
            _ if landing.length() == 0 => Expect::Header,
            Landing::Into(rest) => Expect::Into { rest },
            Landing::Pieces(left) => Expect::Pieces { left },
        };
    }

    /// Takes a piece back, and poisons it for whoever looks at it later.
    pub(super) fn consume(&mut self) {
        if let Expect::Consume { left } = self.expect {
            self.staging.fill(Line([POISON; ALIGNMENT]));
            self.expect = if left == 0 { Expect::Header } else { Expect::Pieces { left } };
        }
    }

    /// Appends what has happened here. Returns false after `Closed`.
    pub(super) fn poll(
        &mut self,
        lane: LaneId,
        events: &mut Room<'_>,
        random: &mut Random,
    ) -> bool {
        if self.open {
            while !events.is_full()
                && let Some(token) = self.sent.pop_front()
            {
                events.push(Event::Sent { lane, token });
            }
            while !events.is_full()
                && let Some(event) = self.receive(lane, random)
            {
                events.push(event);
            }
            if self.finished && self.starved() {
                self.finish(self.cause_of_end());
            }
        }
        // A piece stays valid until it is consumed, whatever becomes of the lane, unless this end
        // has let go of it.
        let held = matches!(self.expect, Expect::Consume { .. }) && !self.closing;
        match self.cause {
            Some(cause) if !held && !events.is_full() => {
                self.poison_landing();
                self.staging = Box::new([]);
                events.push(Event::Closed { lane, cause });
                false
            }
            _ => true,
        }
    }

    /// Whether only more bytes could move this end on.
    fn starved(&self) -> bool {
        match self.expect {
            Expect::Header => self.inbox.len() < HEADER_BYTES,
            Expect::Into { .. } => self.inbox.is_empty(),
            Expect::Pieces { left } => self.inbox.len() < left.min(ALIGNMENT),
            Expect::Answer | Expect::Consume { .. } => false,
        }
    }

    /// Moves the inbox on as far as it goes; returns the event that this brings, if any.
    fn receive(&mut self, lane: LaneId, random: &mut Random) -> Option<Event> {
        match self.expect {
            Expect::Header if self.inbox.len() >= HEADER_BYTES => {
                let mut header = [0; HEADER_BYTES];
                self.inbox.read_exact(&mut header).ok()?;
                self.expect = Expect::Answer;
                Some(Event::Header { lane, header, carried: Carried::Nothing })
            }
            Expect::Into { rest } => {
                let written = self.write(rest);
                self.expect = Expect::Into { rest: rest.behind(written) };
                (written == rest.len()).then(|| {
                    self.expect = Expect::Header;
                    Event::Landed { lane }
                })
            }
            Expect::Pieces { left } => {
                let wish = (ALIGNMENT << random.below(11)).min(PIECE_BYTES_MAX);
                let mut length = self.inbox.len().min(left).min(wish);
                if length < left {
                    length -= length % ALIGNMENT;
                }
                (length > 0).then(|| {
                    self.stage(length);
                    self.expect = Expect::Consume { left: left - length };
                    // SAFETY: staging holds so many bytes, and is written again by `consume`, or
                    // freed when a poll tells that this end has closed the lane.
                    let piece = unsafe { Piece::new(self.staging.as_ptr().cast(), length) };
                    Event::Piece { lane, piece }
                })
            }
            _ => None,
        }
    }

    /// Writes what has arrived to the landing; returns how many bytes that were.
    fn write(&mut self, rest: Writable) -> usize {
        let count = self.inbox.len().min(rest.len());
        let (front, back) = self.inbox.as_slices();
        let first = front.len().min(count);
        let (target, behind) = (rest.part(0, first), rest.part(first, count - first));
        // SAFETY: lent until `Landed` or `Closed`, neither of which has been told. The inbox is
        // memory of our own.
        unsafe { std::ptr::copy_nonoverlapping(front.as_ptr(), target.as_ptr(), target.len()) };
        // SAFETY: `behind` is the part of that loan after what was just written, and as long as
        // what is left of `count`, which `back` holds; the inbox is apart from it.
        unsafe { std::ptr::copy_nonoverlapping(back.as_ptr(), behind.as_ptr(), behind.len()) };
        self.inbox.drain(..count);
        count
    }

    fn stage(&mut self, length: usize) {
        if self.staging.is_empty() {
            self.staging = vec![Line([0; ALIGNMENT]); PIECE_BYTES_MAX / ALIGNMENT].into();
        }
        let mut left = length;
        for line in &mut self.staging[..length.div_ceil(ALIGNMENT)] {
            let count = left.min(ALIGNMENT);
            // The inbox holds at least `length` bytes, so the read cannot come up short.
            let _ = self.inbox.read_exact(&mut line.0[..count]);
            left -= count;
        }
    }

    /// Until `Closed` the landing is ours: whoever reuses it earlier finds it overwritten.
    fn poison_landing(&mut self) {
        if let Expect::Into { rest } = self.expect {
            // SAFETY: the rest of the landing is lent until `Closed`, which follows.
            unsafe { std::ptr::write_bytes(rest.as_ptr(), POISON, rest.len()) };
        }
    }
}
