//! Real jobs inside this process, every result compared with the reference bit for bit, on every
//! rank.

use bps_engine::base::{DType, Operation, Rank};
use bps_engine::config::{PayloadChecksum, TcpDriver, TransportChoice};
use bps_engine::transport::sim::Random;
use bps_tests::job::{self, JobShape};
use bps_tests::reference;
use bps_worker::Members;
use bps_worker::{Declaration, Error, PushPull, TensorShape, Worker};
use half::f16;
use std::process::Command;
use std::time::{Duration, Instant};

const LONG: Option<Duration> = Some(Duration::from_secs(60));

/// Pushes every tensor `rounds` times in a random order with random priorities, many at once, and
/// checks the results.
fn work(worker: &Worker, tensors: &[Declaration], rounds: u64, seed: u64) {
    let rank = worker.rank();
    let mut random = Random::new(seed ^ u64::from(rank));
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    for at in (1..order.len()).rev() {
        order.swap(at, random.index(at + 1));
    }
    let declared: Vec<Declaration> = order.iter().map(|&at| tensors[at].clone()).collect();
    let ids = worker.declare(&declared).expect("declared");
    for round in 1..=rounds {
        let mut memory: Vec<(Vec<u8>, Vec<u8>)> = order
            .iter()
            .map(|&at| {
                let count = usize::try_from(tensors[at].shape.count()).unwrap();
                let source =
                    reference::contribution(tensors[at].dtype, at as u64, rank, round, count);
                let target = if random.once_in(2) { Vec::new() } else { vec![0x5a; source.len()] };
                (source, target)
            })
            .collect();
        let items: Vec<PushPull> = memory
            .iter_mut()
            .zip(&ids)
            .map(|((source, target), &tensor)| {
                let out = if target.is_empty() { source.as_mut_ptr() } else { target.as_mut_ptr() };
                let priority = i64::try_from(random.below(7)).unwrap() - 3;
                PushPull { tensor, source: source.as_ptr(), target: out, priority }
            })
            .collect();
        // SAFETY: `memory` lives until every handle below is done, and nobody touches it meanwhile.
        let handles = unsafe { worker.push_pull(&items) }.expect("pushed");
        for (place, handle) in handles.iter().enumerate() {
            assert_eq!(handle.wait(LONG), Ok(true), "tensor {}", tensors[order[place]].name);
        }
        for (place, (source, target)) in memory.iter().enumerate() {
            let Declaration { dtype, operation, shape, name, .. } = &tensors[order[place]];
            let count = usize::try_from(shape.count()).unwrap();
            let tensor = order[place] as u64;
            let wanted = reference::result(*dtype, *operation, tensor, worker.size(), round, count);
            let got = if target.is_empty() { source } else { target };
            assert!(*got == wanted, "{name} round {round} on rank {rank}: other bytes");
        }
    }
}

fn tensors(sizes: &[u64], workers: u32) -> Vec<Declaration> {
    let mut all = Vec::new();
    for dtype in DType::ALL {
        for (at, &count) in sizes.iter().enumerate() {
            let root = Rank(u32::try_from(at).unwrap() % workers);
            let mut operations = vec![
                Operation::Sum,
                Operation::Average,
                Operation::Min,
                Operation::Max,
                Operation::Broadcast(root),
            ];
            // Half types round a product of two hosts twice.
            if dtype.accumulator() == dtype {
                operations.push(Operation::Product);
            }
            for operation in operations {
                let name = format!("{dtype}.{count}.{operation}");
                all.push(Declaration {
                    name,
                    dtype,
                    shape: count.into(),
                    operation,
                    device: false,
                    members: Members::ALL,
                    receiver: None,
                    encoding: None,
                    store: None,
                });
            }
        }
    }
    all
}

#[test]
fn every_type_and_operation_over_every_transport_and_shape() {
    let transports = [
        (TransportChoice::Tcp, TcpDriver::Uring),
        (TransportChoice::Tcp, TcpDriver::Poll),
        (TransportChoice::Shm, TcpDriver::Auto),
    ];
    for (transport, driver) in transports {
        for (workers, servers, cores) in [(1, 1, 1), (2, 1, 2), (3, 2, 1), (4, 3, 2)] {
            let start = Instant::now();
            let shape = JobShape {
                workers,
                servers,
                cores,
                transport,
                driver,
                partition_bytes: 16 << 10,
                payload_checksum: checksums(workers),
                ..JobShape::default()
            };
            job::run(shape, move |worker| {
                let tensors = tensors(&[0, 1, 255, 4096, 20_011], workers);
                work(worker, &tensors, 2, 7);
            });
            println!("{transport:?} {driver:?} {workers}x{servers}x{cores}: {:?}", start.elapsed());
        }
    }
}

