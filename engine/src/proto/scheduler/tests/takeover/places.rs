//! Where parts are, and who owns them: the next scheduler takes that from the ranks.

use super::*;
use crate::base::CoreId;

fn place(job: &Job, at: usize, tensor: u32) -> Vec<(Key, Option<CoreId>)> {
    let parts = &job.members[at].known[&tensor].assignment.parts;
    parts.iter().map(|part| (part.key, part.core)).collect()
}

#[test]
fn a_tensor_that_no_rank_knows_is_left_out() {
    let mut job = Job::formed(3, 2, false);
    for (name, count) in [("a", 7_000), ("b", 3_000), ("c", 10_000)] {
        (0..2).for_each(|at| job.ask(at, Some(tensor(name, count))));
    }
    job.read();
    // Whoever knew the first and the third has left, or was never told.
    for at in 0..2 {
        for tensor in [0, 2] {
            assert!(job.members[at].known.remove(&tensor).is_some());
        }
    }
    let before = place(&job, 0, 1);
    job.replace_scheduler();
    job.come_all();
    assert!(job.members.iter().all(|member| member.told.is_none()), "{}", job.log());
    assert!(job.log().contains(", 1 tensor known"), "{}", job.log());
    // It is where it was, and what is declared from now on has fresh keys.
    for at in 0..3 {
        for name in ["b", "a"] {
            job.ask(at, Some(tensor(name, if name == "b" { 3_000 } else { 7_000 })));
        }
    }
    job.read();
    job.check(0);
    assert_eq!(place(&job, 2, 1), before);
    let last = before.iter().map(|(key, _)| *key).max().unwrap();
    assert!(place(&job, 2, 2).iter().all(|(key, _)| *key > last));
}

#[test]
fn parts_stay_where_the_ranks_say_that_they_are() {
    let mut job = Job::formed(2, 2, false);
    (0..2).for_each(|at| job.ask(at, Some(tensor("weights", 10_000))));
    job.read();
    // As if something else had been placed before.
    let moved = |core: CoreId| CoreId { server: 1 - core.server, ..core };
    for at in 0..2 {
        let known = job.members[at].known.get_mut(&0).unwrap();
        for part in &mut known.assignment.parts {
            part.core = part.core.map(moved);
        }
    }
    let keys = [2, 3].map(|at| std::mem::take(&mut job.members[at].keys));
    let [first, second] = keys;
    (job.members[3].keys, job.members[2].keys) = (first, second);
    let before = place(&job, 0, 0);
    job.replace_scheduler();
    job.come_all();
    job.ask(1, Some(tensor("weights", 10_000)));
    job.read();
    assert!(job.members.iter().all(|member| member.told.is_none()), "{}", job.log());
    assert_eq!(place(&job, 1, 0), before);
    job.check(0);
}

#[test]
fn places_that_there_can_not_be_make_the_job_form_again() {
    type Change = fn(&mut Part, usize);
    let changes: [Change; 4] = [
        |part, at| part.core = (at == 0).then_some(part.core).flatten(),
        |part, _| part.core = Some(CoreId { server: 2, core: 0 }),
        |part, _| part.owner = Rank(7),
        // One rank says so, and the other does not.
        |part, at| {
            part.core = part.core.filter(|_| at == 1).or(Some(CoreId { server: 1, core: 0 }))
        },
    ];
    for (number, change) in changes.into_iter().enumerate() {
        let mut job = Job::formed(2, 2, false);
        (0..2).for_each(|at| job.ask(at, Some(tensor("weights", 10))));
        job.read();
        for at in 0..2 {
            let known = job.members[at].known.get_mut(&0).unwrap();
            assert_eq!(known.assignment.parts[0].core.unwrap().server, 0);
            change(&mut known.assignment.parts[0], at);
        }
        job.replace_scheduler();
        job.come_all();
        let Some(OverReason::Reforming { reason, .. }) = job.members[0].told.clone() else {
            panic!("{number}: {}", job.log());
        };
        assert!(reason.to_string().contains("would have other keys"), "{number}: {reason}");
    }
}
