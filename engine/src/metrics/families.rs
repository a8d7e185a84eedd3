//! Every metric: its name, its meaning and where its value comes from. `docs/metrics.md` is made
//! from this table.

use crate::proto::messages::LinkStatistics;
use crate::proto::scheduler::{Change, JobView, NodeView};
use crate::trace::counters::Values;
use std::fmt::Write;

/// How a value behaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// It only grows, until its process ends.
    Counter,
    /// It goes up and down.
    Gauge,
}

impl Kind {
    /// The word of the text format.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
        }
    }
}

/// What a core or a rank has counted, and its share of busy time since the last heartbeat.
#[derive(Clone, Copy)]
pub(super) struct LoopView {
    pub(super) values: Values,
    pub(super) busy: f64,
}

/// Whence a value comes, which also says what its labels are.
pub(super) enum Source {
    /// `version`; always 1.
    Build,
    /// None.
    Job(fn(&JobView) -> f64),
    /// `number`, `epoch`, `what`.
    Change(fn(&Change) -> f64),
    /// `role`, `index`, `host`, `pid`; always 1.
    Info,
    /// `role`, `index`.
    Node(fn(&NodeView) -> Option<f64>),
    /// `role`, `index`, `interface`.
    Link(fn(&LinkStatistics) -> Option<f64>),
    /// `server`, `core`.
    Core(fn(&LoopView) -> f64),
    /// `rank`.
    Rank(fn(&LoopView) -> f64),
    /// `rank`: whether the job waits for it.
    Waited,
}

/// A metric with all its label values.
pub struct Family {
    /// As Prometheus knows it.
    pub name: &'static str,
    /// Counter or gauge.
    pub kind: Kind,
    /// One sentence.
    pub help: &'static str,
    pub(super) source: Source,
}

const fn counter(name: &'static str, source: Source, help: &'static str) -> Family {
    Family { name, kind: Kind::Counter, help, source }
}

const fn gauge(name: &'static str, source: Source, help: &'static str) -> Family {
    Family { name, kind: Kind::Gauge, help, source }
}

#[allow(clippy::cast_precision_loss, reason = "the text format knows floats only")]
const fn float(value: u64) -> f64 {
    value as f64
}

fn seconds(nanoseconds: u64) -> f64 {
    float(nanoseconds) / 1e9
}

fn ratio(rate: f64, speed: Option<u64>) -> Option<f64> {
    speed.filter(|speed| *speed > 0).map(|speed| rate / float(speed))
}

