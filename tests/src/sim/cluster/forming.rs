//! How a rank of a simulated job gets its lanes.

use super::{
    Arc, Cluster, CoreId, Endpoint, LanePeer, Lanes, Letter, Link, NicCommand, NicConfig, NicLoop,
    NicStatistics, NodeMessage, Rank, Roster, STALL_REPORT, ShardCommand, Sim, SimGpu, Spot,
    Switches, Transport, Waker, auto_of, worker_agent,
};
use bps_engine::proto::messages::Statistics;

impl Cluster {
    /// A worker has its roster: its NIC loop and lanes are made.
    pub(super) fn form(&mut self, index: usize, roster: Roster) {
        let (rank, pulse) = (Rank(roster.index), self.pulse());
        let host = roster.neighbours.iter().map(|peer| peer.rank).chain([rank]).collect();
        let switches = Switches::new(host, self.shape.planning.switch_size);
        let config = NicConfig {
            rank,
            size: roster.size,
            epoch: roster.epoch,
            credit_bytes: self.shape.credit_bytes,
            paces: false,
            keeps: roster.shrinks,
            auto: auto_of(rank),
            column: switches.others_of_column(rank).collect(),
            stall_report: STALL_REPORT,
            team: bps_engine::team::Team::default(),
        };
        let waker = Waker::new().expect("an eventfd");
        let sim = Transport::Sim(Sim::new(self.network.clone()));
        let worker = &mut self.workers[index];
        let mut nic = NicLoop::new(
            Endpoint::new(vec![sim], waker.clone()).with_checksums(self.shape.payload_checksum),
            config,
            worker.commands.clone(),
            (worker.reports.clone(), waker.clone()),
            Arc::new(NicStatistics::default()),
            |_| {},
        );
        let mut lanes = Lanes::default();
        let servers = if roster.through_servers { &roster.servers[..] } else { &[] };
        for (server, known) in (0u32..).zip(servers) {
            let shards = &self.servers[usize::from(known.cores[0].port() / 100)].shards;
            for core in 0..u32::try_from(known.cores.len()).expect("few cores") {
                let (mine, theirs) = self.network.link();
                let connection = mine.connection();
                worker.connections.push(connection);
                let peer = LanePeer::Server(server);
                let lane = nic.attach(peer, Link::Sim(mine)).expect("a simulated lane");
                lanes.cores.insert(CoreId { server, core }, lane);
                let link = Link::Sim(theirs);
                let attach = ShardCommand::Attach { link, rank, epoch: roster.epoch };
                match shards.get(core as usize) {
                    Some((_, commands)) => {
                        assert!(commands.push(attach).is_ok(), "a shard's queue is full");
                    }
                    // It has died meanwhile.
                    None => self.network.cut(connection),
                }
            }
        }
        worker.server_connections = worker.connections.len();
        for other in roster.neighbours.iter().map(|peer| peer.rank) {
            let mine = self.waiting_ends.meet(&self.network, rank, other);
            worker.connections.push(mine.connection());
            let lane =
                nic.attach(LanePeer::Rank(other), Link::Sim(mine)).expect("a simulated lane");
            lanes.ranks.insert(other, lane);
        }
        if self.shape.devices {
            let first = switches.ranks()[0];
            let mut order = Vec::new();
            for other in roster.neighbours.iter().map(|peer| peer.rank) {
                if rank != first && other != first {
                    continue;
                }
                let mine = self.waiting_orders.meet(&self.network, rank, other);
                worker.order_connections.push(mine.connection());
                order.push((other, Link::Sim(mine)));
            }
            let gpu_waker = Waker::new().expect("an eventfd");
            let sim = Transport::Sim(Sim::new(self.network.clone()));
            let spot = Spot {
                endpoint: Endpoint::new(vec![sim], gpu_waker.clone()),
                waker: gpu_waker,
                epoch: roster.epoch,
                order,
                rank,
                switches: switches.clone(),
                has_servers: roster.through_servers,
                lanes: worker.connections.len(),
                slot_bytes: self.shape.planning.partition_bytes as usize,
                keeps: roster.shrinks,
                roots: !self.shape.planning.reduce_roots.is_empty(),
                nic_waker: waker,
                stall_report: STALL_REPORT,
            };
            let (gpu, to) = SimGpu::open(spot, index, &mut self.random);
            worker.push(NicCommand::OpenGpu(to));
            worker.gpu = Some(gpu);
        }
        worker.nic = Some(nic);
        let agent = worker_agent::Agent::new(roster.clone(), lanes, switches, pulse);
        worker.agent = Some(agent.outlasting(self.wait));
        worker.coming = None;
        worker.roster = Some(roster);
        let (node, resident_bytes, link) = (worker.way.node, 0, None);
        let counted = Statistics { uptime: 0.0, resident_bytes, link, loops: Vec::new() };
        self.mail(Letter::Up(node, NodeMessage::Statistics(counted)));
    }
}
