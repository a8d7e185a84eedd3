//! Random conversations, valid and not: the machine never panics, and answers every request once.

use super::*;
use std::collections::BTreeMap;

/// A small deterministic generator: a failing seed can be repeated.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Random {
        Random(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    pub(super) fn small(&mut self, limit: u32) -> u32 {
        u32::try_from(self.below(limit.into())).unwrap()
    }

    pub(super) fn one_in(&mut self, chances: u64) -> bool {
        self.below(chances) == 0
    }

    fn of<T: Clone>(&mut self, choices: &[T]) -> T {
        let at = usize::try_from(self.below(choices.len() as u64)).unwrap();
        choices[at].clone()
    }
}

fn tensors(random: &mut Random, wild: bool) -> Vec<Declaration> {
    (0..random.below(5))
        .map(|_| {
            let at = random.below(12);
            let count = if wild && random.one_in(8) { random.next() } else { 100 + at * 700 };
            let wrong_root = wild && random.one_in(10);
            let root = Rank(if wrong_root { 99 } else { 0 });
            let operation = if at.is_multiple_of(3) || wrong_root {
                Operation::Broadcast(root)
            } else {
                Operation::Sum
            };
            let set = random.one_in(4) || wild && random.one_in(4);
            let ranks: Vec<Rank> = if set && !at.is_multiple_of(5) {
                let most = if wild { 5 } else { 2 };
                (0..=random.small(most)).map(Rank).collect()
            } else {
                Vec::new()
            };
            let members = Members::new(ranks).unwrap_or(Members::ALL);
            Declaration { operation, members, ..tensor(&format!("tensor {at}"), count) }
        })
        .collect()
}

/// Mostly what a node in this place may say, with any content; now and then anything at all.
fn any_message(random: &mut Random, standing: Option<&Standing>) -> NodeMessage {
    let fitting: &[u64] = match standing {
        Some(Standing::Worker(_)) => &[0, 1, 1, 1, 3, 3],
        Some(Standing::Server) => &[0, 2, 2, 2, 4, 8],
        Some(Standing::Former(_)) => &[0, 5],
        Some(Standing::New) => &[7],
        _ => &[0],
    };
    let kind = match random.below(150) {
        0 => random.below(9),
        1..=3 => 5,
        _ => random.of(fitting),
    };
    match kind {
        0 => NodeMessage::Heartbeat { rounds: random.next() },
        1 => {
            let tensors = tensors(random, true);
            NodeMessage::Declare { request: random.below(3), tensors }
        }
        2 => NodeMessage::Installed { request: random.below(40) },
        3 => NodeMessage::Barrier { request: random.below(3) },
        4 => NodeMessage::Stalled {
            keys: (0..random.below(40))
                .map(|_| StalledKey {
                    key: Key(random.of(&[0, 1, 5, 1000, u64::MAX])),
                    round: random.below(5),
                    waited_ms: random.of(&[0, 3_000, 4_000]),
                    missing: (0..random.below(9)).map(|_| Rank(random.small(6))).collect(),
                    left: (0..random.below(9) / 8).map(|_| Rank(random.small(6))).collect(),
                })
                .collect(),
            late: (0..random.below(40))
                .map(|_| LateKeys {
                    rank: Rank(random.small(6)),
                    keys: (0..random.below(9)).map(Key).collect(),
                    more: random.one_in(2),
                })
                .collect(),
        },
        5 => NodeMessage::Leave { suspend: random.one_in(2) },
        6 => NodeMessage::failed("wild"),
        8 => NodeMessage::ResetDone { epoch: Epoch(1 + random.small(4)) },
        _ => {
            let (at, workers, servers) = (random.small(4), random.small(4), random.small(3));
            NodeMessage::Register(if random.one_in(2) {
                let former = random.one_in(2).then_some(0);
                Register { former, ..worker_register(at, workers, servers) }
            } else {
                server_register(at, workers, servers)
            })
        }
    }
}

