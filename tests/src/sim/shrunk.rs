//! Ranks that die at random moments in a simulated job that goes on without them, servers that do,
//! and ranks that are slow where rounds do not wait for them: whatever the network does, all who
//! get a result and live get the same bytes, each contribution is in it once or not at all, an
//! average is divided by those that are, and everybody is told whose are not.
//!
//! Each rank contributes in a digit of its own, so a result shows who is in it.

mod fate;
mod kind;
mod outcome;

use self::fate::{Fate, describe, has_ended, read_log};
use self::kind::{Kind, RANKS_MAX};
pub use self::outcome::Shrunk;
use super::cluster::{Cluster, SimWorker};
use super::gpu::{self, GpuFlight, GpuTensor, Landed, SimGpu};
use super::shape::{Groups, Shape};
use super::tensors::{set, shuffle};
use super::workload::{DEADLINE, TURNS_MAX};
use bps_engine::base::{Operation, Rank};
use bps_engine::optimize::Act;
use bps_engine::proto::backup::Backup;
use bps_engine::proto::messages::Declaration;
use bps_engine::proto::scheduler::Elastic;
use bps_engine::proto::store::Store;
use bps_engine::transport::sim::Random;
use bps_worker::job::nic_loop::Command;
use bps_worker::rounds::Memory;
use bps_worker::task::Task;
use bps_worker::{Error, Handle, Members};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// Who dies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Dying {
    /// Ranks.
    Ranks,
    /// Servers, and perhaps ranks.
    Servers,
    /// Servers of a job whose ranks have GPUs, alone or several on a host.
    ServersOfGpus,
    /// Ranks that have GPUs and sum with no other of their hosts, and perhaps servers.
    RanksOfGpus,
    /// Hosts with all of their ranks, which may sum among themselves, and perhaps servers.
    Hosts,
    /// The same of ranks that have GPUs.
    HostsOfGpus,
    /// Schedulers, which others follow, and perhaps ranks and servers.
    Schedulers,
    /// The same, where servers may be told to leave instead.
    Leavers,
}

impl Dying {
    fn has_gpus(self) -> bool {
        matches!(self, Dying::ServersOfGpus | Dying::RanksOfGpus | Dying::HostsOfGpus)
    }

    /// Whether all ranks of a host die together.
    fn takes_hosts(self) -> bool {
        matches!(self, Dying::Hosts | Dying::HostsOfGpus)
    }
}

/// How long nodes wait for another scheduler: longer than it takes until one leads them though all
/// those that are to be lost are, one after the other.
const SCHEDULER_WAIT: Duration = Duration::from_secs(90);

/// A slow rank does something after so long.
const IDLE: Duration = Duration::from_millis(300);

struct Tensor {
    kind: Kind,
    said: Declaration,
    rounds: u64,
}

impl Tensor {
    /// Whether rounds do not wait for slow ranks.
    fn is_short(&self) -> bool {
        self.said.store.is_some()
    }
}

struct Flight {
    handle: Handle,
    tensor: usize,
    round: u64,
    data: Data,
    /// Its result, once that is there.
    landed: Option<Vec<u8>>,
}

/// Where its bytes are.
enum Data {
    Host { _source: Vec<u8>, target: Vec<u8> },
    Gpu(GpuFlight),
}

#[derive(Default)]
struct Script {
    request: Option<u64>,
    order: Vec<usize>,
    todo: Vec<usize>,
    pushed: Vec<u64>,
    flights: Vec<Flight>,
    barrier: Option<u64>,
    left: bool,
    /// It does something in one of so many turns, for now.
    pace: u64,
    /// When it last did.
    acted_at: Duration,
    /// The scheduler has given it up, though it lives.
    hidden: bool,
    /// All ranks push in one order, so streams may wait for results.
    is_in_order: bool,
}

/// What all who get it must get, by tensor, round and rank: bytes and who is missing, or that there
/// is no result.
type Seen = BTreeMap<(usize, u64), BTreeMap<usize, Result<(Vec<u8>, u64), String>>>;

