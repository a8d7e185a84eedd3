//! Whole jobs of real processes whose tensors are on fake GPUs (`tests/fake_gpu`): every
//! result against the reference, bit for bit, and jobs that end in every way.

use bps_fake_gpu as _;
use bps_tests::gpu_job::{
    self, LIMIT, PROMISE, SLACK, Shape, right, running, start, start_all, start_but, words,
};
use bps_tests::timeline::Trace;
use rustix::process::Signal;
use std::time::Instant;

#[test]
fn hosts_of_one_gpu_through_servers() {
    right(&[1, 1], 1, "work 4 1", &[]);
    right(&[1, 1, 1, 1], 2, "work 2 2", &[("FAKE_GPU_SEED", "5")]);
}

#[test]
fn hosts_of_several_gpus_through_servers() {
    right(&[2, 2], 1, "work 4 3", &[]);
    right(&[3, 3], 2, "work 2 4", &[("FAKE_GPU_SEED", "6"), ("BYTEPS_NCCL_GROUP_SIZE", "3")]);
    right(&[2, 1, 3], 1, "work 2 5", &[("FAKE_GPU_SEED", "7"), ("FAKE_GPU_DELAY_US", "50")]);
}

#[test]
fn streams_wait_for_results_and_hosts_do_not() {
    right(&[1, 1], 1, "ahead", &[]);
    right(&[1, 1, 1], 2, "ahead", &[("FAKE_GPU_SEED", "11"), ("BPS_TCP_DRIVER", "poll")]);
}

#[test]
fn streams_without_room_for_all_waits_delay_nothing() {
    right(&[1, 1], 1, "full", &[("FAKE_GPU_DEPTH", "16"), ("FAKE_GPU_DELAY_US", "0")]);
}

#[test]
fn encoded_tensors_get_what_tensors_of_the_host_get() {
    let all = ("BYTEPS_MIN_COMPRESS_BYTES", "0");
    right(&[1, 1], 1, "coded 4 1", &[all]);
    // By slots that parts share.
    right(&[1, 1], 1, "coded 3 1", &[all, ("BPS_GPU_STAGING_MB", "0"), ("FAKE_GPU_SEED", "12")]);
    // The GPU encodes NCCL's sum of a host.
    right(&[2, 2], 1, "coded 3", &[all]);
    // The driver does not take the kernels.
    right(&[1, 1], 1, "coded 2 1", &[all, ("FAKE_GPU_FAIL", "cuModuleLoadData=222")]);
    // It has no memory for what the third tensor keeps, nor for others.
    right(&[1, 1], 1, "coded 3 1", &[all, ("FAKE_GPU_FAIL", "cuMemAllocAsync=2@3")]);
}

#[test]
fn processors_encode_only_what_the_gpu_has_no_memory_for_and_say_so_once() {
    for (failure, lines) in [("", 0), ("cuMemAllocAsync=2@3", 1)] {
        let settings = [
            ("BYTEPS_MIN_COMPRESS_BYTES", "0"),
            ("BYTEPS_PARTITION_BYTES", "16384"),
            ("BPS_LOG_LEVEL", "info"),
            ("FAKE_GPU_FAIL", failure),
        ];
        let shape = Shape { hosts: &[1, 1], servers: 1, settings: &settings };
        let mut job = start_all(&shape, "coded 1");
        for rank in &mut job.ranks {
            let status = rank.wait(LIMIT);
            let said = rank.lines();
            assert!(status.success(), "{}", said.join("\n"));
            let said: Vec<_> =
                said.iter().filter(|line| line.contains("the processors encode")).collect();
            assert_eq!(said.len(), lines, "{said:?}");
            assert!(said.iter().all(|line| line.contains("it has no memory for what")), "{said:?}");
        }
    }
}

#[test]
fn tensors_of_the_host_are_pushed_from_gpus() {
    right(&[1, 1, 1, 1], 2, "bounced 3", &[("FAKE_GPU_PINNED", "1")]);
    right(&[2, 2], 1, "bounced 3 1", &[("FAKE_GPU_SEED", "13")]);
    // Nobody has a server to ask.
    right(&[3], 0, "bounced 3 1", &[("FAKE_GPU_SEED", "14"), ("FAKE_GPU_DELAY_US", "2000")]);
}

