//! A scheduler that follows a lost one: what it learns, who is refused, and when it leads.

mod leaving;
mod member;
mod moments;
mod moving;
mod places;

use self::member::Member;
use super::elastic::worker;
use super::*;
use crate::proto::moving::{Adopted, MovingOrder, MovingReport};
use crate::proto::resume::{AdoptedKey, KnownTensor};

/// 5/4 of the heartbeats' timeout.
const PATIENCE: u64 = 5_000;

fn elastic(shrinks: bool) -> Elastic {
    Elastic { shrinks, min_workers: 1, patience: ms(0), notice: ms(60_000) }
}

/// Members of one job, and the scheduler that leads them.
struct Job {
    bench: Bench,
    members: Vec<Member>,
    next: u64,
    config: SchedulerConfig,
    answers: u64,
}

impl Job {
    fn formed(workers: u32, servers: u32, shrinks: bool) -> Job {
        let mut bench = super::elastic::come_together(workers, servers, elastic(shrinks));
        let mut members = Vec::new();
        for at in 0..workers {
            let register =
                Register { session: 1000 + u64::from(at), ..worker_register(at, workers, servers) };
            let node = u64::from(at);
            members.push(Member::new(node, register, bench.roster(node)));
        }
        for at in 0..servers {
            let node = 100 + u64::from(at);
            let session = 2000 + u64::from(at);
            let register = Register { session, ..server_register(at, workers, servers) };
            members.push(Member::new(node, register, bench.roster(node)));
        }
        let config = bench.scheduler.config.clone();
        Job { bench, members, next: 1_000, config, answers: 0 }
    }

    /// The scheduler is killed, and another takes its place; what was under way is lost.
    fn replace_scheduler(&mut self) {
        let Bench { now, .. } = self.bench;
        let config = SchedulerConfig { job: "another".into(), ..self.config.clone() };
        let mut bench = Bench::new(1, 1);
        bench.scheduler = Scheduler::new(config, now);
        bench.now = now;
        self.bench = bench;
        for at in 0..self.members.len() {
            self.next += 1;
            self.members[at].node = self.next;
        }
    }

    /// A member that lives comes to the new scheduler.
    fn come(&mut self, at: usize) {
        let (node, messages) = (self.members[at].node, self.members[at].account());
        self.bench.connect(node);
        for message in messages {
            self.bench.say(node, message);
        }
    }

    /// A server is told to leave, and asks to be let go.
    fn leave(&mut self, at: usize) {
        let member = &mut self.members[at];
        if member.lives && member.told.is_none() && !member.leaves {
            member.leaves = true;
            self.bench.say(member.node, NodeMessage::Leave { suspend: false });
        }
    }

    fn come_all(&mut self) {
        for at in 0..self.members.len() {
            if self.members[at].lives && self.members[at].told.is_none() {
                self.come(at);
            }
        }
        self.read();
    }

    fn ask(&mut self, at: usize, declared: Option<Declaration>) {
        let member = &mut self.members[at];
        member.next += 1;
        let request = member.next;
        member.open.insert(request, declared);
        self.repeat(at, request);
    }

    fn repeat(&mut self, at: usize, request: u64) {
        let node = self.members[at].node;
        match self.members[at].open[&request].clone() {
            Some(said) => self.bench.declare(node, request, &[said]),
            None => self.bench.say(node, NodeMessage::Barrier { request }),
        }
    }

    /// Members do what they are told, except that servers may be slow to answer.
    fn read(&mut self) {
        for _ in 0..100 {
            let mut is_quiet = true;
            for at in 0..self.members.len() {
                let node = self.members[at].node;
                for message in self.bench.heard(node) {
                    if self.members[at].lives {
                        is_quiet = false;
                        self.hear(at, message);
                    }
                }
            }
            if is_quiet {
                return;
            }
        }
        panic!("they talk for ever");
    }

