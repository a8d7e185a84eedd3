//! What nodes tell each other while ranks have run out of data before others (Horovod's `join()`).
//!
//! A rank that has joined *follows* the others: the scheduler tells it what they push, and it
//! pushes as often, elements that change no result. The data path knows nothing of it, and a job in
//! which nobody joins sends none of these messages.

use super::declaration::Declaration;
use crate::base::Rank;
use serde::{Deserialize, Serialize};

/// Tensors that one `Follow` describes, at most.
pub const FOLLOWED_MAX: usize = 256;

/// Tensors of consecutive numbers that a rank has pushed equally often.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Pushes {
    /// The first of them.
    pub first: u32,
    /// How many there are.
    pub tensors: u32,
    /// How often each was pushed since the epoch began.
    pub pushes: u64,
}

impl Pushes {
    /// How often a tensor was pushed, as these say.
    #[must_use]
    pub fn of(all: &[Pushes], tensor: u32) -> u64 {
        let has = |some: &&Pushes| {
            tensor.checked_sub(some.first).is_some_and(|offset| offset < some.tensors)
        };
        all.iter().find(has).map_or(0, |some| some.pushes)
    }

    /// Appends a tensor, to the last run of `all` where it continues that.
    pub fn append(all: &mut Vec<Pushes>, tensor: u32, pushes: u64) {
        match all.last_mut() {
            Some(last)
                if last.pushes == pushes
                    && last.first.checked_add(last.tensors) == Some(tensor) =>
            {
                last.tensors += 1;
            }
            _ => all.push(Pushes { first: tensor, tensors: 1, pushes }),
        }
    }
}

/// A tensor that a rank which has joined must push so often.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Followed {
    /// Its number.
    pub tensor: u32,
    /// How often, since the epoch began.
    pub pushes: u64,
    /// What it is: the rank may not have declared it.
    pub said: Declaration,
}

/// From a worker.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum UnevenReport {
    /// It has joined: it pushes nothing more on its own account until all have.
    Joined {
        /// All that it has pushed.
        pushes: Vec<Pushes>,
    },
    /// The answer to `Report`, with all that it has pushed; and again before each of its pushes,
    /// with those.
    Pushed {
        /// Totals, in the order of the pushes.
        pushes: Vec<Pushes>,
    },
    /// Has the root of this broadcast joined? Answered by `Root`.
    IsRootThere {
        /// Chosen by the sender.
        request: u64,
        /// The broadcast.
        tensor: u32,
    },
}

/// From the scheduler to a worker.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum UnevenOrder {
    /// Some rank has joined: say what you push, from now on until all have joined.
    Report,
    /// To a rank that has joined: push these.
    Follow {
        /// At most [`FOLLOWED_MAX`], in the order in which another rank pushed them.
        tensors: Vec<Followed>,
    },
    /// Answer to `IsRootThere`.
    Root {
        /// From the question.
        request: u64,
        /// How often the root had pushed the tensor when it joined, if it has.
        joined_after: Option<u64>,
    },
    /// All ranks have joined: each goes on by itself.
    AllJoined {
        /// The one that was last.
        last: Rank,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pushes_of_neighbours_are_one_run() {
        let mut all = Vec::new();
        for (tensor, pushes) in [(3, 7), (4, 7), (5, 8), (7, 8), (0, 1)] {
            Pushes::append(&mut all, tensor, pushes);
        }
        let run = |first, tensors, pushes| Pushes { first, tensors, pushes };
        assert_eq!(all, [run(3, 2, 7), run(5, 1, 8), run(7, 1, 8), run(0, 1, 1)]);
        let told: Vec<u64> = (0..9).map(|tensor| Pushes::of(&all, tensor)).collect();
        assert_eq!(told, [1, 0, 0, 7, 7, 8, 0, 8, 0]);
    }
}
