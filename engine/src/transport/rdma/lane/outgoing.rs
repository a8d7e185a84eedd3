//! What a lane sends: frames as extents in the peer's area, answers straight to where the peer
//! granted, and the chain that takes them to the device.

use super::super::chain::Send;
use super::super::device::Counters;
use super::super::flow::{Notice, Prefix, Said};
use super::super::layout::PREFIX_BYTES;
use super::{COPY_BYTES, RdmaLane};
use crate::limits::{LANE_FRAMES_MAX, PART_BYTES_MAX};
use crate::mem::Readable;
use crate::transport::{Answer, Cause, Frame, Full, Grant};
use crate::wire::RawHeader;

/// A frame that was posted and not yet returned.
pub(super) struct Outgoing {
    header: RawHeader,
    payload: Readable,
    pub(super) token: u64,
    /// The key of the shared memory that the payload is sent from.
    shared: Option<u32>,
    /// What it says of granted memory.
    said: Said,
    /// The peer's memory that it is written to as a whole; then it lies in shared memory.
    straight: Option<Grant>,
    /// How many sends must be complete before the frame is sent.
    sent_at: u64,
}

/// What is to be sent next.
pub(super) enum Next {
    /// A frame, whole, to where the peer granted.
    Answer(Grant),
    /// So many bytes, to this place of the peer's area, which takes so much of it.
    Extent { length: usize, at: usize, taken: usize },
}

impl RdmaLane {
    /// Whether it may grant memory for one more answer.
    pub(in super::super) fn has_grants(&self) -> bool {
        self.grants.has_room()
    }

    /// Takes a frame, with the keys of the shared memory that its payload lies in and of that
    /// which its answer may be written to.
    pub(in super::super) fn post(
        &mut self,
        frame: &Frame,
        shared: Option<u32>,
        landing_key: Option<u32>,
    ) -> Result<(), Full> {
        assert!(frame.payload.len() <= PART_BYTES_MAX, "a frame is never larger than a part");
        if self.frames.len() >= LANE_FRAMES_MAX {
            return Err(Full);
        }
        let (said, straight) = match frame.answer {
            Answer::No => (Said::Nothing, None),
            Answer::Wanted { into, token } => {
                let key = landing_key.expect("only memory that may be granted is");
                let at = into.as_ptr().expose_provenance();
                (Said::Grants(self.grants.open(at, into.len(), key, token)), None)
            }
            Answer::To(grant) => {
                let length = frame.payload.len();
                assert!(length == grant.length(), "an answer is as long as what was granted");
                let is_straight = shared.is_some() && length <= self.pair.rail().message_bytes;
                (Said::Answers(grant.number), is_straight.then_some(grant))
            }
        };
        self.frames.push_back(Outgoing {
            header: frame.header,
            payload: frame.payload,
            token: frame.token,
            shared,
            said,
            straight,
            sent_at: 0,
        });
        Ok(())
    }

    pub(super) fn is_front_sent(&self) -> bool {
        let done = self.sending.done();
        self.pumped > 0 && self.frames.front().is_some_and(|frame| frame.sent_at <= done)
    }

    pub(super) fn next(&self) -> Option<Next> {
        let frame = self.frames.get(self.pumped)?;
        if let Some(grant) = frame.straight {
            return self.sending.has_room().then_some(Next::Answer(grant));
        }
        let length = (frame.payload.len() - self.started).min(self.sending.extent_bytes());
        let (at, taken) = self.sending.find(length)?;
        Some(Next::Extent { length, at, taken })
    }

    /// Posts what there is room and time for of the posted frames.
    pub(super) fn pump(&mut self) -> Result<(), Cause> {
        let mut budget = COPY_BYTES;
        let mut next = self.next();
        while let Some(what) = next {
            let (length, copied) = match what {
                Next::Answer(grant) => (grant.length(), self.add_answer(grant)),
                Next::Extent { length, at, taken } => (length, self.add_extent(length, at, taken)),
            };
            budget = budget.saturating_sub(copied);
            next = if budget > 0 { self.next() } else { None };
            // A peer that sleeps is woken once for a run of short frames, by the last at the
            // latest.
            self.quiet_bytes += PREFIX_BYTES + length;
            if next.is_none() || self.quiet_bytes >= self.sending.quiet_bytes_max() {
                self.chain.solicit();
                self.quiet_bytes = 0;
            }
            // Large extents leave at once, so that the device works while the next is copied.
            if self.chain.is_full() || copied >= COPY_BYTES / 16 {
                self.flush()?;
            }
        }
        self.flush()
    }

