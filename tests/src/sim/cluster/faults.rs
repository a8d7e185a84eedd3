//! How ranks and lanes of a simulated job end.

use super::{Cluster, Duration, Letter, NicCommand, NodeMessage, SimGpu};

/// What a lane that has a deadline waits for an acknowledgement.
const SILENCE: Duration = Duration::from_secs(9);

impl Cluster {
    /// A process dies: its lanes and its connection close without a word.
    pub fn kill_worker(&mut self, index: usize) {
        let worker = &mut self.workers[index];
        worker.alive = false;
        worker.nic = None;
        worker.gpu.take().into_iter().for_each(SimGpu::kill);
        let node = worker.node;
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
        let worker = &mut self.workers[index];
        worker.push(NicCommand::Leave);
        let node = worker.node;
        self.mail(Letter::Up(node, NodeMessage::Leave { suspend: false }));
    }
}
