//! The scheduler's machine among nodes that say anything, in any order, and vanish at any time.

use crate::spoil;
use bps_engine::base::{CoreId, DType, Epoch, Key, Operation, Placement, Rank};
use bps_engine::proto::late::LateKeys;
use bps_engine::proto::members::Members;
use bps_engine::proto::messages::{
    Assignment, Declaration, Node, NodeMessage, Part, Peer, Planning, Register, Replacement,
    Roster, SchedulerMessage, ServerPeer, StalledKey,
};
use bps_engine::proto::resume::{AdoptedKey, KnownTensor, Resume};
use bps_engine::proto::scheduler::{Elastic, NodeId, Output, Scheduler, SchedulerConfig};
use bps_engine::proto::store::{Deltas, Store};
use bps_engine::proto::uneven::{Pushes, UnevenReport};
use bps_engine::transport::sim::Random;
use std::collections::HashSet;
use std::time::Duration;

/// Jobs that are played.
const JOBS: u64 = 10_000;
/// Steps of each.
const STEPS: u32 = 150;
/// Outputs that one step may cause: every node of this small job told of everything, and more.
const OUTPUTS_MAX: usize = 2000;

fn config(elastic: bool) -> SchedulerConfig {
    SchedulerConfig {
        job: "job".into(),
        num_workers: 2,
        num_servers: 1,
        ranks_max: 4096,
        release: "0.1.0".into(),
        encrypt: false,
        start_timeout: Duration::from_secs(60),
        heartbeat_timeout: Duration::from_secs(4),
        stall_report: Duration::from_secs(1),
        stall_timeout: Duration::from_secs(20),
        stays: false,
        elastic: elastic.then_some(Elastic {
            shrinks: true,
            min_workers: 1,
            patience: Duration::ZERO,
            notice: Duration::from_secs(20),
        }),
        placement: Placement::Balanced,
        built_in_coefficient: 1,
    }
}

fn worker(worker_id: u64, local_size: u32, partition_bytes: u32) -> Node {
    Node::Worker {
        worker_id: u32::try_from(worker_id).expect("a small number"),
        local_rank: 0,
        local_size,
        global_rank: None,
        local: None,
        planning: Planning {
            partition_bytes,
            placement: Placement::Balanced,
            mixed_bound: 101,
            built_in_coefficient: 1,
            local_reduce: false,
            force_distributed: false,
            reduce_roots: Vec::new(),
            switch_size: 0,
            tuning: bps_engine::proto::tuning::Tuning::OFF,
        },
        speaks: None,
    }
}

fn registered(node: Node, release: &str, num_servers: u32) -> NodeMessage {
    NodeMessage::Register(Register {
        node,
        host: "host".into(),
        host_id: "boot".into(),
        pid: 1,
        instance: 0,
        session: 0,
        former: None,
        release: release.into(),
        encrypt: false,
        num_workers: 2,
        num_servers,
    })
}

fn register(random: &mut Random) -> NodeMessage {
    let address = std::net::SocketAddr::from(([127, 0, 0, 1], 4000));
    let node = if random.once_in(3) {
        let cores = vec![address; random.index(4)];
        Node::Server { cores, shm: None, rdma: false, colocated: false, preferred: None }
    } else {
        let partition_bytes = if random.once_in(20) { 0 } else { 4096 };
        worker(random.below(3), 1 + u32::from(random.once_in(20)), partition_bytes)
    };
    let release = if random.once_in(30) { "0.0.9" } else { "0.1.0" };
    let mut said = registered(node, release, if random.once_in(30) { 7 } else { 1 });
    if let NodeMessage::Register(register) = &mut said
        && random.once_in(8)
    {
        // Some come by several connections.
        register.instance = 7;
    }
    said
}

fn ranks(random: &mut Random) -> Vec<Rank> {
    let most = if random.once_in(10) { u64::from(u32::MAX) } else { 3 };
    let rank = |random: &mut Random| Rank(u32::try_from(random.below(most)).unwrap_or(0));
    (0..random.index(3)).map(|_| rank(random)).collect()
}

