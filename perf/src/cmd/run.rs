//! `bps-perf run`: runs scenarios and says which of their targets are met.
//!
//! Invariant: every command runs in a process of its own, as by hand; what it printed is what is
//! judged, and what could not run is named and counts as not met.

#![forbid(unsafe_code)]

use crate::arguments::{self, flag};
use crate::report::shown;
use crate::scenario::{self, Scenario};
use crate::{Outcome, place};
use clap::{Arg, ArgMatches, Command};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
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
        let mut file = matches.get_one::<String>("keep").map(open).transpose()?;
        let (results, failures) = results(scenario, is_smoke, is_json, file.as_mut());
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

/// What the commands of a scenario printed, and those that failed. What is to be kept is kept as it
/// comes, so that a run which does not end leaves what it measured.
fn results(
    scenario: &Scenario,
    is_smoke: bool,
    is_json: bool,
    mut file: Option<&mut File>,
) -> (Vec<Value>, Vec<String>) {
    let (mut results, mut failures) = (Vec::new(), Vec::new());
    let commands = if is_smoke { &scenario.smoke } else { &scenario.commands };
    for arguments in commands {
        if !is_json {
            println!("$ bps-perf {}", arguments.join(" "));
        }
        let ended = each(&own_path(), arguments, &mut |mut result| {
            result["arguments"] = arguments.join(" ").into();
            if let Some(file) = &mut file {
                result["scenario"] = scenario.name.as_str().into();
                writeln!(file, "{result}").map_err(|error| format!("--keep: {error}"))?;
            }
            results.push(result);
            Ok(())
        });
        match ended {
            Ok(()) => {}
            Err(error) if is_smoke && error.contains("skipped: ") => {
                // In a smoke run, a machine that lacks what a scenario needs is no failure.
                println!("{error}");
            }
            Err(error) => failures.push(format!("bps-perf {}: {error}", arguments.join(" "))),
        }
    }
    (results, failures)
}

fn open(path: &String) -> Result<File, String> {
    let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
    file.map_err(|error| format!("{path}: {error}"))
}

/// This program.
fn own_path() -> PathBuf {
    std::env::current_exe().unwrap_or_else(|_| "/proc/self/exe".into())
}

/// Runs a `bps-perf`, and returns the results that it printed.
pub fn start_at(program: &Path, arguments: &[String]) -> Result<Vec<Value>, String> {
    let mut results = Vec::new();
    each(program, arguments, &mut |result| {
        results.push(result);
        Ok(())
    })?;
    Ok(results)
}

/// Runs a `bps-perf`, and takes each result that it prints, as soon as it does.
fn each(
    program: &Path,
    arguments: &[String],
    take: &mut dyn FnMut(Value) -> Result<(), String>,
) -> Result<(), String> {
    let mut process = Process::new(program);
    process.args(arguments).arg("--json").stdin(Stdio::null());
    process.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = process.spawn().map_err(|error| format!("{}: {error}", program.display()))?;
    let (output, mut errors) =
        (child.stdout.take().expect("piped"), child.stderr.take().expect("piped"));
    let listener = std::thread::spawn(move || {
        let mut said = Vec::new();
        // What was said until the pipe broke is all there is.
        let _ = errors.read_to_end(&mut said);
        String::from_utf8_lossy(&said).trim().to_string()
    });
    let mut outcome = Ok(());
    for line in BufReader::new(output).lines().map_while(Result::ok) {
        let parsed = serde_json::from_str(&line).map_err(|error| format!("{error}: {line}"));
        outcome = outcome.and(parsed.and_then(&mut *take));
    }
    let status = child.wait().map_err(|error| error.to_string())?;
    let said = listener.join().expect("no panic in reading");
    if !status.success() {
        return Err(format!("{status}: {said}"));
    }
    outcome
}
