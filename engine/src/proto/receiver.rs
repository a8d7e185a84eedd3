//! The one rank that gets a tensor's results, where not all of its ranks do. Part of what the ranks
//! agree on.
//!
//! Every rank contributes as ever. The others are told that a round is over by a publication
//! without a payload, so rounds, credit and errors go as those of any tensor.

use super::declaration::{Declaration, KeySpec};
use super::encoding::Encoding;
use super::store::Store;
use super::unserved::Unserved;
use crate::base::{Operation, Rank};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Why a tensor's results cannot go to one rank alone.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum ReceiverFault {
    /// The tensor is not for that rank.
    Outside,
    /// A broadcast is for all but its root.
    Broadcast,
    /// GPUs of a host reduce, and gather, together.
    OnGpus,
    /// What error feedback and codecs keep is that of sums for all.
    Encoded {
        /// How it was to be encoded.
        encoding: Encoding,
    },
    /// What servers keep is for all.
    Stored,
    /// The job goes on without ranks that die, and a result that one rank alone has had would be
    /// lost with it, or with its server.
    Shrinks,
}

/// What a receiver must fit.
struct Sum {
    receiver: Rank,
    operation: Operation,
    encoding: Option<Encoding>,
    store: Option<Store>,
}

impl Sum {
    fn check(&self, has: impl FnOnce(Rank) -> bool, shrinks: bool) -> Result<(), ReceiverFault> {
        match (self.operation, self.encoding, self.store) {
            _ if !has(self.receiver) => Err(ReceiverFault::Outside),
            (Operation::Broadcast(_), _, _) => Err(ReceiverFault::Broadcast),
            (_, Some(encoding), _) => Err(ReceiverFault::Encoded { encoding }),
            (_, _, Some(_)) => Err(ReceiverFault::Stored),
            _ if shrinks => Err(ReceiverFault::Shrinks),
            _ => Ok(()),
        }
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
        let Declaration { operation, encoding, store, .. } = *self;
        let sum = Sum { receiver, operation, encoding, store };
        let has = |rank: Rank| rank.0 < size && self.members.contains(rank);
        let checked = match self.device {
            true => Err(ReceiverFault::OnGpus),
            false => sum.check(has, shrinks),
        };
        checked.map_err(|fault| Unserved::Receiver { tensor: self.name.clone(), receiver, fault })
    }
}

impl KeySpec {
    /// As [`Declaration::check_receiver`], for a key of ranks among whom one `has` to be.
    ///
    /// # Errors
    /// [`ReceiverFault`].
    pub fn check_receiver(
        &self,
        has: impl FnOnce(Rank) -> bool,
        shrinks: bool,
    ) -> Result<(), ReceiverFault> {
        let Some(receiver) = self.receiver else { return Ok(()) };
        let KeySpec { operation, encoding, store, .. } = *self;
        Sum { receiver, operation, encoding, store }.check(has, shrinks)
    }
}

impl fmt::Display for ReceiverFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReceiverFault::Outside => f.write_str("it is not for that rank: name one of its ranks"),
            ReceiverFault::Broadcast => {
                f.write_str("a broadcast has a root and no receiver: reduce it, or let all have it")
            }
            ReceiverFault::OnGpus => f.write_str(
                "it is on GPUs, which all of a host get together: copy it to memory of the host, \
                 or let all have it",
            ),
            ReceiverFault::Encoded { encoding } => write!(
                f,
                "it is encoded as {encoding}: declare it without an encoding, or let all have it"
            ),
            ReceiverFault::Stored => f.write_str(
                "servers keep its value: declare it without a store, or let all have it",
            ),
            ReceiverFault::Shrinks => f.write_str(
                "the job goes on without ranks that die (BPS_ELASTIC=shrink), and what one rank \
                 alone has had would be lost with it: let all have it, or run with \
                 BPS_ELASTIC=redo",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::{DType, Key};
    use crate::proto::members::Members;

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
