//! What a simulated job does: random tensors, pushed in random order with random priorities,
//! checked bit for bit.

use super::cluster::{Cluster, SimWorker};
use super::gpu::{self, GpuFlight, GpuTensor, Landed, SimGpu};
use super::shape::{Groups, Shape};
use super::tensors::{Tensor, contradict, shuffle, tensors};
use crate::reference;
use bps_engine::base::{DType, Operation, Placement, Rank};
use bps_engine::config::PayloadChecksum;
use bps_engine::optimize::Act;
use bps_engine::proto::messages::{Declaration, Planning};
use bps_engine::transport::sim::Random;
use bps_worker::Members;
use bps_worker::job::nic_loop::Command;
use bps_worker::rounds::Memory;
use bps_worker::task::Task;
use bps_worker::{Error, Handle};
use std::sync::Arc;
use std::time::Duration;

/// What goes wrong in a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// Nothing.
    None,
    /// A rank dies at some moment.
    Kill,
    /// A lane breaks at some moment.
    Cut,
    /// A lane between the threads of two GPUs of a host breaks, and no other: both processes live,
    /// and all lanes that carry gradients hold.
    CutOrder,
    /// What is sent on a lane between a rank and a server is lost in one direction, and the end
    /// that sends it notices after a while.
    Mute,
    /// As `Mute`, but no end of the lane notices anything.
    MuteForEver,
    /// The scheduler's process stops.
    Freeze,
    /// As `Freeze`, and a rank dies as well.
    FreezeAndKill,
    /// One rank declares one tensor differently.
    Mismatch,
    /// A GPU fails at some moment.
    Gpu,
}

/// What was seen.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// Results that were compared with the reference.
    pub checked: u64,
    /// Push_pulls that ended with an error.
    pub failed: u64,
    /// Ranks that were told of a path that lost something.
    pub paths: u64,
    /// Lanes that order collectives and were cut.
    pub orders_cut: u64,
    /// Copies of results to GPUs that shared a call of the driver with others.
    pub together: u64,
    /// Virtual time, nanoseconds.
    pub nanoseconds: u128,
    /// Payload bytes that servers received and sent.
    pub wire_bytes: u64,
}

/// Virtual time after which a run counts as hung.
pub(super) const DEADLINE: Duration = Duration::from_secs(150);
/// Turns after which a run counts as hung.
pub(super) const TURNS_MAX: u64 = 5_000_000;

/// One push_pull that was started.
struct Flight {
    handle: Handle,
    tensor: usize,
    round: u64,
    data: Data,
}

/// Where its bytes are.
enum Data {
    Host {
        /// Kept until the end; empty if it is the target.
        _source: Vec<u8>,
        target: Vec<u8>,
    },
    Gpu(GpuFlight),
}

/// What one rank still has to do.
#[derive(Default)]
struct Script {
    /// What it declares, by tensor.
    tensors: Vec<Declaration>,
    request: Option<u64>,
    /// Tensors in the order of the last declare.
    ids: Vec<usize>,
    /// Pushes to come: tensor indices, in this rank's own order.
    todo: Vec<usize>,
    /// All ranks have the same.
    is_in_order: bool,
    pushed: Vec<u64>,
    flights: Vec<Flight>,
    left: bool,
    has_crashed: bool,
}

/// Runs one seed.
///
/// # Panics
/// When a result is wrong, two ranks differ, somebody hangs, or a fault is not reported as one.
#[must_use]
pub fn run(seed: u64, groups: Groups, fault: Fault) -> Outcome {
    let mut random = Random::new(seed);
    let shape = Shape::random(&mut random, groups);
    let mut tensors = tensors(&mut random, shape.workers, shape.devices);
    if fault == Fault::Mismatch {
        // The tensor on which ranks disagree is for all of them, as most say.
        tensors[0].declaration.members = Members::ALL;
    }
    run_job(seed, random, shape, &tensors, fault)
}