#[test]
fn one_host_without_servers() {
    right(&[2], 0, "work 4 6", &[]);
    right(&[4], 0, "work 2 7", &[("FAKE_GPU_SEED", "8")]);
}

#[test]
fn one_host_through_servers() {
    right(&[2], 1, "work 2 8", &[("BYTEPS_FORCE_DISTRIBUTED", "1")]);
    right(&[2], 1, "work 2 9", &[("BPS_LOCAL_REDUCE", "0"), ("BYTEPS_FORCE_DISTRIBUTED", "1")]);
    right(&[2, 1], 1, "work 2 10", &[("BPS_LOCAL_REDUCE", "0"), ("BPS_PAYLOAD_CHECKSUM", "1")]);
}

#[test]
fn tensors_that_are_pushed_together_share_calls_of_the_driver() {
    // 1,000 rounds of tensors: one wait for each push of all, and one mark for each landing and for
    // some copies down together. A call too many fails.
    let few = "cuStreamWaitEvent=700@100,cuStreamWriteValue32=700@1500";
    right(&[1, 1], 1, "many 5", &[("FAKE_GPU_FAIL", few)]);
    right(&[2], 0, "many 2", &[]);
    right(&[2, 2], 1, "many 2", &[]);
}

#[test]
fn more_parts_than_slots() {
    let large = [("BYTEPS_PARTITION_BYTES", "1048576"), ("FAKE_GPU_PINNED", "1")];
    right(&[1, 1], 1, "large", &large);
    right(&[2, 2], 1, "large", &large);
}

#[test]
fn a_killed_rank_is_named_by_all_others() {
    for (hosts, servers) in [(&[2, 2][..], 1), (&[3], 0)] {
        for victim in [0, 1] {
            let mut job = running(&Shape { hosts, servers, settings: &[] });
            let since = Instant::now();
            job.ranks[victim].signal(Signal::KILL);
            let who = format!("rank {victim} (host");
            job.others_end_with(victim, &["PeerDied", &who, "died"], since, PROMISE + SLACK);
        }
    }
}

#[test]
fn the_parts_of_a_killed_server_move_while_gpus_push() {
    // With "none" a rank does not know that deaths may leave the job running: its tensors have
    // memory of their own in the host.
    for (hosts, elastic) in [(&[1, 1][..], "shrink"), (&[1, 1], "none"), (&[2, 2], "shrink")] {
        let settings = [
            ("BPS_ELASTIC", "shrink"),
            ("BYTEPS_PARTITION_BYTES", "16384"),
            ("BPS_LOG_LEVEL", "info"),
        ];
        let shape = Shape { hosts, servers: 2, settings: &settings };
        let own = vec![("BPS_ELASTIC", elastic.to_owned())];
        let mut job = start(&shape, |_| (words("work 8 15 1"), own.clone()));
        for rank in &job.ranks {
            let _ = rank.wait_for_line("rank has begun", LIMIT);
        }
        job.servers[0].signal(Signal::KILL);
        // It was killed while they worked.
        let moved = job.scheduler.wait_for_line(" moved to other servers within ", LIMIT);
        for rank in &mut job.ranks {
            let status = rank.wait(LIMIT);
            let said = rank.lines();
            let is_well = status.success() && said.iter().any(|line| line == "rank ended: ok");
            assert!(is_well, "{}", said.join("\n"));
        }
        println!("hosts of {hosts:?} ranks: {moved}");
    }
}

