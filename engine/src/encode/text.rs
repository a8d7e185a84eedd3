//! Codecs as text, which is also how they go over the wire: `fp16`, `int8(stochastic)`,
//! `topk(k=0.01)`, `dithering(levels=4, natural, l2, seed=7)`.
//!
//! Invariant: what [`Codec`] displays is read as the same codec. Reading forgives case, spaces,
//! hyphens for underscores, the order of parameters, and BytePS's names of them; it refuses what is
//! unknown, out of bounds or given twice.

#![forbid(unsafe_code)]

use super::dithering::levels_max;
use super::{Codec, Keep, Norm, Spacing};
use std::fmt;
use std::str::FromStr;

/// Codecs and their parameters, as an error shows them.
const POSSIBLE: &str = "fp16, bf16, fp8_e4m3, fp8_e5m2, int8 (each of these three with \
    `stochastic`), onebit (`scaling`), topk (`k`), randomk (`k`, `seed`), \
    dithering (`levels`, `linear` or `natural`, `max` or `l2`, `seed`)";
/// A longer text is no codec, and is not repeated in an error.
const LENGTH_MAX: usize = 200;
const MILLION: u32 = 1_000_000;

/// Why a text names no codec.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CodecError {
    /// No codec has this name.
    #[error("`{name}` is no codec: use one of {POSSIBLE}")]
    Unknown {
        /// What stands where the name should.
        name: String,
    },
    /// Of this many bytes, it is no codec.
    #[error("{length} bytes of text are no codec: use one of {POSSIBLE}")]
    Long {
        /// Bytes.
        length: usize,
    },
    /// The parameters do not stand between parentheses.
    #[error("`{text}`: parameters stand in parentheses, as in topk(k=0.01)")]
    Parentheses {
        /// The whole text.
        text: String,
    },
    /// The codec has no such parameter.
    #[error("{codec} has no parameter `{parameter}`: use {possible}")]
    Parameter {
        /// The codec's name.
        codec: &'static str,
        /// The parameter.
        parameter: String,
        /// What it has.
        possible: &'static str,
    },
    /// A parameter is missing.
    #[error("{codec} needs `{parameter}`: give it {possible}")]
    Missing {
        /// The codec's name.
        codec: &'static str,
        /// The parameter.
        parameter: &'static str,
        /// What it may be.
        possible: &'static str,
    },
    /// A parameter is given twice.
    #[error("{codec} has `{parameter}` twice: give it once")]
    Twice {
        /// The codec's name.
        codec: &'static str,
        /// The parameter.
        parameter: &'static str,
    },
    /// A value is out of bounds or no value.
    #[error("{codec}: `{parameter}` is {possible}, not `{value}`")]
    Value {
        /// The codec's name.
        codec: &'static str,
        /// The parameter.
        parameter: &'static str,
        /// What was given.
        value: String,
        /// What it may be.
        possible: &'static str,
    },
}

const K: &str = "a count of elements from 1 on, or a share with a decimal point from 0.000001 to \
    1.0";
const SEED: &str = "a whole number from 0 to 2^64 - 1";
const LEVELS: &str = "a whole number from 1 to 127, or to 32 if natural";
const FLAG: &str = "true or false";

/// The parameters of one codec as they were written, and which of them have been taken.
struct Parameters<'a> {
    codec: &'static str,
    /// Names and values; a name alone has the value `""`.
    given: Vec<(&'a str, &'a str)>,
}

