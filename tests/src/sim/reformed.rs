//! Simulated jobs that form again: ranks, servers and schedulers die at random moments, also while
//! the job forms, or forms again, and others come. Each rank runs what `bps.elastic.run` does: it
//! takes the state of whoever has committed most, makes steps, and begins anew when its epoch ends.
//!
//! Each rank contributes in a digit of its own, beside the step that it makes, so a result shows
//! who is in it and that all of them made the same step. All ranks have the same results and the
//! same state behind each step; nobody hangs, and nobody is taken for dead who lives.

mod fate;

use self::fate::Fate;
use super::cluster::Cluster;
use super::shape::{Groups, Shape};
use super::tensors::shuffle;
use super::workload::{DEADLINE, TURNS_MAX};
use bps_engine::base::{DType, Operation, Rank};
use bps_engine::optimize::Act;
use bps_engine::proto::messages::{Declaration, Roster};
use bps_engine::proto::scheduler::Elastic;
use bps_engine::transport::sim::Random;
use bps_worker::job::nic_loop::Command;
use bps_worker::rounds::Memory;
use bps_worker::task::Task;
use bps_worker::{Error, Handle, Members};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// What happens to the job.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trouble {
    /// Ranks and servers die.
    Deaths,
    /// Schedulers are lost as well, also while the job forms.
    Schedulers,
    /// And lanes break, and ranks are out of the scheduler's reach.
    Paths,
    /// And ranks and servers come, of which some die.
    Newcomers,
    /// And servers are told to leave.
    Leavers,
    /// Ranks and servers die, and the scheduler stops for a while when ranks are between epochs.
    Stopped,
}

/// What was seen.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Reformed {
    /// Results that were compared.
    pub checked: u64,
    /// Steps that ranks have committed.
    pub steps: u64,
    /// Epochs that ranks went on to.
    pub epochs: u64,
    /// Ranks that took the state of one that had committed more often.
    pub caught_up: u64,
    /// Ranks that were killed.
    pub ranks: u64,
    /// Of these, such as were between two epochs, or new.
    pub between: u64,
    /// Servers that were killed.
    pub servers: u64,
    /// Servers that were told to leave.
    pub leavers: u64,
    /// Of these, such as were let go.
    pub let_go: u64,
    /// Schedulers that were killed or stopped.
    pub schedulers: u64,
    /// Of these, while ranks were between two epochs.
    pub forming: u64,
    /// Of these, before all nodes knew the job, which is its end.
    pub unformed: u64,
    /// Lanes that were cut.
    pub cuts: u64,
    /// Ranks that the scheduler could not reach for a moment.
    pub parted: u64,
    /// Of these, such as were given up and told so.
    pub given_up: u64,
    /// Ranks that came later.
    pub joined: u64,
    /// Servers that did.
    pub joined_servers: u64,
    /// Ranks that were let in.
    pub let_in: u64,
    /// Such as ended because the scheduler was lost before they were.
    pub sent_away: u64,
}

impl Reformed {
    /// Each with its name.
    pub fn counts(&mut self) -> [(&'static str, &mut u64); 19] {
        [
            ("results", &mut self.checked),
            ("steps", &mut self.steps),
            ("epochs of ranks", &mut self.epochs),
            ("ranks caught up", &mut self.caught_up),
            ("ranks died", &mut self.ranks),
            ("of them between epochs", &mut self.between),
            ("servers died", &mut self.servers),
            ("servers told to leave", &mut self.leavers),
            ("of them let go", &mut self.let_go),
            ("schedulers lost", &mut self.schedulers),
            ("of them between epochs of ranks", &mut self.forming),
            ("of them before the job knew itself", &mut self.unformed),
            ("lanes cut", &mut self.cuts),
            ("ranks parted", &mut self.parted),
            ("of them given up", &mut self.given_up),
            ("ranks came", &mut self.joined),
            ("servers came", &mut self.joined_servers),
            ("ranks let in", &mut self.let_in),
            ("ranks sent away", &mut self.sent_away),
        ]
    }

    /// Adds what was seen of another seed.
    pub fn add(&mut self, other: &Reformed) {
        let mut other = *other;
        let theirs = other.counts().map(|(_, count)| *count);
        self.counts().into_iter().zip(theirs).for_each(|((_, mine), theirs)| *mine += theirs);
    }
}

/// How long nodes wait for another scheduler.
const SCHEDULER_WAIT: Duration = Duration::from_secs(30);
/// Ranks that have a digit.
const RANKS_MAX: usize = 6;
/// Divisible by all numbers of ranks that there may be.
const UNIT: i64 = 60;
/// Bits of a digit, and those of all.
const BITS: u32 = 6;
const STEP_AT: u32 = 40;

/// Steps of the program, and what it pushes in each.
struct Program {
    steps: i64,
    sizes: Vec<u64>,
}

/// Tensors that are no gradients: who has committed how often, and who waits to be let in.
const PROGRESS: &str = "progress";
const NEWCOMERS: &str = "newcomers";

struct Flight {
    handle: Handle,
    tensor: usize,
    _source: Vec<u8>,
    target: Vec<u8>,
}

/// Where a rank is in its program.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Stage {
    #[default]
    Outside,
    /// It waits for the ids of its tensors.
    Declares(u64),
    /// It waits to learn who has committed most.
    Agrees,
    /// It waits for the id of the state's tensor, then for the state.
    Asks(Rank, u64),
    Takes(Rank),
    /// It makes a step.
    Steps,
    /// It waits for all others, then it leaves.
    Meets(u64),
    Leaves,
    /// It ends its part in this epoch, since then.
    Returns(Duration),
    /// It has ended.
    Over,
}

