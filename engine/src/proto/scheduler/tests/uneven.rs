//! Ranks that run out of data before others, and follow what those push.

use super::*;
use crate::proto::store::{Deltas, Store};
use crate::proto::uneven::{FOLLOWED_MAX, Followed, Pushes, UnevenOrder, UnevenReport};

fn pushes(all: &[(u32, u64)]) -> Vec<Pushes> {
    let mut runs = Vec::new();
    for (tensor, pushes) in all {
        Pushes::append(&mut runs, *tensor, *pushes);
    }
    runs
}

fn joined(all: &[(u32, u64)]) -> NodeMessage {
    NodeMessage::Uneven(UnevenReport::Joined { pushes: pushes(all) })
}

fn pushed(all: &[(u32, u64)]) -> NodeMessage {
    NodeMessage::Uneven(UnevenReport::Pushed { pushes: pushes(all) })
}

impl Bench {
    /// A job of ranks without servers' keys: all have declared `a`, and rank 0 has `b`, of ranks 0
    /// and 1, too.
    fn with_tensors(ranks: u32) -> Bench {
        let mut bench = Bench::formed(ranks, 1);
        let members = Members::new(vec![Rank(0), Rank(1)]).unwrap();
        let b = Declaration { members, operation: Operation::Broadcast(Rank(1)), ..tensor("b", 4) };
        for node in 0..u64::from(ranks) {
            bench.declare(node, 1, &[tensor("a", 10)]);
        }
        bench.declare(0, 2, &[b]);
        for node in (0..u64::from(ranks)).chain([100]) {
            bench.heard(node);
        }
        bench
    }

    fn orders(&mut self, node: u64) -> Vec<UnevenOrder> {
        let order = |message| match message {
            SchedulerMessage::Uneven(order) => order,
            other => panic!("node {node} got {other:?}"),
        };
        self.heard(node).into_iter().map(order).collect()
    }

    /// What a node is to follow, in one message.
    fn follows(&mut self, node: u64) -> Vec<(String, u32, u64)> {
        let orders = self.orders(node);
        let [UnevenOrder::Follow { tensors }] = orders.as_slice() else {
            panic!("node {node} got {orders:?}, not one thing to follow")
        };
        let told = |one: &Followed| (one.said.name.clone(), one.tensor, one.pushes);
        tensors.iter().map(told).collect()
    }
}

fn all_joined(last: u32) -> [UnevenOrder; 1] {
    [UnevenOrder::AllJoined { last: Rank(last) }]
}

#[test]
fn a_rank_that_joins_follows_the_others_until_all_have() {
    let mut bench = Bench::with_tensors(3);
    bench.say(1, joined(&[(0, 5)]));
    assert_eq!(bench.orders(0), [UnevenOrder::Report]);
    assert_eq!(bench.orders(2), [UnevenOrder::Report]);
    // Nobody follows before every rank knows that it has to ask.
    bench.say(0, pushed(&[(0, 6), (1, 2)]));
    assert!(bench.orders(1).is_empty());
    bench.say(2, pushed(&[(0, 5)]));
    let [a, b] = [("a".to_owned(), 0, 6), ("b".to_owned(), 1, 2)];
    assert_eq!(bench.follows(1), [a, b]);
    // A rank that is behind says nothing new.
    bench.say(2, pushed(&[(0, 6)]));
    assert!(bench.orders(1).is_empty());
    bench.say(2, pushed(&[(0, 7)]));
    assert_eq!(bench.follows(1), [("a".to_owned(), 0, 7)]);
    // Another one joins: it is told what it lacks, and is asked for nothing.
    bench.say(0, joined(&[(0, 6), (1, 2)]));
    assert_eq!(bench.follows(0), [("a".to_owned(), 0, 7)]);
    assert!(bench.orders(1).is_empty());
    bench.say(2, pushed(&[(0, 8)]));
    for follower in [0, 1] {
        assert_eq!(bench.follows(follower), [("a".to_owned(), 0, 8)]);
    }
    bench.say(2, joined(&[(0, 8)]));
    for node in 0..3 {
        assert_eq!(bench.orders(node), all_joined(2));
    }
    // From then on nothing is said, and what was on its way is of no interest.
    bench.say(2, pushed(&[(0, 9)]));
    bench.say(0, joined(&[(0, 9), (1, 2)]));
    assert!(bench.orders(0).is_empty());
    assert_eq!(bench.orders(1), [UnevenOrder::Report]);
}

#[test]
fn only_its_ranks_follow_a_set_and_its_root_may_have_joined() {
    let mut bench = Bench::with_tensors(3);
    let is_there = NodeMessage::Uneven(UnevenReport::IsRootThere { request: 7, tensor: 1 });
    let root = |joined_after| [UnevenOrder::Root { request: 7, joined_after }];
    bench.say(0, is_there.clone());
    assert_eq!(bench.orders(0), root(None));
    bench.say(2, joined(&[(0, 1)]));
    bench.say(1, joined(&[(0, 1), (1, 3)]));
    assert_eq!(bench.orders(0), [UnevenOrder::Report]);
    assert_eq!(bench.orders(1), [UnevenOrder::Report]);
    bench.say(0, pushed(&[(1, 4)]));
    assert_eq!(bench.follows(1), [("b".to_owned(), 1, 4)]);
    assert!(bench.orders(2).is_empty());
    bench.say(0, is_there);
    assert_eq!(bench.orders(0), root(Some(3)));
    // What is no broadcast has no root, and what is unknown neither.
    for tensor in [0, 77] {
        bench.say(0, NodeMessage::Uneven(UnevenReport::IsRootThere { request: 7, tensor }));
        assert_eq!(bench.orders(0), root(None));
    }
}

