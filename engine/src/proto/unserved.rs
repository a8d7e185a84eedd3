//! Why a declaration is not served. Data, from which each rank makes the same line for people, with
//! what to do.

use super::declaration::{Declaration, Mismatch};
use super::encoding::{Encoding, EncodingFault};
use super::members::{Members, MembersFault};
use super::receiver::ReceiverFault;
use super::store::StoreFault;
use super::text::shorten;
use crate::base::{DType, Operation, Rank};
use crate::limits::{
    DECLARE_MEMBERS_MAX, DECLARE_PARTS_MAX, ERAS_MAX, NAME_BYTES_MAX, PARTS_MAX, TENSORS_MAX,
};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Why a request to declare tensors is refused, as a whole.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum Unserved {
    /// The job has not formed.
    Early,
    /// A name without bytes, or with too many.
    Name {
        /// The name.
        tensor: String,
    },
    /// A broadcast from a rank that is none.
    Root {
        /// The tensor's name.
        tensor: String,
        /// The root.
        root: Rank,
        /// Ranks of the job.
        size: u32,
    },
    /// A tensor of more bytes than can be counted.
    Size {
        /// The tensor's name.
        tensor: String,
        /// Its elements.
        elements: u64,
        /// Their type.
        dtype: DType,
    },
    /// A tensor that cannot belong to these ranks.
    Members {
        /// The tensor's name.
        tensor: String,
        /// The ranks.
        members: Members,
        /// Why not.
        fault: MembersFault,
    },
    /// A tensor whose results cannot go to one rank alone.
    Receiver {
        /// The tensor's name.
        tensor: String,
        /// The rank.
        receiver: Rank,
        /// Why not.
        fault: ReceiverFault,
    },
    /// A tensor that cannot be encoded so.
    Encoding {
        /// The tensor's name.
        tensor: String,
        /// How it was to be.
        encoding: Encoding,
        /// Why not.
        fault: EncodingFault,
    },
    /// A tensor whose value cannot stay on the servers.
    Store {
        /// The tensor's name.
        tensor: String,
        /// Why not.
        fault: StoreFault,
    },
    /// Sets of too many ranks in the request.
    MembersAtOnce,
    /// One name twice in one request.
    Twice {
        /// One of the two.
        first: Box<Declaration>,
        /// The other.
        second: Box<Declaration>,
    },
    /// A rank has replaced a tensor too often before another has.
    Ahead {
        /// The rank.
        rank: Rank,
        /// The tensor's name.
        tensor: String,
    },
    /// Too many tensors in the job.
    Tensors,
    /// Too many parts in the request.
    PartsAtOnce {
        /// How many.
        parts: u64,
        /// Size of a partition.
        partition_bytes: u32,
    },
    /// Too many parts in the job.
    Parts {
        /// Size of a partition.
        partition_bytes: u32,
    },
    /// Sums pass through servers, of which there is none.
    NoServer,
    /// Another rank says something else of these names.
    Mismatch {
        /// One for each name.
        mismatches: Vec<Mismatch>,
    },
}

impl Declaration {
    /// Whether this rank of a job of so many may declare it for its members.
    ///
    /// # Errors
    /// [`Unserved::Members`].
    pub fn check_members(&self, rank: Rank, size: u32) -> Result<(), Unserved> {
        let Declaration { members, operation, device, .. } = self;
        if members.is_all() {
            return Ok(());
        }
        let last = members.listed().last().copied().filter(|last| last.0 >= size);
        let fault = match (*operation, last) {
            (_, Some(rank)) => MembersFault::Beyond { rank, size },
            _ if !members.contains(rank) => MembersFault::Outside { rank },
            (Operation::Broadcast(root), _) if !members.contains(root) => {
                MembersFault::Root { root }
            }
            _ if *device => MembersFault::OnGpus,
            _ => return Ok(()),
        };
        Err(Unserved::Members { tensor: self.name.clone(), members: members.clone(), fault })
    }
}

