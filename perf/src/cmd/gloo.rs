//! `bps-perf gloo`: push_pull of the Python package beside the all-reduce of torch.distributed's
//! gloo, in the same processes, in turn. `perf/beside_gloo.py` measures; this starts it and says
//! where.
//!
//! Invariant: all processes of the job run on the same few CPUs, which they inherit from here.

use crate::arguments::{self, number, sizes};
use crate::report::{self, Table};
use crate::{Outcome, sample};
use bps_engine::topo::pin::affinity;
use clap::{Arg, ArgAction, ArgMatches, Command};
use rustix::thread::{CpuSet, sched_setaffinity};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command as Process, Stdio};

/// The arguments.
pub fn command() -> Command {
    Command::new("gloo")
        .about(
            "Measures push_pull of the Python package beside gloo's all-reduce, on this machine.",
        )
        .arg(arguments::choice("transport", &["auto", "shm", "tcp"], "What lanes run over"))
        .arg(number("workers", "2", "Ranks"))
        .arg(number("servers", "1", "Servers"))
        .arg(number("cores", "1", "Polling threads of each server"))
        .arg(number("cpus", "2", "CPUs that all processes share, at most"))
        .arg(number("rounds", "21", "Timed rounds of both, in turn"))
        .arg(sizes("size", "1M,16M,64M", "Bytes of each rank's tensor"))
        .arg(
            Arg::new("through-server")
                .long("through-server")
                .help("The ranks do not reduce among themselves; over TCP they never do")
                .action(ArgAction::SetTrue),
        )
        .arg(
            Arg::new("environment")
                .long("environment")
                .value_name("PATH")
                .help("Virtual environment with this package and torch")
                .default_value(".venv"),
        )
        .arg(arguments::json())
}

/// Starts the job and shows what it prints.
pub fn run(matches: &ArgMatches) -> Outcome {
    let get = |name: &str| arguments::integer(matches, name).to_string();
    let folder = PathBuf::from(arguments::text(matches, "environment")).join("bin");
    let (launcher, python) = (folder.join("bpslaunch"), folder.join("python"));
    let script = Path::new("perf/beside_gloo.py");
    for path in [&launcher, &python] {
        if !path.exists() {
            let message = format!(
                "skipped: {} is not there: run python/environment in the repository's root, and \
                 this command from there",
                path.display()
            );
            return Err(message.into());
        }
    }
    if !script.exists() {
        return Err("perf/beside_gloo.py is not below here: run this in the repository".into());
    }
    let cpus = share_cpus(arguments::integer(matches, "cpus") as usize)?;
    let transport = arguments::text(matches, "transport");
    let title = format!(
        "{} ranks, {} servers × {} cores, {transport}, on {cpus} CPUs in all, beside gloo",
        get("workers"),
        get("servers"),
        get("cores"),
    );
    let columns =
        ["size_bytes", "algbw_gbs", "ms_p50", "ms_p99", "peer_algbw_gbs", "peer_ms_p50", "ratio"];
    let table = Table::new(matches, "gloo", &title, &columns);
    let mut job = Process::new(launcher);
    job.args(["--local", &get("workers"), "--servers", &get("servers")]);
    job.args(["--server-cores", &get("cores")]).arg(python).arg(script).arg("--json");
    job.args(["--rounds", &get("rounds")]);
    job.args(arguments::bytes(matches, "size").iter().map(usize::to_string));
    let through_server = matches.get_flag("through-server") || transport == "tcp";
    job.env("BPS_LOCAL_REDUCE", if through_server { "0" } else { "1" });
    let output = job.env("BPS_TRANSPORT", transport).stdin(Stdio::null()).output()?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("the job failed ({}): {said}", output.status).into());
    }
    table.head();
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        // The launcher marks lines with the rank that printed them.
        let Some(start) = line.find('{') else { continue };
        let object: Value = serde_json::from_str(&line[start..])?;
        let mut fields = report::fields(object);
        fields.insert("transport".to_owned(), transport.into());
        fields.insert("cpus".to_owned(), cpus.into());
        fields.insert("through_server".to_owned(), through_server.into());
        table.row(fields);
    }
    Ok(())
}

/// Gives this process and its children the first CPUs of those that it may use.
fn share_cpus(most: usize) -> Result<usize, Box<dyn std::error::Error>> {
    let allowed = affinity()?;
    let mut set = CpuSet::new();
    let count = most.min(allowed.len()).min(sample::cpus());
    allowed.iter().take(count).for_each(|&cpu| set.set(cpu));
    sched_setaffinity(None, &set)?;
    Ok(count)
}
