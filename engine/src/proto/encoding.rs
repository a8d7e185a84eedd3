//! How the parts of a tensor travel between worker processes and servers, where that is not as they
//! are: part of what the ranks agree on.
//!
//! Invariant: an encoding is written as text, the same for people, settings and the wire, and what
//! a peer sends is held to the bounds of what can be said there. Whether a tensor can have it is
//! for [`Encoding::check`] to say: of its type, its operation and its parts.

use crate::base::{DType, Key, Operation};
use crate::encode::{Codec, CodecError, Draw};
use crate::limits::PART_BYTES_MAX;
use crate::wire::header::Form;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// What stands for 1 in a [`Momentum`].
const MILLION: u32 = 1_000_000;
/// Bytes of the text of an encoding, at most.
const TEXT_BYTES_MAX: usize = 256;
/// What `auto` may use if it does not say.
const AUTO: &str = "int8";

/// The factor of Nesterov's momentum, from 0 to below 1 in steps of a millionth.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Momentum(u32);

impl Momentum {
    /// This factor, rounded to a millionth; `None` if it is not in `0 <= factor < 1`.
    #[must_use]
    pub fn new(factor: f64) -> Option<Momentum> {
        let millionths = (factor * f64::from(MILLION)).round();
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked")]
        (0.0..f64::from(MILLION)).contains(&millionths).then_some(Momentum(millionths as u32))
    }

    /// The factor.
    #[must_use]
    #[allow(clippy::cast_possible_truncation, reason = "rounded to the nearest f32")]
    pub fn factor(self) -> f32 {
        (f64::from(self.0) / f64::from(MILLION)) as f32
    }
}

/// A codec, and what is done in front of it.
///
/// A worker encodes what it, or the group of its host, contributes; a server encodes each result,
/// by the same codec.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Encoding {
    /// What makes it smaller.
    pub codec: Codec,
    /// Each contribution is encoded only as far as its sender finds that this saves time: it goes
    /// in one of the [forms](Form), and the result in the shortest of those of its contributions.
    /// Nothing is kept between rounds then.
    pub auto: bool,
    /// Error feedback: with what it encodes, each end adds what its codec left out of the round
    /// before: `p = g + e`, sends `C(p)`, keeps `e = p - decoded(C(p))` (Seide et al. 2014, "1-bit
    /// stochastic gradient descent"; Karimireddy et al. 2019, "Error feedback fixes SignSGD").
    pub feedback: bool,
    /// Nesterov's momentum in front of that, at the workers: `m = mu m + g`, and `g + mu m` is what
    /// is encoded.
    pub momentum: Option<Momentum>,
}

/// Why a text is no encoding.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum EncodingError {
    /// It is too long.
    #[error("an encoding is described in at most {TEXT_BYTES_MAX} bytes, not {0}")]
    Long(usize),
    /// What comes first is a codec.
    #[error("{0}")]
    Codec(#[from] CodecError),
    /// What follows it is one of two things.
    #[error("`+{0}` is not known behind a codec: `+feedback` and `+momentum(0.9)` are")]
    Extra(String),
    /// The factor of the momentum.
    #[error("a momentum of `{0}`: a number from 0 to below 1 is possible")]
    Momentum(String),
    /// Not everything can be left out of a round.
    #[error(
        "`{0}`: auto takes one codec of fp16, bf16, fp8_e4m3, fp8_e5m2, int8 and dithering, \
         without feedback or momentum, because what those keep would go stale where a round is not \
         encoded: write auto or, say, auto(int8), or name the codec alone"
    )]
    Auto(String),
    /// The same twice.
    #[error("`+{0}` stands twice in an encoding")]
    Twice(String),
}

/// Why a tensor cannot be encoded so.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum EncodingFault {
    /// Codecs are for floats.
    Type {
        /// What it is of.
        dtype: DType,
    },
    /// What is sent as it is is summed in f32 as what is encoded is.
    Wide {
        /// What it is of.
        dtype: DType,
    },
    /// Codecs are for what is added.
    Operation {
        /// What it is for.
        operation: Operation,
    },
    /// A part of it would be longer than a payload may be.
    Long {
        /// Elements of the part.
        elements: u64,
        /// Bytes that it may take.
        bytes: u64,
    },
}

impl Encoding {
    /// The codec alone.
    #[must_use]
    pub fn plain(codec: Codec) -> Encoding {
        Encoding { codec, auto: false, feedback: false, momentum: None }
    }

    /// The codec of payloads of this form, which may be plain.
    #[must_use]
    pub fn codec_of(&self, form: Form) -> Option<Codec> {
        match form {
            Form::Plain => None,
            Form::Half => Some(Codec::Bf16),
            Form::Declared => Some(self.codec),
        }
    }

