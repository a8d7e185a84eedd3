//! An epoch that goes on without ranks that die (`BPS_ELASTIC=shrink`): numbers and size stay, and
//! from now on nobody waits for them.
//!
//! Invariant: what one rank did for others is lost with it, so an epoch goes on only without a rank
//! that did nothing but contribute ([`Registry::needs`](super::registry::Registry::needs)); else
//! the job re-forms, as [`elastic`](super::elastic) says. Each server takes a rank out at a moment
//! of its own, which decides for its keys; nothing of the rank is taken after that.
//!
//! Ranks of a host that sum among themselves are lost together, as with their machine, or not at
//! all: when the first is found dead, the scheduler waits until the others are dead as well, or one
//! of them is heard.

use super::elastic::ranked;
use super::registry::Reply;
use super::{
    Duration, NodeId, Output, OverReason, Phase, Rank, Running, Scheduler, SchedulerMessage,
    counted,
};
use crate::limits::GONE_MAX;
use crate::proto::messages::{Party, Shrunk, Sign};
use crate::proto::text::list;

/// A rank that is heard this long after another of its host was found dead counts as alive: a
/// container ends its processes one after the other.
const TOGETHER: Duration = Duration::from_millis(300);

/// Ranks of a host that are dead, while others of it may live.
pub(super) struct Falling {
    ranks: Vec<Rank>,
    /// What became of the first.
    reason: OverReason,
    /// When that was found.
    since: Duration,
}

impl Falling {
    /// The scheduler itself did not run for so long: nobody was late in that time.
    pub(super) fn forgive(&mut self, gap: Duration) {
        self.since += gap;
    }
}

impl Running {
    /// Whether a rank has left because it had done its work.
    pub(super) fn has_finished(&self) -> bool {
        self.left.iter().any(|rank| self.has_gone(*rank))
    }

    /// Whether a rank has left in good order, and not to come back.
    pub(super) fn has_gone(&self, rank: Rank) -> bool {
        self.left.contains(&rank) && !self.away.contains_key(&rank) && !self.gone.contains(&rank)
    }

    /// Takes a rank out of all that is waited for. Returns whose barriers are passed, and what is
    /// to be told.
    pub(super) fn lose(&mut self, rank: Rank) -> (Vec<(Rank, u64)>, Vec<Reply>) {
        let Some((node, _)) = self.job.workers.get(rank.0 as usize) else {
            return Default::default();
        };
        self.left.insert(rank);
        self.gone.push(rank);
        self.stalls.lose(rank);
        self.late.lose(rank);
        self.paths.lose(rank, *node);
        (self.barriers.lose(rank), self.registry.lose(rank))
    }
}

/// The rank that is lost for this reason, if it is one.
fn lost(reason: &OverReason) -> Option<Rank> {
    let (OverReason::Died { who, .. } | OverReason::Failed { who, .. }) = reason else {
        return None;
    };
    match who.party {
        Party::Rank(rank) => Some(rank),
        _ => None,
    }
}

/// Whether it is lost because nothing was heard of it.
fn is_silent(reason: &OverReason) -> bool {
    matches!(reason, OverReason::Died { how: Sign::Silent { .. }, .. })
}

/// Why the epoch can't go on without a rank.
const ALONE_HOLDS: &str = "it alone has results that others lack, of a server that is lost";

impl Scheduler {
    /// Goes on without the rank that is lost, and the others of its host if these are lost as well,
    /// if the epoch can; says whether it does, or may.
    pub(super) fn shrink(&mut self, reason: &OverReason, culprit: Option<NodeId>) -> bool {
        let Some(elastic) = self.config.elastic.as_ref().filter(|elastic| elastic.shrinks) else {
            return false;
        };
        let (Phase::Running(running), Some(rank)) = (&self.phase, lost(reason)) else {
            return false;
        };
        let host = running.registry.host_of(rank).to_vec();
        let (size, least) = (running.job.workers.len(), elastic.min_workers.max(1) as usize);
        let can_spare = size >= running.left.len() + host.len() + least
            && running.gone.len() + host.len() <= GONE_MAX
            // Whoever suspends comes back to another epoch, which is about to form.
            && running.away.is_empty()
            && !host.iter().any(|rank| running.left.contains(rank));
        if !can_spare {
            return false;
        }
        let needed = running.registry.needs(&host).map(|needed| needed.to_string());
        let moves = || running.moving.needs(&host).then(|| ALONE_HOLDS.to_owned());
        if let Some(why) = needed.or_else(moves) {
            self.put(Output::Log(format!("the epoch can't go on without {rank}: {why}")));
            return false;
        }
        let fallen = running.falling.iter().find(|falling| host.contains(&falling.ranks[0]));
        let has_fallen =
            |one: &Rank| fallen.is_some_and(|falling| falling.ranks.contains(one)) || *one == rank;
        let is_whole = host.iter().all(has_fallen);
        let may_follow = !is_silent(reason) || self.are_silent(&host, rank);
        if !is_whole && fallen.is_none() && !may_follow {
            return false;
        }
        if let Some(node) = culprit {
            self.expel(node, reason);
        }
        let Phase::Running(running) = &mut self.phase else { return false };
        let fallen = running.falling.iter().position(|one| host.contains(&one.ranks[0]));
        if is_whole {
            let first = fallen.map(|at| running.falling.swap_remove(at));
            let since = first.as_ref().map_or(self.clock, |first| first.since);
            let reason = first.as_ref().map_or(reason, |first| &first.reason);
            self.lose(&host, reason, self.clock.saturating_sub(since));
            return true;
        }
        if let Some(at) = fallen {
            running.falling[at].ranks.push(rank);
            return true;
        }
        let (ranks, since) = (vec![rank], self.clock);
        running.falling.push(Falling { ranks, reason: reason.clone(), since });
        let text = "are the others of its host, with which it sums, lost as well?";
        self.put(Output::Log(format!("{reason}; {text}")));
        true
    }

