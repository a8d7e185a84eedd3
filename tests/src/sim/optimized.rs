//! Tensors with optimizers in a simulated job: whatever the network does, each step is taken once,
//! with the gradients of all ranks, and all ranks get the same bits as one that steps by itself.

use super::cluster::Cluster;
use super::shape::{Groups, Shape};
use super::tensors::{set, shuffle};
use super::workload::{DEADLINE, Fault, Outcome, TURNS_MAX, strike};
use bps_engine::base::{DType, Operation, Rank};
use bps_engine::encode::{narrow, widen};
use bps_engine::optimize::{Act, Number, Optimizer, Slots};
use bps_engine::proto::messages::Declaration;
use bps_engine::proto::store::Store;
use bps_engine::reduce::kernels;
use bps_engine::transport::sim::Random;
use bps_worker::job::nic_loop::Command;
use bps_worker::rounds::Memory;
use bps_worker::task::Task;
use bps_worker::{Handle, Members};
use std::sync::Arc;
use std::time::Duration;

/// Rounds of a tensor, at most.
const ROUNDS_MAX: u64 = 12;
const OPTIMIZERS: [&str; 4] =
    ["sgd", "sgd(momentum=0.9,nesterov)", "adam(weight_decay=0.1)", "adamw"];

/// A round of a tensor, and the bits that all ranks get of it.
struct Round {
    act: Act,
    result: Vec<u32>,
}

struct Tensor {
    said: Declaration,
    rounds: Vec<Round>,
}

/// A push that was started.
struct Flight {
    handle: Handle,
    tensor: usize,
    round: usize,
    /// What is pushed, and then the result.
    values: Vec<f32>,
}

/// What one rank does.
struct Script {
    request: Option<u64>,
    /// Tensors in the order of the declare.
    order: Vec<usize>,
    /// Pushes to come: tensor indices.
    todo: Vec<usize>,
    pushed: Vec<usize>,
    flights: Vec<Flight>,
    left: bool,
}

/// Whole numbers, so that sums are exact in any order, in bf16 too.
fn number(round: usize, at: usize, rank: u32) -> f32 {
    let number = (at * 7 + round * 31 + rank as usize * 13) % 41;
    i8::try_from(number).map_or(0.0, f32::from) - 20.0
}

/// What a rank pushes: a gradient; or a value that is set, of its first rank, to which the others
/// add nothing.
fn contribution(said: &Declaration, round: usize, act: Act, rank: u32, ranks: u32) -> Vec<f32> {
    let first = said.members.iter(ranks).next().expect("it has ranks").0;
    let of = |at: usize| match (act.is_step(), rank == first) {
        (true, _) => number(round, at, rank),
        // A second moment is not negative.
        (false, true) => number(round, at, rank).abs(),
        (false, false) => -0.0,
    };
    (0..count_of(said)).map(of).collect()
}

fn count_of(said: &Declaration) -> usize {
    usize::try_from(said.shape.count()).expect("small tensors")
}

/// The same optimizer, on the whole tensor in one place.
fn play(said: &Declaration, acts: Vec<(Act, Option<(usize, u64)>)>, ranks: u32) -> Vec<Round> {
    let optimizer = said.store.and_then(Store::optimizer).expect("it has one");
    let (count, members) = (count_of(said), said.members.count(ranks));
    let mut state = [vec![0.0f32; count], vec![0.0; count], vec![0.0; count]];
    let (mut steps, mut rounds) = (0, Vec::new());
    for (at, (act, slot)) in acts.into_iter().enumerate() {
        let mut sum = vec![-0.0f32; count];
        for rank in said.members.iter(ranks) {
            let own = contribution(said, at, act, rank.0, ranks);
            sum.iter_mut().zip(own).for_each(|(sum, own)| *sum += own);
        }
        let shown = match slot {
            None => {
                steps += 1;
                #[allow(clippy::cast_precision_loss, reason = "a few ranks")]
                let mean: Vec<f32> = sum.iter().map(|sum| sum / members as f32).collect();
                let [master, first, second] = &mut state;
                let slots = Slots { master, first, second };
                optimizer.step(kernels(), (rate(at), steps), (&mean, 1.0), slots);
                0
            }
            Some((slot, _)) if act == Act::get(u8::try_from(slot).expect("three at most")) => slot,
            Some((slot, taken)) => {
                if slot == 0 {
                    state[1..].iter_mut().for_each(|values| values.fill(0.0));
                    steps = taken;
                }
                state[slot] = sum;
                slot
            }
        };
        rounds.push(Round { act, result: seen(said, slot.is_none(), &state[shown]) });
    }
    rounds
}

/// As it travels: parameters that were stepped are encoded, if the tensor is.
fn seen(said: &Declaration, stepped: bool, values: &[f32]) -> Vec<u32> {
    let mut seen = values.to_vec();
    if said.encoding.is_some() && stepped {
        let mut bytes = vec![0; values.len() * 2];
        narrow(DType::BF16, values, &mut bytes);
        widen(DType::BF16, &bytes, &mut seen);
    }
    seen.iter().map(|value| value.to_bits()).collect()
}

fn rate(round: usize) -> Number {
    #[allow(clippy::cast_precision_loss, reason = "a dozen")]
    let rate = 0.1 / (1 + round) as f64;
    Number::new(rate).expect("a rate")
}

/// What rounds are for: the first sets the parameters, most others step.
fn acts(random: &mut Random, optimizer: &Optimizer) -> Vec<(Act, Option<(usize, u64)>)> {
    let mut acts = vec![(Act::set(0, 0), Some((0, 0)))];
    for round in 1..1 + random.below(ROUNDS_MAX) {
        let at = usize::try_from(round).expect("a dozen");
        let slot = random.index(optimizer.slots());
        let number = u8::try_from(slot).expect("three at most");
        acts.push(match random.below(8) {
            0 => (Act::get(number), Some((slot, 0))),
            1 => (Act::set(number, 5), Some((slot, 5))),
            _ => (Act::step(rate(at)), None),
        });
    }
    acts
}

