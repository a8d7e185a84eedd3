//! `bps-perf`: measures each layer beside its peers and beside the machine.
//!
//! Invariant: a command prints what it measured and where (host, kernel, cores, commit), next to
//! the peer that it was measured against in the same run, and nothing that it did not measure.

use clap::{ArgMatches, Command};
use std::process::ExitCode;

mod arguments;
mod bare;
mod cmd;
mod launched;
mod pair;
mod place;
mod probe;
mod report;
mod sample;
mod scenario;
mod script;
mod stage;
mod watch;

/// Why a command could not measure, in words for the user.
type Outcome = Result<(), Box<dyn std::error::Error>>;

/// Each command: its arguments, and what runs it.
type Entry = (fn() -> Command, fn(&ArgMatches) -> Outcome);
const COMMANDS: &[Entry] = &[
    (cmd::ab::command, cmd::ab::run),
    (cmd::cluster::command, cmd::cluster::run),
    (cmd::codecs::command, cmd::codecs::run),
    (cmd::gloo::command, cmd::gloo::run),
    (cmd::gpu::command, cmd::gpu::run),
    (cmd::hooks::command, cmd::hooks::run),
    (cmd::idle::command, cmd::idle::run),
    (cmd::jax::command, cmd::jax::run),
    (cmd::lane::command, cmd::lane::run),
    (cmd::latency::command, cmd::latency::run),
    (cmd::probe::command, cmd::probe::run),
    (cmd::priority::command, cmd::priority::run),
    (cmd::pushpull::command, cmd::pushpull::run),
    (cmd::rings::command, cmd::rings::run),
    (cmd::run::command, cmd::run::run),
    (cmd::scaling::command, cmd::scaling::run),
    (cmd::seal::command, cmd::seal::run),
    (cmd::step::command, cmd::step::run),
    (cmd::sum::command, cmd::sum::run),
    (cmd::tensorflow::command, cmd::tensorflow::run),
    (cmd::tune::command, cmd::tune::run),
    (stage::within_command, stage::enter),
    (stage::overtake::command, stage::overtake::run),
    (stage::rank::command, stage::rank::run),
    (stage::stream::command, stage::stream::run),
];

fn main() -> ExitCode {
    let program = Command::new("bps-perf")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Measures each layer of the engine beside its peers and beside the machine.")
        .after_help("Measure a release build: cargo run --release -p bps-perf -- COMMAND")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommands(COMMANDS.iter().map(|(command, _)| command()));
    let matches = program.get_matches();
    let chosen = matches.subcommand().and_then(|(name, matches)| {
        let entry = COMMANDS.iter().find(|(command, _)| command().get_name() == name);
        entry.map(|(_, run)| run(matches))
    });
    match chosen.expect("the parser accepts only commands of the table") {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bps-perf: {error}");
            ExitCode::FAILURE
        }
    }
}
