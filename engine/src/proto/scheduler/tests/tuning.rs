//! Jobs that tune themselves: how ranks come to other parts at the same round.

use super::*;
use crate::limits::DECLARE_PARTS_MAX;
use crate::proto::tuning::{TuneOrder, TuneReport};
use crate::proto::uneven::Pushes;

const BOTH: Tuning = Tuning { credit: true, partition: true, credit_parts: 2 };

/// A job of two ranks and a server with two cores, with parts of so many bytes.
fn formed(tuning: Tuning, partition_bytes: u32) -> Bench {
    let mut bench = Bench::new(2, 1);
    for worker in 0..2 {
        let mut register = worker_register(worker, 2, 1);
        let Node::Worker { planning, .. } = &mut register.node else { unreachable!() };
        (planning.tuning, planning.partition_bytes) = (tuning, partition_bytes);
        bench.join(worker.into(), register);
    }
    bench.join(100, server_register(0, 2, 1));
    for node in [0, 1, 100] {
        bench.roster(node);
    }
    bench
}

/// The same, with parts of 4096 bytes. `a` is large, `b` of
/// one part, `c` is known to the first rank alone.
fn tuning(tuning: Tuning) -> Bench {
    let mut bench = formed(tuning, 4096);
    bench.declare(0, 1, &[tensor("a", 16_000), tensor("b", 100), tensor("c", 16_100)]);
    bench.declare(1, 1, &[tensor("a", 16_000), tensor("b", 100)]);
    bench.install();
    bench.heard(0);
    bench.heard(1);
    bench
}

fn run(first: u32, pushes: u64) -> Pushes {
    Pushes { first, tensors: 1, pushes }
}

impl Bench {
    /// The server makes room for all that it was asked to: the first keys and how many there are.
    fn install(&mut self) -> Vec<(u64, usize)> {
        let heard = self.heard(100);
        let mut told = Vec::new();
        for message in heard {
            let SchedulerMessage::Install { request, keys } = message else {
                panic!("the server got {message:?}");
            };
            told.push((keys[0].key.0, keys.len()));
            self.say(100, NodeMessage::Installed { request });
        }
        told
    }

    fn paced(&mut self, node: u64, trial: u32, bytes_per_second: f64) {
        let report = TuneReport::Paced { trial, bytes_per_second };
        self.say(node, NodeMessage::Tune(report));
    }

    fn held(&mut self, node: u64, trial: u32, rounds: Vec<Pushes>) {
        self.say(node, NodeMessage::Tune(TuneReport::Held { trial, rounds }));
    }

    /// The only order that a rank has got since it was last asked.
    fn order(&mut self, node: u64) -> TuneOrder {
        match self.heard(node).as_slice() {
            [SchedulerMessage::Tune(order)] => order.clone(),
            other => panic!("{other:?}, not an order"),
        }
    }

    fn retired(&mut self) -> Vec<(u64, u64)> {
        let heard = self.heard(100).into_iter();
        let keys = heard.flat_map(|message| match message {
            SchedulerMessage::Retire { keys } => keys,
            other => panic!("the server got {other:?}"),
        });
        keys.map(|key| (key.key.0, key.rounds)).collect()
    }
}

