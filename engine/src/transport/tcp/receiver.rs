//! The receiving half of a lane without a system call: which memory the next bytes go to, and what
//! they mean.
//!
//! A driver asks [`wanted`](Receiver::wanted), receives into that memory in order, reports the
//! count to [`received`](Receiver::received), and takes events from [`next`](Receiver::next) until
//! there are none.
//!
//! Headers arrive in the staging buffer. Behind a large payload it is opened for one header only,
//! so that no byte of the next large payload is copied; behind a small one it is opened whole, so
//! that a run of small frames comes in with one call and is served from there.
//!
//! Invariant: between `wanted` and the `received` that answers it, the memory named stays
//! where it is and this module neither reads nor writes it.

use super::memory::{Block, Pool};
use crate::limits::{
    ALIGNMENT, HEADER_BYTES, OPERATION_BYTES_MAX, SCRATCH_BYTES, SMALL_BYTES, STAGING_BYTES,
};
use crate::mem::Writable;
use crate::transport::{Carried, Cause, Event, Landing, LaneId, Piece};
use libc::iovec;

const NOWHERE: iovec = iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

/// Where the next bytes go: first one, then the other, which may be empty.
pub(super) type Wanted = [iovec; 2];

#[derive(Clone, Copy)]
enum State {
    /// Collecting a header in staging.
    Header,
    /// A header is out; the caller has not said where its payload goes.
    Standing,
    /// The rest of the payload goes to this memory of the caller.
    Into { rest: Writable },
    /// A piece is being filled: `filled` bytes of it are in scratch; `left` counts from its first
    /// byte.
    Filling { filled: usize, left: usize },
    /// A piece is out; `left` bytes of payload follow it; it lies in the first `staged` bytes of
    /// staging, or in scratch if that is 0.
    Held { left: usize, staged: usize },
}

/// See the [module](self).
pub(super) struct Receiver {
    state: State,
    staging: Block,
    start: usize,
    end: usize,
    scratch: Option<Block>,
    /// Whether the frame at hand is small, so that staging may be filled as far as it goes.
    roomy: bool,
}

impl Receiver {
    pub fn new() -> Receiver {
        Receiver {
            state: State::Header,
            staging: Block::new(STAGING_BYTES),
            start: 0,
            end: 0,
            scratch: None,
            roomy: false,
        }
    }

    /// Whether only the caller can move this lane on, by `land` or `consume`.
    pub fn standing(&self) -> bool {
        matches!(self.state, State::Standing | State::Held { .. })
    }

    /// Whether the caller's answer brings another event without the kernel's help: the frame behind
    /// the one at hand has come with it.
    pub fn has_more(&self) -> bool {
        match self.state {
            State::Standing => self.staged() > 0,
            State::Held { staged, .. } => self.staged() >= staged + HEADER_BYTES,
            _ => false,
        }
    }

    /// Why the lane ends if the peer's bytes end here.
    pub fn cause_at_end(&self) -> Cause {
        match self.state {
            State::Header if self.staged() == 0 => Cause::Peer,
            _ => Cause::Truncated,
        }
    }

    /// The caller's answer to a header.
    pub fn land(&mut self, landing: Landing) {
        assert!(matches!(self.state, State::Standing), "land answers a header, once");
        self.roomy = landing.length() <= SMALL_BYTES;
        self.state = match landing {
            _ if landing.length() == 0 => State::Header,
            Landing::Into(rest) => State::Into { rest },
            Landing::Pieces(left) => State::Filling { filled: 0, left },
        };
    }

    /// The caller's answer to a piece.
    pub fn consume(&mut self, pool: &mut Pool) {
        let State::Held { left, staged } = self.state else {
            panic!("consume answers a piece, once");
        };
        self.start += staged;
        self.release(pool);
        self.state = match left {
            0 => State::Header,
            left => State::Filling { filled: 0, left },
        };
    }

    /// Gives back what the lane holds of the pool.
    pub fn release(&mut self, pool: &mut Pool) {
        if let Some(scratch) = self.scratch.take() {
            pool.give(scratch);
        }
    }

    /// The next event that the bytes here allow.
    pub fn next(&mut self, lane: LaneId, pool: &mut Pool) -> Option<Event> {
        match self.state {
            State::Header => self.next_header(lane),
            State::Standing | State::Held { .. } => None,
            State::Into { rest } => {
                // SAFETY: lent to the lane until `Landed`, and memory of a caller is none of ours.
                let count = unsafe { self.unstage(rest.as_ptr(), rest.len()) };
                if count < rest.len() {
                    self.state = State::Into { rest: rest.behind(count) };
                    return None;
                }
                self.state = State::Header;
                Some(Event::Landed { lane })
            }
            State::Filling { filled, left } => self.next_piece(lane, pool, filled, left),
        }
    }