    fn hear(&mut self, at: usize, message: SchedulerMessage) {
        let member = &mut self.members[at];
        match message {
            SchedulerMessage::Install { request, keys } => {
                for spec in keys {
                    let before = member.keys.insert(spec.key, spec.clone());
                    assert!(before.is_none_or(|known| known == spec), "a key means two things");
                }
                let node = member.node;
                self.bench.say(node, NodeMessage::Installed { request });
            }
            SchedulerMessage::Declared { request, tensors } => {
                let said = member.open.remove(&request).expect("answered twice").expect("declared");
                let assignment = tensors[0].clone();
                let known = KnownTensor { said, assignment, holds: Vec::new() };
                let before = member.known.insert(known.assignment.tensor, known.clone());
                // Its parts may be elsewhere once servers were lost.
                let is_same = |before: KnownTensor| !member.lost.is_empty() || before == known;
                assert!(before.is_none_or(is_same), "a tensor means two things");
                self.answers += 1;
            }
            SchedulerMessage::BarrierDone { request } => {
                assert_eq!(member.open.remove(&request), Some(None), "passed twice");
                member.passed += 1;
                self.answers += 1;
            }
            SchedulerMessage::Resumed { term } => {
                assert!(term > member.term, "term {term} after {}", member.term);
                member.term = term;
                if member.leaves {
                    self.bench.say(member.node, NodeMessage::Leave { suspend: false });
                }
                let open: Vec<u64> = member.open.keys().copied().collect();
                open.into_iter().for_each(|request| self.repeat(at, request));
            }
            SchedulerMessage::Reset { epoch } => {
                member.reset = Some(epoch);
                let node = member.node;
                self.bench.say(node, NodeMessage::ResetDone { epoch });
            }
            SchedulerMessage::Moving(MovingOrder::Lost { servers, .. }) => {
                member.lost = servers;
                if member.is_worker() {
                    let (node, lost) = (member.node, word(member.lost.len()));
                    let report = MovingReport::Held { lost, keys: member.held() };
                    self.bench.say(node, NodeMessage::Moving(report));
                }
            }
            SchedulerMessage::Moving(MovingOrder::Adopt { request, keys }) => {
                member.adoptions += 1;
                for Adopted { spec, restores } in keys {
                    let (key, core, rounds) = (spec.key, spec.core, spec.rounds);
                    member.adopted.insert(key, AdoptedKey { key, core, rounds, restores });
                    member.keys.insert(key, spec);
                }
                let node = member.node;
                self.bench.say(node, NodeMessage::Installed { request });
            }
            SchedulerMessage::Moving(MovingOrder::Moved { keys }) => {
                member.moves += u32::from(!keys.is_empty());
                member.moved.extend(keys.iter().map(|one| (one.key, *one)));
                let parts = member.known.values_mut().flat_map(|one| &mut one.assignment.parts);
                for part in parts {
                    let moved = keys.iter().find(|one| one.key == part.key);
                    part.core = moved.map(|one| one.core).or(part.core);
                }
            }
            SchedulerMessage::Shrunk(shrunk) => member.gone = shrunk.gone,
            // The job goes on without it, as it has asked.
            SchedulerMessage::Over {
                reason: OverReason::Left { .. } | OverReason::NotFormed { .. },
            } if member.leaves => (member.lives, member.is_released) = (false, true),
            SchedulerMessage::Over { reason } => member.told = Some(reason),
            SchedulerMessage::Waiting { .. }
            | SchedulerMessage::Newcomers { .. }
            | SchedulerMessage::Roster(_)
            | SchedulerMessage::Stall { .. } => {}
            other => panic!("{other:?}"),
        }
    }

    fn pass(&mut self, milliseconds: u64) {
        let lives = |member: &&Member| member.lives && member.told.is_none();
        let alive: Vec<u64> = self.members.iter().filter(lives).map(|member| member.node).collect();
        self.bench.pass(milliseconds, &alive);
        self.read();
    }

    fn log(&self) -> String {
        self.bench.log.join("\n")
    }

    /// What every rank knows of every tensor, and servers of every key, fits together.
    fn check(&self, seed: u64) {
        let mut names: BTreeMap<String, u32> = BTreeMap::new();
        let mut keys: BTreeMap<Key, u32> = BTreeMap::new();
        // What one that is dead was the only one to know is forgotten.
        for member in self.members.iter().filter(|member| member.lives) {
            for (tensor, known) in &member.known {
                let same = names.entry(known.said.name.clone()).or_insert(*tensor);
                assert_eq!(same, tensor, "seed {seed}: {} is two tensors", known.said.name);
                for part in &known.assignment.parts {
                    assert_eq!(keys.entry(part.key).or_insert(*tensor), tensor, "seed {seed}");
                    let core = part.core.expect("it is summed by a server");
                    let is_of = |one: &&Member| !one.is_worker() && one.roster.index == core.server;
                    let server = self.members.iter().find(is_of).expect("a server");
                    let spec = server.keys.get(&part.key);
                    let spec = spec.unwrap_or_else(|| panic!("seed {seed}: {part:?} has no room"));
                    assert_eq!((spec.bytes, spec.core), (part.bytes, core.core), "seed {seed}");
                }
            }
        }
    }
}

