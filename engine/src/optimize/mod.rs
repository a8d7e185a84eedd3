//! Optimizers that run where gradients are averaged: SGD, Adam and AdamW on f32 parameters.
//!
//! Owns the arithmetic, how an optimizer is written, and what a round of a tensor that has one is
//! for. Knows no key, no round's contributions and no connection: a server core calls it with the
//! average and with memory for parameters and state.
//!
//! Invariant: each element's new value depends on its own old ones, the gradient, the rate and the
//! number of the step alone, by single operations on f32 in the order of torch's optimizers, so
//! every instruction set and every cut into parts gives the same bits.

#![forbid(unsafe_code)]

mod act;
mod step;
mod text;

#[cfg(test)]
mod tests;

pub use act::{Act, Deed, STEPS_MAX};
pub use step::Slots;
pub use text::OptimizerError;

use serde::{Deserialize, Serialize};
use std::fmt;

/// The most values that are kept for each parameter: its own, and two moments.
pub const SLOTS_MAX: usize = 3;

/// A finite number from 0 on, which is compared by its bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Number(u64);

impl Number {
    /// 0.
    pub const ZERO: Number = Number(0);

    /// This number; `None` if it is negative or not finite.
    #[must_use]
    pub fn new(value: f64) -> Option<Number> {
        // What is added makes a positive zero of a negative one.
        (value >= 0.0 && value.is_finite()).then(|| Number((value + 0.0).to_bits()))
    }

    /// Its value.
    #[must_use]
    pub fn get(self) -> f64 {
        f64::from_bits(self.0)
    }
}

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.get())
    }
}

/// An optimizer with all that stays the same from step to step. The learning rate comes with each
/// step.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Optimizer {
    /// As `torch.optim.SGD`.
    Sgd {
        /// Without it, nothing but the parameter is kept.
        momentum: Number,
        /// How much less than the whole gradient the momentum takes, from the second step on.
        dampening: Number,
        /// Times the parameter, added to the gradient.
        weight_decay: Number,
        /// The gradient and the momentum behind it, and not the momentum alone, is the step.
        nesterov: bool,
    },
    /// As `torch.optim.Adam` or, decoupled, `torch.optim.AdamW`; without AMSGrad.
    Adam {
        /// How much of the mean of gradients is kept in a step.
        beta1: Number,
        /// Likewise of the mean of their squares.
        beta2: Number,
        /// Added to the root of that.
        eps: Number,
        /// Times the parameter, added to the gradient or, decoupled, taken off by the rate.
        weight_decay: Number,
        /// AdamW.
        decoupled: bool,
    },
}

impl Optimizer {
    /// Values that are kept for each parameter: itself first, then what the optimizer remembers.
    #[must_use]
    pub fn slots(&self) -> usize {
        match self {
            Optimizer::Sgd { momentum: Number::ZERO, .. } => 1,
            Optimizer::Sgd { .. } => 2,
            Optimizer::Adam { .. } => 3,
        }
    }
}