/// Lets the rounds of a tensor not wait for slow ranks, where they may. One rank contributes more
/// often than the few times that all are waited for.
fn shorten(random: &mut Random, workers: u32, tensor: &mut Tensor) {
    let Tensor { kind, said, rounds } = tensor;
    let ranks = said.members.count(workers);
    let keeps = said.encoding.is_some_and(|encoding| encoding.feedback);
    if *kind == Kind::Broadcast || ranks < 2 || keeps {
        return;
    }
    let workers = 1 + u32::try_from(random.below(u64::from(ranks) - 1)).expect("few");
    let behind = 1 + u32::try_from(random.below(4)).expect("few");
    let backup = Backup { workers, behind };
    if backup.check_key(said.dtype, said.operation, said.encoding).is_ok() {
        said.store = Some(Store::Backup(backup));
        *rounds = 6 + random.below(12);
    }
}

fn tensors(random: &mut Random, workers: u32, dying: Dying) -> Vec<Tensor> {
    let number = 1 + random.index(6);
    let devices = dying.has_gpus();
    let one = |index: usize| {
        let kind = Kind::ALL[random.index(Kind::ALL.len())];
        // An average of whole numbers goes through memory of the host.
        let device = devices && kind != Kind::Average && !random.once_in(5);
        // One on GPUs is for all.
        let is_for_some = !device && random.once_in(3);
        let members = if is_for_some { set(random, workers) } else { Members::ALL };
        let place = random.index(members.count(workers) as usize);
        let root = members.iter(workers).nth(place).expect("it has so many");
        let operation = match kind {
            Kind::Broadcast => Operation::Broadcast(root),
            _ if kind.averages() => Operation::Average,
            _ => Operation::Sum,
        };
        // What a server keeps of errors can't move.
        let kept = if dying == Dying::Ranks { "+feedback" } else { "" };
        let codecs = ["topk(k=1000000)".to_owned(), format!("randomk(k=1000000, seed=1){kept}")];
        let codec = codecs[random.index(codecs.len())].parse().expect("an encoding");
        let said = Declaration {
            name: format!("tensor.{index}"),
            dtype: kind.dtype(),
            shape: [1, 300, 3000, 20_000][random.index(4)].into(),
            operation,
            device,
            members,
            receiver: None,
            encoding: (kind == Kind::EncodedSum).then_some(codec),
            store: None,
        };
        Tensor { kind, said, rounds: 1 + random.below(6) }
    };
    (0..number).map(one).collect()
}

/// Runs one seed.
///
/// # Panics
/// When a result is wrong, two ranks differ, or somebody hangs or fails who lives.
#[must_use]
pub fn run_shrunk(seed: u64, dying: Dying) -> Shrunk {
    let groups = match dying {
        Dying::Servers if seed % 2 == 1 => Groups::Hosts,
        Dying::Schedulers if seed % 4 == 1 => Groups::Hosts,
        Dying::Hosts => Groups::Hosts,
        _ if dying.has_gpus() => Groups::Gpus,
        _ => Groups::Apart,
    };
    play(seed, groups, (false, true), dying)
}

/// The same with rounds that do not wait for slow ranks, in a job that goes on without ranks that
/// die, or with several ranks on a host, of which none does.
///
/// # Panics
/// As [`run_shrunk`].
#[must_use]
pub fn run_short(seed: u64) -> Shrunk {
    match seed % 3 {
        0 => play(seed, Groups::Apart, (true, true), Dying::Ranks),
        1 => play(seed, Groups::Apart, (true, false), Dying::Ranks),
        _ => play(seed, Groups::Hosts, (true, false), Dying::Ranks),
    }
}

