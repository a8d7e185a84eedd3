//! Codecs: how the elements of a part travel in fewer bytes than f32 takes.
//!
//! Owns the arithmetic and the wire formats, and knows no key, no round and no connection: a worker
//! or a server core calls it with values and memory for the wire, or with what a peer sent and
//! memory for the values.
//!
//! Invariant: an encoding depends on the values, the codec and the draw alone. Every instruction
//! set gives the same bits (of 16-bit floats, a NaN being equal to any NaN). An encoding has a
//! length that follows from the codec and the number of elements; integers and floats on the wire
//! are little-endian.

mod dithering;
mod elements;
mod fold;
mod onebit;
mod packed;
mod random;
mod scaled;
mod sparse;
mod text;
pub(crate) mod wide;

#[cfg(test)]
mod tests;

pub use elements::{load, narrow, store, widen};
pub use text::CodecError;

use crate::base::DType;
use crate::reduce::{Kernels, kernels};
use dithering::Levels;
use fold::{Add, Rest, Set, Sink};
use random::Stream;
use scaled::{Code, E4m3, E5m2, Int8};
use serde::{Deserialize, Serialize};
use sparse::Strata;
use wide::wide;

/// How the elements of a part travel between a worker's process and a server.
///
/// A NaN or an infinity never disappears: it makes the element, its block or the whole part decode
/// to values that are not finite, as the variants say, so that a gradient scaler sees it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Codec {
    /// IEEE 754 binary16, rounded to nearest even: 2 bytes per element. Magnitudes from 65520
    /// become infinite.
    Fp16,
    /// bfloat16, rounded to nearest even: 2 bytes per element.
    Bf16,
    /// OCP FP8 E4M3 with a f32 scale per block of 128 elements: 1 byte per element and 4 per block.
    /// A block with a NaN or an infinity decodes to NaN.
    Fp8E4m3 {
        /// Whether to round at random, so that the mean is the value, and not to nearest even.
        stochastic: bool,
    },
    /// OCP FP8 E5M2, otherwise as [`Codec::Fp8E4m3`]: wider in range, coarser.
    Fp8E5m2 {
        /// Whether to round at random, so that the mean is the value, and not to nearest even.
        stochastic: bool,
    },
    /// Whole numbers from -127 to 127 with a f32 scale per block of 128 elements: 1 byte per
    /// element and 4 per block. A block with a NaN or an infinity decodes to NaN.
    Int8 {
        /// Whether to round at random, so that the mean is the value, and not to nearest even.
        stochastic: bool,
    },
    /// The sign of each element, and a f32 scale for the part. A part with a NaN or an infinity
    /// decodes to NaN.
    Onebit {
        /// Whether the scale is the mean magnitude and not 1.
        scaling: bool,
    },
    /// The elements of the largest magnitude, exactly: an index and a f32 each. NaN counts as the
    /// largest, then infinities.
    Topk {
        /// How many elements are sent.
        keep: Keep,
    },
    /// Elements drawn at random, exactly: a f32 each. A part with a NaN or an infinity sends NaN.
    Randomk {
        /// How many elements are sent.
        keep: Keep,
        /// With [`Draw::shared`], says which. It is the same at every end.
        seed: u64,
    },
    /// Levels between 0 and the part's norm, rounded at random so that the mean is the value. A
    /// part with a NaN or an infinity decodes to NaN.
    Dithering {
        /// How many levels above 0: 1 to 127 if linear, 1 to 32 if natural; what lies outside
        /// counts as the nearest of these.
        levels: u8,
        /// How the levels lie.
        spacing: Spacing,
        /// What the highest level is.
        norm: Norm,
        /// With [`Draw::own`], gives the random numbers.
        seed: u64,
    },
}

/// How many elements of a part are sent: at least 1 (of a part that has any), at most all.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Keep {
    /// This many.
    Count(u32),
    /// This many of each million, rounded down.
    PerMillion(u32),
}

impl Keep {
    /// How many of so many elements.
    #[must_use]
    pub fn of(self, elements: usize) -> usize {
        let count = match self {
            Keep::Count(count) => count as usize,
            Keep::PerMillion(share) => {
                let (whole, rest) = (elements / 1_000_000, elements % 1_000_000);
                whole.saturating_mul(share as usize) + rest * share as usize / 1_000_000
            }
        };
        count.max(1).min(elements)
    }
}