#[test]
fn the_next_scheduler_leads_the_same_job_and_answers_what_was_open() {
    let mut job = Job::formed(3, 2, false);
    for at in 0..3 {
        job.ask(at, Some(tensor("weights", 10_000)));
    }
    job.read();
    // One rank waits in a barrier, and only it knows of a further tensor.
    job.ask(0, Some(tensor("bias", 10)));
    job.ask(0, None);
    job.read();
    assert_eq!((job.answers, job.members[0].open.len()), (4, 1));
    job.replace_scheduler();
    // It is asked for a tensor while nobody leads.
    job.members[1].next += 1;
    let late = job.members[1].next;
    job.members[1].open.insert(late, Some(tensor("late", 500)));
    for at in 0..4 {
        job.come(at);
    }
    job.read();
    assert!(job.members.iter().all(|member| member.term == 1), "server 1 has not come");
    job.pass(1_250);
    assert!(job.log().contains("waiting for server 1 (1 s)"), "{}", job.log());
    job.come(4);
    job.read();
    assert!(job.members.iter().all(|member| member.term == 2));
    assert!(job.log().contains("term 2: 3 ranks and 2 servers of epoch 1"), "{}", job.log());
    assert!(job.members[1].open.is_empty(), "the late declaration is answered");
    // Old and new names mean what they should, to who knew them and who did not.
    for at in [1, 2] {
        for name in ["weights", "bias", "late"] {
            let count = if name == "weights" {
                10_000
            } else if name == "bias" {
                10
            } else {
                500
            };
            job.ask(at, Some(tensor(name, count)));
        }
        job.ask(at, None);
    }
    job.read();
    job.check(0);
    assert_eq!(job.members[2].known.len(), 3);
    assert!(job.members.iter().all(|member| member.open.is_empty()), "the barrier is passed");
    for at in 0..3 {
        job.bench.say(job.members[at].node, NodeMessage::Leave { suspend: false });
    }
    assert_eq!(job.bench.done, Some(Exit::Finished));
}

#[test]
fn a_barrier_that_some_have_passed_is_passed_by_all_once() {
    let mut job = Job::formed(2, 1, false);
    (0..2).for_each(|at| job.ask(at, None));
    // The answer to rank 1 is lost with the scheduler.
    let node = job.members[0].node;
    for message in job.bench.heard(node) {
        job.hear(0, message);
    }
    job.replace_scheduler();
    job.come_all();
    assert!(job.members[1].open.is_empty() && job.members[1].passed == 1);
    // The next one needs both.
    job.ask(1, None);
    job.read();
    assert_eq!(job.members[1].open.len(), 1);
    job.ask(0, None);
    job.read();
    assert!(job.members.iter().all(|member| member.open.is_empty()));
}

#[test]
fn who_died_meanwhile_is_a_death_once_the_time_is_over() {
    for (shrinks, at, words) in [
        (false, 1, "rank 1 (host w1, pid 1001) died"),
        (false, 3, "server 0 (host s0, pid 2000) died"),
        (true, 1, "2 ranks of 3 go on without rank 1"),
    ] {
        let mut job = Job::formed(3, 2, shrinks);
        (0..3).for_each(|at| job.ask(at, Some(tensor("weights", 10_000))));
        job.read();
        job.members[at].lives = false;
        job.replace_scheduler();
        job.come_all();
        job.pass(PATIENCE - 250);
        assert!(job.members[0].term == 1 && job.members[0].told.is_none());
        job.pass(500);
        assert!(job.log().contains(words), "{}", job.log());
        if shrinks {
            assert_eq!((job.members[2].term, &*job.members[2].gone), (2, &[Rank(1)][..]));
            assert!(job.members[2].told.is_none());
            // A second scheduler knows it too, and waits for nobody.
            job.replace_scheduler();
            job.come_all();
            assert_eq!(job.members[2].term, 3);
            job.ask(0, None);
            job.ask(2, None);
            job.read();
            assert!(job.members.iter().all(|member| member.open.is_empty()));
        } else {
            let told = job.members[0].told.clone();
            assert!(matches!(told, Some(OverReason::Reforming { .. })), "{told:?}");
        }
    }
}

