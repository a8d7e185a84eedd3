//! One key: which groups of ranks have contributed to its open round, and where its sum is. Knows
//! no lane's transport and no clock.
//!
//! Contributions to a key are taken strictly one after the other: one lane is *active*, the others'
//! bytes wait in their sockets. That is what lets the first contribution land in the accumulator
//! itself, and the average fold into the last addition. It cannot deadlock: an active lane waits
//! for the network only.

mod adding;
mod encoded;
mod groups;
mod optimized;
mod restoring;
mod scaled;
mod short;
mod shrinking;
mod stored;
mod told;

pub use groups::{Groups, NumberSet, Turnout, Turnouts};
pub use optimized::Unfit;
pub use short::{Kept, KeptPlace};

use self::encoded::Encoded;
use self::optimized::Optimized;
use self::restoring::Restoring;
use self::short::Short;
use self::stored::Stored;
use self::told::Told;
use bps_engine::base::{DType, Key, Operation, Rank, word};
use bps_engine::limits::ALIGNMENT;
use bps_engine::mem::{Claim, Readable, Writable, cache};
use bps_engine::optimize::Act;
use bps_engine::proto::encoding::Encoding;
use bps_engine::proto::messages::KeySpec;
use bps_engine::proto::store::Store;
use bps_engine::transport::LaneId;
use bps_engine::wire::crc32c;
use bps_engine::wire::header::Form;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of an accumulator that are fetched for writing before they are needed.
const FETCH_BYTES: usize = 4096;

/// What the shard has to do with the payload that it was told of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Take {
    /// Receive it straight into the accumulator.
    Land,
    /// Receive it in pieces and hand each to [`Entry::add_piece`].
    Pieces,
}

/// The state of one key.
pub struct Entry {
    /// Its id.
    pub key: Key,
    /// Element type of contributions and publications.
    pub dtype: DType,
    /// Bytes of a contribution and of a publication, where they are not encoded.
    pub bytes: usize,
    /// What a round computes.
    pub operation: Operation,
    /// The rank that gets its results, if not all do.
    receiver: Option<Rank>,
    /// Rounds published so far; the open one is the next. Of a stored key: the version of its
    /// value, which is how many contributions it holds.
    pub round: u64,
    /// Who has contributed to the open round; none before the first.
    open: Option<Turnout>,
    /// Who contributed to the last round, while its publication is being sent to them.
    told: Option<Turnout>,
    /// When the open round got its first contribution, by the shard's clock.
    pub opened_at: Option<Duration>,
    /// When the last round was published.
    pub published_at: Duration,
    /// Publications of the last round whose memory is still being sent.
    pub publishing: u32,
    /// The first and the last lane that wait for their turn; each knows the one behind it.
    pub waiting: Option<(LaneId, LaneId)>,
    /// CRC-32C of the result, or of as much of it as is there, if a lane of the round wants it.
    pub checksum: Option<u32>,
    /// Whether the open round has been counted as stalled.
    pub stall_counted: bool,
    /// Of a retired key: the round after which nobody pushes it.
    pub last_round: Option<u64>,
    /// Whose payload is arriving now.
    active: Option<LaneId>,
    /// By what the result is divided that is made while it arrives, if it is the last one.
    finishes: Option<u32>,
    /// The accumulator holds the result of the open round.
    is_finished: bool,
    /// Payloads of the open round that are in the accumulator.
    landed: u32,
    /// How many payloads a round has. The only round of a stored key never ends, and where groups
    /// may die, nobody knows before.
    payloads: u32,
    groups: Arc<Groups>,
    /// Whose contributions are in the last result.
    result: Told,
    /// A box, since most keys have none.
    encoded: Option<Box<Encoded>>,
    /// Likewise, and then neither of the others.
    optimized: Option<Box<Optimized>>,
    /// Likewise. If its value stays between rounds, each rank has rounds of its own.
    stored: Option<Box<Stored>>,
    /// Likewise. If its rounds do not wait for slow ranks.
    short: Option<Box<Short>>,
    /// Likewise. Its first round is the last one that some ranks had of a lost server.
    restoring: Option<Box<Restoring>>,
    /// Where the sum is. Its memory is the entry's alone, but for what it lends.
    accumulator: Claim,
}

