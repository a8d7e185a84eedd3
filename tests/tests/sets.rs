//! Tensors that are for some ranks, or whose results are for one, in real jobs inside this process:
//! over servers, in hosts, and on one host without any server.

use bps_engine::base::{DType, Operation, Rank};
use bps_engine::transport::sim::Random;
use bps_tests::job::{self, JobShape};
use bps_tests::reference;
use bps_worker::{Declaration, Error, Handle, Members, PushPull, Worker};
use std::time::Duration;

const LONG: Option<Duration> = Some(Duration::from_secs(60));
const ROUNDS: u64 = 6;

fn of(ranks: &[u32]) -> Members {
    Members::new(ranks.iter().copied().map(Rank).collect()).expect("a set")
}

fn said(name: &str, count: u64, operation: Operation, members: Members) -> Declaration {
    let (name, dtype, shape) = (name.into(), DType::F32, count.into());
    let (device, receiver, encoding, store) = (false, None, None, None);
    Declaration { name, dtype, shape, operation, device, members, receiver, encoding, store }
}

/// A push_pull under way; its memory lives until the handle was waited for.
struct Flight {
    values: Vec<u8>,
    handle: Handle,
}

fn push(worker: &Worker, said: &Declaration, tensor: u64, round: u64) -> Result<Flight, Error> {
    let ids = worker.declare(std::slice::from_ref(said))?;
    let count = usize::try_from(said.shape.count()).expect("a small tensor");
    let mut values = reference::contribution(said.dtype, tensor, worker.rank(), round, count);
    let target = values.as_mut_ptr();
    let item = PushPull { tensor: ids[0], source: target.cast_const(), target, priority: 0 };
    // SAFETY: `values` is as large as was declared, and lives until the handle is done.
    let handle = unsafe { worker.push_pull(&[item]) }?.remove(0);
    Ok(Flight { values, handle })
}

/// Tensors of random sets, the same on all ranks.
fn tensors(workers: u32) -> Vec<Declaration> {
    let mut random = Random::new(u64::from(workers));
    let one = |index: usize| {
        let ranks: Vec<u32> = (0..workers).filter(|_| random.once_in(2)).collect();
        // Every tenth is for all of them, said as a list and not.
        let members = match index % 20 {
            0 => Members::ALL,
            10 => of(&(0..workers).collect::<Vec<_>>()),
            _ if ranks.is_empty() => of(&[u32::try_from(index).expect("few") % workers]),
            _ => of(&ranks),
        };
        let place = random.index(members.count(workers) as usize);
        let root = members.iter(workers).nth(place).expect("it has so many");
        let operations =
            [Operation::Sum, Operation::Average, Operation::Max, Operation::Broadcast(root)];
        let count = [1, 300, 70_001][random.index(3)];
        let dtype = [DType::F32, DType::F16, DType::I64][random.index(3)];
        let name = format!("tensor {index}");
        let operation = operations[random.index(4)];
        let is_broadcast = matches!(operation, Operation::Broadcast(_));
        // What is a root where it is broadcast may receive where it is not.
        let receiver = (!is_broadcast && random.once_in(2)).then_some(root);
        Declaration { dtype, receiver, ..said(&name, count, operation, members) }
    };
    (0..40).map(one).collect()
}

/// Every rank pushes what is for it, in an order and at a pace of its own.
fn sum_sets(shape: JobShape) {
    let results = job::run(shape, |worker| {
        let (rank, size) = (worker.rank(), worker.size());
        let mut random = Random::new(u64::from(rank) + 1);
        let all: Vec<(u64, Declaration)> = (0..).zip(tensors(size)).collect();
        let mut results = 0;
        for round in 1..=ROUNDS {
            let mut own: Vec<_> =
                all.iter().filter(|(_, said)| said.members.contains(Rank(rank))).collect();
            for index in (1..own.len()).rev() {
                own.swap(index, random.index(index + 1));
            }
            let flights: Vec<(Flight, _)> = own
                .into_iter()
                .map(|(tensor, said)| {
                    (push(worker, said, *tensor, round).expect("pushed"), (*tensor, said))
                })
                .collect();
            for (flight, (tensor, said)) in flights {
                let Declaration { name, dtype, operation, shape, members, .. } = said;
                assert_eq!(flight.handle.wait(LONG), Ok(true), "{name}, round {round}");
                results += 1;
                if said.receiver.is_some_and(|receiver| receiver != Rank(rank)) {
                    continue;
                }
                let ranks: Vec<u32> = members.iter(size).map(|rank| rank.0).collect();
                let wanted = reference::result_among(
                    *dtype,
                    *operation,
                    tensor,
                    ranks.into_iter(),
                    round,
                    usize::try_from(shape.count()).expect("a small tensor"),
                );
                assert!(flight.values == wanted, "{said}, round {round}, rank {rank}");
            }
        }
        results
    });
    let wanted: u64 = tensors(shape.workers)
        .iter()
        .map(|said| ROUNDS * u64::from(said.members.count(shape.workers)))
        .sum();
    assert_eq!(results.iter().sum::<u64>(), wanted);
}