#[test]
fn several_deaths_at_once_form_one_epoch_of_who_is_left() {
    let mut job = Job::formed(4, 2, false);
    for at in [0, 2, 5] {
        job.members[at].lives = false;
    }
    job.replace_scheduler();
    job.come_all();
    job.pass(PATIENCE + 250);
    for (new, at) in [(51, 1), (53, 3)] {
        let (node, session) = (job.members[at].node, job.members[at].register.session);
        assert!(matches!(job.members[at].told, Some(OverReason::Reforming { .. })));
        job.bench.back(node, new, session);
    }
    let roster = job.bench.roster(53);
    assert_eq!((roster.size, roster.epoch, roster.term), (2, Epoch(2), 2));
    assert_eq!((roster.index, roster.servers.len()), (1, 1));
    // One that was given up and lives is refused.
    job.bench.connect(60);
    let account = job.members[0].account().remove(0);
    job.bench.say(60, account);
    assert!(job.bench.refusal(60).contains("was given up"));
}

#[test]
fn a_scheduler_of_a_lower_term_ends_without_a_word_to_the_members() {
    // It hears of the other by a member's last word, or by one that dials it.
    for by_word in [true, false] {
        let mut job = Job::formed(2, 1, false);
        if by_word {
            job.bench.say(0, NodeMessage::Deposed { term: 1 });
            assert_eq!(job.bench.done, None, "that is its own term");
            job.bench.say(0, NodeMessage::Deposed { term: 2 });
        } else {
            job.members[0].term = 2;
            job.bench.connect(70);
            let account = job.members[0].account().remove(0);
            job.bench.say(70, account);
        }
        assert_eq!(job.bench.done, Some(Exit::Failed));
        assert!(job.log().contains("a scheduler of term 2 leads this job"), "{}", job.log());
        for node in [0, 1, 100] {
            assert!(job.bench.heard(node).is_empty());
            assert!(job.bench.closed.contains(&NodeId(node)));
        }
    }
}

#[test]
fn a_second_connection_of_a_member_that_is_here_is_closed_and_changes_nothing() {
    let mut job = Job::formed(2, 1, false);
    job.bench.connect(70);
    let account = job.members[0].account().remove(0);
    job.bench.say(70, account);
    assert_eq!(job.bench.closed, [NodeId(70)]);
    job.ask(0, Some(tensor("weights", 10)));
    job.read();
    assert!(job.members[0].open.is_empty());
    // Nor does one of another job.
    job.bench.connect(71);
    let mut stranger = job.members[0].clone();
    (stranger.roster.job, stranger.register.session) = ("other".into(), 77);
    job.bench.say(71, stranger.account().remove(0));
    assert_eq!(job.bench.closed, [NodeId(70), NodeId(71)]);
    assert_eq!(job.bench.done, None);
}

#[test]
fn what_only_the_lost_one_knew_makes_the_job_form_again() {
    type Change = fn(&mut Job);
    let changes: [(Change, &str); 3] = [
        (|job| job.members[1].known.clear(), ""),
        (
            |job| {
                let known = job.members[0].known.get_mut(&1).unwrap();
                known.assignment.parts[0].key = Key(77);
            },
            "would have other keys",
        ),
        (|job| job.members[3].reset = Some(Epoch(2)), "an epoch was about to form"),
    ];
    for (change, words) in changes {
        let mut job = Job::formed(3, 1, false);
        for name in ["a", "b"] {
            (0..2).for_each(|at| job.ask(at, Some(tensor(name, 10_000))));
        }
        job.read();
        change(&mut job);
        job.replace_scheduler();
        job.come_all();
        if words.is_empty() {
            assert_eq!(job.members[0].told, None, "{}", job.log());
            continue;
        }
        let Some(OverReason::Reforming { reason, .. }) = job.members[0].told.clone() else {
            panic!("{words}: {}", job.log());
        };
        assert!(reason.to_string().contains(words), "{reason}");
    }
}

