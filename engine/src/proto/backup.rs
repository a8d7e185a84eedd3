//! Tensors whose rounds do not wait for the slowest ranks: a round is over when all but so many
//! have contributed and a short wait has passed. The server keeps such a result for those who come
//! later, so that all ranks get the same bytes of every round.
//!
//! Invariant: which tensors these are is part of what the ranks agree on. No other tensor's rounds
//! are ever short because a rank is slow.

#![forbid(unsafe_code)]

use super::encoding::Encoding;
use super::members::Members;
use crate::base::{DType, Operation, Rank};
use crate::limits::{BACKUP_RANKS_MAX, BEHIND_MAX};
use serde::{Deserialize, Serialize};
use std::fmt;

/// For how many ranks a round of a tensor does not wait.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Backup {
    /// So many.
    pub workers: u32,
    /// By how many rounds a rank may be behind: the others wait for it then.
    pub behind: u32,
}

/// Why the rounds of a tensor have to wait for all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum BackupFault {
    /// Somebody has to contribute.
    Workers {
        /// For how many ranks no round was to wait.
        workers: u32,
        /// How many push it.
        ranks: u32,
    },
    /// A result is kept for who is late.
    Behind {
        /// By how many rounds a rank was to be behind.
        behind: u32,
    },
    /// Results could not say that they lack it.
    Rank {
        /// The last one.
        rank: Rank,
    },
    /// It is no mean or sum of what some ranks have.
    Operation {
        /// What it was declared for.
        operation: Operation,
    },
    /// Counts, flags and the like are wrong without somebody's.
    Type {
        /// Its type.
        dtype: DType,
    },
    /// Its sender keeps what the codec left out of a contribution that was not used.
    Encoded {
        /// How it was to be encoded.
        encoding: Encoding,
    },
    /// It is one of GPUs to the job, and their collectives wait for all ranks of a host.
    OnGpus,
}

impl Backup {
    /// Whether a key of this kind can have short rounds.
    ///
    /// # Errors
    /// [`BackupFault`].
    pub fn check_key(
        &self,
        dtype: DType,
        operation: Operation,
        encoding: Option<Encoding>,
    ) -> Result<(), BackupFault> {
        if !matches!(operation, Operation::Sum | Operation::Average) {
            return Err(BackupFault::Operation { operation });
        }
        if !dtype.is_float() {
            return Err(BackupFault::Type { dtype });
        }
        if !(1..=BEHIND_MAX).contains(&self.behind) {
            return Err(BackupFault::Behind { behind: self.behind });
        }
        let keeps =
            |encoding: &Encoding| encoding.auto || encoding.feedback || encoding.momentum.is_some();
        match encoding.filter(keeps) {
            Some(encoding) => Err(BackupFault::Encoded { encoding }),
            None => Ok(()),
        }
    }

    /// Whether these ranks, of a job of so many, can have such a tensor.
    ///
    /// # Errors
    /// [`BackupFault`].
    pub fn check_ranks(&self, members: &Members, job: u32) -> Result<(), BackupFault> {
        let ranks = members.count(job);
        if self.workers == 0 || self.workers >= ranks {
            return Err(BackupFault::Workers { workers: self.workers, ranks });
        }
        match members.iter(job).last().filter(|rank| rank.0 >= BACKUP_RANKS_MAX) {
            Some(rank) => Err(BackupFault::Rank { rank }),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Backup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Backup { workers, behind } = self;
        write!(f, "without its {workers} slowest in a round, nobody over {behind} rounds behind")
    }
}

impl fmt::Display for BackupFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BackupFault::Workers { workers, ranks } => write!(
                f,
                "{workers} of {ranks} ranks were to be left out of a round, and at least one has \
                 to be, and one has to stay in: let BPS_BACKUP_WORKERS or backup_workers be below \
                 the number of ranks"
            ),
            BackupFault::Behind { behind } => write!(
                f,
                "a rank was to be up to {behind} rounds behind, and 1 to {BEHIND_MAX} are \
                 possible: set BPS_BACKUP_BEHIND so"
            ),
            BackupFault::Rank { rank } => write!(
                f,
                "{rank} is one of its ranks, and results can say only of the first \
                 {BACKUP_RANKS_MAX} ranks of a job that they lack them: use it in a job of as many"
            ),
            BackupFault::Operation { operation } => write!(
                f,
                "it was declared for {operation}, and only sums and averages are of use without \
                 somebody's contribution"
            ),
            BackupFault::Type { dtype } => write!(
                f,
                "it is of {dtype}, and only floats are taken for gradients: whole numbers often \
                 count something of all ranks"
            ),
            BackupFault::Encoded { encoding } => write!(
                f,
                "it is encoded as {encoding}, and what that keeps between rounds would be wrong \
                 where a contribution was not used: name the codec alone"
            ),
            BackupFault::OnGpus => f.write_str(
                "it was declared as one of GPUs, whose collectives wait for all ranks of a host: \
                 declare it as one of the host, which may be pushed from a GPU too",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BACKUP: Backup = Backup { workers: 1, behind: 4 };

    #[test]
    fn what_has_to_be_whole_is_told_with_what_to_do() {
        let check = |dtype, operation, encoding: Option<&str>| {
            let encoding = encoding.map(|text| text.parse().unwrap());
            BACKUP.check_key(dtype, operation, encoding)
        };
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            assert_eq!(check(dtype, Operation::Sum, None), Ok(()));
        }
        assert_eq!(check(DType::F32, Operation::Average, Some("int8")), Ok(()));
        let cases = [
            (check(DType::I64, Operation::Sum, None), "only floats"),
            (check(DType::F32, Operation::Max, None), "only sums and averages"),
            (check(DType::F32, Operation::Broadcast(Rank(0)), None), "only sums and averages"),
            (check(DType::F32, Operation::Sum, Some("bf16+feedback")), "name the codec alone"),
            (check(DType::F32, Operation::Sum, Some("auto(int8)")), "name the codec alone"),
            (check(DType::F32, Operation::Sum, Some("bf16+momentum(0.9)")), "codec alone"),
        ];
        for (checked, why) in cases {
            let fault = checked.unwrap_err().to_string();
            assert!(fault.contains(why), "{fault}");
        }
        for behind in [0, 65] {
            let backup = Backup { behind, ..BACKUP };
            let fault = backup.check_key(DType::F32, Operation::Sum, None).unwrap_err();
            assert_eq!(fault, BackupFault::Behind { behind });
        }
    }

    #[test]
    fn some_rank_stays_in_and_all_can_be_named() {
        let check = |workers, members: &Members, job| {
            Backup { workers, ..BACKUP }.check_ranks(members, job)
        };
        assert_eq!(check(2, &Members::ALL, 3), Ok(()));
        assert_eq!(check(63, &Members::ALL, 64), Ok(()));
        for (workers, ranks) in [(0, 3), (3, 3), (4, 3), (1, 1)] {
            let fault = BackupFault::Workers { workers, ranks };
            assert_eq!(check(workers, &Members::ALL, ranks), Err(fault));
        }
        let last = BackupFault::Rank { rank: Rank(64) };
        assert_eq!(check(1, &Members::ALL, 65), Err(last));
        let few = Members::new(vec![Rank(3), Rank(64)]).unwrap();
        assert_eq!(check(1, &few, 100), Err(last));
        assert_eq!(check(2, &few, 100), Err(BackupFault::Workers { workers: 2, ranks: 2 }));
    }
}