/// How levels lie between 0 and the norm.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Spacing {
    /// At equal distances.
    Linear,
    /// Each at half of the next: norm, norm/2, norm/4, …
    Natural,
}

/// The size of a part, to which its elements are compared.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Norm {
    /// The largest magnitude.
    Max,
    /// The root of the sum of squares.
    L2,
}

/// Random numbers of a round of a key. Any that differ will do, such as counters: they are mixed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Draw {
    /// The same at every end.
    pub shared: u64,
    /// Different for each sender. Only encoding uses it: a receiver may pass any.
    pub own: u64,
}

/// Why bytes are no encoding of a part.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Malformed {
    /// An encoding has one length.
    #[error(
        "{elements} elements as {codec} are {expected} bytes, not {found}: \
         do both ends have the same codec and build?"
    )]
    Length {
        /// What they were checked against.
        codec: Codec,
        /// Elements of the part.
        elements: usize,
        /// Bytes of its encoding.
        expected: usize,
        /// Bytes that came.
        found: usize,
    },
    /// An index points behind the part's end, or not behind the index before it.
    #[error(
        "index number {place} of {codec} is {index}; indices rise and are below {elements}: \
         do both ends have the same codec and build?"
    )]
    Index {
        /// What they were checked against.
        codec: Codec,
        /// Elements of the part.
        elements: usize,
        /// Which index, from 0.
        place: usize,
        /// The index.
        index: usize,
    },
    /// An element has a level that does not exist.
    #[error("level {level} of {codec}, which has {levels}: do both ends have the same codec?")]
    Level {
        /// What they were checked against.
        codec: Codec,
        /// The largest level that came.
        level: u8,
        /// The largest there is.
        levels: u8,
    },
    /// Bits behind the last element are not 0.
    #[error("bits {bits:#04x} behind the last of {elements} elements as {codec} are not 0")]
    Padding {
        /// What they were checked against.
        codec: Codec,
        /// Elements of the part.
        elements: usize,
        /// The bits.
        bits: u8,
    },
}

/// Elements of a part at most, since indices have 32 bits.
const ELEMENTS_MAX: usize = u32::MAX as usize;

impl Codec {
    /// Bytes that a part of so many elements takes at most, encoded; what `wire` must have room
    /// for. An encoding has just this length.
    ///
    /// # Panics
    /// A part has more than 2^32 - 1 elements.
    #[must_use]
    pub fn wire_bytes_max(self, elements: usize) -> usize {
        assert!(elements <= ELEMENTS_MAX, "a part of {elements} elements");
        match self {
            Codec::Fp16 | Codec::Bf16 => 2 * elements,
            Codec::Fp8E4m3 { .. } | Codec::Fp8E5m2 { .. } | Codec::Int8 { .. } => {
                scaled::wire_bytes(elements)
            }
            Codec::Onebit { .. } => onebit::wire_bytes(elements),
            Codec::Topk { keep } => {
                keep.of(elements) * (sparse::index_bytes(elements) + size_of::<f32>())
            }
            Codec::Randomk { keep, .. } => keep.of(elements) * size_of::<f32>(),
            Codec::Dithering { levels, spacing, .. } => {
                Levels::new(levels, spacing).wire_bytes(elements)
            }
        }
    }

    /// Encodes `values` into the front of `wire`. Returns how many bytes were written.
    ///
    /// # Panics
    /// `wire` is shorter than [`Codec::wire_bytes_max`].
    pub fn encode(self, values: &[f32], draw: Draw, wire: &mut [u8]) -> usize {
        self.encode_with(kernels(), values, draw, wire)
    }

    /// Encodes, and leaves in `values` what was not sent: value minus what [`Codec::decode`] gives
    /// (error feedback). Where that is not finite, 0 is left: an overflow was reported by the bytes
    /// sent, and would otherwise never end.
    ///
    /// # Panics
    /// `wire` is shorter than [`Codec::wire_bytes_max`].
    pub fn encode_rest(self, values: &mut [f32], draw: Draw, wire: &mut [u8]) -> usize {
        self.encode_rest_with(kernels(), values, draw, wire)
    }