    /// Half of the silence by which a rank counts as dead: a heartbeat at least.
    fn half(&self) -> Duration {
        self.config.heartbeat_timeout / 2
    }

    /// Whether the others of the host of a rank that is silent for too long have been for half of
    /// that.
    fn are_silent(&self, host: &[Rank], rank: Rank) -> bool {
        let is_silent = |one: &Rank| {
            self.last_heard(*one).is_none_or(|at| self.clock.saturating_sub(at) >= self.half())
        };
        host.iter().filter(|one| **one != rank).all(is_silent)
    }

    /// When a rank was heard, unless it has gone.
    fn last_heard(&self, rank: Rank) -> Option<Duration> {
        let Phase::Running(running) = &self.phase else { return None };
        let (node, _) = running.job.workers.get(rank.0 as usize)?;
        self.peers.get(node).map(|peer| peer.heard)
    }

    /// Forms the job again where ranks live that sum with one that is lost.
    pub(super) fn check_falling(&mut self, now: Duration) {
        let Phase::Running(running) = &self.phase else { return };
        let lives = |falling: &Falling, rank: &Rank| {
            let is_heard = |at: Duration| at > falling.since + TOGETHER;
            !falling.ranks.contains(rank) && self.last_heard(*rank).is_some_and(is_heard)
        };
        let stands = |falling: &Falling| {
            let host = running.registry.host_of(falling.ranks[0]);
            now >= falling.since + self.half() || host.iter().any(|rank| lives(falling, rank))
        };
        let Some(at) = running.falling.iter().position(stands) else { return };
        let Phase::Running(running) = &mut self.phase else { return };
        let Falling { ranks, reason, .. } = running.falling.swap_remove(at);
        let why = "it summed with other ranks of its host, and not all of these are lost";
        self.put(Output::Log(format!("the epoch can't go on without {}: {why}", ranks[0])));
        if let Some(reason) = self.regroup(reason, None) {
            self.end_job(reason, None);
        }
    }

    /// Takes ranks out of all that is waited for, so long after the first of them was lost, and
    /// tells everybody.
    fn lose(&mut self, ranks: &[Rank], reason: &OverReason, waited: Duration) {
        let now = self.clock;
        let Phase::Running(running) = &mut self.phase else { return };
        let (mut passed, mut retired) = (Vec::new(), Vec::new());
        for &rank in ranks {
            let Some((_, register)) = running.job.workers.get(rank.0 as usize) else { return };
            self.history.bury(Some(register.session), ranked(rank, register));
            let (barriers, replies) = running.lose(rank);
            passed.extend(barriers);
            retired.extend(replies);
        }
        let gone = running.gone.clone();
        let left = counted(running.job.workers.len() - running.left.len(), "rank");
        let lost = match ranks {
            [rank] => rank.to_string(),
            ranks => format!("ranks {} of one host", list(ranks.iter().map(|rank| rank.0))),
        };
        let text = format!(
            "{left} of {} {} on without {lost}: {reason}",
            running.job.workers.len(),
            if left.starts_with("1 ") { "goes" } else { "go" }
        );
        self.changed(&text, waited);
        for node in self.members() {
            let shrunk = Shrunk { gone: gone.clone(), text: text.clone() };
            self.send(node, SchedulerMessage::Shrunk(shrunk));
        }
        self.pass(passed);
        self.reply(retired);
        for &rank in ranks {
            self.timeline(rank, None);
            self.left_uneven(rank);
            self.apply_if_held(now);
            self.lose_holder(rank);
        }
        self.check_stalls(now);
    }
}
