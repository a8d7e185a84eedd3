//! A scheduler that outlives generations of ranks.

use super::*;

fn staying() -> Bench {
    let mut bench = Bench::new(2, 1);
    bench.scheduler.config.stays = true;
    form(&mut bench, 0);
    bench.join(100, server_register(0, 2, 1));
    bench
}

/// Both ranks come, as these nodes.
fn form(bench: &mut Bench, first: u64) {
    bench.join(first, worker_register(0, 2, 1));
    bench.join(first + 1, worker_register(1, 2, 1));
}

fn leave(bench: &mut Bench, first: u64) {
    bench.say(first, NodeMessage::Leave { suspend: false });
    bench.say(first + 1, NodeMessage::Leave { suspend: false });
}

fn last(bench: &mut Bench) {
    bench.scheduler.handle_last_generation();
    bench.drain();
}

#[test]
fn ranks_that_have_shut_down_may_start_again() {
    let mut bench = staying();
    for generation in 1..4 {
        let first = u64::from(generation - 1) * 10;
        assert_eq!(bench.roster(first).epoch, Epoch(generation));
        assert_eq!(bench.roster(100).epoch, Epoch(generation));
        bench.declare(first, 1, &[tensor("w", 10 * u64::from(generation))]);
        bench.say(first, NodeMessage::Leave { suspend: false });
        // Rank 0 is back before rank 1 has left.
        bench.join(first + 10, worker_register(0, 2, 1));
        bench.say(first + 1, NodeMessage::Leave { suspend: false });
        bench.join(first + 11, worker_register(1, 2, 1));
        let reset = |message: &SchedulerMessage| matches!(message, SchedulerMessage::Reset { .. });
        let position = bench.inboxes[&NodeId(100)].iter().position(reset).unwrap();
        bench.inboxes.get_mut(&NodeId(100)).unwrap().drain(..=position);
    }
    last(&mut bench);
    assert_eq!(bench.done, None, "these ranks have not left");
    leave(&mut bench, 30);
    assert_eq!(bench.done, Some(Exit::Finished));
}

#[test]
fn nobody_is_missed_between_generations() {
    let mut bench = staying();
    leave(&mut bench, 0);
    bench.pass(3_600_000, &[100]);
    assert_eq!(bench.done, None);
    last(&mut bench);
    assert_eq!(bench.over(100), OverReason::Finished);
    assert_eq!(bench.done, Some(Exit::Finished));
    // A request to stop is no failure then.
    let mut bench = staying();
    leave(&mut bench, 0);
    bench.scheduler.handle_stop("it was stopped by SIGTERM");
    bench.drain();
    assert_eq!(bench.done, Some(Exit::Finished));
    // Who has come again is waited for as long as ever, and no longer.
    let mut bench = staying();
    leave(&mut bench, 0);
    bench.pass(3_600_000, &[100]);
    bench.join(10, worker_register(0, 2, 1));
    bench.pass(120_250, &[10, 100]);
    assert_eq!(bench.done, Some(Exit::NotFormed));
}

#[test]
fn a_job_to_which_no_rank_came_is_over_with_the_last() {
    let mut bench = Bench::new(2, 1);
    bench.scheduler.config.stays = true;
    bench.join(100, server_register(0, 2, 1));
    last(&mut bench);
    assert_eq!(bench.over(100), OverReason::Finished);
}
