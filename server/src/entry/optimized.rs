//! A key with an optimizer. Its memory holds the sum of a round in f32, room for one payload if
//! they are encoded, and then the slots: the parameters and what the optimizer keeps for each.
//!
//! What a round is for comes with each of its contributions, which all say the same. The slots
//! change once the last of them is whole and found right, so a payload that is spoilt spoils no
//! parameter. What is published lies in a slot, or is encoded where payloads land, and stays as it
//! is until it is sent, since no payload of the next round begins before that.

use bps_engine::base::{Key, Operation, Rank};
use bps_engine::encode::{Codec, Malformed};
use bps_engine::limits::ALIGNMENT;
use bps_engine::mem::{Claim, Readable, Writable};
use bps_engine::optimize::{Act, Deed, Number, Optimizer, Slots};
use bps_engine::proto::encoding::{Encoding, SERVER, draw};
use bps_engine::proto::messages::KeySpec;
use bps_engine::proto::store::Store;
use bps_engine::reduce::Kernels;

/// Elements that take a step and are encoded at once: they and their state stay in a core's cache.
const BLOCK: usize = 8192;

/// See the [module](self).
pub(super) struct Optimized {
    key: Key,
    optimizer: Optimizer,
    encoding: Option<Encoding>,
    elements: usize,
    /// Steps that the state has behind it; `None` before there are parameters.
    steps: Option<u64>,
    /// What the open round is for, and who said so first; none before its first contribution.
    act: Option<(Act, Rank)>,
    /// What the last round was for.
    done: Act,
}

/// Why a contribution is not for the open round.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unfit {
    /// The optimizer has no such round, or there are no parameters to step from.
    Senseless,
    /// Another rank has said something else.
    Otherwise(Act, Rank),
}

/// What is in the memory of a key.
struct Views<'claim> {
    sums: &'claim mut [f32],
    wire: &'claim mut [u8],
    slots: [&'claim mut [f32]; 3],
}

impl Optimized {
    /// If such a key has an optimizer.
    pub(super) fn of(spec: &KeySpec) -> Option<Optimized> {
        let optimizer = spec.store.and_then(Store::optimizer)?;
        Some(Optimized {
            key: spec.key,
            optimizer,
            encoding: spec.encoding,
            elements: spec.bytes as usize / size_of::<f32>(),
            steps: None,
            act: None,
            done: Act::NONE,
        })
    }

    pub(super) fn optimizer(&self) -> Optimizer {
        self.optimizer
    }

    /// How steps are encoded.
    pub(super) fn encoding(&self) -> Option<Encoding> {
        self.encoding
    }

    fn codec(&self) -> Option<Codec> {
        self.encoding.map(|encoding| encoding.codec)
    }

    fn plain_bytes(&self) -> usize {
        self.elements * size_of::<f32>()
    }

    /// Bytes of an encoded payload.
    fn coded_bytes(&self) -> usize {
        self.codec().map_or(0, |codec| codec.wire_bytes_max(self.elements))
    }

    fn wire_at(&self) -> usize {
        self.plain_bytes().next_multiple_of(ALIGNMENT)
    }

    fn slot_at(&self, slot: usize) -> usize {
        let first = (self.wire_at() + self.coded_bytes()).next_multiple_of(ALIGNMENT);
        first + slot * self.plain_bytes().next_multiple_of(ALIGNMENT)
    }

    /// Bytes of memory that it needs.
    pub(super) fn bytes(&self) -> usize {
        self.slot_at(self.optimizer.slots())
    }

    /// Whether payloads of such a round, and its result, are encoded.
    fn is_coded(&self, act: Act) -> bool {
        self.encoding.is_some() && act.is_step()
    }

    /// Whether those of the open round are.
    pub(super) fn takes_coded(&self) -> bool {
        self.act.is_some_and(|(act, _)| self.is_coded(act))
    }

