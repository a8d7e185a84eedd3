//! `bps-perf ab REV`: another revision and this build, run in turn on the same machine.
//!
//! Invariant: the other revision is built in a worktree and a target folder of its own below
//! `target/ab`, which stay for the next time; what is compared is what both print for one scenario,
//! and a ratio comes with how sure it is.

#![forbid(unsafe_code)]

use crate::Outcome;
use crate::arguments::{self, number};
use crate::cmd::run;
use crate::report::{self, Table};
use crate::sample::Series;
use crate::scenario::{self, Scenario};
use clap::{Arg, ArgMatches, Command};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command as Process, Stdio};

/// Draws of the bootstrap.
const DRAWS: usize = 2000;

/// Runs of each below which nothing is said: a few may differ by chance in the same way.
const ROUNDS_MIN: u32 = 6;

/// Fields that are compared, and whether more is better.
const COMPARED: [(&str, bool); 6] = [
    ("gbps", true),
    ("algbw_gbs", true),
    ("server_gbs", true),
    ("p50_us", false),
    ("cpu_s_per_gb", false),
    ("round_trip_us", false),
];

/// The arguments.
pub fn command() -> Command {
    Command::new("ab")
        .about("Compares another revision with this build: ratio of medians, with its confidence.")
        .arg(Arg::new("revision").help("A commit, tag or branch").required(true))
        .arg(
            Arg::new("scenario")
                .long("scenario")
                .help("Which of perf/scenarios")
                .default_value("pushpull-shm"),
        )
        .arg(number("rounds", "10", "Runs of each of the two, in turn"))
        .arg(arguments::flag("smoke", "Run the scenario's tiny version"))
        .arg(arguments::json())
}

/// Builds, runs in turn, and compares.
pub fn run(matches: &ArgMatches) -> Outcome {
    let revision = matches.get_one::<String>("revision").expect("it is required");
    let name = arguments::text(matches, "scenario");
    let scenarios = scenario::all()?;
    let scenario = scenarios.iter().find(|one| one.name == name);
    let scenario = scenario.ok_or_else(|| format!("no scenario `{name}` in perf/scenarios"))?;
    let commit = resolve(revision)?;
    let here = std::env::current_exe()?;
    let there = build(&commit)?;
    let rounds = integer(matches);
    let columns = ["field", "a", "b", "ratio", "low", "high", "verdict", "of"];
    let title = format!(
        "{name}: a is {commit:.12}, b is this build, {rounds} runs of each in turn; ratio is how \
         many times as good b is, with the range that holds it with 95 % confidence"
    );
    let mut table = Table::new(matches, "ab", &title, &columns);
    if !git(&["status", "--porcelain"])?.is_empty() {
        table.note("the working tree has changes: b may be no commit".into());
    }
    let is_smoke = matches.get_flag("smoke");
    let (mut theirs, mut ours) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        let (first, second) = if round % 2 == 0 { (&there, &here) } else { (&here, &there) };
        for program in [first, second] {
            let results = once(program, scenario, is_smoke)?;
            if program == &there { theirs.push(results) } else { ours.push(results) }
        }
    }
    table.head();
    for (index, result) in ours[0].iter().enumerate() {
        for (field, more_is_better) in COMPARED {
            let values = |runs: &[Vec<Value>]| -> Series {
                let value = |run: &Vec<Value>| run.get(index)?[field].as_f64();
                Series(runs.iter().filter_map(value).collect())
            };
            let (a, b) = (values(&theirs), values(&ours));
            if a.0.is_empty() || b.0.is_empty() {
                continue;
            }
            let good = |a: &Series, b: &Series| {
                let ratio = b.median() / a.median();
                if more_is_better { ratio } else { 1.0 / ratio }
            };
            let (low, high) = confidence(&a, &b, good);
            let verdict = match (low, high) {
                _ if rounds < ROUNDS_MIN => "too few runs",
                (low, _) if low > 1.0 => "better",
                (_, high) if high < 1.0 => "worse",
                _ => "no difference seen",
            };
            table.row(report::fields(json!({
                "scenario": name,
                "revision": commit,
                "of": scenario::label(result),
                "field": field,
                "a": a.median(),
                "b": b.median(),
                "a_spread": a.spread(),
                "b_spread": b.spread(),
                "rounds": rounds,
                "ratio": good(&a, &b),
                "low": low,
                "high": high,
                "verdict": verdict,
            })));
        }
    }
    Ok(())
}

