//! `bps-perf jax`: push_pull in compiled JAX programs beside JAX's own collectives on CPUs, in the
//! same processes, in turn. `perf/beside_jax.py` measures; this starts it and says where.

#![forbid(unsafe_code)]

use crate::Outcome;
use crate::arguments::{self, number, sizes};
use crate::launched::{self, Job};
use crate::report::Table;
use clap::{ArgMatches, Command};

/// The arguments.
pub fn command() -> Command {
    Command::new("jax")
        .about(
            "Measures sums of many arrays in a compiled JAX program beside JAX's own collectives \
             (gloo), on this machine.",
        )
        .args(launched::arguments())
        .arg(number("arrays", "200", "Arrays that are summed together"))
        .arg(sizes("size", "64K", "Bytes of an array"))
        .arg(number("rounds", "31", "Timed rounds of both, in turn"))
        .arg(arguments::json())
}

/// Starts the job for each size and shows what it prints.
pub fn run(matches: &ArgMatches) -> Outcome {
    let job = Job::new(matches, "perf/beside_jax.py")?;
    if !job.has_module("jax")? {
        return Err("skipped: the environment has no jax: python -m pip install 'jax[cpu]'".into());
    }
    let workers = arguments::integer(matches, "workers");
    let title = format!(
        "{workers} ranks of one host, without servers, on {} CPUs in all, beside JAX's gloo",
        job.cpus
    );
    let columns = ["arrays", "size_bytes", "ms_p50", "peer_ms_p50", "ratio"];
    let table = Table::new(matches, "jax", &title, &columns);
    table.head();
    for size in arguments::bytes(matches, "size") {
        let mut words = vec!["--size".to_owned(), size.to_string()];
        for name in ["arrays", "rounds"] {
            words.extend([format!("--{name}"), arguments::integer(matches, name).to_string()]);
        }
        for mut fields in job.results(&["--servers", "0"], &[], &words)? {
            fields.insert("cpus".to_owned(), job.cpus.into());
            table.row(fields);
        }
    }
    Ok(())
}