#[test]
fn nobody_follows_values_that_servers_keep() {
    let mut bench = Bench::formed(2, 1);
    let store = Some(Store::Deltas(Deltas { root: Rank(0), staleness: None }));
    let stored = Declaration { operation: Operation::Sum, store, ..tensor("w", 4) };
    for node in 0..2 {
        bench.declare(node, 1, &[tensor("a", 10), stored.clone()]);
    }
    for node in [0, 1, 100] {
        bench.heard(node);
    }
    bench.say(1, joined(&[(0, 5), (1, 1)]));
    assert_eq!(bench.orders(0), [UnevenOrder::Report]);
    bench.say(0, pushed(&[(0, 5), (1, 8)]));
    assert!(bench.orders(1).is_empty());
    bench.say(0, pushed(&[(0, 6), (1, 9)]));
    assert_eq!(bench.follows(1), [("a".to_owned(), 0, 6)]);
}

#[test]
fn nobody_follows_what_ranks_disagree_about() {
    let mut bench = Bench::with_tensors(3);
    bench.declare(0, 3, &[tensor("c", 4)]);
    bench.declare(1, 3, &[tensor("c", 5)]);
    for node in [0, 1, 2, 100] {
        bench.heard(node);
    }
    // Rank 0 had pushed it before it heard of that.
    bench.say(1, joined(&[]));
    bench.say(2, pushed(&[]));
    bench.say(0, pushed(&[(0, 1), (2, 1)]));
    assert_eq!(bench.follows(1), [("a".to_owned(), 0, 1)]);
}

#[test]
fn ranks_that_have_joined_are_not_waited_for_at_barriers() {
    let mut bench = Bench::with_tensors(3);
    bench.say(0, NodeMessage::Barrier { request: 4 });
    bench.say(0, NodeMessage::Barrier { request: 5 });
    bench.say(1, joined(&[]));
    assert_eq!(bench.orders(0), [UnevenOrder::Report]);
    bench.say(2, joined(&[]));
    let passed = [4, 5].map(|request| SchedulerMessage::BarrierDone { request });
    assert_eq!(bench.heard(0), passed);
    bench.say(0, joined(&[]));
    for node in 0..3 {
        assert_eq!(bench.orders(node).last(), all_joined(0).last());
    }
    // Then they are again.
    bench.say(0, NodeMessage::Barrier { request: 6 });
    bench.say(1, NodeMessage::Barrier { request: 1 });
    assert!(bench.heard(0).is_empty());
    bench.say(2, NodeMessage::Barrier { request: 1 });
    assert_eq!(bench.heard(0), [SchedulerMessage::BarrierDone { request: 6 }]);
}

#[test]
fn it_is_told_for_whom_those_that_have_joined_wait() {
    let mut bench = Bench::with_tensors(3);
    bench.say(1, joined(&[]));
    bench.say(2, joined(&[]));
    for node in 0..3 {
        bench.orders(node);
    }
    bench.pass(3_000, &[0, 1, 2, 100]);
    let text = "ranks 1, 2 called join() and rank 0 did not; nothing was pushed for 3 s";
    for node in 0..3 {
        assert_eq!(bench.heard(node), [SchedulerMessage::Waiting { text: text.into() }]);
    }
    assert_eq!(bench.done, None);
    // One that leaves instead pushes nothing more either.
    bench.say(0, NodeMessage::Leave { suspend: false });
    for node in [1, 2] {
        assert_eq!(bench.orders(node), all_joined(2));
    }
}

#[test]
fn many_tensors_are_told_in_messages_of_bounded_size() {
    let mut bench = Bench::formed(2, 1);
    let count = u32::try_from(FOLLOWED_MAX + 1).unwrap();
    let all: Vec<Declaration> = (0..count).map(|one| tensor(&format!("t{one}"), 1)).collect();
    bench.declare(0, 1, &all);
    bench.heard(100);
    bench.say(0, joined(&[]));
    assert_eq!(bench.orders(1), [UnevenOrder::Report]);
    let once: Vec<(u32, u64)> = (0..count).map(|tensor| (tensor, 1)).collect();
    bench.say(1, pushed(&once));
    let sizes: Vec<usize> = bench
        .orders(0)
        .iter()
        .map(|order| match order {
            UnevenOrder::Follow { tensors } => tensors.len(),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(sizes, [FOLLOWED_MAX, 1]);
}

#[test]
fn what_no_rank_can_mean_ends_the_job() {
    let far = Pushes { first: 1, tensors: u32::MAX, pushes: 1 };
    let twice = Pushes { first: 0, tensors: 2, pushes: 1 };
    for pushes in [vec![far], vec![twice, twice]] {
        for is_joined in [false, true] {
            let mut bench = Bench::with_tensors(2);
            bench.say(0, joined(&[]));
            let pushes = pushes.clone();
            bench.say(
                1,
                NodeMessage::Uneven(match is_joined {
                    true => UnevenReport::Joined { pushes },
                    false => UnevenReport::Pushed { pushes },
                }),
            );
            assert_eq!(bench.done, Some(Exit::Failed));
        }
    }
    let mut bench = Bench::with_tensors(2);
    bench.say(0, joined(&[]));
    bench.say(0, joined(&[]));
    assert_eq!(bench.done, Some(Exit::Failed));
}
