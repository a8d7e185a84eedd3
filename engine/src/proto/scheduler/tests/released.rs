//! Servers that leave an elastic job in good order: when they are let go, and when they are not.

use super::elastic::{formed, worker};
use super::*;
use crate::proto::moving::MovingOrder;

fn elastic(shrinks: bool) -> Elastic {
    Elastic { shrinks, min_workers: 1, patience: ms(0), notice: ms(60_000) }
}

const GO: NodeMessage = NodeMessage::Leave { suspend: false };

impl Bench {
    fn newcomers(&mut self, node: u64) -> Vec<u32> {
        let count = |message| match message {
            SchedulerMessage::Newcomers { count } => count,
            other => panic!("node {node} got {other:?}"),
        };
        self.heard(node).into_iter().map(count).collect()
    }

    /// The server was told that the job goes on without it, and nothing else.
    fn is_let_go(&mut self, node: u64) {
        match self.heard(node).as_slice() {
            [SchedulerMessage::Over { reason: OverReason::Left { who } }] => {
                assert!(matches!(who.party, Party::Server(_)), "{who}");
            }
            other => panic!("server {node} got {other:?}"),
        }
        assert!(self.closed.contains(&NodeId(node)));
    }

    fn deaths(&self) -> u64 {
        self.scheduler.view(self.now).deaths
    }

    /// Two ranks come back by connections of which the first is this.
    fn both_return(&mut self, old: u64, new: u64, session: u64) {
        self.back(old, new, session);
        self.back(old + 1, new + 1, session + 1);
    }
}

#[test]
fn a_server_is_let_go_when_the_ranks_form_the_job_again() {
    let mut bench = formed(2, 2, elastic(false));
    bench.say(101, GO);
    bench.say(101, GO);
    assert_eq!((bench.newcomers(0), bench.newcomers(1)), (vec![1], vec![1]));
    let said = "server 1 (host s1, pid 2001) is to leave: it does when the job forms next";
    assert!(bench.log.last().unwrap().starts_with(said), "{:?}", bench.log);
    // It serves until then.
    bench.declare(0, 1, &[tensor("w", 8 * 1024)]);
    assert!(!bench.installs(101).is_empty());
    bench.pass(1_000, &[0, 1, 100, 101]);
    assert!(bench.heard(101).is_empty() && bench.done.is_none());
    bench.both_return(0, 10, 1000);
    bench.is_let_go(101);
    bench.reset(100);
    let roster = bench.roster(10);
    assert_eq!((roster.size, roster.servers.len(), roster.epoch), (2, 1, Epoch(2)));
    let change = roster.change.unwrap();
    assert!(change.starts_with("epoch 2: 2 ranks and 1 server go on after "), "{change}");
    assert!(change.ends_with(" s: server 1 (host s1, pid 2001) left"), "{change}");
    bench.close(101);
    assert_eq!((bench.deaths(), bench.done), (0, None));
    bench.roster(11);
    bench.pass(1_000, &[10, 11, 100]);
    assert!(bench.heard(10).is_empty() && bench.heard(11).is_empty());
}

#[test]
fn the_last_server_stays_until_another_has_come() {
    let mut bench = formed(2, 2, elastic(false));
    bench.say(100, GO);
    bench.say(101, GO);
    // One of them can go.
    assert_eq!(bench.newcomers(1), [1, 1]);
    bench.both_return(0, 10, 1000);
    bench.is_let_go(100);
    bench.reset(101);
    assert_eq!(bench.roster(10).servers.len(), 1);
    assert_eq!((bench.roster(11).epoch, bench.roster(101).epoch), (Epoch(2), Epoch(2)));
    bench.join(200, server_register(5, 2, 2));
    assert_eq!(bench.newcomers(11), [2]);
    bench.both_return(10, 20, 10);
    bench.is_let_go(101);
    bench.pass(250, &[20, 21, 200]);
    let roster = bench.roster(21);
    assert_eq!((roster.servers.len(), roster.epoch), (1, Epoch(3)));
    let change = roster.change.unwrap();
    assert!(change.ends_with("server 0 (host s1, pid 2001) left, 1 node new"), "{change}");
    assert_eq!(bench.deaths(), 0);
}

#[test]
fn a_death_lets_servers_go_too() {
    let mut bench = formed(3, 2, elastic(false));
    bench.say(101, GO);
    bench.close(1);
    bench.is_let_go(101);
    bench.reset(100);
    bench.back(0, 10, 1000);
    bench.back(2, 12, 1002);
    let roster = bench.roster(12);
    assert_eq!((roster.size, roster.servers.len()), (2, 1));
    let change = roster.change.unwrap();
    assert!(change.contains(": rank 1 (host w1, pid 1001) died"), "{change}");
    assert!(change.ends_with("; server 1 (host s1, pid 2001) left"), "{change}");
    assert_eq!(bench.deaths(), 1);
}

