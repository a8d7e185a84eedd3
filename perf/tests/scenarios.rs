//! Every scenario runs, in its tiny version: what it prints has the fields that its targets name.
//! Whether targets are met is for quiet machines to say, not for tests.

use std::path::Path;
use std::process::{Command, Stdio};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate is in the repository")
}

/// Runs the program in the repository's root. Returns whether it went well, and what it said.
fn perf(arguments: &[&str]) -> (bool, String) {
    let mut program = Command::new(env!("CARGO_BIN_EXE_bps-perf"));
    let output = program.args(arguments).current_dir(root()).stdin(Stdio::null()).output();
    let output = output.expect("the program was built for this test");
    let said =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    (output.status.success(), said.concat())
}

fn smoke(name: &str) {
    let (went_well, said) = perf(&["run", name, "--smoke"]);
    assert!(went_well, "{said}");
    match said.lines().find(|line| line.contains("skipped: ")) {
        Some(line) => println!("{line}"),
        // A target shows a value, met or not.
        None => assert!(!said.contains("(no field)"), "{said}"),
    }
}

/// The scenarios that a test below runs; a file without one is a scenario that nobody tried.
macro_rules! scenarios {
    ($($test:ident $name:literal,)+) => {
        $(#[test] fn $test() { smoke($name); })+
        const TRIED: &[&str] = &[$($name),+];
    };
}

scenarios! {
    adding "sum",
    encoding "codecs",
    lane_over_tcp "lane-tcp",
    lane_over_shared_memory "lane-shm",
    latency "latency",
    push_pull_over_shared_memory "pushpull-shm",
    push_pull_over_tcp "pushpull-tcp",
    encrypted_lanes "encryption",
    members_that_may_die "elastic",
    beside_gloo_over_shared_memory "gloo-shm",
    beside_gloo_over_tcp "gloo-tcp",
    many_small_tensors "small",
    nothing_to_do "idle",
    hosts_with_shaped_links "cluster",
    codecs_between_hosts "compression",
    hosts_with_servers_beside_workers "cluster-mixed",
    the_urgent_before_the_bulk "priority",
    more_cores "scaling",
    sizes_of_parts "partition",
    helpers_of_loops "helpers",
    settings_that_find_themselves "tune",
    what_the_machine_offers "probes",
    groups_of_torch_distributed "groups",
    hosts_with_gpus "gpu-cluster",
    hosts_with_gpus_and_half_the_bytes "gpu-bert",
    hosts_with_gpus_and_servers_beside "gpu-colocated",
    hosts_with_several_gpus "gpu-two-by-two",
    passes_over_tiny_parameters "hooks",
    programs_of_jax "jax",
    programs_of_tensorflow "tensorflow",
    one_host_with_gpus "gpu-one-host",
    programs_of_jax_between_hosts "gpu-jax",
    many_hosts_with_gpus "gpu-eight",
}

#[test]
fn every_scenario_is_tried() {
    let files = std::fs::read_dir(root().join("perf/scenarios")).expect("the folder");
    for file in files.flatten() {
        let path = file.path();
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        assert!(TRIED.contains(&name.as_str()), "perf/tests/scenarios.rs does not try {name}");
    }
}

#[test]
fn results_say_where_they_were_measured() {
    let (went_well, said) = perf(&["sum", "--size", "4K", "--rounds", "3", "--json"]);
    assert!(went_well, "{said}");
    let result: serde_json::Value = serde_json::from_str(&said).expect("one object");
    for name in ["host", "kernel", "processor", "cores", "commit"] {
        assert!(result["place"][name] != serde_json::Value::Null, "no {name}: {said}");
    }
    for name in ["gbps", "gbps_p99", "gbps_spread", "plain_gbps", "copy_gbps", "ratio_to_copy"] {
        assert!(result[name].is_f64(), "no {name}: {said}");
    }
}

/// A tiny run between hosts with CPUs in place of GPUs.
const GPU: &str = "gpu --device cpu --hosts 2 --servers 1 --cores 1 --batch 2 --sequences 1 --json";

/// Runs that with further arguments, or says why it can't be run here.
fn gpu(arguments: &str) -> Option<(bool, String)> {
    let all: Vec<&str> = GPU.split(' ').chain(arguments.split_whitespace()).collect();
    let (went_well, said) = perf(&all);
    if let Some(line) = said.lines().find(|line| line.starts_with("skipped: ")) {
        println!("{line}");
        return None;
    }
    Some((went_well, said))
}

#[test]
fn every_way_to_train_is_measured_beside_its_peer() {
    let found = gpu("--rate 400mbit,500mbit --size 64K --tuned TUNED=1 \
         --model bert-small --precision amp --losses small --loss-steps 3 --loss-runs 2 \
         --ways ddp,ours,cross,ddp-bf16,ours-bf16,cross-bf16 --rounds 2 --steps 2");
    let Some((went_well, said)) = found else { return };
    assert!(went_well, "{said}");
    let parsed = said.lines().filter_map(|line| serde_json::from_str(line).ok());
    let results: Vec<serde_json::Value> = parsed.collect();
    let check = |work: &str, count: usize, fields: &[&str]| {
        let of_work: Vec<_> = results.iter().filter(|result| result["work"] == work).collect();
        assert_eq!(of_work.len(), count, "{work}: {said}");
        for (result, field) in of_work.iter().flat_map(|one| fields.iter().map(move |f| (one, f))) {
            let is_peer = result["way"].as_str().is_some_and(|way| way.starts_with("ddp"));
            let is_there = result[field].is_f64() || is_peer && *field == "ratio";
            assert!(is_there, "no {field} of {work}: {result}");
        }
    };
    // For each of two rates.
    check("sum", 2, &["algbw_gbs", "peer_algbw_gbs", "tuned_algbw_gbs", "ratio", "line_gbs"]);
    check("bert-small", 2 * 6, &["ms_p50", "forward_ms", "alone_ms", "bound_ms", "ratio"]);
    check("losses of small", 4, &["first_loss", "last_loss", "difference", "noise"]);
}

#[test]
fn a_rank_that_fails_ends_the_run_and_is_named() {
    let begun = std::time::Instant::now();
    let found = gpu("--rate 500mbit --size 64K --rounds 1 --set BPS_TRANSPORT=nonsense");
    let Some((went_well, said)) = found else { return };
    assert!(!went_well && said.contains("rank ") && said.contains("ended"), "{said}");
    assert!(said.contains("nonsense"), "its own words are missing: {said}");
    assert!(begun.elapsed().as_secs() < 60, "it was waited for until {:?}", begun.elapsed());
}

#[test]
fn what_does_not_exist_is_named() {
    let (went_well, said) = perf(&["run", "no-such-scenario"]);
    assert!(!went_well && said.contains("no scenario `no-such-scenario`"), "{said}");
    let (went_well, said) = perf(&["ab", "no-such-revision", "--scenario", "sum"]);
    assert!(!went_well && said.contains("unknown revision `no-such-revision`"), "{said}");
}
