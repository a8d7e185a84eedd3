//! A key whose rounds go on without groups that die, or [that are slow](super::short). Nobody knows
//! before which contribution is the last, and one that breaks off must leave no trace. So the first
//! lands where the sum is, and is overwritten if it breaks off; each later one lands in a place of
//! its own, and is added once it is whole; and the sum is divided and narrowed when the round
//! closes.
//!
//! What has come whole counts, also of a group that is dead by then: each result says how many
//! contributions it holds, and which it lacks.

use super::short::bits;
use super::told::Told;
use super::{Entry, Groups, KeptPlace, Take, Turnout};
use bps_engine::base::{Operation, Rank};
use bps_engine::encode::Malformed;
use bps_engine::limits::ALIGNMENT;
use bps_engine::mem::Readable;
use bps_engine::reduce::Kernels;
use bps_engine::transport::LaneId;
use bps_engine::wire::crc32c;
use std::sync::Arc;
use std::time::Duration;

impl Entry {
    /// Whether nothing has come of it since it was installed, and nothing is being sent.
    #[must_use]
    pub fn is_untouched(&self) -> bool {
        self.open.is_none() && self.told.is_none() && self.active.is_none()
    }

    /// Whether its rounds go on without groups that die or are slow.
    #[must_use]
    pub fn shrinks(&self) -> bool {
        let chooses = self.encoded.as_ref().is_some_and(|encoded| encoded.encoding().auto);
        let may = self.groups.shrinks() || self.short.is_some();
        may && !chooses && self.optimized.is_none()
    }

    /// Whether groups may drop out of its sums.
    pub(super) fn shrinks_sums(&self) -> bool {
        let is_broadcast = matches!(self.operation, Operation::Broadcast(_));
        self.shrinks() && !is_broadcast && self.encoded.is_none()
    }

    /// Where in its memory the payload lands that is taken now.
    pub(super) fn landing_at(&self) -> usize {
        if self.landed == 0 || !self.shrinks_sums() {
            return 0;
        }
        let wide = self.bytes / self.dtype.size() * self.dtype.accumulator().size();
        wide.next_multiple_of(ALIGNMENT)
    }

    /// A payload begins to arrive, of a key out of whose sums groups may drop.
    pub(super) fn begin_apart(&mut self) -> Take {
        self.checksum = None;
        if self.landed > 0 {
            return Take::Land;
        }
        let is_wide = self.dtype.accumulator() == self.dtype;
        if is_wide { Take::Land } else { Take::Pieces }
    }

    /// Adds the payload that has landed in a place of its own; it was divided by `scale`.
    ///
    /// # Errors
    /// As [`Entry::decode`], where payloads are encoded.
    pub fn add_landed(&mut self, kernels: &Kernels, scale: u32) -> Result<(), Malformed> {
        if self.is_restoring() {
            return self.check_restored();
        }
        let at = self.landing_at();
        if at > 0 {
            assert!(at + self.bytes <= self.accumulator.len(), "{}: it has landed", self.key);
            // SAFETY: the entry's own claim, of which nothing was lent since the payload landed.
            let payload = unsafe {
                Readable::new(self.accumulator.as_ptr().cast_const().add(at), self.bytes)
            };
            self.add_piece(kernels, 0, payload, scale);
        }
        self.decode(kernels)
    }

    /// What was coming on this lane, of this rank, does not come.
    pub fn withdraw(&mut self, lane: LaneId, rank: Rank) {
        if !self.shrinks() {
            // A sum may have some of its bytes: the key stays active for ever, and its round can't
            // be whole.
            return;
        }
        if self.active == Some(lane) {
            self.active = None;
        }
        if let Some(open) = &mut self.open {
            let group = self.groups.of(rank);
            if !open.is_complete(group) {
                open.withdraw(group, rank);
            }
        }
        self.settle_without();
    }

    /// Goes on without ranks that have died: those of `groups`, which are else the same.
    pub fn lose(&mut self, groups: &Arc<Groups>) {
        self.groups = Arc::clone(groups);
        if let Some(short) = &mut self.short {
            short.lose(groups);
        }
        if let Some(stored) = &mut self.stored {
            for (_, rank) in groups.gone() {
                stored.lose(*rank, groups.of(*rank));
            }
            self.opened_at = self.opened_at.filter(|_| !stored.is_idle());
        }
        self.settle_without();
    }

    /// Nobody waits for a round in which only the dead have taken part.
    fn settle_without(&mut self) {
        if self.open.as_ref().is_some_and(|open| self.is_deserted(open)) {
            self.opened_at = None;
            self.stall_counted = false;
        }
    }

    /// Whether nobody has begun to contribute to a round who lives.
    pub(super) fn is_deserted(&self, open: &Turnout) -> bool {
        let is_dead = |rank: Rank| self.groups.is_gone(rank);
        let mut from = Rank(0);
        while let Some(rank) = open.next_speaker(from) {
            if !is_dead(rank) {
                return false;
            }
            from = Rank(rank.0 + 1);
        }
        self.shrinks()
    }

