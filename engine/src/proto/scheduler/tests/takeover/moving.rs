//! Servers that die under a scheduler that has followed a lost one: their keys move as under the
//! first, and each rank says how far it is.

use super::*;
use crate::proto::moving::{Adopted, HeldKey};

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
            assert!(member.told.is_none() && member.lost == 1, "{:?}", member.told);
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
    // What has moved only this scheduler knows.
    job.follow(&[4]);
    job.check_reforming("servers were lost");
}

#[test]
fn keys_move_from_a_server_that_has_died_with_the_scheduler() {
    Job::followed(true, &[4]).check_moved();
    // So has a rank, which nobody waits for.
    let job = Job::followed(true, &[1, 4]);
    job.check_moved();
    assert_eq!(job.members[0].gone, [Rank(1)]);
    let mut job = Job::formed(3, 2, true);
    job.follow(&[4]);
    job.check_reforming("the keys of server 1 can't move: a rank opens its lanes");
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
