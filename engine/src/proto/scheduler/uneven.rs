//! Ranks that have joined, because they have no more data, and what the others push meanwhile.
//!
//! Invariant: a rank that has joined is told of a push only once every other rank knows that some
//! rank has joined. So whoever sees the result of a round in which a joined rank has taken part can
//! ask who that was.

use super::waits::Reminder;
use super::{NodeId, Output, Phase, Running, Scheduler, SchedulerMessage};
use crate::base::{Operation, Rank};
use crate::proto::text;
use crate::proto::uneven::{FOLLOWED_MAX, Followed, Pushes, UnevenOrder, UnevenReport};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// What is wrong with a report that nobody waits for.
pub(super) const OUT_OF_TURN: &str = "a word on uneven data out of turn";

/// Empty as long as nobody has joined.
#[derive(Debug, Default)]
pub(super) struct Uneven {
    /// What each rank that has joined had pushed by then.
    joined: BTreeMap<Rank, Vec<Pushes>>,
    last: Option<Rank>,
    /// Ranks that do not know yet that some rank has joined.
    unheard: BTreeSet<Rank>,
    /// By tensor, how often the rank that is furthest has pushed it.
    pushes: Vec<u64>,
    /// Since when no rank has pushed or joined, and when that is told next.
    idle: Option<(Duration, Reminder)>,
}

impl Uneven {
    /// Takes in what a rank has pushed; the tensors in which it is ahead of all others. `None` if
    /// it names tensors that the job does not have, of which there are `count`, or some twice.
    fn take(&mut self, said: &[Pushes], count: usize) -> Option<Vec<u32>> {
        let mut named = 0u64;
        for run in said {
            named += u64::from(run.tensors);
            if u64::from(run.first) + u64::from(run.tensors) > count as u64 || named > count as u64
            {
                return None;
            }
        }
        self.pushes.resize(count, 0);
        let mut ahead = Vec::new();
        for run in said {
            for tensor in run.first..run.first + run.tensors {
                let known = &mut self.pushes[tensor as usize];
                if *known < run.pushes {
                    *known = run.pushes;
                    ahead.push(tensor);
                }
            }
        }
        Some(ahead)
    }

    /// The tensors that others have pushed more often than a rank that has joined.
    fn lacking(&self, rank: Rank) -> Vec<u32> {
        let mut known = vec![0; self.pushes.len()];
        for run in self.joined.get(&rank).into_iter().flatten() {
            let end = run.first as usize + run.tensors as usize;
            known[run.first as usize..end].fill(run.pushes);
        }
        let pairs = self.pushes.iter().zip(&known);
        (0..).zip(pairs).filter(|(_, (all, own))| all > own).map(|(tensor, _)| tensor).collect()
    }
}

impl Scheduler {
    /// A worker speaks of what is uneven.
    pub(super) fn uneven(&mut self, node: NodeId, rank: Rank, report: UnevenReport, now: Duration) {
        let Phase::Running(running) = &mut self.phase else {
            return self.broke_protocol(node, OUT_OF_TURN);
        };
        let (uneven, count) = (&mut running.uneven, running.registry.count());
        match report {
            UnevenReport::IsRootThere { request, tensor } => {
                let joined_after = running.root_joined_after(tensor);
                let root = UnevenOrder::Root { request, joined_after };
                self.send(node, SchedulerMessage::Uneven(root));
            }
            // It was on its way when all had joined.
            UnevenReport::Pushed { .. } if uneven.joined.is_empty() => {}
            UnevenReport::Pushed { pushes } => match uneven.take(&pushes, count) {
                Some(ahead) => self.heard(rank, &ahead, now),
                None => self.broke_protocol(node, "pushes of tensors that the job does not have"),
            },
            UnevenReport::Joined { pushes } => match uneven.take(&pushes, count) {
                Some(ahead) if !uneven.joined.contains_key(&rank) => {
                    self.joined(rank, pushes, &ahead, now);
                }
                _ => self.broke_protocol(node, OUT_OF_TURN),
            },
        }
    }

    fn joined(&mut self, rank: Rank, pushes: Vec<Pushes>, ahead: &[u32], now: Duration) {
        let Phase::Running(running) = &mut self.phase else { return };
        let uneven = &mut running.uneven;
        if uneven.joined.is_empty() {
            let others = (0..running.job.size()).map(Rank);
            let others = others.filter(|other| *other != rank && !running.left.contains(other));
            uneven.unheard = others.collect();
            for other in uneven.unheard.clone() {
                self.order(other, UnevenOrder::Report);
            }
        }
        self.heard(rank, ahead, now);
        let Phase::Running(running) = &mut self.phase else { return };
        running.uneven.joined.insert(rank, pushes);
        running.uneven.last = Some(rank);
        let passed = running.barriers.excuse(rank);
        self.pass(passed);
        self.follow_all([rank]);
        self.end_uneven();
    }

