//! Servers that die under a scheduler that has followed a lost one: their keys move as under the
//! first, and each rank says how far it is.

use super::*;
use crate::proto::moving::{HeldKey, MovedKey};

impl Job {
    /// Three ranks that have declared a tensor in parts, led by a second scheduler; those of
    /// `dead` have died with the first one.
    fn followed(shrinks: bool, dead: &[usize]) -> Job {
        let mut job = Job::formed(3, 2, shrinks);
        (0..3).for_each(|at| job.ask(at, Some(tensor("weights", 10_000))));
        job.read();
        job.follow(dead);
        job
    }

    fn follow(&mut self, dead: &[usize]) {
        dead.iter().for_each(|&at| self.members[at].lives = false);
        self.replace_scheduler();
        self.come_all();
        if !dead.is_empty() {
            self.pass(PATIENCE + 250);
        }
    }

    /// Kills a member that lives and is of the epoch still.
    pub(super) fn kill(&mut self, at: usize) {
        if self.members[at].lives && self.members[at].told.is_none() {
            self.members[at].lives = false;
            self.bench.close(self.members[at].node);
        }
    }

    /// Nobody was told that an epoch ended, and the first server has all keys.
    fn check_moved(&self) {
        assert!(self.log().contains("1 server of 2 goes on without server 1"), "{}", self.log());
        assert!(self.log().contains(" moved to other servers within "), "{}", self.log());
        for member in self.members.iter().filter(|member| member.lives) {
            assert!(member.told.is_none() && member.lost == [1], "{:?}", member.told);
        }
        let [here, gone] = [3, 4].map(|at| &self.members[at].keys);
        assert!(!gone.is_empty() && gone.keys().all(|key| here.contains_key(key)));
    }

    /// Everybody who lives was told that the job forms again, and why.
    fn check_reforming(&self, words: &str) {
        assert!(self.log().contains(words), "{}", self.log());
        for member in self.members[..3].iter().filter(|member| member.lives) {
            assert!(matches!(member.told, Some(OverReason::Reforming { .. })), "{}", self.log());
        }
    }
}

#[test]
fn keys_of_a_server_that_dies_under_the_next_scheduler_move() {
    let mut job = Job::followed(true, &[]);
    job.kill(4);
    job.read();
    job.check_moved();
    for at in 0..3 {
        job.ask(at, Some(tensor("bias", 10)));
        job.ask(at, Some(tensor("weights", 10_000)));
        job.ask(at, None);
    }
    job.read();
    assert!(job.members[..3].iter().all(|member| member.open.is_empty()));
    let places = job.members[..3].iter().flat_map(|member| member.known.values());
    let mut parts = places.flat_map(|known| &known.assignment.parts);
    assert!(parts.all(|part| part.core.is_some_and(|core| core.server == 0)));
    // Where keys are by now, members tell the next one, and it goes on likewise.
    for term in 3..5 {
        job.follow(&[]);
        let goes_on = |member: &Member| member.term == term && member.told.is_none();
        assert!(job.members[..4].iter().all(goes_on), "{}", job.log());
        assert!(job.log().contains("3 ranks and 1 server of epoch 1"), "{}", job.log());
        assert!(!job.log().contains(" moved to other servers"), "{}", job.log());
        for at in 0..3 {
            job.ask(at, Some(tensor(&format!("of term {term}"), 10_000)));
            job.ask(at, None);
        }
        job.read();
        assert!(job.members[..3].iter().all(|member| member.open.is_empty()));
        job.check(term.into());
    }
    // The last server can't be done without.
    job.kill(3);
    job.read();
    assert!(job.log().contains("the keys of server 0 can't move: no other server is left"));
    assert_eq!(job.bench.done, Some(Exit::Failed));
}

#[test]
fn keys_move_from_a_server_that_has_died_with_the_scheduler() {
    Job::followed(true, &[4]).check_moved();
    // So has a rank, which nobody waits for.
    let job = Job::followed(true, &[1, 4]);
    job.check_moved();
    assert_eq!(job.members[0].gone, [Rank(1)]);
    // Ranks that have come have their lanes, whether or not they know a tensor.
    let mut job = Job::formed(3, 2, true);
    job.follow(&[4]);
    assert!(job.members[..4].iter().all(|member| member.told.is_none()), "{}", job.log());
    assert!(job.log().contains("1 server of 2 goes on without server 1"), "{}", job.log());
    for at in 0..3 {
        job.ask(at, Some(tensor("weights", 10_000)));
    }
    job.read();
    assert!(
        job.members[..3].iter().all(|member| member.open.is_empty() && member.known.len() == 1)
    );
    job.check(0);
}

