//! Parts that are encoded on their way to servers and back. The loop encodes a part when it is its
//! turn on the line, and decodes its result when that has landed: what is sent soonest is encoded
//! soonest, and a part needs room for one payload only, whichever way that goes.
//!
//! Where a GPU encodes the parts of its tensors, they are in their slots as they travel, and so are
//! their results: the loop sends and receives them, and checks what has come before the GPU decodes
//! it.

use super::choosing::Choice;
use super::{LaneId, LanePeer, Nic, PartId};
use crate::base::error::Misfit;
use crate::nic::circle::is_scaled;
use crate::rounds::Plan;
use bps_engine::base::{DType, Rank};
use bps_engine::encode::{Codec, narrow, widen};
use bps_engine::mem::{Readable, Writable};
use bps_engine::proto::encoding::{Encoding, draw};
use bps_engine::wire::Header;
use bps_engine::wire::header::{Form, scale};

/// A tensor can't be encoded where its parts are.
#[derive(Debug, thiserror::Error)]
#[error(
    "tensor `{tensor}` is encoded as {encoding}, which processors do, and its parts are in the \
     GPU's memory, where RDMA devices fetch them: set BPS_GPUDIRECT=none, or do not encode it"
)]
pub(crate) struct OutOfReach {
    tensor: String,
    encoding: Encoding,
}

/// What an encoded part has.
pub(super) struct Coded {
    encoding: Encoding,
    elements: usize,
    /// As what it is sent.
    pub(super) choice: Choice,
    /// The GPU does it, in the slot.
    is_on_gpu: bool,
    /// What is sent, or lands; empty until this loop encodes a round.
    wire: Box<[u8]>,
    /// The last round whose contribution was encoded, and the bytes that it has.
    length: Option<(u64, usize)>,
    /// What earlier rounds have left out; empty where nothing is kept, and until something is.
    residue: Box<[f32]>,
    /// Nesterov's momentum, likewise.
    velocity: Box<[f32]>,
}

impl Coded {
    pub(super) fn new(encoding: Encoding, elements: usize, choice: Choice) -> Coded {
        Coded {
            encoding,
            elements,
            choice,
            is_on_gpu: false,
            wire: Box::default(),
            length: None,
            residue: Box::default(),
            velocity: Box::default(),
        }
    }

    /// What holds of it between two functions, in this round of its part; looked at where debug
    /// assertions are on.
    ///
    /// # Panics
    /// It does not.
    pub(super) fn check(&self, round: u64) {
        if !cfg!(debug_assertions) {
            return;
        }
        let is = |length: usize, whole: usize| length == 0 || length == whole;
        assert!(is(self.wire.len(), self.room()), "a part has one room for payloads");
        if let Some((encoded, length)) = self.length {
            assert!(encoded <= round && length <= self.wire.len(), "it was encoded here");
        }
        let kept = [&self.residue, &self.velocity];
        assert!(kept.iter().all(|kept| is(kept.len(), self.elements)), "a value an element");
        let is_here = kept.iter().any(|kept| !kept.is_empty());
        assert!(!(self.is_on_gpu && is_here), "who encodes has what is kept");
    }

    pub(super) fn encoding(&self) -> Encoding {
        self.encoding
    }

    /// Whether the GPU does it, in the slot.
    pub(super) fn is_on_gpu(&self) -> bool {
        self.is_on_gpu
    }

    /// Bytes of its longest payload that is not plain.
    pub(super) fn room(&self) -> usize {
        self.encoding.room(self.elements)
    }

    /// Bytes of an encoded payload of this form, if it is one that may come.
    fn length_of(&self, form: Form) -> Option<usize> {
        let may_come = self.encoding.auto || form == Form::Declared;
        let codec = self.encoding.codec_of(form).filter(|_| may_come)?;
        Some(codec.wire_bytes_max(self.elements))
    }

    fn make_room(&mut self) {
        if self.wire.is_empty() {
            self.wire = vec![0; self.room()].into();
        }
    }

    /// Zeros for what is kept, if it is kept here and there is none yet.
    fn keep(&mut self) {
        let Encoding { feedback, momentum, .. } = self.encoding;
        let kept = [(feedback, &mut self.residue), (momentum.is_some(), &mut self.velocity)];
        for (is_kept, values) in kept {
            if is_kept && !self.is_on_gpu && values.is_empty() {
                *values = vec![0.0; self.elements].into();
            }
        }
    }

    fn payload(&mut self, length: usize) -> Writable {
        self.make_room();
        let wire = &mut self.wire[..length];
        // SAFETY: the part's own bytes, which stay where they are until the endpoint is gone, which
        // is dropped before the parts. A round is encoded before its frame is posted, its result
        // lands after that was sent and arrived, and is decoded once it has landed.
        unsafe { Writable::new(wire.as_mut_ptr(), wire.len()) }
    }