const SMALL_PARTS: u32 = 64 << 10;

#[test]
fn sets_are_summed_by_servers() {
    sum_sets(JobShape {
        workers: 4,
        servers: 2,
        cores: 2,
        partition_bytes: SMALL_PARTS,
        ..JobShape::default()
    });
}

#[test]
fn sets_are_summed_in_hosts_and_by_servers() {
    sum_sets(JobShape {
        workers: 5,
        partition_bytes: SMALL_PARTS,
        hosts: &[2, 3],
        ..JobShape::default()
    });
}

#[test]
fn sets_are_summed_on_one_host_without_servers() {
    sum_sets(JobShape { workers: 3, servers: 0, hosts: &[3], ..JobShape::default() });
}

#[test]
fn only_members_declare_a_tensor_and_all_of_them_alike() {
    let shape = JobShape { workers: 3, hosts: &[2, 1], ..JobShape::default() };
    let errors = job::run(shape, |worker| {
        let rank = worker.rank();
        let outside = said("few", 4, Operation::Sum, of(&[(rank + 1) % 3, (rank + 2) % 3]));
        let Err(Error::Refused(error)) = worker.declare(&[outside]) else { panic!("served") };
        assert!(error.to_string().contains(&format!("rank {rank} is none of them")), "{error}");
        let far = said("far", 4, Operation::Sum, of(&[rank, 3]));
        let Err(Error::Refused(error)) = worker.declare(&[far]) else { panic!("served") };
        assert!(error.to_string().contains("there is no rank 3 in a job of 3 ranks"), "{error}");
        // Ranks 0 and 1 declare sets that differ. Whoever does so second is told, and so is the
        // other once it pushes.
        let sets: [&[u32]; 3] = [&[0, 1], &[0, 1, 2], &[0, 2]];
        let differs = said("w", 4, Operation::Sum, of(sets[rank as usize]));
        let ended = push(worker, &differs, 0, 1).and_then(|flight| flight.handle.wait(LONG));
        let Err(Error::Mismatch(mismatch)) = ended else { panic!("rank {rank}: {ended:?}") };
        // The others go on.
        let flight = push(worker, &said("all", 4, Operation::Sum, Members::ALL), 1, 1);
        assert_eq!(flight.expect("pushed").handle.wait(LONG), Ok(true));
        mismatch.to_string()
    });
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    assert!(errors[0].contains("tensor `w`: rank "), "{errors:?}");
}

#[test]
fn ranks_that_name_different_receivers_are_told_and_a_strange_one_is_refused() {
    let shape = JobShape { workers: 3, hosts: &[2, 1], ..JobShape::default() };
    let errors = job::run(shape, |worker| {
        let rank = worker.rank();
        let plain = |name: &str| said(name, 4, Operation::Sum, Members::ALL);
        let far = Declaration { receiver: Some(Rank(3)), ..plain("far") };
        let Err(Error::Refused(error)) = worker.declare(&[far]) else { panic!("served") };
        assert!(error.to_string().contains("cannot go to rank 3 alone"), "{error}");
        let differs = Declaration { receiver: Some(Rank(rank / 2)), ..plain("w") };
        let ended = push(worker, &differs, 0, 1).and_then(|flight| flight.handle.wait(LONG));
        let Err(Error::Mismatch(mismatch)) = ended else { panic!("rank {rank}: {ended:?}") };
        // The others go on.
        let alike = Declaration { receiver: Some(Rank(2)), ..plain("all") };
        let flight = push(worker, &alike, 1, 1).expect("pushed");
        assert_eq!(flight.handle.wait(LONG), Ok(true));
        mismatch.to_string()
    });
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    assert!(errors[0].contains("received by rank "), "{errors:?}");
}

#[test]
fn a_job_of_one_rank_has_a_set_of_one() {
    let shape = JobShape { workers: 1, servers: 1, ..JobShape::default() };
    job::run(shape, |worker| {
        let flight = push(worker, &said("w", 5, Operation::Average, of(&[0])), 3, 1);
        let Flight { values, handle } = flight.expect("pushed");
        assert_eq!(handle.wait(LONG), Ok(true));
        assert_eq!(values, reference::contribution(DType::F32, 3, 0, 1, 5));
    });
}

#[test]
fn a_rank_leaves_while_others_begin_what_is_not_for_it() {
    let shape = JobShape { workers: 3, servers: 0, hosts: &[3], ..JobShape::default() };
    job::run(shape, |worker| {
        let rank = worker.rank();
        if rank == 1 {
            return;
        }
        // The first rank sums it, and hears of it before it has declared it itself.
        if rank == 0 {
            std::thread::sleep(Duration::from_millis(300));
        }
        let flight = push(worker, &said("w", 300, Operation::Sum, of(&[0, 2])), 3, 1);
        let Flight { values, handle } = flight.expect("pushed");
        assert_eq!(handle.wait(LONG), Ok(true));
        let ranks = [0, 2].into_iter();
        assert_eq!(values, reference::result_among(DType::F32, Operation::Sum, 3, ranks, 1, 300));
    });
}
