//! `bpslaunch`: the processes of one machine, from `DMLC_*` variables as BytePS has them, a whole
//! job on this machine with `--local`, or one on several with `--hosts`.
//!
//! On several machines the same supervisor decides for all processes. `--hosts` starts an agent on
//! each machine, over ssh or as a child, which is `bpslaunch` itself and starts, ends and hears the
//! processes there.
//!
//! Nothing outlives the launcher, however it ends: every process leads a group of its own, dies
//! with the thread that started it, and is known to a guardian that outlives the launcher by the
//! moment that it takes to kill every group. While the launcher runs, no process is reaped, so that
//! no group can belong to anybody else.

use crate::error::LaunchError;
use crate::fleet::Fleet;
use crate::output::say;
use crate::plan::LaunchPlan;
use bps_engine::config::{Loaded, Program, open};
use std::ffi::OsString;
use std::io::Write;

mod agent;
mod binding;
mod by_variables;
mod child;
mod children;
mod crew;
mod discovery;
mod error;
mod fleet;
mod frames;
mod hosts;
mod layout;
mod local;
mod meeting;
mod output;
mod plan;
mod port;
mod remote;
mod screen;
mod several;
mod share;
mod signals;
mod ssh;
mod streams;
mod supervise;

pub use plan::Programs;

/// Runs the launcher with these arguments (without its own name), and returns the code to leave
/// with.
///
/// The calling thread must live until this returns: the processes die with it. Signal handlers for
/// `SIGINT`, `SIGTERM`, `SIGHUP` and `SIGCHLD` are in place meanwhile.
pub fn cli(arguments: impl IntoIterator<Item = OsString>, programs: Programs) -> i32 {
    let loaded = match open(Program::Launcher, arguments) {
        Ok(loaded) => loaded,
        Err(code) => return code,
    };
    let launch = &loaded.config.launch;
    let several = launch.hosts.is_some()
        || launch.hostfile.is_some()
        || launch.server_hosts.is_some()
        || launch.scheduler_host.is_some()
        || launch.discovery.is_some();
    let run = |plan: LaunchPlan| {
        if !loaded.config.launch.dry_run {
            // What it needs to know of a job is known where all of it is here.
            let is_whole = launch.local > 0 && Fleet::is_wanted(&loaded.config);
            let fleet = is_whole.then(|| Fleet::new(&loaded.config, None));
            return supervise::run(&plan, fleet);
        }
        // A reader that has gone away is no failure.
        let _ = std::io::stdout().write_all(plan.to_string().as_bytes());
        Ok(0)
    };
    let result = if launch.agent {
        agent::run(launch, &programs)
    } else if several {
        several::run(&loaded, &programs)
    } else {
        plan_of(&loaded, &programs).and_then(run)
    };
    result.unwrap_or_else(|error| {
        say(&format!("error: {error}"));
        error.code()
    })
}

/// Stand-alone with `--local`, otherwise by variables.
fn plan_of(loaded: &Loaded, programs: &Programs) -> Result<LaunchPlan, LaunchError> {
    if loaded.config.launch.local > 0 {
        local::plan(loaded, programs)
    } else {
        by_variables::plan(loaded, programs)
    }
}