#[test]
fn wild_conversations_never_panic_and_always_end_well_told() {
    let mut steps = 0;
    for seed in 0..4_000 {
        let mut random = Random(seed);
        let (workers, servers) = (1 + random.small(3), random.small(3));
        // Half of them start with a job that runs.
        let mut bench = if random.one_in(2) {
            Bench::formed(workers, servers)
        } else {
            Bench::new(workers, servers)
        };
        let elastic =
            Elastic { shrinks: false, min_workers: 1, patience: ms(500), notice: ms(5_000) };
        bench.scheduler.config.elastic = random.one_in(2).then_some(elastic);
        let mut nodes: Vec<u64> = bench.scheduler.peers.keys().map(|node| node.0).collect();
        let mut connected: Vec<u64> = nodes.clone();
        for step in 0..200 {
            steps += u64::from(bench.done.is_none());
            if random.one_in(10) || nodes.is_empty() {
                let node = 1_000 + step;
                bench.connect(node);
                nodes.push(node);
                connected.push(node);
            }
            let node = random.of(&nodes);
            match random.below(20) {
                0 if !bench.closed.contains(&NodeId(node)) => bench.close(node),
                1 => bench.pass(random.below(20) * 250, &nodes.clone()),
                2 if random.one_in(20) => bench.now += ms(random.below(100_000)),
                _ => {
                    let peer = bench.scheduler.peers.get(&NodeId(node));
                    let message = any_message(&mut random, peer.map(|peer| &peer.standing));
                    bench.say(node, message);
                }
            }
        }
        bench.scheduler.handle_stop("the test is over");
        bench.drain();
        assert!(bench.done.is_some(), "seed {seed}: it did not end");
        for node in connected {
            let heard = bench.heard(node);
            let overs = heard.iter().filter(|m| matches!(m, SchedulerMessage::Over { .. })).count();
            assert!(overs <= 1, "seed {seed}: node {node} was told the end {overs} times");
        }
    }
    assert!(steps > 50_000, "only {steps} steps before the end: the conversations are too short");
}

/// An honest job whose messages come in every possible order.
struct Honest {
    bench: Bench,
    workers: u64,
    /// Requests without an answer yet, by node and number: whether it is a barrier.
    open: BTreeMap<(u64, u64), bool>,
    barriers: Vec<u64>,
    installs: Vec<(u64, u64)>,
    next: u64,
}

impl Honest {
    fn settle(&mut self, seed: u64) {
        for (node, messages) in std::mem::take(&mut self.bench.inboxes) {
            for message in messages {
                let (request, barrier) = match message {
                    SchedulerMessage::Install { request, .. } => {
                        self.installs.push((node.0, request));
                        continue;
                    }
                    SchedulerMessage::Declared { request, .. }
                    | SchedulerMessage::Refused { request, .. } => (request, false),
                    SchedulerMessage::BarrierDone { request } => (request, true),
                    SchedulerMessage::Mismatch(_) | SchedulerMessage::Stall { .. } => continue,
                    other => panic!("seed {seed}: {node:?} got {other:?}"),
                };
                assert_eq!(
                    self.open.remove(&(node.0, request)),
                    Some(barrier),
                    "seed {seed}: {node:?} got an answer to {request} that it did not wait for"
                );
            }
        }
    }

    fn ask(&mut self, node: u64, message: impl FnOnce(u64) -> NodeMessage, barrier: bool) {
        self.next += 1;
        self.open.insert((node, self.next), barrier);
        self.bench.say(node, message(self.next));
    }

    fn barrier(&mut self, node: u64) {
        self.barriers[usize::try_from(node).unwrap()] += 1;
        self.ask(node, |request| NodeMessage::Barrier { request }, true);
    }

    fn install_one(&mut self, random: &mut Random) {
        if !self.installs.is_empty() {
            let at = usize::try_from(random.below(self.installs.len() as u64)).unwrap();
            let (server, request) = self.installs.swap_remove(at);
            self.bench.say(server, NodeMessage::Installed { request });
        }
    }
}

#[test]
fn every_request_is_answered_exactly_once() {
    for seed in 0..2_000 {
        let mut random = Random(seed ^ 0xabcd);
        let workers = 1 + random.below(4);
        let mut job = Honest {
            bench: Bench::formed(u32::try_from(workers).unwrap(), 1 + random.small(3)),
            workers,
            open: BTreeMap::new(),
            barriers: vec![0; usize::try_from(workers).unwrap()],
            installs: Vec::new(),
            next: 0,
        };
        for _ in 0..80 {
            let node = random.below(workers);
            match random.below(5) {
                0 | 1 => {
                    let tensors = tensors(&mut random, seed % 2 == 1);
                    job.ask(node, |request| NodeMessage::Declare { request, tensors }, false);
                }
                2 => job.barrier(node),
                _ => job.install_one(&mut random),
            }
            job.settle(seed);
        }
        // Everybody does what is still due, and then nothing may be open.
        let most = job.barriers.iter().copied().max().unwrap();
        for node in 0..job.workers {
            while job.barriers[usize::try_from(node).unwrap()] < most {
                job.barrier(node);
            }
        }
        while !job.installs.is_empty() {
            job.install_one(&mut random);
            job.settle(seed);
        }
        job.settle(seed);
        assert!(job.open.is_empty(), "seed {seed}: never answered: {:?}", job.open);
        for node in 0..job.workers {
            job.bench.say(node, NodeMessage::Leave { suspend: false });
        }
        assert_eq!(job.bench.done, Some(Exit::Finished), "seed {seed}");
    }
}
