//! Stored tensors in a simulated job: whatever the network does, a value holds the root's first one
//! and every delta at most once, an answer holds all that its rank has pushed, and the last answer
//! holds every delta of every rank.
//!
//! Each rank counts its deltas in digits of its own, so a value shows whose deltas it holds. Where
//! the job goes on without ranks that die, the same holds of those that live, and of the dead the
//! value keeps what came whole: all that they had been answered, and nothing in part.

use super::cluster::Cluster;
use super::shape::{Groups, Shape};
use super::tensors::{set, shuffle};
use super::workload::{DEADLINE, Fault, Outcome, TURNS_MAX, strike};
use bps_engine::base::{DType, Operation, Rank};
use bps_engine::optimize::Act;
use bps_engine::proto::messages::Declaration;
use bps_engine::proto::scheduler::Elastic;
use bps_engine::proto::store::{Deltas, Store};
use bps_engine::transport::sim::Random;
use bps_worker::job::nic_loop::Command;
use bps_worker::rounds::Memory;
use bps_worker::task::Task;
use bps_worker::{Handle, Members};
use std::sync::Arc;
use std::time::Duration;

/// Bits in which a value counts the deltas of one rank.
const DIGIT_BITS: u32 = 6;
/// Deltas that a rank pushes of a tensor, at most.
const DELTAS_MAX: u64 = 12;
/// Where the first value is, above the digits of all ranks.
const START_SHIFT: u32 = 54;

/// A push that was started.
struct Flight {
    handle: Handle,
    tensor: usize,
    /// This rank's contributions of the tensor, this one included.
    round: u64,
    /// Kept until the end; empty if it is the target.
    _source: Vec<i64>,
    target: Vec<i64>,
}

/// What one rank does.
struct Script {
    request: Option<u64>,
    /// Tensors in the order of the declare.
    order: Vec<usize>,
    /// Pushes to come: tensor indices.
    todo: Vec<usize>,
    pushed: Vec<u64>,
    flights: Vec<Flight>,
    /// The last answer of each tensor.
    last: Vec<Vec<i64>>,
    /// Contributions of each tensor that were answered.
    answered: Vec<u64>,
    /// All meet before they leave, in this barrier: nobody waits there for the dead.
    meets: bool,
    barrier: Option<u64>,
    left: bool,
    /// It has died, or the scheduler has given it up.
    lost: bool,
}

fn start_of(index: usize) -> i64 {
    i64::try_from(index % 64).expect("below 64") << START_SHIFT
}

/// Deltas of this rank that a value holds.
fn digit(value: i64, rank: u32) -> u64 {
    u64::try_from(value >> (DIGIT_BITS * rank)).expect("never negative") & ((1 << DIGIT_BITS) - 1)
}

fn tensors(random: &mut Random, workers: u32) -> Vec<Declaration> {
    let number = 1 + random.index(3);
    let one = |index: usize| {
        let members = if random.once_in(3) { set(random, workers) } else { Members::ALL };
        let place = random.index(members.count(workers) as usize);
        let root = members.iter(workers).nth(place).expect("it has so many");
        let bound = u32::try_from(random.below(3)).expect("small");
        Declaration {
            name: format!("stored.{index}"),
            dtype: DType::I64,
            shape: [1, 300, 3000][random.index(3)].into(),
            operation: Operation::Sum,
            device: false,
            members,
            receiver: None,
            encoding: None,
            store: Some(Store::Deltas(Deltas {
                root,
                staleness: random.once_in(2).then_some(bound),
            })),
        }
    };
    (0..number).map(one).collect()
}

/// Runs one seed.
///
/// # Panics
/// When a value is wrong, or somebody hangs.
#[must_use]
pub fn run_stored(seed: u64, groups: Groups, fault: Fault) -> Outcome {
    let mut random = Random::new(seed);
    let mut shape = Shape::random(&mut random, groups);
    shape.planning.force_distributed = true;
    let tensors = tensors(&mut random, shape.workers);
    let cluster = Cluster::new(seed, shape.clone());
    let one = |_| {
        let rounds = rounds(&mut random);
        script(&mut random, tensors.len(), rounds)
    };
    let ranks = (0..shape.workers).map(one).collect();
    let mut play = Play { seed, shape, tensors, cluster, ranks, may_fail: fault != Fault::None };
    let mut fault_at = Duration::from_micros(5_000 + random.below(20_000));
    let mut struck = fault == Fault::None;
    let mut outcome = Outcome::default();
    play.until_over(&mut random, &mut outcome, |play, random| {
        if struck || play.cluster.now() < fault_at {
            return;
        }
        let victim = random.index(play.ranks.len());
        struck = play.may_die(victim);
        if struck {
            strike(&mut play.cluster, victim, fault);
        }
        fault_at += Duration::from_millis(1);
    });
    if fault == Fault::None {
        play.check_last();
    }
    outcome
}

