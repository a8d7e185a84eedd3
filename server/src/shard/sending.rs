//! Results on their way to the ranks: which keys have one, in the order in which they were
//! published, and how far each lane has come.
//!
//! A key has at most one result under way, since its memory takes the next contribution only when
//! nobody reads the last result. So one list through all keys serves every lane: a lane remembers
//! the first result that it has not posted, which stays in the list until it has been sent there.
//! What is kept for lanes and keys together is only what a transport has, at most
//! [`LANE_FRAMES_MAX`] frames a lane.

use super::{ASKED, Session, Shard};
use crate::entry::{Entry, KeptPlace};
use bps_engine::base::{Rank, Round, word};
use bps_engine::limits::{GRANTS_MAX, LANE_FRAMES_MAX};
use bps_engine::proto::store::Store;
use bps_engine::trace::timeline::Mark;
use bps_engine::transport::{Answer, Frame, Grant, LaneId};
use bps_engine::wire::header::FLAG_PAYLOAD_CHECKSUM;
use bps_engine::wire::{Header, Kind};
use std::collections::VecDeque;

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Neighbours {
    before: u32,
    after: u32,
}

/// Keys whose result is being sent, by their places among the entries; the oldest result first.
pub(super) struct Results {
    /// Of every entry.
    links: Vec<Neighbours>,
    first: u32,
    last: u32,
}

impl Default for Results {
    fn default() -> Results {
        Results { links: Vec::new(), first: NONE, last: NONE }
    }
}

impl Results {
    /// There are so many entries.
    pub(super) fn make_room(&mut self, entries: usize) {
        if self.links.len() < entries {
            self.links.resize(entries, Neighbours { before: NONE, after: NONE });
        }
    }

    /// Adds a result; none of this entry is in.
    fn push(&mut self, index: usize) {
        let at = number(index);
        self.links[index] = Neighbours { before: self.last, after: NONE };
        match self.last {
            NONE => self.first = at,
            last => self.links[last as usize].after = at,
        }
        self.last = at;
    }

    /// Takes out the result of this entry, which is in.
    fn remove(&mut self, index: usize) {
        let Neighbours { before, after } = self.links[index];
        match before {
            NONE => self.first = after,
            before => self.links[before as usize].after = after,
        }
        match after {
            NONE => self.last = before,
            after => self.links[after as usize].before = before,
        }
    }

    /// The first result behind this one that goes to this rank.
    fn next_of(&self, rank: Rank, index: usize, entries: &[Entry]) -> Option<usize> {
        let mut after = self.links[index].after;
        while after != NONE {
            if entries[after as usize].goes_to(rank) {
                return Some(after as usize);
            }
            after = self.links[after as usize].after;
        }
        None
    }
}

/// Tokens of kept results have the number of their place, from 1, above this bit.
const PLACE_SHIFT: u32 = 32;

fn token_of(index: usize, place: KeptPlace) -> u64 {
    (place as u64 + 1) << PLACE_SHIFT | u64::from(number(index))
}

fn of_token(token: u64) -> (usize, Option<KeptPlace>) {
    let place = usize::try_from(token >> PLACE_SHIFT).expect("a few places");
    let index = usize::try_from(token & u64::from(u32::MAX)).expect("an index");
    (index, place.checked_sub(1))
}

fn number(index: usize) -> u32 {
    u32::try_from(index).expect("a job has fewer parts than that")
}

/// What a lane is still to be sent, and where it may be written.
pub(super) struct Outgoing {
    /// The first result that is not posted, if any.
    next: Option<usize>,
    /// Results that are not posted.
    queued: u64,
    /// Entries whose open rounds are to have this rank's contribution once more.
    asked: VecDeque<usize>,
    /// Results that entries keep for this rank, which was late, and that are not posted.
    owed: VecDeque<(usize, KeptPlace)>,
    /// Tokens of what is posted and not sent yet, in order.
    posted: VecDeque<u64>,
    /// Where the rank lets results be written to, by entry. A rank has few such places.
    grants: Vec<(u32, Grant)>,
}

impl Outgoing {
    pub(super) fn new() -> Outgoing {
        let posted = VecDeque::with_capacity(LANE_FRAMES_MAX);
        let (asked, owed) = (VecDeque::new(), VecDeque::new());
        Outgoing { next: None, queued: 0, asked, owed, posted, grants: Vec::new() }
    }

    /// Results that wait for room in the transport.
    pub(super) fn queued(&self) -> u64 {
        self.queued + self.owed.len() as u64
    }

    /// This rank is to contribute to the open round of an entry once more: at most once for each of
    /// its keys at a time, since it has to come before it is asked again.
    pub(super) fn ask(&mut self, index: usize) {
        self.asked.push_back(index);
    }

