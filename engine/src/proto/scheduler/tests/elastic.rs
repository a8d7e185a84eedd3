//! A job that outlives its members: who is waited for, who is let in, who is refused, and when it
//! is over all the same.

use super::random::Random;
use super::*;
use crate::proto::paths::{End, LaneFault};

fn elastic(min_workers: u32, patience_ms: u64) -> Elastic {
    let shrinks = false;
    Elastic { shrinks, min_workers, patience: ms(patience_ms), notice: ms(60_000) }
}

pub(super) fn worker(at: u32, session: u64, former: Option<u64>) -> Register {
    Register { session, former, ..worker_register(at, 4, 2) }
}

/// A formed job; worker n is node n and has session 1000 + n, servers are nodes 100, 101, ….
pub(super) fn formed(workers: u32, servers: u32, elastic: Elastic) -> Bench {
    let mut bench = come_together(workers, servers, elastic);
    for at in 0..workers {
        let roster = bench.roster(at.into());
        assert!(roster.elastic && roster.change.is_none());
    }
    (0..servers).for_each(|server| drop(bench.roster(100 + u64::from(server))));
    bench
}

/// The same, of which nobody has read its roster.
pub(super) fn come_together(workers: u32, servers: u32, elastic: Elastic) -> Bench {
    let mut bench = Bench::new(workers, servers);
    bench.scheduler.config.elastic = Some(elastic);
    for server in 0..servers {
        bench.join(100 + u64::from(server), server_register(server, workers, servers));
    }
    for at in 0..workers {
        let session = 1000 + u64::from(at);
        let register = Register { session, ..worker_register(at, workers, servers) };
        bench.join(at.into(), register);
    }
    bench
}

impl Bench {
    /// A rank comes back by another connection, whose session is that number.
    pub(super) fn back(&mut self, old: u64, new: u64, session: u64) {
        self.say(old, NodeMessage::Leave { suspend: true });
        self.close(old);
        self.join(new, worker(9, new, Some(session)));
    }

    pub(super) fn reset(&mut self, server: u64) {
        let epoch = match self.heard(server).last() {
            Some(SchedulerMessage::Reset { epoch }) => *epoch,
            other => panic!("server {server} got {other:?}, not a reset"),
        };
        self.say(server, NodeMessage::ResetDone { epoch });
    }

    pub(super) fn reforming(&mut self, node: u64) -> (OverReason, Epoch) {
        match self.over(node) {
            OverReason::Reforming { reason, epoch } => (*reason, epoch),
            other => panic!("node {node} was told {other:?}"),
        }
    }

    pub(super) fn refusal(&mut self, node: u64) -> String {
        match self.over(node) {
            OverReason::NotFormed { cause } => cause.to_string(),
            other => panic!("node {node} was told {other:?}, not a refusal"),
        }
    }
}

#[test]
fn ranks_that_are_left_form_the_next_epoch_in_their_old_order() {
    let mut bench = formed(4, 2, elastic(1, 0));
    bench.close(1);
    for node in [0, 2, 3] {
        let (reason, epoch) = bench.reforming(node);
        assert_eq!(epoch, Epoch(2));
        assert!(reason.to_string().contains("rank 1 (host w1, pid 1001) died"), "{reason}");
    }
    // The last comes back first, and servers take their time.
    bench.back(3, 13, 1003);
    bench.reset(100);
    bench.back(0, 10, 1000);
    bench.back(2, 12, 1002);
    assert!(bench.heard(10).is_empty(), "server 1 has not reset");
    // What is left of the epoch before says nothing about this one.
    let fault = LaneFault::Error("reset".into());
    bench.say(101, NodeMessage::LaneLost { to: End::Rank(Rank(1)), fault });
    bench.now += ms(250);
    bench.reset(101);
    for (rank, node) in [(0, 10), (1, 12), (2, 13)] {
        let roster = bench.roster(node);
        assert_eq!((roster.index, roster.size, roster.epoch), (rank, 3, Epoch(2)));
        let change = roster.change.unwrap();
        assert!(change.starts_with("epoch 2: 3 ranks and 2 servers go on after 0.250 s: rank 1"));
    }
    assert_eq!(bench.roster(100).size, 3);
    let view = bench.scheduler.view(bench.now);
    assert_eq!((view.deaths, view.reformed), (1, Some(ms(250))));
    let [change] = Vec::from(view.changes.last).try_into().expect("one change");
    assert_eq!((change.number, change.epoch, change.waited), (1, Epoch(2), ms(250)));
    assert_eq!((change.at, view.changes.waited), (bench.now, ms(250)));
    assert!(change.line.starts_with("epoch 2: 3 ranks and 2 servers go on after 0.250 s: rank 1"));
    bench.declare(12, 1, &[tensor("w", 10)]);
    assert!(!bench.installs(100).is_empty());
    for node in [10, 12, 13] {
        bench.say(node, NodeMessage::Leave { suspend: false });
    }
    assert_eq!(bench.done, Some(Exit::Finished));
}