    /// A rank has said what it has pushed, which puts it ahead in these tensors.
    fn heard(&mut self, rank: Rank, ahead: &[u32], now: Duration) {
        let Phase::Running(running) = &mut self.phase else { return };
        let uneven = &mut running.uneven;
        uneven.idle = Some((now, Reminder::new(now)));
        let joined: Vec<Rank> = uneven.joined.keys().copied().collect();
        if uneven.unheard.is_empty() {
            joined.into_iter().for_each(|follower| self.follow(follower, ahead));
        } else {
            uneven.unheard.remove(&rank);
            self.follow_all(joined);
        }
    }

    /// A rank has left in good order: it pushes nothing more.
    pub(super) fn left_uneven(&mut self, rank: Rank) {
        let Phase::Running(running) = &mut self.phase else { return };
        let uneven = &mut running.uneven;
        uneven.joined.remove(&rank);
        if uneven.unheard.remove(&rank) {
            let joined: Vec<Rank> = uneven.joined.keys().copied().collect();
            self.follow_all(joined);
        }
        self.end_uneven();
    }

    /// Tells these, which have joined, all that they lack, if every rank knows that some have.
    fn follow_all(&mut self, followers: impl IntoIterator<Item = Rank>) {
        for rank in followers {
            let Phase::Running(running) = &self.phase else { return };
            let uneven = &running.uneven;
            if uneven.unheard.is_empty() {
                let lacking = uneven.lacking(rank);
                self.follow(rank, &lacking);
            }
        }
    }

    fn follow(&mut self, rank: Rank, tensors: &[u32]) {
        let Phase::Running(running) = &self.phase else { return };
        let followed = |&tensor: &u32| {
            // Whoever pushed what ranks disagree about has been told so, and waits no longer.
            let said = running.registry.agreed(tensor)?.clone();
            let pushes = running.uneven.pushes[tensor as usize];
            // Nor does anybody wait for its deltas where the value is the servers'.
            let is_stored = said.store.is_some_and(|store| store.backup().is_none());
            let is_awaited = said.members.contains(rank) && !is_stored;
            is_awaited.then_some(Followed { tensor, pushes, said })
        };
        let all: Vec<Followed> = tensors.iter().filter_map(followed).collect();
        for some in all.chunks(FOLLOWED_MAX) {
            self.order(rank, UnevenOrder::Follow { tensors: some.to_vec() });
        }
    }

    fn end_uneven(&mut self) {
        let Phase::Running(running) = &mut self.phase else { return };
        let Some(last) = running.uneven.last else { return };
        let there = running.job.workers.len() - running.left.len();
        if running.uneven.joined.len() < there {
            return;
        }
        running.barriers.expect_all();
        let uneven = std::mem::take(&mut running.uneven);
        for rank in uneven.joined.into_keys() {
            self.order(rank, UnevenOrder::AllJoined { last });
        }
    }

    /// Tells people for whom ranks wait that have joined, where nothing has happened for long.
    pub(super) fn check_uneven(&mut self, now: Duration) {
        let report_after = self.config.stall_report;
        let Phase::Running(running) = &mut self.phase else { return };
        let Some((since, reminder)) = &mut running.uneven.idle else { return };
        let waited = now.saturating_sub(*since);
        if waited < report_after || !reminder.is_due(now) {
            return;
        }
        let joined: Vec<Rank> = running.uneven.joined.keys().copied().collect();
        let gone = |rank: &Rank| joined.contains(rank) || running.left.contains(rank);
        let awaited: Vec<Rank> =
            (0..running.job.size()).map(Rank).filter(|rank| !gone(rank)).collect();
        let text = format!(
            "{} called join() and {} did not; nothing was pushed for {} s",
            named(&joined),
            named(&awaited),
            waited.as_secs()
        );
        self.put(Output::Log(text.clone()));
        for node in self.members() {
            self.send(node, SchedulerMessage::Waiting { text: text.clone() });
        }
    }

    fn order(&mut self, rank: Rank, order: UnevenOrder) {
        let Phase::Running(running) = &self.phase else { return };
        let node = running.job.workers[rank.0 as usize].0;
        self.send(node, SchedulerMessage::Uneven(order));
    }
}

/// `rank 1`, `ranks 0 and 2`.
fn named(ranks: &[Rank]) -> String {
    let plural = if ranks.len() == 1 { "" } else { "s" };
    format!("rank{plural} {}", text::list(ranks.iter().map(|rank| rank.0)))
}

impl Running {
    fn root_joined_after(&self, tensor: u32) -> Option<u64> {
        let Operation::Broadcast(root) = self.registry.said(tensor)?.operation else {
            return None;
        };
        let pushes = self.uneven.joined.get(&root)?;
        Some(Pushes::of(pushes, tensor))
    }
}
