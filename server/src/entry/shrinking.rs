//! A key whose rounds go on without groups that die, or [that are slow](super::short). One that
//! breaks off must leave no trace.
//!
//! Contributions are added as they come, as where nobody may die. If one breaks off, nothing is
//! left of the sum: the round begins anew, and the ranks that live are asked for theirs once more,
//! which they keep for servers that die. The last one is known when all others are there, or dead,
//! and divides and narrows the sum as it comes; where the round closes for a death, that is done
//! then.
//!
//! Of a key that does not wait for slow ranks, or whose value stays, nobody keeps what he sent. The
//! first contribution lands where the sum is, and is overwritten if it breaks off; each later one
//! lands in a place of its own, and is added once it is whole; and the sum is divided and narrowed
//! when the round closes.
//!
//! What has come whole counts, also of a group that is dead by then: each result says how many
//! contributions it holds, and which it lacks.

use super::short::bits;
use super::told::Told;
use super::{Entry, Groups, KeptPlace, Take, Turnout};
use bps_engine::base::{Operation, Rank, word};
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

    /// Whether contributions are added once they are whole.
    pub(super) fn is_apart(&self) -> bool {
        self.shrinks_sums() && (self.short.is_some() || self.stored.is_some())
    }

    /// A payload begins to arrive, of a key out of whose sums groups may drop that die.
    pub(super) fn begin_some(&mut self, checks: bool) -> Take {
        let first = self.landed == 0;
        self.finishes = if first { None } else { self.last_divisor() };
        self.checksum = (checks && self.finishes.is_some()).then_some(0);
        let is_wide = self.dtype.accumulator() == self.dtype;
        if first && is_wide { Take::Land } else { Take::Pieces }
    }

    /// By what the sum is divided if the payload that is taken now is the last one: all other
    /// groups are complete, or dead.
    fn last_divisor(&self) -> Option<u32> {
        let open = self.open.as_ref()?;
        let lost = self.groups.lost().iter().filter(|group| !open.is_complete(**group));
        let is_last = open.count() + word(lost.clone().count()) + 1 == self.groups.count();
        let ranks =
            self.groups.ranks() - lost.map(|group| self.groups.size_of(*group)).sum::<u32>();
        is_last.then_some(if self.operation == Operation::Average { ranks } else { 1 })
    }

    /// Where in its memory the payload lands that is taken now.
    pub(super) fn landing_at(&self) -> usize {
        if self.landed == 0 || !self.is_apart() {
            return 0;
        }
        let wide = self.bytes / self.dtype.size() * self.dtype.accumulator().size();
        wide.next_multiple_of(ALIGNMENT)
    }

    /// A payload begins to arrive that is added once it is whole.
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

    /// What was coming on this lane, of this rank, does not come. Says whether a part of it is in
    /// the sum: then all contributions are to be [taken back](Self::take_back).
    #[must_use]
    pub fn withdraw(&mut self, lane: LaneId, rank: Rank) -> bool {
        if !self.shrinks() {
            // A sum may have some of its bytes: the key stays active for ever, and its round can't
            // be whole.
            return false;
        }
        let is_spoilt = self.active == Some(lane)
            && self.landed > 0
            && self.shrinks_sums()
            && !self.is_apart()
            && !self.is_restoring();
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
        is_spoilt
    }

    /// Takes back the contribution of the first rank from this one on that had given one, to a sum
    /// of which nothing is left.
    pub fn take_back(&mut self, from: Rank) -> Option<Rank> {
        (self.landed, self.is_finished) = (0, false);
        let open = self.open.as_mut()?;
        let mut speakers = std::iter::successors(open.next_speaker(from), |last| {
            open.next_speaker(Rank(last.0 + 1))
        });
        let rank = speakers.find(|rank| open.is_complete(self.groups.of(*rank)))?;
        open.withdraw(self.groups.of(rank), rank);
        Some(rank)
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
        let lost = self.groups.lost();
        let of_dead = lost.iter().filter(|group| open.is_complete(**group)).count();
        let live = self.groups.count() as usize - lost.len();
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
            if self.is_finished {
                assert!(
                    self.finishes == Some(divisor),
                    "{}: nobody came behind the last",
                    self.key
                );
                self.bytes
            } else {
                self.checksum = None;
                self.finish(kernels, divisor)
            }
        };
        if checks && self.checksum.is_none() {
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

#[cfg(test)]
mod tests {
    use super::super::accumulator_bytes;
    use super::*;
    use crate::entry::Turnouts;
    use bps_engine::base::{DType, Key};
    use bps_engine::mem::{Arena, Options};
    use bps_engine::proto::messages::KeySpec;
    use bps_engine::reduce::kernels;
    use bps_engine::wire::header::Form;

    const LANES: [LaneId; 3] = [LaneId(10), LaneId(11), LaneId(12)];

    struct Bench {
        entry: Entry,
        turnouts: Turnouts,
        /// Holds the entry's claim.
        _arena: Arena,
    }

    /// A part of four elements that three ranks sum, or average.
    fn bench(dtype: DType, operation: Operation) -> Bench {
        let groups = Arc::new(Groups::new(&[0, 1, 2]).that_shrink(true));
        let bytes = u32::try_from(4 * dtype.size()).unwrap();
        let spec = KeySpec {
            key: Key(1),
            core: 0,
            bytes,
            dtype,
            operation,
            members: Default::default(),
            receiver: None,
            encoding: None,
            store: None,
            rounds: 0,
        };
        let options = Options { name: "test".into(), numa_node: None, shared: false };
        let mut arena = Arena::reserve(1 << 20, &options).unwrap();
        let claim = arena.claim(accumulator_bytes(&spec, true)).unwrap();
        let (entry, turnouts) = (Entry::new(&spec, &groups, claim), Turnouts::new(&groups));
        Bench { entry, turnouts, _arena: arena }
    }

    impl Bench {
        /// A rank contributes so many bytes of these elements, each of which is the same; whether
        /// that is all.
        fn contribute(&mut self, rank: u32, value: f32, bytes: usize) {
            let Bench { entry, turnouts, .. } = self;
            let all = floats(value);
            entry.arrive(Rank(rank), bps_engine::optimize::Act::NONE, turnouts);
            match entry.begin(LANES[rank as usize], Form::Declared, true) {
                Take::Land => {
                    // SAFETY: just begun, and the arena lives.
                    let landing = unsafe { entry.landing(all.len()) };
                    // SAFETY: as many bytes, which nobody else has.
                    unsafe { landing.as_ptr().copy_from(all.as_ptr(), bytes) };
                    if bytes == all.len() {
                        entry.landed(false);
                    }
                }
                // SAFETY: the bytes live until they are added.
                Take::Pieces => unsafe {
                    entry.add_piece(kernels(), 0, Readable::of(&all[..bytes]), 1);
                },
            }
            if bytes == all.len() {
                entry.add_landed(kernels(), 1).unwrap();
                entry.end(Rank(rank));
            }
        }

        fn lose(&mut self, ranks: &[u32]) {
            let gone: Vec<Rank> = ranks.iter().copied().map(Rank).collect();
            let groups = Arc::new(self.entry.groups().without(&gone, true));
            self.entry.lose(&groups);
        }

        /// The result, for how many it stands, and who is missing.
        fn close(&mut self) -> (Vec<u8>, u32, u64) {
            assert!(self.entry.is_whole());
            self.entry.close(kernels(), true);
            let (contributors, missing) =
                (self.entry.contributors(), self.entry.missing_from_result());
            self.entry.publish();
            // SAFETY: nothing is begun while this is read, and the arena lives.
            let result = unsafe { self.entry.result(Rank(0)).bytes() }.to_vec();
            assert_eq!(self.entry.checksum, Some(crc32c(&result)));
            while !self.entry.sent(&mut self.turnouts) {}
            (result, contributors, missing)
        }
    }

    fn floats(value: f32) -> Vec<u8> {
        [value; 4].iter().flat_map(|one| one.to_le_bytes()).collect()
    }

    #[test]
    fn nothing_of_one_that_breaks_off_is_in_the_sum_and_others_contribute_again() {
        for operation in [Operation::Sum, Operation::Average] {
            let divisor = if operation == Operation::Sum { 1.0 } else { 2.0 };
            let mut bench = bench(DType::F32, operation);
            bench.contribute(0, 1.0, 16);
            bench.contribute(1, 2.0, 8);
            assert!(bench.entry.withdraw(LANES[1], Rank(1)), "the sum has half of it");
            assert_eq!(bench.entry.take_back(Rank(0)), Some(Rank(0)));
            assert_eq!(bench.entry.take_back(Rank(1)), None);
            assert!(!bench.entry.has_arrived(Rank(0)) && bench.entry.free());
            bench.lose(&[1]);
            assert!(!bench.entry.is_whole());
            bench.contribute(2, 5.0, 16);
            bench.contribute(0, 1.0, 16);
            assert_eq!(bench.close(), (floats(6.0 / divisor), 2, 0b10), "{operation:?}");
            // The next round is as any other.
            bench.contribute(0, 3.0, 16);
            bench.contribute(2, 5.0, 16);
            assert_eq!(bench.close(), (floats(8.0 / divisor), 2, 0b10), "{operation:?}");
        }
    }

    #[test]
    fn the_first_is_overwritten_and_who_dies_last_is_not_waited_for() {
        let mut bench = bench(DType::F32, Operation::Average);
        bench.contribute(2, 9.0, 8);
        assert!(!bench.entry.withdraw(LANES[2], Rank(2)), "nobody else's is spoilt");
        bench.contribute(0, 1.0, 16);
        bench.contribute(1, 2.0, 16);
        assert!(!bench.entry.is_whole(), "nobody knows yet that it has died");
        // Nothing had been divided when the last one came.
        bench.lose(&[2]);
        assert_eq!(bench.close(), (floats(1.5), 2, 0b100));
        bench.contribute(0, 4.0, 16);
        // Of the dead counts what has come whole.
        bench.contribute(1, 6.0, 16);
        bench.lose(&[2, 1]);
        assert_eq!(bench.close(), (floats(5.0), 2, 0b100));
    }
}
