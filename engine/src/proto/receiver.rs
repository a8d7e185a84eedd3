//! The one rank that gets a tensor's results, where not all of its ranks do. Part of what the ranks
//! agree on.
//!
//! Every rank contributes as ever. The others are told that a round is over by a publication
//! without a payload, so rounds, credit and errors go as those of any tensor.

use super::encoding::Encoding;
use super::store::Store;
use crate::base::Operation;
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

impl ReceiverFault {
    /// Whether one of the ranks that a tensor `has` may alone get what it computes; `shrinks` in a
    /// job that goes on without ranks that die.
    pub(super) fn check(
        has: bool,
        how: (Operation, Option<Encoding>, Option<Store>),
        shrinks: bool,
    ) -> Result<(), ReceiverFault> {
        match how {
            _ if !has => Err(ReceiverFault::Outside),
            (Operation::Broadcast(_), _, _) => Err(ReceiverFault::Broadcast),
            (_, Some(encoding), _) => Err(ReceiverFault::Encoded { encoding }),
            (_, _, Some(_)) => Err(ReceiverFault::Stored),
            _ if shrinks => Err(ReceiverFault::Shrinks),
            _ => Ok(()),
        }
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