#[test]
fn a_rank_that_never_pushes_is_named_and_not_who_speaks_for_its_host() {
    let settings = [("BPS_STALL_REPORT", "1"), ("BPS_STALL_TIMEOUT", "3")];
    let settings = &settings[..];
    for (hosts, servers, silent) in [(&[2, 2][..], 1, 3), (&[2, 2], 1, 0), (&[3], 0, 0)] {
        let shape = Shape { hosts, servers, settings };
        let mut job = start_but(&shape, silent, "loop 1000000 5", "loop 1000000");
        let _ = job.ranks[silent as usize].wait_for_line("rank stalls", LIMIT);
        let since = Instant::now();
        let alone = format!("rank {silent} is late by ");
        for rank in &job.ranks {
            let _ = rank.wait_for_line(&alone, PROMISE + SLACK);
        }
        let place = format!(", pid {})", job.ranks[silent as usize].pid());
        let who = format!("waits for rank {silent} (host ");
        let words = ["rank ended: Stalled", "BPS_STALL_TIMEOUT", &who, &place];
        job.others_end_with(usize::MAX, &words, since, PROMISE + SLACK);
    }
}

#[test]
fn a_rank_that_leaves_too_early_is_named_at_once() {
    for (hosts, servers, odd) in [(&[2, 2][..], 1, 0), (&[2, 2], 1, 3), (&[3], 0, 0), (&[3], 0, 1)]
    {
        let shape = Shape { hosts, servers, settings: &[] };
        let mut job = start_but(&shape, odd, "loop 20", "loop 1000000");
        let status = job.ranks[odd as usize].wait(LIMIT);
        assert!(status.success(), "{status}");
        let who = format!("rank {odd} (host ");
        let left = format!(", pid {}) left the job while", job.ranks[odd as usize].pid());
        let words = ["rank ended: ", &who, &left, "others wait", "round 21 of `layer4.weight`"];
        job.others_end_with(odd as usize, &words, Instant::now(), PROMISE);
        // Or with a round under way.
        if odd == 1 || servers > 0 && odd == 0 {
            continue;
        }
        let mut job = start_but(&shape, odd, "loop 1000000 20 1", "loop 1000000");
        let _ = job.ranks[odd as usize].wait(LIMIT);
        let who = format!("rank {odd}");
        job.others_end_with(odd as usize, &["rank ended: ", &who], Instant::now(), PROMISE);
    }
}

#[test]
fn a_rank_that_is_late_to_leave_harms_nobody() {
    // Time is what is tested: the others wait for it in NCCL, and then no more.
    let shape = Shape { hosts: &[3], servers: 0, settings: &[] };
    let mut job = start_but(&shape, 1, "loop 3 0", "loop 3");
    for program in job.ranks.iter_mut().chain([&mut job.scheduler]) {
        assert!(program.wait(LIMIT).success(), "{}", program.lines().join("\n"));
        let warned = program.lines().iter().any(|line| line.contains("warning"));
        assert!(!warned, "{}", program.lines().join("\n"));
    }
}

#[test]
fn ranks_that_disagree_are_all_told_and_other_tensors_go_on() {
    for (hosts, servers) in [(&[2, 2][..], 1), (&[1, 1], 1), (&[3], 0)] {
        let shape = Shape { hosts, servers, settings: &[] };
        let last = hosts.iter().sum::<u32>() - 1;
        let mut job = start_but(&shape, last, "mismatch 1", "mismatch 0");
        for rank in &mut job.ranks {
            let status = rank.wait(LIMIT);
            let said = rank.lines().join("\n");
            assert!(status.success(), "{said}");
            let told = ["rank was told: tensor `spoilt`", "on GPUs", &format!("rank {last}")];
            for words in told {
                assert!(said.contains(words), "no {words} in: {said}");
            }
        }
    }
}

#[test]
fn ranks_that_disagree_while_a_host_reduces_end_the_tensor_and_not_the_job() {
    let small = [("BYTEPS_PARTITION_BYTES", "4096"), ("BYTEPS_NCCL_GROUP_SIZE", "3")];
    // Who disagrees is of another host; is the one that gives the order; is led by it.
    for (hosts, servers, odd) in [(&[3, 1][..], 1, 3), (&[3, 1], 1, 0), (&[3], 0, 2)] {
        let shape = Shape { hosts, servers, settings: &small };
        let mut job = start_but(&shape, odd, "mismatches 1", "mismatches 0");
        for rank in &mut job.ranks {
            assert!(rank.wait(LIMIT).success(), "{}", rank.lines().join("\n"));
        }
    }
}