/// One round of a few tensors over hosts of so many ranks, and a server that is on none of them.
///
/// # Panics
/// As for [`run`].
#[must_use]
pub fn run_hosts(hosts: &[u32]) -> Outcome {
    let planning = Planning {
        partition_bytes: 1 << 20,
        placement: Placement::Balanced,
        mixed_bound: 101,
        built_in_coefficient: 1,
        local_reduce: true,
        force_distributed: true,
        reduce_roots: Vec::new(),
        switch_size: 0,
        tuning: bps_engine::proto::tuning::Tuning::OFF,
    };
    let shape = Shape {
        workers: hosts.iter().sum(),
        hosts: hosts.to_vec(),
        servers: 1,
        cores: 1,
        credit_bytes: 4 << 20,
        devices: false,
        payload_checksum: PayloadChecksum::Auto,
        planning,
    };
    let operations = [Operation::Sum, Operation::Average];
    let tensor = |(index, operation)| Tensor {
        declaration: Declaration {
            name: format!("tensor.{index}"),
            dtype: DType::F32,
            shape: 100_003.into(),
            operation,
            device: false,
            members: Members::ALL,
            receiver: None,
            encoding: None,
            store: None,
        },
        rounds: 2,
    };
    let tensors: Vec<Tensor> = (0..).zip(operations).map(tensor).collect();
    run_job(1, Random::new(1), shape, &tensors, Fault::None)
}

fn run_job(
    seed: u64,
    mut random: Random,
    shape: Shape,
    tensors: &[Tensor],
    fault: Fault,
) -> Outcome {
    let workers = shape.workers;
    let hosts = shape.hosts.clone();
    let mut cluster = Cluster::new(seed, shape);
    let mut ranks: Vec<Script> = (0..workers).map(|_| Script::default()).collect();
    // What a stream waits for is in front of what is pushed after it, as a wait of the host would
    // be. So ranks may have their streams wait for what has not come if all push in one order, or
    // once they have pushed all.
    let is_in_order = random.once_in(2);
    for rank in &mut ranks {
        for (index, tensor) in tensors.iter().enumerate() {
            rank.todo.extend((0..tensor.rounds).map(|_| index));
        }
        shuffle(&mut random, &mut rank.todo);
        rank.is_in_order = is_in_order;
        rank.pushed = vec![0; tensors.len()];
    }
    if is_in_order {
        let todo = ranks[0].todo.clone();
        ranks.iter_mut().for_each(|rank| rank.todo.clone_from(&todo));
    }
    let mut fault_at = Duration::from_micros(5_000 + random.below(20_000));
    let mut struck = false;
    let mut outcome = Outcome::default();
    for turn in 0.. {
        assert!(
            turn < TURNS_MAX && cluster.now() < DEADLINE,
            "seed {seed} (hosts of {hosts:?}, {fault:?}): hung; {}",
            describe(&cluster, &ranks)
        );
        cluster.turn();
        gpu::check(seed);
        let strikes = !matches!(fault, Fault::None | Fault::Mismatch);
        if !struck && cluster.now() >= fault_at && strikes {
            let victim = random.index(workers as usize);
            let in_time = cluster.workers[victim].roster.is_some() && !ranks[victim].left;
            if in_time {
                outcome.orders_cut += strike(&mut cluster, victim, fault);
            }
            struck = in_time;
            fault_at += Duration::from_millis(1);
        }
        let mut all = true;
        for (index, rank) in ranks.iter_mut().enumerate() {
            drive(&mut cluster, rank, index, tensors, &mut random, fault);
            check(&cluster, rank, index, tensors, (seed, &mut random, fault), &mut outcome);
            if std::mem::take(&mut rank.has_crashed) {
                cluster.kill_worker(index);
            }
            all &= is_finished(&cluster, rank, index);
        }
        if all {
            break;
        }
    }
    let results =
        |tensor: &Tensor| tensor.rounds * u64::from(tensor.declaration.members.count(workers));
    if fault == Fault::None {
        let expected: u64 = tensors.iter().map(results).sum();
        assert_eq!(outcome.failed, 0, "seed {seed}: a push_pull failed without a fault");
        assert_eq!(outcome.checked, expected, "seed {seed}");
    }
    if matches!(fault, Fault::Cut | Fault::CutOrder | Fault::Mute | Fault::MuteForEver) {
        for worker in &cluster.workers {
            let said = worker.over.as_ref().map(ToString::to_string).unwrap_or_default();
            // Every process is well.
            assert!(!said.contains("died"), "seed {seed}: {said}");
            outcome.paths += u64::from(said.contains("path"));
        }
    }
    if fault == Fault::Mismatch {
        let others: u64 = tensors.iter().skip(1).map(results).sum();
        assert!(outcome.checked >= others, "seed {seed}: others must go on");
    }
    outcome.together = gpu::up_together();
    outcome.nanoseconds = cluster.now().as_nanos();
    outcome.wire_bytes = cluster.wire_bytes();
    outcome
}

