//! Tensors that are cut finer than the partition, for the servers' sake.

use super::sets::answer_installs;
use super::*;
use crate::proto::encoding::Encoding;

const SERVERS: u32 = 3;

/// A job of two ranks and three servers with two cores each, with parts of so many bytes.
fn formed(partition_bytes: u32) -> Bench {
    let mut bench = Bench::new(2, SERVERS);
    for worker in 0..2 {
        let mut register = worker_register(worker, 2, SERVERS);
        let Node::Worker { planning, .. } = &mut register.node else { unreachable!() };
        planning.partition_bytes = partition_bytes;
        bench.join(worker.into(), register);
    }
    for server in 0..SERVERS {
        bench.join(u64::from(server) + 100, server_register(server, 2, SERVERS));
    }
    for node in [0, 1, 100, 101, 102] {
        bench.roster(node);
    }
    bench
}

/// The parts of this tensor, which both ranks and the servers are told alike.
fn parts(bench: &mut Bench, said: &Declaration) -> Vec<Part> {
    bench.declare(0, 1, std::slice::from_ref(said));
    let keys = answer_installs(bench, SERVERS);
    let (_, first) = declared(&bench.heard(0));
    bench.declare(1, 1, std::slice::from_ref(said));
    let (_, second) = declared(&bench.heard(1));
    let (first, second) = (&first[0].parts, &second[0].parts);
    assert_eq!(first.len(), keys.len());
    let cut = |parts: &[Part]| -> Vec<(Key, u64, u32, Option<CoreId>)> {
        parts.iter().map(|part| (part.key, part.offset, part.bytes, part.core)).collect()
    };
    assert_eq!(cut(first), cut(second));
    first.clone()
}

/// A tensor of so many KiB.
fn kib(count: u64) -> Declaration {
    tensor(&format!("of {count} KiB"), count * 256)
}

#[test]
fn servers_get_several_parts_of_a_tensor_and_cores_as_many() {
    let mut bench = formed(256 << 10);
    // Four for each server are twelve, two for each core; of 60 KiB at most, or of 120.
    for (size, count) in [(64, 1), (100, 2), (128, 3), (256, 5), (512, 12), (1024, 18), (4096, 16)]
    {
        let parts = parts(&mut bench, &kib(size));
        assert_eq!(parts.len(), count, "{size} KiB");
        assert!(parts.iter().all(|part| part.bytes <= 60 << 10) || size != 512, "{parts:?}");
        if count % 6 == 0 {
            let mut cores = BTreeMap::new();
            for part in &parts {
                *cores.entry(part.core.unwrap()).or_insert(0) += 1;
            }
            let each = count / 6;
            assert!(cores.len() == 6 && cores.values().all(|count| *count == each), "{cores:?}");
        }
    }
}

#[test]
fn a_smaller_partition_is_a_bound() {
    for (partition, count) in [(32 << 10, 32), (64 << 10, 16), (128 << 10, 18), (1 << 20, 18)] {
        let parts = parts(&mut formed(partition), &kib(1024));
        assert_eq!(parts.len(), count, "{partition} bytes");
        assert!(parts.iter().all(|part| part.bytes <= partition));
    }
}

#[test]
fn encoded_tensors_and_those_on_gpus_keep_their_parts() {
    let mut bench = formed(256 << 10);
    let encoding: Encoding = "onebit".parse().unwrap();
    let encoded = Declaration { encoding: Some(encoding), ..kib(1024) };
    assert_eq!(parts(&mut bench, &encoded).len(), 4);
    let on_gpu = Declaration { name: "on a GPU".to_owned(), device: true, ..kib(1024) };
    assert_eq!(parts(&mut bench, &on_gpu).len(), 4);
}

#[test]
fn what_a_host_sums_alone_is_cut_for_its_ranks() {
    let mut bench = Bench::new(2, 0);
    for worker in 0..2 {
        let mut register = worker_register(worker, 2, 0);
        let Node::Worker { planning, local, .. } = &mut register.node else { unreachable!() };
        (planning.partition_bytes, planning.local_reduce) = (256 << 10, true);
        *local = Some(format!("socket {worker}"));
        register.host_id = "host".to_owned();
        bench.join(worker.into(), register);
    }
    for node in [0, 1] {
        bench.roster(node);
    }
    bench.declare(0, 1, &[kib(256), kib(1024)]);
    let (_, tensors) = declared(&bench.heard(0));
    assert_eq!(tensors.iter().map(|one| one.parts.len()).collect::<Vec<_>>(), [2, 4]);
}