fn play(seed: u64, groups: Groups, (may_be_short, shrinks): (bool, bool), dying: Dying) -> Shrunk {
    let mut random = Random::new(seed);
    let mut shape = Shape::random(&mut random, groups);
    let must_be_apart = dying == Dying::RanksOfGpus;
    while shape.workers > RANKS_MAX || must_be_apart && shape.sums_on_hosts() {
        shape = Shape::random(&mut random, groups);
    }
    let through_servers = may_be_short || shape.devices || dying.takes_hosts();
    shape.planning.force_distributed |= through_servers;
    if dying != Dying::Ranks {
        shape.servers = 2 + u32::try_from(random.index(3)).expect("few");
    }
    let (workers, has_gpus) = (shape.workers, shape.devices);
    let has_groups = shape.sums_on_hosts();
    let mut tensors = tensors(&mut random, workers, dying);
    if may_be_short {
        tensors.iter_mut().for_each(|tensor| shorten(&mut random, workers, tensor));
    }
    let elastic =
        Elastic { shrinks: true, min_workers: 1, patience: Duration::ZERO, notice: DEADLINE };
    let mut fate = Fate::new(&mut random, &shape, dying);
    if !shrinks {
        fate.ranks = 0;
    }
    let wait = if dying.loses_schedulers() { SCHEDULER_WAIT } else { Duration::ZERO };
    let mut cluster = Cluster::outlasting(seed, shape, shrinks.then_some(elastic), wait);
    let mut ranks: Vec<Script> = (0..workers).map(|_| script(&mut random, &tensors)).collect();
    if has_gpus && random.once_in(2) {
        let todo = ranks[0].todo.clone();
        for rank in &mut ranks {
            (rank.todo, rank.is_in_order) = (todo.clone(), true);
        }
    }
    let (mut seen, mut outcome) = (Seen::new(), Shrunk::default());
    for turn in 0.. {
        let is_late = turn >= TURNS_MAX || cluster.now() >= DEADLINE;
        assert!(!is_late, "seed {seed}: hung; {}", describe(&cluster, &ranks));
        cluster.turn();
        gpu::check(seed);
        fate.strike(&mut cluster, &mut ranks, (&mut random, &mut seen), &mut outcome);
        fate.check_blamed(seed, &cluster, &mut ranks);
        let ends = has_ended(&cluster);
        let mut all = true;
        for (index, rank) in ranks.iter_mut().enumerate() {
            if may_be_short && random.once_in(200) {
                rank.pace = [3, 3, 100, 1000][random.index(4)];
            }
            drive(&mut cluster, rank, index, &tensors, &mut random);
            let played = (seed, &tensors[..], &mut random);
            check(&cluster, rank, index, played, &mut seen, &mut outcome);
            let worker = &cluster.workers[index];
            let is_over = worker.over.is_some();
            assert!(
                !is_over || rank.hidden || rank.left || ends,
                "seed {seed}: rank {index} lives, and was told {:?}; schedulers said {:#?}",
                worker.over,
                cluster.log
            );
            let is_done = (rank.left || is_over) && rank.flights.is_empty();
            all &= !worker.alive() || is_done && worker.ended();
        }
        if all {
            break;
        }
    }
    let has_ended = has_ended(&cluster);
    assert!(!has_ended || fate.may_have_ended(&cluster), "seed {seed}: {:#?}", cluster.log);
    outcome.ended = u64::from(has_ended);
    outcome.let_go = cluster.servers_let_go();
    fate.check_obstacles(seed, &cluster, &ranks);
    read_log(&cluster, &mut outcome);
    outcome.grouped = if has_groups { outcome.moved } else { 0 };
    outcome.on_gpus = if outcome.moved > 0 { outcome.on_gpus } else { 0 };
    outcome.counted = cluster.short_rounds();
    outcome.anew = cluster.rounds_begun_anew();
    outcome.late = cluster.late_contributions();
    assert!(outcome.counted > 0 || outcome.short == 0, "seed {seed}: {outcome:?}");
    outcome
}

