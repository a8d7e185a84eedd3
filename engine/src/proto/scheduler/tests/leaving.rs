//! Ranks that leave an elastic job in good order while it goes on, and ranks that come to one that
//! has not formed, or has done its work.

use super::elastic::{formed, worker};
use super::*;

fn elastic(min_workers: u32) -> Elastic {
    Elastic { shrinks: false, min_workers, patience: ms(0), notice: ms(60_000) }
}

/// One that comes later: the numbers of the first ones are not its own.
fn newcomer(at: u32, session: u64, local_size: u32) -> Register {
    let mut register = Register { num_workers: 0, ..worker(at, session, None) };
    if let Node::Worker { local_size: size, .. } = &mut register.node {
        *size = local_size;
    }
    register
}

/// All but this one suspend and come back as ten more; it leaves for good.
fn leaves(bench: &mut Bench, leaver: u64, others: &[u64]) {
    for &node in others {
        bench.say(node, NodeMessage::Leave { suspend: true });
        bench.close(node);
    }
    bench.say(leaver, NodeMessage::Leave { suspend: false });
    bench.close(leaver);
    for &node in others {
        bench.join(node + 10, worker(9, node + 10, Some(1000 + node)));
    }
}

#[test]
fn a_rank_that_leaves_where_the_others_suspend_is_no_death() {
    for leaver in [0, 1, 2] {
        let mut bench = formed(3, 1, elastic(2));
        let others: Vec<u64> = (0..3).filter(|node| *node != leaver).collect();
        leaves(&mut bench, leaver, &others);
        bench.reset(100);
        for (index, &node) in (0..).zip(&others) {
            let roster = bench.roster(node + 10);
            assert_eq!((roster.index, roster.size, roster.epoch), (index, 2, Epoch(2)));
            let change = roster.change.unwrap();
            let wanted = format!(": rank {leaver} (host w{leaver}, pid {}) left", 1000 + leaver);
            assert!(change.ends_with(&wanted), "{change}");
        }
        let view = bench.scheduler.view(bench.now);
        assert_eq!((view.deaths, bench.done), (0, None));
    }
}

#[test]
fn whoever_leaves_while_others_come_is_told_of_with_them() {
    let mut bench = formed(2, 1, elastic(1));
    bench.join(20, newcomer(5, 20, 1));
    leaves(&mut bench, 0, &[1]);
    bench.reset(100);
    let roster = bench.roster(11);
    assert_eq!(roster.size, 2);
    let change = roster.change.unwrap();
    assert!(change.ends_with(": rank 0 (host w0, pid 1000) left, 1 node new"), "{change}");
}

#[test]
fn who_is_left_must_be_enough_and_a_death_behind_it_is_no_finish() {
    let mut bench = formed(3, 1, elastic(3));
    leaves(&mut bench, 1, &[0, 2]);
    let reason = bench.over(10).to_string();
    let wanted = "ranks have left; the job cannot go on: 2 workers of at least 3 (BPS_MIN_WORKERS)";
    assert!(reason.starts_with(wanted), "{reason}");
    assert_eq!(bench.done, Some(Exit::Failed));
    // The others die on their way back: nobody has done the work.
    let mut bench = formed(2, 1, elastic(1));
    bench.say(0, NodeMessage::Leave { suspend: true });
    bench.close(0);
    bench.say(1, NodeMessage::Leave { suspend: false });
    bench.close(1);
    bench.reset(100);
    bench.pass(30_000, &[100]);
    assert_eq!(bench.done, Some(Exit::Failed));
}

#[test]
fn all_that_leave_at_once_have_finished() {
    let mut bench = formed(2, 1, elastic(1));
    for node in [0, 1] {
        bench.say(node, NodeMessage::Leave { suspend: false });
    }
    assert_eq!(bench.done, Some(Exit::Finished));
}

#[test]
fn who_comes_before_the_job_has_formed_waits_and_is_let_in_later() {
    let mut bench = Bench::new(2, 1);
    bench.scheduler.config.elastic = Some(elastic(1));
    bench.join(100, server_register(0, 2, 1));
    bench.join(20, newcomer(7, 20, 3));
    bench.join(0, Register { session: 1000, ..worker_register(0, 2, 1) });
    assert!(bench.heard(20).is_empty() && bench.heard(0).is_empty());
    bench.join(1, Register { session: 1001, ..worker_register(1, 2, 1) });
    for node in [0, 1] {
        match bench.heard(node).as_slice() {
            [SchedulerMessage::Roster(roster), SchedulerMessage::Newcomers { count: 1 }] => {
                assert_eq!(roster.size, 2);
            }
            other => panic!("{other:?}"),
        }
    }
    bench.heard(100);
    bench.back(0, 10, 1000);
    bench.back(1, 11, 1001);
    bench.reset(100);
    // It says that its host has three: that is no matter any more.
    assert_eq!(bench.roster(20).size, 3);
}

#[test]
fn in_a_job_that_is_not_elastic_nobody_joins() {
    let mut bench = Bench::new(2, 1);
    bench.join(20, newcomer(7, 20, 1));
    assert!(matches!(bench.unformed(20), Unformed::Number { .. }));
    assert_eq!(bench.done, Some(Exit::NotFormed));
}

#[test]
fn who_waits_when_the_work_is_done_is_sent_away_and_who_begins_again_is_not() {
    let mut bench = formed(2, 1, elastic(1));
    bench.scheduler.config.stays = true;
    bench.join(20, newcomer(5, 20, 1));
    // One that was started anew, with what the first ones were started with.
    bench.join(21, Register { pid: 77, ..worker(1, 21, None) });
    bench.say(0, NodeMessage::Leave { suspend: false });
    // The process of rank 0 has begun again already.
    bench.join(30, Register { session: 30, ..worker_register(0, 2, 1) });
    bench.say(1, NodeMessage::Leave { suspend: false });
    for node in [20, 21] {
        assert_eq!(bench.over(node), OverReason::Finished);
    }
    assert_eq!(bench.done, None);
    bench.reset(100);
    // And one that comes only now.
    bench.join(22, newcomer(6, 22, 1));
    assert_eq!(bench.over(22), OverReason::Finished);
    bench.join(31, Register { session: 31, ..worker_register(1, 2, 1) });
    assert_eq!(bench.roster(30).size, 2);
}