/// Bytes that the accumulator of such a key takes, with all else that it needs.
#[must_use]
pub fn accumulator_bytes(spec: &KeySpec, shrinks: bool) -> usize {
    if let Some(optimized) = Optimized::of(spec) {
        return optimized.bytes();
    }
    Short::of(spec).map_or_else(|| own_bytes(spec, shrinks), |short| short.bytes())
}

/// Bytes for a sum, and for a contribution in front of it where it is [added once it is
/// whole](Entry::is_apart).
fn own_bytes(spec: &KeySpec, shrinks: bool) -> usize {
    if let Some(encoded) = Encoded::of(spec) {
        return encoded.bytes();
    }
    let sum = spec.bytes as usize / spec.dtype.size() * spec.dtype.accumulator().size();
    let (backup, deltas) = (spec.store.and_then(Store::backup), spec.store.and_then(Store::deltas));
    let is_apart = backup.is_some() || shrinks && deltas.is_some();
    let has_place = is_apart && !matches!(spec.operation, Operation::Broadcast(_));
    if has_place { sum.next_multiple_of(ALIGNMENT) + spec.bytes as usize } else { sum }
}

/// Whether a round of such a key needs all groups, also where groups may die: the job forms again
/// then.
fn takes_all(spec: &KeySpec) -> bool {
    let chooses = spec.encoding.is_some_and(|encoding| encoding.auto);
    chooses || spec.store.and_then(Store::optimizer).is_some()
}

impl Entry {
    /// A key with nothing contributed yet. `accumulator` has at least [`accumulator_bytes`] of the
    /// spec.
    #[must_use]
    pub fn new(spec: &KeySpec, groups: &Arc<Groups>, accumulator: Claim) -> Entry {
        let room = accumulator_bytes(spec, groups.shrinks());
        assert!(accumulator.len() >= room, "{}: too little memory", spec.key);
        let deltas = spec.store.and_then(Store::deltas);
        let optimized = Optimized::of(spec).map(Box::new);
        let short = Short::of(spec).map(|short| short.among(groups, spec.rounds));
        Entry {
            key: spec.key,
            dtype: spec.dtype,
            bytes: spec.bytes as usize,
            operation: spec.operation,
            receiver: spec.receiver,
            round: spec.rounds,
            open: None,
            told: None,
            opened_at: None,
            published_at: Duration::ZERO,
            publishing: 0,
            waiting: None,
            checksum: None,
            stall_counted: false,
            last_round: None,
            active: None,
            finishes: None,
            is_finished: false,
            landed: 0,
            payloads: match (deltas, spec.operation) {
                (Some(_), _) => u32::MAX,
                (None, Operation::Broadcast(_)) => 1,
                (None, _) if short.is_some() => u32::MAX,
                (None, _) if groups.shrinks() && !takes_all(spec) => u32::MAX,
                (None, _) => groups.count() - word(groups.lost().len()),
            },
            result: if takes_all(spec) { Told::all_but_the_dead(groups) } else { Told::All },
            groups: Arc::clone(groups),
            encoded: optimized.is_none().then(|| Encoded::of(spec).map(Box::new)).flatten(),
            stored: deltas.map(|deltas| Box::new(Stored::new(deltas, groups))),
            short: short.map(Box::new),
            optimized,
            restoring: None,
            accumulator,
        }
    }

