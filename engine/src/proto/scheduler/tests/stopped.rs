//! A scheduler that did not run for a while: nobody is late for that, whatever it reads first.

use super::elastic::{formed, worker};
use super::*;

fn elastic() -> Elastic {
    Elastic { shrinks: false, min_workers: 1, patience: ms(0), notice: ms(5_000) }
}

#[test]
fn ranks_between_two_epochs_are_not_late_because_the_scheduler_was_stopped() {
    let mut bench = formed(4, 1, elastic());
    bench.close(1);
    bench.reset(100);
    // One has said that it comes, one has not noticed yet.
    bench.say(0, NodeMessage::Leave { suspend: true });
    bench.close(0);
    bench.pass(1_000, &[2, 3, 100]);
    // What has come meanwhile is read before time passes.
    bench.now += ms(60_000);
    bench.back(2, 12, 1002);
    bench.back(3, 13, 1003);
    bench.join(10, worker(9, 10, Some(1000)));
    for (rank, node) in [(0, 10), (1, 12), (2, 13)] {
        let Some(SchedulerMessage::Roster(roster)) = bench.heard(node).pop() else {
            panic!("node {node} has no roster");
        };
        assert_eq!((roster.index, roster.size), (rank, 3));
    }
}

#[test]
fn ranks_between_two_epochs_have_their_time_once_the_scheduler_goes_on() {
    let mut bench = formed(3, 1, elastic());
    bench.close(1);
    bench.reset(100);
    bench.now += ms(60_000);
    bench.back(2, 12, 1002);
    bench.pass(4_000, &[0, 12, 100]);
    let waits = |message: &SchedulerMessage| matches!(message, SchedulerMessage::Waiting { .. });
    assert!(bench.heard(12).iter().all(waits), "rank 0 has its time");
    bench.pass(2_000, &[0, 12, 100]);
    assert_eq!(bench.roster(12).size, 1);
}

#[test]
fn a_rank_that_looked_for_another_scheduler_and_found_the_same_one_is_here_once() {
    let mut bench = formed(3, 1, elastic());
    bench.close(1);
    bench.reset(100);
    bench.back(0, 10, 1000);
    bench.now += ms(5_000);
    bench.join(20, worker(9, 20, Some(1000)));
    assert!(bench.closed.contains(&NodeId(20)) && bench.heard(20).is_empty());
    bench.back(2, 12, 1002);
    for (rank, node) in [(0, 10), (1, 12)] {
        let Some(SchedulerMessage::Roster(roster)) = bench.heard(node).pop() else {
            panic!("node {node} has no roster: {:?}", bench.log);
        };
        assert_eq!((roster.index, roster.size), (rank, 2));
    }
    // Its further connection may be so late that this epoch is over as well.
    bench.close(12);
    bench.join(21, worker(9, 21, Some(1000)));
    assert!(bench.closed.contains(&NodeId(21)) && bench.heard(21).is_empty());
    bench.reset(100);
    bench.back(10, 30, 10);
    assert_eq!(bench.roster(30).size, 1);
}

#[test]
fn no_epoch_forms_while_a_server_waits_for_the_answer_of_another_scheduler() {
    for ending in ["it does not lead", "it leads", "no answer"] {
        let mut bench = formed(2, 1, elastic());
        bench.close(1);
        bench.reset(100);
        bench.say(0, NodeMessage::Leave { suspend: true });
        bench.close(0);
        // While it is stopped, its last rank comes back, and then the server loses patience.
        bench.now += ms(5_000);
        let now = bench.now;
        bench.scheduler.handle_connected(NodeId(10), now);
        let register = NodeMessage::Register(worker(9, 10, Some(1000)));
        bench.scheduler.handle_message(NodeId(10), register, now);
        bench.say(100, NodeMessage::Asks { another: true });
        bench.pass(9_000, &[10, 100]);
        let waits =
            |message: &SchedulerMessage| matches!(message, SchedulerMessage::Waiting { .. });
        assert!(bench.heard(10).iter().all(waits) && !bench.scheduler.is_over(), "{ending}");
        match ending {
            "it does not lead" => bench.say(100, NodeMessage::Asks { another: false }),
            "it leads" => bench.say(100, NodeMessage::Deposed { term: 2 }),
            _ => bench.pass(1_250, &[10, 100]),
        }
        if ending == "it leads" {
            assert!(bench.scheduler.is_over() && bench.heard(10).is_empty());
        } else {
            assert_eq!(bench.roster(10).size, 1, "{ending}");
        }
    }
}

#[test]
fn ranks_that_may_have_found_another_scheduler_meanwhile_are_followed_by_the_servers() {
    for stop in [0, 60_000] {
        let mut bench = formed(2, 2, elastic());
        bench.close(101);
        bench.reset(100);
        bench.now += ms(stop);
        for node in [0, 1] {
            bench.say(node, NodeMessage::Leave { suspend: true });
            bench.close(node);
        }
        bench.pass(9_000, &[100]);
        assert!(!bench.closed.contains(&NodeId(100)), "they have their time");
        bench.heard(100);
        bench.pass(2_000, &[100]);
        let told = bench.heard(100);
        let is_told = told.iter().any(|message| matches!(message, SchedulerMessage::Over { .. }));
        assert_eq!(is_told, stop == 0, "{told:?}");
        assert!(bench.closed.contains(&NodeId(100)) && bench.scheduler.is_over());
    }
}

#[test]
fn who_comes_back_later_may_find_the_scheduler_that_others_have_found() {
    for stop in [0, 60_000] {
        let mut bench = formed(3, 1, elastic());
        bench.close(2);
        bench.reset(100);
        bench.now += ms(stop);
        bench.back(1, 11, 1001);
        bench.say(0, NodeMessage::Leave { suspend: true });
        bench.close(0);
        bench.pass(11_000, &[11, 100]);
        let Some(SchedulerMessage::Roster(roster)) = bench.heard(11).pop() else {
            panic!("rank 0 took too long: {:?}", bench.log);
        };
        assert_eq!(roster.size, 1);
        // At a commit the one that is left comes again, and not to this one.
        bench.join(20, server_register(9, 3, 1));
        bench.say(11, NodeMessage::Leave { suspend: true });
        bench.close(11);
        bench.reset(100);
        bench.pass(9_000, &[20, 100]);
        assert!(!bench.closed.contains(&NodeId(100)), "it has its time");
        bench.heard(100);
        bench.pass(2_000, &[20, 100]);
        let told = bench.heard(100);
        let is_told = told.iter().any(|message| matches!(message, SchedulerMessage::Over { .. }));
        assert_eq!(is_told, stop == 0, "{told:?}");
        assert!(bench.closed.contains(&NodeId(100)) && bench.scheduler.is_over());
    }
}
