//! Tensors whose results one rank gets.

use super::elastic::formed;
use super::sets::{answer_installs, of_hosts};
use super::*;

fn received(name: &str, count: u64, to: u32) -> Declaration {
    Declaration { receiver: Some(Rank(to)), ..tensor(name, count) }
}

#[test]
fn a_receiver_owns_all_parts_in_its_group_and_servers_know_it() {
    let mut bench = of_hosts(&[3, 3], 1);
    let said = received("w", 1 << 20, 4);
    bench.declare(0, 1, std::slice::from_ref(&said));
    let keys = answer_installs(&mut bench, 1);
    assert!(keys.len() > 1 && keys.iter().all(|key| key.receiver == Some(Rank(4))), "{keys:?}");
    let owners = |bench: &mut Bench, rank: u32| {
        let (_, tensors) = declared(&bench.heard(rank.into()));
        let mut owners: Vec<Rank> = tensors[0].parts.iter().map(|part| part.owner).collect();
        owners.sort_unstable();
        owners.dedup();
        owners
    };
    assert_eq!(owners(&mut bench, 0), [0, 1, 2].map(Rank), "where nobody receives, all add");
    for rank in [3, 4, 5] {
        bench.declare(rank.into(), 1, std::slice::from_ref(&said));
        assert_eq!(owners(&mut bench, rank), [Rank(4)]);
    }
}

#[test]
fn receivers_that_differ_are_a_mismatch_and_a_strange_one_is_refused() {
    for second in [received("w", 10, 2), tensor("w", 10)] {
        let mut bench = Bench::formed(3, 1);
        bench.declare(0, 1, &[received("w", 10, 1)]);
        answer_installs(&mut bench, 1);
        bench.heard(0);
        bench.declare(1, 4, &[second]);
        let heard = bench.heard(0);
        let [SchedulerMessage::Mismatch(mismatch)] = heard.as_slice() else {
            panic!("{heard:?}, no mismatch")
        };
        assert!(mismatch.to_string().contains("(average), received by rank 1, "), "{mismatch}");
    }
    let mut bench = Bench::formed(3, 1);
    bench.declare(0, 1, &[received("w", 10, 3)]);
    let answer = refused(&bench.heard(0));
    assert!(answer.contains("cannot go to rank 3 alone: it is not for that rank"), "{answer}");
    assert!(bench.heard(100).is_empty() && bench.heard(1).is_empty());
}

#[test]
fn a_job_that_shrinks_gives_results_to_all() {
    for shrinks in [false, true] {
        let (patience, notice) = (ms(0), ms(60_000));
        let elastic = Elastic { shrinks, min_workers: 1, patience, notice };
        let mut bench = formed(2, 1, elastic);
        bench.declare(0, 1, &[received("w", 10, 1)]);
        if !shrinks {
            assert_eq!(answer_installs(&mut bench, 1).len(), 1);
            continue;
        }
        let answer = refused(&bench.heard(0));
        assert!(answer.contains("BPS_ELASTIC=shrink"), "{answer}");
        assert!(bench.installs(100).is_empty());
    }
}