    /// The result of a published round, as many bytes as it has for this rank.
    ///
    /// # Safety
    /// The claim stays mapped, and the entry begins no payload, until whoever reads the result is
    /// done with it.
    #[must_use]
    pub unsafe fn result(&self, rank: Rank) -> Readable {
        if self.gave_result(rank) {
            return Readable::EMPTY;
        }
        if let Some(encoded) = self.encoded.as_ref().filter(|one| one.result() != Form::Plain) {
            // SAFETY: the entry's own claim, which the caller keeps mapped and unchanged.
            return unsafe { encoded.payload(&self.accumulator) };
        }
        if let Some(optimized) = &self.optimized {
            // SAFETY: the entry's own claim, which the caller keeps mapped and unchanged.
            return unsafe { optimized.result(&self.accumulator) };
        }
        let length = self.publication_bytes(rank);
        assert!(
            length <= self.accumulator.len(),
            "{}: a result is no longer than its sum",
            self.key
        );
        // SAFETY: the claim has so many bytes, which were zeros at first; the caller keeps them
        // mapped and unchanged.
        unsafe { Readable::new(self.accumulator.as_ptr().cast_const(), length) }
    }

    /// How its contributions and results are encoded, if they are.
    #[must_use]
    pub fn encoding(&self) -> Option<Encoding> {
        let optimized = self.optimized.as_ref().and_then(|optimized| optimized.encoding());
        self.encoded.as_ref().map(|encoded| encoded.encoding()).or(optimized)
    }

    /// The rank that gets its results, if not all do.
    #[must_use]
    pub fn receiver(&self) -> Option<Rank> {
        self.receiver
    }

    /// How its value is kept between rounds, if it is.
    #[must_use]
    pub fn store(&self) -> Option<Store> {
        let optimizer = self.optimized.as_ref().map(|optimized| optimized.optimizer());
        let deltas = self.stored.as_ref().map(|stored| stored.store());
        let backup = self.short.as_ref().map(|short| Store::Backup(short.backup()));
        deltas.map(Store::Deltas).or(optimizer.map(Store::Optimizer)).or(backup)
    }

    /// Where a payload of so many bytes lands: the first of a round or, encoded, any.
    ///
    /// # Safety
    /// [`begin`](Self::begin) has just said [`Take::Land`]. The claim stays mapped, and the entry
    /// is given no payload and asked for no result, until the payload has landed.
    #[must_use]
    pub unsafe fn landing(&mut self, length: usize) -> Writable {
        if let Some(encoded) = self.encoded.as_mut().filter(|encoded| encoded.lands()) {
            // SAFETY: the entry's own claim, which the caller keeps mapped, and the entry idle.
            return unsafe { encoded.landing(&self.accumulator, length) };
        }
        if let Some(optimized) = &self.optimized {
            // SAFETY: the entry's own claim, which the caller keeps mapped, and the entry idle.
            return unsafe { optimized.landing(&self.accumulator, length) };
        }
        assert!(length == self.bytes, "{}: a payload has the key's bytes", self.key);
        let at = self.landing_at();
        assert!(
            at + self.bytes <= self.accumulator.len(),
            "{}: a payload fits its place",
            self.key
        );
        // SAFETY: the claim has so many bytes from there on, which nobody else has, and the caller
        // keeps it mapped and this entry from using it.
        unsafe { Writable::new(self.accumulator.as_ptr().add(at), self.bytes) }
    }

    /// The payload that was begun with [`Take::Land`] has landed. Returns its CRC-32C if it
    /// `is_checked`, or the result's is wanted: where there is no other payload, that is the same.
    pub fn landed(&mut self, is_checked: bool) -> Option<u32> {
        if let Some(encoded) = self.encoded.as_ref().filter(|encoded| encoded.lands()) {
            // SAFETY: the entry's own claim, in which this payload has just landed.
            let payload = || unsafe { encoded.payload(&self.accumulator).bytes() };
            return is_checked.then(|| crc32c(payload()));
        }
        if let Some(optimized) = &self.optimized {
            // SAFETY: the entry's own claim, in which this payload has just landed.
            let payload = || unsafe { optimized.payload(&self.accumulator).bytes() };
            return is_checked.then(|| crc32c(payload()));
        }
        if !is_checked && self.checksum.is_none() {
            return None;
        }
        let at = self.landing_at();
        // SAFETY: the entry's own claim, of at least so many bytes from there on (`landing`); who
        // wrote them is done.
        let checksum = crc32c(unsafe {
            let at = self.accumulator.as_ptr().cast_const().add(at);
            std::slice::from_raw_parts(at, self.bytes)
        });
        self.checksum = self.checksum.map(|_| checksum);
        Some(checksum)
    }