    /// Adds the next extent to the chain. Returns how many bytes were copied for it.
    fn add_extent(&mut self, length: usize, at: usize, taken: usize) -> usize {
        let released = self.receiving.tell();
        let frame = &self.frames[self.pumped];
        let is_first = self.started == 0;
        let first = is_first.then_some((frame.header, frame.payload.len()));
        let said = if is_first { frame.said } else { Said::Nothing };
        let payload = frame.payload.part(self.started, length);
        let shared = frame.shared;
        let is_last = self.started + length == frame.payload.len();
        let prefix = Prefix { first, length, released, said }.encode();
        let to = self.outgoing.at(at, PREFIX_BYTES + length);
        // SAFETY: the mirror has so many bytes there, which no live extent overlaps (`Area`).
        unsafe { to.copy_from_nonoverlapping(prefix.as_ptr(), PREFIX_BYTES) };
        if shared.is_none() {
            // SAFETY: the payload is lent until `Sent`; it is the host's, since what is a GPU's is
            // shared; and the mirror has room for it behind the prefix.
            unsafe {
                to.add(PREFIX_BYTES).copy_from_nonoverlapping(payload.as_ptr(), length);
            }
            Counters::add(&self.counters().staged_bytes, length);
        }
        let key = self.outgoing.lkey();
        let parts = match shared {
            Some(shared) => [(to.addr(), PREFIX_BYTES, key), (address(payload), length, shared)],
            None => [(to.addr(), PREFIX_BYTES + length, key), (0, 0, 0)],
        };
        let signal = is_last && shared.is_some();
        let is_signalled = self.sending.publish(at, length, taken, signal);
        let remote = (self.remote_address.wrapping_add(at as u64), self.remote_key);
        self.add(Notice::Extent { offset: at }, remote, parts, is_signalled);
        Counters::add(&self.counters().extents, 1);
        self.started += length;
        if is_last {
            self.frame_added();
        }
        if shared.is_some() { 0 } else { length }
    }

    /// Adds the next frame, an answer in shared memory, to the chain. Nothing is copied for it.
    fn add_answer(&mut self, grant: Grant) -> usize {
        let released = self.receiving.tell();
        let frame = &self.frames[self.pumped];
        let key = frame.shared.expect("an answer goes straight from shared memory only");
        let parts = [(address(frame.payload), frame.payload.len(), key), (0, 0, 0)];
        let is_signalled = self.sending.post(true);
        let notice = Notice::Answer { number: grant.number, released };
        self.add(notice, (grant.address, grant.key), parts, is_signalled);
        Counters::add(&self.counters().answers, 1);
        self.frame_added();
        0
    }

    /// All of a frame is in the chain or under way.
    fn frame_added(&mut self) {
        let posted = self.sending.posted();
        let frame = &mut self.frames[self.pumped];
        // A copied payload is the caller's again at once.
        frame.sent_at = if frame.shared.is_some() { posted } else { 0 };
        self.pumped += 1;
        self.started = 0;
    }

    /// Adds a send without bytes to the chain.
    pub(super) fn push(&mut self, notice: Notice, signal: bool) {
        let is_signalled = self.sending.post(signal);
        let remote = (self.remote_address, self.remote_key);
        self.add(notice, remote, [(0, 0, 0); 2], is_signalled);
        self.chain.solicit();
    }

    /// Adds a send to the chain, which has room: it is flushed when full.
    fn add(
        &mut self,
        notice: Notice,
        remote: (u64, u32),
        parts: [(usize, usize, u32); 2],
        is_signalled: bool,
    ) {
        let [(_, bytes, _), (_, more, _)] = parts;
        // Only what is in the mirror may be read by a processor for sure.
        let is_inline = matches!(notice, Notice::Extent { .. })
            && bytes <= self.pair.inline_bytes()
            && more == 0;
        let id = self.id;
        self.chain.add(&Send { id, notice, is_signalled, is_inline, remote, parts });
        Counters::add(&self.counters().sends, 1);
        Counters::add(&self.counters().signals, usize::from(is_signalled));
    }

    /// Posts the chain.
    pub(super) fn flush(&mut self) -> Result<(), Cause> {
        let Some(first) = self.chain.link() else { return Ok(()) };
        Counters::add(&self.rails.counters.send_calls, 1);
        // SAFETY: just linked; what it gathers are the mirror's live extents, and payloads that
        // their posters keep until `Sent`.
        match unsafe { self.pair.post_send(first) } {
            0 => Ok(()),
            errno => Err(Cause::Os(errno)),
        }
    }
}

/// By which the device knows a payload.
fn address(payload: Readable) -> usize {
    payload.as_ptr().expose_provenance()
}