/// What a member of a job says to a scheduler that follows another, more or less.
fn resume(random: &mut Random) -> NodeMessage {
    let small = |random: &mut Random, most: u64| u32::try_from(random.below(most)).unwrap_or(0);
    let NodeMessage::Register(register) = register(random) else { unreachable!("it is one") };
    let odd = random.once_in(8);
    let server = ServerPeer {
        host: "b".into(),
        pid: 2,
        host_id: "boot".into(),
        cores: vec![std::net::SocketAddr::from(([127, 0, 0, 1], 4000)); 1 + random.index(2)],
        shm: None,
        rdma: false,
    };
    let peer = Peer { host: "a".into(), pid: 1, group: small(random, 3) };
    let (gone, left) = (ranks(random), ranks(random));
    let roster = Roster {
        job: "job".into(),
        term: 1,
        epoch: Epoch(1 + small(random, 2)),
        size: if odd { [0, 4097, u32::MAX][random.index(3)] } else { 2 },
        through_servers: true,
        index: small(random, if odd { 1 << 32 } else { 2 }),
        workers: vec![peer; random.index(3)],
        neighbours: Vec::new(),
        servers: vec![server; 1 + usize::from(odd)],
        elastic: true,
        shrinks: true,
        change: None,
    };
    NodeMessage::Resume(Box::new(Resume {
        register,
        term: if odd { small(random, 1 << 32) } else { 1 },
        roster,
        reset: random.once_in(10).then_some(Epoch(2)),
        gone: if odd { gone } else { Vec::new() },
        lost: (0..random.index(3)).map(|_| small(random, if odd { 9 } else { 2 })).collect(),
        left: if odd { left } else { Vec::new() },
        barriers: random.bits() >> random.below(64),
        tensors: if odd { random.bits() } else { random.below(3) },
        keys_end: if odd { random.bits() } else { random.below(9) },
        adopted: if odd { random.bits() } else { random.below(3) },
        obstacle: random.once_in(20).then(|| "why".to_owned()),
    }))
}

fn known(random: &mut Random) -> NodeMessage {
    let odd = random.once_in(8);
    let said = Declaration {
        name: ["a", "b"][random.index(2)].to_owned(),
        dtype: DType::F32,
        shape: if odd { random.bits() } else { 5 }.into(),
        operation: Operation::Sum,
        device: false,
        members: Members::ALL,
        receiver: None,
        encoding: None,
        store: None,
    };
    let core = Some(CoreId { server: 0, core: 0 });
    let key = Key(if odd { random.bits() } else { random.below(2) });
    let part = Part { key, offset: 0, bytes: 20, core, owner: Rank(0) };
    let tensor = u32::try_from(random.below(if odd { 1 << 32 } else { 2 })).unwrap_or(0);
    let assignment = Assignment { tensor, parts: vec![part; 1], until: None };
    let holds = (0..random.index(3)).map(|_| Key(random.below(3))).collect();
    let adopted = (0..random.index(3)).map(|_| AdoptedKey {
        key: Key(random.below(3)),
        core: u32::try_from(random.below(2)).unwrap_or(0),
        rounds: random.bits() >> random.below(64),
        restores: random.once_in(2),
    });
    let adopted = adopted.collect();
    NodeMessage::Known { tensors: vec![KnownTensor { said, assignment, holds }], adopted }
}