fn tensors(random: &mut Random, workers: u32) -> Vec<Tensor> {
    let one = |index: usize| {
        let text = OPTIMIZERS[random.index(OPTIMIZERS.len())];
        let optimizer: Optimizer = text.parse().expect("an optimizer");
        let said = Declaration {
            name: format!("optimized.{index}"),
            dtype: DType::F32,
            shape: [1, 300, 3000][random.index(3)].into(),
            operation: Operation::Average,
            device: false,
            members: if random.once_in(3) { set(random, workers) } else { Members::ALL },
            receiver: None,
            encoding: random.once_in(3).then(|| "bf16".parse().expect("an encoding")),
            store: Some(Store::Optimizer(optimizer)),
        };
        let rounds = play(&said, acts(random, &optimizer), workers);
        Tensor { said, rounds }
    };
    (0..3).map(one).collect()
}

/// Runs one seed.
///
/// # Panics
/// When a result is wrong, or somebody hangs.
#[must_use]
pub fn run_optimized(seed: u64, groups: Groups, fault: Fault) -> Outcome {
    let mut random = Random::new(seed);
    let mut shape = Shape::random(&mut random, groups);
    shape.planning.force_distributed = true;
    let workers = shape.workers;
    let tensors = tensors(&mut random, workers);
    let mut cluster = Cluster::new(seed, shape);
    let script = |_| {
        let times = |(at, tensor): (usize, &Tensor)| std::iter::repeat_n(at, tensor.rounds.len());
        let mut todo: Vec<usize> = tensors.iter().enumerate().flat_map(times).collect();
        shuffle(&mut random, &mut todo);
        let (order, flights, pushed) = (Vec::new(), Vec::new(), vec![0; tensors.len()]);
        Script { request: None, order, todo, pushed, flights, left: false }
    };
    let mut ranks: Vec<Script> = (0..workers).map(script).collect();
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
        let mut all = true;
        for (index, rank) in ranks.iter_mut().enumerate() {
            drive(&mut cluster, rank, index, &tensors, &mut random);
            check(&cluster, rank, index, (seed, fault, &tensors), &mut outcome);
            let worker = &cluster.workers[index];
            let is_done = (rank.left || worker.over.is_some()) && rank.flights.is_empty();
            all &= !worker.alive() || is_done && worker.ended();
        }
        if all {
            break;
        }
    }
    outcome.nanoseconds = cluster.now().as_nanos();
    outcome
}

/// Lets a rank do the next thing on its list, at a random moment.
fn drive(
    cluster: &mut Cluster,
    rank: &mut Script,
    index: usize,
    tensors: &[Tensor],
    random: &mut Random,
) {
    let workers = u32::try_from(cluster.workers.len()).expect("a few");
    let worker = &cluster.workers[index];
    let Some(roster) = &worker.roster else { return };
    if !worker.alive() || worker.over.is_some() || rank.left {
        return;
    }
    let number = roster.index;
    let Some(request) = rank.request else {
        let is_member = |at: &usize| tensors[*at].said.members.contains(Rank(number));
        rank.order = (0..tensors.len()).filter(is_member).collect();
        rank.todo.retain(|at| rank.order.contains(at));
        shuffle(random, &mut rank.order);
        let said = rank.order.iter().map(|&at| tensors[at].said.clone()).collect();
        rank.request = cluster.declare(index, said);
        return;
    };
    let Some(answer) = worker.declared.get(&request) else { return };
    let ids = answer.as_ref().expect("nobody disagrees").clone();
    // Ranks are of different speeds.
    if !random.once_in(2 + 3 * u64::from(number)) {
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
    let (round, said) = (rank.pushed[tensor], &tensors[tensor].said);
    rank.pushed[tensor] += 1;
    let act = tensors[tensor].rounds[round].act;
    let mut values = contribution(said, round, act, number, workers);
    let (at, task) = (values.as_mut_ptr().cast::<u8>(), Arc::new(Task::default()));
    let handle = Handle::of(&task);
    cluster.workers[index].push(Command::Push {
        tensor: ids[place],
        // SAFETY: the flight keeps the values until the handle is over, or its job is.
        memory: unsafe { Memory::new(at.cast_const(), at, values.len() * size_of::<f32>()) },
        priority: 0,
        act,
        task,
    });
    rank.flights.push(Flight { handle, tensor, round, values });
}

fn check(
    cluster: &Cluster,
    rank: &mut Script,
    index: usize,
    (seed, fault, tensors): (u64, Fault, &[Tensor]),
    outcome: &mut Outcome,
) {
    let worker = &cluster.workers[index];
    let Some(roster) = &worker.roster else { return };
    rank.flights.retain(|flight| {
        if !flight.handle.is_told() {
            return worker.alive();
        }
        if let Err(error) = flight.handle.wait(Some(Duration::ZERO)) {
            assert!(fault != Fault::None, "seed {seed}: without a fault: {error}");
            outcome.failed += 1;
            return false;
        }
        let Tensor { said, rounds } = &tensors[flight.tensor];
        let got: Vec<u32> = flight.values.iter().map(|value| value.to_bits()).collect();
        assert!(
            got == rounds[flight.round].result,
            "seed {seed}: {said}, round {}, rank {}: another result than one place has",
            flight.round + 1,
            roster.index
        );
        outcome.checked += 1;
        false
    });
}
