//! Who may write where and when, without a device: space in the peer's area, places to receive,
//! credit, and which sends ask for a completion.
//!
//! A sender owns the order of the peer's area: it reserves a run for each extent, and frees runs in
//! the same order when the peer has released the extent *and* the device has completed the send,
//! because the bytes leave from a mirror of the area.
//!
//! Why it never stalls: of [`EXTENTS`] extents at most a quarter are released and not yet told, and
//! at most a quarter are unsignalled; of the area's bytes at most a quarter and an eighth. Why no
//! message finds the peer without a place to receive: besides [`EXTENTS`] extents there are at most
//! as many credits, since each tells of an extent that its reader still counts; an answer for each
//! of [`GRANTS`] places; one farewell; and [`BATCH`] places that wait to be posted together.

#![forbid(unsafe_code)]

use super::error::BROKEN;
use super::grants::GRANTS;
use super::layout::{BATCH, EXTENTS, Layout, PREFIX_BYTES, SENDS};
use crate::base::word;
use crate::limits::{ALIGNMENT, HEADER_BYTES, PART_BYTES_MAX};
use crate::transport::area::Area;
use crate::transport::{Cause, Grant};
use crate::wire::RawHeader;
use std::collections::VecDeque;

const SIGNAL_EVERY: u64 = BATCH as u64;
const COUNT_BITS: u32 = 30;
const COUNT_MASK: u32 = (1 << COUNT_BITS) - 1;
/// Of the bits that go with an answer, those that count what was released.
const ANSWER_BITS: u32 = 22;
const ANSWER_MASK: u32 = (1 << ANSWER_BITS) - 1;
const FLAG_FIRST: u32 = 1;
const FLAG_GRANTS: u32 = 2;
const FLAG_ANSWERS: u32 = 4;
/// Numbers of four bytes behind the header.
const WORDS: usize = 9;

const _: () = assert!(HEADER_BYTES + 4 * WORDS <= PREFIX_BYTES);
const _: () = assert!(GRANTS <= 1 << (COUNT_BITS - ANSWER_BITS) && EXTENTS < 1 << ANSWER_BITS);
const _: () = assert!(BATCH <= EXTENTS / 4);

/// What the first extent of a frame says of memory that one end grants to the other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Said {
    Nothing,
    /// The answer to this frame may be written there.
    Grants(Grant),
    /// This frame is the answer for which the peer granted this place; it could not be written
    /// there.
    Answers(u8),
}

/// What stands in front of an extent's payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Prefix {
    /// Whether a frame begins here, with this header and so many bytes of payload in all.
    pub(super) first: Option<(RawHeader, usize)>,
    /// Bytes of payload here.
    pub(super) length: usize,
    /// Extents of the other direction released so far, modulo 2^30.
    pub(super) released: u32,
    /// Nothing, unless a frame begins here.
    pub(super) said: Said,
}