    /// Bytes of the longest payload of so many elements that is not plain.
    #[must_use]
    pub fn room(&self, elements: usize) -> usize {
        let half = if self.auto { Codec::Bf16.wire_bytes_max(elements) } else { 0 };
        self.codec.wire_bytes_max(elements).max(half)
    }

    /// Whether this type leaves the choice that `auto` is.
    #[must_use]
    pub fn may_choose(dtype: DType) -> bool {
        dtype != DType::F64
    }

    /// Whether a tensor of this type can have it, for this operation, in parts of at most so many
    /// elements.
    ///
    /// # Errors
    /// [`EncodingFault`].
    pub fn check(
        &self,
        dtype: DType,
        operation: Operation,
        elements: u64,
    ) -> Result<(), EncodingFault> {
        if !dtype.is_float() {
            return Err(EncodingFault::Type { dtype });
        }
        if self.auto && !Encoding::may_choose(dtype) {
            return Err(EncodingFault::Wide { dtype });
        }
        if !matches!(operation, Operation::Sum | Operation::Average) {
            return Err(EncodingFault::Operation { operation });
        }
        let count = usize::try_from(elements).ok().filter(|count| *count <= PART_BYTES_MAX);
        let bytes = count.map_or(u64::MAX, |count| self.room(count) as u64);
        match bytes <= PART_BYTES_MAX as u64 {
            true => Ok(()),
            false => Err(EncodingFault::Long { elements, bytes }),
        }
    }
}

/// Who encodes: a server, for all ranks.
pub const SERVER: u32 = u32::MAX;

/// The random numbers of a round of a part for whom encodes it: a rank, or [`SERVER`].
#[must_use]
pub fn draw(key: Key, round: u64, sender: u32) -> Draw {
    let shared = mix(mix(key.0) ^ round);
    Draw { shared, own: mix(shared ^ (u64::from(sender) + 1)) }
}

/// A number that looks like no other of those from which it was not made: the finalizer of
/// SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators").
fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl FromStr for Encoding {
    type Err = EncodingError;

    fn from_str(text: &str) -> Result<Encoding, EncodingError> {
        if text.len() > TEXT_BYTES_MAX {
            return Err(EncodingError::Long(text.len()));
        }
        if let Some(inside) = inside_of_auto(text) {
            let encoding: Encoding = inside?.parse()?;
            let is_plain = encoding == Encoding::plain(encoding.codec);
            let refused = EncodingError::Auto(text.to_owned());
            return match is_plain && is_mild(encoding.codec) {
                true => Ok(Encoding { auto: true, ..encoding }),
                false => Err(refused),
            };
        }
        let mut words = text.split('+').map(str::trim);
        let mut encoding = Encoding::plain(words.next().unwrap_or_default().parse()?);
        for word in words {
            let argument = word.strip_prefix("momentum(").and_then(|rest| rest.strip_suffix(')'));
            let twice = EncodingError::Twice(word.to_owned());
            if word == "feedback" {
                if std::mem::replace(&mut encoding.feedback, true) {
                    return Err(twice);
                }
            } else if let Some(factor) = argument {
                let unknown = || EncodingError::Momentum(factor.to_owned());
                let momentum = factor.trim().parse().ok().and_then(Momentum::new);
                let momentum = momentum.ok_or_else(unknown)?;
                if encoding.momentum.replace(momentum).is_some() {
                    return Err(twice);
                }
            } else {
                return Err(EncodingError::Extra(word.to_owned()));
            }
        }
        Ok(encoding)
    }
}

/// What stands in the brackets of `auto(…)`, if the text is that.
fn inside_of_auto(text: &str) -> Option<Result<&str, EncodingError>> {
    let text = text.trim();
    let (auto, rest) = text.split_at_checked("auto".len())?;
    if !auto.eq_ignore_ascii_case("auto") {
        return None;
    }
    let inside = match rest.trim() {
        "" => Some(AUTO),
        rest => rest.strip_prefix('(').and_then(|rest| rest.strip_suffix(')')),
    };
    Some(inside.ok_or_else(|| EncodingError::Auto(text.to_owned())))
}

/// Whether what a codec leaves out is little enough to be forgotten.
fn is_mild(codec: Codec) -> bool {
    !matches!(codec, Codec::Onebit { .. } | Codec::Topk { .. } | Codec::Randomk { .. })
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.auto {
            return write!(f, "auto({})", self.codec);
        }
        write!(f, "{}", self.codec)?;
        if self.feedback {
            f.write_str("+feedback")?;
        }
        if let Some(Momentum(millionths)) = self.momentum {
            write!(f, "+momentum({})", f64::from(millionths) / f64::from(MILLION))?;
        }
        Ok(())
    }
}

