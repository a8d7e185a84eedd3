//! The rows of ByteScheduler's variables, whose values `check` turns into those of ours.

use super::Field::{MaybeCount, Path, Switch};
use super::rows::{ALL, NODES, RANKING};
use super::{Group, Row};

/// In the order in which the documents list them.
pub(super) const ROWS: &[Row] = &[
    Row::new(
        "BYTESCHEDULER_PARTITION",
        ALL,
        Group::ByteScheduler,
        MaybeCount { at: |config| &mut config.bytescheduler.partition, max: u32::MAX },
        "1000000",
        "BYTEPS_PARTITION_BYTES in elements, of four bytes each. Where neither is set, the default \
         of the latter holds, which is smaller than ByteScheduler's.",
    ),
    Row::new(
        "BYTESCHEDULER_CREDIT",
        RANKING,
        Group::ByteScheduler,
        MaybeCount { at: |config| &mut config.bytescheduler.credit, max: u32::MAX },
        "4000000",
        "BYTEPS_SCHEDULING_CREDIT in elements, of four bytes each: so many partitions as hold \
         them, and one at least.",
    ),
    Row::new(
        "BYTESCHEDULER_TIMELINE",
        NODES,
        Group::ByteScheduler,
        Path { at: |config| &mut config.bytescheduler.timeline },
        "/tmp/timeline",
        "BYTEPS_TRACE_ON=1 and BYTEPS_TRACE_DIR in one: a folder, and no file.",
    ),
    Row::new(
        "BYTESCHEDULER_DEBUG",
        ALL,
        Group::ByteScheduler,
        Switch { at: |config| &mut config.bytescheduler.debug },
        "1",
        "BPS_LOG_LEVEL=debug: to standard error, where ByteScheduler wrote bytescheduler.log.",
    ),
];