/// Lets a fault happen; returns how many lanes that order collectives it cut.
pub(super) fn strike(cluster: &mut Cluster, victim: usize, fault: Fault) -> u64 {
    match fault {
        Fault::Kill => cluster.kill_worker(victim),
        Fault::Cut => cluster.cut_lane(victim),
        Fault::CutOrder => return cluster.cut_order_lane(victim).into(),
        Fault::Gpu => cluster.fail_gpu(victim),
        Fault::Mute | Fault::MuteForEver => {
            cluster.mute_lane(victim, fault == Fault::Mute);
        }
        Fault::Freeze => cluster.freeze_scheduler(),
        Fault::FreezeAndKill => {
            cluster.freeze_scheduler();
            cluster.kill_worker(victim);
        }
        Fault::None | Fault::Mismatch => {}
    }
    0
}

fn describe(cluster: &Cluster, ranks: &[Script]) -> String {
    let mut text = format!("at {:?}", cluster.now());
    for (index, rank) in ranks.iter().enumerate() {
        let worker = &cluster.workers[index];
        let line = format!(
            "; rank {index}: joined {}, ids {}, to do {}, in flight {}, over {:?}, ended {}",
            worker.roster.is_some(),
            rank.ids.len(),
            rank.todo.len(),
            rank.flights.len(),
            worker.over,
            worker.ended(),
        );
        text.push_str(&line);
    }
    text
}

/// Lets a rank do the next thing on its list, at a random moment.
fn drive(
    cluster: &mut Cluster,
    rank: &mut Script,
    index: usize,
    tensors: &[Tensor],
    random: &mut Random,
    fault: Fault,
) {
    let worker = &cluster.workers[index];
    if !worker.alive() || worker.roster.is_none() || worker.over.is_some() || rank.left {
        return;
    }
    let number = worker.roster.as_ref().map_or(0, |roster| roster.index);
    let Some(request) = rank.request else {
        rank.tensors = tensors.iter().map(|tensor| tensor.declaration.clone()).collect();
        if fault == Fault::Mismatch && number == 1 {
            rank.tensors[0] = contradict(&rank.tensors[0], worker.gpu.is_some());
        }
        // All ranks declare all tensors that are for them, each in an order of its own.
        let is_member = |tensor: &usize| rank.tensors[*tensor].members.contains(Rank(number));
        let order: Vec<usize> = (0..tensors.len()).filter(is_member).collect();
        rank.todo.retain(|tensor| order.contains(tensor));
        return declare(cluster, rank, index, order, random);
    };
    let Some(answer) = worker.declared.get(&request) else { return };
    let Ok(ids) = answer else {
        // This rank's user goes on without the tensor on which ranks disagree.
        assert!(rank.ids.contains(&0), "rank {number}: a declare fails without a cause");
        rank.todo.retain(|tensor| *tensor > 0);
        let order = rank.ids.iter().copied().filter(|tensor| *tensor > 0).collect();
        return declare(cluster, rank, index, order, random);
    };
    if random.once_in(3) || worker.gpu.as_ref().is_some_and(SimGpu::is_blocked) {
        return;
    }
    let Some(tensor) = rank.todo.pop() else {
        want_some(cluster, rank, index, random);
        if rank.flights.is_empty() {
            rank.left = true;
            cluster.leave(index);
        }
        return;
    };
    // What is on GPUs may be pushed together.
    let mut batch = vec![tensor];
    let is_on_gpu = |tensor: usize| rank.tensors[tensor].device;
    while is_on_gpu(tensor)
        && batch.len() < 3
        && let Some(next) = rank.todo.pop_if(|next| is_on_gpu(*next) && random.once_in(2))
    {
        batch.push(next);
    }
    let mut items = Vec::new();
    for tensor in batch {
        let place = rank.ids.iter().position(|&at| at == tensor);
        let id = ids[place.expect("every tensor was declared")];
        rank.pushed[tensor] += 1;
        items.push(Item { tensor, id, round: rank.pushed[tensor] });
    }
    let worker = &mut cluster.workers[index];
    if is_on_gpu(tensor) {
        rank.flights.extend(push_gpu(worker, number, &items, &rank.tensors, random));
        if rank.is_in_order {
            want_some(cluster, rank, index, random);
        }
    } else {
        rank.flights.push(push(worker, number, &items[0], &rank.tensors[tensor], random));
    }
}