#[test]
fn a_call_that_fails_ends_the_job_everywhere_with_the_reason() {
    let failures = [
        ("cuMemHostRegister=2", "cuMemHostRegister failed"),
        // The rank's own copies come first up, and last down.
        ("cuMemcpyDtoHAsync=700@5", "cuMemcpyDtoHAsync failed"),
        ("cuMemcpyHtoDAsync=700@6", "cuMemcpyHtoDAsync failed"),
        ("cuStreamWriteValue32=700@9", "cuStreamWriteValue32 failed"),
        ("cuStreamCreateWithPriority=2@2", "cuStreamCreateWithPriority failed"),
        ("ncclCommInitRankConfig", "ncclCommInitRankConfig failed"),
        ("ncclReduceScatter@3", "ncclReduceScatter failed"),
        ("ncclGroupEnd@4", "ncclGroupEnd failed"),
        ("ncclCommGetAsyncError=6@30", "failed: remote process exited"),
    ];
    let shape = Shape { hosts: &[2, 1], servers: 1, settings: &[] };
    for (failure, words) in failures {
        let mut job = start(&shape, |rank| {
            let own = [("FAKE_GPU_FAIL", failure.to_owned())];
            (gpu_job::words("loop 1000000"), own.into_iter().filter(|_| rank == 1).collect())
        });
        job.others_end_with(usize::MAX, &["rank ended: ", words], Instant::now(), LIMIT);
    }
}

#[test]
fn gpus_that_cannot_be_used_together_are_told_to_all() {
    let shape = Shape { hosts: &[1, 2], servers: 1, settings: &[] };
    let with = |variable: &'static str, value: &str, odd: &[u32], words: &[&str]| {
        let mut job = start(&shape, |rank| {
            let own = [(variable, value.to_owned())].into_iter();
            (gpu_job::words("loop 3"), own.filter(|_| odd.contains(&rank)).collect())
        });
        job.others_end_with(usize::MAX, words, Instant::now(), LIMIT);
    };
    let same = "rank 1 and rank 2 are on one host and use the same GPU";
    with("CUDA_VISIBLE_DEVICES", "3", &[1, 2], &["rank ended: Start", same, "set_device"]);
    let missing = ["rank ended: Start", "rank 2 can't use its GPU: NCCL is needed", "/no/nccl"];
    with("BPS_NCCL_LIBRARY", "/no/nccl", &[2], &missing);
    let other = ["rank ended: Start", "rank 1 and rank 2", "have NCCL 2.27.7 and 2.28.8"];
    with("FAKE_NCCL_VERSION", "22808", &[2], &other);
    with(
        "FAKE_GPU_COUNT",
        "0",
        &[0],
        &["rank ended: Start", "rank 0 can't use its GPU", "no GPU 0"],
    );
    let mut job = start_all(&shape, "second");
    let words = ["rank ended: Config", "uses GPU 0", "GPU 1", "a process has one GPU"];
    job.others_end_with(usize::MAX, &words, Instant::now(), LIMIT);
}

#[test]
fn a_job_is_suspended_and_resumed() {
    for (hosts, servers) in [(&[2, 2][..], 1), (&[2], 0)] {
        let mut job = start_all(&Shape { hosts, servers, settings: &[] }, "resume");
        for rank in &mut job.ranks {
            assert!(rank.wait(LIMIT).success(), "{}", rank.lines().join("\n"));
        }
    }
}

/// What a timeline has of a part in these jobs, in its order; a wait of no time is left out.
const WAITS: &[&str] = &["QUEUE", "COORDINATE_REDUCE", "COORDINATE_BROADCAST"];
const ALONE: &str = "READY QUEUE COPYD2H QUEUE PUSH SUM PULL QUEUE COPYH2D DONE";
const SHARED: &str = "READY COORDINATE_REDUCE REDUCE QUEUE COPYD2H QUEUE PUSH SUM PULL QUEUE \
                      COPYH2D COORDINATE_BROADCAST BROADCAST DONE";
/// Below several PCIe switches: where they are summed, with servers and without, and elsewhere.
const ACROSS: &str = "READY COORDINATE_REDUCE REDUCE QUEUE COPYD2H PCIE_REDUCE QUEUE PUSH SUM \
                      PULL QUEUE COPYH2D COORDINATE_BROADCAST BROADCAST DONE";