/// An epoch: its number, and a port of its first server. A scheduler that was stopped may lead one
/// of the same number beside another's, but no server is of both.
type Place = (u32, u16);

fn place(roster: &Roster) -> Place {
    (roster.epoch.0, roster.servers[0].cores[0].port())
}

#[derive(Default)]
struct Script {
    stage: Stage,
    ids: Vec<u32>,
    todo: Vec<usize>,
    flights: Vec<Flight>,
    results: BTreeMap<usize, Vec<u8>>,
    /// Commits, and what they have made of the state.
    step: i64,
    state: i64,
    /// The scheduler was out of reach.
    parted: bool,
    /// When it last had left an epoch, and had not come to another scheduler's door yet.
    adrift: Option<Duration>,
    was_in: bool,
    /// It has said good-bye: its work is done, whatever becomes of the others.
    has_left: bool,
}

/// What all ranks must see alike, by epoch.
#[derive(Default)]
struct Seen {
    /// Of a tensor in a step: the result, by rank of the simulation.
    results: BTreeMap<(Place, i64, usize), Vec<u8>>,
    /// Behind a step.
    states: BTreeMap<(Place, i64), i64>,
    /// What ranks said of their commits.
    progress: BTreeMap<Place, BTreeMap<u32, i64>>,
}

/// Runs one seed.
///
/// # Panics
/// When a result is wrong, two ranks differ, or somebody hangs, ends or is given up who should not.
#[must_use]
pub fn run_reformed(seed: u64, trouble: Trouble) -> Reformed {
    let mut random = Random::new(seed ^ 0xe1a5_71c0);
    let mut shape = Shape::random(&mut random, Groups::Apart);
    shape.servers = 2 + u32::try_from(random.index(2)).expect("few");
    shape.workers = shape.workers.max(2);
    shape.hosts = vec![1; shape.workers as usize];
    let elastic = Elastic {
        shrinks: false,
        min_workers: 1,
        patience: Duration::ZERO,
        notice: Duration::from_secs(60),
    };
    let sizes = (0..1 + random.index(3)).map(|_| [1, 300, 3000, 20_000][random.index(4)]).collect();
    let program = Program { steps: 3 + i64::try_from(random.below(6)).expect("few"), sizes };
    let mut fate = Fate::new(&mut random, &shape, trouble, program.steps);
    let mut ranks: Vec<Script> = (0..shape.workers).map(|_| Script::default()).collect();
    let mut cluster = Cluster::that_forms_again(seed, shape, elastic, SCHEDULER_WAIT);
    let (mut seen, mut outcome) = (Seen::default(), Reformed::default());
    for turn in 0.. {
        let is_late = turn >= TURNS_MAX || cluster.now() >= DEADLINE;
        assert!(!is_late, "seed {seed}: hung; {}", describe(&cluster, &ranks));
        cluster.turn();
        fate.strike(&mut cluster, &mut ranks, &mut random, &mut outcome);
        ranks.resize_with(cluster.workers.len(), Script::default);
        for (index, rank) in ranks.iter_mut().enumerate() {
            let mut play =
                Play { seed, index, program: &program, seen: &mut seen, outcome: &mut outcome };
            play.look(&mut cluster, rank, &mut random);
            let is_told = cluster.workers[index].over.is_some() && !rank.has_left;
            if rank.stage == Stage::Over && is_told {
                let why = fate.check_end(&cluster, rank, index, &mut outcome);
                assert!(why.is_ok(), "seed {seed}: rank {index} {why:?}: {:?}", cluster.log);
            }
        }
        let is_over = |(index, rank): (usize, &Script)| {
            !cluster.workers[index].alive() || rank.stage == Stage::Over
        };
        if ranks.iter().enumerate().all(is_over) {
            break;
        }
    }
    fate.check_result(&cluster, &ranks, &program, seed);
    outcome.let_go = cluster.servers_let_go();
    outcome
}

