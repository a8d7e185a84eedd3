//! Schedulers and members that die at random moments: what is known fits together afterwards, and
//! nobody waits for an answer.

use super::super::random::Random;
use super::*;

impl Job {
    /// All come by connections of their own, behind those that they have closed.
    fn come_again(&mut self) {
        for at in 0..self.members.len() {
            self.members[at].node += 100;
            self.come(at);
        }
        self.read();
    }

    /// The scheduler is lost, and those who live come to the next one, each at another moment. Only
    /// this rank has heard what the lost one has said last.
    fn lose_scheduler(&mut self, at: usize, (workers, servers): (u32, u32), random: &mut Random) {
        let node = self.members[at].node;
        for message in self.bench.heard(node) {
            if self.members[at].lives {
                self.hear(at, message);
            }
        }
        let heard = &mut self.members[at];
        if heard.told.take().is_some() {
            // It alone knows that the epoch is over, and would come back as a new one.
            heard.lives = false;
        }
        self.replace_scheduler();
        if random.one_in(4) {
            let at = random.small(workers + servers) as usize;
            self.members[at].lives = false;
        }
        let count = self.members.len();
        let mut order: Vec<usize> = (0..count).collect();
        (0..count).for_each(|at| order.swap(at, random.small(workers) as usize));
        for at in order {
            if self.members[at].lives && self.members[at].told.is_none() {
                self.come(at);
                if random.one_in(4) {
                    self.pass(250);
                }
            }
        }
        // One dies when it has come.
        if random.one_in(6) {
            let at = random.small(workers) as usize;
            self.kill(at);
        }
        self.pass(PATIENCE + 500);
    }

    /// The second scheduler leads everybody, and has told nobody anything else.
    fn check_led(&self) {
        let is_led = |member: &Member| member.term == 2 && member.told.is_none();
        assert!(self.members.iter().all(is_led), "{}", self.log());
    }
}

#[test]
fn schedulers_and_members_that_die_at_any_moment_leave_one_job_and_nobody_waits() {
    let (mut led, mut reformed, mut shrunk, mut moved, mut released) = (0, 0, 0, 0, 0);
    for seed in 0..1_500 {
        let mut random = Random::new(seed);
        let (workers, servers) = (2 + random.small(4), 1 + random.small(2));
        let mut job = Job::formed(workers, servers, random.one_in(2));
        let steps = 20 + random.below(60);
        for step in 0..steps {
            let at = random.small(workers) as usize;
            let is_in = job.members[at].lives && job.members[at].told.is_none();
            match random.below(10) {
                0..4 if is_in => {
                    let name = random.below(6);
                    job.ask(at, Some(tensor(&format!("t{name}"), 1_000 * (name + 1))));
                }
                4 if is_in && job.members[at].open.len() < 8 => job.ask(at, None),
                5..8 => job.read(),
                8 if random.one_in(6) => {
                    let at = random.small(workers + servers) as usize;
                    if at >= workers as usize && random.one_in(2) {
                        job.leave(at);
                    } else {
                        job.kill(at);
                    }
                }
                9 if random.one_in(3) || step + 1 == steps => {
                    job.lose_scheduler(at, (workers, servers), &mut random);
                }
                _ => job.pass(250),
            }
            if job.bench.done.is_some() || job.members.iter().any(|one| one.told.is_some()) {
                break;
            }
        }
        job.read();
        job.check(seed);
        if job.bench.done.is_some() || job.members.iter().any(|one| one.told.is_some()) {
            // As after any death; from here on the model of re-formation knows what follows. All
            // who live were told.
            let alive = job.members.iter().filter(|one| one.lives && one.is_worker());
            for member in alive {
                assert!(member.told.is_some(), "seed {seed}: {}\n{}", member.node, job.log());
            }
            reformed += 1;
            continue;
        }
        let is_led = job.bench.scheduler.term > 1;
        released += u32::from(is_led && job.members.iter().any(|one| one.is_released));
        led += u32::from(is_led);
        moved +=
            u32::from(is_led && job.members.iter().any(|one| one.lives && !one.lost.is_empty()));
        shrunk += u32::from(job.members.iter().any(|one| !one.gone.is_empty()));
        // Everybody who lives comes to the barrier that somebody is furthest at.
        let reached = |one: &Member| {
            one.passed + one.open.values().filter(|open| open.is_none()).count() as u64
        };
        let alive: Vec<usize> = (0..workers as usize).filter(|at| job.members[*at].lives).collect();
        let most = alive.iter().map(|at| reached(&job.members[*at])).max().unwrap_or(0);
        for at in &alive {
            while reached(&job.members[*at]) < most {
                job.ask(*at, None);
            }
            job.ask(*at, Some(tensor("last", 3_000)));
        }
        job.read();
        job.check(seed);
        for at in &alive {
            let member = &job.members[*at];
            assert!(member.open.is_empty(), "seed {seed}: {:?}\n{}", member.open, job.log());
            assert_eq!(member.passed, most, "seed {seed}");
        }
    }
    let seen = format!("{led}, {reformed}, {shrunk}, {moved}, {released}");
    assert!(led > 300 && reformed > 200 && shrunk > 50 && moved > 20 && released > 10, "{seen}");
}