const SUMMED_HERE: &str = "READY COORDINATE_REDUCE REDUCE QUEUE COPYD2H PCIE_REDUCE QUEUE COPYH2D \
                           COORDINATE_BROADCAST BROADCAST DONE";
const CROSSED: &str = "READY COORDINATE_REDUCE REDUCE QUEUE COPYD2H PCIE_REDUCE SUM PULL QUEUE \
                       COPYH2D COORDINATE_BROADCAST BROADCAST DONE";
const OF_ANOTHER: &str = "READY COORDINATE_REDUCE REDUCE SUM BROADCAST DONE";
const LOCAL: &str = "READY COORDINATE_REDUCE REDUCE DONE";

#[test]
fn a_timeline_has_the_stages_of_every_part_on_the_gpu() {
    let switches = [("BYTEPS_PCIE_SWITCH_SIZE", "2")];
    for scenario in ["loop 6", "record"] {
        timelines(scenario, &[1, 1], 1, &[ALONE], &[]);
        timelines(scenario, &[2, 2], 1, &[SHARED, OF_ANOTHER], &[]);
        timelines(scenario, &[2], 0, &[LOCAL], &[]);
        timelines(scenario, &[4, 4], 1, &[ACROSS, CROSSED, OF_ANOTHER], &switches);
        timelines(scenario, &[4], 0, &[SUMMED_HERE, CROSSED, OF_ANOTHER], &switches);
    }
}

fn timelines(
    scenario: &str,
    hosts: &[u32],
    servers: u32,
    expected: &[&str],
    more: &[(&'static str, &str)],
) {
    let folder = std::env::temp_dir().join(format!("bps-gpu-timeline-{}", std::process::id()));
    let path = folder.display().to_string();
    let settings = [
        ("BYTEPS_TRACE_ON", if scenario == "record" { "0" } else { "1" }),
        ("BYTEPS_TRACE_DIR", &*path),
        ("BYTEPS_TRACE_START_STEP", "2"),
        ("BYTEPS_TRACE_END_STEP", "4"),
        ("BYTEPS_PARTITION_BYTES", "65536"),
    ];
    let settings = [&settings, more].concat();
    let mut job = start_all(&Shape { hosts, servers, settings: &settings }, scenario);
    for rank in &mut job.ranks {
        assert!(rank.wait(LIMIT).success(), "{}", rank.lines().join("\n"));
    }
    for rank in 0..hosts.iter().sum() {
        let trace = Trace::read(&folder, &rank.to_string());
        trace.assert_whole_and_apart();
        assert_eq!(trace.whole["metadata"]["dropped"], 0);
        let has = |round: &u64| trace.slices.iter().any(|slice| slice.round == *round);
        assert_eq!((0..9).filter(has).collect::<Vec<u64>>(), [2, 3, 4]);
        for round in 2..=4 {
            assert_eq!(trace.named("Comm.layer4.weight").len(), 3, "one for each round");
            let parts = trace.stages("layer4.weight", round);
            let mut found = vec![0; expected.len()];
            for part in &parts {
                let fits = |one: &&str| is_way(part, &gpu_job::words(one));
                let at = expected.iter().position(fits);
                found[at.unwrap_or_else(|| panic!("{hosts:?}, rank {rank}: {part:?}"))] += 1;
            }
            assert!(found.iter().all(|count| *count > 0), "{hosts:?}, rank {rank}: {parts:?}");
        }
    }
    let _ = std::fs::remove_dir_all(&folder);
}

/// Whether these are the stages of the way in its order, but for waits of no time.
fn is_way(stages: &[String], way: &[String]) -> bool {
    let mut left = stages.iter().peekable();
    // What another rank sends may be back before this rank's part in it is seen to be over.
    let is_elsewhere = |stage: &str| stage == "SUM" && !way.iter().any(|one| one == "PUSH");
    let fits = |stage: &String| {
        left.next_if_eq(&stage).is_some() || WAITS.contains(&&**stage) || is_elsewhere(stage)
    };
    way.iter().all(fits) && left.next().is_none()
}
