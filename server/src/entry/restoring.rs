//! A key that this core has adopted from a server that is lost, at a round of which some ranks have
//! had the result. These give it back, byte for byte, and it is published to the others, who ask
//! for it without bytes of their own. The first that is whole is taken; the others pass by.
//!
//! All ranks that live take part (of those that sum among themselves, the owner), so that the next
//! round begins when nobody is behind. Whoever has had the result gets none of its bytes.

use super::told::Told;
use super::{Entry, NumberSet, Take};
use bps_engine::base::{Operation, Rank};
use bps_engine::encode::Malformed;
use bps_engine::transport::LaneId;
use bps_engine::wire::Header;
use bps_engine::wire::crc32c;
use bps_engine::wire::header::{FLAG_RESULT, Form};

/// See the [module](self).
pub(super) struct Restoring {
    round: u64,
    /// Ranks that have had the result.
    holders: NumberSet,
    /// Whose contributions are in it.
    told: Told,
    /// It is here.
    is_there: bool,
}

impl Entry {
    /// Its open round is to be restored.
    pub fn restore(&mut self) {
        assert!(self.shrinks() && self.open.is_none(), "{}: nothing has come of it", self.key);
        // Ranks of a set have the numbers that they have in the job.
        let limit = self.groups.iter().last().map_or(0, |last| last.0 + 1);
        let (round, holders) = (self.round + 1, NumberSet::new(limit));
        let (told, is_there) = (Told::All, false);
        self.restoring = Some(Box::new(Restoring { round, holders, told, is_there }));
    }

    fn open_restoring(&self) -> Option<&Restoring> {
        self.restoring.as_deref().filter(|one| one.round == self.round + 1)
    }

    /// Whether the open round is being restored.
    #[must_use]
    pub fn is_restoring(&self) -> bool {
        self.open_restoring().is_some()
    }

    /// Whether it still lacks the result that it is to publish.
    pub(super) fn lacks_result(&self) -> bool {
        self.open_restoring().is_some_and(|one| !one.is_there)
    }

    /// Whether a frame may be of a round that is being restored.
    #[must_use]
    pub fn takes_restored(&self, header: &Header) -> bool {
        let length = header.length as usize;
        if header.flags & FLAG_RESULT == 0 {
            return length == 0 && header.contributors == self.groups.size_with(header.rank);
        }
        let is_lost = header.contributors == 0;
        match (self.operation, &self.encoded) {
            // Its root has died before it gave its bytes, and ranks were told so.
            (Operation::Broadcast(_), _) if is_lost => length == 0,
            _ if is_lost => false,
            (_, Some(encoded)) => encoded.takes(header.form(), length),
            (_, None) => header.form() == Form::Declared && length == self.bytes,
        }
    }

    /// A frame has come of a round that is being restored.
    pub fn note_restored(&mut self, header: &Header) {
        let Some(restoring) = &mut self.restoring else { return };
        if header.flags & FLAG_RESULT == 0 {
            return;
        }
        restoring.holders.insert(header.rank.0);
        restoring.told = match header.contributors {
            0 => Told::Lost,
            contributors => Told::Some { contributors, missing: header.missing },
        };
        restoring.is_there |= header.length == 0;
    }

    /// The payload of a result begins to arrive.
    pub(super) fn begin_restored(&mut self, lane: LaneId, form: Form) -> Take {
        self.active = Some(lane);
        self.checksum = None;
        if !self.lacks_result() {
            return Take::Pieces;
        }
        if let Some(encoded) = &mut self.encoded {
            encoded.begin(form, true);
        }
        Take::Land
    }

    /// The payload of a result is whole. Returns whether one was being restored.
    pub(super) fn end_restored(&mut self) -> bool {
        let open = self.round + 1;
        let restoring = self.restoring.as_mut().filter(|one| one.round == open);
        restoring.is_some_and(|one| {
            one.is_there = true;
            true
        })
    }

    /// Whether the payload that has landed can be the result.
    pub(super) fn check_restored(&self) -> Result<(), Malformed> {
        match self.encoded.as_ref().filter(|_| self.lacks_result()) {
            Some(encoded) => encoded.check_payload(&self.accumulator),
            None => Ok(()),
        }
    }

    /// The round is whole, and what was given back is its result. Says whether it was one of those.
    pub(super) fn close_restored(&mut self, checks: bool) -> bool {
        let open = self.round + 1;
        self.restoring.take_if(|one| one.round != open);
        let Some(restoring) = &self.restoring else { return false };
        self.result = restoring.told;
        if checks && !self.result.is_lost() {
            // SAFETY: the entry's own claim, in which the result has landed.
            let result = unsafe { self.result(Rank(u32::MAX)) };
            // SAFETY: nobody writes there before the round is over.
            self.checksum = Some(crc32c(unsafe { result.bytes() }));
        }
        true
    }

    /// Whether a rank has given the result that is being published.
    pub(super) fn gave_result(&self, rank: Rank) -> bool {
        let last = self.restoring.as_ref().filter(|one| one.round == self.round);
        last.is_some_and(|one| one.holders.contains(rank.0))
    }
}