    /// Bytes of payloads of such a round, and of its result.
    pub(super) fn payload_bytes(&self, act: Act) -> usize {
        if self.is_coded(act) { self.coded_bytes() } else { self.plain_bytes() }
    }

    /// Bytes of the result of the last round.
    pub(super) fn result_bytes(&self) -> usize {
        self.payload_bytes(self.done)
    }

    /// Whether a contribution can be for this.
    ///
    /// # Errors
    /// [`Unfit`].
    pub(super) fn check(&self, act: Act) -> Result<(), Unfit> {
        if let Some((said, first)) = self.act.filter(|(said, _)| *said != act) {
            return Err(Unfit::Otherwise(said, first));
        }
        let sets = matches!(act.deed(), Some(Deed::Set { slot: 0, .. }));
        let makes_sense = act.suits(&self.optimizer) && (sets || self.steps.is_some());
        if makes_sense { Ok(()) } else { Err(Unfit::Senseless) }
    }

    /// A contribution of this rank begins, which is for this.
    pub(super) fn arrive(&mut self, act: Act, rank: Rank) {
        self.act.get_or_insert((act, rank));
    }

    /// Where a payload lands.
    ///
    /// # Safety
    /// The claim is this key's and stays mapped, and nothing else is done with the key, until the
    /// payload has landed.
    pub(super) unsafe fn landing(&self, memory: &Claim, length: usize) -> Writable {
        let (at, room) = self.landing_at();
        assert!(length == room, "{}: a payload has the bytes of its round", self.key);
        // SAFETY: `Entry::new` saw that the claim has `bytes()`, of which this is a part that
        // nobody else has, by the caller's promise.
        unsafe { Writable::new(memory.as_ptr().add(at), length) }
    }

    /// The payload that has landed.
    ///
    /// # Safety
    /// As for [`result`](Self::result).
    pub(super) unsafe fn payload(&self, memory: &Claim) -> Readable {
        let (at, length) = self.landing_at();
        // SAFETY: `Entry::new` saw that the claim has `bytes()`, of which this is a part. The bytes
        // were zeros at first, and by the caller's promise nothing writes them.
        unsafe { Readable::new(memory.as_ptr().add(at).cast_const(), length) }
    }

    fn landing_at(&self) -> (usize, usize) {
        let coded = self.takes_coded();
        if coded { (self.wire_at(), self.coded_bytes()) } else { (0, self.plain_bytes()) }
    }

    /// The result of the last round.
    ///
    /// # Safety
    /// The claim is this key's and stays mapped, and no payload lands in it, until whoever reads is
    /// done.
    pub(super) unsafe fn result(&self, memory: &Claim) -> Readable {
        let at = match self.done.deed() {
            Some(Deed::Step { .. }) if self.is_coded(self.done) => self.wire_at(),
            Some(Deed::Set { slot, .. } | Deed::Get { slot }) => self.slot_at(slot.into()),
            _ => self.slot_at(0),
        };
        // SAFETY: `Entry::new` saw that the claim has `bytes()`, of which a slot or the encoded
        // result is a part. The bytes were zeros at first, and by the caller's promise nothing
        // writes them.
        unsafe { Readable::new(memory.as_ptr().add(at).cast_const(), self.result_bytes()) }
    }

    /// A payload is whole. Of a round that takes encoded ones, it is added.
    ///
    /// # Errors
    /// The payload is no encoding of the key's elements. Then nothing was changed.
    pub(super) fn add(
        &mut self,
        memory: &mut Claim,
        round: u64,
        is_first: bool,
    ) -> Result<(), Malformed> {
        let Some(codec) = self.codec().filter(|_| self.takes_coded()) else { return Ok(()) };
        let (random, elements) = (draw(self.key, round, SERVER), self.elements);
        let Views { sums, wire, .. } = self.views(memory);
        codec.check(elements, wire)?;
        if is_first {
            codec.decode(wire, random, sums);
        } else {
            codec.decode_add(wire, random, sums);
        }
        Ok(())
    }

