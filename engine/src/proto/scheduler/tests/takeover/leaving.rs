//! Schedulers that are lost while ranks leave, for good or to come back.

use super::*;

/// A rank that was between two connections when its scheduler was lost, as a new one of this node.
fn comes_back(job: &mut Job, at: usize, node: u64) {
    let before = &job.members[at].register;
    let register = Register { session: node, former: Some(before.session), ..before.clone() };
    job.members[at].lives = false;
    job.bench.join(node, register);
}

#[test]
fn ranks_that_come_before_any_member_form_the_next_epoch_at_once() {
    let mut job = Job::formed(2, 1, false);
    job.config.elastic.iter_mut().for_each(|elastic| elastic.min_workers = 2);
    job.replace_scheduler();
    // They were to come back, and are faster than the server.
    (0..2).for_each(|at| comes_back(&mut job, at, 90 + at as u64));
    job.come(2);
    job.pass(500);
    for node in [90, 91] {
        let found = job.bench.heard(node).pop();
        let Some(SchedulerMessage::Roster(roster)) = found else { panic!("{}", job.log()) };
        assert_eq!((roster.size, roster.epoch, roster.term), (2, Epoch(2), 2));
    }
    assert!(!job.log().contains("died"), "{}", job.log());
}

#[test]
fn a_rank_that_is_about_to_come_back_is_not_waited_for_and_not_blamed() {
    let mut job = Job::formed(3, 1, false);
    job.replace_scheduler();
    comes_back(&mut job, 1, 90);
    job.come_all();
    job.pass(250);
    let told = job.members[0].told.clone();
    let Some(OverReason::Reforming { reason, .. }) = told else { panic!("{}", job.log()) };
    assert!(reason.to_string().contains("rank 1 was about to come back"), "{reason}");
    // The others notice, and come as well.
    (0..3).step_by(2).for_each(|at| comes_back(&mut job, at, 91 + at as u64));
    job.pass(250);
    let found = job.bench.heard(90).pop();
    let Some(SchedulerMessage::Roster(roster)) = found else { panic!("{}", job.log()) };
    assert_eq!((roster.size, roster.epoch), (3, Epoch(2)));
    assert!(!job.log().contains("died"), "{}", job.log());
}

#[test]
fn ranks_that_wait_to_say_good_bye_are_heard_before_the_job_ends() {
    let mut job = Job::formed(2, 1, false);
    job.members[2].left = vec![Rank(0), Rank(1)];
    job.replace_scheduler();
    job.come(2);
    job.pass(1_000);
    assert_eq!(job.bench.done, None, "{}", job.log());
    (0..2).for_each(|at| job.come(at));
    job.read();
    for at in 0..2 {
        assert_eq!(job.members[at].term, 2, "{}", job.log());
        job.bench.say(job.members[at].node, NodeMessage::Leave { suspend: false });
    }
    assert_eq!(job.bench.done, Some(Exit::Finished), "{}", job.log());
}

#[test]
fn a_rank_that_comes_back_early_hears_who_is_waited_for() {
    let mut job = Job::formed(3, 1, false);
    job.replace_scheduler();
    comes_back(&mut job, 1, 90);
    job.come(0);
    job.come(3);
    job.bench.heard(90);
    job.pass(PATIENCE - 1_000);
    let lines = job.bench.heard(90).into_iter().filter_map(|one| match one {
        SchedulerMessage::Waiting { text } => Some(text),
        _ => None,
    });
    assert!(
        lines.into_iter().any(|line| line.starts_with("waiting for rank 2 (")),
        "{}",
        job.log()
    );
}

#[test]
fn a_rank_that_comes_back_early_hears_that_all_members_have_gone_again() {
    let mut job = Job::formed(2, 1, false);
    job.replace_scheduler();
    comes_back(&mut job, 0, 90);
    job.come(2);
    job.pass(2_000);
    job.bench.heard(90);
    // The server ends, by its own clock perhaps, and the wait for members begins again.
    let (now, node) = (job.bench.now, NodeId(job.members[2].node));
    job.bench.scheduler.handle_closed(node, "connection closed", now);
    job.bench.drain();
    for seconds in [1, 4] {
        job.bench.say(90, NodeMessage::Heartbeat { rounds: 0 });
        job.pass(if seconds == 1 { 1_250 } else { 3_000 });
        let text = format!("waiting for members of the job ({seconds} s)");
        let heard = job.bench.heard(90);
        let told = SchedulerMessage::Waiting { text };
        assert!(heard.contains(&told), "{heard:?}: {}", job.log());
    }
}

