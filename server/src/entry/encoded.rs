//! A key whose contributions come encoded, and whose result goes encoded. Its memory holds the sums
//! in f32, room for one payload, through which contributions come one after the other and the
//! result goes, and what the results before have left out, if that is kept.
//!
//! Of an encoding that leaves it to each sender whether it encodes, plain contributions are added
//! as those of any other key are, and so is a result that all have sent plain: here is only what to
//! do where that is not so.
//!
//! A payload is decoded once it is whole, while it is added, by the core's own thread: what that
//! costs stands in `docs/compression.md`, beside what it saves.

use bps_engine::base::{DType, Key};
use bps_engine::encode::Malformed;
use bps_engine::limits::ALIGNMENT;
use bps_engine::mem::{Claim, Readable, Writable};
use bps_engine::proto::encoding::{Encoding, SERVER, draw};
use bps_engine::proto::messages::KeySpec;
use bps_engine::reduce::Kernels;
use bps_engine::wire::header::Form;

/// See the [module](self).
pub(super) struct Encoded {
    key: Key,
    encoding: Encoding,
    elements: usize,
    /// Bytes of the payload that lands, or of the result.
    length: usize,
    /// As what the payload comes that is arriving, or was the last.
    form: Form,
    /// The shortest form of the round so far, which is that of its result.
    shortest: Form,
}

/// What a payload is to the round that it belongs to.
#[derive(Clone, Copy)]
pub(super) struct Turn {
    /// The round.
    pub(super) round: u64,
    /// It is the first of the round.
    pub(super) is_first: bool,
    /// If it is the last one: by what the sum is divided.
    pub(super) divisor: Option<u32>,
}

/// What is in the memory of a key.
struct Views<'claim> {
    sums: &'claim mut [f32],
    wire: &'claim mut [u8],
    /// Empty where nothing is kept.
    residue: &'claim mut [f32],
}

impl Encoded {
    /// If such a key's contributions are encoded.
    pub(super) fn of(spec: &KeySpec) -> Option<Encoded> {
        let elements = spec.bytes as usize / spec.dtype.size();
        let encoding = spec.encoding?;
        let (form, shortest) = (Form::Plain, Form::Plain);
        Some(Encoded { key: spec.key, encoding, elements, length: 0, form, shortest })
    }

    /// A payload of this form begins to arrive.
    pub(super) fn begin(&mut self, form: Form, is_first: bool) {
        self.form = form;
        self.shortest = if is_first { form } else { self.shortest.max(form) };
    }

    /// Whether the payload that is arriving is encoded.
    pub(super) fn lands(&self) -> bool {
        self.form != Form::Plain
    }

    /// As what the result travels.
    pub(super) fn result(&self) -> Form {
        self.shortest
    }

    /// Whether a payload of this form, which is encoded, may have so many bytes.
    pub(super) fn takes(&self, form: Form, length: usize) -> bool {
        let is_free = self.encoding.auto || form == Form::Declared;
        let most = self.encoding.codec_of(form).map(|codec| codec.wire_bytes_max(self.elements));
        is_free && most.is_some_and(|most| (1..=most).contains(&length))
    }

    /// How it is encoded.
    pub(super) fn encoding(&self) -> Encoding {
        self.encoding
    }

    fn sum_bytes(&self) -> usize {
        self.elements * size_of::<f32>()
    }

    /// Bytes of the longest payload.
    pub(super) fn room(&self) -> usize {
        self.encoding.room(self.elements)
    }

    /// Where the room for a payload begins.
    fn wire_at(&self) -> usize {
        self.sum_bytes().next_multiple_of(ALIGNMENT)
    }

    fn residue_at(&self) -> usize {
        (self.wire_at() + self.room()).next_multiple_of(ALIGNMENT)
    }

    /// Bytes of memory that it needs.
    pub(super) fn bytes(&self) -> usize {
        let residue = if self.encoding.feedback { self.sum_bytes() } else { 0 };
        self.residue_at() + residue
    }

    /// Bytes of the result.
    pub(super) fn length(&self) -> usize {
        self.length
    }