#[test]
fn ranks_that_had_left_are_not_missed_and_newcomers_wait() {
    let mut job = Job::formed(3, 1, false);
    job.bench.say(2, NodeMessage::Leave { suspend: false });
    job.members[2].lives = false;
    job.members[3].left = vec![Rank(2)];
    job.replace_scheduler();
    // A new one comes before anybody of the job, and one that was between two epochs behind.
    job.bench.join(80, Register { session: 80, ..worker_register(0, 3, 1) });
    job.come_all();
    job.bench.join(81, worker(0, 81, Some(4711)));
    job.pass(2_000);
    assert!(job.members[..2].iter().all(|member| member.term == 2), "{}", job.log());
    assert_eq!(job.bench.early_count(), 2);
    // One says good-bye while the next scheduler still waits for others.
    job.replace_scheduler();
    job.come(0);
    job.bench.say(job.members[0].node, NodeMessage::Leave { suspend: false });
    job.members[0].lives = false;
    job.come_all();
    job.pass(2_000);
    job.bench.say(job.members[1].node, NodeMessage::Leave { suspend: false });
    assert_eq!(job.bench.done, Some(Exit::Finished), "{}", job.log());
}

#[test]
fn a_job_without_any_rank_ends_and_one_that_had_finished_ends_well() {
    for has_left in [true, false] {
        let mut job = Job::formed(2, 1, false);
        (0..2).for_each(|at| job.members[at].lives = false);
        if has_left {
            job.members[2].left = vec![Rank(0), Rank(1)];
        }
        job.replace_scheduler();
        job.come_all();
        job.pass(PATIENCE + 250);
        let exit = if has_left { Exit::Finished } else { Exit::Failed };
        assert_eq!(job.bench.done, Some(exit), "{}", job.log());
        assert!(job.members[2].told.is_some());
    }
}

#[test]
fn ranks_between_two_epochs_are_let_in_as_new_ones() {
    let mut job = Job::formed(2, 1, false);
    job.members[2].reset = Some(Epoch(2));
    job.replace_scheduler();
    job.come(2);
    for at in 0..2u64 {
        job.bench.join(90 + at, worker(9, 90 + at, Some(1000 + at)));
    }
    job.members[..2].iter_mut().for_each(|member| member.lives = false);
    for _ in 0..20 {
        job.bench.pass(250, &[90, 91]);
        job.pass(250);
        if job.bench.scheduler.epoch == Epoch(3) {
            break;
        }
    }
    let found = job.bench.heard(91).pop();
    let Some(SchedulerMessage::Roster(roster)) = found else { panic!("{}", job.log()) };
    assert_eq!((roster.size, roster.epoch, roster.term), (2, Epoch(3), 2));
}

#[test]
fn ranks_that_disagree_are_told_with_their_frameworks_by_the_next_scheduler_too() {
    let mut job = Job::formed(3, 1, true);
    for (at, framework) in (0..3).zip([Some("PyTorch"), Some("JAX"), None]) {
        let Node::Worker { speaks, .. } = &mut job.members[at].register.node else {
            unreachable!()
        };
        *speaks = framework.map(str::to_owned);
    }
    (0..3).for_each(|at| job.ask(at, Some(tensor("weights", 10))));
    job.read();
    // The last rank has died, and nobody who has come knows what it spoke; rank 1 comes late.
    job.members[2].lives = false;
    job.replace_scheduler();
    [0, 3].into_iter().for_each(|at| job.come(at));
    job.read();
    job.pass(250);
    job.come(1);
    job.pass(PATIENCE + 250);
    assert_eq!((job.members[0].term, &*job.members[0].gone), (2, &[Rank(2)][..]));
    for (term, name) in [(2, "bias"), (3, "scale")] {
        assert_eq!(job.members[0].term, term);
        let nodes = [job.members[0].node, job.members[1].node];
        job.bench.declare(nodes[0], 50, &[tensor(name, 10)]);
        job.bench.declare(nodes[1], 50, &[tensor(name, 11)]);
        for node in nodes {
            let told = job.bench.heard(node);
            let found = told.iter().find_map(|message| match message {
                SchedulerMessage::Mismatch(mismatch) => Some(mismatch.frameworks.clone()),
                _ => None,
            });
            let both = Frameworks { first: Some("PyTorch".into()), second: Some("JAX".into()) };
            assert_eq!(found, Some(both), "term {term}: {told:?}");
        }
        // And by the one after it.
        job.replace_scheduler();
        job.come_all();
    }
}
