//! How ranks and lanes of a simulated job end.

use super::{Cluster, Duration, Error, Letter, Member, NicCommand, NodeMessage, SimGpu};
use bps_worker::error::Closed;

/// How long leaving may take before it is given up.
const LEAVE: Duration = Duration::from_secs(5);
/// A node whose lane was lost waits this long for the scheduler to say why.
const VERDICT: Duration = Duration::from_secs(6);
/// What a lane that has a deadline waits for an acknowledgement.
const SILENCE: Duration = Duration::from_secs(9);

impl Cluster {
    /// A process dies: its lanes and its connection close without a word.
    pub fn kill_worker(&mut self, index: usize) {
        let worker = &mut self.workers[index];
        worker.alive = false;
        worker.nic = None;
        worker.gpu.take().into_iter().for_each(SimGpu::kill);
        self.hang_up(Member::Worker(index));
    }

    /// The scheduler loses sight of a rank that lives.
    pub fn hide_worker(&mut self, index: usize) {
        let node = self.workers[index].way.node;
        self.mail(Letter::Gone(node));
    }

    /// A server's process dies.
    pub fn kill_server(&mut self, index: usize) {
        self.servers[index].shards.clear();
        self.hang_up(Member::Server(index));
    }

    /// A server is told to leave, and waits for as long as it takes.
    pub fn leave_server(&mut self, index: usize) {
        let (now, mut effects) = (self.now(), Vec::new());
        self.servers[index].agent.leave(Duration::MAX / 2, now, &mut effects);
        self.server_effects(index, effects);
    }

    /// The scheduler loses sight of a server that lives.
    pub fn hide_server(&mut self, index: usize) {
        let node = self.servers[index].way.node;
        self.mail(Letter::Gone(node));
    }

    /// The GPU of a rank fails, some time from now.
    pub fn fail_gpu(&mut self, index: usize) {
        self.workers[index].gpu.iter().for_each(SimGpu::fail);
    }

    /// One lane of a rank breaks.
    pub fn cut_lane(&mut self, index: usize) {
        let connections = &self.workers[index].connections;
        if !connections.is_empty() {
            let which = self.random.index(connections.len());
            self.network.cut(self.workers[index].connections[which]);
        }
    }

    /// One lane breaks between the thread of a rank's GPU and that of another of its host, and no
    /// other lane. Says whether the rank has such a lane.
    pub fn cut_order_lane(&mut self, index: usize) -> bool {
        let count = self.workers[index].order_connections.len();
        if count > 0 {
            let which = self.random.index(count);
            self.network.cut(self.workers[index].order_connections[which]);
        }
        count > 0
    }

    /// From now on what a server and a rank say to each other is lost in one direction, on one of
    /// their lanes. With a deadline, as TCP has one, the lane closes at the end that sends in vain.
    /// Says whether there is such a lane.
    pub fn mute_lane(&mut self, index: usize, has_deadline: bool) -> bool {
        let count = self.workers[index].server_connections;
        if count > 0 {
            let which = self.random.index(count);
            let patience = has_deadline.then_some(SILENCE);
            let end = self.random.index(2);
            self.network.mute(self.workers[index].connections[which], end, patience);
        }
        count > 0
    }

    /// A rank leaves in good order.
    pub fn leave(&mut self, index: usize) {
        self.workers[index].leaving = Some(self.now());
        self.workers[index].push(NicCommand::Leave { suspend: false });
    }

    /// Ranks whose lanes have ended say good-bye to the scheduler, and so do those that can't wait
    /// for the other ends any longer.
    pub(super) fn part(&mut self, now: Duration) {
        for index in 0..self.workers.len() {
            let worker = &mut self.workers[index];
            let Some(since) = worker.leaving else { continue };
            // Whoever has nobody to say good-bye to waits for another scheduler.
            let is_away = worker.agent.as_ref().is_some_and(|agent| agent.is_away());
            if worker.alive && !is_away && (worker.ended() || now - since > LEAVE) {
                (worker.leaving, worker.left) = (None, true);
                worker.push(NicCommand::Fail { error: Error::Closed(Closed::Left) });
                let node = worker.way.node;
                self.mail(Letter::Up(node, NodeMessage::Leave { suspend: false }));
            }
        }
    }

    /// Whoever has lost a lane and is not told why gives up after a while.
    pub(super) fn look_for_lost(&mut self, index: usize, now: Duration) {
        let worker = &mut self.workers[index];
        let Some(agent) = &mut worker.agent else { return };
        if agent.is_unheard() || !agent.has_lost() {
            worker.lost_at = None;
        } else if worker.alive {
            let since = *worker.lost_at.get_or_insert(now);
            if now - since > VERDICT {
                let mut effects = Vec::new();
                agent.give_up(&mut effects);
                self.worker_effects(index, effects);
            }
        }
    }
}
