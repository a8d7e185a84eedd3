//! `bps-perf gloo`: push_pull of the Python package beside the all-reduce of torch.distributed's
//! gloo, in the same processes, in turn. `perf/beside_gloo.py` measures; this starts it and says
//! where.

#![forbid(unsafe_code)]

use crate::Outcome;
use crate::arguments::{self, flag, number, sizes};
use crate::launched::{self, Job};
use crate::report::Table;
use clap::{ArgMatches, Command};

/// The arguments.
pub fn command() -> Command {
    Command::new("gloo")
        .about(
            "Measures push_pull of the Python package beside gloo's all-reduce, on this machine.",
        )
        .arg(arguments::choice("transport", &["auto", "shm", "tcp"], "What lanes run over"))
        .args(launched::arguments())
        .arg(number("servers", "1", "Servers"))
        .arg(number("cores", "1", "Polling threads of each server"))
        .arg(number("rounds", "21", "Timed rounds of both, in turn"))
        .arg(sizes("size", "1M,16M,64M", "Bytes of each rank's tensor"))
        .arg(flag(
            "through-server",
            "The ranks do not reduce among themselves; over TCP they never do",
        ))
        .arg(arguments::json())
}

/// Starts the job and shows what it prints.
pub fn run(matches: &ArgMatches) -> Outcome {
    let get = |name: &str| arguments::integer(matches, name).to_string();
    let job = Job::new(matches, "perf/beside_gloo.py")?;
    let transport = arguments::text(matches, "transport");
    let (servers, cores) = (get("servers"), get("cores"));
    let title = format!(
        "{} ranks, {servers} servers × {cores} cores, {transport}, on {} CPUs in all, beside gloo",
        get("workers"),
        job.cpus,
    );
    let columns =
        ["size_bytes", "algbw_gbs", "ms_p50", "ms_p99", "peer_algbw_gbs", "peer_ms_p50", "ratio"];
    let table = Table::new(matches, "gloo", &title, &columns);
    let mut words = vec!["--rounds".to_owned(), get("rounds")];
    words.extend(arguments::bytes(matches, "size").iter().map(usize::to_string));
    let through_server = matches.get_flag("through-server") || transport == "tcp";
    let reduce = if through_server { "0" } else { "1" };
    let variables = [("BPS_LOCAL_REDUCE", reduce), ("BPS_TRANSPORT", transport)];
    let launcher = ["--servers", &servers, "--server-cores", &cores];
    let results = job.results(&launcher, &variables, &words)?;
    table.head();
    for mut fields in results {
        fields.insert("transport".to_owned(), transport.into());
        fields.insert("cpus".to_owned(), job.cpus.into());
        fields.insert("through_server".to_owned(), through_server.into());
        table.row(fields);
    }
    Ok(())
}