#[test]
fn a_server_that_dies_leaves_the_keys_to_the_others() {
    let mut bench = formed(2, 2, elastic(2, 0));
    bench.close(101);
    bench.reset(100);
    bench.back(0, 10, 1000);
    bench.back(1, 11, 1001);
    assert_eq!(bench.roster(11).servers.len(), 1);
    // The last one cannot be spared.
    bench.close(100);
    let reason = bench.over(10);
    assert!(matches!(reason, OverReason::TooFew { .. }), "{reason:?}");
    assert!(reason.to_string().ends_with("cannot go on: no server left for 2 workers"), "{reason}");
    assert_eq!(bench.done, Some(Exit::Failed));
}

#[test]
fn too_few_ranks_end_the_job_or_wait_for_new_ones() {
    let mut bench = formed(2, 1, elastic(2, 0));
    bench.close(0);
    let reason = bench.over(1).to_string();
    assert!(reason.contains("rank 0 (host w0, pid 1000) died"), "{reason}");
    assert!(reason.ends_with("1 worker of at least 2 (BPS_MIN_WORKERS) left"), "{reason}");
    assert_eq!(bench.done, Some(Exit::Failed));
    // With patience, a new one may come in time.
    for in_time in [true, false] {
        let mut bench = formed(2, 1, elastic(2, 20_000));
        bench.close(0);
        bench.reset(100);
        bench.back(1, 11, 1001);
        bench.pass(10_000, &[11, 100]);
        assert_eq!(bench.done, None);
        if in_time {
            bench.join(20, worker(0, 20, None));
            assert!(matches!(bench.heard(11).last(), Some(SchedulerMessage::Roster(_))));
            assert_eq!(bench.roster(20).index, 1);
        } else {
            bench.pass(10_250, &[11, 100]);
            assert_eq!(bench.done, Some(Exit::Failed));
            assert!(bench.over(11).to_string().contains("BPS_MIN_WORKERS"));
        }
    }
}

#[test]
fn a_death_while_ranks_leave_in_good_order_does_not_fail_the_job() {
    // The last server dies when all have done their work, and some have not said so.
    for before in 0..3 {
        let mut bench = formed(3, 1, elastic(3, 0));
        let leave = NodeMessage::Leave { suspend: false };
        (0..before).for_each(|rank| bench.say(rank, leave.clone()));
        bench.close(100);
        if before == 0 {
            // Nobody can know of the others yet.
            assert!(bench.over(1).to_string().ends_with("no server left for 3 workers"));
            continue;
        }
        for rank in before..3 {
            assert_eq!((bench.done, bench.reforming(rank).1), (None, Epoch(2)));
            bench.say(rank, leave.clone());
        }
        assert_eq!(bench.done, Some(Exit::Finished), "{before} had left");
        assert!(!bench.scheduler.refuses());
    }
    // The last rank dies, or falls silent, when all others have left.
    for is_silent in [false, true] {
        let mut bench = formed(2, 1, elastic(1, 0));
        bench.say(0, NodeMessage::Leave { suspend: false });
        if is_silent {
            bench.pass(10_000, &[100]);
            assert!(matches!(bench.over(1), OverReason::Removed { .. }));
        } else {
            bench.close(1);
        }
        assert_eq!(bench.done, Some(Exit::Finished));
    }
    // Whoever comes back, though others have left, is a job, or too few.
    for min_workers in [1, 2] {
        let mut bench = formed(3, 1, elastic(min_workers, 0));
        bench.close(0);
        bench.reset(100);
        bench.say(1, NodeMessage::Leave { suspend: false });
        assert_eq!(bench.done, None);
        bench.back(2, 12, 1002);
        if min_workers == 1 {
            assert_eq!((bench.roster(12).size, bench.scheduler.view(bench.now).deaths), (1, 1));
        } else {
            assert!(bench.over(12).to_string().contains("BPS_MIN_WORKERS"));
        }
    }
}

