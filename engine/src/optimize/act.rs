//! What a round of a tensor with an optimizer is for, as 64 bits that travel with its contributions
//! and which all ranks must say alike.
//!
//! | bits | meaning |
//! |---|---|
//! | 63 | set: a step, and the other bits are those of the learning rate, a f64 |
//! | 56..63 | else: 1 to set, 2 to get, 0 (as all other bits) for other tensors |
//! | 48..56 | which slot |
//! | 0..48 | to set: steps that were taken; to get: zero |

use super::{Number, Optimizer};
use std::fmt;

const STEP: u64 = 1 << 63;
const SET: u64 = 1;
const GET: u64 = 2;
const VERB_AT: u32 = 56;
const SLOT_AT: u32 = 48;

/// The most steps of which an optimizer can be told that they were taken.
pub const STEPS_MAX: u64 = (1 << SLOT_AT) - 1;

/// See the [module](self).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Act(u64);

/// An [`Act`], taken apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Deed {
    /// Contributions are gradients; the result is the parameters behind the step.
    Step {
        /// The learning rate.
        rate: Number,
    },
    /// The sum of the contributions becomes this slot, and is the result. Slot 0, the parameters,
    /// comes first, and lets all others begin with zeros.
    Set {
        /// Which.
        slot: u8,
        /// Steps that the state has behind it.
        steps: u64,
    },
    /// The result is this slot; contributions do not matter.
    Get {
        /// Which.
        slot: u8,
    },
}

impl Act {
    /// That of rounds of tensors without an optimizer.
    pub const NONE: Act = Act(0);

    /// A step at this learning rate.
    #[must_use]
    pub fn step(rate: Number) -> Act {
        Act(STEP | rate.get().to_bits())
    }

    /// Sets a slot; so many steps were taken, at most [`STEPS_MAX`].
    #[must_use]
    pub fn set(slot: u8, steps: u64) -> Act {
        Act(SET << VERB_AT | u64::from(slot) << SLOT_AT | steps.min(STEPS_MAX))
    }

    /// Asks for a slot.
    #[must_use]
    pub fn get(slot: u8) -> Act {
        Act(GET << VERB_AT | u64::from(slot) << SLOT_AT)
    }

    /// As it travels.
    #[must_use]
    pub fn word(self) -> u64 {
        self.0
    }

    /// What travelled; it may mean nothing.
    #[must_use]
    pub fn from_word(word: u64) -> Act {
        Act(word)
    }

    /// What it means, to a tensor with an optimizer; `None` if nothing.
    #[must_use]
    pub fn deed(self) -> Option<Deed> {
        if self.0 & STEP != 0 {
            return Number::new(f64::from_bits(self.0 & !STEP)).map(|rate| Deed::Step { rate });
        }
        #[allow(clippy::cast_possible_truncation, reason = "the eight bits of a slot")]
        let slot = (self.0 >> SLOT_AT) as u8;
        let steps = self.0 & STEPS_MAX;
        match self.0 >> VERB_AT {
            SET => Some(Deed::Set { slot, steps }),
            GET if steps == 0 => Some(Deed::Get { slot }),
            _ => None,
        }
    }

    /// Whether a tensor with this optimizer can have such a round.
    #[must_use]
    pub fn suits(self, optimizer: &Optimizer) -> bool {
        match self.deed() {
            Some(Deed::Step { .. }) => true,
            Some(Deed::Set { slot, .. } | Deed::Get { slot }) => {
                usize::from(slot) < optimizer.slots()
            }
            None => false,
        }
    }

    /// Whether it is a step.
    #[must_use]
    pub fn is_step(self) -> bool {
        self.0 & STEP != 0
    }
}

impl fmt::Display for Act {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.deed() {
            Some(Deed::Step { rate }) => write!(f, "a step with learning rate {rate}"),
            Some(Deed::Set { slot, steps }) => {
                write!(f, "setting slot {slot} behind {steps} steps")
            }
            Some(Deed::Get { slot }) => write!(f, "getting slot {slot}"),
            None if *self == Act::NONE => f.write_str("a push without an optimizer"),
            None => write!(f, "what no release of this engine knows ({:#018x})", self.0),
        }
    }
}