    /// Whether the contributions of all groups that live are complete, nothing is landing of one
    /// that does not, and nobody reads the result before it: a broadcast without a root has no
    /// payload that would have waited for that.
    pub(super) fn is_whole_without(&self) -> bool {
        let Some(open) = &self.open else { return false };
        let gone = self.groups.gone();
        let is_complete = |&&(_, rank): &&(u32, Rank)| open.is_complete(self.groups.of(rank));
        let of_dead = gone.iter().filter(is_complete).count();
        let live = self.groups.count() as usize - gone.len();
        self.free() && live > 0 && open.count() as usize == live + of_dead
    }

    /// Ranks whose contributions to a round are complete: by what an average is divided.
    fn divisor_of(&self, open: &Turnout) -> u32 {
        if self.groups.gone().is_empty() && self.short.is_none() {
            return self.groups.ranks();
        }
        let of_group = |group| if open.is_complete(group) { self.groups.size_of(group) } else { 0 };
        (0..self.groups.count()).map(of_group).sum()
    }

    /// Makes the result of a round that is whole, where that is not done with its last payload;
    /// `checks` says whether publications carry a checksum.
    pub fn close(&mut self, kernels: &Kernels, checks: bool) {
        if !self.shrinks() || self.close_restored(checks) {
            return;
        }
        self.result = Told::All;
        let result_bytes = if self.stored.is_some() {
            self.bytes
        } else {
            let Some(open) = &self.open else { return };
            if let Operation::Broadcast(root) = self.operation {
                if !open.is_complete(self.groups.of(root)) {
                    self.result = Told::Lost;
                }
                // Its checksum was taken with its bytes.
                return;
            }
            let contributors = self.divisor_of(open);
            let lacks = |rank: &Rank| !open.is_complete(self.groups.of(*rank));
            let missing = match &self.short {
                Some(_) => bits(self.groups.iter().filter(lacks)),
                None => {
                    let lacking = self.groups.gone().iter().filter(|(_, rank)| lacks(rank));
                    lacking.fold(0, |bits, (bit, _)| bits | 1u64 << bit)
                }
            };
            self.result = Told::Some { contributors, missing };
            let divisor = if self.operation == Operation::Average { contributors } else { 1 };
            self.finish(kernels, divisor)
        };
        if checks {
            let at = if let Some(encoded) = &self.encoded {
                // SAFETY: the entry's own claim, in which the result stands.
                unsafe { encoded.payload(&self.accumulator) }.as_ptr()
            } else {
                self.accumulator.as_ptr().cast_const()
            };
            // SAFETY: the entry's own claim, in which so many bytes of the result stand.
            let result = unsafe { std::slice::from_raw_parts(at, result_bytes) };
            self.checksum = Some(crc32c(result));
        }
    }

    /// Keeps the result of a round that [is made](Self::close), if some ranks are late for it.
    /// Returns how long the round has waited for them.
    pub fn keep_result(&mut self, now: Duration) -> Duration {
        let length = self.encoded.as_ref().map_or(self.bytes, |encoded| encoded.length());
        let (place, waited) = self.keep(now, length);
        let (Some(short), Some(place)) = (&self.short, place) else { return waited };
        let (at, memory) = (short.place_at(place), self.accumulator.as_ptr());
        assert!(at + length <= self.accumulator.len(), "{}: it has a place", self.key);
        let result = match &self.encoded {
            // SAFETY: the entry's own claim, in which the result stands.
            Some(encoded) => unsafe { encoded.payload(&self.accumulator) }.as_ptr(),
            None => memory.cast_const(),
        };
        // SAFETY: the entry's own claim has the place, behind all else that the key has, and nobody
        // reads what was kept in it before (`Kept`).
        unsafe { std::ptr::copy_nonoverlapping(result, memory.add(at), length) };
        waited
    }

    /// The result that is kept in a place.
    ///
    /// # Safety
    /// The claim stays mapped until whoever reads it is done, and that is not
    /// [told](Self::kept_sent) before.
    #[must_use]
    pub unsafe fn kept_result(&self, place: KeptPlace) -> Readable {
        let short = self.short.as_ref().expect("results are kept");
        let (at, length) = (short.place_at(place), self.kept(place).length);
        assert!(at + length <= self.accumulator.len(), "{}: it has a place", self.key);
        // SAFETY: the claim has so many bytes there, which `keep_result` wrote and nobody writes
        // before they are no longer read.
        unsafe { Readable::new(self.accumulator.as_ptr().cast_const().add(at), length) }
    }

    /// Divides the sum and narrows it; returns how many bytes the result has.
    fn finish(&mut self, kernels: &Kernels, divisor: u32) -> usize {
        if let Some(encoded) = &mut self.encoded {
            encoded.finish(kernels, &mut self.accumulator, self.round + 1, divisor);
            return encoded.length();
        }
        let is_result = self.dtype.accumulator() == self.dtype && divisor == 1;
        if !is_result {
            let at = self.accumulator.as_ptr();
            let count = self.bytes / self.dtype.size();
            // SAFETY: the entry's own claim, lent to nobody: so many wide elements, and the narrow
            // result of each is never behind it.
            unsafe { kernels.finish(self.dtype, at, at.cast_const(), count, divisor) };
        }
        self.bytes
    }

    /// The ranks that are not in the result, as its header has them.
    #[must_use]
    pub fn missing_from_result(&self) -> u64 {
        match self.result {
            Told::Some { missing, .. } => missing,
            Told::All | Told::Lost => 0,
        }
    }
}