fn integer(matches: &ArgMatches) -> u32 {
    arguments::integer(matches, "rounds")
}

fn once(program: &Path, scenario: &Scenario, is_smoke: bool) -> Result<Vec<Value>, String> {
    let commands = if is_smoke { &scenario.smoke } else { &scenario.commands };
    let mut results = Vec::new();
    for arguments in commands {
        let of = |error| format!("{} {}: {error}", program.display(), arguments.join(" "));
        results.extend(run::start_at(program, arguments).map_err(of)?);
    }
    Ok(results)
}

/// The range that holds 95 % of the ratios of medians of runs that are drawn again from both.
fn confidence(a: &Series, b: &Series, ratio: impl Fn(&Series, &Series) -> f64) -> (f64, f64) {
    // A fixed seed: the same runs have the same range. (xorshift, after Marsaglia.)
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut below = |bound: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        usize::try_from(state % bound as u64).unwrap_or(0)
    };
    let mut draw =
        |from: &Series| Series((0..from.0.len()).map(|_| from.0[below(from.0.len())]).collect());
    let ratios = Series((0..DRAWS).map(|_| ratio(&draw(a), &draw(b))).collect());
    (ratios.quantile(0.025), ratios.quantile(0.975))
}

fn git(arguments: &[&str]) -> Result<String, String> {
    let output = Process::new("git").args(arguments).stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("git could not be started: {error}"))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    } else {
        let said = String::from_utf8_lossy(&output.stderr);
        Err(format!("git {}: {}", arguments.join(" "), said.trim()))
    }
}

fn resolve(revision: &str) -> Result<String, String> {
    let commit = format!("{revision}^{{commit}}");
    git(&["rev-parse", "--verify", "--quiet", "--end-of-options", &commit]).map_err(|_| {
        format!("unknown revision `{revision}`: name a commit, tag or branch that git knows here")
    })
}

/// Builds a commit, unless that was done before. Returns its `bps-perf`.
fn build(commit: &str) -> Result<PathBuf, String> {
    let root = PathBuf::from(git(&["rev-parse", "--show-toplevel"])?);
    let folder = root.join("target/ab").join(&commit[..12]);
    let (tree, target) = (folder.join("tree"), folder.join("target"));
    let program = target.join("release/bps-perf");
    if program.exists() {
        return Ok(program);
    }
    if !tree.exists() {
        // A worktree whose folder was removed by hand is still in git's list.
        git(&["worktree", "prune"])?;
        let path = tree.to_string_lossy().into_owned();
        git(&["worktree", "add", "--detach", &path, commit])?;
    }
    eprintln!("building {commit:.12} in {}", folder.display());
    let status = Process::new("cargo")
        .args(["build", "--release", "--package", "bps-perf", "--target-dir"])
        .arg(&target)
        .current_dir(&tree)
        .stdin(Stdio::null())
        .status()
        .map_err(|error| format!("cargo could not be started: {error}"))?;
    if !status.success() || !program.exists() {
        return Err(format!("{commit:.12} does not build ({status}); see above"));
    }
    Ok(program)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_told_from_noise() {
        let ratio = |a: &Series, b: &Series| b.median() / a.median();
        let noise = Series((0..20).map(|n| 1.0 + f64::from(n % 5) / 100.0).collect());
        let (low, high) = confidence(&noise, &noise, ratio);
        assert!(low <= 1.0 && 1.0 <= high && high - low < 0.1, "{low} to {high}");
        let faster = Series(noise.0.iter().map(|value| value * 1.5).collect());
        let (low, high) = confidence(&noise, &faster, ratio);
        assert!(low > 1.4 && high < 1.6, "{low} to {high}");
    }

    #[test]
    fn an_unknown_revision_says_so() {
        let error = resolve("no-such-revision").unwrap_err();
        assert!(error.contains("`no-such-revision`"), "{error}");
    }
}
