//! A core of a server between two memberships.

use bps_engine::base::{Epoch, Rank};
use bps_engine::lane::Endpoint;
use bps_engine::mem::{Arena, Options};
use bps_engine::ring::Mpsc;
use bps_engine::transport::sim::{Sim, SimNetwork};
use bps_engine::transport::{Link, Transport, Waker};
use bps_server::entry::Groups;
use bps_server::shard::{Command, Report, Shard};
use std::sync::Arc;
use std::time::Duration;

/// A core on the simulated network, and its two queues.
struct Core {
    shard: Shard,
    network: SimNetwork,
    commands: Mpsc<Command>,
    reports: Mpsc<(u32, Report)>,
}

impl Core {
    fn new() -> Core {
        let (network, waker) = (SimNetwork::new(1), Waker::new().expect("an eventfd"));
        let (commands, reports) = (Mpsc::new(64), Mpsc::new(64));
        let options = Options { name: "test".into(), numa_node: None, shared: false };
        let shard = Shard::new(
            0,
            Endpoint::new(vec![Transport::Sim(Sim::new(network.clone()))], waker.clone()),
            Arena::reserve(1 << 20, &options).expect("address space"),
            commands.clone(),
            reports.clone(),
            waker,
            Arc::default(),
            Duration::from_secs(3),
        );
        Core { shard, network, commands, reports }
    }

    fn order(&mut self, command: Command) {
        assert!(self.commands.push(command).is_ok(), "a short queue");
        self.shard.step(Duration::ZERO);
    }

    /// The other end of a lane that a worker has dialled.
    fn dial(&mut self, rank: u32, epoch: u32) -> Link {
        let (here, there) = self.network.link();
        let (rank, epoch) = (Rank(rank), Epoch(epoch));
        self.order(Command::Attach { link: Link::Sim(here), rank, epoch });
        Link::Sim(there)
    }

    fn turned_away(&mut self) -> usize {
        let reports = std::iter::from_fn(|| self.reports.pop());
        reports.filter(|(_, report)| matches!(report, Report::TurnedAway { .. })).count()
    }
}

fn begin(epoch: u32, ranks: usize) -> Command {
    let groups: Vec<u32> = (0..ranks).map(|rank| u32::try_from(rank).unwrap()).collect();
    Command::Begin { epoch: Epoch(epoch), groups: Arc::new(Groups::new(&groups)) }
}

#[test]
fn workers_may_dial_before_the_server_knows_the_ranks_of_a_resumed_job() {
    let mut core = Core::new();
    // All of an epoch before have suspended: the next one has a number, and no ranks yet.
    core.order(begin(2, 0));
    let mut lanes = vec![core.dial(1, 2)];
    assert_eq!(core.turned_away(), 0);
    core.order(begin(2, 2));
    lanes.push(core.dial(0, 2));
    assert_eq!(core.turned_away(), 0);
    // Only then is a second lane of a rank one too many, and so is one of the membership before.
    lanes.push(core.dial(1, 2));
    lanes.push(core.dial(0, 1));
    lanes.push(core.dial(2, 2));
    assert_eq!(core.turned_away(), 3);
}