#[test]
fn a_rank_that_was_given_up_and_lives_is_refused_by_name() {
    let mut bench = formed(3, 1, elastic(1, 0));
    bench.pass(4_250, &[0, 1, 100]);
    assert!(matches!(bench.over(2), OverReason::Removed { .. }));
    let back = |bench: &mut Bench, node| bench.join(node, worker(2, node, Some(1002)));
    // While the next epoch forms, and while it runs.
    back(&mut bench, 20);
    let refusal = bench.refusal(20);
    assert!(refusal.starts_with("rank 2 (host w2, pid 1002) was given up"), "{refusal}");
    bench.reset(100);
    bench.back(0, 10, 1000);
    bench.back(1, 11, 1001);
    assert_eq!(bench.roster(11).size, 2);
    back(&mut bench, 21);
    assert!(bench.refusal(21).contains("gone on to epoch 2 without it"));
    // As a new worker it is welcome.
    bench.join(22, worker(2, 22, None));
    assert_eq!(bench.heard(10).last(), Some(&SchedulerMessage::Newcomers { count: 1 }));
}

#[test]
fn newcomers_are_let_in_when_all_ranks_have_come_back() {
    let mut bench = formed(2, 1, elastic(1, 0));
    bench.join(20, worker(5, 20, None));
    bench.join(200, server_register(5, 2, 1));
    for node in [0, 1] {
        let news = [1, 2].map(|count| SchedulerMessage::Newcomers { count });
        assert_eq!(bench.heard(node), news);
    }
    // One rank is back before the other has left.
    bench.back(1, 11, 1001);
    bench.back(0, 10, 1000);
    bench.reset(100);
    for (rank, node) in [(0, 10), (1, 11), (2, 20)] {
        let roster = bench.roster(node);
        assert_eq!((roster.index, roster.size, roster.epoch), (rank, 3, Epoch(2)));
        assert_eq!(roster.servers.len(), 2);
        assert!(roster.change.unwrap().ends_with(": 2 nodes new"));
    }
    assert_eq!(bench.scheduler.view(bench.now).deaths, 0);
    // One that gives up waiting is not counted any more.
    bench.join(30, worker(6, 30, None));
    bench.close(30);
    assert_eq!(bench.heard(11).last(), Some(&SchedulerMessage::Newcomers { count: 0 }));
}

#[test]
fn who_dies_or_dawdles_on_the_way_back_is_not_waited_for() {
    // Its connection closes without a good-bye; it leaves for good; it fails: nobody waits.
    type Way = fn(&mut Bench);
    let ways: [Way; 3] = [
        |bench| bench.close(2),
        |bench| bench.say(2, NodeMessage::Leave { suspend: false }),
        |bench| bench.say(2, NodeMessage::failed("out of memory")),
    ];
    for way in ways {
        let mut bench = formed(4, 1, elastic(1, 0));
        bench.close(3);
        bench.reset(100);
        bench.back(0, 10, 1000);
        bench.back(1, 11, 1001);
        assert!(bench.heard(10).is_empty());
        way(&mut bench);
        assert_eq!(bench.roster(10).size, 2);
    }
    // One that said it comes back has ten seconds, and one that says nothing a minute.
    for (says, seconds) in [(true, 10), (false, 60)] {
        let mut bench = formed(3, 1, elastic(1, 0));
        bench.close(2);
        bench.reset(100);
        bench.back(0, 10, 1000);
        if says {
            bench.say(1, NodeMessage::Leave { suspend: true });
            bench.close(1);
        }
        bench.pass(seconds * 1000 - 250, &[10, 100]);
        let heard = bench.heard(10);
        let waits = |one: &SchedulerMessage| matches!(one, SchedulerMessage::Waiting { .. });
        assert!(!heard.is_empty() && heard.iter().all(waits), "{heard:?}");
        bench.pass(500, &[10, 100]);
        assert_eq!(bench.roster(10).size, 1);
        bench.join(11, worker(1, 11, Some(1001)));
        assert!(bench.refusal(11).starts_with("rank 1 (host w1, pid 1001) was given up"));
    }
    // A server that does not reset is dead.
    let mut bench = formed(2, 2, elastic(1, 0));
    bench.close(1);
    bench.back(0, 10, 1000);
    bench.reset(100);
    bench.pass(15_250, &[10, 100, 101]);
    let Some(SchedulerMessage::Roster(roster)) = bench.heard(100).pop() else { panic!() };
    assert_eq!((roster.size, roster.servers.len()), (1, 1));
}

