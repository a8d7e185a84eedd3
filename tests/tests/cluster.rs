//! Jobs between staged hosts with shaped links, by the measuring tool itself: small, so that the
//! tool is known to work where somebody wants figures.

use bps_tests::program;
use serde_json::Value;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Two workers and a server, of one megabyte a round.
const SMALL: [&str; 11] = [
    "--workers",
    "2",
    "--servers",
    "1",
    "--rate",
    "100mbit",
    "--size",
    "1M",
    "--rounds",
    "3",
    "--json",
];

/// The tool's JSON, or `None` (with the reason printed) where hosts can't be staged.
fn measured(output: &Output) -> Option<Value> {
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {text}{errors}", output.status);
    if text.starts_with("skipped:") {
        eprint!("{text}");
        return None;
    }
    Some(serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text}{errors}")))
}

#[test]
fn a_small_cluster_is_staged_and_measured() {
    let output = Command::new(program::path("bps-perf")).arg("cluster").args(SMALL).output();
    let Some(report) = measured(&output.expect("started")) else { return };
    let field = |name: &str| {
        report[name].as_f64().unwrap_or_else(|| panic!("no number {name} in {report}"))
    };
    // 100 Mbit/s are 0.0125 GB/s, of which headers take about a twentieth. A bucket of tokens that
    // was full lets a little more through.
    let line = field("line_gbs");
    assert!((0.006..0.0135).contains(&line), "the link is not shaped: {report}");
    // The server's link carries both workers' bytes, so half the line is all that can be had.
    let (algbw, optimum) = (field("algbw_gbs"), field("fraction_of_optimum"));
    assert!(algbw > 0.0 && algbw < 0.6 * line, "faster than the server's link: {report}");
    assert!((optimum - 2.0 * algbw / line).abs() < 1e-9, "the optimum is twice the line: {report}");
    assert!(field("ms_p50") <= field("ms_p99"), "{report}");
}

#[test]
fn nothing_of_a_stage_outlives_the_tool() {
    let mut tool = Command::new(program::path("bps-perf"))
        .args(["cluster", "--workers", "2", "--servers", "1", "--rounds", "1000", "--size", "1M"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("started");
    let list = format!("/proc/{0}/task/{0}/children", tool.id());
    let children = || -> Vec<String> {
        let text = std::fs::read_to_string(&list).unwrap_or_default();
        text.split_whitespace().map(str::to_string).collect()
    };
    // A scheduler, a server, two ranks, and three bare streams.
    let deadline = Instant::now() + Duration::from_secs(60);
    while children().len() < 7 {
        if let Some(status) = tool.try_wait().expect("a child of ours") {
            let output = tool.wait_with_output().expect("it has ended");
            assert!(status.success(), "the tool ended early: {status}");
            assert!(measured(&output).is_none(), "it measured 1,000 rounds in no time");
            return;
        }
        assert!(Instant::now() < deadline, "only {:?} were started", children());
        std::thread::sleep(Duration::from_millis(20));
    }
    let started = children();
    tool.kill().expect("it runs");
    tool.wait().expect("a child of ours");
    let deadline = Instant::now() + Duration::from_secs(10);
    let alive = || started.iter().filter(|pid| runs(pid)).collect::<Vec<_>>();
    while !alive().is_empty() {
        assert!(Instant::now() < deadline, "{:?} outlived the tool", alive());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Whether a process is there and not just waiting to be reaped.
fn runs(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().next());
    state.is_some_and(|state| state != "Z" && state != "X")
}
