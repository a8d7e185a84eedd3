//! A job that goes on without ranks that die: nobody waits for them, and what only they could do
//! ends the epoch.

use super::elastic::{formed, worker};
use super::sets::{answer_installs, of_hosts};
use super::*;
use crate::proto::paths::{End, LaneFault};
use crate::proto::store::{Deltas, Store, StoreFault};
use crate::proto::unserved::Unserved;

fn shrinks(min_workers: u32) -> Elastic {
    Elastic { shrinks: true, min_workers, patience: ms(0), notice: ms(60_000) }
}

impl Bench {
    /// Whom the job goes on without, as the node was last told, and the line about it.
    fn gone(&mut self, node: u64) -> (Vec<u32>, String) {
        let heard = self.heard(node);
        let told = heard.iter().rev().find_map(|message| match message {
            SchedulerMessage::Shrunk(shrunk) => Some(shrunk),
            _ => None,
        });
        let told = told.unwrap_or_else(|| panic!("node {node} got {heard:?}"));
        (told.gone.iter().map(|rank| rank.0).collect(), told.text.clone())
    }
}

#[test]
fn nobody_waits_for_a_rank_that_has_died() {
    let mut bench = formed(4, 2, shrinks(2));
    bench.declare(0, 1, &[tensor("w", 10)]);
    let installs = bench.installs(100);
    let key = installs[0].1[0].key;
    for node in [0, 2, 3] {
        bench.say(node, NodeMessage::Barrier { request: node });
    }
    bench.pass(4_000, &[0, 1, 2, 3, 100, 101]);
    for node in [0, 2, 3, 100, 101] {
        bench.heard(node);
    }
    bench.close(1);
    for node in [0, 2, 3, 100, 101] {
        let line = "3 ranks of 4 go on without rank 1: rank 1 (host w1, pid 1001) died";
        let heard = bench.inboxes.get(&NodeId(node)).cloned().unwrap_or_default();
        let passes = SchedulerMessage::BarrierDone { request: node };
        assert_eq!(heard.contains(&passes), node < 100, "{heard:?}");
        let (gone, text) = bench.gone(node);
        assert!(gone == [1] && text.starts_with(line), "{gone:?} {text}");
    }
    let view = bench.scheduler.view(bench.now);
    assert_eq!((view.epoch, view.ranks, view.deaths), (1, 3, 1));
    assert!(view.stalls.is_empty(), "{:?}", view.stalls);
    // What servers say that have not heard of it, or do since, is no fault of anybody.
    let fault = LaneFault::Error("reset".into());
    bench.say(101, NodeMessage::LaneLost { to: End::Rank(Rank(1)), fault });
    let (missing, left) = (vec![Rank(1)], vec![Rank(1)]);
    let keys = vec![StalledKey { key, round: 1, waited_ms: 200_000, missing, left }];
    let late = vec![LateKeys { rank: Rank(1), keys: vec![key], more: false }];
    bench.say(100, NodeMessage::Stalled { keys, late });
    bench.pass(5_000, &[0, 2, 3, 100, 101]);
    assert_eq!(bench.done, None);
    assert!(bench.heard(0).is_empty(), "nobody is late");
    // The next one is told behind the first, for results name them in this order.
    bench.close(0);
    assert_eq!(bench.gone(2).0, [1, 0]);
    // Those that are left must all come, and they are enough.
    bench.say(2, NodeMessage::Barrier { request: 7 });
    assert!(bench.heard(2).is_empty());
    bench.say(3, NodeMessage::Barrier { request: 8 });
    assert_eq!(bench.heard(2), [SchedulerMessage::BarrierDone { request: 7 }]);
    for node in [2, 3] {
        assert_eq!(bench.done, None);
        bench.say(node, NodeMessage::Leave { suspend: false });
    }
    assert_eq!(bench.done, Some(Exit::Finished));
}

#[test]
fn too_few_ranks_and_a_server_end_the_epoch() {
    let mut bench = formed(3, 2, shrinks(2));
    bench.close(2);
    assert_eq!(bench.gone(1).0, [2]);
    bench.close(1);
    let reason = bench.over(0);
    assert!(matches!(reason, OverReason::TooFew { .. }), "{reason:?}");
    let mut bench = formed(3, 2, shrinks(1));
    bench.close(2);
    // What the server keeps between rounds is lost with it.
    let store = Some(Store::Deltas(Deltas { root: Rank(0), staleness: None }));
    bench.declare(0, 1, &[Declaration { operation: Operation::Sum, store, ..tensor("kept", 10) }]);
    bench.heard(100);
    bench.close(101);
    for node in [0, 1] {
        assert_eq!(bench.reforming(node).1, Epoch(2));
    }
    bench.reset(100);
    bench.back(0, 10, 1000);
    bench.back(1, 11, 1001);
    let roster = bench.roster(11);
    assert_eq!((roster.index, roster.size, roster.shrinks), (1, 2, true));
    let view = bench.scheduler.view(bench.now);
    assert_eq!((view.epoch, view.ranks, view.deaths), (2, 2, 2));
}