/// Every metric, in the order of the page.
pub static FAMILIES: &[Family] = &[
    gauge("bps_build_info", Source::Build, "The release that runs; always 1."),
    gauge(
        "bps_job_formed",
        Source::Job(|job| f64::from(u8::from(job.formed))),
        "1 once all nodes are there, 0 while some are awaited.",
    ),
    gauge(
        "bps_job_ranks",
        Source::Job(|job| f64::from(job.ranks)),
        "Ranks of the job; before it is formed, those that have come.",
    ),
    gauge(
        "bps_job_servers",
        Source::Job(|job| f64::from(job.servers)),
        "Servers of the job; before it is formed, those that have a number.",
    ),
    gauge(
        "bps_job_epoch",
        Source::Job(|job| f64::from(job.epoch)),
        "Generation of membership: 1, and one more each time that all ranks have suspended, or \
         that an elastic job has lost a member.",
    ),
    counter(
        "bps_job_deaths_total",
        Source::Job(|job| float(job.deaths)),
        "Members that an elastic job has gone on without: ranks and servers that died or did not \
         come back.",
    ),
    gauge(
        "bps_job_reforming_seconds",
        Source::Job(|job| job.reformed.map_or(0.0, |took| took.as_secs_f64())),
        "How long an elastic job was without a membership when it last changed; 0 if it never did.",
    ),
    counter(
        "bps_job_waited_seconds_total",
        Source::Job(|job| job.changes.waited.as_secs_f64()),
        "For how long an elastic job has waited for changes of who takes part, in all, each from \
         when the scheduler knew of it: for a membership, for a server for parts of tensors, or to \
         know who of a host is lost.",
    ),
    gauge(
        "bps_job_change_seconds",
        Source::Change(|change| change.waited.as_secs_f64()),
        "The last eight changes of who takes part in an elastic job: `what` says who was lost or \
         came, and why; the value is for how long the job waited.",
    ),
    gauge(
        "bps_job_change_uptime_seconds",
        Source::Change(|change| change.at.as_secs_f64()),
        "The bps_job_uptime_seconds of these changes.",
    ),
    gauge(
        "bps_job_uptime_seconds",
        Source::Job(|job| job.uptime.as_secs_f64()),
        "Time since the scheduler started.",
    ),
    gauge(
        "bps_job_tuning_trials",
        Source::Job(|job| job.tuning.map_or(0.0, |tuning| f64::from(tuning.trials))),
        "Settings that a job which tunes itself has measured; 0 in any other.",
    ),
    gauge(
        "bps_job_tuning_active",
        Source::Job(|job| job.tuning.map_or(0.0, |tuning| f64::from(u8::from(!tuning.is_over)))),
        "1 while further settings are tried.",
    ),
    gauge(
        "bps_job_tuning_partition_bytes",
        Source::Job(|job| job.tuning.map_or(0.0, |one| f64::from(one.point.partition_bytes))),
        "BYTEPS_PARTITION_BYTES that is tried, or was found.",
    ),
    gauge(
        "bps_job_tuning_credit_parts",
        Source::Job(|job| job.tuning.map_or(0.0, |one| f64::from(one.point.credit_parts))),
        "BYTEPS_SCHEDULING_CREDIT that is tried, or was found.",
    ),
    gauge(
        "bps_job_tuning_bytes_per_second",
        Source::Job(|job| job.tuning.map_or(0.0, |tuning| tuning.rate)),
        "Bytes of rounds that the first rank ended each second with the settings measured last.",
    ),
    gauge(
        "bps_job_tuning_best_bytes_per_second",
        Source::Job(|job| job.tuning.map_or(0.0, |tuning| tuning.best)),
        "The same with the fastest settings so far.",
    ),
    gauge(
        "bps_job_stalls",
        Source::Job(|job| float((job.stalls.len() + job.paths.len()) as u64)),
        "Tensors and barriers whose open round has waited longer than BPS_STALL_REPORT, and paths \
         on which bytes have; at most 16 of each are counted.",
    ),
    gauge(
        "bps_job_path_stalls",
        Source::Job(|job| float(job.paths.len() as u64)),
        "Those of them that wait for bytes which one node has sent and another does not get.",
    ),
    gauge(
        "bps_job_stall_seconds",
        Source::Job(|job| {
            let rounds = job.stalls.iter().map(|stall| stall.waited_ms);
            let oldest = rounds.chain(job.paths.iter().map(|path| path.waited_ms)).max();
            seconds(oldest.unwrap_or(0).saturating_mul(1_000_000))
        }),
        "How long the oldest stall has waited; 0 if there is none.",
    ),
    gauge("bps_node_info", Source::Info, "Where a node runs; always 1."),
    gauge(
        "bps_node_heartbeat_age_seconds",
        Source::Node(|node| node.silent.map(|silent| silent.as_secs_f64())),
        "Time since the scheduler last heard of the node; at BPS_HEARTBEAT_TIMEOUT it counts as \
         dead.",
    ),
    gauge(
        "bps_node_uptime_seconds",
        Source::Node(|node| node.statistics.as_ref().map(|known| known.uptime)),
        "Time from the node's joining to its last heartbeat, by its own clock: divide by its \
         growth for rates that do not depend on when heartbeats come.",
    ),
    gauge(
        "bps_node_resident_memory_bytes",
        Source::Node(|node| node.statistics.as_ref().map(|known| float(known.resident_bytes))),
        "Memory of the node's process that is in RAM, the training framework's included.",
    ),
    gauge(
        "bps_link_speed_bytes_per_second",
        Source::Link(|link| link.speed.map(float)),
        "What the node's network interface can move in each direction: what the kernel says, or \
         BPS_LINK_SPEED. Absent where neither knows.",
    ),
    counter(
        "bps_link_receive_bytes_total",
        Source::Link(|link| Some(float(link.received))),
        "Bytes that the interface has received, headers and other programs' traffic included.",
    ),
    counter(
        "bps_link_transmit_bytes_total",
        Source::Link(|link| Some(float(link.sent))),
        "Bytes that the interface has sent, likewise.",
    ),
    gauge(
        "bps_link_receive_ratio",
        Source::Link(|link| ratio(link.receive_rate, link.speed)),
        "Fraction of line rate at which the interface received between the last two heartbeats. \
         Absent where the speed is not known.",
    ),
    gauge(
        "bps_link_transmit_ratio",
        Source::Link(|link| ratio(link.send_rate, link.speed)),
        "The same of what it sent.",
    ),
    counter(
        "bps_core_receive_bytes_total",
        Source::Core(|core| float(core.values.bytes_in)),
        "Payload bytes of contributions that a server's core has received.",
    ),
    counter(
        "bps_core_transmit_bytes_total",
        Source::Core(|core| float(core.values.bytes_out)),
        "Payload bytes of publications that it has posted.",
    ),
    counter(
        "bps_core_receive_frames_total",
        Source::Core(|core| float(core.values.frames_in)),
        "Frames that it has received, refused ones included.",
    ),
    counter(
        "bps_core_transmit_frames_total",
        Source::Core(|core| float(core.values.frames_out)),
        "Publications that it has posted.",
    ),
    counter(
        "bps_core_rounds_total",
        Source::Core(|core| float(core.values.rounds)),
        "Rounds that it has closed, over all keys.",
    ),
    counter(
        "bps_core_short_rounds_total",
        Source::Core(|core| float(core.values.rounds_short)),
        "Of these, rounds whose results lack ranks that have died (BPS_ELASTIC=shrink) or came too \
         late (BPS_BACKUP_WORKERS).",
    ),
    counter(
        "bps_core_restarted_rounds_total",
        Source::Core(|core| float(core.values.rounds_anew)),
        "Rounds that it has begun anew, since a rank had died while its contribution was being \
         added (BPS_ELASTIC=shrink).",
    ),
    counter(
        "bps_core_late_contributions_total",
        Source::Core(|core| float(core.values.late)),
        "Contributions that came when their rounds were closed (BPS_BACKUP_WORKERS). They are in \
         no result.",
    ),
    counter(
        "bps_core_backup_waited_seconds_total",
        Source::Core(|core| seconds(core.values.awaited_ns)),
        "How long rounds that could have been closed have waited for slow ranks, over all parts.",
    ),
    counter(
        "bps_core_backup_saved_seconds_total",
        Source::Core(|core| seconds(core.values.saved_ns)),
        "From the close of each short round to the last late contribution to it, over all parts. A \
         rank that stays behind counts in every round.",
    ),
    counter(
        "bps_core_parked_total",
        Source::Core(|core| float(core.values.parked)),
        "Contributions that had to wait in their socket because another one to the same key was \
         landing, or its last result was not all sent yet.",
    ),
    gauge(
        "bps_core_parked",
        Source::Core(|core| float(core.values.parked_now)),
        "Contributions that wait so now: the depth of the queue in front of the core.",
    ),
    counter(
        "bps_core_full_total",
        Source::Core(|core| float(core.values.full)),
        "Times that a lane had no room for a publication: the worker at its end reads slowly.",
    ),
    gauge(
        "bps_core_publications_waiting",
        Source::Core(|core| float(core.values.queued)),
        "Publications that wait for such room now, each rank's counted.",
    ),
    counter(
        "bps_core_refused_frames_total",
        Source::Core(|core| float(core.values.refused)),
        "Frames that did not fit the registry; each costs its sender the lane.",
    ),
    counter(
        "bps_core_stalls_total",
        Source::Core(|core| float(core.values.stalls)),
        "Rounds that stayed open for longer than BPS_STALL_REPORT.",
    ),
    counter(
        "bps_core_busy_seconds_total",
        Source::Core(|core| seconds(core.values.busy_ns)),
        "Time that the core's loop had something to do.",
    ),
    gauge(
        "bps_core_busy_ratio",
        Source::Core(|core| core.busy),
        "Fraction of the time between the last two heartbeats in which it had something to do.",
    ),
    counter(
        "bps_core_cpu_seconds_total",
        Source::Core(|core| seconds(core.values.cpu_ns)),
        "Processor time of the core's thread; above the busy time by what it spins.",
    ),
    counter(
        "bps_core_sleeps_total",
        Source::Core(|core| float(core.values.sleeps)),
        "Times that it slept because there was nothing to do.",
    ),
    gauge(
        "bps_core_lanes",
        Source::Core(|core| float(core.values.lanes)),
        "Lanes that are open, one for each rank.",
    ),
    gauge(
        "bps_core_keys",
        Source::Core(|core| float(core.values.keys)),
        "Keys that were placed on it.",
    ),
    gauge(
        "bps_core_arena_claimed_bytes",
        Source::Core(|core| float(core.values.arena_claimed)),
        "Memory that its accumulators have claimed.",
    ),
    gauge(
        "bps_core_arena_resident_bytes",
        Source::Core(|core| float(core.values.arena_resident)),
        "Memory of its arena that has pages.",
    ),
    counter(
        "bps_rank_receive_bytes_total",
        Source::Rank(|rank| float(rank.values.bytes_in)),
        "Payload bytes of results that a rank has received.",
    ),
    counter(
        "bps_rank_transmit_bytes_total",
        Source::Rank(|rank| float(rank.values.bytes_out)),
        "Payload bytes of contributions that it has posted.",
    ),
    counter(
        "bps_rank_receive_frames_total",
        Source::Rank(|rank| float(rank.values.frames_in)),
        "Frames that it has received.",
    ),
    counter(
        "bps_rank_transmit_frames_total",
        Source::Rank(|rank| float(rank.values.frames_out)),
        "Contributions that it has posted.",
    ),
    counter(
        "bps_rank_spared_bytes_total",
        Source::Rank(|rank| float(rank.values.spared)),
        "Payload bytes to and from servers that it has not sent or received, because they were \
         encoded.",
    ),
    gauge(
        "bps_rank_auto_plain_parts",
        Source::Rank(|rank| float(rank.values.auto_plain)),
        "Parts declared with the encoding auto that it sends as they are, because nothing else is \
         known to be faster.",
    ),
    gauge(
        "bps_rank_auto_bf16_parts",
        Source::Rank(|rank| float(rank.values.auto_half)),
        "Those of them that it sends as bf16.",
    ),
    gauge(
        "bps_rank_auto_codec_parts",
        Source::Rank(|rank| float(rank.values.auto_coded)),
        "Those of them that it encodes by the codec that they name.",
    ),
    gauge(
        "bps_rank_line_bytes_per_second",
        Source::Rank(|rank| float(rank.values.line_speed)),
        "Bytes a second of its line in the slower direction, as it has measured to choose among \
         these; 0 before that is known, or where nothing is to be chosen.",
    ),
    counter(
        "bps_rank_rounds_total",
        Source::Rank(|rank| float(rank.values.rounds)),
        "Results that have landed, one for each part of a tensor and round.",
    ),
    gauge(
        "bps_rank_parts_waiting",
        Source::Rank(|rank| float(rank.values.queued)),
        "Parts that are ready and wait for their lane's credit: the depth of its queues.",
    ),
    gauge(
        "bps_rank_waited_for",
        Source::Waited,
        "1 while an open round or barrier that counts as stalled waits for the rank, else 0.",
    ),
    counter(
        "bps_rank_busy_seconds_total",
        Source::Rank(|rank| seconds(rank.values.busy_ns)),
        "Time that the rank's lane loop had something to do.",
    ),
    gauge(
        "bps_rank_busy_ratio",
        Source::Rank(|rank| rank.busy),
        "Fraction of the time between the last two heartbeats in which it had something to do.",
    ),
    counter(
        "bps_rank_cpu_seconds_total",
        Source::Rank(|rank| seconds(rank.values.cpu_ns)),
        "Processor time of the lane loop's thread; the framework's is not in it.",
    ),
    counter(
        "bps_rank_sleeps_total",
        Source::Rank(|rank| float(rank.values.sleeps)),
        "Times that it slept because there was nothing to do.",
    ),
];