impl Unserved {
    /// The name of the tensor that it is about.
    #[must_use]
    pub fn tensor(&self) -> Option<&str> {
        match self {
            Unserved::Name { tensor }
            | Unserved::Root { tensor, .. }
            | Unserved::Size { tensor, .. }
            | Unserved::Members { tensor, .. }
            | Unserved::Receiver { tensor, .. }
            | Unserved::Encoding { tensor, .. }
            | Unserved::Store { tensor, .. }
            | Unserved::Ahead { tensor, .. } => Some(tensor),
            Unserved::Twice { first, .. } => Some(&first.name),
            Unserved::Mismatch { mismatches } => {
                mismatches.first().map(|mismatch| mismatch.first_said.name.as_str())
            }
            Unserved::Early
            | Unserved::Tensors
            | Unserved::PartsAtOnce { .. }
            | Unserved::MembersAtOnce
            | Unserved::Parts { .. }
            | Unserved::NoServer => None,
        }
    }
}

impl fmt::Display for Unserved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unserved::Early => f.write_str("tensors are declared after the roster has come"),
            Unserved::Name { tensor } => write!(
                f,
                "the name of tensor `{}` has {} bytes: 1 to {NAME_BYTES_MAX} are possible, give \
                 it another name",
                shorten(tensor),
                tensor.len()
            ),
            // A job that has formed has a rank; what comes over the wire may say otherwise.
            Unserved::Root { tensor, root, size } => write!(
                f,
                "tensor `{}` is broadcast from {root} in a job of {size} ranks: the root must be \
                 0 to {}",
                shorten(tensor),
                size.saturating_sub(1)
            ),
            Unserved::Size { tensor, elements, dtype } => write!(
                f,
                "tensor `{}` of {elements} elements of {dtype} has more bytes than can be \
                 counted: check its size",
                shorten(tensor)
            ),
            Unserved::Members { tensor, members, fault } => {
                fault.write(f, &shorten(tensor), members)
            }
            Unserved::Receiver { tensor, receiver, fault } => write!(
                f,
                "the results of tensor `{}` cannot go to {receiver} alone: {fault}",
                shorten(tensor)
            ),
            Unserved::Encoding { tensor, encoding, fault } => {
                write!(f, "tensor `{}` cannot be encoded as {encoding}: {fault}", shorten(tensor))
            }
            Unserved::Store { tensor, fault: StoreFault::Backup { fault } } => {
                write!(f, "tensor `{}` has to wait for all ranks: {fault}", shorten(tensor))
            }
            Unserved::Store { tensor, fault } => {
                write!(f, "tensor `{}` cannot be stored: {fault}", shorten(tensor))
            }
            Unserved::MembersAtOnce => write!(
                f,
                "the tensors of one declare name over {DECLARE_MEMBERS_MAX} ranks of their sets: \
                 declare fewer tensors at once"
            ),
            Unserved::Twice { first, second } => write!(
                f,
                "tensor `{}` is declared twice at once, as {first} and as {second}: give each \
                 tensor its own name",
                shorten(&first.name)
            ),
            Unserved::Ahead { rank, tensor } => write!(
                f,
                "{rank} has declared tensor `{}` anew {ERAS_MAX} times and another rank has not \
                 followed: wait for its push_pulls now and then",
                shorten(tensor)
            ),
            Unserved::Tensors => write!(
                f,
                "over {TENSORS_MAX} tensors are declared: are their names new in every step?"
            ),
            Unserved::PartsAtOnce { parts, partition_bytes } => write!(
                f,
                "{parts} parts in one declare, over the limit of {DECLARE_PARTS_MAX}: raise \
                 BYTEPS_PARTITION_BYTES ({partition_bytes} now), or declare fewer tensors at once"
            ),
            Unserved::Parts { partition_bytes } => write!(
                f,
                "the job would have over {PARTS_MAX} parts: raise BYTEPS_PARTITION_BYTES \
                 ({partition_bytes} now)"
            ),
            Unserved::NoServer => {
                f.write_str("this job has no server: set DMLC_NUM_SERVER to 1 or more")
            }
            Unserved::Mismatch { mismatches } => {
                for (index, mismatch) in mismatches.iter().enumerate() {
                    let semicolon = if index == 0 { "" } else { "; " };
                    write!(f, "{semicolon}{mismatch}")?;
                }
                Ok(())
            }
        }
    }
}
