//! The rows of rounds that do not wait for slow ranks.

use super::Field::Count;
use super::rows::RANKING;
use super::{Group, Row};
use crate::limits::{BACKUP_RANKS_MAX, BEHIND_MAX};

pub(super) const ROWS: &[Row] = &[
    Row::new(
        "BPS_BACKUP_WORKERS",
        RANKING,
        Group::Tensors,
        Count { at: |config| &mut config.backup_workers, min: 0, max: BACKUP_RANKS_MAX - 1 },
        "1",
        "For how many of the slowest ranks no round of an optimizer's gradients waits. The same on \
         every worker.",
    ),
    Row::new(
        "BPS_BACKUP_BEHIND",
        RANKING,
        Group::Tensors,
        Count { at: |config| &mut config.backup_behind, min: 1, max: BEHIND_MAX },
        "8",
        "By how many rounds a rank may then be behind; the others wait for it at that. Servers \
         need memory for as many results more. The same on every worker.",
    ),
];