#[test]
fn results_that_some_lack_are_restored_under_the_next_scheduler() {
    let mut job = Job::followed(true, &[]);
    let key = *job.members[4].keys.keys().next().expect("it has some");
    job.kill(4);
    for (at, rounds) in [(0, 7), (1, 6), (2, 7)] {
        let node = job.members[at].node;
        let heard = job.bench.heard(node);
        let lost = |one: &SchedulerMessage| {
            matches!(one, SchedulerMessage::Moving(MovingOrder::Lost { servers, .. })
                if servers == &[1])
        };
        assert!(heard.iter().any(lost), "{heard:?}");
        let keys = vec![HeldKey { key, rounds, holds: at == 2 }];
        let report = MovingReport::Held { lost: 1, keys };
        job.bench.say(node, NodeMessage::Moving(report));
    }
    let node = job.members[3].node;
    let heard = job.bench.heard(node);
    let adopted = heard.iter().find_map(|one| match one {
        SchedulerMessage::Moving(MovingOrder::Adopt { request, keys }) => Some((*request, keys)),
        _ => None,
    });
    let (request, keys) = adopted.expect("it adopts them");
    let of = |one: &&Adopted| one.spec.key == key;
    let one = keys.iter().find(of).expect("this one, too");
    assert_eq!((one.spec.rounds, one.restores), (6, true));
    // An answer to the lost scheduler, of as many requests, is none to this one.
    job.bench.say(node, NodeMessage::Installed { request: request & 0xffff_ffff });
    assert!(!job.log().contains(" moved to other servers"), "{}", job.log());
    job.bench.say(node, NodeMessage::Installed { request });
    assert!(job.log().contains("1 of them with a result"), "{}", job.log());
    // It alone can give that.
    job.kill(2);
    job.read();
    job.check_reforming("can't go on without rank 2: it alone has results that others lack");
}

#[test]
fn an_epoch_that_began_without_shrink_forms_again() {
    for at in [2, 4] {
        let mut job = Job::formed(3, 2, false);
        (0..3).for_each(|at| job.ask(at, Some(tensor("weights", 10_000))));
        job.read();
        // The next scheduler was started with other variables: ranks have kept no results.
        job.config.elastic = Some(elastic(true));
        job.follow(&[]);
        job.kill(at);
        job.read();
        job.check_reforming("epoch 2 forms from who is left");
    }
}

/// What the second scheduler has done when it is lost: all is on its way from a server that died,
/// or that was let go.
struct Moment {
    /// That one was let go, and whether it has read so.
    leaves: Option<bool>,
    /// The first server has said that there is room.
    is_adopted: bool,
    /// These ranks were told where the keys are.
    told: &'static [usize],
}

impl Job {
    /// A server goes under the second scheduler, and this is lost in the middle of what it does.
    /// Rank 1 lacks the last result of a key, which the ranks of `holders` have.
    fn interrupted(moment: &Moment, holders: &[usize]) -> (Job, Key) {
        let mut job = Job::followed(true, &[]);
        let key = *job.members[4].keys.keys().next().expect("it has some");
        for at in 0..3 {
            job.members[at].rounds = BTreeMap::from([(key, if at == 1 { 6 } else { 7 })]);
            job.members[at].is_holder = holders.contains(&at);
        }
        let hear = |job: &mut Job, at: usize| {
            let node = job.members[at].node;
            job.bench.heard(node).into_iter().for_each(|message| job.hear(at, message));
        };
        match moment.leaves {
            None => job.kill(4),
            Some(reads) => {
                job.leave(4);
                if reads {
                    hear(&mut job, 4);
                    assert!(job.members[4].is_released, "it was let go");
                }
            }
        }
        (0..3).for_each(|at| hear(&mut job, at));
        if moment.is_adopted {
            hear(&mut job, 3);
        } else {
            job.members[3].lost = vec![1];
        }
        moment.told.iter().for_each(|at| hear(&mut job, *at));
        job.replace_scheduler();
        (job, key)
    }

    /// Where a member was told last that a key is.
    fn moved(&self, at: usize, key: Key) -> Option<MovedKey> {
        self.members[at].moved.get(&key).copied()
    }
}

#[test]
fn a_move_that_a_scheduler_had_begun_is_ended_by_the_next_one() {
    let moments = [
        (false, &[][..]),
        (true, &[]),
        (true, &[0]),
        (true, &[1]),
        (true, &[0, 2]),
        (true, &[0, 1, 2]),
    ];
    for leaves in [None, Some(true), Some(false)] {
        for (is_adopted, told) in moments {
            let moment = Moment { leaves, is_adopted, told };
            let (mut job, key) = Job::interrupted(&moment, &[0, 2]);
            job.come_all();
            for at in 0..4 {
                assert!(job.members[at].told.is_none(), "{told:?}: {}", job.log());
                assert_eq!(job.members[at].term, 3, "{told:?}: {}", job.log());
            }
            // One that had not read that it was let go is not taken along, and ends.
            let is_out = job.members[4].is_released || leaves.is_none();
            assert!(is_out, "{leaves:?}, {told:?}: {}", job.log());
            let first = job.moved(0, key).expect("it was told once");
            assert_eq!((first.rounds, first.restores, first.core.server), (6, true, 0));
            assert!((1..3).all(|at| job.moved(at, key) == Some(first)), "{told:?}");
            // Ranks that knew were not told again, and the server made room once.
            for at in 0..3 {
                assert_eq!(job.members[at].moves, 1, "rank {at}, {told:?}");
            }
            assert_eq!(job.members[3].adoptions, 1, "{told:?}");
        }
    }
}