    /// The ranks that contribute.
    #[must_use]
    pub fn groups(&self) -> &Groups {
        &self.groups
    }

    /// Whether a contribution can be for this.
    ///
    /// # Errors
    /// [`Unfit`], of a key with an optimizer.
    pub fn check_act(&self, act: Act) -> Result<(), Unfit> {
        match &self.optimized {
            Some(optimized) => optimized.check(act),
            None if act == Act::NONE => Ok(()),
            None => Err(Unfit::Senseless),
        }
    }

    /// Whether a contribution of this rank, which is one of [these](Self::groups), may have this
    /// form and so many bytes, if it [can be](Self::check_act) for this. In the group of a
    /// broadcast's root, only the root may speak, and in that of a receiver only the receiver.
    #[must_use]
    pub fn takes(&self, rank: Rank, (form, length): (Form, usize), act: Act) -> bool {
        let may_choose = self.encoded.as_ref().is_some_and(|encoded| encoded.encoding().auto);
        if form != Form::Declared && !may_choose {
            return false;
        }
        if let Some(optimized) = &self.optimized {
            return length == optimized.payload_bytes(act);
        }
        if let Some(stored) = &self.stored {
            let has_bytes = stored.takes_bytes(rank, self.groups.of(rank));
            return length == if has_bytes { self.bytes } else { 0 };
        }
        let is_beside = |to: Rank| to != rank && self.groups.of(to) == self.groups.of(rank);
        if self.receiver.is_some_and(is_beside) {
            return false;
        }
        match (self.operation, &self.encoded) {
            (Operation::Broadcast(root), _) if root == rank => length == self.bytes,
            (Operation::Broadcast(root), _) => {
                length == 0 && self.groups.of(root) != self.groups.of(rank)
            }
            (_, Some(encoded)) if form != Form::Plain => encoded.takes(form, length),
            (_, _) => length == self.bytes,
        }
    }

    /// Whether the result for this rank may go to a place of so many bytes that the rank has for
    /// it. How long a result is that is encoded, it can't know before.
    #[must_use]
    pub fn answers(&self, rank: Rank, length: usize) -> bool {
        let is_plain = self.encoded.is_none() && self.optimized.is_none();
        is_plain && length == self.publication_bytes(rank)
    }

    /// The round to which this rank may contribute now.
    #[must_use]
    pub fn open_round(&self, rank: Rank) -> u64 {
        let own = self.stored.as_ref().map(|stored| stored.open_round(self.groups.of(rank)));
        let short = || self.short.as_ref().map(|short| short.open_round(rank));
        own.or_else(short).unwrap_or(self.round + 1)
    }

    /// Whether the group of this rank has contributed to the open round, or has begun to.
    #[must_use]
    pub fn has_arrived(&self, rank: Rank) -> bool {
        if let Some(stored) = &self.stored {
            return stored.is_waiting(rank);
        }
        if self.is_late(self.open_round(rank)) {
            return false;
        }
        self.open.as_ref().is_some_and(|turnout| turnout.has_arrived(self.groups.of(rank)))
    }

