//! Whole jobs of real processes whose tensors are on fake GPUs (`tests/fake_gpu`), over
//! RDMA devices. `tests/rdma/run` runs these in a virtual machine that has such devices; elsewhere
//! all but one say that they can't.

use bps_fake_gpu as _;
use bps_tests::gpu_job::{self, Job, LIMIT, PROMISE, SERVER_MEMLOCK, SLACK, Shape, start_but};
use std::time::Instant;

type Settings<'a> = &'a [(&'static str, &'a str)];

const OVER_RDMA: Settings<'_> = &[("BPS_TRANSPORT", "rdma"), ("BPS_LOG_LEVEL", "info")];
/// Memory of the GPU is exported, and devices are to reach it however fast they do.
const DIRECT: Settings<'_> = &[("FAKE_GPU_DMA_BUF", "1"), ("BPS_GPUDIRECT", "demand")];
/// Bytes of each round that the tensor of the scenario `loop` has.
const LOOP_BYTES: u64 = 400_000;
/// Ranks introduce their GPUs twice by a row of 512 bytes for each, in memory of the caller, which
/// is copied both ways.
const INTRODUCTION: u64 = 2048;

/// Whether this machine has RDMA devices; says so if not.
fn has_devices() -> bool {
    let found = bps_engine::transport::rdma::find(None);
    if let Err(error) = &found {
        assert!(std::env::var_os("BPS_TEST_RDMA_ONLY").is_none(), "{error}");
        eprintln!("skipped: {error}");
    }
    found.is_ok()
}