fn message(random: &mut Random) -> NodeMessage {
    if random.once_in(6) {
        return match random.below(9) {
            0..4 => resume(random),
            4..7 => known(random),
            7 => NodeMessage::Asks { another: random.once_in(2) },
            _ => NodeMessage::Deposed { term: u32::try_from(random.below(3)).unwrap_or(0) },
        };
    }
    let number = random.below(4);
    match random.below(12) {
        0..3 => register(random),
        3 => NodeMessage::Heartbeat { rounds: random.bits() },
        4..7 => {
            let name = random.index(4);
            let odd = random.once_in(8);
            let declaration = Declaration {
                name: ["a", "b", "", "a long name"][name].to_owned(),
                dtype: DType::ALL[if odd { random.index(8) } else { name }],
                shape: if odd { random.bits() } else { [5000, 3, 0, 1][name] }.into(),
                operation: [Operation::Sum, Operation::Broadcast(Rank(9))][usize::from(odd)],
                device: false,
                members: if odd || random.once_in(3) {
                    let ranks = (0..3u32).take(1 + random.index(3)).map(Rank);
                    Members::new(ranks.collect()).expect("a set")
                } else {
                    Members::ALL
                },
                receiver: random.once_in(8).then(|| [Rank(0), Rank(2), Rank(9)][random.index(3)]),
                encoding: random.once_in(4).then(|| "bf16".parse().expect("an encoding")),
                store: random.once_in(4).then_some(if random.once_in(2) {
                    Store::Deltas(Deltas { root: Rank(9), staleness: Some(1) })
                } else {
                    Store::Optimizer("adamw".parse().expect("an optimizer"))
                }),
            };
            if random.once_in(3) {
                let one = Replacement { said: declaration, rounds: random.below(3) };
                return NodeMessage::Redeclare { request: number, tensors: vec![one] };
            }
            NodeMessage::Declare { request: number, tensors: vec![declaration; random.index(3)] }
        }
        7 => NodeMessage::Installed { request: number },
        8 => NodeMessage::Barrier { request: number },
        9 => {
            let key = StalledKey {
                key: Key(random.below(6)),
                round: random.bits(),
                waited_ms: random.bits(),
                missing: vec![Rank(0), Rank(u32::MAX)],
                left: vec![Rank(u32::MAX); random.index(2)],
            };
            let late = LateKeys {
                rank: Rank(u32::try_from(random.below(4)).unwrap_or(0)),
                keys: (0..random.below(6)).map(Key).collect(),
                more: random.once_in(2),
            };
            let late = vec![late; random.index(40)];
            NodeMessage::Stalled { keys: vec![key; random.index(40)], late }
        }
        10 if random.once_in(2) => {
            NodeMessage::Overrun { tensor: u32::try_from(number).unwrap_or(0) }
        }
        10 if random.once_in(2) => {
            let run = Pushes {
                first: u32::try_from(random.below(4)).unwrap_or(0),
                tensors: u32::try_from(random.below(3)).unwrap_or(0),
                pushes: random.bits(),
            };
            let pushes = vec![run; random.index(3)];
            NodeMessage::Uneven(match random.index(3) {
                0 => UnevenReport::Joined { pushes },
                1 => UnevenReport::Pushed { pushes },
                _ => UnevenReport::IsRootThere { request: number, tensor: run.first },
            })
        }
        10 => NodeMessage::failed("x".repeat(random.index(300))),
        _ => NodeMessage::Leave { suspend: random.once_in(2) },
    }
}

/// Changes a message as bytes; itself if it is a message no more.
fn spoiled(message: NodeMessage, random: &mut Random) -> NodeMessage {
    let mut bytes = serde_json::to_vec(&message).expect("plain data");
    spoil::mutate(random, &mut bytes);
    serde_json::from_slice(&bytes).unwrap_or(message)
}

/// What the outputs of one job must obey, whatever came in.
#[derive(Default)]
struct Rules {
    connected: HashSet<NodeId>,
    /// Closed by their own end: to close them again does nothing.
    vanished: HashSet<NodeId>,
    over: bool,
    declared: HashSet<CoreId>,
    /// What the server was asked and has not answered.
    installs: Vec<(NodeId, u64)>,
}

impl Rules {
    fn check(&mut self, seed: u64, scheduler: &mut Scheduler) {
        for count in 0.. {
            let Some(output) = scheduler.poll_output() else { return };
            assert!(count < OUTPUTS_MAX, "seed {seed}: the scheduler does not fall silent");
            assert!(!self.over, "seed {seed}: {output:?} after the end");
            match output {
                Output::Send(node, message) => {
                    let known = self.connected.contains(&node);
                    assert!(known, "seed {seed}: {message:?} to {node:?}, which is gone");
                    match message {
                        SchedulerMessage::Declared { tensors, .. } => {
                            let parts = tensors.iter().flat_map(|it| &it.parts);
                            self.declared.extend(parts.filter_map(|part| part.core));
                        }
                        SchedulerMessage::Install { request, .. } => {
                            self.installs.push((node, request));
                        }
                        _ => {}
                    }
                }
                Output::Tuned(_) => {}
                Output::Close(node) => {
                    let open = self.connected.remove(&node) || self.vanished.remove(&node);
                    assert!(open, "seed {seed}: {node:?} is closed twice");
                }
                Output::Log(line) => assert!(line.len() < 4000, "seed {seed}: a line too long"),
                Output::Done(_) => self.over = true,
            }
        }
    }
}