#[test]
fn a_death_that_only_some_were_told_of_is_told_to_all() {
    let mut job = Job::formed(3, 2, true);
    (0..3).for_each(|at| job.ask(at, Some(tensor("weights", 10_000))));
    job.read();
    // The lost scheduler had told rank 1 and server 0, and not rank 2 and server 1.
    job.members[0].lives = false;
    for at in [1, 3] {
        job.members[at].gone = vec![Rank(0)];
    }
    job.replace_scheduler();
    job.come_all();
    for at in 1..5 {
        let member = &job.members[at];
        assert_eq!((member.term, &*member.gone), (2, &[Rank(0)][..]), "member {at}");
        assert!(member.told.is_none(), "member {at}: {:?}", member.told);
    }
}

#[test]
fn a_scheduler_that_was_stopped_while_it_took_over_does_not_take_others_for_dead() {
    let mut job = Job::formed(2, 1, false);
    job.replace_scheduler();
    job.come(0);
    job.bench.now += ms(PATIENCE + 2_000);
    // What has come meanwhile is read before time passes.
    job.come(1);
    job.come(2);
    job.read();
    assert!(job.members.iter().all(|member| member.told.is_none()), "{:?}", job.bench.log);
    assert!(job.members.iter().all(|member| member.term == 2), "{:?}", job.bench.log);
}

#[test]
fn a_server_that_its_epochs_roster_had_not_reached_is_taken_along() {
    for order in [[0, 1, 2], [2, 0, 1], [0, 2, 1]] {
        let mut job = Job::formed(2, 1, false);
        for at in 0..2 {
            job.members[at].roster.epoch = Epoch(2);
        }
        // It has forgotten the first one, and heard no more.
        job.members[2].reset = Some(Epoch(2));
        job.replace_scheduler();
        order.into_iter().for_each(|at| job.come(at));
        job.read();
        assert!(job.members[2].told.is_none(), "{order:?}: {}", job.log());
        assert_eq!(job.members[2].reset, Some(Epoch(3)), "{order:?}: {}", job.log());
        for at in 0..2 {
            let (node, session) = (job.members[at].node, job.members[at].register.session);
            assert!(matches!(job.members[at].told, Some(OverReason::Reforming { .. })));
            job.bench.back(node, 50 + at as u64, session);
        }
        let roster = job.bench.roster(51);
        assert_eq!((roster.size, roster.epoch, roster.servers.len()), (2, Epoch(3), 1));
    }
}