#[test]
fn all_ranks_change_after_the_round_of_the_one_that_is_furthest() {
    let mut bench = tuning(BOTH);
    // What is not the first rank's, or of other settings, does not count.
    bench.paced(1, 0, 1e9);
    bench.paced(0, 7, 1e9);
    assert!(bench.heard(100).is_empty());
    bench.paced(0, 0, 1e9);
    // 16 parts of `a`, one of `b` and 16 of `c` have the first keys. Parts of 256 KiB: one each.
    assert_eq!(bench.install(), [(33, 2)]);
    for node in [0, 1] {
        let TuneOrder::Recut { trial: 1, tensors } = bench.order(node) else { panic!("no cut") };
        let told: Vec<(u32, u64, u32)> = tensors
            .iter()
            .map(|one| {
                (
                    one.assignment.tensor,
                    one.assignment.parts[0].key.0,
                    one.assignment.parts[0].bytes,
                )
            })
            .collect();
        assert_eq!(told, [(0, 33, 64_000), (2, 34, 64_400)]);
    }
    bench.held(0, 1, vec![run(0, 7), run(2, 7)]);
    assert!(bench.heard(0).is_empty() && bench.heard(100).is_empty(), "one rank is awaited");
    // An answer to what was asked before, and one that comes twice.
    bench.held(1, 0, vec![run(0, 9)]);
    bench.held(0, 1, vec![run(0, 9)]);
    bench.held(1, 1, vec![run(0, 8)]);
    // The second rank does not know `c`, so that keeps its parts.
    for node in [0, 1] {
        let order =
            TuneOrder::Apply { trial: 1, credit_bytes: 4 * (256 << 10), rounds: vec![run(0, 8)] };
        assert_eq!(bench.order(node), order);
    }
    let mut retired: Vec<(u64, u64)> = (0..16).map(|key| (key, 8)).collect();
    retired.push((34, 0));
    let mut told = bench.retired();
    told.sort_unstable();
    assert_eq!(told, retired);
    // What is declared from now on is cut so at once.
    bench.declare(0, 2, &[tensor("d", 16_000)]);
    assert_eq!(bench.install(), [(35, 1)]);
    let view = bench.scheduler.view(bench.now).tuning.expect("it tunes itself");
    assert_eq!((view.trials, view.rate, view.is_over), (1, 1e9, false));
    assert_eq!(view.point, Point { partition_bytes: 256 << 10, credit_parts: 4 });
}

#[test]
fn rounds_of_a_tensor_that_was_cut_go_on_where_they_were() {
    let mut bench = tuning(BOTH);
    bench.paced(0, 0, 1e9);
    bench.install();
    for node in [0, 1] {
        bench.held(node, 1, vec![run(0, 8)]);
    }
    for node in [0, 1, 100] {
        bench.heard(node);
    }
    // A stall of the new part is one of the tensor's eleventh round.
    let keys = vec![StalledKey {
        key: Key(33),
        round: 3,
        waited_ms: 9_000,
        missing: vec![Rank(1)],
        left: vec![],
    }];
    bench.say(100, NodeMessage::Stalled { keys, late: Vec::new() });
    let stalls = bench.scheduler.view(bench.now).stalls;
    assert_eq!((stalls[0].name.as_str(), stalls[0].round), ("a", 11));
    bench.say(100, NodeMessage::Stalled { keys: Vec::new(), late: Vec::new() });
    for node in [0, 1, 100] {
        bench.heard(node);
    }
    // All ranks replace it after 12 rounds: the new part has had four of them.
    for node in [0, 1] {
        let tensors = vec![Replacement { said: tensor("a", 10), rounds: 12 }];
        bench.say(node, NodeMessage::Redeclare { request: 9, tensors });
    }
    let heard = bench.heard(100);
    let retired = heard.iter().find_map(|message| match message {
        SchedulerMessage::Retire { keys } => Some(keys.clone()),
        _ => None,
    });
    assert_eq!(retired.expect("it is over"), [RetiredKey { key: Key(33), core: 1, rounds: 4 }]);
}

#[test]
fn a_tensor_that_is_replaced_meanwhile_loses_no_round() {
    let mut bench = tuning(BOTH);
    bench.paced(0, 0, 1e9);
    bench.install();
    // Both replace it after the tenth round, and one says how far it was only then.
    bench.held(0, 1, vec![run(0, 8)]);
    for node in [0, 1] {
        let tensors = vec![Replacement { said: tensor("a", 10), rounds: 10 }];
        bench.say(node, NodeMessage::Redeclare { request: 9, tensors });
    }
    bench.heard(100);
    bench.held(1, 1, vec![run(0, 9)]);
    let mut told = bench.retired();
    told.sort_unstable();
    // The ninth round is the last with the old parts, the tenth is the only one with the new.
    let mut retired: Vec<(u64, u64)> = (0..16).map(|key| (key, 9)).collect();
    retired.extend([(33, 1), (34, 0)]);
    assert_eq!(told, retired);
}

