//! A job of the Python package on this machine, whose script measures and prints its results as
//! JSON.
//!
//! Invariant: all processes of the job run on the same few CPUs, which they inherit from here.

#![forbid(unsafe_code)]

use crate::arguments::{self, number};
use crate::report::{self, Fields};
use crate::sample;
use bps_engine::topo::pin::affinity;
use clap::{Arg, ArgMatches};
use rustix::thread::{CpuSet, sched_setaffinity};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Command as Process, Stdio};

/// The arguments of every command that starts one.
pub fn arguments() -> [Arg; 3] {
    [
        number("workers", "2", "Ranks"),
        number("cpus", "2", "CPUs that all processes share, at most"),
        Arg::new("environment")
            .long("environment")
            .value_name("PATH")
            .help("Virtual environment with this package and torch")
            .default_value(".venv"),
    ]
}

/// A job that can be started.
pub struct Job {
    launcher: PathBuf,
    python: PathBuf,
    script: &'static str,
    workers: u32,
    /// How many CPUs all its processes share.
    pub cpus: usize,
}

impl Job {
    /// The job of a script below the current directory. Takes the CPUs of this process away.
    ///
    /// # Errors
    /// The environment or the script is not there, or the CPUs can't be had.
    pub fn new(matches: &ArgMatches, script: &'static str) -> Result<Job, Box<dyn Error>> {
        let folder = PathBuf::from(arguments::text(matches, "environment")).join("bin");
        let (launcher, python) = (folder.join("bpslaunch"), folder.join("python"));
        for path in [&launcher, &python] {
            if !path.exists() {
                let message = format!(
                    "skipped: {} is not there: run python/environment in the repository's root, \
                     and this command from there",
                    path.display()
                );
                return Err(message.into());
            }
        }
        if !Path::new(script).exists() {
            return Err(format!("{script} is not below here: run this in the repository").into());
        }
        let cpus = share_cpus(arguments::integer(matches, "cpus") as usize)?;
        let workers = arguments::integer(matches, "workers");
        Ok(Job { launcher, python, script, workers, cpus })
    }

    /// Whether the environment has this Python module.
    ///
    /// # Errors
    /// Its Python does not start.
    pub fn has_module(&self, name: &str) -> Result<bool, Box<dyn Error>> {
        let mut python = Process::new(&self.python);
        python.args([
            "-c",
            "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)",
        ]);
        python.arg(name).stdin(Stdio::null());
        Ok(python.output()?.status.success())
    }

    /// Runs it with these words for the launcher, variables, and words for the script; returns the
    /// results that it printed.
    ///
    /// # Errors
    /// It failed; what it said.
    pub fn results(
        &self,
        servers: &[&str],
        variables: &[(&str, &str)],
        words: &[String],
    ) -> Result<Vec<Fields>, Box<dyn Error>> {
        let mut job = Process::new(&self.launcher);
        job.args(["--local", &self.workers.to_string()]).args(servers);
        job.arg(&self.python).args([self.script, "--json"]).args(words);
        job.envs(variables.iter().copied()).stdin(Stdio::null());
        let output = job.output()?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            return Err(format!("the job failed ({}): {said}", output.status).into());
        }
        let printed = String::from_utf8_lossy(&output.stdout);
        // The launcher marks lines with the rank that printed them.
        let objects = printed.lines().filter_map(|line| line.find('{').map(|at| &line[at..]));
        objects.map(|object| Ok(report::fields(serde_json::from_str(object)?))).collect()
    }
}

/// Gives this process and its children the first CPUs of those that it may use.
fn share_cpus(most: usize) -> Result<usize, Box<dyn Error>> {
    let allowed = affinity()?;
    let mut set = CpuSet::new();
    let count = most.min(allowed.len()).min(sample::cpus());
    allowed.iter().take(count).for_each(|&cpu| set.set(cpu));
    sched_setaffinity(None, &set)?;
    Ok(count)
}