    /// Whether these bytes are an encoding of so many elements. Call it before decoding what a peer
    /// sent: [`Codec::decode`] is in bounds without it, but what it makes of other bytes means
    /// nothing.
    ///
    /// # Errors
    /// They are not; see [`Malformed`].
    pub fn check(self, elements: usize, wire: &[u8]) -> Result<(), Malformed> {
        self.check_with(kernels(), elements, wire)
    }

    /// `values` become what was encoded. Of bytes that [`Codec::check`] refuses, they become
    /// anything, or 0 if the length is wrong.
    pub fn decode(self, wire: &[u8], draw: Draw, values: &mut [f32]) {
        self.decode_with(kernels(), wire, draw, values);
    }

    /// What was encoded is added to `sums`. Of bytes that [`Codec::check`] refuses, anything is, or
    /// nothing if the length is wrong.
    pub fn decode_add(self, wire: &[u8], draw: Draw, sums: &mut [f32]) {
        self.decode_add_with(kernels(), wire, draw, sums);
    }
}

/// The same by kernels of choice, for tests and measurements.
impl Codec {
    /// [`Codec::encode`].
    pub fn encode_with(
        self,
        kernels: &Kernels,
        values: &[f32],
        draw: Draw,
        wire: &mut [u8],
    ) -> usize {
        let length = self.wire_bytes_max(values.len());
        assert!(length <= wire.len(), "{length} bytes into {} of {self}", wire.len());
        let wire = &mut wire[..length];
        let own = |stochastic: bool| stochastic.then(|| Stream::new(0, draw.own));
        match self {
            Codec::Fp16 => elements::narrow_with(kernels, DType::F16, values, wire),
            Codec::Bf16 => elements::narrow_with(kernels, DType::BF16, values, wire),
            Codec::Fp8E4m3 { stochastic } => {
                encode_scaled::<E4m3>(kernels, values, own(stochastic), wire);
            }
            Codec::Fp8E5m2 { stochastic } => {
                encode_scaled::<E5m2>(kernels, values, own(stochastic), wire);
            }
            Codec::Int8 { stochastic } => {
                encode_scaled::<Int8>(kernels, values, own(stochastic), wire);
            }
            Codec::Onebit { scaling } => {
                wide!(kernels, onebit::encode(values, scaling, wire));
            }
            Codec::Topk { keep } => {
                let count = keep.of(values.len());
                wide!(kernels, sparse::encode_topk(values, count, wire));
            }
            Codec::Randomk { keep, seed } => {
                let strata = strata(keep, seed, values.len(), draw);
                wide!(kernels, {
                    sparse::encode_randomk(values, strata, wire);
                });
            }
            Codec::Dithering { levels, spacing, norm, seed } => {
                let levels = Levels::new(levels, spacing);
                let stream = Stream::new(seed, draw.own);
                wide!(kernels, {
                    dithering::encode(values, levels, norm, stream, wire);
                });
            }
        }
        length
    }

    /// [`Codec::encode_rest`].
    pub fn encode_rest_with(
        self,
        kernels: &Kernels,
        values: &mut [f32],
        draw: Draw,
        wire: &mut [u8],
    ) -> usize {
        let length = self.encode_with(kernels, values, draw, wire);
        self.put::<Rest>(kernels, &wire[..length], draw, values);
        if self.is_sparse() {
            wide!(kernels, fold::keep_finite(values));
        }
        length
    }