#[test]
fn a_credit_changes_at_once_and_a_search_ends_with_what_it_found() {
    let mut bench = tuning(Tuning { partition: false, ..BOTH });
    let mut trials = Vec::new();
    for trial in 0.. {
        // Larger is better, up to 16 parts.
        let view = bench.scheduler.view(bench.now).tuning.expect("it tunes itself");
        if view.is_over {
            break;
        }
        trials.push(view.point.credit_parts);
        bench.paced(0, trial, f64::from(view.point.credit_parts.min(16)));
        let heard = bench.heard(1);
        for message in heard {
            let SchedulerMessage::Tune(TuneOrder::Apply { rounds, .. }) = message else {
                panic!("{message:?}");
            };
            assert!(rounds.is_empty());
        }
    }
    assert_eq!(trials, [2, 4, 16, 64]);
    assert_eq!(bench.tuned, [Point { partition_bytes: 4096, credit_parts: 16 }]);
    assert!(
        bench.log.iter().any(|line| line.starts_with("tuned after 4 trials")),
        "{:?}",
        bench.log
    );
}

#[test]
fn ranks_that_do_not_answer_cost_the_search_and_not_the_job() {
    let mut bench = tuning(BOTH);
    bench.paced(0, 0, 1e9);
    bench.install();
    bench.held(0, 1, vec![run(0, 8)]);
    bench.heard(0);
    bench.pass(301_000, &[0, 1, 100]);
    let TuneOrder::Apply { trial: 1, rounds, .. } = bench.order(0) else { panic!("it is held") };
    assert!(rounds.is_empty());
    assert!(bench.log.iter().any(|line| line.contains("ranks 1 have not held")), "{:?}", bench.log);
    assert!(bench.scheduler.view(bench.now).tuning.expect("it tuned itself").is_over);
}

#[test]
fn a_rank_that_leaves_is_not_waited_for() {
    let mut bench = tuning(BOTH);
    bench.paced(0, 0, 1e9);
    bench.install();
    bench.held(0, 1, vec![run(0, 8)]);
    bench.heard(0);
    bench.say(1, NodeMessage::Leave { suspend: false });
    let TuneOrder::Apply { rounds, .. } = bench.order(0) else { panic!("it is held") };
    assert_eq!(rounds, [run(0, 8)]);
}

#[test]
fn a_job_that_does_not_tune_takes_no_word_on_it() {
    let mut bench = Bench::formed(1, 1);
    bench.paced(0, 0, 1e9);
    assert_eq!(bench.done, Some(Exit::Failed));
}

#[test]
fn parts_that_would_be_too_many_are_said_and_not_tried() {
    let mut bench = formed(Tuning { credit: false, ..BOTH }, 16 << 10);
    // One part more of 4 KiB than half of what one message may name.
    let large = tensor("large", (DECLARE_PARTS_MAX as u64 / 2 + 1) * 1024);
    for node in [0, 1] {
        bench.declare(node, 1, std::slice::from_ref(&large));
    }
    bench.install();
    let answers = |bench: &mut Bench, trial: u32| {
        bench.install();
        for node in [0, 1] {
            bench.heard(node);
            bench.held(node, trial, vec![run(0, u64::from(trial))]);
        }
        bench.heard(100);
    };
    bench.paced(0, 0, 3e9);
    // The default and what is next to the start are slower, and the other neighbour can't be had.
    for trial in [1, 2] {
        answers(&mut bench, trial);
        bench.paced(0, trial, 1e9);
    }
    let refused = "BYTEPS_PARTITION_BYTES=4096 BYTEPS_SCHEDULING_CREDIT=2 would cut tensors into \
                   too many parts, and is not tried";
    assert!(bench.log.iter().any(|line| line.ends_with(refused)), "{:?}", bench.log);
    // So the search ends where the job began, once the ranks have come back to it.
    answers(&mut bench, 3);
    let point = Point { partition_bytes: 16 << 10, credit_parts: 2 };
    assert_eq!(bench.tuned, [point], "{:?}", bench.log);
    let view = bench.scheduler.view(bench.now).tuning.expect("it tunes itself");
    assert!(view.is_over && view.point == point && view.best > 2.9e9, "{:?}", bench.log);
}
