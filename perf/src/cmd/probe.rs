//! `bps-perf probe`: runs one of the experiments of `perf/src/probe`, or all.

#![forbid(unsafe_code)]

use crate::Outcome;
use crate::arguments::{self, number};
use crate::probe::{Effort, PROBES, Probe};
use crate::report::Table;
use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgMatches, Command};
use std::io::ErrorKind;

/// The arguments.
pub fn command() -> Command {
    let names = PROBES.iter().map(|probe| probe.name).chain(["all"]);
    let line = |probe: &&Probe| format!("  {:<11} {}", probe.name, probe.asks);
    let asks: Vec<String> = PROBES.iter().map(line).collect();
    Command::new("probe")
        .about("Tries what the kernel and the processor offer: one small experiment each.")
        .after_help(format!("Probes, and what each asks:\n{}", asks.join("\n")))
        .arg(Arg::new("name").required(true).value_parser(PossibleValuesParser::new(names)))
        .arg(number("megabytes", "500", "Bytes that a sample moves, in millions"))
        .arg(number("rounds", "7", "Samples of each variant, in turn"))
        .arg(arguments::json())
}

/// Runs it.
pub fn run(matches: &ArgMatches) -> Outcome {
    let name = matches.get_one::<String>("name").expect("it is required");
    let effort = Effort {
        bytes: arguments::integer(matches, "megabytes") as usize * 1_000_000,
        rounds: arguments::integer(matches, "rounds") as usize,
    };
    for probe in PROBES.iter().filter(|probe| name == "all" || probe.name == name) {
        let title = format!("{}: {}, {} rounds", probe.name, probe.asks, effort.rounds);
        let table = Table::new(matches, "probe", &title, probe.columns);
        let rows = match (probe.measure)(effort) {
            // This machine lacks what it is about: the others go on.
            Err(error) if name == "all" && error.kind() == ErrorKind::Unsupported => {
                eprintln!("{}: {error}", probe.name);
                continue;
            }
            rows => rows.map_err(|error| format!("{}: {error}", probe.name))?,
        };
        table.head();
        for mut fields in rows {
            fields.insert("probe".to_owned(), probe.name.into());
            fields.insert("rounds".to_owned(), effort.rounds.into());
            table.row(fields);
        }
    }
    Ok(())
}