#[test]
fn what_only_the_dead_could_do_ends_the_epoch() {
    let store = Some(Store::Deltas(Deltas { root: Rank(1), staleness: None }));
    let stored = Declaration { operation: Operation::Sum, store, ..tensor("stored", 10) };
    let all = "can't go on without rank 1: there are tensors with an optimizer, or encoded as";
    let encoding = Some("auto".parse().unwrap());
    let chosen = Declaration { encoding, ..tensor("chosen", 1 << 20) };
    let store = Some(Store::Optimizer("sgd".parse().unwrap()));
    let stepped = Declaration { operation: Operation::Average, store, ..tensor("stepped", 10) };
    for (said, why) in [
        (stored, "can't go on without rank 1: stored tensors begin with its value"),
        (chosen, all),
        (stepped, all),
    ] {
        let mut bench = formed(3, 1, shrinks(1));
        bench.declare(0, 1, &[said]);
        bench.close(1);
        assert_eq!(bench.reforming(0).1, Epoch(2));
        assert!(bench.log.iter().any(|line| line.contains(why)), "{:?}", bench.log);
    }
}

/// Two hosts of two ranks and one alone, of which all but `least` may die.
fn hosts(least: u32) -> Bench {
    let mut bench = of_hosts(&[2, 2, 1], 1);
    bench.scheduler.config.elastic = Some(shrinks(least));
    bench
}

#[test]
fn a_host_is_lost_with_all_of_its_ranks() {
    let mut bench = hosts(1);
    let on_gpu = Declaration { device: true, ..tensor("gpu", 10) };
    bench.declare(0, 1, &[on_gpu]);
    for node in [0, 1, 4] {
        bench.say(node, NodeMessage::Barrier { request: node });
    }
    bench.close(3);
    assert!(bench.heard(0).iter().all(|heard| !matches!(heard, SchedulerMessage::Shrunk(_))));
    let asks = "are the others of its host, with which it sums, lost as well?";
    assert!(bench.log.iter().any(|line| line.contains(asks)), "{:?}", bench.log);
    bench.pass(250, &[0, 1, 2, 4, 100]);
    // Its kernel takes a while to end it.
    bench.pass(1_500, &[0, 1, 4, 100]);
    bench.close(2);
    let line = "3 ranks of 5 go on without ranks 2, 3 of one host: rank 3 (host w3, pid 1003) died";
    for node in [0, 1, 4, 100] {
        let heard = bench.inboxes.get(&NodeId(node)).cloned().unwrap_or_default();
        let passes = SchedulerMessage::BarrierDone { request: node };
        assert_eq!(heard.contains(&passes), node < 100, "{heard:?}");
        let (gone, text) = bench.gone(node);
        assert!(gone == [2, 3] && text.starts_with(line), "{gone:?} {text}");
    }
    // One alone is done without at once, and the epoch lasts.
    bench.close(4);
    assert_eq!(bench.gone(0).0, [2, 3, 4]);
    bench.pass(5_000, &[0, 1, 100]);
    let view = bench.scheduler.view(bench.now);
    assert_eq!((view.epoch, view.ranks, view.deaths), (1, 2, 3));
}

#[test]
fn one_rank_of_a_host_that_lives_ends_the_epoch() {
    let mut bench = hosts(1);
    bench.close(3);
    bench.pass(250, &[0, 1, 2, 4, 100]);
    // A host that falls meanwhile is another matter.
    bench.close(0);
    bench.close(1);
    assert_eq!(bench.gone(4).0, [0, 1]);
    bench.pass(250, &[2, 4, 100]);
    assert_eq!(bench.reforming(4).1, Epoch(2));
    let why = "can't go on without rank 3: it summed with other ranks of its host, and not all";
    assert!(bench.log.iter().any(|line| line.contains(why)), "{:?}", bench.log);
    // Of one that is neither heard nor gone it can't be told for long.
    let mut bench = hosts(1);
    bench.close(3);
    bench.pass(1_750, &[0, 1, 4, 100]);
    let heard = bench.heard(0);
    assert!(heard.iter().all(|heard| !matches!(heard, SchedulerMessage::Over { .. })), "{heard:?}");
    bench.pass(250, &[0, 1, 4, 100]);
    assert_eq!(bench.reforming(0).1, Epoch(2));
    // Where a whole host can't be spared, nothing is waited for.
    let mut bench = hosts(4);
    bench.close(3);
    assert_eq!(bench.reforming(0).1, Epoch(2));
}