    /// This rank is to get what an entry keeps in this place. There are at most as many as the
    /// rank may be rounds behind, for each of its keys.
    pub(super) fn owe(&mut self, index: usize, place: KeptPlace) {
        self.owed.push_back((index, place));
    }

    /// Whether another grant may be [noted](Self::note).
    pub(super) fn takes_grants(&self) -> bool {
        self.grants.len() < GRANTS_MAX
    }

    /// The result of this entry's open round may be written there.
    pub(super) fn note(&mut self, index: usize, grant: Grant) {
        self.grants.push((number(index), grant));
    }

    fn answer(&self, index: usize) -> Answer {
        let found = self.grants.iter().find(|(of, _)| *of as usize == index);
        found.map_or(Answer::No, |(_, grant)| Answer::To(*grant))
    }

    fn forget_grant(&mut self, index: usize) {
        if let Some(at) = self.grants.iter().position(|(of, _)| *of as usize == index) {
            self.grants.swap_remove(at);
        }
    }
}

impl Shard {
    /// Sends the result of a round that is whole, if it is.
    pub(super) fn publish_if_whole(&mut self, index: usize) {
        self.see(index);
        let entry = &mut self.entries[index];
        if !entry.is_whole() {
            return;
        }
        if entry.is_restoring() {
            self.restored.push(entry.key);
        }
        entry.close(self.kernels, self.checksums);
        self.keep_result(index);
        let entry = &mut self.entries[index];
        self.counters.rounds_short.add(u64::from(entry.missing_from_result() != 0));
        entry.publish();
        entry.published_at = self.now;
        self.trace.record(Mark::Summed, entry.key, entry.round, Rank(0), entry.bytes);
        self.counters.rounds.add(1);
        self.results.push(index);
        let mut from = Rank(0);
        while let Some(rank) = self.entries[index].next_receiver(from) {
            from = Rank(rank.0 + 1);
            let lane = self.lanes[rank.0 as usize];
            let session = lane.and_then(|lane| self.sessions[lane.0 as usize].as_mut());
            match (lane, session) {
                (Some(lane), Some(session)) => {
                    session.outgoing.queued += 1;
                    // A lane that has more to post comes to this one by itself.
                    if session.outgoing.next.is_none() {
                        session.outgoing.next = Some(index);
                        self.flush(lane);
                    }
                }
                // A rank whose lane is gone is dead: its share of the publication counts as sent.
                _ => self.forget_share(index),
            }
        }
    }

    /// A rank has left in good order: those that a bound holds back wait for it no more.
    pub(super) fn let_go(&mut self, rank: Rank) {
        for index in 0..self.entries.len() {
            if self.entries[index].store().and_then(Store::deltas).is_some() {
                self.entries[index].leave(rank);
                self.publish_if_whole(index);
            }
        }
    }

    /// Posts what is to be sent on a lane, as far as the transport takes it.
    pub(super) fn flush(&mut self, lane: LaneId) {
        if !self.flush_asked(lane) || !self.flush_owed(lane) {
            return;
        }
        let Some(session) = &mut self.sessions[lane.0 as usize] else { return };
        while let Some(index) = session.outgoing.next {
            let entry = &self.entries[index];
            let length = entry.publication_bytes(session.rank);
            let mut header =
                Header::new(Kind::Publication, entry.dtype, session.rank, session.epoch);
            header.key = entry.key;
            header.round = Round(entry.round);
            header.length = word(length);
            header.contributors = entry.contributors();
            header.flags = entry.form().flag();
            header.missing = entry.missing_from_result();
            if let Some(checksum) = entry.checksum.filter(|_| session.checks && length > 0) {
                header.flags |= FLAG_PAYLOAD_CHECKSUM;
                header.payload_checksum = checksum;
            }
            // SAFETY: the key takes no payload while its result is being sent (`Entry::free`), and
            // its claim goes back to the arena after that, or once all lanes have closed; and the
            // endpoint is dropped before the entries and their arena.
            let payload = unsafe { entry.result(session.rank) };
            let (token, answer) = (index as u64, session.outgoing.answer(index));
            let frame = Frame { header: header.encode(), payload, token, answer };
            let at = self.trace.now();
            if self.endpoint.post(lane, &frame).is_err() {
                self.counters.full.add(1);
                return;
            }
            self.trace.frame_at(at, Mark::Posted, &header);
            self.counters.frames_out.add(1);
            self.counters.bytes_out.add(length as u64);
            let outgoing = &mut session.outgoing;
            outgoing.queued -= 1;
            outgoing.next = self.results.next_of(session.rank, index, &self.entries);
            outgoing.forget_grant(index);
            outgoing.posted.push_back(token);
        }
    }