impl Prefix {
    pub(super) fn encode(&self) -> [u8; PREFIX_BYTES] {
        let mut bytes = [0; PREFIX_BYTES];
        let (mut flags, mut total) = (0, 0);
        if let Some((header, all)) = &self.first {
            bytes[..HEADER_BYTES].copy_from_slice(header);
            (flags, total) = (FLAG_FIRST, *all);
        }
        let mut words = [0; WORDS];
        (words[1], words[2], words[3]) = (low(self.length), low(total), self.released);
        match self.said {
            Said::Nothing => {}
            Said::Grants(Grant { number, key, address, length }) => {
                flags |= FLAG_GRANTS;
                (words[4], words[5], words[6]) = (number.into(), key, length);
                (words[7], words[8]) = (low_word(address), low_word(address >> 32));
            }
            Said::Answers(number) => {
                flags |= FLAG_ANSWERS;
                words[4] = number.into();
            }
        }
        words[0] = flags;
        for (index, word) in words.iter().enumerate() {
            let at = HEADER_BYTES + 4 * index;
            bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    pub(super) fn decode(bytes: &[u8; PREFIX_BYTES]) -> Result<Prefix, Cause> {
        let word = |index: usize| {
            let at = HEADER_BYTES + 4 * index;
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let first = (word(0) & FLAG_FIRST != 0).then(|| {
            let mut header = [0; HEADER_BYTES];
            header.copy_from_slice(&bytes[..HEADER_BYTES]);
            (header, word(2) as usize)
        });
        // A peer's number: one beyond the table of grants is refused where it is used.
        let number = u8::try_from(word(4)).unwrap_or(u8::MAX);
        let said = match word(0) & !FLAG_FIRST {
            0 => Said::Nothing,
            FLAG_GRANTS => Said::Grants(Grant {
                number,
                key: word(5),
                address: u64::from(word(7)) | u64::from(word(8)) << 32,
                length: word(6),
            }),
            FLAG_ANSWERS => Said::Answers(number),
            _ => return Err(BROKEN),
        };
        // Whether the memory is what the peer says only its own device can tell.
        let is_sound = match said {
            Said::Nothing => true,
            Said::Answers(_) => first.is_some(),
            Said::Grants(Grant { number, length, .. }) => {
                let fits = (1..=PART_BYTES_MAX).contains(&(length as usize));
                first.is_some() && usize::from(number) < GRANTS && fits
            }
        };
        if !is_sound {
            return Err(BROKEN);
        }
        let prefix = Prefix { first, length: word(1) as usize, released: word(3), said };
        // What a prefix does not use is zero.
        if prefix.released <= COUNT_MASK && prefix.encode() == *bytes {
            Ok(prefix)
        } else {
            Err(BROKEN)
        }
    }

    /// Whether it may be the next of a payload of which `left` bytes are missing.
    pub(super) fn check(&self, left: usize) -> Result<(), Cause> {
        let is_last = self.length == left;
        let is_inner =
            self.length > 0 && self.length < left && self.length.is_multiple_of(ALIGNMENT);
        if left <= PART_BYTES_MAX && (is_last || is_inner) { Ok(()) } else { Err(BROKEN) }
    }
}

/// The 32 bits that go with every write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Notice {
    /// An extent lies at this offset of the area.
    Extent { offset: usize },
    /// So many extents were released, modulo 2^30.
    Credit { released: u32 },
    /// The answer was written to the place of this number; and so many extents were released,
    /// modulo 2^22.
    Answer { number: u8, released: u32 },
    /// Nothing follows.
    Farewell,
}

impl Notice {
    pub(super) fn encode(self) -> u32 {
        match self {
            Notice::Extent { offset } => low(offset / ALIGNMENT) & COUNT_MASK,
            Notice::Credit { released } => 1 << COUNT_BITS | released & COUNT_MASK,
            Notice::Farewell => 2 << COUNT_BITS,
            Notice::Answer { number, released } => {
                3 << COUNT_BITS | u32::from(number) << ANSWER_BITS | released & ANSWER_MASK
            }
        }
    }

    pub(super) fn decode(bits: u32) -> Option<Notice> {
        let value = bits & COUNT_MASK;
        match bits >> COUNT_BITS {
            0 => Some(Notice::Extent { offset: value as usize * ALIGNMENT }),
            1 => Some(Notice::Credit { released: value }),
            2 if value == 0 => Some(Notice::Farewell),
            3 => {
                let number = u8::try_from(value >> ANSWER_BITS).ok()?;
                Some(Notice::Answer { number, released: value & ANSWER_MASK })
            }
            _ => None,
        }
    }
}

/// What this end sends: the peer's area, and the queue of sends.
pub(super) struct Sending {
    layout: Layout,
    area: Area,
    /// Bytes of the area that each extent under way takes.
    taken: [u32; EXTENTS],
    published: u64,
    released: u64,
    completed: u64,
    freed: u64,
    unsignalled_bytes: usize,
    posted: u64,
    done: u64,
    signalled: u64,
    /// For each send that asked for a completion: how many sends and extents that completes.
    signals: VecDeque<(u64, u64)>,
}

impl Sending {
    pub(super) fn new(layout: Layout) -> Sending {
        Sending {
            layout,
            area: Area::new(layout.area_bytes()),
            taken: [0; EXTENTS],
            published: 0,
            released: 0,
            completed: 0,
            freed: 0,
            unsignalled_bytes: 0,
            posted: 0,
            done: 0,
            signalled: 0,
            signals: VecDeque::with_capacity(SENDS),
        }
    }

    /// Most bytes of payload that an extent has.
    pub(super) fn extent_bytes(&self) -> usize {
        self.layout.slot_bytes
    }

    /// Bytes that are sent at most before a peer that sleeps is woken to read them.
    pub(super) fn quiet_bytes_max(&self) -> usize {
        self.layout.area_bytes() / 8
    }

    /// Sends posted so far.
    pub(super) fn posted(&self) -> u64 {
        self.posted
    }

    /// Of these, from the first on, those whose memory the device needs no more.
    pub(super) fn done(&self) -> u64 {
        self.done
    }

    /// Whether all sends that were posted are known to be complete.
    pub(super) fn is_idle(&self) -> bool {
        self.done == self.posted
    }

    /// Whether nothing more can be sent before some send completes, whatever the peer releases.
    pub(super) fn awaits_completion(&self) -> bool {
        self.completed < self.released || !self.has_room()
    }

    /// Whether one more send fits, besides the farewell.
    pub(super) fn has_room(&self) -> bool {
        self.posted - self.done < SENDS as u64 - 1
    }

    /// Where an extent with so much payload may go: its offset, and what that takes.
    pub(super) fn find(&self, length: usize) -> Option<(usize, usize)> {
        let may = self.published - self.freed < EXTENTS as u64 && self.has_room();
        if may { self.area.find(PREFIX_BYTES + length) } else { None }
    }

    /// An extent is posted where `find` said. Returns whether it must ask for a completion, which
    /// it does in any case if `signal`.
    pub(super) fn publish(&mut self, at: usize, length: usize, taken: usize, signal: bool) -> bool {
        let length = PREFIX_BYTES + length;
        self.area.reserve(at, length, taken);
        self.taken[slot(self.published)] = word(taken);
        self.published += 1;
        self.unsignalled_bytes += taken;
        self.post(signal)
    }

    /// A send without an extent is posted. Returns whether it must ask for a completion.
    pub(super) fn post(&mut self, signal: bool) -> bool {
        self.posted += 1;
        let is_due = self.posted - self.signalled >= SIGNAL_EVERY
            || self.unsignalled_bytes >= self.layout.area_bytes() / 8;
        if signal || is_due {
            self.signalled = self.posted;
            self.unsignalled_bytes = 0;
            self.signals.push_back((self.posted, self.published));
        }
        signal || is_due
    }

    /// A send that asked for it has completed, and with it all before it.
    pub(super) fn handle_completion(&mut self) {
        if let Some((done, completed)) = self.signals.pop_front() {
            (self.done, self.completed) = (done, completed);
            self.free();
        }
    }

    /// The peer says how many extents it has released.
    pub(super) fn handle_released(&mut self, count: u32) -> Result<(), Cause> {
        self.release(count, COUNT_MASK)
    }

    /// It says so with an answer.
    pub(super) fn handle_released_low(&mut self, count: u32) -> Result<(), Cause> {
        self.release(count, ANSWER_MASK)
    }

    fn release(&mut self, count: u32, mask: u32) -> Result<(), Cause> {
        let news = u64::from(count.wrapping_sub(low_count(self.released)) & mask);
        if news > self.published - self.released {
            return Err(BROKEN);
        }
        self.released += news;
        self.free();
        Ok(())
    }

    fn free(&mut self) {
        while self.freed < self.released.min(self.completed) {
            self.area.free(self.taken[slot(self.freed)] as usize);
            self.freed += 1;
        }
    }
}

/// What has arrived.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Arrived {
    Extent {
        /// What stands in front of it, copied when it arrived.
        prefix: Prefix,
        /// Where its payload lies in our area.
        payload_at: usize,
    },
    /// An answer, in the place of this number.
    Answer(u8),
}

/// What this end receives: its area, and the credit that it owes.
pub(super) struct Receiving {
    area_bytes: usize,
    waiting: VecDeque<Arrived>,
    arrived: u64,
    released: u64,
    told: u64,
    untold_bytes: usize,
}

impl Receiving {
    pub(super) fn new(layout: Layout) -> Receiving {
        Receiving {
            area_bytes: layout.area_bytes(),
            waiting: VecDeque::with_capacity(EXTENTS + GRANTS),
            arrived: 0,
            released: 0,
            told: 0,
            untold_bytes: 0,
        }
    }

