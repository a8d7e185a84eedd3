//! `bpslaunch`: the processes of one machine, from `DMLC_*` variables as BytePS has them, or a
//! whole job on this machine with `--local`.
//!
//! Nothing outlives the launcher, however it ends: every process leads a group of its own, dies
//! with the thread that started it, and is known to a guardian that outlives the launcher by the
//! moment that it takes to kill every group. While the launcher runs, no process is reaped, so that
//! no group can belong to anybody else.

use crate::error::LaunchError;
use crate::output::say;
use crate::plan::Plan;
use bps_engine::config::{Loaded, Program, open};
use std::ffi::OsString;
use std::io::Write;

mod binding;
mod by_variables;
mod child;
mod children;
mod crew;
mod error;
mod local;
mod output;
mod plan;
mod port;
mod screen;
mod signals;
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
    let run = |plan: Plan| {
        if !loaded.config.launch.dry_run {
            return supervise::run(plan);
        }
        // A reader that has gone away is no failure.
        let _ = std::io::stdout().write_all(plan.to_string().as_bytes());
        Ok(0)
    };
    let result = plan_of(&loaded, &programs).and_then(run);
    result.unwrap_or_else(|error| {
        say(&format!("error: {error}"));
        error.code()
    })
}

/// Stand-alone with `--local`, otherwise by variables.
fn plan_of(loaded: &Loaded, programs: &Programs) -> Result<Plan, LaunchError> {
    if loaded.config.launch.local > 0 {
        local::plan(loaded, programs)
    } else {
        by_variables::plan(loaded, programs)
    }
}
