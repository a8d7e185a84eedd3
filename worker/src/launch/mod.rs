//! `bpslaunch`: the processes of one machine, from `DMLC_*` variables as BytePS has them, or a
//! whole job on this machine with `--local`.
//!
//! Nothing outlives the launcher, however it ends: every process leads a group of its own, dies
//! with the thread that started it, and is known to a guardian that outlives the launcher by the
//! moment that it takes to kill every group. While the launcher runs, no process is reaped, so that
//! no group can belong to anybody else.

use crate::launch::plan::Plan;
use bps_engine::config::{Program, open};
use std::ffi::OsString;
use std::io::Write;

mod binding;
mod by_variables;
mod child;
mod local;
mod output;
mod plan;
mod signals;
mod streams;
mod supervise;

/// The commands that start the roles which are not the user's.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Programs {
    /// Starts the scheduler.
    pub scheduler: Vec<String>,
    /// Starts a server.
    pub server: Vec<String>,
}

impl Programs {
    /// `bps-scheduler` and `bps-server` in the folder of the running program; where that cannot be
    /// known, those on the path.
    #[must_use]
    pub fn beside_this_one() -> Programs {
        let folder = std::env::current_exe()
            .ok()
            .and_then(|path| path.parent().map(std::path::Path::to_path_buf))
            .unwrap_or_default();
        let beside = |name: &str| vec![folder.join(name).to_string_lossy().into_owned()];
        Programs { scheduler: beside("bps-scheduler"), server: beside("bps-server") }
    }
}

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
    let result = Plan::new(&loaded, &programs).and_then(run);
    result.unwrap_or_else(|error| {
        say(&format!("error: {error}"));
        error.code()
    })
}

/// One line from the launcher itself. That nobody may read it is no reason to stop.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "bpslaunch: {text}");
}
