//! Encodings that keep something between rounds: the kernels against what the NIC loop computes.

use super::{Buffer, CODECS, DTYPES, ELEMENTS, Outcome, numbers, same, wait_until};
use bps_engine::base::DType;
use bps_engine::encode::{Draw, narrow, widen};
use bps_worker::Encoding;
use bps_worker::cuda::{Device, Family, GpuError, KeptAt, Kernels, Pinned, Stream};

/// What codecs are tried with.
const WAYS: [&str; 3] = ["+feedback", "+feedback+momentum(0.9)", "+momentum(0.5)"];
/// Of each part: what is left of a round is in the next, and by another factor in the last.
const ROUNDS: u64 = 3;
const FACTOR: f32 = 0.3;

/// What the processor keeps of a part.
struct Reference {
    encoding: Encoding,
    residue: Vec<f32>,
    velocity: Vec<f32>,
}

impl Reference {
    fn new(encoding: Encoding, elements: usize) -> Reference {
        Reference { encoding, residue: vec![0.0; elements], velocity: vec![0.0; elements] }
    }

    fn encode(&mut self, values: &mut [f32], draw: Draw, wire: &mut [u8]) {
        let Encoding { codec, feedback, momentum, .. } = self.encoding;
        if let Some(factor) = momentum.map(bps_engine::proto::encoding::Momentum::factor) {
            for (value, velocity) in values.iter_mut().zip(&mut self.velocity) {
                let moved = factor * *velocity + *value;
                *value += factor * moved;
                *velocity = if moved.is_finite() { moved } else { 0.0 };
            }
        }
        if !feedback {
            codec.encode(values, draw, wire);
            return;
        }
        for (kept, value) in self.residue.iter_mut().zip(values) {
            *kept += *value;
        }
        codec.encode_rest(&mut self.residue, draw, wire);
    }

    fn scale(&mut self) {
        self.residue.iter_mut().for_each(|value| *value *= FACTOR);
    }
}

/// All codecs in all ways, for some rounds each.
pub(super) fn kept() -> Outcome {
    let device = Device::open(0)?;
    device.make_current()?;
    let stream = Stream::new(&device)?;
    let blocks = Kernels::load(&device, Family::Blocks)?;
    let whole = Kernels::load(&device, Family::Whole)?;
    let room = 4 * ELEMENTS.iter().max().expect("there are some");
    let wire = Pinned::new(&device, room, None)?;
    let (mut tried, mut wrong) = (0, Vec::new());
    for (codec, way) in CODECS.iter().flat_map(|codec| WAYS.map(|way| (codec, way))) {
        let encoding: Encoding = format!("{codec}{way}").parse().expect("an encoding");
        let kernels = match Family::of(encoding) {
            Some(Family::Blocks) => &blocks,
            _ => &whole,
        };
        for (number, (elements, has_all)) in
            ELEMENTS.iter().flat_map(|&one| [(one, true), (one, false)]).enumerate()
        {
            // Each length with one of the types.
            let dtype = DTYPES[number % DTYPES.len()];
            let trial = Trial { kernels, encoding, dtype, elements, has_all };
            let Some(found) = trial.run(&stream, &wire)? else { continue };
            tried += 1;
            wrong.extend(found.map(|what| format!("{what} of {elements} {dtype} as {encoding}")));
        }
    }
    Ok(format!("{tried} parts, wrong: {wrong:?}"))
}

struct Trial<'a> {
    kernels: &'a Kernels,
    encoding: Encoding,
    dtype: DType,
    elements: usize,
    has_all: bool,
}

impl Trial<'_> {
    /// What is wrong, if something is; nothing where a part is not encoded.
    fn run(&self, stream: &Stream, wire: &Pinned) -> Result<Option<Option<String>>, GpuError> {
        let Trial { kernels, encoding, dtype, elements, has_all } = *self;
        let coder = kernels.coder(encoding, dtype)?.expect("it has kernels");
        let bytes = elements * dtype.size();
        let Some(encoded) = coder.wire_bytes(bytes) else { return Ok(None) };
        let mut reference = Reference::new(encoding, elements);
        let zeros = vec![0; elements * size_of::<f32>()];
        let (values, velocity) = (Buffer::new(stream, &zeros)?, Buffer::new(stream, &zeros)?);
        let has_velocity = encoding.momentum.is_some();
        let kept = KeptAt {
            values: values.address,
            velocity: if has_velocity { velocity.address } else { 0 },
        };
        for round in 1..=ROUNDS {
            let mut given = numbers(round + elements as u64, elements, has_all && round < ROUNDS);
            let mut tensor = vec![0; bytes];
            narrow(dtype, &given, &mut tensor);
            widen(dtype, &tensor, &mut given);
            if round == ROUNDS {
                reference.scale();
                // SAFETY: memory of so many elements, and what uses it is waited for.
                unsafe { coder.scale(stream, kept, elements, FACTOR) }?;
            }
            let draw = Draw { shared: 55 + round, own: 77 + round };
            let mut expected = vec![0; encoded];
            reference.encode(&mut given, draw, &mut expected);
            let memory = Buffer::new(stream, &tensor)?;
            let with = (draw, Some(kept));
            // SAFETY: the wire has room for all, and what uses it is waited for.
            unsafe { coder.encode(stream, memory.address, wire.as_ptr(), bytes, with) }?;
            wait_until("it is encoded", || stream.is_idle())?;
            // SAFETY: it was written, and nobody writes there now.
            let found = unsafe { std::slice::from_raw_parts(wire.as_ptr(), encoded) };
            let numbers = match encoding.codec.to_string().as_str() {
                "fp16" => Some(DType::F16),
                "bf16" => Some(DType::BF16),
                _ => None,
            };
            if !same(numbers, found, &expected) {
                return Ok(Some(Some(format!("round {round}"))));
            }
            let is_same = |buffer: &Buffer, expected: &[f32]| {
                let expected: Vec<u8> = expected.iter().flat_map(|one| one.to_ne_bytes()).collect();
                buffer.content(stream).map(|found| found == expected)
            };
            if encoding.feedback && !is_same(&values, &reference.residue)? {
                return Ok(Some(Some(format!("what is left of round {round}"))));
            }
            if has_velocity && !is_same(&velocity, &reference.velocity)? {
                return Ok(Some(Some(format!("the momentum of round {round}"))));
            }
            if memory.content(stream)? != tensor {
                return Ok(Some(Some(format!("the tensor itself in round {round}"))));
            }
        }
        Ok(Some(None))
    }
}