/// Runs one seed of a job that goes on without ranks that die, of those that no value begins with.
/// Returns what was seen, and how many have died.
///
/// # Panics
/// When a value is wrong, somebody hangs, or somebody fails who lives.
#[must_use]
pub fn run_stored_shrunk(seed: u64) -> (Outcome, u32) {
    let mut random = Random::new(seed);
    let shape = Shape::random(&mut random, Groups::Apart);
    let tensors = tensors(&mut random, shape.workers);
    let elastic =
        Elastic { shrinks: true, min_workers: 1, patience: Duration::ZERO, notice: DEADLINE };
    let cluster = Cluster::elastic(seed, shape.clone(), Some(elastic));
    // A rank that meets the others is there, and would be waited for.
    let rounds = rounds(&mut random);
    let one = |_| Script { meets: true, ..script(&mut random, tensors.len(), rounds) };
    let ranks = (0..shape.workers).map(one).collect();
    let mut play = Play { seed, shape, tensors, cluster, ranks, may_fail: false };
    let mut kill_at = Duration::from_micros(random.below(20_000));
    let (mut gone, mut outcome) = (0, Outcome::default());
    play.until_over(&mut random, &mut outcome, |play, random| {
        if play.cluster.now() < kill_at {
            return;
        }
        kill_at += Duration::from_micros(1 + random.below(8_000));
        let victim = random.index(play.ranks.len());
        if play.may_die(victim) && !play.is_root(victim) {
            play.ranks[victim].lost = true;
            gone += 1;
            match random.once_in(3) {
                true => play.cluster.hide_worker(victim),
                false => play.cluster.kill_worker(victim),
            }
        }
    });
    play.check_last();
    (outcome, gone)
}

/// A job with stored tensors, and what its ranks do.
struct Play {
    seed: u64,
    shape: Shape,
    tensors: Vec<Declaration>,
    cluster: Cluster,
    ranks: Vec<Script>,
    /// Whoever lives may be told that the job is over.
    may_fail: bool,
}

impl Play {
    fn may_die(&self, index: usize) -> bool {
        let (worker, rank) = (&self.cluster.workers[index], &self.ranks[index]);
        worker.alive() && worker.roster.is_some() && !rank.left && !rank.lost
    }

    /// Whether some tensor begins with this rank's value.
    fn is_root(&self, index: usize) -> bool {
        let number = self.cluster.workers[index].roster.as_ref().map(|roster| roster.index);
        let roots = self.tensors.iter().filter_map(|said| said.store.and_then(Store::deltas));
        roots.into_iter().any(|deltas| Some(deltas.root.0) == number)
    }

    /// Lets everybody do what is on their lists, and faults strike.
    fn until_over(
        &mut self,
        random: &mut Random,
        outcome: &mut Outcome,
        mut strikes: impl FnMut(&mut Play, &mut Random),
    ) {
        let seed = self.seed;
        for turn in 0.. {
            let is_late = turn >= TURNS_MAX || self.cluster.now() >= DEADLINE;
            assert!(!is_late, "seed {seed}: hung");
            self.cluster.turn();
            strikes(self, random);
            let pushed = pushed(&self.cluster, &self.ranks, self.tensors.len());
            let mut all = true;
            for (index, rank) in self.ranks.iter_mut().enumerate() {
                drive(&mut self.cluster, rank, index, &self.tensors, random);
                let worker = &self.cluster.workers[index];
                let may_fail = self.may_fail || rank.lost;
                let is_over = worker.over.is_some();
                assert!(
                    !is_over || may_fail || rank.left,
                    "seed {seed}: {index} was told {:?}",
                    worker.over
                );
                let part = self.shape.planning.partition_bytes as usize;
                let told = (seed, part, may_fail, &self.tensors[..], &pushed);
                check(&self.cluster, rank, index, told, outcome);
                let is_done = (rank.left || is_over) && rank.flights.is_empty();
                all &= !worker.alive() || is_done && worker.ended();
            }
            if all {
                break;
            }
        }
        outcome.nanoseconds = self.cluster.now().as_nanos();
    }