    /// Where a payload of so many bytes lands.
    ///
    /// # Safety
    /// The claim is this key's and stays mapped, and nothing else is done with the key, until the
    /// payload has landed.
    pub(super) unsafe fn landing(&mut self, memory: &Claim, length: usize) -> Writable {
        assert!((1..=self.room()).contains(&length), "{}: a payload fits its room", self.key);
        self.length = length;
        // SAFETY: `Entry::new` saw that the claim has `bytes()`, of which this is a part that
        // nobody else has, by the caller's promise.
        unsafe { Writable::new(memory.as_ptr().add(self.wire_at()), length) }
    }

    /// The payload that has landed, or the result.
    ///
    /// # Safety
    /// The claim is this key's and stays mapped, and no payload lands in it, until whoever reads
    /// is done.
    pub(super) unsafe fn payload(&self, memory: &Claim) -> Readable {
        // SAFETY: `Entry::new` saw that the claim has `bytes()`, and a length that was set by
        // `landing` or by an encoder fits the room from `wire_at()` on. The bytes were zeros at
        // first, and by the caller's promise nothing writes them.
        unsafe { Readable::new(memory.as_ptr().add(self.wire_at()).cast_const(), self.length) }
    }

    /// Whether the payload that has landed is an encoding of the key's elements.
    pub(super) fn check_payload(&self, memory: &Claim) -> Result<(), Malformed> {
        let Some(codec) = self.encoding.codec_of(self.form) else { return Ok(()) };
        // SAFETY: the key's own claim, of which nothing is lent once a payload has landed.
        codec.check(self.elements, unsafe { self.payload(memory).bytes() })
    }

    /// Adds the payload that has landed, unless it came plain and is added. Behind the last one of
    /// a round stands its result, encoded unless all came plain.
    ///
    /// # Errors
    /// The payload is no encoding of the key's elements. Then nothing was changed.
    pub(super) fn add(
        &mut self,
        kernels: &Kernels,
        memory: &mut Claim,
        turn: Turn,
    ) -> Result<(), Malformed> {
        let (elements, length) = (self.elements, self.length);
        let came = self.encoding.codec_of(self.form);
        let Views { sums, wire, .. } = self.views(memory);
        let random = draw(self.key, turn.round, SERVER);
        if let Some(codec) = came {
            let payload = &wire[..length];
            codec.check(elements, payload)?;
            if turn.is_first {
                codec.decode(payload, random, sums);
            } else {
                codec.decode_add(payload, random, sums);
            }
        }
        if let Some(divisor) = turn.divisor {
            self.finish(kernels, memory, turn.round, divisor);
        }
        Ok(())
    }

    /// All payloads of a round were added: divides the sum and encodes the result, unless all came
    /// plain.
    pub(super) fn finish(
        &mut self,
        kernels: &Kernels,
        memory: &mut Claim,
        round: u64,
        divisor: u32,
    ) {
        let Some(codec) = self.encoding.codec_of(self.shortest) else { return };
        let feedback = self.encoding.feedback;
        let (elements, random) = (self.elements, draw(self.key, round, SERVER));
        let Views { sums, wire, residue } = self.views(memory);
        let at = sums.as_mut_ptr().cast::<u8>();
        // SAFETY: so many f32, which are borrowed here; the result may be in the place of the sum.
        unsafe { kernels.finish(DType::F32, at, at.cast_const(), elements, divisor) };
        self.length = if feedback {
            let (kept, sum) = (residue.as_mut_ptr().cast::<u8>(), at.cast_const());
            // SAFETY: the claim has as many f32 for what is kept as for the sums, apart from them.
            unsafe { kernels.add(DType::F32, kept, sum, elements) };
            codec.encode_rest(residue, random, wire)
        } else {
            codec.encode(sums, random, wire)
        };
    }

    fn views<'claim>(&self, memory: &'claim mut Claim) -> Views<'claim> {
        assert!(memory.len() >= self.bytes(), "{}: too little memory", self.key);
        let at = memory.as_ptr();
        let kept = if self.encoding.feedback { self.elements } else { 0 };
        // SAFETY: three ranges of the claim that do not overlap and are inside it, which is aligned
        // to `ALIGNMENT` as their offsets are, and was zeros at first. It is borrowed as long as
        // they are, and lent to nobody meanwhile: a payload has landed, and no result is sent.
        unsafe {
            Views {
                sums: std::slice::from_raw_parts_mut(at.cast(), self.elements),
                wire: std::slice::from_raw_parts_mut(at.add(self.wire_at()), self.room()),
                residue: std::slice::from_raw_parts_mut(at.add(self.residue_at()).cast(), kept),
            }
        }
    }
}
