//! `bps-perf hooks`: what this package adds to a step of many tiny parameters, beside
//! DistributedDataParallel and a step without communication, in the same processes, in turn.
//! `perf/hooks.py` measures; this starts it and says where.

#![forbid(unsafe_code)]

use crate::Outcome;
use crate::arguments::{self, number, sizes};
use crate::launched::{self, Job};
use crate::report::Table;
use clap::{ArgMatches, Command};

/// The arguments.
pub fn command() -> Command {
    Command::new("hooks")
        .about(
            "Measures what the Python package adds to passes over many tiny parameters, beside \
             DistributedDataParallel, on this machine.",
        )
        .args(launched::arguments())
        .arg(number("layers", "80", "LayerNorms, of two parameters each"))
        .arg(sizes("size", "4K", "Bytes of a parameter"))
        .arg(number("rounds", "31", "Timed rounds of all ways, in turn"))
        .arg(number("steps", "4", "Timed steps of a way in a round"))
        .arg(arguments::json())
}

/// Starts the job for each size and shows what it prints.
pub fn run(matches: &ArgMatches) -> Outcome {
    let job = Job::new(matches, "perf/hooks.py")?;
    let workers = arguments::integer(matches, "workers");
    let title = format!(
        "{workers} ranks of one host, without servers, on {} CPUs in all, beside \
         DistributedDataParallel",
        job.cpus
    );
    let columns = [
        "work",
        "way",
        "parameters",
        "size_bytes",
        "ms_p50",
        "ms_p99",
        "us_per_parameter",
        "gc_ms",
        "peer_ms_p50",
        "ratio",
    ];
    let table = Table::new(matches, "hooks", &title, &columns);
    table.head();
    for size in arguments::bytes(matches, "size") {
        let mut words = vec!["--size".to_owned(), size.to_string()];
        for name in ["layers", "rounds", "steps"] {
            words.extend([format!("--{name}"), arguments::integer(matches, name).to_string()]);
        }
        for mut fields in job.results(&["--servers", "0"], &[], &words)? {
            fields.insert("cpus".to_owned(), job.cpus.into());
            table.row(fields);
        }
    }
    Ok(())
}
