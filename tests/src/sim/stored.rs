//! Stored tensors in a simulated job: whatever the network does, a value holds the root's first one
//! and every delta at most once, an answer holds all that its rank has pushed, and the last answer
//! holds every delta of every rank.
//!
//! Each rank counts its deltas in digits of its own, so a value shows whose deltas it holds.

use super::cluster::Cluster;
use super::shape::{Groups, Shape};
use super::tensors::{set, shuffle};
use super::workload::{DEADLINE, Fault, Outcome, TURNS_MAX, strike};
use bps_engine::base::{DType, Operation, Rank};
use bps_engine::optimize::Act;
use bps_engine::proto::messages::Declaration;
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
    left: bool,
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
    let workers = shape.workers;
    let tensors = tensors(&mut random, workers);
    let mut cluster = Cluster::new(seed, shape);
    let mut ranks: Vec<Script> = (0..workers).map(|_| script(&mut random, tensors.len())).collect();
    let mut fault_at = Duration::from_micros(5_000 + random.below(20_000));
    let mut struck = fault == Fault::None;
    let mut outcome = Outcome::default();
    for turn in 0.. {
        let is_late = turn >= TURNS_MAX || cluster.now() >= DEADLINE;
        assert!(!is_late, "seed {seed} ({groups:?}, {fault:?}): hung");
        cluster.turn();
        if !struck && cluster.now() >= fault_at {
            let victim = random.index(workers as usize);
            struck = cluster.workers[victim].roster.is_some() && !ranks[victim].left;
            if struck {
                strike(&mut cluster, victim, fault);
            }
            fault_at += Duration::from_millis(1);
        }
        let pushed = pushed(&cluster, &ranks, tensors.len());
        let mut all = true;
        for (index, rank) in ranks.iter_mut().enumerate() {
            drive(&mut cluster, rank, index, &tensors, &mut random);
            check(&cluster, rank, index, (seed, fault, &tensors, &pushed), &mut outcome);
            let worker = &cluster.workers[index];
            let is_done = (rank.left || worker.over.is_some()) && rank.flights.is_empty();
            all &= !worker.alive() || is_done && worker.ended();
        }
        if all {
            break;
        }
    }
    if fault == Fault::None {
        check_last(seed, &cluster, &ranks, &tensors);
    }
    outcome.nanoseconds = cluster.now().as_nanos();
    outcome
}

fn script(random: &mut Random, tensors: usize) -> Script {
    let mut todo = Vec::new();
    // As often of each tensor: a rank that goes on with some of them alone would be waited for. The
    // first contribution asks for the value, or gives it.
    for _ in 0..1 + random.below(DELTAS_MAX + 1) {
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
        left: false,
    }
}

/// By rank of the job and tensor: deltas that the rank has pushed, and whether it has left.
type Pushed = Vec<(Vec<u64>, bool)>;

fn pushed(cluster: &Cluster, ranks: &[Script], tensors: usize) -> Pushed {
    let mut pushed = vec![(vec![0; tensors], false); ranks.len()];
    for (worker, rank) in cluster.workers.iter().zip(ranks) {
        if let Some(roster) = &worker.roster {
            let deltas = rank.pushed.iter().map(|count| count.saturating_sub(1)).collect();
            pushed[roster.index as usize] = (deltas, rank.left);
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
        if rank.flights.is_empty() {
            rank.left = true;
            cluster.leave(index);
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

fn check(
    cluster: &Cluster,
    rank: &mut Script,
    index: usize,
    (seed, fault, tensors, pushed): (u64, Fault, &[Declaration], &Pushed),
    outcome: &mut Outcome,
) {
    let worker = &cluster.workers[index];
    let Some(roster) = &worker.roster else { return };
    let last = &mut rank.last;
    rank.flights.retain_mut(|flight| {
        if !flight.handle.is_told() {
            return worker.alive();
        }
        if let Err(error) = flight.handle.wait(Some(Duration::ZERO)) {
            assert!(fault != Fault::None, "seed {seed}: without a fault: {error}");
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
            for (other, (deltas, has_left)) in (0..).zip(pushed) {
                let (held, before) = (digit(value, other), last[flight.tensor].get(at));
                // Whoever has come later in this turn may have pushed one more.
                assert!(held <= deltas[flight.tensor] + 1, "{seen}: more than was pushed");
                assert!(before.is_none_or(|old| digit(*old, other) <= held), "{seen}: went back");
                let is_near = bound.is_none_or(|bound| own <= held + bound);
                let is_member = said.members.contains(Rank(other));
                assert!(is_near || *has_left || !is_member, "{seen}: too far ahead of {other}");
            }
        }
        outcome.checked += 1;
        last[flight.tensor] = values;
        false
    });
}

/// All have pushed all: who was last has seen every delta once.
fn check_last(seed: u64, cluster: &Cluster, ranks: &[Script], tensors: &[Declaration]) {
    for (tensor, said) in tensors.iter().enumerate() {
        let count = usize::try_from(said.shape.count()).expect("small tensors");
        for at in 0..count {
            let mut expected = start_of(at);
            let mut last = 0;
            for (worker, rank) in cluster.workers.iter().zip(ranks) {
                let number = worker.roster.as_ref().expect("it has joined").index;
                let deltas = i64::try_from(rank.pushed[tensor].saturating_sub(1)).expect("few");
                expected += deltas << (DIGIT_BITS * number);
                last = last.max(rank.last[tensor].get(at).copied().unwrap_or(0));
            }
            assert_eq!(last, expected, "seed {seed}: {} at {at}", said.name);
        }
    }
}