#[test]
fn ranks_on_their_way_back_are_told_of_the_end() {
    let mut bench = formed(3, 1, elastic(2, 0));
    bench.close(2);
    bench.say(1, NodeMessage::Leave { suspend: true });
    bench.close(1);
    bench.close(0);
    assert_eq!(bench.done, Some(Exit::Failed));
    assert!(bench.scheduler.refuses() && !bench.scheduler.has_told_everybody());
    bench.scheduler.handle_connected(NodeId(11), bench.now);
    let register = NodeMessage::Register(worker(1, 11, Some(1001)));
    bench.scheduler.handle_message(NodeId(11), register, bench.now);
    let told = bench.scheduler.poll_output();
    let Some(Output::Send(_, SchedulerMessage::Over { reason })) = told else {
        panic!("{told:?}");
    };
    assert!(reason.to_string().contains("BPS_MIN_WORKERS"), "{reason}");
    assert!(bench.scheduler.has_told_everybody());
}

#[test]
fn a_path_that_stays_broken_ends_the_job() {
    let mut bench = formed(2, 1, elastic(1, 0));
    let mut nodes = [0, 1];
    let mut sessions = [1000, 1001];
    for turn in 0..4 {
        let fault = LaneFault::Error("reset".into());
        bench.say(nodes[0], NodeMessage::LaneLost { to: End::Server(0), fault });
        bench.pass(1_000, &[nodes[0], nodes[1], 100]);
        if turn == 3 {
            break;
        }
        bench.reset(100);
        for at in 0..2 {
            let new = nodes[at] + 10;
            bench.back(nodes[at], new, sessions[at]);
            (nodes[at], sessions[at]) = (new, new);
        }
        assert_eq!(bench.roster(nodes[1]).size, 2);
        bench.roster(nodes[0]);
        bench.roster(100);
    }
    assert!(matches!(bench.over(nodes[0]), OverReason::PathLost(_)));
    assert_eq!(bench.done, Some(Exit::Failed));
}

/// A process of the model below.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Life {
    /// In the job, or waiting to be, on this node and with this session.
    Joined(u64),
    /// Told that the epoch is over, and still on that connection.
    Told(u64),
    /// Between two connections.
    Away(u64),
    Dead,
}

/// Every process of a job, killed at random moments; what it was told decides what it does next.
struct Model {
    bench: Bench,
    workers: Vec<Life>,
    servers: Vec<(u64, bool)>,
    /// Servers that were let go.
    released: u32,
    next: u64,
}

impl Model {
    fn read(&mut self, seed: u64) {
        for life in &mut self.workers {
            let Life::Joined(node) = *life else { continue };
            for message in self.bench.inboxes.remove(&NodeId(node)).unwrap_or_default() {
                if let SchedulerMessage::Over { reason } = message {
                    let goes_on = matches!(reason, OverReason::Reforming { .. });
                    assert!(goes_on || self.bench.done.is_some(), "seed {seed}: {reason}");
                    *life = if goes_on { Life::Told(node) } else { Life::Dead };
                }
            }
        }
    }

    fn act(&mut self, random: &mut Random, kills: bool) {
        let at = usize::try_from(random.below(self.workers.len() as u64)).unwrap();
        match self.workers[at] {
            Life::Dead if kills && random.one_in(30) => {
                self.next += 1;
                self.bench.join(self.next, worker(9, self.next, None));
                self.workers[at] = Life::Joined(self.next);
            }
            Life::Dead => {}
            Life::Joined(node) | Life::Told(node) if kills && random.one_in(12) => {
                self.bench.close(node);
                self.workers[at] = Life::Dead;
            }
            Life::Away(_) if kills && random.one_in(12) => self.workers[at] = Life::Dead,
            Life::Told(node) => {
                self.bench.say(node, NodeMessage::Leave { suspend: true });
                self.bench.close(node);
                self.workers[at] = Life::Away(node);
            }
            Life::Away(session) => {
                self.next += 1;
                self.bench.join(self.next, worker(9, self.next, Some(session)));
                self.workers[at] = Life::Joined(self.next);
            }
            Life::Joined(_) => {}
        }
        for (node, alive) in &mut self.servers {
            if *alive && kills && random.one_in(200) {
                *alive = false;
                self.bench.close(*node);
            } else if *alive && kills && random.one_in(100) {
                self.bench.say(*node, NodeMessage::Leave { suspend: false });
            }
            for message in self.bench.inboxes.remove(&NodeId(*node)).unwrap_or_default() {
                match message {
                    SchedulerMessage::Reset { epoch } if *alive => {
                        self.bench.say(*node, NodeMessage::ResetDone { epoch });
                    }
                    SchedulerMessage::Over { reason: OverReason::Left { .. } } => {
                        *alive = false;
                        self.released += 1;
                    }
                    _ => {}
                }
            }
        }
    }

