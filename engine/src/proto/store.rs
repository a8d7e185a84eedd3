//! Stored tensors: their value lives on the servers between rounds, for asynchronous training.
//!
//! The first contribution of the root is the value; that of any other rank is empty, and asks for
//! it. Each later contribution of a rank is a delta: the server adds it, and answers that rank with
//! the value behind it, without waiting for others. So a rank counts its own rounds of the tensor,
//! and the value has a version: how many contributions it holds.
//!
//! Invariant: a store is part of what the ranks agree on, and begins again with each epoch.

#![forbid(unsafe_code)]

use super::encoding::Encoding;
use super::members::Members;
use super::messages::Declaration;
use crate::base::{DType, Operation, Rank};
use serde::{Deserialize, Serialize};
use std::fmt;

/// How a tensor is stored.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Store {
    /// The rank whose first contribution is the value that everybody begins with.
    pub root: Rank,
    /// By how many deltas a rank may be ahead of the slowest of the tensor's ranks and still be
    /// answered; without a bound if `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub staleness: Option<u32>,
}

/// Why a tensor cannot be stored.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum StoreFault {
    /// No rank of the tensor has this number.
    Root {
        /// The number.
        root: Rank,
    },
    /// Deltas are added.
    Operation {
        /// What it was declared for.
        operation: Operation,
    },
    /// The value would have to be rounded after each delta.
    Type {
        /// Its type.
        dtype: DType,
    },
    /// GPUs reduce in the host first, and ranks push deltas each for itself.
    OnGpus,
    /// A delta that leaves something out would have to be corrected in a round of all ranks.
    Encoded {
        /// How it was to be encoded.
        encoding: Encoding,
    },
    /// The value would be lost.
    Replaced,
    /// Sums do not pass through servers in this job.
    NoServer,
}

impl Store {
    /// Whether this tensor, of a job of so many ranks, can be stored so.
    ///
    /// # Errors
    /// [`StoreFault`].
    pub fn check(&self, said: &Declaration, ranks: u32) -> Result<(), StoreFault> {
        let is_member = |members: &Members| self.root.0 < ranks && members.contains(self.root);
        if !is_member(&said.members) {
            return Err(StoreFault::Root { root: self.root });
        }
        self.check_key(said.dtype, said.operation, said.encoding)?;
        if said.device { Err(StoreFault::OnGpus) } else { Ok(()) }
    }

    /// Whether a key of this kind can be stored.
    ///
    /// # Errors
    /// [`StoreFault`].
    pub fn check_key(
        &self,
        dtype: DType,
        operation: Operation,
        encoding: Option<Encoding>,
    ) -> Result<(), StoreFault> {
        if operation != Operation::Sum {
            return Err(StoreFault::Operation { operation });
        }
        if dtype.accumulator() != dtype {
            return Err(StoreFault::Type { dtype });
        }
        encoding.map_or(Ok(()), |encoding| Err(StoreFault::Encoded { encoding }))
    }
}

impl fmt::Display for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stored, beginning with the value of {}", self.root)?;
        let Some(staleness) = self.staleness else { return Ok(()) };
        write!(f, ", nobody over {staleness} pushes ahead")
    }
}

impl fmt::Display for StoreFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoreFault::Root { root } => {
                write!(f, "its first value comes from {root}, which is not one of its ranks")
            }
            StoreFault::Operation { operation } => {
                write!(f, "it was declared for {operation}, and deltas are summed: declare a sum")
            }
            StoreFault::Type { dtype } => write!(
                f,
                "a value in {dtype} would be rounded after each delta: declare it as {}",
                dtype.accumulator()
            ),
            StoreFault::OnGpus => f.write_str(
                "it was declared on a GPU: declare it in memory of the host and copy it there",
            ),
            StoreFault::Encoded { encoding } => {
                write!(f, "deltas are not encoded: declare it without {encoding}")
            }
            StoreFault::Replaced => f.write_str(
                "a stored tensor keeps what it was declared as, or its value would be lost: use \
                 another name",
            ),
            StoreFault::NoServer => f.write_str(
                "no server takes part in this job: all ranks are on one host and reduce among \
                 themselves. Set BYTEPS_FORCE_DISTRIBUTED=1 or BYTEPS_ENABLE_ASYNC=1 on every \
                 worker, and start a server (DMLC_NUM_SERVER=1; bpslaunch does with --servers 1)",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(store: Store) -> Declaration {
        Declaration {
            name: "w".into(),
            dtype: DType::F32,
            shape: 8.into(),
            operation: Operation::Sum,
            device: false,
            members: Members::ALL,
            encoding: None,
            store: Some(store),
        }
    }

    #[test]
    fn what_cannot_be_stored_is_told_with_what_to_do() {
        let store = Store { root: Rank(1), staleness: None };
        let good = said(store);
        assert_eq!(store.check(&good, 2), Ok(()));
        let few = Members::new(vec![Rank(0), Rank(2)]).unwrap();
        let encoding = "bf16".parse().unwrap();
        let cases = [
            (Declaration { members: few, ..good.clone() }, "rank 1, which is not one of its ranks"),
            (Declaration { operation: Operation::Average, ..good.clone() }, "declare a sum"),
            (Declaration { dtype: DType::BF16, ..good.clone() }, "declare it as f32"),
            (Declaration { device: true, ..good.clone() }, "in memory of the host"),
            (Declaration { encoding: Some(encoding), ..good.clone() }, "without bf16"),
        ];
        for (bad, why) in cases {
            let fault = store.check(&bad, 3).unwrap_err().to_string();
            assert!(fault.contains(why), "{fault}");
        }
        assert_eq!(store.check(&good, 1), Err(StoreFault::Root { root: Rank(1) }));
    }

    #[test]
    fn a_store_is_shown_with_its_bound() {
        let store = Store { root: Rank(0), staleness: Some(3) };
        let text = said(store).to_string();
        let end = "stored, beginning with the value of rank 0, nobody over 3 pushes ahead";
        assert!(text.ends_with(end), "{text}");
    }
}
