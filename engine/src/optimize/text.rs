//! Optimizers as text, which is also how they go over the wire: `sgd(momentum=0.9,nesterov)`,
//! `adamw(beta1=0.9,beta2=0.999,eps=0.00000001,weight_decay=0.01)`.
//!
//! Invariant: what [`Optimizer`] displays is read as the same optimizer. A parameter that is not
//! given is what torch has for it, but for a weight decay, which is 0.

use super::{Number, Optimizer};
use std::fmt;
use std::str::FromStr;

/// Optimizers and their parameters, as an error shows them.
const POSSIBLE: &str = "sgd (`momentum`, `dampening`, `weight_decay`, `nesterov`), adam and adamw \
    (`beta1`, `beta2`, `eps`, `weight_decay`)";
/// A longer text is no optimizer, and is not repeated in an error.
const LENGTH_MAX: usize = 400;

/// Why a text names no optimizer.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum OptimizerError {
    /// None has this name, or the text is no name with parameters in parentheses.
    #[error("`{text}` is no optimizer of servers: use one of {POSSIBLE}")]
    Unknown {
        /// What stands there.
        text: String,
    },
    /// Of this many bytes, it is none.
    #[error("{length} bytes of text are no optimizer: use one of {POSSIBLE}")]
    Long {
        /// Bytes.
        length: usize,
    },
    /// It has no such parameter, or has it twice.
    #[error("{optimizer} has no parameter `{parameter}`, or has it twice: possible are {POSSIBLE}")]
    Parameter {
        /// The optimizer's name.
        optimizer: String,
        /// The parameter.
        parameter: String,
    },
    /// A value is out of bounds or no number.
    #[error("{optimizer}: `{parameter}` is {possible}, not `{value}`")]
    Value {
        /// The optimizer's name.
        optimizer: String,
        /// The parameter.
        parameter: String,
        /// What was given.
        value: String,
        /// What it may be.
        possible: &'static str,
    },
    /// torch refuses it, too.
    #[error("sgd: nesterov needs a momentum above 0 and no dampening")]
    Nesterov,
}

/// The parameters of one optimizer as they were written, and which of them have been taken.
struct Parameters<'a> {
    optimizer: &'a str,
    /// Names and values; a name alone has the value `""`.
    given: Vec<(&'a str, &'a str)>,
}

impl Parameters<'_> {
    fn take(&mut self, name: &str) -> Option<String> {
        let at = self.given.iter().position(|(given, _)| *given == name)?;
        Some(self.given.remove(at).1.to_owned())
    }

    fn wrong(&self, parameter: &str, value: String, possible: &'static str) -> OptimizerError {
        let (optimizer, parameter) = (self.optimizer.to_owned(), parameter.to_owned());
        OptimizerError::Value { optimizer, parameter, value, possible }
    }

    fn number(&mut self, name: &str, default: f64) -> Result<Number, OptimizerError> {
        let text = self.take(name);
        let value = text.as_ref().map_or(Ok(default), |text| text.parse::<f64>());
        let number = value.ok().and_then(Number::new);
        number.ok_or_else(|| self.wrong(name, text.unwrap_or_default(), "a finite number from 0"))
    }

    fn beta(&mut self, name: &str, default: f64) -> Result<Number, OptimizerError> {
        let beta = self.number(name, default)?;
        match beta.get() < 1.0 {
            true => Ok(beta),
            false => Err(self.wrong(name, beta.to_string(), "a number from 0 to below 1")),
        }
    }

    fn flag(&mut self, name: &str) -> Result<bool, OptimizerError> {
        match self.take(name).as_deref() {
            None | Some("false") => Ok(false),
            Some("" | "true") => Ok(true),
            Some(value) => Err(self.wrong(name, value.to_owned(), "true or false")),
        }
    }

    /// After all that the optimizer has was taken.
    fn end(&self) -> Result<(), OptimizerError> {
        let Some((parameter, _)) = self.given.first() else { return Ok(()) };
        let (optimizer, parameter) = (self.optimizer.to_owned(), (*parameter).to_owned());
        Err(OptimizerError::Parameter { optimizer, parameter })
    }
}

impl FromStr for Optimizer {
    type Err = OptimizerError;

    fn from_str(text: &str) -> Result<Optimizer, OptimizerError> {
        if text.len() > LENGTH_MAX {
            return Err(OptimizerError::Long { length: text.len() });
        }
        let text = text.trim().to_ascii_lowercase();
        let unknown = || OptimizerError::Unknown { text: text.clone() };
        let (name, inner) = match text.split_once('(') {
            None => (text.as_str(), ""),
            Some((name, rest)) => (name.trim(), rest.strip_suffix(')').ok_or_else(unknown)?),
        };
        let given = inner.split(',').map(str::trim).filter(|one| !one.is_empty()).map(|one| {
            let (name, value) = one.split_once('=').unwrap_or((one, ""));
            (name.trim(), value.trim())
        });
        let mut given = Parameters { optimizer: name, given: given.collect() };
        let made = match name {
            "sgd" => Optimizer::Sgd {
                momentum: given.number("momentum", 0.0)?,
                dampening: given.number("dampening", 0.0)?,
                weight_decay: given.number("weight_decay", 0.0)?,
                nesterov: given.flag("nesterov")?,
            },
            "adam" | "adamw" => Optimizer::Adam {
                beta1: given.beta("beta1", 0.9)?,
                beta2: given.beta("beta2", 0.999)?,
                eps: given.number("eps", 1e-8)?,
                weight_decay: given.number("weight_decay", 0.0)?,
                decoupled: name == "adamw",
            },
            _ => return Err(unknown()),
        };
        given.end()?;
        match made {
            Optimizer::Sgd { momentum, dampening, nesterov: true, .. }
                if momentum == Number::ZERO || dampening != Number::ZERO =>
            {
                Err(OptimizerError::Nesterov)
            }
            made => Ok(made),
        }
    }
}

impl fmt::Display for Optimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Optimizer::Sgd { momentum, dampening, weight_decay, nesterov } => {
                let nesterov = if *nesterov { ",nesterov" } else { "" };
                write!(
                    f,
                    "sgd(momentum={momentum},dampening={dampening},\
                     weight_decay={weight_decay}{nesterov})"
                )
            }
            Optimizer::Adam { beta1, beta2, eps, weight_decay, decoupled } => {
                let name = if *decoupled { "adamw" } else { "adam" };
                write!(
                    f,
                    "{name}(beta1={beta1},beta2={beta2},eps={eps},weight_decay={weight_decay})"
                )
            }
        }
    }
}

impl TryFrom<String> for Optimizer {
    type Error = OptimizerError;

    fn try_from(text: String) -> Result<Optimizer, OptimizerError> {
        text.parse()
    }
}

impl From<Optimizer> for String {
    fn from(optimizer: Optimizer) -> String {
        optimizer.to_string()
    }
}