/// A job over RDMA with one server.
fn job(hosts: &[u32], odd: &str, others: &str, settings: &[Settings<'_>]) -> Job {
    let settings = [&[OVER_RDMA], settings].concat().concat();
    start_but(&Shape { hosts, servers: 1, settings: &settings }, 1, odd, others)
}

/// Waits until all have ended well. By rank: what it said, and for each of its lives the bytes that
/// were copied to be sent and when they came.
fn ended(mut job: Job) -> Vec<(String, Vec<[u64; 2]>)> {
    let mut said = Vec::new();
    for rank in &mut job.ranks {
        let status = rank.wait(LIMIT);
        let lines = rank.lines();
        assert!(status.success(), "{}", lines.join("\n"));
        let counts: Vec<[u64; 4]> = lines.iter().filter_map(|line| rdma_counts(line)).collect();
        assert!(counts.iter().all(|[_, answers, ..]| *answers == 0), "a worker answers nobody");
        let copied = counts.iter().map(|[_, _, staged, copied]| [*staged, *copied]).collect();
        said.push((lines.join("\n"), copied));
    }
    for other in job.servers.iter_mut().chain([&mut job.scheduler]) {
        assert!(other.wait(LIMIT).success(), "{}", other.lines().join("\n"));
    }
    said
}

/// What a process has said of its RDMA lanes, if that is the line: operations, answers among them,
/// bytes copied to be sent and bytes copied when they came.
fn rdma_counts(line: &str) -> Option<[u64; 4]> {
    let (_, rest) = line.split_once("rdma: ").filter(|_| line.contains("straight to where"))?;
    let digits = rest.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
    let numbers: Vec<u64> = digits.map(|digits| digits.parse().expect("digits")).collect();
    numbers.try_into().ok()
}

/// Gradients leave from where they were copied to, and results are written by the server's device
/// to where they are copied from: slots of the host's memory, or of the GPU's.
#[test]
fn slots_are_reached_by_rdma_devices() {
    if !has_devices() {
        return;
    }
    let small_parts: Settings<'_> = &[("BYTEPS_PARTITION_BYTES", "16384")];
    for (memory, line) in [
        (&[][..], "GPUDirect RDMA: not used, GPU 0 sends and receives by slots of the host's"),
        (DIRECT, "GPUDirect RDMA: contributions and results go between GPU 0 and the network"),
    ] {
        // The second has parts of all kinds of sizes, also such as are too short to be granted
        // anything; the third ranks that disagree, so that slots are granted for results that never
        // come.
        for (hosts, odd, others, more, lives) in [
            (&[1, 1][..], "loop 20", "loop 20", &[][..], 1),
            (&[2, 1], "work 1 11", "work 1 11", small_parts, 1),
            (&[1, 1], "mismatch 0", "mismatch 1", &[], 1),
            (&[1, 1], "resume", "resume", &[], 2),
        ] {
            let begun = Instant::now();
            for (said, copied) in ended(job(hosts, odd, others, &[memory, more])) {
                assert_eq!(said.matches(line).count(), lives, "{said}");
                assert_eq!(copied.len(), lives, "{said}");
                if odd == "loop 20" {
                    // Of the tensor not a byte.
                    assert_eq!(copied, [[INTRODUCTION; 2]], "{said}");
                    let told = said.lines().find(|told| told.contains(line));
                    println!("{}", told.unwrap_or_default());
                }
                println!("copied to be sent, and landed: {copied:?}");
            }
            println!("{hosts:?}, {odd}: {:?}", begun.elapsed());
        }
    }
}

/// A server whose accumulators can't be registered sends results as other frames: no device writes
/// them to the GPU, and no processor can.
#[test]
fn a_result_that_no_device_can_write_to_the_gpu_takes_the_hosts_memory() {
    if !has_devices() {
        return;
    }
    // Two lanes take two areas and their mirrors, of 2.1 MB each.
    let little: Settings<'_> = &[(SERVER_MEMLOCK, "8700000")];
    let job = job(&[1, 1], "loop 20", "loop 20", &[DIRECT, little]);
    let _ = job.servers[0].wait_for_line("RLIMIT_MEMLOCK is 8700000 bytes", LIMIT);
    for (said, copied) in ended(job) {
        let through_the_host = INTRODUCTION + 20 * LOOP_BYTES;
        assert_eq!(copied, [[INTRODUCTION, through_the_host]], "{said}");
    }
}

#[test]
fn devices_whose_writes_are_not_in_order_are_flushed() {
    if !has_devices() {
        return;
    }
    let flushed: Settings<'_> = &[("FAKE_GPU_DMA_BUF", "2"), ("BPS_GPUDIRECT", "demand")];
    for (said, _) in ended(job(&[1, 1], "loop 5", "loop 5", &[flushed])) {
        assert!(said.contains("GPUDirect RDMA: contributions and results"), "{said}");
    }
    // Each of these calls comes before a result is used, so one that fails ends the job.
    let failing: Settings<'_> = &[("FAKE_GPU_FAIL", "cuFlushGPUDirectRDMAWrites@9")];
    let mut broken = job(&[1, 1], "loop 1000000", "loop 1000000", &[flushed, failing]);
    let since = Instant::now();
    let words = ["rank ended", "cuFlushGPUDirectRDMAWrites failed"];
    broken.others_end_with(usize::MAX, &words, since, LIMIT);
    // In order they need no flush, and it is not called.
    ended(job(&[1, 1], "loop 20", "loop 20", &[DIRECT, failing]));
}

#[test]
fn by_itself_the_faster_memory_is_taken() {
    if !has_devices() {
        return;
    }
    let exported: Settings<'_> = &[("FAKE_GPU_DMA_BUF", "1")];
    for (said, copied) in ended(job(&[1, 1], "loop 20", "loop 20", &[exported])) {
        let line = said.lines().find(|line| line.contains("GPUDirect RDMA: "));
        let line = line.unwrap_or_else(|| panic!("{said}"));
        println!("{line}");
        let speeds = [" reads it at ", " writes it at ", " the host's memory at "].map(|words| {
            let (_, rest) = line.split_once(words).unwrap_or_else(|| panic!("{line}"));
            let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
            rest[..end].parse::<f64>().expect("a speed")
        });
        let [reads, writes, host] = speeds;
        let is_used = |words: &str| line.contains(words);
        // Where the digits that are printed leave no doubt.
        for (speed, words) in [
            (reads, ["contributions and results go", "contributions, but no results"]),
            (writes, ["contributions and results go", "results, but no contributions"]),
        ] {
            if (speed / host - 0.75).abs() > 0.15 {
                let used = words.into_iter().any(is_used);
                assert_eq!(used, speed > 0.75 * host, "{line}");
            }
        }
        assert_eq!(copied, [[INTRODUCTION; 2]], "{said}");
    }
}

#[test]
fn what_is_demanded_and_cannot_be_ends_the_job_with_the_reason() {
    let demanded: Settings<'_> = &[("BPS_GPUDIRECT", "demand")];
    let tcp: Settings<'_> = &[("BPS_TRANSPORT", "tcp")];
    let disordered: Settings<'_> = &[("FAKE_GPU_DMA_BUF", "3")];
    let closed: Settings<'_> = &[("FAKE_GPU_DMA_BUF", "0")];
    let checked: Settings<'_> = &[("FAKE_GPU_DMA_BUF", "1"), ("BPS_PAYLOAD_CHECKSUM", "1")];
    let mut cases = vec![(tcp, "this rank has no RDMA lane to a server")];
    if has_devices() {
        cases.push((disordered, "neither orders what devices write to it nor"));
        cases.push((closed, "exports no memory as dma-buf"));
        cases.push((checked, "BPS_PAYLOAD_CHECKSUM"));
    }
    for (case, why) in cases {
        let settings = [OVER_RDMA, demanded, case].concat();
        let shape = Shape { hosts: &[1, 1], servers: 1, settings: &settings };
        let mut job = gpu_job::start_all(&shape, "loop 3");
        let words = ["GPUDirect RDMA with GPU 0 is demanded (BPS_GPUDIRECT=demand)", why];
        job.others_end_with(usize::MAX, &words, Instant::now(), LIMIT + PROMISE + SLACK);
    }
}
