//! An epoch that goes on without ranks that die (`BPS_ELASTIC=shrink`): numbers and size stay, and
//! from now on nobody waits for them.
//!
//! Invariant: what one rank did for others is lost with it, so an epoch goes on only without a rank
//! that did nothing but contribute ([`Registry::needs`](super::registry::Registry::needs)); else
//! the job re-forms, as [`elastic`](super::elastic) says. Each server takes a rank out at a moment
//! of its own, which decides for its keys; nothing of the rank is taken after that.

use super::elastic::ranked;
use super::registry::Reply;
use super::{
    NodeId, Output, OverReason, Phase, Rank, Running, Scheduler, SchedulerMessage, counted,
};
use crate::limits::GONE_MAX;
use crate::proto::messages::{Party, Shrunk};

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

impl Scheduler {
    /// Goes on without the rank that is lost, if the epoch can; says whether it does.
    pub(super) fn shrink(&mut self, reason: &OverReason, culprit: Option<NodeId>) -> bool {
        let Some(elastic) = self.config.elastic.as_ref().filter(|elastic| elastic.shrinks) else {
            return false;
        };
        let (Phase::Running(running), Some(rank)) = (&self.phase, lost(reason)) else {
            return false;
        };
        let (size, least) = (running.job.workers.len(), elastic.min_workers.max(1) as usize);
        let can_spare = size > running.left.len() + least
            && running.gone.len() < GONE_MAX
            // Whoever suspends comes back to another epoch, which is about to form.
            && running.away.is_empty()
            && !running.left.contains(&rank);
        if !can_spare {
            return false;
        }
        if let Some(needed) = running.registry.needs(rank) {
            self.put(Output::Log(format!("the epoch can't go on without {rank}: {needed}")));
            return false;
        }
        if running.moving.needs(rank) {
            let why = "it alone has results that others lack, of a server that is lost";
            self.put(Output::Log(format!("the epoch can't go on without {rank}: {why}")));
            return false;
        }
        if let Some(node) = culprit {
            self.expel(node, reason);
        }
        self.lose(rank, reason);
        true
    }

    /// Takes a rank out of all that is waited for, and tells everybody.
    fn lose(&mut self, rank: Rank, reason: &OverReason) {
        let now = self.clock;
        let Phase::Running(running) = &mut self.phase else { return };
        let Some((_, register)) = running.job.workers.get(rank.0 as usize) else { return };
        let who = ranked(rank, register);
        self.history.bury(Some(register.session), who);
        let (passed, retired) = running.lose(rank);
        let gone = running.gone.clone();
        let left = counted(running.job.workers.len() - running.left.len(), "rank");
        let text = format!(
            "{left} of {} {} on without {rank}: {reason}",
            running.job.workers.len(),
            if left.starts_with("1 ") { "goes" } else { "go" }
        );
        self.put(Output::Log(text.clone()));
        for node in self.members() {
            let shrunk = Shrunk { gone: gone.clone(), text: text.clone() };
            self.send(node, SchedulerMessage::Shrunk(shrunk));
        }
        self.pass(passed);
        self.reply(retired);
        self.timeline(rank, None);
        self.left_uneven(rank);
        self.apply_if_held(now);
        self.lose_holder(rank);
        self.check_stalls(now);
    }
}
