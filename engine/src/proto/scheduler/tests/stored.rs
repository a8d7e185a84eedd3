//! Tensors whose value stays on the servers.

use super::sets::{answer_installs, of_hosts};
use super::*;
use crate::proto::backup::Backup;
use crate::proto::store::{Deltas, Store};

fn stored(name: &str, root: u32) -> Declaration {
    let store = Some(Store::Deltas(Deltas { root: Rank(root), staleness: None }));
    Declaration { operation: Operation::Sum, store, ..tensor(name, 4096) }
}

fn short(name: &str, workers: u32, behind: u32) -> Declaration {
    let store = Some(Store::Backup(Backup { workers, behind }));
    Declaration { operation: Operation::Average, store, ..tensor(name, 4096) }
}

#[test]
fn each_rank_of_a_host_speaks_to_the_servers_itself() {
    let mut bench = of_hosts(&[2, 1], 1);
    for node in 0..3 {
        bench.declare(node, 1, &[stored("w", 2)]);
        for key in answer_installs(&mut bench, 1) {
            assert_eq!(key.store, stored("w", 2).store);
        }
        let (_, all) = declared(&bench.heard(node));
        let is_own = |part: &Part| u64::from(part.owner.0) == node && part.core.is_some();
        assert!(all[0].parts.iter().all(is_own), "{all:?}");
    }
    // So does one that is for the ranks of one host.
    let members = Members::new(vec![Rank(0), Rank(1)]).unwrap();
    bench.declare(1, 2, &[Declaration { members, ..stored("few", 0) }]);
    assert!(!answer_installs(&mut bench, 1).is_empty());
}

#[test]
fn what_cannot_be_stored_is_refused_and_ranks_that_disagree_are_told() {
    let mut bench = of_hosts(&[2], 1);
    bench.declare(0, 1, &[stored("w", 0)]);
    let answer = refused(&bench.heard(0));
    assert!(answer.contains("`w` cannot be stored: no server takes part"), "{answer}");
    let mut bench = Bench::formed(2, 1);
    bench.declare(0, 1, &[stored("w", 2)]);
    let answer = refused(&bench.heard(0));
    assert!(answer.contains("rank 2, which is not one of its ranks"), "{answer}");
    bench.declare(0, 2, &[stored("w", 0), tensor("plain", 8)]);
    answer_installs(&mut bench, 1);
    bench.heard(0);
    for said in [tensor("w", 8), stored("w", 1), stored("plain", 0)] {
        let tensors = vec![Replacement { said, rounds: 3 }];
        bench.say(0, NodeMessage::Redeclare { request: 3, tensors });
        let answer = refused(&bench.heard(0));
        assert!(answer.contains("use another name"), "{answer}");
    }
    bench.declare(1, 1, &[stored("w", 1)]);
    let heard = bench.heard(0);
    let [SchedulerMessage::Mismatch(mismatch)] = heard.as_slice() else { panic!("{heard:?}") };
    let text = mismatch.to_string();
    assert!(text.contains("stored, beginning with the value of rank 0"), "{text}");
    assert!(text.contains("stored, beginning with the value of rank 1"), "{text}");
}

#[test]
fn slow_ranks_hold_up_no_others_of_their_host_and_all_agree_on_how_many_there_may_be() {
    let mut bench = of_hosts(&[2, 1], 1);
    for node in 0..3 {
        bench.declare(node, 1, &[short("g", 2, 4)]);
        for key in answer_installs(&mut bench, 1) {
            assert_eq!(key.store, short("g", 2, 4).store);
        }
        let (_, all) = declared(&bench.heard(node));
        let is_own = |part: &Part| u64::from(part.owner.0) == node && part.core.is_some();
        assert!(all[0].parts.iter().all(is_own), "{all:?}");
    }
    for (said, why) in [
        (short("h", 3, 4), "`h` has to wait for all ranks: 3 of 3 ranks"),
        (short("h", 1, 0), "0 rounds behind"),
        (Declaration { device: true, ..short("h", 1, 4) }, "as one of GPUs"),
        (Declaration { dtype: DType::I32, ..short("h", 1, 4) }, "only floats"),
    ] {
        bench.declare(0, 2, &[said]);
        let answer = refused(&bench.heard(0));
        assert!(answer.contains(why), "{answer}");
    }
    bench.declare(0, 3, &[short("h", 1, 4)]);
    answer_installs(&mut bench, 1);
    bench.heard(0);
    bench.declare(1, 2, &[short("h", 2, 4)]);
    let heard = bench.heard(0);
    let [SchedulerMessage::Mismatch(mismatch)] = heard.as_slice() else { panic!("{heard:?}") };
    let text = mismatch.to_string();
    assert!(text.contains("without its 1 slowest in a round, nobody over 4"), "{text}");
    assert!(text.contains("without its 2 slowest in a round, nobody over 4"), "{text}");
}
