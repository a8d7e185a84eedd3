//! The settings that say how the GPUs of a host reduce among themselves, each over several shapes
//! of jobs: every result against the reference, bit for bit, and jobs that end badly. The GPUs are
//! none (`tests/fake_gpu`).

use bps_fake_gpu as _;
use bps_tests::gpu_job::{
    LIMIT, PROMISE, SLACK, Shape, right, running, start, start_all, start_but, words,
};
use rustix::process::Signal;
use std::path::Path;
use std::time::Instant;

#[test]
fn communicators_have_the_rings_that_are_asked_for() {
    // 1 is what BytePS's users write for its own way.
    for (rings, channels) in [("0", "0"), ("1", "0"), ("2", "2"), ("64", "64")] {
        let settings = [("BYTEPS_NCCL_NUM_RINGS", rings), ("FAKE_NCCL_CHANNELS", channels)];
        right(&[2], 0, "resume", &settings);
    }
    let shape = Shape { hosts: &[1, 2], servers: 1, settings: &[] };
    let mut job = start(&shape, |rank| {
        let own = [("BYTEPS_NCCL_NUM_RINGS", "4".to_owned())].into_iter();
        (words("loop 3"), own.filter(|_| rank == 2).collect())
    });
    let words = ["rank ended: Config", "rank 1 and rank 2 are on one host", "NUM_RINGS=0 and 4"];
    job.others_end_with(usize::MAX, &words, Instant::now(), LIMIT);
}

