//! Stored tensors: their value lives on the servers between rounds.
//!
//! For asynchronous training, the first contribution of the root is the value; that of any other
//! rank is empty, and asks for it. Each later contribution of a rank is a delta: the server adds
//! it, and answers that rank with the value behind it, without waiting for others. So a rank counts
//! its own rounds of the tensor, and the value has a version: how many contributions it holds.
//!
//! With an optimizer, rounds are those of any average, and what a server does with one is for the
//! ranks to say with each: see [`crate::optimize`]. With [backups](super::backup), what stays are
//! results, for ranks that come late.
//!
//! Invariant: a store is part of what the ranks agree on, and begins again with each epoch.

#![forbid(unsafe_code)]

use super::backup::{Backup, BackupFault};
use super::encoding::Encoding;
use crate::base::{DType, Operation, Rank};
use crate::encode::Codec;
use crate::optimize::Optimizer;
use serde::{Deserialize, Serialize};
use std::fmt;

/// How a tensor is stored.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Store {
    /// Ranks push what they have changed, each for itself.
    Deltas(Deltas),
    /// Ranks push gradients, and an optimizer steps with their average.
    Optimizer(Optimizer),
    /// Rounds do not wait for the slowest ranks.
    Backup(Backup),
}

/// How deltas are added up.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Deltas {
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
    /// Deltas are added, and gradients added or averaged.
    Operation {
        /// What it was declared for.
        operation: Operation,
    },
    /// The value would have to be rounded after each delta.
    Type {
        /// Its type.
        dtype: DType,
    },
    /// Optimizers step in f32.
    NotF32 {
        /// Its type.
        dtype: DType,
    },
    /// Parameters come back as gradients are encoded.
    Coarse {
        /// How it was to be encoded.
        encoding: Encoding,
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
    /// The job goes on without a rank that this needs.
    Gone {
        /// Who has died.
        rank: Rank,
    },
    /// Its rounds have to wait for all ranks.
    Backup {
        /// Why.
        fault: BackupFault,
    },
}

impl From<BackupFault> for StoreFault {
    fn from(fault: BackupFault) -> StoreFault {
        StoreFault::Backup { fault }
    }
}

impl Store {
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
        match self {
            Store::Optimizer(_) => return check_optimized(dtype, operation, encoding),
            Store::Backup(backup) => return Ok(backup.check_key(dtype, operation, encoding)?),
            Store::Deltas(_) => {}
        }
        if operation != Operation::Sum {
            return Err(StoreFault::Operation { operation });
        }
        if dtype.accumulator() != dtype {
            return Err(StoreFault::Type { dtype });
        }
        encoding.map_or(Ok(()), |encoding| Err(StoreFault::Encoded { encoding }))
    }
}

impl Store {
    /// How deltas are added up, if that is it.
    #[must_use]
    pub fn deltas(self) -> Option<Deltas> {
        if let Store::Deltas(deltas) = self { Some(deltas) } else { None }
    }

    /// The optimizer, if there is one.
    #[must_use]
    pub fn optimizer(self) -> Option<Optimizer> {
        if let Store::Optimizer(optimizer) = self { Some(optimizer) } else { None }
    }

    /// For how many ranks its rounds do not wait, if for some.
    #[must_use]
    pub fn backup(self) -> Option<Backup> {
        if let Store::Backup(backup) = self { Some(backup) } else { None }
    }

    /// Whether each rank contributes by itself, also where several share a host: one is not to
    /// wait for another.
    #[must_use]
    pub fn is_apart(self) -> bool {
        matches!(self, Store::Deltas(_) | Store::Backup(_))
    }

    /// What nobody can do for a rank that has died, of a tensor that is declared later: give it the
    /// first value, or take part in rounds that are whole or nothing.
    #[must_use]
    pub fn needs(self, rank: Rank) -> bool {
        match self {
            Store::Deltas(deltas) => deltas.root == rank,
            Store::Optimizer(_) => true,
            Store::Backup(_) => false,
        }
    }
}

fn check_optimized(
    dtype: DType,
    operation: Operation,
    encoding: Option<Encoding>,
) -> Result<(), StoreFault> {
    if !matches!(operation, Operation::Sum | Operation::Average) {
        return Err(StoreFault::Operation { operation });
    }
    if dtype != DType::F32 {
        return Err(StoreFault::NotF32 { dtype });
    }
    let halves = [Codec::Bf16, Codec::Fp16].map(Encoding::plain);
    let coarse = encoding.filter(|encoding| !halves.contains(encoding));
    coarse.map_or(Ok(()), |encoding| Err(StoreFault::Coarse { encoding }))
}

impl fmt::Display for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Store::Deltas(deltas) => deltas.fmt(f),
            Store::Optimizer(optimizer) => write!(f, "stepped by {optimizer} on the servers"),
            Store::Backup(backup) => backup.fmt(f),
        }
    }
}

impl fmt::Display for Deltas {
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
                write!(
                    f,
                    "it was declared for {operation}, and deltas are summed, gradients summed or \
                     averaged: declare a sum"
                )
            }
            StoreFault::NotF32 { dtype } => write!(
                f,
                "it is of {dtype}, and servers step in f32: declare it as f32, encoded as bf16 or \
                 fp16 if it is to travel so"
            ),
            StoreFault::Coarse { encoding } => write!(
                f,
                "parameters come back as gradients go, and are not to be encoded as {encoding}: \
                 declare it without, or with bf16 or fp16 alone"
            ),
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
            StoreFault::Gone { rank } => write!(
                f,
                "{rank} has died, from which its value would come or without which its rounds are \
                 not whole, and the job goes on without it (BPS_ELASTIC=shrink): use \
                 BPS_ELASTIC=redo, or declare it before"
            ),
            StoreFault::Backup { fault } => fault.fmt(f),
        }
    }
}