    /// A contribution of this rank, for its group, begins; the round is for this.
    pub fn arrive(&mut self, rank: Rank, act: Act, turnouts: &mut Turnouts) {
        if let Some(optimized) = &mut self.optimized {
            optimized.arrive(act, rank);
        }
        if self.stored.is_some() {
            return;
        }
        if let Some(short) = &mut self.short {
            short.take(rank);
        }
        let group = self.groups.of(rank);
        self.open.get_or_insert_with(|| turnouts.take()).arrive(group, rank);
    }

    /// The first rank from this one on to which the publication goes that is being sent: those that
    /// spoke for their groups in the last round, or that a stored key answers.
    #[must_use]
    pub fn next_receiver(&self, from: Rank) -> Option<Rank> {
        if let Some(stored) = &self.stored {
            return stored.told().next(from.0).map(Rank);
        }
        self.told.as_ref()?.next_speaker(from)
    }

    /// Whether the publication that is being sent goes to this rank.
    #[must_use]
    pub fn goes_to(&self, rank: Rank) -> bool {
        if let Some(stored) = &self.stored {
            return stored.told().contains(rank.0);
        }
        self.told.as_ref().is_some_and(|turnout| turnout.has_spoken(rank))
    }

    /// Bytes that the publication to this rank has: the root of a broadcast has them already, one
    /// whose root has died before it gave them has none, and where one rank receives, all others
    /// are told that the round is over.
    #[must_use]
    pub fn publication_bytes(&self, rank: Rank) -> usize {
        match self.operation {
            _ if self.result.is_lost() || self.gave_result(rank) => 0,
            Operation::Broadcast(root) if root == rank => 0,
            _ if self.receiver.is_some_and(|receiver| receiver != rank) => 0,
            _ => match (&self.encoded, &self.optimized) {
                (Some(encoded), _) if encoded.result() != Form::Plain => encoded.length(),
                (_, Some(optimized)) => optimized.result_bytes(),
                _ => self.bytes,
            },
        }
    }

    /// As what the publication that is being sent travels.
    #[must_use]
    pub fn form(&self) -> Form {
        self.encoded.as_ref().map_or(Form::Declared, |encoded| encoded.result())
    }

    /// Whether it was retired, has had its last round, and nobody reads its result any more.
    #[must_use]
    pub fn is_over(&self) -> bool {
        let keeps = self.short.as_ref().is_some_and(|short| short.keeps());
        let is_last = self.last_round == Some(self.round) && self.publishing == 0 && !keeps;
        is_last
            && self.active.is_none()
            && self.open.as_ref().is_none_or(|open| self.is_deserted(open))
    }

    /// Its memory, in exchange for another claim: it is never used again.
    #[must_use]
    pub fn take_accumulator(&mut self, other: Claim) -> Claim {
        std::mem::replace(&mut self.accumulator, other)
    }

    /// Whether a payload may be taken now; else the lane has to wait in `waiting`.
    #[must_use]
    pub fn free(&self) -> bool {
        self.active.is_none() && self.publishing == 0
    }

    /// By what the sum is divided as it is made: an optimizer does that itself.
    fn divisor(&self) -> u32 {
        if self.optimized.is_some() {
            return 1;
        }
        let ranks = self.groups.ranks() - word(self.groups.gone().len());
        optimized::divisor(self.operation, ranks)
    }

    /// The active payload, which is this rank's, is whole.
    pub fn end(&mut self, rank: Rank) {
        self.active = None;
        if !self.end_restored() {
            self.landed = self.landed.saturating_add(1);
            self.is_finished = self.finishes.is_some();
        }
        self.complete(rank);
    }

    /// A contribution without a payload.
    pub fn count_empty(&mut self, rank: Rank) {
        self.complete(rank);
    }

    fn complete(&mut self, rank: Rank) {
        if let Some(stored) = &mut self.stored {
            self.round += u64::from(stored.complete(rank, self.groups.of(rank)));
            return;
        }
        let turnout = self.open.as_mut().expect("a contribution that is whole has begun");
        turnout.complete(self.groups.of(rank));
    }

