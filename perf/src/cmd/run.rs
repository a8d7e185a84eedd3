//! `bps-perf run`: runs scenarios and says which of their targets are met.
//!
//! Invariant: every command runs in a process of its own, as by hand; what it printed is what is
//! judged, and what could not run is named and counts as not met.

use crate::arguments::{self, flag};
use crate::report::shown;
use crate::scenario::{self, Scenario};
use crate::{Outcome, place};
use clap::{Arg, ArgMatches, Command};
use serde_json::{Value, json};
use std::process::{Command as Process, Stdio};

/// What stands for the value of a field that a result does not have.
const MISSING: &str = "(no field)";

/// The arguments.
pub fn command() -> Command {
    Command::new("run")
        .about("Runs scenarios of perf/scenarios; fails if a target is missed.")
        .arg(Arg::new("scenario").help("Its name, or `all`").required(true))
        .arg(flag("smoke", "Run tiny versions, to see that they work: targets are only shown"))
        .arg(
            Arg::new("keep")
                .long("keep")
                .value_name("FILE")
                .help("Append every result to this file, one JSON object a line"),
        )
        .arg(arguments::json())
}

/// Runs what was asked for.
pub fn run(matches: &ArgMatches) -> Outcome {
    let wanted = matches.get_one::<String>("scenario").expect("it is required");
    let (is_smoke, is_json) = (matches.get_flag("smoke"), matches.get_flag("json"));
    let mut scenarios = scenario::all()?;
    let names: Vec<String> = scenarios.iter().map(|one| one.name.clone()).collect();
    scenarios.retain(|one| wanted == "all" || one.name == *wanted);
    if scenarios.is_empty() {
        return Err(format!("no scenario `{wanted}`; there are all, {}", names.join(", ")).into());
    }
    if !is_json {
        println!("{}", place::line(&place::describe()));
    }
    let mut missed = Vec::new();
    for scenario in &scenarios {
        if !is_json {
            println!("\n{}: {}", scenario.name, scenario.shows);
        }
        let (results, failures) = results(scenario, is_smoke, is_json);
        if let Some(path) = matches.get_one::<String>("keep") {
            keep(path, &scenario.name, &results)?;
        }
        for failure in &failures {
            missed.push(format!("{}: {failure}", scenario.name));
        }
        for target in &scenario.targets {
            // Tiny versions may have no result of the size that a target means.
            let verdicts = target.judge(&results).into_iter();
            for verdict in verdicts.filter(|one| !(is_smoke && one.of.is_empty())) {
                let of = if verdict.of.is_empty() { "no result fits" } else { &verdict.of };
                let value = verdict.value.map_or(MISSING.to_owned(), |one| shown(&one.into()));
                let (field, wish) = (&target.field, target.wish());
                if is_json {
                    let line = json!({
                        "command": "run", "scenario": scenario.name, "of": of,
                        "field": field, "value": verdict.value, "target": wish, "met": verdict.met,
                        "smoke": is_smoke,
                    });
                    println!("{line}");
                } else {
                    let word = if verdict.met { "met" } else { "MISSED" };
                    println!("  {field:<22} {value:>10}  {wish:<8} {word:<7} {of}");
                }
                if !verdict.met && !is_smoke {
                    missed.push(format!("{}: {field} of {of}", scenario.name));
                }
            }
        }
    }
    if missed.is_empty() {
        return Ok(());
    }
    Err(format!("{} missed or failed:\n  {}", missed.len(), missed.join("\n  ")).into())
}

/// What the commands of a scenario printed, and those that failed.
fn results(scenario: &Scenario, is_smoke: bool, is_json: bool) -> (Vec<Value>, Vec<String>) {
    let (mut results, mut failures) = (Vec::new(), Vec::new());
    let commands = if is_smoke { &scenario.smoke } else { &scenario.commands };
    for arguments in commands {
        if !is_json {
            println!("$ bps-perf {}", arguments.join(" "));
        }
        match start(arguments) {
            Ok(lines) => results.extend(lines.into_iter().map(|mut result| {
                result["arguments"] = arguments.join(" ").into();
                result
            })),
            Err(error) if is_smoke && error.contains("skipped: ") => {
                // In a smoke run, a machine that lacks what a scenario needs is no failure.
                println!("{error}");
            }
            Err(error) => failures.push(format!("bps-perf {}: {error}", arguments.join(" "))),
        }
    }
    (results, failures)
}

/// Runs this program again, and returns the results that it printed.
pub fn start(arguments: &[String]) -> Result<Vec<Value>, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    start_at(&program, arguments)
}

/// Runs a `bps-perf`, and returns the results that it printed.
pub fn start_at(program: &std::path::Path, arguments: &[String]) -> Result<Vec<Value>, String> {
    let mut process = Process::new(program);
    process.args(arguments).arg("--json").stdin(Stdio::null());
    let output = process.output().map_err(|error| format!("{}: {error}", program.display()))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{}: {}", output.status, said.trim()));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let parse = |line: &str| serde_json::from_str(line).map_err(|error| format!("{error}: {line}"));
    text.lines().map(parse).collect()
}

fn keep(path: &str, scenario: &str, results: &[Value]) -> Result<(), Box<dyn std::error::Error>> {
    use std::io::Write;
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path)?;
    for result in results {
        let mut result = result.clone();
        result["scenario"] = scenario.into();
        writeln!(file, "{result}")?;
    }
    Ok(())
}