    /// As [`flush`](Self::flush), of what is asked for once more. Returns whether the transport
    /// took all.
    fn flush_asked(&mut self, lane: LaneId) -> bool {
        let Some(session) = &mut self.sessions[lane.0 as usize] else { return false };
        while let Some(&index) = session.outgoing.asked.front() {
            let entry = &self.entries[index];
            let mut header = Header::new(Kind::Grant, entry.dtype, session.rank, session.epoch);
            (header.key, header.round) = (entry.key, Round(entry.round + 1));
            let frame = Frame::bare(header.encode(), ASKED);
            if self.endpoint.post(lane, &frame).is_err() {
                self.counters.full.add(1);
                return false;
            }
            self.counters.frames_out.add(1);
            session.outgoing.asked.pop_front();
        }
        true
    }

    /// As [`flush`](Self::flush), of what keys keep for a rank that was late. Returns whether the
    /// transport took all.
    fn flush_owed(&mut self, lane: LaneId) -> bool {
        let Some(session) = &mut self.sessions[lane.0 as usize] else { return false };
        while let Some(&(index, place)) = session.outgoing.owed.front() {
            let entry = &self.entries[index];
            let kept = *entry.kept(place);
            let mut header =
                Header::new(Kind::Publication, entry.dtype, session.rank, session.epoch);
            header.key = entry.key;
            header.round = Round(kept.round);
            header.length = word(kept.length);
            header.contributors = kept.contributors;
            header.missing = kept.missing;
            if let Some(checksum) = kept.checksum.filter(|_| session.checks) {
                header.flags |= FLAG_PAYLOAD_CHECKSUM;
                header.payload_checksum = checksum;
            }
            // SAFETY: the key keeps it until it is told that it was sent, and the claim goes back
            // to the arena after that, or once all lanes have closed; and the endpoint is dropped
            // before the entries and their arena.
            let payload = unsafe { entry.kept_result(place) };
            let (token, answer) = (token_of(index, place), session.outgoing.answer(index));
            let frame = Frame { header: header.encode(), payload, token, answer };
            let at = self.trace.now();
            if self.endpoint.post(lane, &frame).is_err() {
                self.counters.full.add(1);
                return false;
            }
            self.trace.frame_at(at, Mark::Posted, &header);
            self.counters.frames_out.add(1);
            self.counters.bytes_out.add(kept.length as u64);
            let outgoing = &mut session.outgoing;
            outgoing.owed.pop_front();
            outgoing.forget_grant(index);
            outgoing.posted.push_back(token);
        }
        true
    }

    /// The transport has sent the oldest result that it has of this lane.
    pub(super) fn on_result_sent(&mut self, lane: LaneId, token: u64) {
        let Some(session) = &mut self.sessions[lane.0 as usize] else { return };
        let posted = session.outgoing.posted.pop_front().expect("what is sent was posted");
        assert!(posted == token, "a transport returned tokens out of order");
        let (index, place) = of_token(token);
        let entry = &self.entries[index];
        let round = place.map_or(entry.round, |place| entry.kept(place).round);
        self.trace.record(Mark::Sent, entry.key, round, session.rank, entry.bytes);
        self.read((index, place));
        self.flush(lane);
    }

    /// A lane is gone, and with it all that it was still to be sent.
    pub(super) fn abandon(&mut self, session: &Session) {
        let Outgoing { next, owed, posted, .. } = &session.outgoing;
        let mut unsent: Vec<_> = posted.iter().map(|token| of_token(*token)).collect();
        unsent.extend(owed.iter().map(|&(index, place)| (index, Some(place))));
        let mut next = *next;
        while let Some(index) = next {
            unsent.push((index, None));
            next = self.results.next_of(session.rank, index, &self.entries);
        }
        for result in unsent {
            self.read(result);
        }
    }

    /// Nobody reads one share of a key's result, or of one that it keeps, any more.
    fn read(&mut self, (index, place): (usize, Option<KeptPlace>)) {
        match place {
            Some(place) => self.kept_sent(index, place),
            None => self.sent(index),
        }
    }

    /// Nobody reads one share of this key's result any more.
    fn forget_share(&mut self, index: usize) {
        if self.entries[index].sent(&mut self.turnouts) {
            self.results.remove(index);
        }
    }

    fn sent(&mut self, index: usize) {
        self.forget_share(index);
        // Ranks may have become due to get a stored value while others were sent it.
        self.publish_if_whole(index);
        self.next_in_line(index);
        self.forget_if_over(index);
    }
}
