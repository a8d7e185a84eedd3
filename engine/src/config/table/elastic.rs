//! The rows of jobs that grow and shrink while they run.

use super::Field::{Count, MaybeCount, MaybeText, Seconds, Switch};
use super::rows::{DAY_SECONDS, RANKING, count};
use super::{Group, LAUNCHER, Row, SERVER, WORKER};
use crate::limits::RANKS_MAX;

/// In the order in which the documents list them.
pub(super) const ROWS: &[Row] = &[
    Row::new(
        "BPS_LEAVE_NOTICE",
        RANKING | SERVER,
        Group::Job,
        Seconds { at: |config| &mut config.leave_notice, min: 0.0, max: DAY_SECONDS },
        "90",
        "How long a rank of an elastic job that gets SIGTERM may take until its next commit, where \
         it leaves in good order, and how long a server waits to be let go. Behind that they end \
         at once, and count as dead; 0: at once.",
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
    Row::new(
        "BPS_MAX_WORKERS",
        LAUNCHER,
        Group::Launcher,
        MaybeCount { at: |config| &mut config.launch.max_workers, max: count(RANKS_MAX) },
        "8",
        "Most ranks of an elastic job. With it bpslaunch starts ranks again that have died, while \
         fewer run.",
    )
    .flag("max-workers"),
    Row::new(
        "",
        LAUNCHER,
        Group::Launcher,
        MaybeText { at: |config| &mut config.launch.discovery },
        "./hosts.sh",
        "A command that prints the machines that there are now, a line 'host' or 'host:slots' \
         each. bpslaunch starts ranks on new ones, and lets the ranks of those leave that are no \
         more in its output.",
    )
    .flag("host-discovery"),
    Row::new(
        "",
        LAUNCHER,
        Group::Launcher,
        Count { at: |config| &mut config.launch.slots, min: 1, max: count(RANKS_MAX) },
        "4",
        "With --host-discovery: ranks on a machine whose line has no number.",
    )
    .flag("slots"),
    Row::new(
        "BPS_DISCOVERY_INTERVAL",
        LAUNCHER,
        Group::Launcher,
        Seconds { at: |config| &mut config.launch.discovery_interval, min: 0.01, max: DAY_SECONDS },
        "5",
        "With --host-discovery: time between two runs of the command.",
    )
    .flag("discovery-interval"),
    Row::new(
        "BPS_DISCOVERY_TIMEOUT",
        LAUNCHER,
        Group::Launcher,
        Seconds { at: |config| &mut config.launch.discovery_timeout, min: 0.1, max: DAY_SECONDS },
        "30",
        "With --host-discovery: how long a run of the command may take before it is killed; the \
         last answer then stays.",
    )
    .flag("discovery-timeout"),
    Row::new(
        "BPS_RESTART_DELAY",
        LAUNCHER,
        Group::Launcher,
        Seconds { at: |config| &mut config.launch.restart_delay, min: 0.0, max: DAY_SECONDS },
        "5",
        "With --max-workers: how long no rank is started on a machine after one of its ranks has \
         failed. Each further failure in a row doubles it.",
    )
    .flag("restart-delay"),
    Row::new(
        "BPS_RESTART_DELAY_MAX",
        LAUNCHER,
        Group::Launcher,
        Seconds { at: |config| &mut config.launch.restart_delay_max, min: 0.0, max: DAY_SECONDS },
        "60",
        "The longest such time. A machine that has had no failure for as long starts from \
         BPS_RESTART_DELAY again.",
    )
    .flag("restart-delay-max"),
];