    fn pass(&mut self, milliseconds: u64) {
        let servers = self.servers.iter().filter(|one| one.1).map(|one| one.0);
        let workers = self.workers.iter().filter_map(|life| match life {
            Life::Joined(node) => Some(*node),
            _ => None,
        });
        let alive: Vec<u64> = servers.chain(workers).collect();
        self.bench.pass(milliseconds, &alive);
    }
}

#[test]
fn kills_at_any_moment_leave_a_job_of_all_who_live_or_none() {
    let (mut formed_again, mut ended, mut released) = (0, 0, 0);
    for seed in 0..2_000 {
        let mut random = Random::new(seed);
        let (workers, servers) = (2 + random.small(5), 1 + random.small(2));
        let mut model = Model {
            bench: formed(workers, servers, elastic(1 + random.small(2), 0)),
            workers: (0..u64::from(workers)).map(Life::Joined).collect(),
            servers: (0..u64::from(servers)).map(|at| (100 + at, true)).collect(),
            released: 0,
            next: 10_000,
        };
        // The first sessions are not the nodes' own.
        for (at, session) in (0..workers).zip(1000..) {
            let register = worker(at, u64::from(at), None);
            assert_ne!(register.session, session);
            model.bench.scheduler.peers.get_mut(&NodeId(at.into())).unwrap().session =
                Some(at.into());
            let Phase::Running(running) = &mut model.bench.scheduler.phase else { panic!() };
            running.job.workers[at as usize].1.session = at.into();
        }
        for _ in 0..60 + random.below(100) {
            model.act(&mut random, true);
            model.read(seed);
            if random.one_in(6) {
                model.pass(250);
            }
            if model.bench.done.is_some() {
                break;
            }
        }
        // From here on nobody dies: all who live are together within the time of the slowest.
        for _ in 0..80 * workers {
            if model.bench.done.is_some() {
                break;
            }
            model.act(&mut random, false);
            model.read(seed);
            if random.one_in(4) {
                model.pass(250);
            }
        }
        released += model.released;
        if model.bench.done.is_some() {
            ended += 1;
            continue;
        }
        for _ in 0..8 {
            model.pass(10_000);
            model.read(seed);
            (0..80 * workers).for_each(|_| model.act(&mut random, false));
        }
        if model.bench.done.is_some() {
            ended += 1;
            continue;
        }
        let Phase::Running(running) = &model.bench.scheduler.phase else {
            panic!("seed {seed}: it still forms: {:?}", model.bench.log.last());
        };
        formed_again += u32::from(model.bench.scheduler.epoch > Epoch(1));
        let members: BTreeSet<u64> = running.job.workers.iter().map(|(node, _)| node.0).collect();
        assert_eq!(members.len(), running.job.workers.len(), "seed {seed}: a rank twice");
        for life in &model.workers {
            let Life::Joined(node) = life else {
                assert_eq!(*life, Life::Dead, "seed {seed}");
                continue;
            };
            let peer = &model.bench.scheduler.peers[&NodeId(*node)].standing;
            let rank = running.job.workers.iter().position(|(member, _)| member.0 == *node);
            match peer {
                Standing::Worker(Rank(known)) => assert_eq!(rank, Some(*known as usize)),
                Standing::Early(_) => assert_eq!(rank, None, "seed {seed}"),
                _ => panic!("seed {seed}: node {node} is in limbo"),
            }
        }
    }
    assert!(formed_again > 500 && ended > 50, "{formed_again} formed again, {ended} ended");
    assert!(released > 100, "{released} servers were let go");
}