    fn next_header(&mut self, lane: LaneId) -> Option<Event> {
        if self.staged() < HEADER_BYTES {
            return None;
        }
        let mut header = [0; HEADER_BYTES];
        // SAFETY: the array is as long as the count.
        unsafe { self.unstage(header.as_mut_ptr(), HEADER_BYTES) };
        self.state = State::Standing;
        Some(Event::Header { lane, header, carried: Carried::Nothing })
    }

    fn next_piece(
        &mut self,
        lane: LaneId,
        pool: &mut Pool,
        filled: usize,
        left: usize,
    ) -> Option<Event> {
        let length = left.min(SCRATCH_BYTES);
        if filled == 0 && self.staged() >= length && self.start.is_multiple_of(ALIGNMENT) {
            // Staging is aligned, so the piece is too: it is served where it lies.
            let data = self.staging.at(self.start);
            self.state = State::Held { left: left - length, staged: length };
            // SAFETY: `length` bytes have been received there, and nothing is while the lane holds
            // them, or after it was closed.
            let piece = unsafe { Piece::new(data, length) };
            return Some(Event::Piece { lane, piece });
        }
        let data = self.scratch.get_or_insert_with(|| pool.take()).at(0);
        // SAFETY: `length` is at most the size of a scratch buffer, and `filled` is below `length`.
        let filled = filled + unsafe { self.unstage(data.wrapping_add(filled), length - filled) };
        if filled < length {
            self.state = State::Filling { filled, left };
            return None;
        }
        self.state = State::Held { left: left - length, staged: 0 };
        // SAFETY: the scratch buffer has been filled so far, and is the lane's until `consume` or
        // `release`, before which nothing more is received into it.
        let piece = unsafe { Piece::new(data, length) };
        Some(Event::Piece { lane, piece })
    }

    fn staged(&self) -> usize {
        self.end - self.start
    }

    /// Takes up to `count` bytes out of staging and says how many.
    ///
    /// # Safety
    /// `count` bytes at `to` can be written and lie outside of staging.
    unsafe fn unstage(&mut self, to: *mut u8, count: usize) -> usize {
        let count = count.min(self.staged());
        let from = self.staging.at(self.start);
        // SAFETY: bytes `start..end` of staging have been received; the caller vouches for `to`.
        unsafe { std::ptr::copy_nonoverlapping(from, to, count) };
        self.start += count;
        count
    }

    /// Where the next bytes go, if the lane wants any: call it after `next` said that there is no
    /// event, and only while no receive is under way.
    pub fn wanted(&mut self, pool: &mut Pool) -> Option<Wanted> {
        let room = if self.roomy { STAGING_BYTES } else { HEADER_BYTES };
        match self.state {
            State::Standing | State::Held { .. } => None,
            State::Header => {
                self.compact();
                let rest = iovec_of(self.staging.at(self.end), room - self.end);
                Some([rest, NOWHERE])
            }
            State::Into { rest } => Some(self.payload(rest.as_ptr(), rest.len(), true, room)),
            State::Filling { filled, left } => {
                let to = self.scratch.get_or_insert_with(|| pool.take()).at(filled);
                let length = left.min(SCRATCH_BYTES);
                Some(self.payload(to, length - filled, length == left, room))
            }
        }
    }

    /// `left` bytes of payload, and behind them staging if the frame ends there.
    fn payload(&mut self, to: *mut u8, left: usize, last: bool, room: usize) -> Wanted {
        debug_assert!(self.staged() == 0, "next took every staged byte of the payload");
        (self.start, self.end) = (0, 0);
        let behind = match last && left <= OPERATION_BYTES_MAX {
            true => iovec_of(self.staging.at(0), room),
            false => NOWHERE,
        };
        let first = iovec_of(to, left.min(OPERATION_BYTES_MAX));
        [first, behind]
    }

    /// Moves a header that is partly here to the front of staging.
    fn compact(&mut self) {
        let staged = self.staged();
        debug_assert!(staged < HEADER_BYTES, "next took every whole header");
        if self.start > 0 {
            let (from, to) = (self.staging.at(self.start), self.staging.at(0));
            // SAFETY: both ranges lie within staging; `copy` allows that they overlap.
            unsafe { std::ptr::copy(from, to, staged) };
        }
        (self.start, self.end) = (0, staged);
    }

    /// So many bytes have been received into the memory that `wanted` named.
    pub fn received(&mut self, count: usize) {
        let mut rest = count;
        match &mut self.state {
            State::Header => {}
            State::Into { rest: of_payload } => {
                let here = rest.min(of_payload.len());
                *of_payload = of_payload.behind(here);
                rest -= here;
            }
            State::Filling { filled, left } => {
                let here = rest.min((*left).min(SCRATCH_BYTES) - *filled);
                *filled += here;
                rest -= here;
            }
            State::Standing | State::Held { .. } => unreachable!("nothing was wanted"),
        }
        self.end += rest;
        debug_assert!(self.end <= STAGING_BYTES);
    }
}

fn iovec_of(first: *mut u8, length: usize) -> iovec {
    iovec { iov_base: first.cast(), iov_len: length }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "patterns, and counts that are small")]
mod tests;
