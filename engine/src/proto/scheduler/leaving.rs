//! Servers of an elastic job that leave in good order, as when their machine is to be taken away.
//!
//! Where rounds go on without a server that dies (`BPS_ELASTIC=shrink`), its keys move at once, in
//! the same way. Else it stays until the ranks have agreed to form the job again, as they do to let
//! others in, so that no step is lost; or until the job forms again for another reason.
//!
//! Invariant: a server is let go only where the job can do without it. One that is not asks in
//! vain, and by its own clock becomes a death.

use super::waits::Reminder;
use super::{Duration, NodeId, Origin, Output, OverReason, Phase, Running, Scheduler, Standing};
use crate::proto::messages::Node;

impl Scheduler {
    /// A server asks to be let go.
    pub(super) fn server_leaves(&mut self, node: NodeId) {
        let who = self.origin(node);
        let Some(peer) = self.peers.get_mut(&node).filter(|peer| !peer.leaves) else { return };
        peer.leaves = true;
        self.let_servers_go();
        // Else that has been told.
        if self.peers.contains_key(&node) {
            let when = "when the job forms next, at a commit or after a death";
            self.put(Output::Log(format!("{who} is to leave: it does {when}")));
            self.tell_newcomers();
        }
    }

    /// Time passes: what kept keys of a server that asks to be let go where they are may be over.
    pub(super) fn check_leaving(&mut self, now: Duration) {
        self.clock = now;
        if self.peers.values().any(|peer| peer.leaves) {
            self.let_servers_go();
        }
    }

    /// Moves the keys of servers that ask to be let go, where that can be.
    fn let_servers_go(&mut self) {
        let Phase::Running(running) = &self.phase else { return };
        let asks = |node: &NodeId| self.peers.get(node).is_some_and(|peer| peer.leaves);
        let servers = running.job.servers.iter().map(|(node, _)| *node);
        for node in servers.filter(asks).collect::<Vec<NodeId>>() {
            if self.can_move(node) {
                let reason = OverReason::Left { who: self.origin(node) };
                self.move_keys(&reason, Some(node));
            }
        }
    }

    /// Servers that are let go when the epoch ends, as they have asked. One stays if nobody else
    /// would be there to serve.
    pub(super) fn leavers(&self, running: &Running) -> Vec<NodeId> {
        let there = running.job.servers.iter().map(|(node, _)| *node);
        let there = there.filter(|node| self.peers.contains_key(node));
        let (mut asking, staying): (Vec<NodeId>, Vec<NodeId>) =
            there.partition(|node| self.peers[node].leaves);
        let comes = |is: fn(&Node) -> bool| {
            self.peers.values().any(|peer| match &peer.standing {
                Standing::Early(early) => early.former.is_none() && is(&early.node),
                _ => false,
            })
        };
        let has_server = !staying.is_empty() || comes(|node| matches!(node, Node::Server { .. }));
        let needs_server =
            running.job.through_servers() || comes(|node| matches!(node, Node::Worker { .. }));
        if !has_server && needs_server {
            asking.pop();
        }
        asking
    }

    /// The epoch begins: tells of those that came while it formed, and of those that want to go.
    pub(super) fn tell_who_waits(&mut self, now: Duration) {
        let Phase::Running(running) = &self.phase else { return };
        let has_leavers = !self.leavers(running).is_empty();
        if !self.early().is_empty() {
            self.reminder = Reminder::new(now);
        } else if !has_leavers {
            return;
        }
        self.tell_newcomers();
    }

    /// The epoch ends: lets servers go that have asked for it, and returns who they were.
    pub(super) fn release_leavers(&mut self) -> Vec<Origin> {
        let Phase::Running(running) = &self.phase else { return Vec::new() };
        let mut released = Vec::new();
        for node in self.leavers(running) {
            let who = self.origin(node);
            self.dismiss(node, OverReason::Left { who: who.clone() });
            released.push(who);
        }
        released
    }
}