#[test]
fn a_machine_that_falls_silent_takes_its_ranks_along() {
    // Of ranks 2 and 3 the first was heard before the other, or goes on to be.
    for lives in [false, true] {
        let mut bench = hosts(1);
        bench.pass(1_000, &[0, 1, 3, 4, 100]);
        let alive: &[u64] = if lives { &[0, 1, 3, 4, 100] } else { &[0, 1, 4, 100] };
        bench.pass(3_250, alive);
        let is_told = bench.log.iter().any(|line| line.contains("rank 2 (host w2, pid 1002) died"));
        assert!(is_told, "{:?}", bench.log);
        if lives {
            assert_eq!(bench.reforming(0).1, Epoch(2));
            continue;
        }
        assert!(bench.heard(0).iter().all(|heard| !matches!(heard, SchedulerMessage::Shrunk(_))));
        bench.pass(1_000, alive);
        let (gone, text) = bench.gone(0);
        assert!(gone == [2, 3] && text.contains("ranks 2, 3 of one host"), "{gone:?} {text}");
    }
}

#[test]
fn what_needs_the_dead_is_refused() {
    let mut bench = formed(3, 1, shrinks(1));
    bench.close(1);
    for node in [0, 2] {
        assert_eq!(bench.gone(node).0, [1]);
    }
    let store = Some(Store::Optimizer("sgd".parse().unwrap()));
    let stepped = Declaration { operation: Operation::Average, store, ..tensor("stepped", 10) };
    let deltas = |root| Some(Store::Deltas(Deltas { root: Rank(root), staleness: None }));
    let stored = |root| Declaration {
        operation: Operation::Sum,
        store: deltas(root),
        ..tensor(&format!("stored {root}"), 10)
    };
    for (request, said) in [(1, stepped), (2, stored(1))] {
        let name = said.name.clone();
        bench.declare(0, request, &[said]);
        let heard = bench.heard(0);
        let gone = StoreFault::Gone { rank: Rank(1) };
        let refused = format!("{:?}", Unserved::Store { tensor: name, fault: gone });
        assert!(format!("{heard:?}").contains(&refused), "{heard:?}");
    }
    bench.declare(0, 3, &[stored(2)]);
    assert!(!format!("{:?}", bench.heard(0)).contains("Gone"));
}

#[test]
fn a_rank_that_was_given_up_and_lives_is_told_so() {
    let mut bench = formed(3, 1, shrinks(1));
    bench.pass(4_250, &[0, 1, 100]);
    assert!(matches!(bench.over(2), OverReason::Removed { .. }));
    assert_eq!(bench.gone(0).0, [2]);
    bench.join(20, worker(2, 20, Some(1002)));
    let refusal = bench.refusal(20);
    assert!(refusal.starts_with("rank 2 (host w2, pid 1002) was given up"), "{refusal}");
    // As a new worker it is let in with the next epoch, with which numbers are without gaps.
    bench.join(22, worker(2, 22, None));
    assert_eq!(bench.heard(0).last(), Some(&SchedulerMessage::Newcomers { count: 1 }));
    bench.back(0, 10, 1000);
    bench.back(1, 11, 1001);
    bench.reset(100);
    for (rank, node) in [(0, 10), (1, 11), (2, 22)] {
        let roster = bench.roster(node);
        assert_eq!((roster.index, roster.size), (rank, 3));
    }
}

#[test]
fn names_are_declared_anew_without_the_dead() {
    let mut bench = formed(3, 1, shrinks(1));
    bench.declare(0, 1, &[tensor("w", 10)]);
    bench.declare(1, 1, &[tensor("w", 10)]);
    answer_installs(&mut bench, 1);
    bench.close(2);
    bench.heard(100);
    // Far more often than a rank may be ahead of another.
    for turn in 0..u64::from(2 * u32::try_from(ERAS_MAX).unwrap()) {
        let tensors = vec![Replacement { said: tensor("w", 20 + turn % 2), rounds: turn + 1 }];
        for node in [0, 1] {
            bench.heard(node);
            let tensors = tensors.clone();
            bench.say(node, NodeMessage::Redeclare { request: turn, tensors });
            for message in bench.heard(100) {
                if let SchedulerMessage::Install { request, .. } = message {
                    bench.say(100, NodeMessage::Installed { request });
                }
            }
            let heard = bench.heard(node);
            let is_served =
                |one: &SchedulerMessage| matches!(one, SchedulerMessage::Declared { .. });
            assert!(heard.iter().any(is_served), "turn {turn}, node {node}: {heard:?}");
        }
    }
}