/// The job as it should be: nodes 0 and 1 are workers, node 2 is the server.
fn form(scheduler: &mut Scheduler, rules: &mut Rules) {
    for node in 0..3 {
        let address = std::net::SocketAddr::from(([127, 0, 0, 1], 4000));
        let server = Node::Server {
            cores: vec![address; 2],
            shm: None,
            rdma: false,
            colocated: false,
            preferred: None,
        };
        let said = if node == 2 { server } else { worker(node, 1, 4096) };
        rules.connected.insert(NodeId(node));
        scheduler.handle_connected(NodeId(node), Duration::ZERO);
        scheduler.handle_message(NodeId(node), registered(said, "0.1.0", 1), Duration::ZERO);
        rules.check(0, scheduler);
    }
}

fn play(seed: u64) -> (bool, bool) {
    let mut random = Random::new(seed);
    let mut now = Duration::ZERO;
    let mut scheduler = Scheduler::new(config(seed % 4 >= 2), now);
    let mut rules = Rules::default();
    let mut next = 0;
    if seed.is_multiple_of(2) {
        form(&mut scheduler, &mut rules);
        next = 3;
    }
    for _ in 0..STEPS {
        now += Duration::from_millis(random.below(400));
        let nodes: Vec<NodeId> = rules.connected.iter().copied().collect();
        let node = nodes.get(random.index(nodes.len())).copied();
        match (random.below(12), node) {
            (0, _) | (_, None) => {
                rules.connected.insert(NodeId(next));
                scheduler.handle_connected(NodeId(next), now);
                next += 1;
            }
            (1, Some(node)) if random.once_in(4) => {
                rules.connected.remove(&node);
                rules.vanished.insert(node);
                scheduler.handle_closed(node, "connection closed", now);
            }
            (1, _) => scheduler.handle_tick(now),
            (2..5, _) if !rules.installs.is_empty() => {
                let (node, request) = rules.installs.remove(0);
                scheduler.handle_message(node, NodeMessage::Installed { request }, now);
            }
            (_, Some(node)) => {
                let mut said = message(&mut random);
                // What a rank must not say ends the job, and it is likely here: most of it is left
                // out, or no job would get far.
                let fits = matches!(
                    said,
                    NodeMessage::Heartbeat { .. }
                        | NodeMessage::Declare { .. }
                        | NodeMessage::Redeclare { .. }
                        | NodeMessage::Overrun { .. }
                        | NodeMessage::Barrier { .. }
                );
                if !fits && node.0 < 3 && !random.once_in(20) {
                    said = NodeMessage::Heartbeat { rounds: 1 };
                }
                if random.once_in(10) {
                    said = spoiled(said, &mut random);
                }
                scheduler.handle_message(node, said, now);
            }
        }
        rules.check(seed, &mut scheduler);
        if rules.over {
            break;
        }
    }
    scheduler.handle_stop("the test is over");
    rules.check(seed, &mut scheduler);
    assert!(scheduler.is_over() && rules.over, "seed {seed}: it was stopped and goes on");
    (next > 3, !rules.declared.is_empty())
}

#[test]
fn whatever_nodes_say_the_scheduler_ends_in_order() {
    let (mut crowded, mut declared) = (0, 0);
    for seed in 0..JOBS {
        let (many, some) = play(seed);
        crowded += u32::from(many);
        declared += u32::from(some);
    }
    assert!(crowded > 1000 && declared > 500, "{crowded} crowded jobs, {declared} with tensors");
}