    /// Encodes a round's contribution by a codec, which `values` are and which are of no use after
    /// it, and returns its bytes.
    fn encode(
        &mut self,
        codec: Codec,
        values: &mut [f32],
        (header, rank): (&Header, Rank),
    ) -> usize {
        assert!(!self.is_on_gpu && values.len() == self.elements, "a value an element");
        self.make_room();
        self.keep();
        let Encoding { feedback, momentum, .. } = self.encoding;
        assert!(!feedback || self.residue.len() == values.len(), "each element has a residue");
        let has_velocity = momentum.is_none() || self.velocity.len() == values.len();
        assert!(has_velocity, "each element has a velocity");
        let random = draw(header.key, header.round.0, rank.0);
        if let Some(momentum) = momentum {
            let factor = momentum.factor();
            for (value, velocity) in values.iter_mut().zip(&mut self.velocity) {
                let moved = factor * *velocity + *value;
                *value += factor * moved;
                // What is not finite is told once, and would stay for ever.
                *velocity = if moved.is_finite() { moved } else { 0.0 };
            }
        }
        if !feedback {
            return codec.encode(values, random, &mut self.wire);
        }
        for (kept, value) in self.residue.iter_mut().zip(values) {
            *kept += *value;
        }
        codec.encode_rest(&mut self.residue, random, &mut self.wire)
    }
}

impl Nic {
    /// Why this tensor can't be encoded, if it should be and can't.
    pub(crate) fn out_of_reach(&self, plan: &Plan) -> Option<OutOfReach> {
        let encoding = plan.encoding.filter(|_| plan.device && self.has_slots_on_gpu())?;
        Some(OutOfReach { tensor: plan.name.to_string(), encoding })
    }

    /// Parts from this one on that are in the GPU's memory are not encoded, and their job is about
    /// to end of it: nobody follows addresses that no processor can read.
    pub(super) fn forget_out_of_reach(&mut self, first: PartId) {
        if self.has_slots_on_gpu() {
            let new = &mut self.parts[first.0 as usize..];
            debug_assert!(new.iter().all(|part| !part.plan.device || !part.is_open()));
            new.iter_mut().filter(|part| part.plan.device).for_each(|part| part.coded = None);
        }
    }

    /// The GPU says of a part whose round begins whether it has encoded it, to so many bytes.
    ///
    /// # Panics
    /// It has encoded a part that is not to be, or to another length.
    pub(super) fn encoded_by_gpu(&mut self, part: PartId, encoded: Option<usize>) {
        let coded = self.part_mut(part).coded.as_mut();
        assert_eq!(
            encoded.or(coded.as_ref().map(|coded| coded.room())),
            coded.as_ref().map(|coded| coded.room()),
            "a part that is encoded has one length"
        );
        if let Some(coded) = coded {
            coded.is_on_gpu = encoded.is_some();
            if coded.is_on_gpu && !(coded.residue.is_empty() && coded.velocity.is_empty()) {
                // The pipeline has what was to be kept.
                (coded.residue, coded.velocity) = (Box::default(), Box::default());
            }
        }
        self.check_part(part);
    }

    /// How a part is encoded on this lane, if it is.
    fn coded(&self, lane: LaneId, part: PartId) -> Option<&Coded> {
        let is_servers = matches!(self.lane(lane).peer, LanePeer::Server(_));
        self.part(part).coded().filter(|_| is_servers)
    }

    /// Bytes that a part may take on the line to its server.
    pub(super) fn line_bytes(&self, part: PartId) -> usize {
        let part = self.part(part);
        let length = part.coded().and_then(|coded| coded.length_of(coded.choice.form));
        length.unwrap_or(part.plan.bytes)
    }

    /// As what a part is sent to its server.
    pub(super) fn form(&self, part: PartId) -> Form {
        self.part(part).coded.as_ref().map_or(Form::Declared, |coded| coded.choice.form)
    }

    /// Whether a publication of a part may have this form and so many bytes on this lane; not that
    /// of a broadcast to its root.
    pub(super) fn may_publish(&self, lane: LaneId, part: PartId, header: &Header) -> bool {
        let (form, length) = (header.form(), header.length as usize);
        let is_plain = length == self.part(part).plan.bytes;
        match self.coded(lane, part) {
            Some(coded) if form == Form::Plain => coded.encoding.auto && is_plain,
            Some(coded) => coded.length_of(form).is_some_and(|most| (1..=most).contains(&length)),
            None => form == Form::Declared && is_plain,
        }
    }

    /// A payload of so many bytes went to a server or came from it, in the place of a part.
    pub(super) fn spared(&self, part: PartId, length: usize) {
        let state = self.part(part);
        if state.coded.is_some() {
            let spared = state.plan.bytes.saturating_sub(length);
            self.statistics.counters.spared.add(spared as u64);
        }
    }

    /// Where a publication's bytes land whose result goes to `target`.
    pub(super) fn lands_in(
        &mut self,
        lane: LaneId,
        part: PartId,
        header: &Header,
        target: Writable,
    ) -> Writable {
        let is_plain = self.coded(lane, part).is_none() || header.form() == Form::Plain;
        if is_plain && self.part(part).kept.is_none() {
            return target;
        }
        let length = header.length as usize;
        if let Some(kept) = &mut self.part_mut(part).kept {
            return kept.landing(length);
        }
        let coded = self.part_mut(part).coded.as_mut().expect("it is encoded on this lane");
        if coded.is_on_gpu { target.part(0, length) } else { coded.payload(length) }
    }

