//! A job that finds its own settings: which are tried, and how all ranks come to them at the same
//! round. See [`tuning`](crate::proto::tuning) for what is said, [`search`](crate::proto::search)
//! for what is tried.
//!
//! Invariant: from `Recut` to `Apply` a rank holds rounds, so every `Recut` is followed by an
//! `Apply`: when all have answered, or, after `BPS_STALL_TIMEOUT`, one that changes no parts.

use super::{NodeId, Output, Phase, Running, Scheduler, SchedulerMessage};
use crate::base::{Rank, word};
use crate::proto::messages::Planning;
use crate::proto::search::Search;
use crate::proto::text;
use crate::proto::tuning::{Point, TuneOrder, TuneReport, Tuning, credit_parts};
use crate::proto::uneven::Pushes;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// What is wrong with a report that nobody waits for.
pub(super) const OUT_OF_TURN: &str = "a word on settings of a job that does not tune itself";

/// How far a job has come that tunes itself.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TuningView {
    /// Settings in force, or about to be.
    pub point: Point,
    /// How many were measured.
    pub trials: u32,
    /// Bytes a second of the last of them; 0 before the first.
    pub rate: f64,
    /// Bytes a second of the fastest.
    pub best: f64,
    /// The search is over.
    pub is_over: bool,
}

/// The rank that measures. In a synchronous step all are as fast as the slowest.
const PACER: Rank = Rank(0);

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Tuner {
    search: Search,
    trial: u32,
    point: Point,
    /// Of the last trial.
    rate: f64,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// The first rank measures.
    Measures,
    /// Servers make room for new parts.
    Installs,
    /// Ranks hold their rounds.
    Holds(Held),
    Over,
}

/// What ranks have said of the rounds that they hold.
#[derive(Debug, Default)]
struct Held {
    since: Duration,
    /// Who has not said it.
    awaited: BTreeSet<Rank>,
    /// Who has.
    said: u32,
    /// By tensor: how many ranks know it, and the most rounds that one of them has begun.
    tensors: BTreeMap<u32, (u32, u64)>,
}

impl Tuner {
    /// For a job that is to tune itself, whose servers have so many cores.
    pub(super) fn new(planning: &Planning, cores: u32) -> Option<Tuner> {
        let tuning = planning.tuning;
        if tuning.is_off() {
            return None;
        }
        let Tuning { credit_parts: set, .. } = tuning;
        let point = Point {
            partition_bytes: planning.partition_bytes,
            credit_parts: credit_parts(set, cores as usize),
        };
        let search = Search::new(tuning, point, credit_parts(0, cores as usize));
        Some(Tuner { search, trial: 0, point, rate: 0.0, stage: Stage::Measures })
    }

    pub(super) fn view(&self) -> TuningView {
        TuningView {
            point: self.point,
            trials: word(self.search.trials()),
            rate: self.rate,
            best: self.search.fastest().map_or(0.0, |(_, rate)| rate),
            is_over: matches!(self.stage, Stage::Over),
        }
    }
}

impl Scheduler {
    /// What is tried, and how many tensors there are.
    fn tuner(&mut self) -> Option<(&mut Tuner, usize)> {
        let Phase::Running(running) = &mut self.phase else { return None };
        Some((running.tuner.as_mut()?, running.registry.count()))
    }

    /// A worker speaks of what is tried.
    pub(super) fn tune(&mut self, node: NodeId, rank: Rank, report: TuneReport, now: Duration) {
        let Some((tuner, count)) = self.tuner() else {
            return self.broke_protocol(node, OUT_OF_TURN);
        };
        match report {
            TuneReport::Paced { trial, bytes_per_second } => {
                // What was measured while other settings held says nothing of these.
                let is_due = trial == tuner.trial && matches!(tuner.stage, Stage::Measures);
                if is_due && rank == PACER {
                    self.measured(bytes_per_second, now);
                }
            }
            TuneReport::Held { trial, rounds } => {
                // What was given up comes too late.
                let Stage::Holds(held) = &mut tuner.stage else { return };
                if trial != tuner.trial || !held.awaited.remove(&rank) {
                    return;
                }
                held.said += 1;
                let mut from = 0;
                for run in rounds {
                    let end = u64::from(run.first) + u64::from(run.tensors);
                    if run.first < from || end > count as u64 {
                        return self.broke_protocol(node, "rounds of tensors that there are not");
                    }
                    from = run.first + run.tensors;
                    for tensor in run.first..run.first + run.tensors {
                        let (ranks, most) = held.tensors.entry(tensor).or_default();
                        (*ranks, *most) = (*ranks + 1, (*most).max(run.pushes));
                    }
                }
                self.apply_if_held(now);
            }
        }
    }

    /// The settings in force were measured: goes on to the next.
    fn measured(&mut self, rate: f64, now: Duration) {
        let Some((tuner, _)) = self.tuner() else { return };
        let (trial, point) = (tuner.trial, tuner.point);
        tuner.search.tell(point, rate);
        tuner.rate = rate;
        self.put(Output::Log(format!("tuning: trial {trial}, {point}: {:.4} GB/s", rate / 1e9)));
        self.go_on(now);
    }

