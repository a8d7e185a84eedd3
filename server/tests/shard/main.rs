//! A core of a server, frame by frame and between two memberships.

mod coded;
mod moved;
mod received;
mod short;
mod stored;

use bps_engine::base::{DType, Epoch, Key, Operation, Rank, Round};
use bps_engine::lane::Endpoint;
use bps_engine::mem::{Arena, Options, Readable};
use bps_engine::optimize::{Act, Number};
use bps_engine::proto::members::Members;
use bps_engine::proto::messages::{KeySpec, RetiredKey};
use bps_engine::proto::store::{Deltas, Store};
use bps_engine::ring::Mpsc;
use bps_engine::trace::counters::Counters;
use bps_engine::transport::sim::{Sim, SimNetwork};
use bps_engine::transport::{Event, Frame, Landing, LaneId, Link, Transport, Waker};
use bps_engine::wire::header::Form;
use bps_engine::wire::{Header, Kind};
use bps_server::entry::Groups;
use bps_server::shard::{Command, Refusal, Report, Shard};
use std::sync::Arc;
use std::time::Duration;

/// A core on the simulated network, and its two queues.
struct Core {
    shard: Shard,
    network: SimNetwork,
    commands: Mpsc<Command>,
    reports: Mpsc<(u32, Report)>,
    counters: Arc<Counters>,
}

