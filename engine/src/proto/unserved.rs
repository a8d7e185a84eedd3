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

impl Declaration {
    /// Whether its results can go to its receiver alone, if it has one, in a job of so many ranks;
    /// `shrinks` where that goes on without ranks that die.
    ///
    /// # Errors
    /// [`Unserved::Receiver`].
    pub fn check_receiver(&self, size: u32, shrinks: bool) -> Result<(), Unserved> {
        let Some(receiver) = self.receiver else { return Ok(()) };
        let has = receiver.0 < size && self.members.contains(receiver);
        let how = (self.operation, self.encoding, self.store);
        let checked = match self.device {
            true => Err(ReceiverFault::OnGpus),
            false => ReceiverFault::check(has, how, shrinks),
        };
        checked.map_err(|fault| Unserved::Receiver { tensor: self.name.clone(), receiver, fault })
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Key;
    use crate::proto::declaration::KeySpec;
    use crate::proto::store::Store;

    fn said() -> Declaration {
        Declaration {
            name: "w".into(),
            dtype: DType::F32,
            shape: 8.into(),
            operation: Operation::Average,
            device: false,
            members: Members::new(vec![Rank(0), Rank(2)]).unwrap(),
            receiver: Some(Rank(2)),
            encoding: None,
            store: None,
        }
    }

    #[test]
    fn what_cannot_go_to_one_rank_is_told_with_what_to_do() {
        let good = said();
        assert_eq!(good.check_receiver(3, false), Ok(()));
        let all = Declaration { members: Members::ALL, ..good.clone() };
        assert_eq!(all.check_receiver(3, false), Ok(()));
        let nobody = Declaration { receiver: None, device: true, ..good.clone() };
        assert_eq!(nobody.check_receiver(3, true), Ok(()));
        let store = Some(Store::Optimizer("sgd".parse().unwrap()));
        let cases = [
            (Declaration { receiver: Some(Rank(1)), ..good.clone() }, "name one of its ranks"),
            (Declaration { receiver: Some(Rank(3)), ..all }, "name one of its ranks"),
            (Declaration { operation: Operation::Broadcast(Rank(0)), ..good.clone() }, "no receiv"),
            (Declaration { device: true, ..good.clone() }, "copy it to memory of the host"),
            (Declaration { encoding: Some("bf16".parse().unwrap()), ..good.clone() }, "as bf16"),
            (Declaration { store, ..good.clone() }, "without a store"),
        ];
        for (bad, why) in cases {
            let fault = bad.check_receiver(3, false).unwrap_err().to_string();
            assert!(fault.contains(why) && fault.contains("tensor `w`"), "{fault}");
        }
        let fault = good.check_receiver(3, true).unwrap_err().to_string();
        assert!(fault.contains("BPS_ELASTIC=shrink"), "{fault}");
        assert!(good.to_string().ends_with(" for ranks 0, 2, received by rank 2"), "{good}");
    }

    #[test]
    fn a_receiver_travels_and_costs_nothing_where_there_is_none() {
        let good = said();
        let text = serde_json::to_string(&good).unwrap();
        assert!(text.contains(r#""receiver":2"#), "{text}");
        assert_eq!(serde_json::from_str::<Declaration>(&text).unwrap(), good);
        let text = serde_json::to_string(&Declaration { receiver: None, ..good.clone() }).unwrap();
        assert!(!text.contains("receiver"), "{text}");
        for hostile in [r#""receiver":-1"#, r#""receiver":"2""#, r#""receiver":4294967296"#] {
            let text = serde_json::to_string(&good).unwrap();
            let text = text.replace(r#""receiver":2"#, hostile);
            assert!(serde_json::from_str::<Declaration>(&text).is_err(), "{text}");
        }
        let fault = ReceiverFault::Encoded { encoding: "bf16".parse().unwrap() };
        let unserved = Unserved::Receiver { tensor: "w".into(), receiver: Rank(2), fault };
        let text = serde_json::to_string(&unserved).unwrap();
        assert_eq!(serde_json::from_str::<Unserved>(&text).unwrap(), unserved);
    }

    #[test]
    fn a_server_checks_what_it_is_told() {
        let Declaration { dtype, operation, members, receiver, encoding, store, .. } = said();
        let spec = KeySpec {
            key: Key(3),
            core: 0,
            dtype,
            bytes: 32,
            operation,
            rounds: 0,
            members,
            receiver,
            encoding,
            store,
        };
        assert_eq!(spec.check_receiver(|rank| rank == Rank(2), false), Ok(()));
        assert_eq!(spec.check_receiver(|_| false, false), Err(ReceiverFault::Outside));
        assert_eq!(spec.check_receiver(|_| true, true), Err(ReceiverFault::Shrinks));
        let root = KeySpec { operation: Operation::Broadcast(Rank(0)), ..spec };
        assert_eq!(root.check_receiver(|_| true, false), Err(ReceiverFault::Broadcast));
    }
}