#[test]
fn a_server_that_asks_the_next_scheduler_is_let_go_once_earlier_moves_are_over() {
    let mut job = Job::formed(3, 3, true);
    (0..3).for_each(|at| job.ask(at, Some(tensor("weights", 10_000))));
    job.read();
    job.leave(5);
    job.read();
    assert!(job.members[5].is_released, "{}", job.log());
    job.replace_scheduler();
    // It was told while there was no scheduler.
    job.members[4].leaves = true;
    job.come_all();
    job.pass(250);
    assert!(job.members[4].is_released, "{}", job.log());
    assert!(job.members[..4].iter().all(|member| member.told.is_none()), "{}", job.log());
    assert!(job.members[..4].iter().all(|member| member.lost == [2, 1]), "{}", job.log());
    let places = job.members[..3].iter().flat_map(|member| member.known.values());
    let mut parts = places.flat_map(|known| &known.assignment.parts);
    assert!(parts.all(|part| part.core.is_some_and(|core| core.server == 0)));
    assert_eq!(job.bench.scheduler.view(job.bench.now).deaths, 0);
    job.check(0);
    // And the one that follows goes on with what is left.
    job.follow(&[]);
    let goes_on = |member: &Member| member.term == 3 && member.told.is_none();
    assert!(job.members[..4].iter().all(goes_on), "{}", job.log());
    job.check(1);
}

#[test]
fn a_result_that_nobody_can_give_any_more_makes_the_job_form_again() {
    // Its only holder dies with the scheduler, before the server has it or somebody was told.
    for told in [&[][..], &[1], &[0, 1, 2]] {
        let (mut job, _) = Job::interrupted(&Moment { leaves: None, is_adopted: true, told }, &[2]);
        job.members[2].lives = false;
        job.come_all();
        job.pass(PATIENCE + 250);
        let is_told =
            |at: usize| matches!(job.members[at].told, Some(OverReason::Reforming { .. }));
        assert!((0..2).all(is_told), "{told:?}: {}", job.log());
        assert!(job.log().contains("no rank has the last result of `weights`"), "{}", job.log());
    }
}

#[test]
fn a_server_that_was_given_up_is_not_taken_along() {
    let mut job = Job::followed(true, &[]);
    job.kill(4);
    job.read();
    // It was out of reach, and has not heard of it.
    job.members[4].lives = true;
    job.replace_scheduler();
    (0..5).rev().for_each(|at| job.come(at));
    job.read();
    assert!(job.members[..4].iter().all(|member| member.told.is_none()), "{}", job.log());
    let told = job.members[4].told.clone();
    assert!(matches!(told, Some(OverReason::NotFormed { .. })), "{told:?}");
    assert!(job.log().contains("3 ranks and 1 server of epoch 1"), "{}", job.log());
}

#[test]
fn a_scheduler_without_shrink_forms_a_job_again_whose_keys_have_moved() {
    let mut job = Job::followed(true, &[]);
    job.kill(4);
    job.read();
    job.config.elastic = Some(elastic(false));
    job.follow(&[]);
    job.check_reforming("servers were lost, and this scheduler has no BPS_ELASTIC=shrink");
}

#[test]
fn members_that_know_of_different_deaths_do_not_go_on_together() {
    let mut job = Job::formed(3, 3, true);
    (0..3).for_each(|at| job.ask(at, Some(tensor("weights", 10_000))));
    job.read();
    job.members[0].lost = vec![1];
    job.members[1].lost = vec![2];
    job.follow(&[]);
    job.check_reforming("members know of different servers that are lost");
}

#[test]
fn what_there_can_not_be_of_servers_and_keys_closes_the_connection_that_says_so() {
    let lists = [&[0, 1][..], &[1, 1], &[2]];
    for lost in lists {
        let mut job = Job::formed(2, 2, true);
        job.replace_scheduler();
        job.members[0].lost = lost.to_vec();
        job.come(0);
        assert!(job.log().ends_with("what it says of the job can't be"), "{}", job.log());
        assert!(job.bench.closed.contains(&NodeId(job.members[0].node)));
        // Nobody has come yet, as far as this scheduler is concerned.
        job.members[0].lost.clear();
        job.members[0].node += 100;
        job.come_all();
        assert!(job.members.iter().all(|member| member.term == 2), "{}", job.log());
    }
    // More keys than were announced.
    let mut job = Job::followed(true, &[]);
    job.kill(4);
    job.read();
    job.replace_scheduler();
    job.come(3);
    let adopted: Vec<AdoptedKey> = job.members[3].adopted.values().copied().take(1).collect();
    let node = job.members[3].node;
    job.bench.say(node, NodeMessage::Known { tensors: Vec::new(), adopted });
    assert!(job.log().contains("more tensors or keys than it has announced"), "{}", job.log());
    assert!(job.bench.closed.contains(&NodeId(node)));
}