impl<'a> Parameters<'a> {
    /// Takes the value of the parameter that has one of these names. The first is its own.
    fn take(&mut self, names: &[&'static str]) -> Result<Option<&'a str>, CodecError> {
        let mut found = None;
        let mut twice = false;
        self.given.retain(|(name, value)| {
            let is_it = names.contains(name);
            if is_it {
                twice |= found.replace(*value).is_some();
            }
            !is_it
        });
        if twice {
            return Err(CodecError::Twice { codec: self.codec, parameter: names[0] });
        }
        Ok(found)
    }

    fn wrong(&self, parameter: &'static str, value: &str, possible: &'static str) -> CodecError {
        CodecError::Value { codec: self.codec, parameter, value: value.to_owned(), possible }
    }

    fn flag(&mut self, name: &'static str) -> Result<bool, CodecError> {
        match self.take(&[name])? {
            None | Some("false" | "0") => Ok(false),
            Some("" | "true" | "1") => Ok(true),
            Some(value) => Err(self.wrong(name, value, FLAG)),
        }
    }

    fn seed(&mut self) -> Result<u64, CodecError> {
        let Some(value) = self.take(&["seed"])? else { return Ok(0) };
        value.parse().map_err(|_| self.wrong("seed", value, SEED))
    }

    fn keep(&mut self) -> Result<Keep, CodecError> {
        let Some(value) = self.take(&["k"])? else {
            return Err(CodecError::Missing { codec: self.codec, parameter: "k", possible: K });
        };
        let keep = if value.contains(['.', 'e']) {
            value.parse().ok().and_then(share).map(Keep::PerMillion)
        } else {
            value.parse().ok().filter(|count| *count > 0).map(Keep::Count)
        };
        keep.ok_or_else(|| self.wrong("k", value, K))
    }

    fn levels(&mut self, spacing: Spacing) -> Result<u8, CodecError> {
        let codec = self.codec;
        let Some(value) = self.take(&["levels", "k"])? else {
            return Err(CodecError::Missing { codec, parameter: "levels", possible: LEVELS });
        };
        let levels = value.parse().ok();
        levels
            .filter(|levels| (1..=levels_max(spacing)).contains(levels))
            .ok_or_else(|| self.wrong("levels", value, LEVELS))
    }

    /// One of two words, which may stand alone or behind one of `names`.
    fn either<T: Copy>(
        &mut self,
        names: &[&'static str],
        words: [(&'static str, T); 2],
        possible: &'static str,
    ) -> Result<T, CodecError> {
        let mut found = self.take(names)?;
        for (word, _) in words {
            if let Some(value) = self.take(&[word])? {
                if found.replace(word).is_some() {
                    return Err(CodecError::Twice { codec: self.codec, parameter: names[0] });
                }
                if !value.is_empty() {
                    return Err(self.wrong(names[0], value, possible));
                }
            }
        }
        match found {
            None => Ok(words[0].1),
            Some(value) => words
                .iter()
                .find(|(word, _)| *word == value)
                .map(|(_, meaning)| *meaning)
                .ok_or_else(|| self.wrong(names[0], value, possible)),
        }
    }

    /// After all that the codec has was taken.
    fn end(&self, possible: &'static str) -> Result<(), CodecError> {
        match self.given.first() {
            None => Ok(()),
            Some((parameter, _)) => Err(CodecError::Parameter {
                codec: self.codec,
                parameter: (*parameter).to_owned(),
                possible,
            }),
        }
    }
}

/// A share in millionths, if it is in bounds.
#[allow(clippy::cast_possible_truncation, reason = "bounds are checked first")]
#[allow(clippy::cast_sign_loss, reason = "bounds are checked first")]
fn share(value: f64) -> Option<u32> {
    let millionths = (value * f64::from(MILLION)).round();
    (1.0..=f64::from(MILLION)).contains(&millionths).then_some(millionths as u32)
}

impl FromStr for Codec {
    type Err = CodecError;

    fn from_str(text: &str) -> Result<Codec, CodecError> {
        if text.len() > LENGTH_MAX {
            return Err(CodecError::Long { length: text.len() });
        }
        let text = text.trim().to_ascii_lowercase();
        let (name, inner) = match text.split_once('(') {
            None => (text.as_str(), ""),
            Some((name, rest)) => match rest.strip_suffix(')') {
                Some(inner) if !inner.contains(['(', ')']) => (name.trim(), inner),
                _ => return Err(CodecError::Parentheses { text }),
            },
        };
        let given = inner.split(',').map(str::trim).filter(|one| !one.is_empty()).map(|one| {
            let (name, value) = one.split_once('=').unwrap_or((one, ""));
            (name.trim(), value.trim())
        });
        let given = given.collect();
        match name.replace('-', "_").as_str() {
            "fp16" | "float16" | "f16" => plain("fp16", given, Codec::Fp16),
            "bf16" | "bfloat16" => plain("bf16", given, Codec::Bf16),
            "fp8_e4m3" | "fp8" | "fp8_e4m3fn" => {
                flagged("fp8_e4m3", given, |stochastic| Codec::Fp8E4m3 { stochastic })
            }
            "fp8_e5m2" => flagged("fp8_e5m2", given, |stochastic| Codec::Fp8E5m2 { stochastic }),
            "int8" => flagged("int8", given, |stochastic| Codec::Int8 { stochastic }),
            "onebit" => {
                let mut given = Parameters { codec: "onebit", given };
                let scaling = given.flag("scaling")?;
                given.end("`scaling`").map(|()| Codec::Onebit { scaling })
            }
            "topk" => {
                let mut given = Parameters { codec: "topk", given };
                let keep = given.keep()?;
                given.end("`k`").map(|()| Codec::Topk { keep })
            }
            "randomk" => {
                let mut given = Parameters { codec: "randomk", given };
                let (keep, seed) = (given.keep()?, given.seed()?);
                given.end("`k` and `seed`").map(|()| Codec::Randomk { keep, seed })
            }
            "dithering" => dithering(given),
            _ => Err(CodecError::Unknown { name: name.to_owned() }),
        }
    }
}

fn plain(codec: &'static str, given: Vec<(&str, &str)>, made: Codec) -> Result<Codec, CodecError> {
    Parameters { codec, given }.end("none").map(|()| made)
}

fn flagged(
    codec: &'static str,
    given: Vec<(&str, &str)>,
    make: impl Fn(bool) -> Codec,
) -> Result<Codec, CodecError> {
    let mut given = Parameters { codec, given };
    let stochastic = given.flag("stochastic")?;
    given.end("`stochastic`").map(|()| make(stochastic))
}

fn dithering(given: Vec<(&str, &str)>) -> Result<Codec, CodecError> {
    let mut given = Parameters { codec: "dithering", given };
    let spacings = [("linear", Spacing::Linear), ("natural", Spacing::Natural)];
    let spacing = given.either(&["spacing", "partition"], spacings, "linear or natural")?;
    let norms = [("max", Norm::Max), ("l2", Norm::L2)];
    let norm = given.either(&["norm", "normalize"], norms, "max or l2")?;
    let levels = given.levels(spacing)?;
    let seed = given.seed()?;
    given.end("`levels`, `linear` or `natural`, `max` or `l2`, and `seed`")?;
    Ok(Codec::Dithering { levels, spacing, norm, seed })
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let flagged = |name: &str, flag: &str, is_set: bool| {
            if is_set { format!("{name}({flag})") } else { name.to_owned() }
        };
        match *self {
            Codec::Fp16 => f.write_str("fp16"),
            Codec::Bf16 => f.write_str("bf16"),
            Codec::Fp8E4m3 { stochastic } => {
                f.write_str(&flagged("fp8_e4m3", "stochastic", stochastic))
            }
            Codec::Fp8E5m2 { stochastic } => {
                f.write_str(&flagged("fp8_e5m2", "stochastic", stochastic))
            }
            Codec::Int8 { stochastic } => f.write_str(&flagged("int8", "stochastic", stochastic)),
            Codec::Onebit { scaling } => f.write_str(&flagged("onebit", "scaling", scaling)),
            Codec::Topk { keep } => write!(f, "topk(k={keep})"),
            Codec::Randomk { keep, seed } => write!(f, "randomk(k={keep}, seed={seed})"),
            Codec::Dithering { levels, spacing, norm, seed } => {
                write!(f, "dithering(levels={levels}, {spacing}, {norm}, seed={seed})")
            }
        }
    }
}

impl fmt::Display for Keep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Keep::Count(count) => write!(f, "{count}"),
            // With a point, so that it is read as a share.
            Keep::PerMillion(share) => {
                let (whole, rest) = (share / MILLION, share % MILLION);
                let digits = format!("{rest:06}");
                let digits = digits.trim_end_matches('0');
                write!(f, "{whole}.{}", if digits.is_empty() { "0" } else { digits })
            }
        }
    }
}

impl fmt::Display for Spacing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Spacing::Linear => "linear",
            Spacing::Natural => "natural",
        })
    }
}

impl fmt::Display for Norm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Norm::Max => "max",
            Norm::L2 => "l2",
        })
    }
}

impl TryFrom<String> for Codec {
    type Error = CodecError;

    fn try_from(text: String) -> Result<Codec, CodecError> {
        text.parse()
    }
}

impl From<Codec> for String {
    fn from(codec: Codec) -> String {
        codec.to_string()
    }
}
