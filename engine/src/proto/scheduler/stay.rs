//! A scheduler that outlives a generation of ranks: those that have all shut down may start again,
//! as after a suspend, until somebody who knows says that none will.

use super::{NodeId, NodeState, OverReason, Phase, Register, Scheduler, Standing};
use crate::proto::messages::Node;

impl Scheduler {
    /// No rank will come any more: the job is over once those that are here have left.
    pub fn handle_last_generation(&mut self) {
        self.config.stays = false;
        let has_worker =
            self.peers.values().any(|peer| matches!(peer.standing, Standing::Worker(_)));
        if matches!(self.phase, Phase::Forming(_)) && !has_worker {
            self.end(OverReason::Finished, None);
        }
    }

    /// All ranks have done their work: whoever waits to be let into an elastic job has come too
    /// late, but for those of them that have begun again already.
    pub(super) fn dismiss_late(&mut self) {
        let Phase::Running(running) = &self.phase else { return };
        let workers = running.job.workers.iter();
        self.history.veterans =
            workers.map(|(_, worker)| (worker.pid, worker.host.clone())).collect();
        for node in self.early() {
            let is_late = |peer: &NodeState| self.is_late(peer.pid, &peer.host);
            if self.peers.get(&node).is_some_and(is_late) {
                self.dismiss(node, OverReason::Finished);
            }
        }
    }

    fn is_late(&self, pid: u32, host: &str) -> bool {
        let mut known = self.history.veterans.iter();
        self.config.elastic.is_some() && !known.any(|(own, place)| *own == pid && place == host)
    }

    /// Whether a node has come that the first epoch of a generation does not wait for: one that
    /// joins later, or that has come when the work was done.
    pub(super) fn comes_aside(&mut self, node: NodeId, register: &Register) -> bool {
        let Phase::Forming(rendezvous) = &self.phase else { return false };
        let is_worker = matches!(register.node, Node::Worker { .. });
        if self.config.elastic.is_none() || rendezvous.regroup.is_some() || !is_worker {
            return false;
        }
        if rendezvous.is_again && self.config.stays && self.is_late(register.pid, &register.host) {
            self.dismiss(node, OverReason::Finished);
            return true;
        }
        let Some(peer) = self.peers.get_mut(&node).filter(|_| register.num_workers == 0) else {
            return false;
        };
        peer.standing = Standing::Early(Box::new(register.clone()));
        true
    }

    /// A node that had come while a job forms comes by another connection: it has given up the
    /// earlier one, whose end is not known here yet, and keeps its place by this one.
    pub(super) fn replace_earlier(&mut self, node: NodeId, register: &Register) {
        let Phase::Forming(rendezvous) = &mut self.phase else { return };
        let Some(earlier) = rendezvous.earlier_of(register) else { return };
        assert!(earlier != node, "a connection registers once");
        rendezvous.remove(earlier);
        self.drop_stranger(earlier, "it has come by another one");
    }

    /// A node that had come is gone before the epoch has formed.
    pub(super) fn bury_vacated(&mut self, node: NodeId) {
        let is_regroup =
            matches!(&self.phase, Phase::Forming(rendezvous) if rendezvous.regroup.is_some());
        if let Some(peer) = self.peers.get(&node).filter(|_| is_regroup) {
            let (session, who) = (peer.session, self.origin(node));
            self.history.bury(session, who);
        }
    }

    /// Whether a node that came early was of the job before.
    pub(super) fn is_former(&self, node: NodeId) -> bool {
        let standing = self.peers.get(&node).map(|peer| &peer.standing);
        matches!(standing, Some(Standing::Early(register)) if register.former.is_some())
    }

    /// Whether all ranks have left, may come back, and none has yet.
    pub(super) fn is_between_generations(&self) -> bool {
        match &self.phase {
            Phase::Forming(rendezvous) => self.config.stays && rendezvous.is_unclaimed(),
            _ => false,
        }
    }
}