    /// Whether the device may have written so many bytes to this offset, by the rules.
    pub(super) fn check(&self, offset: usize, bytes: usize) -> Result<(), Cause> {
        let fits = bytes >= PREFIX_BYTES
            && offset <= self.area_bytes
            && bytes <= self.area_bytes - offset
            && self.arrived - self.told < EXTENTS as u64;
        if fits { Ok(()) } else { Err(BROKEN) }
    }

    /// An extent has arrived at this offset, whose place was checked.
    pub(super) fn arrive(
        &mut self,
        offset: usize,
        bytes: usize,
        prefix: Prefix,
    ) -> Result<(), Cause> {
        if prefix.length != bytes - PREFIX_BYTES {
            return Err(BROKEN);
        }
        self.arrived += 1;
        self.waiting.push_back(Arrived::Extent { prefix, payload_at: offset + PREFIX_BYTES });
        Ok(())
    }

    /// An answer has arrived, whose place was checked.
    pub(super) fn answer(&mut self, number: u8) {
        self.waiting.push_back(Arrived::Answer(number));
    }

    /// Whether nothing waits to be read.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// What is to be read next.
    pub(super) fn next(&mut self) -> Option<Arrived> {
        self.waiting.pop_front()
    }

    /// An extent was read: its bytes may be written to again.
    pub(super) fn release(&mut self, bytes: usize) {
        self.released += 1;
        self.untold_bytes += bytes;
    }

    /// Whether the peer should be told even if nothing else goes to it.
    pub(super) fn is_due(&self) -> bool {
        self.released - self.told >= EXTENTS as u64 / 4 || self.untold_bytes >= self.area_bytes / 4
    }

    /// What to tell the peer now.
    pub(super) fn tell(&mut self) -> u32 {
        self.told = self.released;
        self.untold_bytes = 0;
        low_count(self.released)
    }
}

fn slot(sequence: u64) -> usize {
    usize::try_from(sequence % EXTENTS as u64).expect("there are few extents")
}

#[allow(clippy::cast_possible_truncation, reason = "the caller wants the low bits")]
fn low_count(count: u64) -> u32 {
    count as u32 & COUNT_MASK
}

#[allow(clippy::cast_possible_truncation, reason = "the caller wants the low half")]
fn low_word(value: u64) -> u32 {
    value as u32
}

#[allow(clippy::cast_possible_truncation, reason = "lengths are below PART_BYTES_MAX")]
fn low(value: usize) -> u32 {
    value as u32
}

#[cfg(test)]
#[path = "flow_tests.rs"]
mod tests;