    /// All payloads of the round are added: does what it is for. The gradient is the sum over the
    /// divisor.
    pub(super) fn act(&mut self, kernels: &Kernels, memory: &mut Claim, divisor: u32, round: u64) {
        let (act, _) = self.act.take().expect("a round that is whole was for something");
        self.done = act;
        let steps = self.steps;
        match act.deed().expect("it was checked") {
            Deed::Set { slot, steps } => {
                let Views { sums, mut slots, .. } = self.views(memory);
                slots[usize::from(slot)].copy_from_slice(sums);
                if slot == 0 {
                    slots[1..].iter_mut().for_each(|values| values.fill(0.0));
                    self.steps = Some(steps);
                }
            }
            Deed::Get { .. } => {}
            Deed::Step { rate } => {
                let step = steps.expect("it was checked").saturating_add(1);
                self.steps = Some(step);
                self.step(kernels, memory, (rate, step), divisor, round);
            }
        }
    }

    fn step(
        &self,
        kernels: &Kernels,
        memory: &mut Claim,
        step: (Number, u64),
        divisor: u32,
        round: u64,
    ) {
        let (optimizer, random) = (self.optimizer, draw(self.key, round, SERVER));
        let codec = self.codec();
        let Views { sums, wire, slots: [master, first, second] } = self.views(memory);
        #[allow(clippy::cast_precision_loss, reason = "a power of two is exact")]
        let scale = if divisor.is_power_of_two() { 1.0 / divisor as f32 } else { 1.0 };
        let mut begin = 0;
        while begin < sums.len() {
            let range = begin..(begin + BLOCK).min(sums.len());
            begin = range.end;
            // What the optimizer does not keep is empty.
            let of = |kept: usize| range.start.min(kept)..range.end.min(kept);
            let kept = (first.len(), second.len());
            let (first, second) = (&mut first[of(kept.0)], &mut second[of(kept.1)]);
            let (sums, master) = (&mut sums[range.clone()], &mut master[range.clone()]);
            if !divisor.is_power_of_two() {
                #[allow(clippy::cast_precision_loss, reason = "rounded as averages are")]
                sums.iter_mut().for_each(|sum| *sum /= divisor as f32);
            }
            optimizer.step(kernels, step, (sums, scale), Slots { master, first, second });
            if let Some(codec) = codec {
                // Of a half type each element has two bytes of its own, wherever it is cut.
                let size = wire.len() / self.elements;
                codec.encode(master, random, &mut wire[range.start * size..range.end * size]);
            }
        }
    }

    fn views<'claim>(&self, memory: &'claim mut Claim) -> Views<'claim> {
        assert!(memory.len() >= self.bytes(), "{}: too little memory", self.key);
        let at = memory.as_ptr();
        let kept = |slot| if slot < self.optimizer.slots() { self.elements } else { 0 };
        // SAFETY: ranges of the claim that do not overlap and are inside it, which is aligned to
        // `ALIGNMENT` as their offsets are, and was zeros at first; a slot that the optimizer lacks
        // is empty. It is borrowed as long as they are, and lent to nobody meanwhile: a payload has
        // landed, and no result is sent.
        unsafe {
            let slot = |slot: usize| {
                let at = at.add(self.slot_at(slot.min(self.optimizer.slots()))).cast();
                std::slice::from_raw_parts_mut(at, kept(slot))
            };
            Views {
                sums: std::slice::from_raw_parts_mut(at.cast(), self.elements),
                wire: std::slice::from_raw_parts_mut(at.add(self.wire_at()), self.coded_bytes()),
                slots: [slot(0), slot(1), slot(2)],
            }
        }
    }
}

/// By what a sum of so many ranks is divided to be the gradient.
pub(super) fn divisor(operation: Operation, ranks: u32) -> u32 {
    if operation == Operation::Average { ranks } else { 1 }
}