    /// All have pushed all: who was last has seen every delta once, and those of the dead that had
    /// been answered.
    fn check_last(&self) {
        let numbered: Vec<(u32, &Script)> = (self.cluster.workers.iter().zip(&self.ranks))
            .filter_map(|(worker, rank)| Some((worker.roster.as_ref()?.index, rank)))
            .collect();
        for (tensor, said) in self.tensors.iter().enumerate() {
            let count = usize::try_from(said.shape.count()).expect("small tensors");
            for at in 0..count {
                // Nothing goes back, so the largest is the last.
                let answers = numbered.iter().filter_map(|(_, rank)| rank.last[tensor].get(at));
                let Some(&last) = answers.max() else { continue };
                let seen = format!("seed {}: {} at {at}: {last:#x}", self.seed, said.name);
                assert_eq!(last >> START_SHIFT << START_SHIFT, start_of(at), "{seen}");
                for (number, rank) in &numbered {
                    let deltas = rank.pushed[tensor].saturating_sub(1);
                    let least = match rank.lost {
                        true => rank.answered[tensor].saturating_sub(1),
                        false => deltas,
                    };
                    let held = digit(last, *number);
                    assert!((least..=deltas).contains(&held), "{seen}: {held} of rank {number}");
                }
            }
        }
    }
}

/// Contributions of each tensor. The first one asks for the value, or gives it.
fn rounds(random: &mut Random) -> u64 {
    1 + random.below(DELTAS_MAX + 1)
}

fn script(random: &mut Random, tensors: usize, rounds: u64) -> Script {
    let mut todo = Vec::new();
    // As often of each tensor: a rank that goes on with some of them alone would be waited for.
    for _ in 0..rounds {
        todo.extend(0..tensors);
    }
    shuffle(random, &mut todo);
    Script {
        request: None,
        order: Vec::new(),
        todo,
        pushed: vec![0; tensors],
        flights: Vec::new(),
        last: vec![Vec::new(); tensors],
        answered: vec![0; tensors],
        meets: false,
        barrier: None,
        left: false,
        lost: false,
    }
}

/// By rank of the job and tensor: deltas that the rank has pushed, and whether nobody waits for it.
type Pushed = Vec<(Vec<u64>, bool)>;

fn pushed(cluster: &Cluster, ranks: &[Script], tensors: usize) -> Pushed {
    let mut pushed = vec![(vec![0; tensors], false); ranks.len()];
    for (worker, rank) in cluster.workers.iter().zip(ranks) {
        if let Some(roster) = &worker.roster {
            let deltas = rank.pushed.iter().map(|count| count.saturating_sub(1)).collect();
            pushed[roster.index as usize] = (deltas, rank.left || rank.lost);
        }
    }
    pushed
}

/// Lets a rank do the next thing on its list, at a random moment.
fn drive(
    cluster: &mut Cluster,
    rank: &mut Script,
    index: usize,
    tensors: &[Declaration],
    random: &mut Random,
) {
    let worker = &cluster.workers[index];
    let Some(roster) = &worker.roster else { return };
    if !worker.alive() || worker.over.is_some() || rank.left {
        return;
    }
    let number = roster.index;
    let Some(request) = rank.request else {
        let is_member = |at: &usize| tensors[*at].members.contains(Rank(number));
        rank.order = (0..tensors.len()).filter(is_member).collect();
        rank.todo.retain(|at| rank.order.contains(at));
        shuffle(random, &mut rank.order);
        let said = rank.order.iter().map(|&at| tensors[at].clone()).collect();
        rank.request = cluster.declare(index, said);
        return;
    };
    let Some(answer) = worker.declared.get(&request) else { return };
    let ids = answer.as_ref().expect("nobody disagrees").clone();
    // Ranks are of different speeds.
    if !random.once_in(3 + 4 * u64::from(number)) {
        return;
    }
    let Some(tensor) = rank.todo.pop() else {
        match rank.barrier {
            _ if !rank.flights.is_empty() => {}
            None if rank.meets => rank.barrier = cluster.barrier(index),
            Some(barrier) if !cluster.workers[index].barriers.contains(&barrier) => {}
            _ => {
                rank.left = true;
                cluster.leave(index);
            }
        }
        return;
    };
    let place = rank.order.iter().position(|&at| at == tensor).expect("it was declared");
    push(cluster, rank, index, (number, ids[place], tensor), &tensors[tensor], random);
}