    /// Brings the job to what the search wants next.
    fn go_on(&mut self, now: Duration) {
        loop {
            let Phase::Running(running) = &mut self.phase else { return };
            let Running { tuner: Some(tuner), registry, .. } = &mut **running else { return };
            let (point, is_last) = match tuner.search.next() {
                Ok(point) => (point, false),
                Err(point) => (point, true),
            };
            let before = tuner.point;
            if is_last && point == before {
                return self.end_search();
            }
            if point.partition_bytes != before.partition_bytes {
                let Ok(installs) = registry.recut(point.partition_bytes, now) else {
                    // Too many parts. A point that was measured before can be had again.
                    tuner.search.tell(point, 0.0);
                    self.put(Output::Log(format!(
                        "tuning: {point} would cut tensors into too many parts, and is not tried"
                    )));
                    if is_last {
                        return self.end_search();
                    }
                    continue;
                };
                tuner.stage = Stage::Installs;
                (tuner.point, tuner.trial) = (point, tuner.trial + 1);
                self.reply(installs);
                return self.hold(now);
            }
            tuner.stage = Stage::Measures;
            (tuner.point, tuner.trial) = (point, tuner.trial + 1);
            self.apply(Vec::new());
            if !is_last {
                return;
            }
        }
    }

    /// The search is over.
    fn end_search(&mut self) {
        let Some((tuner, _)) = self.tuner() else { return };
        tuner.stage = Stage::Over;
        let (point, trials) = (tuner.point, tuner.search.trials());
        self.put(Output::Log(format!("tuned after {trials} trials: {point}")));
        self.put(Output::Tuned(point));
    }

    /// Once servers have made room for new parts, lets the ranks hold their rounds.
    pub(super) fn hold(&mut self, now: Duration) {
        let Phase::Running(running) = &mut self.phase else { return };
        let Running { tuner: Some(tuner), registry, left, job, .. } = &mut **running else {
            return;
        };
        if !matches!(tuner.stage, Stage::Installs) || !registry.is_recut_installed() {
            return;
        }
        let awaited: BTreeSet<Rank> =
            (0..job.size()).map(Rank).filter(|rank| !left.contains(rank)).collect();
        let orders: Vec<(NodeId, TuneOrder)> = awaited
            .iter()
            .map(|&rank| {
                let tensors = registry.recuts_for(rank);
                (job.workers[rank.0 as usize].0, TuneOrder::Recut { trial: tuner.trial, tensors })
            })
            .collect();
        tuner.stage = Stage::Holds(Held { since: now, awaited, ..Held::default() });
        for (node, order) in orders {
            self.send(node, SchedulerMessage::Tune(order));
        }
    }

    /// Changes to the new parts if every rank has said how far it is.
    pub(super) fn apply_if_held(&mut self, now: Duration) {
        let Phase::Running(running) = &mut self.phase else { return };
        let Running { tuner: Some(tuner), left, .. } = &mut **running else { return };
        let Stage::Holds(held) = &mut tuner.stage else { return };
        // Those have ended all of their rounds, so nobody begins another one that needs them.
        held.awaited.retain(|rank| !left.contains(rank));
        if !held.awaited.is_empty() {
            return;
        }
        let said = held.said;
        let of_all = held.tensors.iter().filter(|(_, (ranks, _))| *ranks == said);
        let agreed = of_all.map(|(&tensor, &(_, most))| (tensor, most)).collect();
        self.take_cuts(&agreed);
        self.end_if_over(now);
    }

    fn take_cuts(&mut self, agreed: &BTreeMap<u32, u64>) {
        let Phase::Running(running) = &mut self.phase else { return };
        let Running { tuner: Some(tuner), registry, .. } = &mut **running else { return };
        let (retired, rounds) = registry.take_cuts(agreed);
        tuner.stage = Stage::Measures;
        self.apply(rounds);
        // A server is told last: what it forgets nobody will ask for.
        self.reply(retired);
    }

    /// The search may have had its last point in force.
    fn end_if_over(&mut self, now: Duration) {
        let Some((tuner, _)) = self.tuner() else { return };
        if tuner.search.next() == Err(tuner.point) {
            self.go_on(now);
        }
    }

    /// Tells all ranks what holds from now on.
    fn apply(&mut self, rounds: Vec<Pushes>) {
        let Phase::Running(running) = &self.phase else { return };
        let Running { tuner: Some(tuner), left, job, .. } = &**running else { return };
        let (trial, credit_bytes) = (tuner.trial, tuner.point.credit_bytes());
        let ranks = (0..).map(Rank).zip(&job.workers).filter(|(rank, _)| !left.contains(rank));
        let nodes: Vec<NodeId> = ranks.map(|(_, (node, _))| *node).collect();
        for node in nodes {
            let order = TuneOrder::Apply { trial, credit_bytes, rounds: rounds.clone() };
            self.send(node, SchedulerMessage::Tune(order));
        }
    }

    /// Gives up parts for which ranks hold their rounds for too long, and with them the search.
    pub(super) fn check_tuner(&mut self, now: Duration) {
        let limit = self.config.stall_timeout;
        let Some((Tuner { stage: Stage::Holds(held), .. }, _)) = self.tuner() else { return };
        let waited = now.saturating_sub(held.since);
        if waited < limit {
            return;
        }
        let (ranks, seconds) =
            (text::list(held.awaited.iter().map(|rank| rank.0)), waited.as_secs());
        self.put(Output::Log(format!(
            "tuning ends: ranks {ranks} have not held their rounds in {seconds} s \
             (BPS_STALL_TIMEOUT), so tensors keep the parts that they have: read the logs of these \
             ranks"
        )));
        self.take_cuts(&BTreeMap::new());
        if let Some((tuner, _)) = self.tuner() {
            tuner.stage = Stage::Over;
        }
    }
}