/// A rank's streams are to wait for some of what it has pushed.
fn want_some(cluster: &mut Cluster, rank: &mut Script, index: usize, random: &mut Random) {
    let Some(gpu) = &mut cluster.workers[index].gpu else { return };
    let flights = rank.flights.iter_mut().filter_map(|flight| match &mut flight.data {
        Data::Gpu(data) => Some((&flight.handle, data)),
        Data::Host { .. } => None,
    });
    gpu.want_some(flights, random);
}

/// A rank declares these tensors, in an order of its own.
fn declare(
    cluster: &mut Cluster,
    rank: &mut Script,
    index: usize,
    mut order: Vec<usize>,
    random: &mut Random,
) {
    shuffle(random, &mut order);
    let declarations = order.iter().map(|&at| rank.tensors[at].clone()).collect();
    rank.ids = order;
    rank.request = cluster.declare(index, declarations);
}

/// A push that a rank makes.
struct Item {
    tensor: usize,
    id: u32,
    round: u64,
}

fn bytes_of(declaration: &Declaration, rank: u32, item: &Item) -> Vec<u8> {
    let count = usize::try_from(declaration.shape.count()).expect("small tensors");
    reference::contribution(declaration.dtype, item.tensor as u64, rank, item.round, count)
}

fn push_gpu(
    worker: &mut SimWorker,
    rank: u32,
    items: &[Item],
    tensors: &[Declaration],
    random: &mut Random,
) -> Vec<Flight> {
    let tensor = |item: &Item| {
        let declaration = &tensors[item.tensor];
        GpuTensor {
            id: item.id,
            priority: i64::try_from(random.below(5)).unwrap_or(0) - 2,
            bytes: bytes_of(declaration, rank, item),
            in_place: random.once_in(2),
            is_root: declaration.operation == Operation::Broadcast(Rank(rank)),
        }
    };
    let pushed: Vec<GpuTensor> = items.iter().map(tensor).collect();
    let pushed = worker.gpu.as_mut().expect("every rank has a GPU").push(pushed);
    let flight = |(item, (handle, flight)): (&Item, _)| {
        let (tensor, round) = (item.tensor, item.round);
        Flight { handle, tensor, round, data: Data::Gpu(flight) }
    };
    items.iter().zip(pushed).map(flight).collect()
}

fn push(
    worker: &mut SimWorker,
    rank: u32,
    item: &Item,
    declaration: &Declaration,
    random: &mut Random,
) -> Flight {
    let bytes = bytes_of(declaration, rank, item);
    let is_root = declaration.operation == Operation::Broadcast(Rank(rank));
    let in_place = is_root || random.once_in(2);
    let (source, mut target) =
        if in_place { (Vec::new(), bytes) } else { (bytes.clone(), vec![0xa5; bytes.len()]) };
    let from = if in_place { target.as_ptr() } else { source.as_ptr() };
    let task = Arc::new(Task::default());
    let handle = Handle::of(&task);
    worker.push(Command::Push {
        tensor: item.id,
        // SAFETY: the flight keeps both until the handle is over, or its job is.
        memory: unsafe { Memory::new(from, target.as_mut_ptr(), target.len()) },
        priority: i64::try_from(random.below(5)).unwrap_or(0) - 2,
        act: Act::NONE,
        task,
    });
    let data = Data::Host { _source: source, target };
    Flight { handle, tensor: item.tensor, round: item.round, data }
}