    /// This rank has said that it will contribute no more.
    pub fn leave(&mut self, rank: Rank) {
        if let Some(stored) = self.stored.as_mut().filter(|_| self.groups.has(rank)) {
            stored.leave(rank, self.groups.of(rank));
        }
    }

    /// The last round whose result was published to all.
    #[must_use]
    pub fn published(&self) -> u64 {
        self.stored.as_ref().map_or(self.round, |stored| stored.answered(&self.groups))
    }

    /// The ranks of which nothing has come that is not answered.
    pub fn unheard(&self) -> impl Iterator<Item = Rank> + '_ {
        let is_unheard = |rank: &Rank| match &self.stored {
            Some(stored) => !stored.is_waiting(*rank),
            None => self.is_missing(*rank),
        };
        self.groups.iter().filter(is_unheard)
    }

    /// For whom the open round waits: the ranks of groups that have not contributed, or not all of
    /// their bytes.
    pub fn missing(&self) -> impl Iterator<Item = Rank> + '_ {
        self.groups.iter().filter(|&rank| self.is_missing(rank))
    }

    /// Whether the open round waits for this rank.
    #[must_use]
    pub fn is_missing(&self, rank: Rank) -> bool {
        if let Some(stored) = &self.stored {
            return self.groups.has(rank) && stored.is_missing(&self.groups, rank);
        }
        self.groups.has(rank)
            && !self.groups.is_gone(rank)
            && !self.open.as_ref().is_some_and(|turnout| turnout.is_complete(self.groups.of(rank)))
    }

    /// Whether every group's contribution is complete; of a stored key, whether its value can be
    /// sent now and some rank is due to get it.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        if let Some(stored) = &self.stored {
            return self.free() && stored.has_due(&self.groups);
        }
        if self.short.is_some() {
            return self.is_enough();
        }
        if self.lacks_result() {
            return false;
        }
        if !self.groups.gone().is_empty() {
            return self.is_whole_without();
        }
        self.open.as_ref().is_some_and(|turnout| turnout.count() == self.groups.count())
    }

    /// Closes the round, which [is whole](Self::is_whole): the accumulator holds its result, which
    /// is to be sent to one rank of each group.
    ///
    /// # Panics
    /// The result before it is still being sent.
    pub fn publish(&mut self) {
        assert!(self.publishing == 0 && self.told.is_none(), "{}: published twice", self.key);
        self.stall_counted = false;
        if let Some(stored) = &mut self.stored {
            self.publishing = stored.answer(&self.groups);
            self.opened_at = self.opened_at.filter(|_| !stored.is_idle());
            return;
        }
        self.round += 1;
        (self.landed, self.is_finished) = (0, false);
        if let Some(short) = &mut self.short {
            short.close();
        }
        self.told = self.open.take();
        self.publishing = self.told.as_ref().map_or(0, Turnout::count);
        self.opened_at = None;
    }

    /// One publication's memory is no longer read. Returns whether it was the last.
    pub fn sent(&mut self, turnouts: &mut Turnouts) -> bool {
        self.publishing -= 1;
        if self.publishing > 0 {
            return false;
        }
        if let Some(stored) = &mut self.stored {
            stored.sent();
        }
        if let Some(turnout) = self.told.take() {
            turnouts.give_back(turnout);
        }
        // Workers on this host have read it in place: their copies of its first lines would hold up
        // the next round's first contribution.
        let length = self.accumulator.len().min(FETCH_BYTES);
        cache::fetch_to_write(self.accumulator.as_ptr(), length);
        true
    }

    /// Contributions in a published result: what an average was divided by. A stored key says by
    /// its version what it holds.
    #[must_use]
    pub fn contributors(&self) -> u32 {
        match self.operation {
            _ if self.result != Told::All => self.result.contributors(),
            _ if self.stored.is_some() => 1,
            Operation::Broadcast(_) => 1,
            _ => self.groups.ranks(),
        }
    }
}