#[test]
fn a_server_that_is_to_leave_is_kept_when_the_other_one_dies() {
    for silent in [false, true] {
        let mut bench = formed(1, 2, elastic(false));
        bench.say(101, GO);
        assert_eq!(bench.newcomers(0), [1]);
        if silent {
            bench.pass(5_000, &[0, 101]);
        } else {
            bench.close(100);
        }
        let (reason, _) = bench.reforming(0);
        assert!(matches!(reason, OverReason::Died { .. }), "{reason}");
        bench.reset(101);
        bench.back(0, 10, 1000);
        assert_eq!(bench.roster(10).servers.len(), 1);
        // When its time is up it says so, and the job has no server.
        bench.say(101, NodeMessage::failed("it was stopped"));
        assert!(matches!(bench.over(10), OverReason::TooFew { .. }));
    }
}

#[test]
fn one_that_dies_before_it_is_let_go_is_dead() {
    let mut bench = formed(2, 2, elastic(false));
    bench.say(101, GO);
    bench.close(101);
    assert!(matches!(bench.reforming(0).0, OverReason::Died { .. }));
    bench.reset(100);
    bench.both_return(0, 10, 1000);
    let change = bench.roster(10).change.unwrap();
    assert!(change.contains("server 1 (host s1, pid 2001) died"), "{change}");
    assert_eq!(bench.deaths(), 1);
}

#[test]
fn one_that_is_to_leave_while_the_job_forms_again_is_let_go_after_the_next_epoch() {
    let mut bench = formed(2, 2, elastic(false));
    bench.back(0, 10, 1000);
    bench.say(1, NodeMessage::Leave { suspend: true });
    bench.reset(100);
    bench.say(101, GO);
    bench.reset(101);
    bench.close(1);
    bench.join(11, worker(9, 11, Some(1001)));
    let heard = bench.heard(10);
    assert!(matches!(&heard[0], SchedulerMessage::Roster(roster) if roster.servers.len() == 2));
    assert_eq!(heard[1..], [SchedulerMessage::Newcomers { count: 1 }]);
}

/// Ranks have their lanes.
fn with_lanes(bench: &mut Bench, ranks: std::ops::Range<u64>) {
    for node in ranks {
        let counted = Statistics { uptime: 0.1, resident_bytes: 0, link: None, loops: Vec::new() };
        bench.say(node, NodeMessage::Statistics(counted));
    }
}

#[test]
fn keys_of_a_server_that_leaves_move_at_once_where_they_can() {
    let mut bench = formed(3, 2, elastic(true));
    with_lanes(&mut bench, 0..3);
    bench.say(101, GO);
    bench.is_let_go(101);
    for node in [0, 1, 2, 100] {
        let heard = bench.heard(node);
        let [SchedulerMessage::Moving(MovingOrder::Lost { servers, text })] = &heard[..] else {
            panic!("node {node} got {heard:?}");
        };
        let line = "1 server of 2 goes on without server 1: server 1 (host s1, pid 2001) left";
        assert_eq!((&servers[..], text.as_str()), (&[1][..], line));
    }
    bench.close(101);
    assert_eq!((bench.deaths(), bench.done), (0, None));
    // The other one is needed.
    bench.say(100, GO);
    assert_eq!(bench.newcomers(0), [0]);
    bench.pass(1_000, &[0, 1, 2, 100]);
    assert!(bench.heard(100).is_empty());
}

#[test]
fn keys_that_can_not_move_yet_do_as_soon_as_they_can() {
    let mut bench = formed(3, 2, elastic(true));
    bench.say(101, GO);
    // Ranks open their lanes.
    assert_eq!(bench.newcomers(2), [1]);
    bench.pass(500, &[0, 1, 2, 100, 101]);
    assert!(bench.heard(101).is_empty());
    with_lanes(&mut bench, 0..3);
    bench.pass(250, &[]);
    bench.is_let_go(101);
    assert_eq!(bench.deaths(), 0);
}

#[test]
fn a_server_can_not_leave_a_job_that_ends_with_its_members() {
    let mut bench = Bench::formed(2, 2);
    bench.say(101, GO);
    let reason = bench.over(0).to_string();
    assert!(reason.ends_with("failed: it left while the job went on"), "{reason}");
}
