//! The rows of jobs that grow and shrink while they run.

use super::Field::{Seconds, Switch};
use super::rows::{DAY_SECONDS, RANKING};
use super::{Group, Row, WORKER};

/// In the order in which the documents list them.
pub(super) const ROWS: &[Row] = &[
    Row::new(
        "BPS_LEAVE_NOTICE",
        RANKING,
        Group::Job,
        Seconds { at: |config| &mut config.leave_notice, min: 0.0, max: DAY_SECONDS },
        "90",
        "How long a rank of an elastic job that gets SIGTERM may take until its next commit, where \
         it leaves in good order. Behind that it ends at once, and counts as dead.",
    )
    .flag("leave-notice"),
    Row::new(
        "BPS_JOINS",
        WORKER,
        Group::Job,
        Switch { at: |config| &mut config.joins },
        "1",
        "This rank is none of the first ones of its elastic job: while the job forms it waits, and \
         then it is let in at a commit. bpslaunch sets it for ranks that it starts later.",
    ),
];