fn describe(cluster: &Cluster, ranks: &[Script]) -> String {
    let mut text = format!("at {:?}", cluster.now());
    for (index, rank) in ranks.iter().enumerate() {
        let worker = &cluster.workers[index];
        text.push_str(&format!(
            "; {index}: alive {}, {:?}, step {}, {} in flight, coming {}, over {:?}",
            worker.alive(),
            rank.stage,
            rank.step,
            rank.flights.len(),
            cluster.is_coming(index),
            worker.over.as_ref().map(ToString::to_string),
        ));
    }
    let from = cluster.log.len().saturating_sub(12);
    format!("{text}; log {:#?}", &cluster.log[from..])
}

/// One rank's turn.
struct Play<'a> {
    seed: u64,
    index: usize,
    program: &'a Program,
    seen: &'a mut Seen,
    outcome: &'a mut Reformed,
}

impl Play<'_> {
    fn look(&mut self, cluster: &mut Cluster, rank: &mut Script, random: &mut Random) {
        let worker = &cluster.workers[self.index];
        if cluster.is_adrift(self.index) || matches!(rank.stage, Stage::Returns(_)) {
            rank.adrift = Some(cluster.now());
        }
        if !worker.alive() || rank.stage == Stage::Over {
            rank.flights.clear();
            return;
        }
        if rank.stage == Stage::Leaves {
            // It waits for its lanes, and hears no verdict any more.
            if worker.has_left() {
                (rank.stage, rank.has_left) = (Stage::Over, true);
            }
            return;
        }
        if let Stage::Returns(since) = rank.stage {
            return self.come_again(cluster, rank, since);
        }
        if worker.over.is_some() {
            rank.stage = Stage::Returns(cluster.now());
            return;
        }
        self.check(cluster, rank);
        if rank.flights.is_empty() || random.once_in(2) {
            self.go_on(cluster, rank, random);
        }
    }

    /// The epoch is over for a rank: it comes to the next one, or ends.
    fn come_again(&mut self, cluster: &mut Cluster, rank: &mut Script, since: Duration) {
        let worker = &cluster.workers[self.index];
        if worker.over.is_some() && !cluster.may_return(self.index) {
            // Memory that is pushed is lent until the loop has ended.
            if worker.ended() {
                rank.flights.clear();
                rank.stage = Stage::Over;
                cluster.end_worker(self.index);
            }
        } else if cluster.come_again(self.index, since) {
            rank.flights.clear();
            rank.results.clear();
            rank.todo.clear();
            rank.stage = Stage::Outside;
        }
    }

    /// The next thing that a rank does.
    fn go_on(&mut self, cluster: &mut Cluster, rank: &mut Script, random: &mut Random) {
        let Some(roster) = &cluster.workers[self.index].roster else { return };
        let (number, place, size) = (roster.index, place(roster), roster.size);
        assert!((size as usize) <= RANKS_MAX, "a digit for each");
        match rank.stage {
            Stage::Outside => {
                self.outcome.epochs += 1;
                self.outcome.let_in += u64::from(!rank.was_in && place.0 > 1);
                rank.was_in = true;
                let said = self.declarations();
                rank.stage = Stage::Declares(cluster.declare(self.index, said).expect("formed"));
            }
            Stage::Declares(request) => {
                let Some(ids) = self.answer(cluster, request) else { return };
                rank.ids = ids;
                let value = rank.step << 8 | i64::from(255 - number);
                self.seen.progress.entry(place).or_default().insert(number, value);
                self.push(cluster, rank, 0, &[value], 1);
                rank.stage = Stage::Agrees;
            }
            Stage::Asks(root, request) => {
                let Some(ids) = self.answer(cluster, request) else { return };
                rank.ids.extend(ids);
                let value = [rank.step, rank.state];
                let at = rank.ids.len() - 1;
                self.push(cluster, rank, at, &value, 2);
                rank.stage = Stage::Takes(root);
            }
            Stage::Steps => {
                if let Some(tensor) = rank.todo.pop() {
                    let (value, count) = match tensor.checked_sub(2) {
                        None => (i64::from(cluster.workers[self.index].newcomers), 1),
                        Some(at) => {
                            let unit = if is_average(at) { UNIT } else { 1 };
                            let value = unit << (BITS * number) | (unit * rank.step) << STEP_AT;
                            (value, self.program.sizes[at])
                        }
                    };
                    self.push(cluster, rank, tensor, &[value], count);
                    // Sometimes several at once.
                    if random.once_in(2) {
                        self.go_on(cluster, rank, random);
                    }
                } else if rank.flights.is_empty() {
                    self.commit(cluster, rank, random, place);
                }
            }
            Stage::Meets(barrier) => {
                if cluster.workers[self.index].barriers.contains(&barrier) {
                    cluster.leave(self.index);
                    rank.stage = Stage::Leaves;
                }
            }
            Stage::Agrees | Stage::Takes(_) | Stage::Leaves | Stage::Returns(_) | Stage::Over => {}
        }
    }

    fn answer(&self, cluster: &Cluster, request: u64) -> Option<Vec<u32>> {
        let answer = cluster.workers[self.index].declared.get(&request)?;
        Some(answer.as_ref().expect("nobody disagrees").clone())
    }

    /// A step is made.
    fn commit(
        &mut self,
        cluster: &mut Cluster,
        rank: &mut Script,
        random: &mut Random,
        place: Place,
    ) {
        let seed = self.seed;
        let results = std::mem::take(&mut rank.results);
        if !results.is_empty() {
            for bytes in results.values() {
                rank.state = mix(rank.state, bytes);
            }
            rank.step += 1;
            self.outcome.steps += 1;
            let known = *self.seen.states.entry((place, rank.step)).or_insert(rank.state);
            assert_eq!(known, rank.state, "seed {seed}: {} behind step {}", self.index, rank.step);
            let waits = results[&1].iter().any(|byte| *byte != 0);
            if waits && rank.step < self.program.steps {
                cluster.suspend(self.index);
                rank.stage = Stage::Returns(cluster.now());
                return;
            }
        }
        if rank.step == self.program.steps {
            rank.stage = Stage::Meets(cluster.barrier(self.index).expect("formed"));
            return;
        }
        rank.todo = (1..2 + self.program.sizes.len()).collect();
        shuffle(random, &mut rank.todo);
    }

    fn declarations(&self) -> Vec<Declaration> {
        let one = |name: &str, operation, count: u64| Declaration {
            name: name.to_owned(),
            dtype: DType::I64,
            shape: count.into(),
            operation,
            device: false,
            members: Members::ALL,
            receiver: None,
            encoding: None,
            store: None,
        };
        let mut all = vec![one(PROGRESS, Operation::Max, 1), one(NEWCOMERS, Operation::Max, 1)];
        for (at, count) in self.program.sizes.iter().enumerate() {
            let operation = if is_average(at) { Operation::Average } else { Operation::Sum };
            all.push(one(&format!("gradient.{at}"), operation, *count));
        }
        all
    }

    fn push(
        &self,
        cluster: &mut Cluster,
        rank: &mut Script,
        tensor: usize,
        values: &[i64],
        count: u64,
    ) {
        let one: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let times = usize::try_from(count).expect("small") / values.len();
        let source = one.repeat(times);
        // The state's root gives it from where it lands; so may everybody else.
        let mut target = if tensor < 2 + self.program.sizes.len() {
            vec![0xa5; source.len()]
        } else {
            source.clone()
        };
        let is_state = tensor >= 2 + self.program.sizes.len();
        let from = if is_state { target.as_ptr() } else { source.as_ptr() };
        let task = Arc::new(Task::default());
        let handle = Handle::of(&task);
        cluster.workers[self.index].push(Command::Push {
            tensor: rank.ids[tensor],
            // SAFETY: the flight keeps both until the handle is over, or its loop is.
            memory: unsafe { Memory::new(from, target.as_mut_ptr(), target.len()) },
            priority: 0,
            act: Act::NONE,
            task,
        });
        rank.flights.push(Flight { handle, tensor, _source: source, target });
    }

    /// Takes the results that have come.
    fn check(&mut self, cluster: &mut Cluster, rank: &mut Script) {
        let Some(roster) = &cluster.workers[self.index].roster else { return };
        let (place, number, size) = (place(roster), roster.index, roster.size);
        let mut at = 0;
        while at < rank.flights.len() {
            if !rank.flights[at].handle.is_told() {
                at += 1;
                continue;
            }
            let flight = rank.flights.swap_remove(at);
            if let Err(error) = flight.handle.wait(Some(Duration::ZERO)) {
                self.check_error(cluster, &error);
                continue;
            }
            self.outcome.checked += 1;
            let key = (place, rank.step, flight.tensor);
            let known = self.seen.results.entry(key).or_insert_with(|| flight.target.clone());
            let seed = self.seed;
            assert!(*known == flight.target, "seed {seed}: {key:?} differs at {}", self.index);
            let numbers = |bytes: &[u8]| -> Vec<i64> {
                let chunks = bytes.chunks_exact(8);
                chunks.map(|one| i64::from_le_bytes(one.try_into().expect("eight"))).collect()
            };
            let values = numbers(&flight.target);
            match (rank.stage, flight.tensor) {
                (Stage::Agrees, 0) => self.agree(cluster, rank, values[0], (place, size)),
                (Stage::Takes(root), _) => {
                    let is_root = root == Rank(number);
                    assert!(!is_root || rank.step == values[0], "seed {seed}: its own state");
                    self.outcome.caught_up += u64::from(rank.step < values[0]);
                    (rank.step, rank.state) = (values[0], values[1]);
                    let states = &mut self.seen.states;
                    let known = *states.entry((place, rank.step)).or_insert(rank.state);
                    assert_eq!(known, rank.state, "seed {seed}: what all begin with");
                    rank.stage = Stage::Steps;
                }
                (Stage::Steps, tensor) => {
                    if tensor > 1 {
                        self.check_gradient(rank.step, tensor - 2, &values, size);
                    }
                    rank.results.insert(tensor, flight.target);
                }
                (stage, tensor) => panic!("seed {seed}: tensor {tensor} in {stage:?}"),
            }
        }
    }

    /// A call fails only when the epoch is over.
    fn check_error(&self, cluster: &Cluster, error: &Error) {
        // The control thread is told as soon as its loop is.
        let over = &cluster.workers[self.index].over;
        assert!(over.is_some(), "seed {}: rank {}: {error}", self.seed, self.index);
    }

    /// It is known who has committed most.
    fn agree(
        &mut self,
        cluster: &mut Cluster,
        rank: &mut Script,
        value: i64,
        (place, size): (Place, u32),
    ) {
        let seed = self.seed;
        let said = &self.seen.progress[&place];
        assert_eq!(said.len(), size as usize, "seed {seed}: all have said what they have");
        assert_eq!(said.values().max(), Some(&value), "seed {seed}: {said:?}");
        let root = Rank(u32::try_from(255 - (value & 255)).expect("a rank"));
        assert!(root.0 < size, "seed {seed}: {root} of {size}");
        let name = format!("state.{}", root.0);
        let said = Declaration {
            name,
            dtype: DType::I64,
            shape: 2.into(),
            operation: Operation::Broadcast(root),
            device: false,
            members: Members::ALL,
            receiver: None,
            encoding: None,
            store: None,
        };
        let request = cluster.declare(self.index, vec![said]).expect("formed");
        rank.stage = Stage::Asks(root, request);
    }

    /// Each rank is in each element once, and all have made this step.
    fn check_gradient(&self, step: i64, at: usize, values: &[i64], size: u32) {
        let count = i64::from(size);
        let all: BTreeSet<u32> = (0..size).collect();
        let (unit, of_step) =
            if is_average(at) { (UNIT / count, UNIT * step) } else { (1, count * step) };
        let digits: i64 = all.iter().map(|rank| unit << (BITS * rank)).sum();
        let expected = digits | of_step << STEP_AT;
        let wrong = values.iter().position(|value| *value != expected);
        assert!(
            wrong.is_none(),
            "seed {}: gradient {at} of step {step}: {:#x} instead of {expected:#x} at {wrong:?}",
            self.seed,
            values[wrong.unwrap_or(0)]
        );
    }
}

fn is_average(gradient: usize) -> bool {
    gradient % 2 == 1
}

/// A state that all of these bytes are in.
fn mix(state: i64, bytes: &[u8]) -> i64 {
    let step = |state: i64, byte: &u8| {
        (state ^ i64::from(*byte)).wrapping_mul(0x0100_0000_01b3).rotate_left(5)
    };
    bytes.iter().fold(state, step)
}
