//! What a workload asks of a rank of the cluster.

use super::{Arc, Cluster, Counters, Declaration, Letter, NicCommand, NicLoop, SimGpu, SimWorker};

impl SimWorker {
    /// A command to its NIC loop.
    pub fn push(&mut self, command: NicCommand) {
        self.backlog.push_back(command);
    }

    /// Whether it has not been killed.
    #[must_use]
    pub fn alive(&self) -> bool {
        self.alive
    }

    /// Whether it has said good-bye.
    #[must_use]
    pub fn has_left(&self) -> bool {
        self.left
    }

    /// Slots for results that its lanes or its GPU have.
    #[must_use]
    pub fn slots_in_use(&self) -> usize {
        self.nic.as_ref().map_or(0, NicLoop::slots_in_use)
    }

    /// Whether its NIC loop has ended.
    #[must_use]
    pub fn ended(&self) -> bool {
        let has_gpu_ended = self.gpu.as_ref().is_none_or(SimGpu::has_ended);
        self.nic.as_ref().is_none_or(NicLoop::ended) && has_gpu_ended
    }
}

impl Cluster {
    /// Contributions that servers got when their rounds were closed.
    #[must_use]
    pub fn late_contributions(&self) -> u64 {
        self.counters.iter().map(|one| one.late.read()).sum()
    }

    /// Rounds that servers have closed without ranks that had died, or were slow.
    #[must_use]
    pub fn rounds_begun_anew(&self) -> u64 {
        self.counters.iter().map(|one| one.rounds_anew.read()).sum()
    }

    /// As the servers have counted them.
    pub fn short_rounds(&self) -> u64 {
        self.counters.iter().map(|one| one.rounds_short.read()).sum()
    }

    /// Payload bytes that servers received and sent.
    #[must_use]
    pub fn wire_bytes(&self) -> u64 {
        let bytes = |one: &Arc<Counters>| one.bytes_in.read() + one.bytes_out.read();
        self.counters.iter().map(bytes).sum()
    }

    /// A rank waits at a barrier; the number will be among [`SimWorker::barriers`].
    pub fn barrier(&mut self, index: usize) -> Option<u64> {
        let worker = &mut self.workers[index];
        let (request, message) = worker.agent.as_mut()?.barrier();
        let node = worker.way.node;
        self.mail(Letter::Up(node, message));
        Some(request)
    }

    /// A rank declares tensors; the number is a key of [`SimWorker::declared`].
    pub fn declare(&mut self, index: usize, tensors: Vec<Declaration>) -> Option<u64> {
        let worker = &mut self.workers[index];
        let (request, message) = worker.agent.as_mut()?.declare(tensors);
        let node = worker.way.node;
        self.mail(Letter::Up(node, message));
        Some(request)
    }
}