fn script(random: &mut Random, tensors: &[Tensor]) -> Script {
    let mut todo = Vec::new();
    for (index, tensor) in tensors.iter().enumerate() {
        todo.extend((0..tensor.rounds).map(|_| index));
    }
    shuffle(random, &mut todo);
    Script { todo, pushed: vec![0; tensors.len()], pace: 3, ..Script::default() }
}

/// Lets a rank do the next thing on its list, at a random moment.
fn drive(
    cluster: &mut Cluster,
    rank: &mut Script,
    index: usize,
    tensors: &[Tensor],
    random: &mut Random,
) {
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
    // Where all wait for a slow one, time leaps from turn to turn.
    if !random.once_in(rank.pace) && cluster.now() < rank.acted_at + IDLE {
        return;
    }
    rank.acted_at = cluster.now();
    if worker.gpu.as_ref().is_some_and(SimGpu::is_blocked) {
        return;
    }
    let Some(tensor) = rank.todo.pop() else {
        want_some(cluster, rank, index, random);
        // All meet before they leave: nobody waits there for the dead.
        match rank.barrier {
            _ if !rank.flights.is_empty() => {}
            // Whoever has lost a slot stays for ever.
            _ if cluster.workers[index].slots_in_use() > 0 => {}
            None => rank.barrier = cluster.barrier(index),
            Some(barrier) if cluster.workers[index].barriers.contains(&barrier) => {
                rank.left = true;
                cluster.leave(index);
            }
            Some(_) => {}
        }
        return;
    };
    let place = rank.order.iter().position(|&at| at == tensor).expect("it was declared");
    rank.pushed[tensor] += 1;
    let at = (tensor, rank.pushed[tensor]);
    let worker = &mut cluster.workers[index];
    rank.flights.push(push(worker, number, ids[place], at, &tensors[tensor], random));
    if rank.is_in_order {
        want_some(cluster, rank, index, random);
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

fn push(
    worker: &mut SimWorker,
    number: u32,
    id: u32,
    (tensor, round): (usize, u64),
    Tensor { kind, said, .. }: &Tensor,
    random: &mut Random,
) -> Flight {
    let count = usize::try_from(said.shape.count()).expect("small tensors");
    let value = match kind {
        Kind::Broadcast => i64::try_from(round).expect("few") + i64::from(number) * 1000,
        _ => kind.contribution(number),
    };
    let bytes = kind.to_bytes(value, count);
    let is_root = said.operation == Operation::Broadcast(Rank(number));
    let priority = i64::try_from(random.below(5)).unwrap_or(0) - 2;
    if said.device {
        let in_place = random.once_in(2);
        let pushed = GpuTensor { id, priority, bytes, in_place, is_root };
        let gpu = worker.gpu.as_mut().expect("every rank has a GPU");
        let (handle, flight) = gpu.push(vec![pushed]).pop().expect("one was pushed");
        return Flight { handle, tensor, round, data: Data::Gpu(flight), landed: None };
    }
    let mut target = if is_root { bytes.clone() } else { vec![0xa5; bytes.len()] };
    let from = if is_root { target.as_ptr() } else { bytes.as_ptr() };
    let task = Arc::new(Task::default());
    let handle = Handle::of(&task);
    worker.push(Command::Push {
        tensor: id,
        // SAFETY: the flight keeps both until the handle is over, or its job is.
        memory: unsafe { Memory::new(from, target.as_mut_ptr(), target.len()) },
        priority,
        act: Act::NONE,
        task,
    });
    let data = Data::Host { _source: bytes, target };
    Flight { handle, tensor, round, data, landed: None }
}

fn check(
    cluster: &Cluster,
    rank: &mut Script,
    index: usize,
    (seed, tensors, random): (u64, &[Tensor], &mut Random),
    seen: &mut Seen,
    outcome: &mut Shrunk,
) {
    let worker = &cluster.workers[index];
    let Some(roster) = &worker.roster else { return };
    let own = Rank(roster.index);
    let (hidden, ends) = (rank.hidden, has_ended(cluster));
    rank.flights.retain_mut(|flight| {
        if !flight.handle.is_told() {
            return worker.alive();
        }
        let tensor = &tensors[flight.tensor];
        let Tensor { kind, said, .. } = tensor;
        let at = (flight.tensor, flight.round);
        let what = format!("seed {seed}: {} ({kind:?}), round {}, {own}", said.name, flight.round);
        let landed = match (flight.landed.take(), &mut flight.data, &worker.gpu) {
            (Some(bytes), ..) => Landed::Bytes(bytes),
            (None, Data::Gpu(_), None) => return false,
            (None, Data::Gpu(data), Some(gpu)) => gpu.land(&flight.handle, data, random),
            (None, Data::Host { target, .. }, _) => {
                match flight.handle.wait(Some(Duration::ZERO)) {
                    Ok(_) => Landed::Bytes(std::mem::take(target)),
                    Err(error) => Landed::Failed(error),
                }
            }
        };
        let has_failed = (hidden || ends) && worker.over.is_some();
        let result = match landed {
            Landed::NotYet => return true,
            // What streams had waited for may be spoilt.
            Landed::Bytes(_) if has_failed && said.device => return false,
            Landed::Bytes(bytes) => match flight.handle.lacking() {
                Some(lacking) => Ok((bytes, lacking)),
                None => {
                    // A stream has seen it before the pipeline has heard of it.
                    flight.landed = Some(bytes);
                    return true;
                }
            },
            Landed::Failed(_) | Landed::Lost if has_failed => return false,
            Landed::Failed(Error::PeerDied(died)) if *kind == Kind::Broadcast => {
                Err(died.to_string())
            }
            Landed::Failed(error) => panic!("{what}: {error}"),
            Landed::Lost => panic!("{what}: a result is lost, and the job goes on"),
        };
        if !hidden {
            let known = seen.entry(at).or_default();
            let others = known.values().all(|other| *other == result);
            assert!(others, "{what}: other bytes than another rank");
            known.insert(index, result.clone());
        }
        match result {
            Err(_) => outcome.lost += 1,
            Ok((bytes, lacking)) => {
                outcome.checked += 1;
                outcome.on_gpus += u64::from(said.device);
                assert_eq!(flight.handle.lacks_by_rank(), tensor.is_short(), "{what}");
                outcome.short_on_gpus += u64::from(said.device && lacking != 0);
                check_result(tensor, (&bytes, lacking), (own, roster.size), &what, outcome);
            }
        }
        false
    });
}

fn check_result(
    tensor: &Tensor,
    (bytes, lacking): (&[u8], u64),
    (own, size): (Rank, u32),
    what: &str,
    outcome: &mut Shrunk,
) {
    let Tensor { kind, said, .. } = tensor;
    let mut values = kind.values(bytes);
    // All elements of a part are alike, and what is asked of each is much.
    values.dedup();
    if let Operation::Broadcast(root) = said.operation {
        assert!(values.iter().all(|value| value / 1000 == i64::from(root.0)), "{what}");
        assert_eq!(lacking, 0, "{what}");
        return;
    }
    let members: BTreeSet<Rank> = said.members.iter(size).collect();
    let mut missing: BTreeSet<Rank> = BTreeSet::new();
    let mut sets: BTreeSet<BTreeSet<Rank>> = BTreeSet::new();
    for value in values {
        let Some(contributors) = kind.contributors(value, what) else { return };
        let may_lack = tensor.is_short() || contributors.contains(&own);
        assert!(may_lack && contributors.is_subset(&members), "{what}");
        missing.extend(members.difference(&contributors));
        sets.insert(contributors);
    }
    let told: BTreeSet<Rank> =
        (0..u64::BITS).filter(|bit| lacking >> bit & 1 == 1).map(Rank).collect();
    assert_eq!(missing, told, "{what}");
    outcome.given += u64::from(tensor.is_short() && missing.contains(&own));
    outcome.short += u64::from(!missing.is_empty());
    outcome.mixed += u64::from(sets.len() > 1);
}