/// Compares what has come back with the reference.
fn check(
    cluster: &Cluster,
    rank: &mut Script,
    index: usize,
    tensors: &[Tensor],
    (seed, random, fault): (u64, &mut Random, Fault),
    outcome: &mut Outcome,
) {
    let worker = &cluster.workers[index];
    let Some(roster) = &worker.roster else { return };
    rank.flights.retain_mut(|flight| {
        let landed = match (&mut flight.data, &worker.gpu) {
            (Data::Gpu(_), None) => return false,
            _ if !flight.handle.is_told() => return worker.alive(),
            (Data::Gpu(data), Some(gpu)) => gpu.land(&flight.handle, data, random),
            (Data::Host { target, .. }, _) => match flight.handle.wait(Some(Duration::ZERO)) {
                Ok(_) => Landed::Bytes(std::mem::take(target)),
                Err(error) => Landed::Failed(error),
            },
        };
        match landed {
            Landed::NotYet => return true,
            Landed::Lost => {
                // Whatever a framework does next on a GPU that has failed ends its process.
                rank.has_crashed |= worker.over.is_none();
                let is_over = worker.over.is_some() || fault == Fault::Gpu;
                assert!(is_over, "seed {seed}: a result is lost, and the job goes on");
                outcome.failed += 1;
            }
            Landed::Bytes(bytes) => {
                let Declaration {
                    dtype,
                    shape,
                    operation,
                    name,
                    device,
                    members,
                    receiver,
                    encoding,
                    ..
                } = &tensors[flight.tensor].declaration;
                if receiver.is_some_and(|receiver| receiver != Rank(roster.index)) {
                    // Its round is over, and nothing is said of its bytes.
                    outcome.checked += 1;
                    return false;
                }
                let count = usize::try_from(shape.count()).expect("small tensors");
                let tensor = flight.tensor as u64;
                let ranks = members.listed().iter().map(|rank| rank.0);
                let all = if members.is_all() { 0..roster.size } else { 0..0 };
                let expected = reference::result_among(
                    *dtype,
                    *operation,
                    tensor,
                    ranks.chain(all),
                    flight.round,
                    count,
                );
                let is_over = worker.over.is_some() || fault == Fault::Mismatch && tensor == 0;
                if is_over && *device && is_spoilt(&bytes, &expected, dtype.size()) {
                    outcome.failed += 1;
                    return false;
                }
                assert!(
                    bytes == expected,
                    "seed {seed}: {name} ({dtype} × {count}, {operation}, on a GPU: {device}, for \
                     {members}, {encoding:?}), round {}: rank {} got other bytes",
                    flight.round,
                    roster.index
                );
                outcome.checked += 1;
            }
            Landed::Failed(error) => {
                assert!(
                    !matches!(error, Error::Config(_))
                        && (fault == Fault::Gpu || !matches!(error, Error::Refused(_))),
                    "seed {seed}: unexpected error: {error}"
                );
                let is_disputed = fault == Fault::Mismatch && flight.tensor == 0;
                assert!(
                    is_disputed || !matches!(fault, Fault::None | Fault::Mismatch),
                    "seed {seed}: without a fault: {error}"
                );
                outcome.failed += 1;
            }
        }
        false
    });
}

/// Whether what should have been these elements is marked, in part or as a whole, as what has not
/// come: of somebody who was told before it came.
fn is_spoilt(bytes: &[u8], expected: &[u8], size: usize) -> bool {
    let pairs = bytes.chunks(size).zip(expected.chunks(size));
    let is_marked = |one: &[u8]| one.iter().all(|byte| *byte == u8::MAX);
    bytes != expected && pairs.into_iter().all(|(one, other)| one == other || is_marked(one))
}

fn is_finished(cluster: &Cluster, rank: &Script, index: usize) -> bool {
    let worker = &cluster.workers[index];
    if !worker.alive() {
        return true;
    }
    let over = worker.over.is_some();
    (rank.left || over) && rank.flights.is_empty() && worker.ended()
}