/// With these roots, on any shape, what the rows of all ranks would need is never called.
fn rooted(hosts: &[u32], servers: u32, scenario: &str, roots: &str, more: &[(&'static str, &str)]) {
    let never = ("FAKE_GPU_FAIL", "ncclReduceScatter,ncclAllGather");
    right(hosts, servers, scenario, &[&[("BYTEPS_REDUCE_ROOTS", roots), never], more].concat());
}

#[test]
fn roots_alone_speak_for_their_host() {
    rooted(&[2, 2], 1, "work 2 11", "0", &[]);
    rooted(&[2, 2], 2, "work 2 12", "0,1", &[("FAKE_GPU_SEED", "12")]);
    rooted(&[4, 4], 1, "work 2 13", "1,3", &[("BYTEPS_NCCL_GROUP_SIZE", "3")]);
    rooted(&[3], 1, "work 2 14", "2", &[("BYTEPS_FORCE_DISTRIBUTED", "1")]);
    // Without servers there is nobody to speak to.
    rooted(&[4], 0, "work 2 15", "0,2", &[]);
    let large = [("BYTEPS_PARTITION_BYTES", "1048576"), ("FAKE_GPU_PINNED", "1")];
    rooted(&[2, 2], 1, "large", "1", &large);
}

/// Whether a rank's timeline in this folder has a stage of the tensor.
fn has_stage(folder: &Path, rank: u32, stage: &str) -> bool {
    let file = folder.join(rank.to_string()).join("comm.json");
    let text = std::fs::read_to_string(&file).expect("a timeline of each rank");
    text.contains(&format!("Comm.layer4.weight.{stage}"))
}

#[test]
fn who_is_no_root_sends_nothing() {
    let folder = std::env::temp_dir().join(format!("bps-gpu-roots-{}", std::process::id()));
    let path = folder.display().to_string();
    let settings = [
        ("BYTEPS_TRACE_ON", "1"),
        ("BYTEPS_TRACE_DIR", &*path),
        ("BYTEPS_TRACE_START_STEP", "2"),
        ("BYTEPS_TRACE_END_STEP", "4"),
        ("BYTEPS_REDUCE_ROOTS", "0,2"),
    ];
    let shape = Shape { hosts: &[4, 4], servers: 1, settings: &settings };
    let mut job = start_all(&shape, "loop 6");
    for rank in &mut job.ranks {
        assert!(rank.wait(LIMIT).success(), "{}", rank.lines().join("\n"));
    }
    for rank in 0..8 {
        let is_root = rank % 2 == 0;
        for stage in ["COPYD2H", "PUSH", "PULL", "COPYH2D"] {
            assert_eq!(has_stage(&folder, rank, stage), is_root, "rank {rank}, {stage}");
        }
    }
    let _ = std::fs::remove_dir_all(&folder);
}

/// Whoever dies, or never pushes, is named by all others of a job of two hosts of two ranks.
fn the_lost_are_named(settings: &[(&'static str, &str)], servers: u32, hosts: &[u32]) {
    for victim in [0, 1] {
        let mut job = running(&Shape { hosts, servers, settings });
        let since = Instant::now();
        job.ranks[victim].signal(Signal::KILL);
        let who = format!("rank {victim} (host");
        job.others_end_with(victim, &["PeerDied", &who, "died"], since, PROMISE + SLACK);
    }
    let patience = [("BPS_STALL_REPORT", "1"), ("BPS_STALL_TIMEOUT", "3")];
    let settings = [settings, &patience].concat();
    let last = hosts.iter().sum::<u32>() - 1;
    let shape = Shape { hosts, servers, settings: &settings };
    let mut job = start_but(&shape, last, "loop 1000000 5", "loop 1000000");
    let _ = job.ranks[last as usize].wait_for_line("rank stalls", LIMIT);
    let who = format!("rank {last}");
    let words = ["rank ended: Stalled", "BPS_STALL_TIMEOUT", &who];
    job.others_end_with(usize::MAX, &words, Instant::now(), PROMISE + SLACK);
}

/// One rank with another value ends all ranks before they have begun.
fn all_hear_who_differs(shape: &Shape<'_>, variable: &'static str, value: &str, told: &[&str]) {
    let last = shape.hosts.iter().sum::<u32>() - 1;
    let mut job = start(shape, |rank| {
        let own = [(variable, value.to_owned())].into_iter();
        (words("loop 3"), own.filter(|_| rank == last).collect())
    });
    let words = [&["rank ended: Start", "set the same on every worker"], told].concat();
    job.others_end_with(usize::MAX, &words, Instant::now(), LIMIT);
}

#[test]
fn roots_or_others_that_are_lost_are_named() {
    the_lost_are_named(&[("BYTEPS_REDUCE_ROOTS", "1")], 1, &[2, 2]);
}

#[test]
fn ranks_with_other_roots_are_told_to_all() {
    let settings = [("BYTEPS_REDUCE_ROOTS", "0")];
    let shape = Shape { hosts: &[2, 2], servers: 1, settings: &settings };
    let told = ["BYTEPS_REDUCE_ROOTS=0", "BYTEPS_REDUCE_ROOTS=0,1"];
    all_hear_who_differs(&shape, "BYTEPS_REDUCE_ROOTS", "1,0", &told);
    // Tensors on which ranks disagree harm no others.
    let mut job = start_but(&shape, 3, "mismatch 1", "mismatch 0");
    for rank in &mut job.ranks {
        assert!(rank.wait(LIMIT).success(), "{}", rank.lines().join("\n"));
    }
}

/// With switches of this size.
fn switched(
    hosts: &[u32],
    servers: u32,
    scenario: &str,
    size: &str,
    more: &[(&'static str, &str)],
) {
    let settings = [&[("BYTEPS_PCIE_SWITCH_SIZE", size)], more].concat();
    right(hosts, servers, scenario, &settings);
}

#[test]
fn switches_of_one_host_are_summed_in_its_memory() {
    // One all-reduce would be wrong, and is never called.
    let never = ("FAKE_GPU_FAIL", "ncclAllReduce");
    switched(&[4], 0, "work 2 21", "2", &[never]);
    switched(&[2], 0, "work 2 22", "1", &[never, ("FAKE_GPU_SEED", "22")]);
    switched(&[6], 0, "work 2 23", "2", &[never, ("BPS_PAYLOAD_CHECKSUM", "1")]);
    // BytePS's default is eight.
    switched(&[4], 0, "work 2 24", "8", &[]);
}

#[test]
fn switches_of_several_hosts_are_summed_before_servers() {
    switched(&[2, 2], 1, "work 2 25", "1", &[]);
    switched(&[4, 4], 2, "work 2 26", "2", &[("FAKE_GPU_SEED", "26")]);
    switched(&[4, 4], 1, "work 2 27", "1", &[("BYTEPS_NCCL_GROUP_SIZE", "3")]);
    let forced = [("BYTEPS_FORCE_DISTRIBUTED", "1"), ("BPS_PAYLOAD_CHECKSUM", "1")];
    switched(&[6], 1, "work 2 28", "3", &forced);
    switched(&[2, 2], 1, "work 2 29", "2", &[]);
}

#[test]
fn switches_share_few_slots_without_waiting_for_each_other() {
    // Eight slots for hundreds of parts, whose priorities differ from rank to rank: without one
    // order in the host, each switch would hold all of its slots for what the other has not copied.
    let few = [("BYTEPS_PARTITION_BYTES", "2097152"), ("BYTEPS_NCCL_GROUP_SIZE", "1024")];
    switched(&[2], 0, "work 4 30", "1", &few);
    switched(&[4, 4], 1, "work 2 31", "2", &few);
    let large = [("BYTEPS_PARTITION_BYTES", "1048576"), ("FAKE_GPU_PINNED", "1")];
    switched(&[4], 0, "large", "2", &large);
    switched(&[2, 2], 1, "large", "1", &large);
}

#[test]
fn ranks_below_switches_that_are_lost_are_named() {
    let switches = [("BYTEPS_PCIE_SWITCH_SIZE", "1")];
    the_lost_are_named(&switches, 1, &[2, 2]);
    the_lost_are_named(&[("BYTEPS_PCIE_SWITCH_SIZE", "2")], 0, &[4]);
}

#[test]
fn ranks_with_other_switches_are_told_to_all() {
    let settings = [("BYTEPS_PCIE_SWITCH_SIZE", "1")];
    let shape = Shape { hosts: &[2, 2], servers: 1, settings: &settings };
    let told = ["BYTEPS_PCIE_SWITCH_SIZE=1", "BYTEPS_PCIE_SWITCH_SIZE=0"];
    all_hear_who_differs(&shape, "BYTEPS_PCIE_SWITCH_SIZE", "2", &told);
}

#[test]
fn switches_survive_tensors_on_which_ranks_disagree() {
    let small = [("BYTEPS_PARTITION_BYTES", "4096"), ("BYTEPS_NCCL_GROUP_SIZE", "3")];
    let settings = [&small[..], &[("BYTEPS_PCIE_SWITCH_SIZE", "1")]].concat();
    // Who disagrees is of another host; is the one that gives the order; is led by it.
    for (hosts, servers, odd) in [(&[2, 2][..], 1, 3), (&[2, 2], 1, 0), (&[3], 0, 2)] {
        let shape = Shape { hosts, servers, settings: &settings };
        for scenario in ["mismatch", "mismatches"] {
            // Each takes long where so many threads share few CPUs.
            let words = |is_odd: u32| format!("{scenario} {is_odd} 25");
            let mut job = start_but(&shape, odd, &words(1), &words(0));
            for rank in &mut job.ranks {
                assert!(rank.wait(LIMIT).success(), "{}", rank.lines().join("\n"));
            }
        }
    }
}