impl Core {
    fn new() -> Core {
        let (network, waker) = (SimNetwork::new(1), Waker::new().expect("an eventfd"));
        let (commands, reports) = (Mpsc::new(64), Mpsc::new(64));
        let counters: Arc<Counters> = Arc::default();
        let options = Options { name: "test".into(), numa_node: None, shared: false };
        let shard = Shard::new(
            0,
            Endpoint::new(vec![Transport::Sim(Sim::new(network.clone()))], waker.clone()),
            Arena::reserve(1 << 20, &options).expect("address space"),
            commands.clone(),
            reports.clone(),
            waker,
            Arc::clone(&counters),
            Duration::from_secs(3),
        );
        Core { shard, network, commands, reports, counters }
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

#[test]
fn a_core_whose_lanes_do_not_close_says_so_in_time_and_begins_nothing() {
    let mut core = Core::new();
    core.order(begin(1, 2));
    let _lanes = [core.dial(0, 1), core.dial(1, 1)];
    while core.reports.pop().is_some() {}
    // The network's time stands still, so no lane ever closes, as where a device hangs.
    core.order(begin(2, 2));
    core.shard.step(Duration::from_millis(9_999));
    assert!(core.reports.pop().is_none());
    core.shard.step(Duration::from_secs(10));
    let Some((0, Report::Failed { message })) = core.reports.pop() else { panic!("not told") };
    let said = "core 0: the lanes of rank 0, rank 1 did not close within 10 s";
    assert!(message.starts_with(said) && message.contains("start this server again"), "{message}");
    // It is told once, and their memory is not used again even if they close now.
    for second in 1..5 {
        core.network.advance_within(Duration::from_secs(1));
        core.shard.step(Duration::from_secs(10 + second));
    }
    let begun = |report: &Report| matches!(report, Report::Begun { .. } | Report::Failed { .. });
    let reports = std::iter::from_fn(|| core.reports.pop());
    assert!(reports.map(|(_, report)| report).all(|report| !begun(&report)));
}

#[test]
fn a_core_whose_lanes_close_in_time_begins_the_next_membership() {
    let mut core = Core::new();
    core.order(begin(1, 1));
    let _lane = core.dial(0, 1);
    while core.reports.pop().is_some() {}
    core.order(begin(2, 1));
    assert!(core.reports.pop().is_none());
    for second in 1..5 {
        core.network.advance_within(Duration::from_secs(1));
        core.shard.step(Duration::from_secs(second));
    }
    let mut reports = std::iter::from_fn(|| core.reports.pop());
    let begun = |report: &Report| matches!(report, Report::Begun { epoch: Epoch(2) });
    assert!(reports.any(|(_, report)| begun(&report)));
}

/// A key of all ranks, to be summed.
fn spec(key: u64, bytes: u32, dtype: DType) -> KeySpec {
    let (key, operation, members) = (Key(key), Operation::Sum, Members::ALL);
    let (rounds, encoding, store) = (0, None, None);
    KeySpec {
        key,
        core: 0,
        dtype,
        bytes,
        operation,
        rounds,
        members,
        receiver: None,
        encoding,
        store,
    }
}

impl Core {
    /// Installs a key of this many bytes, which has had so many rounds.
    fn install(&mut self, key: u64, bytes: u32, rounds: u64) {
        let spec = KeySpec { rounds, ..spec(key, bytes, DType::F32) };
        self.order(Command::Install { request: 1, keys: vec![spec] });
        let answers = std::iter::from_fn(|| self.reports.pop()).map(|(_, report)| report);
        let mut answers = answers.filter(|report| !matches!(report, Report::Begun { .. }));
        let report = answers.next().expect("an answer");
        assert!(matches!(report, Report::Installed { request: 1 }), "{report:?}");
    }

    fn retire(&mut self, key: u64, rounds: u64) {
        let keys = vec![RetiredKey { key: Key(key), core: 0, rounds }];
        self.order(Command::Retire { keys });
    }

    /// Keys that it has, and bytes of memory that it has claimed for them.
    fn held(&self) -> (u64, u64) {
        self.shard.sample();
        (self.counters.keys.read(), self.counters.arena_claimed.read())
    }
}

#[test]
fn a_retired_key_gives_its_memory_back_once_it_had_its_last_round() {
    let mut core = Core::new();
    core.order(begin(1, 2));
    core.install(0, 256 << 10, 0);
    core.install(1, 128 << 10, 0);
    assert_eq!(core.held(), (2, 384 << 10));
    // Nobody has pushed it, and nobody will.
    core.retire(0, 0);
    assert_eq!(core.held(), (1, 128 << 10));
    // Its last round is still to come; or it is used again before that.
    core.retire(1, 5);
    core.retire(77, 5);
    assert_eq!(core.held(), (1, 128 << 10));
    core.install(1, 128 << 10, 5);
    // One that was forgotten comes back where it stood. The arena has 1 MiB for all of them.
    for turn in 0..100 {
        core.install(0, 512 << 10, turn);
        assert_eq!(core.held(), (2, 640 << 10));
        core.retire(0, turn);
    }
    assert_eq!(core.held(), (1, 128 << 10));
}

#[test]
fn keys_that_no_part_can_have_are_refused_one_by_one() {
    let mut core = Core::new();
    core.order(begin(1, 2));
    core.install(0, 4 << 10, 0);
    let of = |ranks: &[u32], operation| {
        let members = Members::new(ranks.iter().copied().map(Rank).collect()).unwrap();
        KeySpec { members, operation, ..spec(2, 4 << 10, DType::F32) }
    };
    core.retire(0, 5);
    for (spec, why) in [
        (spec(1, 0, DType::F32), "has 0 bytes of f32"),
        (spec(1, 6, DType::F32), "has 6 bytes of f32"),
        (spec(1, u32::MAX - 3, DType::F32), "has 4294967292 bytes of f32"),
        (spec(0, 4 << 10, DType::F16), "installed again as something else"),
        (spec(0, 4 << 10, DType::F32), "installed twice"),
        (of(&[1, 2], Operation::Sum), "is for ranks 1, 2"),
        (of(&[1], Operation::Broadcast(Rank(0))), "its root among them"),
        (KeySpec { members: Members::ALL, ..of(&[0], Operation::Broadcast(Rank(9))) }, "all ranks"),
    ] {
        core.order(Command::Install { request: 2, keys: vec![spec] });
        let Some((0, Report::Failed { message })) = core.reports.pop() else { panic!("{why}") };
        assert!(message.contains(why), "{message}");
    }
    assert_eq!(core.held(), (1, 4 << 10), "none of them has taken memory");
    core.retire(0, 5);
    let other = KeySpec { key: Key(0), ..of(&[0], Operation::Sum) };
    core.order(Command::Install { request: 2, keys: vec![other] });
    let Some((0, Report::Failed { message })) = core.reports.pop() else { panic!("another set") };
    assert!(message.contains("installed again as something else"), "{message}");
}

#[test]
fn a_set_is_summed_without_the_others_who_are_refused() {
    let mut core = Core::new();
    core.order(begin(1, 3));
    let links = [0, 1, 2].map(|rank| core.dial(rank, 1));
    let sim = Transport::Sim(Sim::new(core.network.clone()));
    let mut workers = Endpoint::new(vec![sim], Waker::new().expect("an eventfd"));
    let lanes = links.map(|link| workers.attach(link).expect("a lane"));
    let members = Members::new(vec![Rank(2), Rank(0)]).unwrap();
    let keys = vec![KeySpec { members, ..spec(7, 8, DType::F32) }];
    core.order(Command::Install { request: 1, keys });
    let values = [1f32, 2., 4.].map(|value| [value.to_le_bytes(), value.to_le_bytes()].concat());
    let mut refused = Vec::new();
    let mut results = Vec::new();
    // Whoever is not in the set comes first, and in the middle.
    for rank in [1usize, 0, 2] {
        let speaker = Rank(u32::try_from(rank).unwrap());
        let header = Header {
            key: Key(7),
            round: Round(1),
            length: 8,
            contributors: 1,
            ..Header::new(Kind::Contribution, DType::F32, speaker, Epoch(1))
        };
        // SAFETY: the values live as long as the endpoint, and nobody writes them.
        let payload = unsafe { Readable::of(&values[rank]) };
        let frame = Frame::new(header.encode(), payload, 0);
        workers.post(lanes[rank], &frame).expect("an empty lane");
        let mut events = Vec::new();
        for _ in 0..1000 {
            core.shard.step(Duration::ZERO);
            workers.poll(&mut events);
            for event in events.drain(..) {
                match event {
                    Event::Header { lane, header, .. } => {
                        let header = Header::decode(&header).expect("a server's");
                        if header.kind == Kind::Publication {
                            results.push((lane, header.rank, header.contributors));
                        }
                        workers.land(lane, Landing::Pieces(header.length as usize));
                    }
                    Event::Piece { lane, piece } => {
                        // SAFETY: it has just come, and is consumed below.
                        let bytes = unsafe { piece.lend().bytes().to_vec() };
                        assert_eq!(bytes, [5f32.to_le_bytes(), 5f32.to_le_bytes()].concat());
                        workers.consume(lane);
                    }
                    _ => {}
                }
            }
            while let Some((_, report)) = core.reports.pop() {
                if let Report::Refused { rank, why } = report {
                    refused.push((rank, why));
                }
            }
            core.network.advance();
        }
    }
    assert_eq!(refused, [(Rank(1), Refusal::Outside { key: Key(7), rank: Rank(1) })]);
    results.sort_by_key(|(_, rank, _)| *rank);
    assert_eq!(results, [(lanes[0], Rank(0), 2), (lanes[2], Rank(2), 2)]);
}
