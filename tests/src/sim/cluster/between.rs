//! A rank of a simulated job that is between two epochs while its scheduler is silent: it keeps
//! that connection, and registers with another scheduler beside it, as the rank's `Attendant` does.
//!
//! Invariant: whichever of the two gives it a roster is followed, and the other one sees its
//! connection end.

use super::schedulers::{Member, PATIENCE};
use super::{Cluster, Letter, NodeMessage, SchedulerMessage};

impl Cluster {
    /// Time passes for ranks that wait for an epoch and hear nothing.
    pub(super) fn look_for_silence(&mut self) {
        let now = self.now();
        for index in 0..self.workers.len() {
            let worker = &mut self.workers[index];
            let Some(coming) = worker.coming.as_mut().filter(|_| worker.alive) else { continue };
            let is_silent = coming.heard.is_some_and(|heard| now >= heard + PATIENCE);
            if !is_silent || worker.over.is_some() {
                continue;
            }
            let member = Member::Worker(index);
            if !coming.comes_back() {
                // It knows of no job that outlives its scheduler.
                self.mail(Letter::Gone(self.workers[index].way.node));
                self.lose_while_coming(index);
                continue;
            }
            let since = *coming.silent.get_or_insert(now);
            if worker.way.is_asking() {
            } else if now > since + self.wait {
                self.give_up_coming(member);
            } else if !worker.way.is_dialing() {
                self.redial(member, true);
            }
        }
    }

    /// Whether a node is between two epochs and has registered with two schedulers.
    pub(super) fn has_two(&self, member: Member) -> Option<usize> {
        let Member::Worker(index) = member else { return None };
        let worker = &self.workers[index];
        (worker.coming.is_some() && worker.way.is_asking()).then_some(index)
    }

    /// What such a rank hears by the connection that it had (`is_old`) or by the other one.
    pub(super) fn hear_one_of_two(
        &mut self,
        index: usize,
        is_old: bool,
        message: Option<SchedulerMessage>,
    ) {
        let member = Member::Worker(index);
        let is_silent = self.workers[index].coming.as_ref().is_some_and(|one| one.silent.is_some());
        match (is_old, message) {
            (true, Some(message @ SchedulerMessage::Roster(_))) => {
                self.drop_asked(member);
                self.heed(member, Some(message));
            }
            // The other one is all that is left.
            (true, None | Some(SchedulerMessage::Over { .. })) => self.take_asked(index),
            (true, message) => self.heed(member, message),
            (false, Some(SchedulerMessage::Roster(roster))) => {
                let (old, term) = (self.workers[index].way.node, roster.term);
                self.mail(Letter::Up(old, NodeMessage::Deposed { term }));
                self.take_asked(index);
                self.heed(member, Some(SchedulerMessage::Roster(roster)));
            }
            (false, Some(message @ SchedulerMessage::Over { .. })) if is_silent => {
                self.take_asked(index);
                self.heed(member, Some(message));
            }
            (false, None | Some(SchedulerMessage::Over { .. })) => self.drop_asked(member),
            (false, Some(_)) => {}
        }
    }

    fn drop_asked(&mut self, member: Member) {
        if let Some(node) = self.way(member).forget_asked() {
            self.mail(Letter::Gone(node));
        }
    }

    /// The other connection is the only one from now on.
    fn take_asked(&mut self, index: usize) {
        let now = self.now();
        let worker = &mut self.workers[index];
        let Some(node) = worker.way.forget_asked() else { return };
        let old = std::mem::replace(&mut worker.way.node, node);
        worker.way.register.session = node.0 + 1;
        if let Some(coming) = &mut worker.coming {
            (coming.heard, coming.silent) = (Some(now), None);
        }
        self.mail(Letter::Gone(old));
    }
}
