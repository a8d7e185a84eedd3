//! The rows of settings that a job, or a process, finds by itself.

use super::Field::{Path, Switch};
use super::rows::RANKING;
use super::{Group, LAUNCHER, Row, SCHEDULER, choices};

pub(super) const ROWS: &[Row] = &[
    Row::new(
        "BPS_TUNE_CREDIT",
        RANKING,
        Group::Tensors,
        Switch { at: |config| &mut config.tune_credit },
        "1",
        "Let the job find BYTEPS_SCHEDULING_CREDIT while it trains (docs/tuning.md). The same on \
         every worker.",
    )
    .aliases(&["BYTESCHEDULER_CREDIT_TUNING"])
    .flag("tune-credit"),
    Row::new(
        "BPS_TUNE_PARTITION",
        RANKING,
        Group::Tensors,
        Switch { at: |config| &mut config.tune_partition },
        "1",
        "Let the job find BYTEPS_PARTITION_BYTES while it trains (docs/tuning.md). The same on \
         every worker.",
    )
    .aliases(&["BYTESCHEDULER_PARTITION_TUNING"])
    .flag("tune-partition"),
    Row::new(
        "BPS_NIC_HELPERS",
        RANKING,
        Group::Threads,
        choices::NIC_HELPERS,
        "0",
        "Threads that help that of the lanes with what is copied and added between processes of a \
         host; auto is two where a rank has eight CPUs or more, else none.",
    )
    .flag("nic-helpers"),
    Row::new(
        "BPS_TUNE_FILE",
        SCHEDULER | LAUNCHER,
        Group::Tensors,
        Path { at: |config| &mut config.tune_file },
        "tuned.env",
        "File to which the scheduler writes the settings that were found, as variables for the \
         next job.",
    )
    .flag("tune-file"),
    Row::new(
        "BPS_AUTO_COMPRESSION",
        RANKING,
        Group::Tensors,
        choices::AUTO_COMPRESSION,
        "none",
        "How far this process encodes tensors that are declared with `auto` \
         (docs/compression.md): as far as it measures that this saves time, or always so.",
    ),
];