#[test]
fn a_server_that_keeps_an_epoch_that_is_over_is_not_taken_along() {
    // It has not forgotten the first one, or not for this one, or is another process.
    for (reset, pid) in [(None, 2000), (Some(Epoch(3)), 2000), (Some(Epoch(2)), 9)] {
        let mut job = Job::formed(2, 1, false);
        for at in 0..2 {
            job.members[at].roster.epoch = Epoch(2);
        }
        (job.members[2].reset, job.members[2].register.pid) = (reset, pid);
        job.replace_scheduler();
        job.come_all();
        let told = job.members[2].told.clone();
        assert!(matches!(told, Some(OverReason::NotFormed { .. })), "{reset:?}: {}", job.log());
    }
}

#[test]
fn members_that_notice_as_late_as_nodes_do_are_waited_for() {
    let mut job = Job::formed(3, 1, false);
    job.replace_scheduler();
    job.come(0);
    // One interval of 0.8 s and 9/8 of 3.2 s, of which the scheduler's limit is the sum.
    job.pass(800 + 3_200 * 9 / 8);
    (1..4).for_each(|at| job.come(at));
    job.read();
    job.check_led();
}

#[test]
fn members_that_lost_patience_with_a_stopped_scheduler_are_not_taken_for_dead() {
    let mut job = Job::formed(2, 2, false);
    job.replace_scheduler();
    (0..3).for_each(|at| job.come(at));
    // It is stopped here; what the last one says then waits, and behind it that all are gone.
    let (last, said) = (job.members[3].node, job.members[3].account());
    let (now, scheduler) = (job.bench.now, &mut job.bench.scheduler);
    scheduler.handle_connected(NodeId(last), now);
    said.into_iter().for_each(|message| scheduler.handle_message(NodeId(last), message, now));
    for member in &job.members {
        scheduler.handle_closed(NodeId(member.node), "connection closed", now);
    }
    scheduler.handle_heard(now);
    job.bench.drain();
    job.come_again();
    job.check_led();
}

#[test]
fn members_that_all_left_a_stopped_scheduler_may_come_to_it_again() {
    let mut job = Job::formed(2, 2, false);
    job.replace_scheduler();
    (0..3).for_each(|at| job.come(at));
    job.pass(4_000);
    // It is stopped here, so shortly that it can't tell, and members may take no longer to come.
    job.bench.now += ms(1_500);
    let (now, scheduler) = (job.bench.now, &mut job.bench.scheduler);
    for member in &job.members[..3] {
        scheduler.handle_closed(NodeId(member.node), "connection closed", now);
    }
    scheduler.handle_heard(now);
    scheduler.handle_tick(now);
    job.bench.drain();
    assert!(!job.bench.scheduler.is_over(), "{}", job.log());
    job.come_again();
    job.check_led();
}

#[test]
fn a_scheduler_that_was_stopped_gives_members_as_long_as_if_it_had_run() {
    let mut job = Job::formed(2, 2, false);
    job.replace_scheduler();
    job.come(0);
    // It is stopped here, and has not had its next tick.
    job.bench.now += Duration::from_secs(20);
    job.bench.scheduler.handle_heard(job.bench.now);
    job.bench.drain();
    (1..4).for_each(|at| job.come(at));
    job.read();
    job.check_led();
}

#[test]
fn a_scheduler_to_which_nobody_comes_again_ends() {
    let mut job = Job::formed(2, 2, false);
    job.replace_scheduler();
    job.come(0);
    let (now, node) = (job.bench.now, NodeId(job.members[0].node));
    job.bench.scheduler.handle_closed(node, "connection closed", now);
    job.bench.drain();
    job.pass(4_900);
    assert!(!job.bench.scheduler.is_over(), "{}", job.log());
    job.pass(600);
    assert!(job.bench.scheduler.is_over(), "{}", job.log());
    assert!(job.log().contains("no rank has come to the next one"), "{}", job.log());
}