fn push(
    cluster: &mut Cluster,
    rank: &mut Script,
    index: usize,
    (number, id, tensor): (u32, u32, usize),
    said: &Declaration,
    random: &mut Random,
) {
    rank.pushed[tensor] += 1;
    let round = rank.pushed[tensor];
    let is_root =
        said.store.and_then(Store::deltas).is_some_and(|store| store.root == Rank(number));
    let value = |at: usize| match (round, is_root) {
        (1, true) => start_of(at),
        // Nobody is to see these.
        (1, false) => -1,
        _ => 1 << (DIGIT_BITS * number),
    };
    let count = usize::try_from(said.shape.count()).expect("small tensors");
    let values: Vec<i64> = (0..count).map(value).collect();
    let (source, mut target) =
        if random.once_in(2) { (Vec::new(), values) } else { (values, vec![-1; count]) };
    let from = if source.is_empty() { target.as_ptr() } else { source.as_ptr() };
    let (to, bytes) = (target.as_mut_ptr().cast::<u8>(), count * size_of::<i64>());
    let task = Arc::new(Task::default());
    let handle = Handle::of(&task);
    cluster.workers[index].push(Command::Push {
        tensor: id,
        // SAFETY: the flight keeps both until the handle is over, or its job is.
        memory: unsafe { Memory::new(from.cast(), to, bytes) },
        priority: 0,
        act: Act::NONE,
        task,
    });
    rank.flights.push(Flight { handle, tensor, round, _source: source, target });
}

/// The seed, bytes of a part, whether an error is to be expected, and what was pushed of what.
type Told<'play> = (u64, usize, bool, &'play [Declaration], &'play Pushed);

fn check(
    cluster: &Cluster,
    rank: &mut Script,
    index: usize,
    (seed, part_bytes, may_fail, tensors, pushed): Told<'_>,
    outcome: &mut Outcome,
) {
    let worker = &cluster.workers[index];
    let Some(roster) = &worker.roster else { return };
    let (last, answered) = (&mut rank.last, &mut rank.answered);
    rank.flights.retain_mut(|flight| {
        if !flight.handle.is_told() {
            return worker.alive();
        }
        if let Err(error) = flight.handle.wait(Some(Duration::ZERO)) {
            assert!(may_fail, "seed {seed}: without a fault: {error}");
            outcome.failed += 1;
            return false;
        }
        let (said, values) = (&tensors[flight.tensor], std::mem::take(&mut flight.target));
        let bound =
            said.store.and_then(Store::deltas).and_then(|store| store.staleness).map(u64::from);
        for (at, &value) in values.iter().enumerate() {
            let seen = format!("seed {seed}: {}, rank {}: {value:#x}", said.name, roster.index);
            assert_eq!(value >> START_SHIFT << START_SHIFT, start_of(at), "{seen}");
            let own = digit(value, roster.index);
            assert_eq!(own, flight.round - 1, "{seen}: an answer holds all own deltas");
            for (other, (deltas, is_away)) in (0..).zip(pushed) {
                let (held, before) = (digit(value, other), last[flight.tensor].get(at));
                // Whoever has come later in this turn may have pushed one more.
                assert!(held <= deltas[flight.tensor] + 1, "{seen}: more than was pushed");
                assert!(before.is_none_or(|old| digit(*old, other) <= held), "{seen}: went back");
                let is_near = bound.is_none_or(|bound| own <= held + bound);
                let is_member = said.members.contains(Rank(other));
                assert!(is_near || *is_away || !is_member, "{seen}: too far ahead of {other}");
            }
        }
        let parts = (values.len() * size_of::<i64>()).div_ceil(part_bytes);
        let digits = values.iter().map(|value| value & ((1 << START_SHIFT) - 1));
        let digits: Vec<i64> = digits.collect();
        let pieces = digits.chunk_by(|one, next| one == next).count();
        assert!(pieces <= parts, "seed {seed}: {}: a delta is there in part", said.name);
        outcome.checked += 1;
        last[flight.tensor] = values;
        answered[flight.tensor] = answered[flight.tensor].max(flight.round);
        false
    });
}