#[test]
fn a_barrier_that_only_ranks_have_passed_that_have_left_is_passed_by_the_others() {
    // Servers know that it has left, or it says so to the next scheduler before that leads.
    for is_known in [true, false] {
        let mut job = Job::formed(3, 1, false);
        (0..3).for_each(|at| job.ask(at, None));
        // The answers to the others are lost with the scheduler.
        let node = job.members[2].node;
        for message in job.bench.heard(node) {
            job.hear(2, message);
        }
        assert_eq!(job.members[2].passed, 1);
        if is_known {
            job.bench.say(node, NodeMessage::Leave { suspend: false });
            job.members[3].left = vec![Rank(2)];
            job.replace_scheduler();
        } else {
            job.replace_scheduler();
            job.come(2);
            job.bench.say(job.members[2].node, NodeMessage::Leave { suspend: false });
        }
        job.members[2].lives = false;
        job.come_all();
        job.pass(2_250);
        for at in 0..2 {
            let member = &job.members[at];
            assert_eq!((member.term, &member.told), (2, &None), "{}", job.log());
            assert!(member.open.is_empty() && member.passed == 1, "{}", job.log());
        }
        // The next one needs both of those who stay.
        job.ask(0, None);
        job.pass(1_000);
        assert_eq!(job.members[0].open.len(), 1, "{}", job.log());
        job.ask(1, None);
        job.read();
        assert!(job.members[..2].iter().all(|one| one.open.is_empty()), "{}", job.log());
    }
}

#[test]
fn ranks_that_had_joined_later_and_come_before_any_member_are_new_ones_as_well() {
    let mut job = Job::formed(2, 1, false);
    job.members[2].reset = Some(Epoch(2));
    job.replace_scheduler();
    // One has died. The other was let in later, so it says no number of workers, and it is faster
    // than the server.
    let before = job.members[1].register.clone();
    let register = Register { session: 90, former: Some(before.session), num_workers: 0, ..before };
    job.bench.join(90, register);
    job.members[..2].iter_mut().for_each(|member| member.lives = false);
    job.come(2);
    for _ in 0..20 {
        job.bench.pass(250, &[90]);
        job.pass(250);
        if job.bench.scheduler.epoch == Epoch(3) {
            break;
        }
    }
    let found = job.bench.heard(90).pop();
    let Some(SchedulerMessage::Roster(roster)) = found else { panic!("{}", job.log()) };
    assert_eq!((roster.size, roster.epoch, roster.term), (1, Epoch(3), 2));
}

#[test]
fn a_rank_of_an_epoch_that_nobody_else_knows_may_come_as_a_new_one() {
    let mut job = Job::formed(2, 1, false);
    job.members[2].reset = Some(Epoch(2));
    // The second epoch had formed when the scheduler was lost: only a new rank has heard of it.
    let mut third = job.members[1].clone();
    (third.roster.epoch, third.roster.size, third.roster.index) = (Epoch(2), 3, 2);
    (third.register.pid, third.register.session) = (77, 77);
    job.members.push(third);
    job.replace_scheduler();
    (0..2).for_each(|at| comes_back(&mut job, at, 90 + at as u64));
    job.come(2);
    job.read();
    assert_eq!(job.bench.scheduler.epoch, Epoch(3), "{}", job.log());
    for (epoch, is_sent_back) in [(Epoch(2), true), (Epoch(1), false)] {
        job.members[3].roster.epoch = epoch;
        job.come(3);
        let node = job.members[3].node;
        if is_sent_back {
            let OverReason::Reforming { reason, epoch } = job.bench.over(node) else {
                panic!("{}", job.log());
            };
            assert_eq!(*reason, OverReason::UnknownEpoch { epoch: Epoch(2) });
            assert_eq!(epoch, Epoch(3));
        } else {
            // One of the epoch that was taken over has used up its time.
            assert!(job.bench.refusal(node).contains("was given up"));
        }
        job.members[3].node += 10;
    }
    // It comes back, and waits to be let in.
    let former = Some(77);
    let register = job.members[3].register.clone();
    job.bench.join(95, Register { session: 95, former, ..register });
    assert_eq!(job.bench.early_count(), 1, "{}", job.log());
}

#[test]
fn a_second_connection_of_a_rank_whose_epoch_has_just_ended_is_closed_and_changes_nothing() {
    let mut job = Job::formed(3, 1, false);
    job.bench.close(1);
    // It has not read yet that its epoch is over.
    job.bench.connect(70);
    let account = job.members[0].account().remove(0);
    job.bench.say(70, account);
    assert_eq!(job.bench.closed, [NodeId(70)]);
    assert!(job.bench.heard(70).is_empty());
    let OverReason::Reforming { .. } = job.bench.over(0) else { panic!("{}", job.log()) };
}