#[test]
fn every_type_and_operation_in_groups_of_ranks() {
    let shapes: [(&'static [u32], u32); 5] =
        [(&[2], 0), (&[4], 1), (&[2, 2], 1), (&[2, 1], 2), (&[3, 1, 2], 1)];
    for (hosts, servers) in shapes {
        let start = Instant::now();
        let workers = hosts.iter().sum();
        let shape = JobShape {
            workers,
            servers,
            cores: 2,
            transport: TransportChoice::Auto,
            partition_bytes: 128 << 10,
            payload_checksum: checksums(workers),
            hosts,
            ..JobShape::default()
        };
        job::run(shape, move |worker| {
            let tensors = tensors(&[0, 1, 255, 4096, 20_011, 100_003], workers);
            work(worker, &tensors, 3, 7);
        });
        println!("hosts of {hosts:?} ranks, {servers} servers: {:?}", start.elapsed());
    }
}

/// Copies and sums that threads share, on lanes to ranks and to servers of the host: the same bits.
#[test]
fn jobs_whose_loops_have_helpers() {
    for (hosts, servers, helpers) in [(&[2][..], 0, 1), (&[3], 0, 3), (&[2, 1], 1, 1)] {
        let workers: u32 = hosts.iter().sum();
        let shape = JobShape {
            workers,
            servers,
            transport: TransportChoice::Auto,
            payload_checksum: checksums(workers),
            nic_helpers: Some(helpers),
            hosts,
            ..JobShape::default()
        };
        job::run(shape, move |worker| {
            // A new thread names itself.
            let start = Instant::now();
            while threads("bps-helper") < helpers {
                assert!(start.elapsed() < Duration::from_secs(60), "the loop has no helpers");
                std::thread::yield_now();
            }
            work(worker, &tensors(&[20_011, 100_003], workers), 2, 7);
        });
    }
}

/// Threads of this process with this name.
fn threads(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("tasks of this process");
    let comm = |task: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(task.ok()?.path().join("comm")).ok()
    };
    tasks.filter_map(comm).filter(|comm| comm.trim_end() == name).count()
}

/// `tests/rdma/run` runs this in a virtual machine that has devices.
#[test]
fn jobs_over_rdma() {
    if let Err(error) = bps_engine::transport::rdma::find(None) {
        assert!(std::env::var_os("BPS_TEST_RDMA_ONLY").is_none(), "{error}");
        eprintln!("skipped: {error}");
        return;
    }
    for (workers, servers, cores) in [(2, 1, 2), (3, 2, 1)] {
        let start = Instant::now();
        let shape = JobShape {
            workers,
            servers,
            cores,
            transport: TransportChoice::Rdma,
            partition_bytes: 16 << 10,
            payload_checksum: checksums(workers),
            ..JobShape::default()
        };
        job::run(shape, move |worker| {
            let tensors = tensors(&[0, 1, 255, 4096, 20_011], workers);
            work(worker, &tensors, 2, 7);
        });
        println!("{workers}x{servers}x{cores}: {:?}", start.elapsed());
    }
    // RDMA is taken by itself where servers are on other hosts.
    let shape =
        JobShape { transport: TransportChoice::Auto, hosts: &[1, 1], ..JobShape::default() };
    let pairs = job::run(shape, |worker| {
        work(worker, &tensors(&[4096, 20_011], 2), 2, 7);
        queue_pairs()
    });
    // The lane of the other rank may be gone already.
    assert!(pairs.iter().all(|count| *count >= 2), "{pairs:?} queue pairs");
    // Parts of many slots.
    let shape = JobShape {
        transport: TransportChoice::Rdma,
        partition_bytes: 4 << 20,
        ..JobShape::default()
    };
    job::run(shape, |worker| {
        let large = Declaration {
            name: "large".into(),
            dtype: DType::F32,
            shape: (3 << 20).into(),
            operation: Operation::Average,
            device: false,
            members: Members::ALL,
            receiver: None,
            encoding: None,
            store: None,
        };
        work(worker, &[large], 2, 1);
    });
}

/// Connected queue pairs of this machine.
fn queue_pairs() -> usize {
    let found = Command::new("rdma").args(["resource", "show", "qp"]).output().expect("rdma");
    let found = String::from_utf8_lossy(&found.stdout).into_owned();
    found.lines().filter(|line| line.contains("type RC") && line.contains("RTS")).count()
}

/// `tests/rdma/run` runs this as well. Where memory can't be locked, lanes go over TCP, unless
/// RDMA is demanded: then the message says what is missing.
#[test]
fn jobs_that_may_not_lock_memory() {
    if bps_engine::transport::rdma::find(None).is_err() || !rustix::process::geteuid().is_root() {
        assert!(std::env::var_os("BPS_TEST_RDMA_ONLY").is_none(), "no devices, or not root");
        eprintln!("skipped: no RDMA device, or not root, whose limits bind nobody");
        return;
    }
    let limited = |transport: &str| {
        Command::new("setpriv")
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .args(["prlimit", "--memlock=65536"])
            .arg(std::env::current_exe().expect("this program"))
            .args(["--exact", "the_limited_job", "--ignored", "--nocapture"])
            .env("BPS_TEST_TRANSPORT", transport)
            .output()
            .expect("setpriv and prlimit")
    };
    for (transport, is_well) in [("auto", true), ("rdma", false)] {
        let done = limited(transport);
        let text = String::from_utf8_lossy(&done.stderr).into_owned();
        println!("{transport}: {}\n{text}", done.status);
        assert_eq!(done.status.success(), is_well, "{transport}");
        for word in ["RLIMIT_MEMLOCK is 65536 bytes", "2098176 bytes", "ulimit -l unlimited"] {
            assert!(text.contains(word), "{transport}: {word}");
        }
        assert_eq!(text.contains("goes over TCP"), is_well, "{transport}");
    }
}

#[test]
#[ignore = "the other process of `jobs_that_may_not_lock_memory`"]
fn the_limited_job() {
    let Ok(transport) = std::env::var("BPS_TEST_TRANSPORT") else {
        eprintln!("skipped: nobody started this under a limit");
        return;
    };
    let is_demanded = transport == "rdma";
    let transport = if is_demanded { TransportChoice::Rdma } else { TransportChoice::Auto };
    let shape = JobShape { transport, hosts: &[1, 1], ..JobShape::default() };
    let pairs = job::run(shape, |worker| {
        work(worker, &tensors(&[4096, 20_011], 2), 2, 7);
        queue_pairs()
    });
    assert_eq!(pairs, [0, 0], "lanes over RDMA");
}

#[test]
fn large_tensors() {
    let ways: [(TransportChoice, &'static [u32]); 3] =
        [(TransportChoice::Tcp, &[]), (TransportChoice::Shm, &[]), (TransportChoice::Auto, &[2])];
    for (transport, hosts) in ways {
        let shape = JobShape { workers: 2, cores: 2, transport, hosts, ..JobShape::default() };
        job::run(shape, |worker| {
            let one = |name: &str, dtype, operation| Declaration {
                name: name.into(),
                dtype,
                shape: ((64 << 20) / dtype.size() as u64).into(),
                operation,
                device: false,
                members: Members::ALL,
                receiver: None,
                encoding: None,
                store: None,
            };
            let tensors = [
                one("f32", DType::F32, Operation::Sum),
                one("bf16", DType::BF16, Operation::Average),
            ];
            work(worker, &tensors, 1, 1);
        });
    }
}

#[test]
fn a_thousand_small_tensors_declare_within_a_second() {
    let times = job::run(JobShape::default(), |worker| {
        let tensors: Vec<Declaration> = (0..1000)
            .map(|index| Declaration {
                name: format!("layer{index}.weight"),
                dtype: DType::F32,
                shape: 1024.into(),
                operation: Operation::Sum,
                device: false,
                members: Members::ALL,
                receiver: None,
                encoding: None,
                store: None,
            })
            .collect();
        worker.barrier(LONG).expect("barrier");
        let start = Instant::now();
        worker.declare(&tensors).expect("declared");
        let declared = start.elapsed();
        work(worker, &tensors, 3, 5);
        declared
    });
    println!("declaring 1,000 tensors took {times:?}");
    assert!(times.iter().all(|time| *time < Duration::from_secs(1)), "{times:?}");
}

#[test]
fn a_disagreement_is_an_error_on_every_rank_within_a_second() {
    let shape = JobShape { workers: 3, ..JobShape::default() };
    let seen = job::run_nodes(shape, |worker| {
        let dimensions = if worker.rank() == 2 { [20, 5] } else { [5, 20] };
        let tensor = Declaration {
            name: "x".into(),
            dtype: DType::F32,
            shape: TensorShape::new(dimensions.into()).unwrap(),
            operation: Operation::Sum,
            device: false,
            members: Members::ALL,
            receiver: None,
            encoding: None,
            store: None,
        };
        // The third is late: the others have pushed already.
        if worker.rank() == 2 {
            std::thread::sleep(Duration::from_millis(200));
        }
        let start = Instant::now();
        let mut values = vec![1.0f32; 100];
        let target = values.as_mut_ptr().cast::<u8>();
        let error = worker.declare(&[tensor]).and_then(|ids| {
            let item =
                PushPull { tensor: ids[0], source: target.cast_const(), target, priority: 0 };
            // SAFETY: `values` lives until the handle is done.
            unsafe { worker.push_pull(&[item]) }?[0].wait(LONG)
        });
        let took = start.elapsed();
        let _ = worker.shutdown(false);
        (error, took)
    });
    for (rank, (error, took)) in seen.into_iter().enumerate() {
        let Err(Error::Mismatch(told)) = error else { panic!("rank {rank}: {error:?}") };
        let text = told.to_string();
        assert!(text.contains("shape [5, 20]") && text.contains("shape [20, 5]"), "{text}");
        assert!(text.contains("rank 2"), "{text}");
        assert!(took < Duration::from_millis(1200), "rank {rank}: {took:?}");
    }
}

/// Rounds after which the comparison ends in any case.
const ROUNDS_MAX: usize = 300;
/// How many times as long a thousand small tensors may take. Assertions and checks of arithmetic,
/// which builds for tests have, cost something for each part, and nothing for its bytes: over
/// shared memory, where bytes cost least, that shows. There 3.2 to 4.8 were seen, by processor; a
/// cost that grew with the number of tensors would be tens of times.
fn times_max(transport: TransportChoice) -> f64 {
    if cfg!(debug_assertions) && transport == TransportChoice::Shm { 6.0 } else { 3.0 }
}

/// Rounds that are judged together.
const BLOCK: usize = 25;

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// Whether every rank says yes; all get the same answer.
fn all_agree(worker: &Worker, flag: &[PushPull], yes: bool) -> bool {
    let word = flag[0].target.cast::<f32>();
    // SAFETY: the flag's memory is one f32 of the caller's, and no push_pull of it is under way.
    unsafe { word.write(f32::from(u8::from(yes))) };
    timed(worker, flag);
    // SAFETY: `timed` has waited for the push_pull, so the f32 is the caller's again.
    f64::from(unsafe { word.read() }) == f64::from(worker.size())
}

/// Seconds from a barrier until all of these have landed, on the slowest rank.
fn timed(worker: &Worker, items: &[PushPull]) -> f64 {
    worker.barrier(LONG).expect("barrier");
    let start = Instant::now();
    // SAFETY: the caller keeps the memory until all handles are done, and nobody touches it
    // meanwhile.
    let handles = unsafe { worker.push_pull(items) }.expect("pushed");
    for handle in &handles {
        assert_eq!(handle.wait(LONG), Ok(true));
    }
    start.elapsed().as_secs_f64()
}

fn items(worker: &Worker, name: &str, memory: &mut [f32], tensors: usize) -> Vec<PushPull> {
    let count = memory.len() / tensors;
    let declarations: Vec<Declaration> = (0..tensors)
        .map(|index| Declaration {
            name: format!("{name}.{index}"),
            dtype: DType::F32,
            shape: (count as u64).into(),
            operation: Operation::Sum,
            device: false,
            members: Members::ALL,
            receiver: None,
            encoding: None,
            store: None,
        })
        .collect();
    let ids = worker.declare(&declarations).expect("declared");
    let piece = |(&tensor, values): (_, &mut [f32])| {
        let target = values.as_mut_ptr().cast::<u8>();
        PushPull { tensor, source: target.cast_const(), target, priority: 0 }
    };
    ids.iter().zip(memory.chunks_mut(count)).map(piece).collect()
}

#[test]
fn a_thousand_small_tensors_take_at_most_a_few_times_one_of_their_size() {
    for transport in [TransportChoice::Tcp, TransportChoice::Shm] {
        let shape = JobShape { transport, ..JobShape::default() };
        let times_max = times_max(transport);
        let ratios = job::run(shape, move |worker| {
            let (mut many, mut one) = (vec![0.0f32; 1_000 << 10], vec![0.0f32; 1 << 20]);
            let many = items(worker, "small", &mut many, 1000);
            let one = items(worker, "large", &mut one, 1);
            let mut word = vec![0.0f32; 1];
            let flag = items(worker, "flag", &mut word, 1);
            // In turn, so that whatever else the machine does touches both. Where it is busy with
            // something else a block of rounds is spoilt, and the next is judged by itself: what
            // costs too much does so in every block.
            let (mut small, mut large) = (Vec::new(), Vec::new());
            for round in 0..ROUNDS_MAX {
                if round % BLOCK == 0 {
                    small.clear();
                    large.clear();
                }
                small.push(timed(worker, &many));
                large.push(timed(worker, &one));
                let settled = median(&small) <= 0.9 * times_max * median(&large);
                // All must go on or stop together.
                let stop = round % BLOCK == BLOCK - 1 && all_agree(worker, &flag, settled);
                if stop {
                    break;
                }
            }
            (median(&small), median(&large))
        });
        let small = ratios.iter().map(|one| one.0).fold(0.0, f64::max);
        let large = ratios.iter().map(|one| one.1).fold(0.0, f64::max);
        println!(
            "{transport:?}: 1,000 × 4 KiB in {:.2} ms, 1 × 4 MiB in {:.2} ms: {:.2} times",
            small * 1e3,
            large * 1e3,
            small / large
        );
        assert!(small <= times_max * large, "{transport:?}: {:.2} times", small / large);
    }
}

/// Jobs of three ranks carry them everywhere, all others where it is the default.
fn checksums(workers: u32) -> PayloadChecksum {
    if workers == 3 { PayloadChecksum::Always } else { PayloadChecksum::Auto }
}

/// Values whose sums are beyond f16 and whose average is not, on hosts of several ranks: the sums
/// of groups are scaled, by another power of two for each size, and the result is rounded as ever.
#[test]
fn averages_of_large_f16_do_not_overflow_in_a_group() {
    // Groups of 1, 2, 3 and 4; by 3 no power of two divides.
    for hosts in [&[2, 2][..], &[3, 1, 2], &[3, 3], &[4, 1]] {
        let hosts: &'static [u32] = Box::leak(hosts.into());
        let workers: u32 = hosts.iter().sum();
        let shape = JobShape { workers, hosts, ..JobShape::default() };
        let value = move |rank: u32, index: usize| match index % 4 {
            // The largest f16, from all.
            0 => 65504.0,
            1 => 60000.0 - 32.0 * f64::from(rank),
            2 => -65504.0 + 64.0 * f64::from(rank),
            // The smallest f16: it must not vanish.
            _ => f64::from(f16::MIN_POSITIVE_SUBNORMAL.to_f32()) * f64::from(4 * workers),
        };
        let count = 5000;
        job::run(shape, move |worker| {
            let ids = worker.declare(&[Declaration {
                name: "large".into(),
                dtype: DType::F16,
                shape: (count as u64).into(),
                operation: Operation::Average,
                device: false,
                members: Members::ALL,
                receiver: None,
                encoding: None,
                store: None,
            }]);
            let ids = ids.expect("declared");
            let rank = worker.rank();
            let mut values: Vec<f16> =
                (0..count).map(|index| f16::from_f64(value(rank, index))).collect();
            let target = values.as_mut_ptr().cast::<u8>();
            let source = target.cast_const();
            let item = PushPull { tensor: ids[0], source, target, priority: 0 };
            // SAFETY: `values` lives until the handle is done, and nobody touches it meanwhile.
            let handles = unsafe { worker.push_pull(&[item]) }.expect("pushed");
            assert_eq!(handles[0].wait(LONG), Ok(true));
            for (index, got) in values.iter().enumerate() {
                let sent = (0..workers).map(|rank| f16::from_f64(value(rank, index)).to_f64());
                let exact = sent.sum::<f64>() / f64::from(workers);
                // Each group's sum is rounded once, and the result once more.
                let error = (got.to_f64() - exact).abs();
                let close = exact.abs() / 1024.0;
                assert!(error <= close, "{hosts:?}, {index}: {got} and not {exact}");
            }
        });
    }
}