    /// [`Codec::check`].
    ///
    /// # Errors
    /// As there.
    pub fn check_with(
        self,
        kernels: &Kernels,
        elements: usize,
        wire: &[u8],
    ) -> Result<(), Malformed> {
        let (codec, expected, found) = (self, self.wire_bytes_max(elements), wire.len());
        if found != expected {
            return Err(Malformed::Length { codec, elements, expected, found });
        }
        match self {
            Codec::Onebit { .. } => match onebit::padding(wire, elements) {
                0 => Ok(()),
                bits => Err(Malformed::Padding { codec, elements, bits }),
            },
            Codec::Dithering { levels, spacing, .. } => {
                let levels = Levels::new(levels, spacing);
                let level = wide!(kernels, dithering::level_max(wire, levels));
                match dithering::padding(wire, elements, levels) {
                    0 if level <= levels.count => Ok(()),
                    0 => Err(Malformed::Level { codec, level, levels: levels.count }),
                    bits => Err(Malformed::Padding { codec, elements, bits }),
                }
            }
            Codec::Topk { keep } => {
                let mut least = 0;
                let indices = sparse::indices(wire, elements, keep.of(elements));
                for (place, index) in indices.enumerate() {
                    if index < least || index >= elements {
                        return Err(Malformed::Index { codec, elements, place, index });
                    }
                    least = index + 1;
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// [`Codec::decode`].
    pub fn decode_with(self, kernels: &Kernels, wire: &[u8], draw: Draw, values: &mut [f32]) {
        if wire.len() != self.wire_bytes_max(values.len()) {
            values.fill(0.0);
            return;
        }
        match self {
            Codec::Fp16 => elements::widen_with(kernels, DType::F16, wire, values),
            Codec::Bf16 => elements::widen_with(kernels, DType::BF16, wire, values),
            _ => {
                if self.is_sparse() {
                    values.fill(0.0);
                }
                self.put::<Set>(kernels, wire, draw, values);
            }
        }
    }

    /// [`Codec::decode_add`].
    pub fn decode_add_with(self, kernels: &Kernels, wire: &[u8], draw: Draw, sums: &mut [f32]) {
        if wire.len() != self.wire_bytes_max(sums.len()) {
            return;
        }
        match self {
            Codec::Fp16 => elements::add_with(kernels, DType::F16, wire, sums),
            Codec::Bf16 => elements::add_with(kernels, DType::BF16, wire, sums),
            _ => self.put::<Add>(kernels, wire, draw, sums),
        }
    }

    /// Hands each element that was sent to a sink. `wire` has the length of an encoding.
    fn put<S: Sink>(self, kernels: &Kernels, wire: &[u8], draw: Draw, values: &mut [f32]) {
        match self {
            Codec::Fp16 => elements::put_with::<S>(kernels, DType::F16, wire, values),
            Codec::Bf16 => elements::put_with::<S>(kernels, DType::BF16, wire, values),
            Codec::Fp8E4m3 { .. } => decode_scaled::<E4m3, S>(kernels, wire, values),
            Codec::Fp8E5m2 { .. } => decode_scaled::<E5m2, S>(kernels, wire, values),
            Codec::Int8 { .. } => decode_scaled::<Int8, S>(kernels, wire, values),
            Codec::Onebit { .. } => {
                wide!(kernels, onebit::decode::<S>(wire, values));
            }
            Codec::Topk { keep } => {
                let count = keep.of(values.len());
                sparse::decode_topk::<S>(wire, count, values);
            }
            Codec::Randomk { keep, seed } => {
                let strata = strata(keep, seed, values.len(), draw);
                sparse::decode_randomk::<S>(wire, strata, values);
            }
            Codec::Dithering { levels, spacing, .. } => {
                let levels = Levels::new(levels, spacing);
                wide!(kernels, {
                    dithering::decode::<S>(wire, levels, values);
                });
            }
        }
    }

    /// Whether elements may be missing on the wire.
    fn is_sparse(self) -> bool {
        matches!(self, Codec::Topk { .. } | Codec::Randomk { .. })
    }
}

fn encode_scaled<C: Code>(
    kernels: &Kernels,
    values: &[f32],
    random: Option<Stream>,
    wire: &mut [u8],
) {
    wide!(kernels, scaled::encode::<C>(values, random, wire));
}

fn decode_scaled<C: Code, S: Sink>(kernels: &Kernels, wire: &[u8], values: &mut [f32]) {
    wide!(kernels, scaled::decode::<C, S>(wire, values));
}

fn strata(keep: Keep, seed: u64, elements: usize, draw: Draw) -> Strata {
    Strata::new(elements, keep.of(elements), Stream::new(seed, draw.shared))
}