impl TryFrom<String> for Encoding {
    type Error = EncodingError;

    fn try_from(text: String) -> Result<Encoding, EncodingError> {
        text.parse()
    }
}

impl From<Encoding> for String {
    fn from(encoding: Encoding) -> String {
        encoding.to_string()
    }
}

impl fmt::Display for EncodingFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EncodingFault::Type { dtype } => {
                write!(f, "it is of {dtype}, and floats alone are encoded")
            }
            EncodingFault::Wide { dtype } => {
                write!(f, "it is of {dtype}, which auto does not encode: declare it as it is")
            }
            EncodingFault::Operation { operation } => {
                write!(f, "it is for {operation}, and sums and averages alone are encoded")
            }
            EncodingFault::Long { elements, bytes } => write!(
                f,
                "a part of {elements} elements may take {bytes} bytes, more than the \
                 {PART_BYTES_MAX} of a payload: lower BYTEPS_PARTITION_BYTES"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Rank;

    #[test]
    fn an_encoding_is_written_and_read() {
        let cases = [
            ("bf16", "bf16"),
            (" bf16 + feedback", "bf16+feedback"),
            ("bf16+momentum( 0.9 )+feedback", "bf16+feedback+momentum(0.9)"),
            ("bf16+momentum(0)", "bf16+momentum(0)"),
            ("auto", "auto(int8)"),
            (" Auto ( fp8_e4m3(stochastic) )", "auto(fp8_e4m3(stochastic))"),
        ];
        for (text, written) in cases {
            let encoding: Encoding = text.parse().unwrap();
            assert_eq!(encoding.to_string(), written);
            let json = serde_json::to_string(&encoding).unwrap();
            assert_eq!(json, format!("\"{written}\""));
            assert_eq!(serde_json::from_str::<Encoding>(&json).unwrap(), encoding);
        }
    }

    #[test]
    fn what_is_no_encoding_is_said() {
        let cases = [
            ("bf16+speed", "`+speed` is not known behind a codec"),
            ("bf16+momentum(1)", "a momentum of `1`"),
            ("bf16+momentum(x)", "a momentum of `x`"),
            ("bf16+momentum(NaN)", "a momentum of `NaN`"),
            ("bf16+feedback+feedback", "`+feedback` stands twice"),
            ("bf16+momentum(0.1)+momentum(0.2)", "stands twice"),
            ("auto(topk(k=0.01))", "`auto(topk(k=0.01))`: auto takes one codec of fp16"),
            ("auto(int8+feedback)", "without feedback or momentum"),
            ("auto(int8)+feedback", "without feedback or momentum"),
            ("auto(auto)", "auto takes one codec"),
            ("automatic", "auto takes one codec"),
        ];
        for (text, why) in cases {
            let error = text.parse::<Encoding>().unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
        let long = format!("bf16{}", "+feedback".repeat(50));
        assert_eq!(long.parse::<Encoding>(), Err(EncodingError::Long(long.len())));
    }

    #[test]
    fn floats_that_are_added_are_encoded() {
        let encoding = Encoding::plain("bf16".parse().unwrap());
        for dtype in DType::ALL {
            let fits = encoding.check(dtype, Operation::Average, 64);
            assert_eq!(fits.is_ok(), dtype.is_float(), "{dtype}");
        }
        let auto: Encoding = "auto".parse().unwrap();
        assert!(auto.check(DType::BF16, Operation::Sum, 64).is_ok());
        let fault = auto.check(DType::F64, Operation::Sum, 64).unwrap_err();
        assert_eq!(fault, EncodingFault::Wide { dtype: DType::F64 });
        assert_eq!((auto.room(1 << 10), encoding.room(1 << 10)), (2 << 10, 2 << 10));
        for operation in [Operation::Broadcast(Rank(0)), Operation::Min, Operation::Product] {
            let fault = encoding.check(DType::F32, operation, 64).unwrap_err();
            assert_eq!(fault, EncodingFault::Operation { operation });
        }
        let elements = PART_BYTES_MAX as u64;
        let fault = encoding.check(DType::F32, Operation::Sum, elements).unwrap_err();
        assert_eq!(fault, EncodingFault::Long { elements, bytes: 2 * elements });
        assert!(encoding.check(DType::F32, Operation::Sum, u64::MAX).is_err());
    }

    #[test]
    fn ends_share_one_draw_and_have_one_of_their_own() {
        let (one, other) = (draw(Key(1), 2, 0), draw(Key(1), 2, SERVER));
        assert!(one.shared == other.shared && one.own != other.own);
        assert_ne!(draw(Key(2), 1, 0).shared, one.shared);
    }
}