    /// The contribution of this header's round, encoded, where it is; at once where that was done
    /// before.
    pub(super) fn encoded(&mut self, part: PartId, header: &Header) -> Option<Readable> {
        let coded = self.part(part).coded()?;
        let codec = coded.encoding.codec_of(coded.choice.form)?;
        if coded.is_on_gpu {
            return Some(self.contribution(part).part(0, coded.room()));
        }
        let length = match coded.length {
            Some((round, length)) if round == header.round.0 => length,
            _ => self.encode(part, codec, header),
        };
        let coded = self.part_mut(part).coded.as_mut()?;
        Some(coded.payload(length).readable())
    }

    fn encode(&mut self, part: PartId, codec: Codec, header: &Header) -> usize {
        let source = self.contribution(part);
        let rank = self.config.rank;
        assert!(source.len() == self.part(part).plan.bytes, "all of the part is encoded");
        let state = &mut self.parts[part.0 as usize];
        let dtype = state.plan.dtype;
        let values = self.values.of(source.len() / dtype.size());
        // SAFETY: in the host's memory, since a part beyond its reach has no `Coded`
        // (`forget_out_of_reach`); nothing writes to a part that is about to be sent.
        widen(dtype, unsafe { source.bytes() }, values);
        if header.contributors > 1 && is_scaled(&state.plan) {
            // The group has made its sum small enough for f16, which f32 needs not.
            #[allow(clippy::cast_precision_loss, reason = "a power of two")]
            let factor = scale(header.contributors) as f32;
            values.iter_mut().for_each(|value| *value *= factor);
        }
        let coded = state.coded.as_mut().expect("what is encoded has room for it");
        let length = coded.encode(codec, values, (header, rank));
        assert!(length <= codec.wire_bytes_max(coded.elements), "credit was taken for that");
        coded.length = Some((header.round.0, length));
        length
    }

    /// A payload has landed whose result is to be in `target`.
    ///
    /// # Errors
    /// It is no encoding of the part.
    pub(super) fn decode(
        &mut self,
        lane: LaneId,
        part: PartId,
        header: &Header,
        target: Writable,
    ) -> Result<(), Misfit> {
        let Some(coded) = self.coded(lane, part) else { return Ok(()) };
        let Coded { encoding, elements, is_on_gpu, .. } = *coded;
        let Some(codec) = encoding.codec_of(header.form()) else { return Ok(()) };
        let state = &mut self.parts[part.0 as usize];
        let coded = state.coded.as_ref().expect("as it was");
        let landed = target.readable();
        let payload = match &state.kept {
            Some(kept) => kept.landed(header.length as usize),
            // SAFETY: these bytes have just landed in the slot, which is in the host's memory, as
            // that of every part with a `Coded` is; nobody writes there before the GPU is told.
            None if is_on_gpu => unsafe { landed.part(0, header.length as usize).bytes() },
            None => &coded.wire[..header.length as usize],
        };
        codec.check(elements, payload).map_err(|why| {
            let (tensor, round) = (state.plan.name.to_string(), state.round);
            Misfit::Encoding { tensor, key: header.key, round, why }
        })?;
        if is_on_gpu {
            return Ok(());
        }
        let dtype: DType = state.plan.dtype;
        assert!(target.len() == elements * dtype.size(), "each value has its element");
        let values = self.values.of(elements);
        codec.decode(payload, draw(header.key, header.round.0, self.config.rank.0), values);
        // SAFETY: the part's own bytes, which nothing else has while its result comes; in the
        // host's memory, since a part beyond its reach has no `Coded` (`forget_out_of_reach`).
        let target = unsafe { std::slice::from_raw_parts_mut(target.as_ptr(), target.len()) };
        narrow(dtype, values, target);
        Ok(())
    }
}

impl Nic {
    /// Whether a part keeps something here.
    pub(crate) fn has_kept(&self, part: PartId) -> bool {
        let coded = self.part(part).coded.as_ref();
        coded.is_some_and(|coded| !coded.residue.is_empty() || !coded.velocity.is_empty())
    }

    /// What a part that is encoded here keeps: its residue and velocity, which may be empty.
    pub(crate) fn kept(&mut self, part: PartId) -> Option<[&mut [f32]; 2]> {
        let coded = self.part_mut(part).coded.as_mut()?;
        coded.keep();
        Some([&mut coded.residue, &mut coded.velocity])
    }
}

/// Values of one part, while they are encoded or decoded.
#[derive(Default)]
pub(super) struct Values(Vec<f32>);

impl Values {
    fn of(&mut self, count: usize) -> &mut [f32] {
        if self.0.len() < count {
            self.0.resize(count, 0.0);
        }
        &mut self.0[..count]
    }
}