/// The whole of `docs/metrics.md`.
#[must_use]
pub fn document() -> String {
    let mut text = String::from(INTRODUCTION);
    for family in FAMILIES {
        let labels = match family.source {
            Source::Build => "`version`",
            Source::Job(_) => "–",
            Source::Change(_) => "`number`, `epoch`, `what`",
            Source::Info => "`role`, `index`, `host`, `pid`",
            Source::Node(_) => "`role`, `index`",
            Source::Link(_) => "`role`, `index`, `interface`",
            Source::Core(_) => "`server`, `core`",
            Source::Rank(_) | Source::Waited => "`rank`",
        };
        let _ = writeln!(
            text,
            "| `{}` | {} | {labels} | {} |",
            family.name,
            family.kind.name(),
            family.help
        );
    }
    text
}

const INTRODUCTION: &str = "\
# Metrics

Generated from the table in `engine/src/metrics/families.rs`; do not edit. After a change there, run
`BPS_BLESS=1 cargo test -p bps-tests --test env_docs`. How to watch a job is in
[running.md](running.md#watching-a-job).

The scheduler shows the whole job, a server shows itself, both in the text format of Prometheus at
`/metrics`; `/healthz` answers `ok`. Nodes send their counters to the scheduler with each heartbeat,
so a value is at most `BPS_HEARTBEAT_INTERVAL` old. A server's own page lacks what only the
scheduler knows: who waits for whom, heartbeats, and the ranks.

Counters begin at 0 with their process. Labels are nodes and cores, never tensors: a page grows with
the job, not with the model. `role` is `worker` or `server`, `index` the rank or server number.
There is no counter of retries or reconnections, because there are none: a lost connection between
members ends the job, or one membership of an elastic job ([elastic.md](elastic.md)).

Bytes of payload a second, for each core: `rate(bps_core_receive_bytes_total[1m])`. How busy cores
are: `rate(bps_core_busy_seconds_total[1m])`, or `bps_core_busy_ratio` at a glance.

| Metric | Kind | Labels | Meaning |
|---|---|---|---|
";
